"""``make train`` as a user types it: train, go on, be stopped, resume. ``make faults`` kills."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.cluster import PATIENCE_S
from titan_ext.base.run_folder import LOSS, latest_checkpoint_step, read_scalar

ROOT = Path(__file__).parents[2]
# Small steps, and a checkpoint at every one of them but the last.
ARGS = "--training.seq_len 64 --checkpoint.interval 2 --comm.init_timeout_seconds 200"


def _make_train(folder: Path, steps: int = 4) -> subprocess.Popen:
    return subprocess.Popen(
        # Also when make runs this test.
        [
            "make",
            "--no-print-directory",
            "train",
            f"RUN_FOLDER={folder}",
            f"STEPS={steps}",
            "NGPU=2",
            f"ARGS={ARGS}",
        ],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name[:4] != "MAKE"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=4 * PATIENCE_S)
    assert process.returncode == 0, output[-3000:]
    return output


@pytest.mark.slow
def test_train_stop_and_resume(tmp_path: Path):
    folder = tmp_path / "run"
    output = _finish(_make_train(folder))
    assert latest_checkpoint_step(folder) == 4
    *_, said, last_line = output.strip().splitlines()
    assert re.match(r"loss \d+\.\d+ at step 1 -> \d+\.\d+ at step 4; .*loss.png", said)
    assert last_line == "finished at step 4 of 4; the same command trains on from there"
    assert (folder / "loss.png").exists()
    assert "FSDP units: submodule, " in output
    losses = read_scalar(folder, LOSS)
    assert losses[4] < losses[1]

    process = _make_train(folder, steps=20)
    assert process.stdout is not None
    for line in process.stdout:
        if "step:  5" in line:
            break
    process.terminate()  # make, which passes it on
    output, _ = process.communicate(timeout=4 * PATIENCE_S)
    stopped_at = latest_checkpoint_step(folder)
    assert 4 < stopped_at < 20, output[-3000:]
    last_line = output.splitlines()[-1]
    assert last_line == f"stopped at step {stopped_at} of 20; the same command trains on from there"
    assert "Traceback" not in output
    assert process.returncode == -signal.SIGTERM

    output = _finish(_make_train(folder, steps=stopped_at + 1))
    assert f"Training starts at step {stopped_at + 1}" in output
    assert latest_checkpoint_step(folder) == stopped_at + 1
