"""The run's folder: one run at a time, and a disk with room."""

import errno
import logging
import os
import resource
import time
import unittest.mock
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.cluster import PATIENCE_S, kill_ranks, start_ranks
from titan_ext.run import start
from titan_ext.run.start import LOCK, Folder, check_folder, lock_folder, register_handler


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
    config = SimpleNamespace(dump_folder=str(run))
    deadline = time.monotonic() + PATIENCE_S
    while not (run / "ready").exists():
        assert time.monotonic() < deadline, "the folder is not locked"
        time.sleep(0.01)
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
    Folder().before_start(SimpleNamespace(dump_folder=str(tmp_path)))
    assert not (tmp_path / LOCK).exists()


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    no_locks = unittest.mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(start.fcntl, "lockf", no_locks)
    lock_folder(str(tmp_path))
    assert "cannot be locked" in caplog.text


@pytest.fixture
def full_disk():
    """Files of this process may have 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_error_before_training(full_disk: None, tmp_path: Path):
    with pytest.raises(ValueError, match=r"where this rank cannot write: .*File too large"):
        check_folder(str(tmp_path))
    log = logging.Logger("structured")
    register_handler(structured_logger=log, rank=0, source="test", output_dir=str(tmp_path))
    assert log.handlers == [], "the error is not said by the log first"


def test_a_disk_that_fills_up_ends_the_structured_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture, request
):
    log = logging.getLogger("structured")
    register_handler(structured_logger=log, rank=0, source="test", output_dir=str(tmp_path))
    request.getfixturevalue("full_disk")
    for _ in range(1000):
        log.warning("x" * 500, extra={"log_type_name": "test"})
    assert log.handlers == []
    assert caplog.text.count("structured logging ends here") == 1
    assert capsys.readouterr().err == ""
