# SPDX-License-Identifier: BSD-3-Clause
"""Calls of a function in processes forked from this one, several at a time.

A process can plan one layout (Titan sets up groups once), and a new one needs 4 CPU seconds to
import torch and Titan. A fork has them. It is safe as long as this process has run no threads:
nothing here starts any, and ``concurrent.futures`` and ``multiprocessing.Pool`` do.

What needs several calls, one after the other, is a generator that yields lists of arguments and
gets lists of results (``run``).
"""

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

Steps = Generator[Sequence[Any], list[Any], Any]
"""Yields arguments of calls that may run at once, gets their results, and returns what it found."""
_TICK_S = 0.2


class FailedError(ValueError):
    """A call raised an error that a user can understand; this is its message."""


@dataclass(eq=False)
class _Task:
    steps: Steps
    index: int
    results: list[Any] = field(default_factory=list)
    missing: int = 0


@dataclass
class Forks:
    """Calls ``function``, in at most ``processes`` processes at once.

    Attributes:
        function: Its results are pickled. A ValueError of it, and what else a start raises on
            purpose, becomes a ``FailedError`` among the results.
        processes: Cores, as a rule.
        tick: Called a few times a second while calls run.
        called, planned: How many calls have ended, and were asked for so far.
    """

    function: Callable[..., Any]
    processes: int
    tick: Callable[[], None] = lambda: None
    called: int = 0
    planned: int = 0

    def run(self, everything: Iterable[Steps]) -> list[Any]:
        """What the generators return, in their order; calls of all of them run side by side."""
        context = multiprocessing.get_context("fork")
        tasks = [_Task(steps, index) for index, steps in enumerate(everything)]
        found: list[Any] = [None] * len(tasks)
        waiting: deque[tuple[_Task, int, Any]] = deque()
        running: dict[Connection, tuple[Any, _Task, int]] = {}

        def advance(task: _Task, results: list[Any] | None) -> None:
            try:
                calls = next(task.steps) if results is None else task.steps.send(results)
            except StopIteration as end:
                found[task.index] = end.value
                return
            task.results, task.missing = [None] * len(calls), len(calls)
            self.planned += len(calls)
            waiting.extend((task, place, call) for place, call in enumerate(calls))

        try:
            for task in tasks:
                advance(task, None)
            while waiting or running:
                while waiting and len(running) < self.processes:
                    task, place, call = waiting.popleft()
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(target=_call, args=(sender, self.function, call))
                    process.start()
                    sender.close()
                    running[receiver] = process, task, place
                for receiver in wait(list(running), timeout=_TICK_S):
                    assert isinstance(receiver, Connection)
                    process, task, place = running.pop(receiver)
                    task.results[place] = _received(receiver)
                    process.join()
                    self.called += 1
                    task.missing -= 1
                    if not task.missing:
                        advance(task, task.results)
                self.tick()
        finally:
            for process, *_ in running.values():
                process.kill()
                process.join()
        return found


def _received(receiver: Connection) -> Any:
    try:
        return receiver.recv()
    except EOFError:
        return FailedError("its process ended without a result; is the machine out of memory?")
    finally:
        receiver.close()


def _call(sender: Connection, function: Callable[..., Any], call: Any) -> None:
    """In the fork: what it prints goes nowhere, and no exit handler of the parent runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    try:
        result = function(*call)
    except (ValueError, AssertionError, NotImplementedError, RuntimeError, ImportError) as error:
        result = FailedError(str(error) or type(error).__name__)
    with contextlib.suppress(BrokenPipeError):
        sender.send(result)
    os._exit(0)
