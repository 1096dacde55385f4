"""The launch scripts: what they run, who gets which signal, and two real agents on loopback.

There is no Slurm here: `srun` and `scontrol` are stand-ins that do what its manual says they do.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.cluster import PATIENCE_S, free_port
from titan_ext.base.run_folder import LOSS, read_scalar
from titan_ext.base.stdlib_corpus import make_corpus

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
TORCHRUN = str(Path(sys.executable).parent / "torchrun")

# Runs the task of one node in a process group of its own, to which the test sends Slurm's signals.
SRUN = """#!/usr/bin/env bash
echo "srun $*" >> "$CALLS"
while [[ $1 == --* ]]; do shift; done
exec setsid --wait bash -c 'echo $$ > "$CALLS.group"; exec "$@"' task "$@"
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >> "$CALLS"
[[ $1 != show ]] || seq -f node%g 7 20000 # more than a pipe holds
"""
# An agent that writes down each SIGTERM, and ends as torchrun does after one. Its worker waits too.
AGENT = """#!/usr/bin/env bash
echo "torchrun $*" >> "$CALLS"
sleep "${LASTS:-0}" &
trap 'echo SIGTERM >> "$CALLS"; kill -0 $! && echo worker lives >> "$CALLS"; kill $!; exit 1' TERM
echo ready >> "$CALLS"
wait $!
"""
# An agent that takes a while to save, and whose workers do not mind.
SAVING_AGENT = """#!/usr/bin/env bash
trap 'sleep 0.3; echo saved >> "$CALLS"; exit 1' TERM
echo ready >> "$CALLS"
while :; do sleep 0.05 || true; done
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment in which Slurm starts slurm.sh on 2 nodes, with stand-ins in PATH."""
    shown = "#!/usr/bin/env bash\n"  # of titan_ext show
    scripts = {"srun": SRUN, "scontrol": SCONTROL, "torchrun": AGENT, "titan_ext": shown}
    for name, script in scripts.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "CONFIG": "train_configs/moe_debug.toml",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
    }


def _calls(job: dict[str, str]) -> list[str]:
    path = Path(job["CALLS"])
    return path.read_text().splitlines() if path.exists() else []


def test_slurm_starts_one_agent_a_node(job: dict[str, str]):
    flags = ["--training.steps", "7", "--metrics.save_tb_folder", "a b"]
    subprocess.run([LAUNCH / "slurm.sh", *flags], cwd=ROOT, env=job, check=True)
    show, srun, agent, ready = _calls(job)
    assert show == "scontrol show hostnames node[7-8]"
    assert srun.startswith("srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0")
    assert "--wait=300 launch/slurm_node.sh --training.steps 7" in srun
    assert agent == (
        "torchrun --nnodes=2 --nproc_per_node=gpu --rdzv_backend=c10d "
        "--rdzv_endpoint=node7:24567 --rdzv_id=1234567 --max-restarts=3 --shutdown-timeout=240 "
        "--local-ranks-filter 0 --role rank --tee 3 -m torchtitan.train --module titan_ext "
        "--config train_configs/moe_debug.toml "
        "--training.steps 7 --metrics.save_tb_folder a b"
    )
    assert ready == "ready", "and the job is not queued again"


def test_early_signal_is_one_sigterm_and_a_requeue(job: dict[str, str]):
    launcher = _signal_all_processes({**job, "LASTS": "600"}, signal.SIGUSR1)
    assert launcher.wait(timeout=PATIENCE_S) == 75
    assert _calls(job)[3:] == ["ready", "SIGTERM", "worker lives", "scontrol requeue 1234567"]


def test_a_node_that_is_killed_hides_no_stop_of_the_others(job: dict[str, str], tmp_path: Path):
    srun = SRUN.replace("exec setsid", "setsid") + "exit 137\n"  # the highest of all nodes
    (tmp_path / "srun").write_text(srun)
    launcher = _signal_all_processes({**job, "LASTS": "600"}, signal.SIGUSR1)
    assert launcher.wait(timeout=PATIENCE_S) == 137
    assert _calls(job)[-1] == "scontrol requeue 1234567"
    assert not list(ROOT.glob(".titan_ext-*"))
    (tmp_path / "torchrun").write_text("#!/usr/bin/env bash\nexit 3\n")
    done = subprocess.run([LAUNCH / "slurm.sh"], cwd=ROOT, env={**job, "CALLS": f"{tmp_path}/more"})
    assert done.returncode == 137
    assert "requeue" not in (tmp_path / "more").read_text(), "nobody was asked to stop"


def test_a_save_has_to_end_before_slurm_kills(job: dict[str, str]):
    environment = {**job, "SHUTDOWN_TIMEOUT": "900"}
    done = subprocess.run(
        [LAUNCH / "slurm.sh"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "expected at most 270, or sbatch --signal=USR1@960 with NOTICE=960" in done.stderr
    subprocess.run(
        [LAUNCH / "slurm.sh"], cwd=ROOT, env={**environment, "NOTICE": "960"}, check=True
    )


def test_what_no_restart_can_mend_starts_no_agent(job: dict[str, str]):
    command = str(Path(sys.executable).parent / "titan_ext")
    environment = {**job, "NNODES": "2", "HEAD": "node7", "TITAN_EXT": command}
    done = subprocess.run(
        [LAUNCH / "multi_node.sh"],
        cwd=ROOT,
        env={**environment, "CONFIG": "nofile.toml"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "nofile.toml: no such file.\n"
    assert not _calls(job)


def test_slurms_own_sigterm_waits_for_the_agent(job: dict[str, str], tmp_path: Path):
    (tmp_path / "torchrun").write_text(SAVING_AGENT)
    launcher = _signal_all_processes(job, signal.SIGTERM)
    assert launcher.wait(timeout=PATIENCE_S) == 1
    assert _calls(job)[2:] == ["ready", "saved"], "and the job is not queued again"


def _signal_all_processes(job: dict[str, str], signum: signal.Signals) -> subprocess.Popen:
    """Start slurm.sh, and signal its step when the agent is ready."""
    launcher = subprocess.Popen([LAUNCH / "slurm.sh"], cwd=ROOT, env=job)
    deadline = time.monotonic() + PATIENCE_S
    while "ready" not in _calls(job):
        assert launcher.poll() is None, "slurm.sh has ended"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(int(Path(job["CALLS"] + ".group").read_text()), signum)
    return launcher


def test_a_failure_is_not_queued_again(job: dict[str, str], tmp_path: Path):
    (tmp_path / "torchrun").write_text("#!/usr/bin/env bash\nexit 3\n")
    done = subprocess.run([LAUNCH / "slurm.sh"], cwd=ROOT, env=job)
    assert done.returncode == 3
    assert not any("requeue" in call for call in _calls(job))


@pytest.mark.parametrize(("script", "missing"), [("slurm", "CONFIG"), ("multi_node", "HEAD")])
def test_what_is_missing_is_named(job: dict[str, str], script: str, missing: str):
    environment = {**job, "NNODES": "2"}
    environment.pop(missing, None)
    done = subprocess.run(
        [LAUNCH / f"{script}.sh"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert f"{missing}: " in done.stderr
    assert not any(call.startswith("torchrun") for call in _calls(job))


def test_slurm_outside_the_repository(job: dict[str, str], tmp_path: Path):
    done = subprocess.run(
        [LAUNCH / "slurm.sh"], cwd=tmp_path, env=job, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "submit from the root of the repository" in done.stderr


@pytest.mark.slow
def test_two_agents_train(tmp_path: Path):
    """Two "machines" with a rank each: HSDP with a shard axis of 1 in each, and two copies."""
    make_corpus()
    environment = {**os.environ, "TORCHRUN": TORCHRUN, "NNODES": "2", "NGPU": "1"}
    environment |= {"TITAN_EXT": str(Path(TORCHRUN).with_name("titan_ext"))}
    environment |= {"HEAD": "localhost", "PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    environment |= {"CONFIG": "train_configs/moe_debug.toml"}
    flags = ["--training.steps", "2", "--training.seq_len", "64", "--training.local_batch_size"]
    flags += ["1", "--checkpoint.no-enable", "--parallelism.expert_parallel_degree", "1"]
    flags += ["--parallelism.data_parallel_replicate_degree", "2"]
    flags += ["--parallelism.data_parallel_shard_degree", "1", "--dump_folder", str(tmp_path)]
    agents = [
        subprocess.Popen(
            [LAUNCH / "multi_node.sh", *flags],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], outputs[0][-3000:]
    said = ["dp_replicate=2, dp_shard=1" in output for output in outputs]
    assert sorted(said) == [False, True], "LOG_NODE says more than warnings"
    assert len(read_scalar(tmp_path, LOSS)) == 2
