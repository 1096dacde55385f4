# SPDX-License-Identifier: BSD-3-Clause
"""Processes of a small job: forks of this one, which train arm after arm over one gloo group.

A fork has what this process has imported, and the job's config with it. That is safe as long as
this process has run no threads: it builds models on the meta device only, and nothing backward.
The meshes of a layout are made once, so all arms of one set of ranks have the same degrees.
"""

import contextlib
import functools
import gc
import os
import secrets
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from titan_ext.plan.forks import start_fork

_PORTS = range(12_000, 32_000)  # below those that Linux gives to whoever connects
_PATIENCE_S = 600.0
"""A step of the small job takes a second; what takes this long hangs."""


class RunError(ValueError):
    """A process raised, died or hung; the message names it, and has the end of its log."""


class Processes:
    """Forks of this process that call ``serve`` with what they are sent. A ``with`` ends them.

    ``serve`` gets the rank, too; its results are pickled. It has one thread. Logs go to ``folder``,
    which is made. What takes longer than ``patience_s`` hangs. ``daemon`` is as ``start_fork``
    takes it.
    """

    def __init__(
        self,
        count: int,
        serve: Callable[[int, Any], Any],
        folder: Path,
        *,
        patience_s: float = _PATIENCE_S,
        daemon: bool = True,
    ) -> None:
        self.folder, self._patience_s = folder, patience_s
        self._processes: list[BaseProcess] = []
        self._lines: list[Connection] = []
        folder.mkdir(parents=True, exist_ok=True)
        names = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        for rank in range(count):
            environment = {**names, "RANK": rank, "LOCAL_RANK": rank}
            answer = functools.partial(_answer, serve, rank, environment)
            process, line = start_fork(answer, self._lines, self._log(rank), daemon=daemon)
            self._processes.append(process)
            self._lines.append(line)

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

        Raises RunError for the first that fails; the processes are of no use after that.
        """
        for line in self._lines:
            with contextlib.suppress(BrokenPipeError):  # it died: its line has ended
                line.send(argument)
        results: dict[int, Any] = {}
        ends = time.monotonic() + self._patience_s
        while len(results) < len(self._lines):
            missing = {line: r for r, line in enumerate(self._lines) if r not in results}
            ready = wait(list(missing), timeout=max(ends - time.monotonic(), 0))
            if not ready:
                raise RunError(
                    f"rank {min(missing.values())} did not answer for {self._patience_s:.0f} s"
                )
            for line in ready:
                rank = missing[line]  # type: ignore[index]
                try:
                    is_good, result = line.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):  # reset: it had not read its call
                    is_good, result = False, f"it died{self._tail(rank)}"
                if not is_good:
                    raise RunError(f"rank {rank}: {result}")
                results[rank] = result
        return [results[rank] for rank in range(len(self._lines))]

    def _tail(self, rank: int) -> str:
        lines = self._log(rank).read_text(errors="replace").splitlines()
        return f"; its log ends with: {lines[-1]}" if lines else "; is the machine out of memory?"


def _answer(
    serve: Callable[[int, Any], Any], rank: int, environment: dict[str, Any], call: Any
) -> tuple[bool, Any]:
    os.environ.update({name: str(value) for name, value in environment.items()})
    gc.enable()  # the parent has switched it off
    torch.set_num_threads(1)
    try:
        return True, serve(rank, call)
    except BaseException as error:
        traceback.print_exc()
        return False, f"{type(error).__name__}: {error}"


def free_port() -> int:
    """A port that is free, and not of those that the kernel gives to whoever connects next.

    It is bound seconds later, by a process that starts first.
    """
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
