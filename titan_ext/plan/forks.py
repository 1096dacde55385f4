# SPDX-License-Identifier: BSD-3-Clause
"""Calls of a function in processes forked from this one, several at a time.

A new process needs 4 CPU seconds to import torch and Titan; a fork has them. It is safe as long as
this process has run no threads: nothing here starts any, and ``concurrent.futures`` and
``multiprocessing.Pool`` do. A fork makes one call after another as long as they are ``alike``: the
caches of fake tensors and of DTensor, cold, are half of a plan's time. Groups of processes are set
up once, so that a plan with other degrees needs another fork.

What needs several calls, one after the other, is a generator that yields lists of arguments and
gets lists of results (``run``).
"""

import contextlib
import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

Steps = Generator[Sequence[Any], list[Any], Any]
"""Yields arguments of calls that may run at once, gets their results, and returns what it found."""
_TICK_S = 0.2
_ON_PURPOSE = ValueError, AssertionError, NotImplementedError, RuntimeError, ImportError


class FailedError(ValueError):
    """A call raised an error that a user can understand; this is its message."""


@dataclass(eq=False)
class _Task:
    steps: Steps
    index: int
    results: list[Any] = field(default_factory=list)
    missing: int = 0


@dataclass(frozen=True)
class _Fork:
    process: BaseProcess
    line: Connection
    alike: Hashable

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.line.close()


@dataclass
class Forks:
    """Calls ``function``, in at most ``processes`` processes at once. A ``with`` ends them.

    Attributes:
        function: Its results are pickled. A ValueError of it, and what else a start raises on
            purpose, becomes a ``FailedError`` among the results.
        processes: Cores, as a rule.
        alike: What calls of one process have in common, from the arguments of a call.
        tick: Called a few times a second while calls run.
        called, planned: How many calls have ended, and were asked for so far.
    """

    function: Callable[..., Any]
    processes: int
    alike: Callable[..., Hashable] = lambda *call: None
    tick: Callable[[], None] = lambda: None
    called: int = 0
    planned: int = 0
    _idle: list[_Fork] = field(default_factory=list)

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *error: object) -> None:
        while self._idle:
            self._idle.pop().end()

    def run(self, everything: Iterable[Steps]) -> list[Any]:
        """What the generators return, in their order; calls of all of them run side by side."""
        tasks = [_Task(steps, index) for index, steps in enumerate(everything)]
        found: list[Any] = [None] * len(tasks)
        waiting: deque[tuple[_Task, int, Any]] = deque()
        running: dict[Connection, tuple[_Fork, _Task, int]] = {}

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
                    fork, (task, place, call) = self._next(waiting, len(running))
                    running[fork.line] = fork, task, place
                    with contextlib.suppress(BrokenPipeError):  # it died: its line has ended
                        fork.line.send(call)
                for line in wait(list(running), timeout=_TICK_S):
                    assert isinstance(line, Connection)
                    fork, task, place = running.pop(line)
                    task.results[place] = result = _received(line)
                    if isinstance(result, FailedError):  # who knows what it left behind
                        fork.end()
                    else:
                        self._idle.append(fork)
                    self.called += 1
                    task.missing -= 1
                    if not task.missing:
                        advance(task, task.results)
                self.tick()
        finally:
            for fork, *_ in running.values():
                fork.end()
        return found

    def _next(self, waiting: deque[Any], running: int) -> tuple[_Fork, Any]:
        """A call that waits, and the fork that makes it: one that made such calls, or a new one."""
        for fork in self._idle:
            for one in waiting:
                if self.alike(*one[-1]) == fork.alike:
                    self._idle.remove(fork)
                    waiting.remove(one)
                    return fork, one
        if running + len(self._idle) == self.processes:
            self._idle.pop(0).end()
        one = waiting.popleft()
        context = multiprocessing.get_context("fork")
        line, its_line = context.Pipe()
        process = context.Process(target=_serve, args=(its_line, line, self.function), daemon=True)
        process.start()
        its_line.close()
        return _Fork(process, line, self.alike(*one[-1])), one


def _received(line: Connection) -> Any:
    try:
        return line.recv()
    except EOFError:
        return FailedError("its process ended without a result; is the machine out of memory?")


def _serve(line: Connection, other: Connection, function: Callable[..., Any]) -> None:
    """In the fork: what it prints goes nowhere, and no exit handler of the parent runs."""
    other.close()  # or the end of the parent would not end this
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            gc.freeze()  # what lives is kept: imports and caches, which take long to walk
            call = line.recv()
            try:
                result = function(*call)
            except _ON_PURPOSE as error:
                result = FailedError(str(error) or type(error).__name__)
            line.send(result)
            gc.collect()  # models are cycles, and the parent may have switched this off
    os._exit(0)
