# SPDX-License-Identifier: BSD-3-Clause
"""The run's folder: writable, with room on its disk, and of one run at a time.

Two runs in one folder overwrite each other's checkpoints. Rank 0 holds a lock on ``run.lock`` as
long as its process lives. After any death the kernel, or the server of a shared file system, gives
it back. It is a POSIX lock, because NFS and Lustre have those. A forked child, such as a worker of
the data loader, does not keep it.
"""

import errno
import fcntl
import functools
import logging
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from torchtitan.observability.structured_logger.jsonl_handler import TraceJsonlHandler
from torchtitan.tools.logging import logger

from titan_ext.guards import RunCheck

LOCK = "run.lock"
_PROBE_NBYTES = 2**20
_HELD_ELSEWHERE = (errno.EACCES, errno.EAGAIN)
_held: dict[Path, IO[str]] = {}
"""Locks of this process. Closing any file of the name would give its lock back."""


class Folder(RunCheck):
    """Checks that ``dump_folder`` can be written, and locks it."""

    def before_start(self, config: Any) -> None:
        check_folder(config.dump_folder)
        if os.environ.get("RANK", "0") == "0":
            lock_folder(config.dump_folder)


@functools.cache  # by Titan's structured log, and again before the start
def check_folder(folder: str) -> None:
    """Raise ValueError for a folder where this rank cannot write, or whose disk is full."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_NBYTES))
    except OSError as error:
        free = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = f" {shutil.disk_usage(folder).free / 2**20:.1f} MiB are free on its disk."
        raise ValueError(
            f"dump_folder is {folder!r}, where this rank cannot write: {error}.{free}"
        ) from error


def lock_folder(folder: str) -> None:
    """Lock the folder for this process, until it ends.

    Raises ValueError naming host and process of the run that has it.
    """
    path = Path(folder).resolve() / LOCK
    if path in _held:
        return
    file = path.open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        if error.errno in _HELD_ELSEWHERE:
            raise ValueError(
                f"dump_folder is {folder!r}, where another run trains ({owner}). Stop that run, or "
                "give this one another dump_folder."
            ) from None
        logger.warning(f"{path} cannot be locked ({error}): another run could write there too.")
        return
    file.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"host {socket.gethostname()}, process {os.getpid()}, since {since}\n")
    file.flush()
    _held[path] = file


class _Handler(TraceJsonlHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Give up after one line: Python prints a traceback for each of thousands of records."""
        logging.getLogger(record.name).removeHandler(self)
        logger.warning(f"{self.baseFilename} cannot be written; structured logging ends here.")


def register_handler(
    *, structured_logger: logging.Logger, rank: int, source: str, output_dir: str, **_: Any
) -> None:
    """Titan's structured log, which opens before any check of ours runs.

    Titan calls this, as ``TITAN_STRUCT_LOGGER_HANDLERS`` tells it (``config_registry``). Where the
    folder cannot be written there is no such log, and ``Folder`` says why.
    """
    try:
        check_folder(output_dir)
    except ValueError:
        return
    handler = _Handler(rank=rank, source=source, output_dir=output_dir)
    structured_logger.addHandler(handler)
    logger.info(f"Structured logging -> JSONL: {handler.baseFilename}")
