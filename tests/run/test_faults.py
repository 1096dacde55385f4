"""What goes wrong around a run ends it with one error that says what, and loses nothing.

The faults of whole launches (torchrun, its agents, kill -9 of saves) take minutes: ``make faults``.
"""

import contextlib
import ctypes
import functools
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.faults.torchrun import is_alive
from tests.helpers import planted
from tests.helpers.checkpointing import corrupt_items, run_leg, slow_writes
from tests.helpers.cluster import RankError, kill_ranks, start_ranks, wait_until
from tests.helpers.training import Run, titan_config
from titan_ext.base.agreement import LastStep
from titan_ext.base.run_folder import LOSS, latest_checkpoint_step, read_scalar
from titan_ext.run.checkpoints import CheckpointManager, verify_checksums
from titan_ext.run.start import Paths
from titan_ext.run.stop import StopOnSignal, end_with_launcher, warn_of_restarts_that_hang
from titan_ext.run.trainer import Trainer, extend_config

RUN = Run(parallelize="submodule", world=2, ep=2, layers=2, seq_len=32, ac="none", steps=6)
FAULTY_STEP = {"sigterm": 3}  # not saved anyway; others: 4
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def _sigterm(trainer: Any):
    """Twice at once: Slurm signals torchrun and its workers, and torchrun its workers.

    The step is long: all ranks hear of it within.
    """
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    (stop,) = (check for check in trainer.checks if isinstance(check, StopOnSignal))
    while not _is_known(cast(LastStep, stop._last_step)):
        time.sleep(0.05)
    yield


def _is_known(last_step: LastStep) -> bool:
    store = last_step._store
    return store.check(["latest"]) and store.get("latest").endswith(b"closed")


_FAULTS = {
    "none": contextlib.nullcontext,
    "nan": lambda _: planted.nan_gradient(),
    "sigterm": _sigterm,
}


@contextlib.contextmanager
def _on_rank_1(fault: str) -> Iterator[None]:
    step = Trainer.train_step

    def train_step(trainer: Any, data_iterator: Any) -> None:
        faulty = trainer.step == FAULTY_STEP.get(fault, 4) and os.environ["RANK"] == "1"
        with _FAULTS[fault](trainer) if faulty else contextlib.nullcontext():
            step(trainer, data_iterator)

    slow = slow_writes() if fault == "nan" else contextlib.nullcontext()
    with unittest.mock.patch.object(Trainer, "train_step", train_step), slow:
        yield


def _run(folder: Path, fault: str) -> list[int]:
    """The last step of each rank of a run that saves every second one."""
    mode = "async" if fault == "nan" else "disabled"
    around = functools.partial(_on_rank_1, fault)
    legs = run_leg(RUN, folder, around=around, interval=2, keep_latest_k=2, async_mode=mode)
    return [max(leg.losses) for leg in legs]


def test_gradients_that_are_not_finite_are_not_applied(tmp_path: Path):
    """And the save that is under way is finished."""
    error = r"step 4: gradients are not finite.* The first is of .*, on rank 1, before the ranks"
    with pytest.raises(RankError, match=error):
        _run(tmp_path, "nan")
    assert [path.name for path in tmp_path.glob("checkpoint/*")] == ["step-2"]
    assert corrupt_items(tmp_path / "checkpoint" / "step-2") == {}


@contextlib.contextmanager
def _without_labels() -> Iterator[None]:
    batches = Trainer.batch_generator

    def masked(self: Any, data: Any) -> Iterator[Any]:
        return ((inputs, torch.full_like(labels, -100)) for inputs, labels in batches(self, data))

    with unittest.mock.patch.object(Trainer, "batch_generator", masked):
        yield


def test_a_step_without_a_valid_label_says_so(tmp_path: Path):
    run = Run(parallelize="block", layers=1, seq_len=32, ac="none", steps=1)
    error = r"step 1: no label is valid on any data.* 0 / 0: all are -100\..* dataloader\.dataset"
    with pytest.raises(RankError, match=error):
        run_leg(run, tmp_path, around=_without_labels)


def test_sigterm_on_one_rank_saves_the_step_and_nothing_is_lost(tmp_path: Path):
    assert _run(tmp_path / "stopped", "sigterm") == [3, 3]
    assert latest_checkpoint_step(tmp_path / "stopped") == 3
    log = (tmp_path / "stopped" / "logs" / "rank_1.log").read_text()
    answered = log.index("SIGTERM: stopping after this step, which is saved.")
    assert answered < log.index("step:  3")
    assert f"SIGTERM: stopped after step 3, saved in {tmp_path}/stopped/checkpoint/step-3." in log
    assert log.count("Saving the checkpoint") == 2
    assert _run(tmp_path / "stopped", "none") == [6, 6]
    assert "Training starts at step 4" in (tmp_path / "stopped" / "logs" / "rank_0.log").read_text()
    assert sorted(read_scalar(tmp_path / "stopped", LOSS)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("fault", ["cut", "missing", "metadata"])
def test_a_corrupt_checkpoint_is_named_with_the_one_before(
    fault: str, tmp_path: Path, one_rank: None
):
    config = extend_config(titan_config("qwen3"))
    config.dump_folder = str(tmp_path)
    config.checkpoint = CheckpointManager.Config(enable=True)
    for step in (2, 4):
        folder = tmp_path / "checkpoint" / f"step-{step}"
        dcp.save({"w": torch.arange(1000.0)}, checkpoint_id=folder)
    step_4 = tmp_path / "checkpoint" / "step-4"
    verify_checksums(config)
    shard = step_4 / (".metadata" if fault == "metadata" else "__0_0.distcp")
    if fault == "missing":
        shard.unlink()
    else:
        os.truncate(shard, shard.stat().st_size // 2)
    way_on = r"Moved away, it leaves step-2\."
    with pytest.raises(ValueError, match=rf"step-4 is corrupt \({shard.name}: .*{way_on}"):
        verify_checksums(config)
    step_4.rename(tmp_path / "away")
    verify_checksums(config)


@pytest.mark.parametrize("key", ["dataloader.dataset_path", "hf_assets_path"])
def test_a_path_that_is_not_there_is_named_before_any_process_group(key: str, tmp_path: Path):
    config: Any = extend_config(titan_config("qwen3"))
    config.dump_folder = str(tmp_path)
    config.dataloader.dataset_path = config.hf_assets_path = str(tmp_path)
    section = config.dataloader if "." in key else config
    setattr(section, key.rpartition(".")[2], str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=rf"{re.escape(key)} is '.*/nothing': no such folder"):
        config.build()
    assert not torch.distributed.is_initialized()


def test_own_text_is_a_folder_and_titans_sample_needs_its_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # no checkout of TorchTitan
    config = cast(Any, extend_config(titan_config("deepseek_v3")))
    config.hf_assets_path = str(tmp_path)
    with pytest.raises(ValueError, match=r"'tests/assets/c4_test': no such .*, or python_stdlib"):
        Paths().before_start(config)
    config.dataloader.dataset_path = str(tmp_path / "a.jsonl")
    Path(config.dataloader.dataset_path).touch()
    with pytest.raises(ValueError, match=r"a\.jsonl.*no such folder; expected the folder of the"):
        Paths().before_start(config)
    config.dataloader.dataset_path = str(tmp_path)
    Paths().before_start(config)


def _launch_a_worker(folder: Path) -> None:
    """As torchrun: the worker has a session of its own."""
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    worker = os.fork()
    if worker:
        (folder / "worker.part").write_text(str(worker))
        (folder / "worker.part").rename(folder / "worker")
    else:
        os.setsid()
        end_with_launcher()
        (folder / "ready").touch()
    time.sleep(9999)


def test_a_worker_ends_with_its_launcher(tmp_path: Path):
    """The launcher gets SIGKILL."""
    ranks = start_ranks(_launch_a_worker, 1, tmp_path, log_folder=tmp_path / "logs")
    files = {"worker", "ready", "logs"}
    wait_until(lambda: {path.name for path in tmp_path.iterdir()} == files, "no worker")
    pid = int((tmp_path / "worker").read_text())
    assert is_alive(pid)
    kill_ranks(ranks)
    wait_until(lambda: not is_alive(pid), "the worker outlived its launcher")


class _Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The signals that did what they do where nothing is saved: they would end this process."""
    signals: list[int] = []
    before = {s: signal.signal(s, lambda s, _: signals.append(s)) for s in STOP_SIGNALS}
    yield signals
    for signum, handler in before.items():
        signal.signal(signum, handler)


def _trainer(step: int, *, saves: bool = True) -> Any:
    """A trainer after ``step``, whose checkpointer saves every fifth."""
    checkpoint = SimpleNamespace(
        enable=saves, interval=5, load_only=False, enable_first_step_checkpoint=False
    )
    checkpointer = unittest.mock.Mock(enable=saves, interval=5, folder="run/checkpoint")
    config = SimpleNamespace(checkpoint=checkpoint, training=SimpleNamespace(steps=100))
    return SimpleNamespace(step=step, config=config, checkpointer=checkpointer, model_parts=[])


@pytest.fixture
def stop(ended: list[int], one_rank: None) -> Iterator[StopOnSignal]:
    stop = StopOnSignal(clock=_Clock())
    yield stop
    signal.set_wakeup_fd(-1)


def _stopped(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What it says at the end. A thread says that it stops, perhaps after that."""
    return [message for message in caplog.messages if " stopped after " in message]


@pytest.mark.parametrize(("first", "second"), [STOP_SIGNALS, STOP_SIGNALS[::-1]])
def test_a_second_signal_ends_at_once_if_it_is_another_request(
    first: signal.Signals,
    second: signal.Signals,
    stop: StopOnSignal,
    ended: list[int],
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level("INFO")
    trainer, clock = _trainer(step=6), cast(_Clock, stop._clock)
    stop.after_build(trainer)
    with stop.around_run(trainer):
        assert not stop.ends_run(trainer)
        trainer.step = 7
        signal.raise_signal(first)
        clock.now_s += 0.9
        signal.raise_signal(second)
        assert ended == []
        assert stop.ends_run(trainer)
        trainer.checkpointer.save.assert_called_once_with(7)
        assert trainer.checkpointer.interval == 1
        trainer.checkpointer.maybe_wait_for_saving.assert_called_once()
        assert _stopped(caplog) == [
            f"{first.name}: stopped after step 7, saved in run/checkpoint/step-7."
        ]
        clock.now_s += 0.2
        signal.raise_signal(second)
        assert ended == [second]
    signal.raise_signal(first)
    assert ended == [second, first], "as before the run"


@pytest.mark.parametrize(
    ("step", "saves", "said"),
    [
        (10, True, "stopped after step 10, saved in run/checkpoint/step-10."),  # the interval's
        (6, True, "stopped after step 6, saved in run/checkpoint/step-6."),  # what was loaded
        (0, True, "stopped after step 0, nothing was saved."),
        (7, False, "stopped after step 7, nothing was saved."),
    ],
)
def test_what_is_saved_is_not_saved_again(
    step: int, saves: bool, said: str, stop: StopOnSignal, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    trainer = _trainer(min(step, 6), saves=saves)
    stop.after_build(trainer)
    if trainer.step != step:  # else the signal comes before the first step
        assert not stop.ends_run(trainer)
    trainer.step = step
    signal.raise_signal(signal.SIGTERM)
    assert stop.ends_run(trainer)
    trainer.checkpointer.save.assert_not_called()
    assert _stopped(caplog) == [f"SIGTERM: {said}"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_stop_saves_no_weights_that_are_not_finite(value: float, stop: StopOnSignal):
    """Gradients are checked in steps that are logged or saved; this one is neither."""
    trainer = _trainer(6)
    # A rank may have no row of a parameter.
    empty, wrong = torch.nn.ParameterList([torch.empty(0, 2)]), torch.nn.Linear(3, 2)
    trainer.model_parts = [empty, torch.nn.Linear(3, 2), wrong]
    with torch.no_grad():
        wrong.weight[1, 2] = value
    stop.after_build(trainer)
    assert not stop.ends_run(trainer)
    trainer.step = 7
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match=r"SIGTERM: .* step 7, whose weights are not finite on"):
        stop.ends_run(trainer)
    trainer.checkpointer.save.assert_not_called()


def _wait_in_c() -> None:
    """As in a collective: one long call, which goes on after a signal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup's tests ignore it
    logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s", force=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer: Any = SimpleNamespace(checkpointer=SimpleNamespace(enable=False))
    StopOnSignal().after_build(trainer)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    libc = ctypes.CDLL(None)  # releases the GIL
    left = 600
    while left:
        left = libc.sleep(left)


def test_a_signal_is_answered_while_the_step_waits(tmp_path: Path):
    """The main thread is in one long call into C, so no Python handler can run."""
    ranks = start_ranks(_wait_in_c, 1, log_folder=tmp_path)
    log = tmp_path / "rank_0.log"
    try:
        wait_until(lambda: log.exists() and "ends the run" in log.read_text(), f"not in {log}")
    finally:
        kill_ranks(ranks)
    assert (
        "SIGINT: stopping after this step; nothing is saved. A second signal ends the run at once."
    ) in log.read_text().splitlines()


_ENDS = """
import signal, subprocess, sys, time
import torch.distributed as dist
from titan_ext.base.agreement import Job, LastStep
from titan_ext.run.stop import StopOnSignal
code = "import torch.distributed as d, time; s = d.TCPStore('127.0.0.1', 0, is_master=True, "
code += "wait_for_workers=False); print(s.port, flush=True); time.sleep(60)"
server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
stop = StopOnSignal()
stop._answer_at_once(LastStep(Job(store, 0, 1)), "")
time.sleep(1)
server.send_signal(signal.SIGSTOP)  # a store that is slow while the thread asks it
time.sleep(1)
subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {server.pid}; sleep 4; kill {server.pid}"])
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(4)
keep = Slow()  # the interpreter takes its time to end
"""


def test_a_process_ends_with_0_while_its_store_is_slow():
    """One whose thread is in the store when the interpreter ends would be aborted.

    So would a start that failed before it trained. The ranks of other tests end by os._exit.
    """
    done = subprocess.run(
        [sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_ignored_signal_stays_ignored(stop: StopOnSignal):
    """nohup, and a shell's background jobs, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop.after_build(_trainer(step=0))
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize(
    ("restarts", "shared", "warns"), [(1, True, True), (0, True, False), (1, False, False)]
)
def test_restarts_that_would_hang_are_said(
    restarts: int,
    shared: bool,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(shared))
    warn_of_restarts_that_hang()
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text) == warns
