# SPDX-License-Identifier: BSD-3-Clause
"""Processes of a small job: forks of this one, which train arm after arm over one gloo group.

A fork has what this process has imported, and the job's config with it. That is safe as long as
this process has run no threads: it builds models on the meta device only, and nothing backward.
The meshes of a layout are made once, so all arms of one set of ranks have the same degrees.
"""

import contextlib
import gc
import multiprocessing
import os
import secrets
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_PORTS = range(12_000, 32_000)  # below those that Linux gives to whoever connects
_PATIENCE_S = 600.0
"""A step of the small job takes a second; what takes this long hangs."""


class RunError(ValueError):
    """A process raised, died or hung; the message names it, and has the end of its log."""


class Processes:
    """Forks of this process that call ``serve`` with what they are sent. A ``with`` ends them.

    Args:
        count: Number of processes.
        serve: Called with the rank and what was sent; its results are pickled.
        folder: Of their logs.
    """

    def __init__(self, count: int, serve: Callable[[int, Any], Any], folder: Path) -> None:
        self.folder = folder
        port = _free_port()
        context = multiprocessing.get_context("fork")
        self._lines: list[Connection] = []
        self._processes = []
        for rank in range(count):
            line, theirs = context.Pipe()
            arguments = rank, count, port, serve, theirs, [*self._lines, line], self._log(rank)
            process = context.Process(target=_loop, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._lines.append(line)
            self._processes.append(process)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
        for process, line in zip(self._processes, self._lines, strict=True):
            process.join()
            line.close()

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def call(self, argument: Any) -> list[Any]:
        """``serve`` of all processes at once; their results by rank.

        Raises:
            RunError: for the first that fails; the processes are of no use after that.
        """
        for line in self._lines:
            with contextlib.suppress(BrokenPipeError):  # it died: its line has ended
                line.send(argument)
        results: dict[int, Any] = {}
        ends = time.monotonic() + _PATIENCE_S
        while len(results) < len(self._lines):
            missing = {line: r for r, line in enumerate(self._lines) if r not in results}
            ready = wait(list(missing), timeout=max(ends - time.monotonic(), 0))
            if not ready:
                raise RunError(
                    f"rank {min(missing.values())} did not answer for {_PATIENCE_S:.0f} s"
                )
            for line in ready:
                rank = missing[line]  # type: ignore[index]
                try:
                    is_good, result = line.recv()  # type: ignore[union-attr]
                except EOFError:
                    is_good, result = False, f"it died{self._tail(rank)}"
                if not is_good:
                    raise RunError(f"rank {rank}: {result}")
                results[rank] = result
        return [results[rank] for rank in range(len(self._lines))]

    def _tail(self, rank: int) -> str:
        lines = self._log(rank).read_text(errors="replace").splitlines()
        return f"; its log ends with: {lines[-1]}" if lines else "; is the machine out of memory?"


def _loop(
    rank: int,
    count: int,
    port: int,
    serve: Callable[[int, Any], Any],
    line: Connection,
    others: list[Connection],
    log: Path,
) -> None:
    for other in others:
        other.close()  # or the end of the parent would not end this
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    gc.freeze()  # imports, which take long to walk
    gc.enable()
    for call in _calls(line):
        try:
            result = True, serve(rank, call)
        except BaseException as error:
            traceback.print_exc()
            result = False, f"{type(error).__name__}: {error}"
        line.send(result)
        gc.collect()  # models are cycles
    os._exit(0)  # without an interpreter's shutdown, which waits for gloo's threads


def _calls(line: Connection) -> Iterator[Any]:
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            yield line.recv()


def _free_port() -> int:
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
