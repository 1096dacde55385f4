"""The run's folder: one run at a time, and a disk with room."""

import errno
import os
import resource
import time
import unittest.mock
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.cluster import kill_ranks, start_ranks, wait_until
from titan_ext.run import start
from titan_ext.run.start import LOCK, Folder, lock_folder


def _hold(run: Path) -> None:
    """A process that has the lock, with a child that it forked afterwards."""
    os.setsid()
    lock_folder(str(run))
    if os.fork():
        (run / "ready").touch()
    time.sleep(600)


def test_a_second_run_is_refused_until_the_first_has_died(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    ranks = start_ranks(_hold, 1, run, log_folder=tmp_path / "logs")
    pid = ranks[0][0].pid
    config: Any = SimpleNamespace(dump_folder=str(run))
    wait_until((run / "ready").exists, "the folder is not locked")
    try:
        with pytest.raises(ValueError, match=rf"another run trains \(host .*, process {pid}, "):
            Folder().before_start(config)
        kill_ranks(ranks)
        Folder().before_start(config)
        Folder().before_start(config)  # the same process, another trainer
        assert f"process {os.getpid()}, " in (run / LOCK).read_text()
    finally:
        kill_ranks(ranks)
        os.killpg(pid, 9)  # its child


def test_only_the_first_rank_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    config: Any = SimpleNamespace(dump_folder=str(tmp_path))
    Folder().before_start(config)
    assert not (tmp_path / LOCK).exists()


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    no_locks = unittest.mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(start.fcntl, "lockf", no_locks)
    lock_folder(str(tmp_path))
    assert "cannot be locked" in caplog.text


def test_a_full_disk_is_one_error_before_training(tmp_path: Path):
    """Files of this process may have 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    config: Any = SimpleNamespace(dump_folder=str(tmp_path))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with pytest.raises(ValueError, match=r"where this rank cannot write: .*File too large"):
            Folder().before_start(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
