"""Faults of real launches: torchrun, its workers and its agents, killed and stopped from outside.

Each trial returns one line of what was seen, or raises AssertionError. They take minutes, not
seconds: ``make faults`` runs them, ``make test`` does not.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.cluster import wait_until
from titan_ext.base.run_folder import LOSS, latest_checkpoint_step, read_scalar
from titan_ext.base.stdlib_corpus import make_corpus
from titan_ext.debug.hang_report import report
from titan_ext.verify.ranks import free_port

ROOT = Path(__file__).parents[2]
TORCHRUN = str(Path(sys.executable).parent / "torchrun")
STEPS, INTERVAL = 16, 4
FLAGS = (
    f"--training.steps {STEPS} --training.seq_len 64 --training.local_batch_size 1 "
    f"--checkpoint.interval {INTERVAL} --debug.seed 42 --debug.deterministic "
    "--comm.train_timeout_seconds 20 --comm.init_timeout_seconds 60"
).split()


def launch(folder: Path, *flags: str, torchrun: tuple[str, ...] = ()) -> subprocess.Popen:
    """Two workers of the debug model, as a user starts them; output goes to a file."""
    launcher = torchrun or ("--nproc_per_node=2", "--rdzv_endpoint=localhost:0")
    command = [TORCHRUN, "--rdzv_backend", "c10d", *launcher, "-m", "torchtitan.train"]
    command += ["--module", "titan_ext", "--config", "train_configs/moe_debug.toml"]
    command += [*FLAGS, "--dump_folder", str(folder), *flags]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "output.log", "a") as log:
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )


def killed_rank(folder: Path) -> str:
    """A rank is killed mid-step; torchrun restarts, and the losses are those of a whole run."""
    restarts = ("--nproc_per_node=2", "--rdzv_endpoint=localhost:0", "--max-restarts=1")
    launcher = launch(folder, "--debug.record_collectives", torchrun=restarts)
    _wait_for_step(folder, INTERVAL + 2, launcher)
    before = latest_checkpoint_step(folder)
    os.kill(_worker(folder, rank=1), signal.SIGKILL)
    begun = time.monotonic()
    again = "Training starts at step"
    wait_until(lambda: _output(folder).count(again) == 4, "no second start", launcher)
    restart_s = time.monotonic() - begun
    assert launcher.wait(timeout=300) == 0, _output(folder)[-3000:]
    assert f"Training starts at step {before + 1}" in _output(folder)
    _compare_losses(folder)
    first = min(folder.glob("collectives/*"))
    assert "rank 0 waits in collective" in report(first)
    return f"resumed from step {before} {restart_s:.0f} s after the kill; losses equal"


def two_agents(folder: Path) -> str:
    """Two "machines": one's worker is killed, both agents restart."""
    port = free_port()
    options = ("--nnodes=2", "--nproc_per_node=1", f"--rdzv_endpoint=localhost:{port}")
    options += ("--rdzv_id=faults", "--max-restarts=1")
    agents = [launch(folder, torchrun=options) for _ in range(2)]
    _wait_for_step(folder, INTERVAL + 2, agents[0])
    os.kill(_worker(folder, rank=1), signal.SIGKILL)
    assert [agent.wait(timeout=300) for agent in agents] == [0, 0], _output(folder)[-3000:]
    assert _output(folder).count("Training starts at step") == 4
    _compare_losses(folder)
    return "both agents restarted; losses equal"


TRIALS = (killed_rank, two_agents)


def reference(folder: Path) -> None:
    """The run that nothing happens to."""
    make_corpus()
    shutil.rmtree(folder, ignore_errors=True)
    assert launch(folder).wait(timeout=600) == 0, _output(folder)[-3000:]


def _compare_losses(folder: Path) -> None:
    wanted, losses = (read_scalar(f, LOSS) for f in (folder.parent / "reference", folder))
    assert losses == wanted, f"{losses} is not {wanted}"
    assert len(wanted) == STEPS


def _wait_for_step(folder: Path, step: int, launcher: subprocess.Popen) -> None:
    reached = re.compile(rf"step: *{step} ")
    wait_until(lambda: bool(reached.search(_output(folder))), f"no step {step}", launcher)


def _output(folder: Path) -> str:
    text = (folder / "output.log").read_text(errors="replace")
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _worker(folder: Path, rank: int) -> int:
    """The process id of a worker of the run in ``folder``."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_bytes().split(b"\0")
            if str(folder).encode() in command and f"RANK={rank}".encode() in environment:
                return int(process.name)
    raise AssertionError(f"no worker of rank {rank}")


def is_alive(pid: int) -> bool:
    """Whether a process runs; not if it has ended and nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
