"""SIGKILL at a random moment of a save, many times over: what is left must load, and be right.

One run of 2 ranks saves at every step. Each trial goes on with it, waits for a save to begin, and
kills both ranks at a random moment from there. The next trial must resume from the newest whole
checkpoint. In the end the losses of all steps are compared with those of a run that nobody killed.
"""

import contextlib
import dataclasses
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

from torchtitan.tools.logging import init_logger

from tests.helpers.checkpointing import corrupt_items
from tests.helpers.cluster import kill_ranks, run_ranks, start_ranks
from tests.helpers.training import Run, make_config
from titan_ext.base.run_folder import LOSS, latest_checkpoint_step, read_scalar
from titan_ext.base.stdlib_corpus import make_corpus
from titan_ext.run.checkpoints import CheckpointManager

RUN = Run(parallelize="submodule", world=2, ep=2, layers=2, seq_len=32, ac="none", steps=10_000)
START_S = 150.0


def _train(run: Run, folder: Path, async_mode: str) -> None:
    init_logger()
    config: Any = make_config(run, folder)
    config.checkpoint = CheckpointManager.Config(
        enable=True,
        interval=1,
        keep_latest_k=2,
        last_save_model_only=False,
        async_mode=async_mode,  # type: ignore[arg-type]
    )
    config.lr_scheduler.warmup_steps = 0
    config.lr_scheduler.decay_ratio = 0.0  # the runs have other last steps
    trainer = config.build()
    trainer.train()
    trainer.close()


def trials(count: int, folder: Path, async_mode: str = "disabled", seed: int = 0) -> str:
    """Run them in ``folder``, which is emptied. Returns one line of counts.

    Raises:
        AssertionError: if a checkpoint is corrupt, does not load, or the losses differ.
    """
    make_corpus()
    shutil.rmtree(folder, ignore_errors=True)
    chance = random.Random(seed)
    left: Counter[str] = Counter()
    for trial in range(count):
        before = latest_checkpoint_step(folder / "killed")
        ranks = start_ranks(
            _train, 2, RUN, folder / "killed", async_mode, log_folder=folder / "logs" / str(trial)
        )
        try:
            _wait_for_a_save(folder / "killed", before + chance.randint(1, 3), ranks)
            time.sleep(chance.uniform(0.0, 0.4))
        finally:
            kill_ranks(ranks)
        _check_resumed(ranks[0][2], before)
        left[_what_is_left(folder / "killed")] += 1
    last = latest_checkpoint_step(folder / "killed") + 2
    _finish(folder / "killed", async_mode, last)
    _finish(folder / "whole", async_mode, last)
    killed, whole = (read_scalar(folder / name, LOSS) for name in ("killed", "whole"))
    assert killed == whole, f"losses differ: {killed} {whole}"
    return f"{count} kills in {last - 2} steps, {async_mode}: {dict(left)}; losses equal"


def _wait_for_a_save(folder: Path, step: int, ranks: list[Any]) -> None:
    deadline, begun = time.monotonic() + START_S, time.time()
    # A save that was cut off before may have left a folder of that name.
    while not _is_written(folder / "checkpoint" / f"step-{step}", begun):
        assert time.monotonic() < deadline, f"no save of step {step}"
        assert all(process.is_alive() for process, _, _ in ranks), ranks[0][2].read_text()[-3000:]
        time.sleep(0.002)


def _is_written(checkpoint: Path, since: float) -> bool:
    with contextlib.suppress(OSError):
        return any(path.stat().st_mtime > since for path in (checkpoint, *checkpoint.iterdir()))
    return False


def _check_resumed(log: Path, step: int) -> None:
    assert f"Training starts at step {step + 1}" in log.read_text(), f"{log}: not from {step}"


def _what_is_left(folder: Path) -> str:
    steps = [int(path.name.removeprefix("step-")) for path in folder.glob("checkpoint/step-*")]
    whole = latest_checkpoint_step(folder)
    assert whole > 0, "no whole checkpoint"
    assert corrupt_items(folder / "checkpoint" / f"step-{whole}") == {}
    return "newest whole" if whole == max(steps) else "newest cut off"


def _finish(folder: Path, async_mode: str, last: int) -> None:
    run = dataclasses.replace(RUN, steps=last)
    logs = folder / "logs"
    run_ranks(_train, 2, run, folder, async_mode, log_folder=logs, timeout_s=600)
