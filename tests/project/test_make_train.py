"""``make train`` as a user types it: train, go on, be killed, resume."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.cluster import PATIENCE_S
from titan_ext.base.run_folder import LOSS, latest_checkpoint_step, read_scalar

ROOT = Path(__file__).parents[2]
# Small steps, and a checkpoint at every one of them but the last.
ARGS = "--training.seq_len 64 --checkpoint.interval 2 --comm.init_timeout_seconds 200"


def _make_train(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        # Also when make runs this test.
        [
            "make",
            "--no-print-directory",
            "train",
            f"RUN_FOLDER={folder}",
            "STEPS=4",
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


def _kill_everything_that_names(folder: Path) -> None:
    """SIGKILL torchrun and its workers, which have process groups of their own."""
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in cmdline.read_bytes():
                os.kill(int(cmdline.parent.name), signal.SIGKILL)


def test_a_slow_step_has_time_to_be_saved():
    """torchrun's own 30 s are less than a step of a large model on a CPU."""
    environment = {name: value for name, value in os.environ.items() if name[:4] != "MAKE"}
    command = ["make", "--dry-run", "--always-make", "train"]
    printed = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    (seconds,) = re.findall(
        r"titan_ext\.run\.launch .*--shutdown-timeout=(\d+)", re.sub(r"\\\n", "", printed)
    )
    assert int(seconds) >= 600


@pytest.mark.slow
def test_train_resume_and_survive_a_kill(tmp_path: Path):
    folder = tmp_path / "run"
    output = _finish(_make_train(folder))
    assert latest_checkpoint_step(folder) == 4
    *_, last_line = output.strip().splitlines()
    assert re.match(r"loss \d+\.\d+ at step 1 -> \d+\.\d+ at step 4; .*loss.png", last_line)
    assert (folder / "loss.png").exists()
    assert 'FSDP units: auto is "submodule" (EP 2' in output
    losses = read_scalar(folder, LOSS)
    assert losses[4] < losses[1]

    # Killed after a checkpoint of the second run, with no chance to say goodbye.
    process = _make_train(folder)
    deadline = time.monotonic() + 4 * PATIENCE_S
    while latest_checkpoint_step(folder) < 6:
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline, "no checkpoint at step 6"
        time.sleep(0.05)
    _kill_everything_that_names(folder)
    process.communicate()
    reached = latest_checkpoint_step(folder)
    assert reached in (6, 8)

    output = _finish(_make_train(folder))
    assert f"Training starts at step {reached + 1}" in output
    assert latest_checkpoint_step(folder) == (8 if reached == 6 else 12)
