# SPDX-License-Identifier: BSD-3-Clause
"""Calls of a function in processes forked from this one, several at a time.

A new process needs 4 CPU seconds to import torch and Titan; a fork has them. It is safe as long as
this process has run no threads: nothing here starts any, and ``concurrent.futures`` and
``multiprocessing.Pool`` do. A fork makes one call after another as long as they are ``alike``: the
caches of fake tensors and of DTensor, cold, are half of a plan's time. Groups of processes are set
up once, so that a plan with other degrees needs another fork.
"""

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

_ON_PURPOSE = ValueError, AssertionError, NotImplementedError, RuntimeError, ImportError


class FailedError(ValueError):
    """A call raised an error that a user can understand; this is its message."""


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
    """Calls ``function``, in at most ``processes`` processes at once. A ``with`` ends them."""

    function: Callable[..., Any]
    """Its results are pickled. A ValueError of it, and what else a start raises on purpose, becomes
    a ``FailedError`` among the results."""
    processes: int
    """Cores, as a rule."""
    alike: Callable[..., Hashable] = lambda *call: None
    """What calls of one process have in common, from the arguments of a call."""
    called: int = 0
    planned: int = 0
    """How many calls have ended, and were asked for so far."""
    _idle: list[_Fork] = field(default_factory=list)
    _running: dict[Connection, tuple[_Fork, int]] = field(default_factory=dict)

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *error: object) -> None:
        for fork in (*self._idle, *(fork for fork, _ in self._running.values())):
            fork.end()
        self._idle.clear()
        self._running.clear()

    def run(self, calls: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Any]]:
        """The results of calls as they come, each with the place of its call."""
        waiting = dict(enumerate(calls))
        self.planned += len(calls)
        while waiting or self._running:
            while waiting and len(self._running) < self.processes:
                fork, at = self._next(waiting)
                self._running[fork.line] = fork, at
                with contextlib.suppress(BrokenPipeError):  # it died: its line has ended
                    fork.line.send(waiting.pop(at))
            for line in wait(list(self._running)):
                assert isinstance(line, Connection)
                fork, at = self._running.pop(line)
                result = _received(line)
                if isinstance(result, FailedError):  # who knows what it left behind
                    fork.end()
                else:
                    self._idle.append(fork)
                self.called += 1
                yield at, result

    def _next(self, waiting: dict[int, Sequence[Any]]) -> tuple[_Fork, int]:
        """A call that waits, and the fork that makes it: one that made such calls, or a new one."""
        for fork in self._idle:
            for at, call in waiting.items():
                if self.alike(*call) == fork.alike:
                    self._idle.remove(fork)
                    return fork, at
        if len(self._running) + len(self._idle) == self.processes:
            self._idle.pop(0).end()
        at, call = next(iter(waiting.items()))
        process, line = start_fork(functools.partial(_called, self.function))
        return _Fork(process, line, self.alike(*call)), at


def _received(line: Connection) -> Any:
    try:
        return line.recv()
    except (EOFError, ConnectionError):  # reset: it had not read its call
        return FailedError("its process ended without a result; is the machine out of memory?")


def _called(function: Callable[..., Any], call: Sequence[Any]) -> Any:
    try:
        return function(*call)
    except _ON_PURPOSE as error:
        return FailedError(str(error) or type(error).__name__)


def start_fork(
    answer: Callable[[Any], Any],
    others: Sequence[Connection] = (),
    output: str | os.PathLike[str] = os.devnull,
    *,
    daemon: bool = True,
) -> tuple[BaseProcess, Connection]:
    """A fork of this process, and the line on which it answers what it is sent, one by one.

    Args:
        answer: Called in the fork with what was sent; its result is pickled.
        others: Lines of this process to other forks, which the fork closes: it would keep them open
            after the end of this process.
        output: File for what it prints.
        daemon: Without processes of its own, which a data loader with workers has.
    """
    context = multiprocessing.get_context("fork")
    line, its_line = context.Pipe()
    arguments = its_line, [*others, line], answer, output
    process = context.Process(target=_serve, args=arguments, daemon=daemon)
    process.start()
    its_line.close()
    return process, line


def _serve(
    line: Connection,
    others: Sequence[Connection],
    answer: Callable[[Any], Any],
    output: str | os.PathLike[str],
) -> None:
    """Loop of a fork: no exit handler of the parent runs, and none of gloo's threads is joined."""
    for other in others:
        other.close()  # or the end of the parent would not end this
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            gc.freeze()  # what lives is kept: imports and caches, which take long to walk
            line.send(answer(line.recv()))
            gc.collect()  # models are cycles, and the parent may have switched this off
    os._exit(0)
