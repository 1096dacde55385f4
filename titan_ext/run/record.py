# SPDX-License-Identifier: BSD-3-Clause
"""Files that a run leaves in its folder: its config, where that comes from, and its record.

Rank 0 writes ``config.toml``, which starts the same run again, and ``run.json``, with one entry for
each start. At the end the log and that entry say what titan_ext saved, beside what stock TorchTitan
would have needed. Both come from FSDP's plan and from what was counted, without a second run.
Nothing here can fail a run.
"""

import contextlib
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

import titan_ext
from titan_ext.activation_checkpoint import memory_report_of
from titan_ext.base.messages import format_bytes
from titan_ext.base.run_check import RunCheck
from titan_ext.base.run_folder import RECORD
from titan_ext.toml.values import dump

CONFIG = "config.toml"
_PACKAGES = ("titan_ext", "torchtitan", "torch", "torchao", "triton")


class RunRecord(RunCheck):
    """Writes the record of this start; at the end of training, its ending and the gains."""

    def __init__(self) -> None:
        self._entry: dict[str, Any] = {}

    def after_build(self, trainer: Any) -> None:
        if dist.get_rank() != 0:
            return
        with _never_fails():
            self._entry = origin()
            self._write(trainer)
            (Path(trainer.config.dump_folder) / CONFIG).write_text(dump(trainer.config))

    @contextlib.contextmanager
    def around_run(self, trainer: Any) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._end(trainer, f"{type(error).__name__}: {error}"[:500])
            raise
        is_done = trainer.step >= trainer.config.training.steps
        is_done |= getattr(trainer, "data_ended", False)
        self._end(trainer, "finished" if is_done else "stopped")

    def _end(self, trainer: Any, ending: str) -> None:
        if not self._entry:
            return
        with _never_fails():
            self._entry |= {"ended": _now(), "ending": ending, "step": trainer.step}
            self._write(trainer)
            lines = gains(trainer) + [line for check in trainer.checks for line in check.summary()]
            self._entry["gained"] = lines
            self._entry["receipts"] = {
                k: v for c in trainer.checks for k, v in c.receipts().items()
            }
            self._write(trainer)
            if lines:
                logger.info("\n  ".join(["This run, on this rank:", *lines]))

    def _write(self, trainer: Any) -> None:
        path = Path(trainer.config.dump_folder) / RECORD
        starts = []
        try:
            starts = json.loads(path.read_text())["starts"] if path.exists() else []
        except (ValueError, KeyError, TypeError) as error:  # an older release wrote it in place
            aside = path.with_name(f"{RECORD}.broken")
            path.replace(aside)
            logger.warning(f"{path} cannot be read ({error}); it is {aside.name} now.")
        others = [start for start in starts if start["id"] != self._entry["id"]]
        # A kill in the middle leaves the file as it was.
        partial = path.with_name(f"{RECORD}.part")
        partial.write_text(json.dumps({"starts": [*others, self._entry]}, indent=1) + "\n")
        partial.replace(path)


def origin() -> dict[str, Any]:
    """Command line, commit, versions and machine of this process."""
    return {
        "id": f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}",
        "started": _now(),
        "command": shlex.join([*sys.orig_argv]),
        "folder": str(Path.cwd()),
        "commit": {
            name: commit
            for name, at in (("titan_ext", Path(titan_ext.__file__).parent), (".", Path.cwd()))
            if (commit := _commit(at))
        },
        "versions": {"python": platform.python_version()} | versions(),
        "host": socket.gethostname(),
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
    }


def versions() -> dict[str, str]:
    """The versions of the packages that a run depends on, by name."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _commit(folder: Path) -> str:
    """The commit checked out in ``folder``, with "-dirty" if files differ; "" outside of git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def gains(trainer: Any) -> list[str]:
    """A line on what activation checkpointing keeps on this rank; none where that is not known."""
    rows = memory_report_of(trainer.model_parts).rows()
    if not rows:
        return []
    kept, exact, host = (
        sum(getattr(row, f) for row in rows) for f in ("nbytes", "original_nbytes", "host_nbytes")
    )
    on_host = f" on the device, {format_bytes(host)} on the host" if host else ""
    return [
        f"activations kept for backward: {format_bytes(kept)}{on_host} a forward; not compressed: "
        f"{format_bytes(exact)} ({kept / exact:.2f})"
    ]


@contextlib.contextmanager
def _never_fails() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.warning(f"the record of the run is not complete: {type(error).__name__}: {error}")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
