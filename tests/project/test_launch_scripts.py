"""The launch scripts: what they run, who gets which signal, and two real agents on loopback.

There is no Slurm here: `srun` and `scontrol` are stand-ins that do what its manual says they do.
"""

import contextlib
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.torchrun import is_alive
from tests.helpers.cluster import PATIENCE_S, wait_until
from titan_ext.base.run_folder import LOSS, RECORD, read_scalar
from titan_ext.base.stdlib_corpus import make_corpus
from titan_ext.verify.ranks import free_port

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


def test_slurms_own_sigterm_waits_for_the_agent(job: dict[str, str], tmp_path: Path):
    (tmp_path / "torchrun").write_text(SAVING_AGENT)
    launcher = _signal_all_processes(job, signal.SIGTERM)
    assert launcher.wait(timeout=PATIENCE_S) == 1
    assert _calls(job)[2:] == ["ready", "saved"], "and the job is not queued again"


def _signal_all_processes(job: dict[str, str], signum: signal.Signals) -> subprocess.Popen:
    """Start slurm.sh, and signal its step when the agent is ready."""
    launcher = subprocess.Popen([LAUNCH / "slurm.sh"], cwd=ROOT, env=job)
    wait_until(lambda: "ready" in _calls(job), "the agent is not ready", launcher)
    os.killpg(int(Path(job["CALLS"] + ".group").read_text()), signum)
    return launcher


@pytest.mark.parametrize(
    ("script", "changes", "message"),
    [
        ("slurm", {"CONFIG": None}, "CONFIG: "),
        ("slurm", {"SHUTDOWN_TIMEOUT": "900"}, "expected at most 270, or sbatch --signal=USR1@960"),
        ("multi_node", {"HEAD": None}, "HEAD: "),
        (
            "multi_node",
            {"CONFIG": "nofile.toml", "TITAN_EXT": str(Path(TORCHRUN).with_name("titan_ext"))},
            "nofile.toml: no such file.\n",
        ),
    ],
)
def test_a_mistake_starts_no_agent(
    job: dict[str, str], script: str, changes: dict[str, Any], message: str
):
    """Nor is it one that a restart could mend."""
    job |= {"NNODES": "2", "HEAD": "node7"}
    environment = {name: value for name, value in {**job, **changes}.items() if value is not None}
    words = [str(LAUNCH / f"{script}.sh")]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert not any(call.startswith("torchrun") for call in _calls(job))
    if "SHUTDOWN_TIMEOUT" in changes:
        subprocess.run(words, cwd=ROOT, env={**environment, "NOTICE": "960"}, check=True)
        outside = subprocess.run(words, cwd="/", env=environment, capture_output=True, text=True)
        assert outside.returncode == 2
        assert "submit from the root of the repository" in outside.stderr


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


# Stands for torchtitan.train. Only what its arguments name does it do: listen to signals, stop.
WORKER = """
import json, os, signal, sys, time
def stop(signum, frame):
    print(signal.Signals(signum).name, flush=True)
    if "goes-on" not in sys.argv:
        os._exit(0)
if "listen" in sys.argv:
    signal.signal(signal.SIGTERM, stop)
torchrun = os.getppid()
print("ready", torchrun, flush=True)
while os.getppid() == torchrun:
    time.sleep(0.1)
"""
BOTH_LISTEN = """
open("listens" + os.environ["RANK"], "w").close()
while not (os.path.exists("listens0") and os.path.exists("listens1")):
    time.sleep(0.05)
"""
# Stands for Python: torchrun with one worker, in a process below it, and the reports of a folder.
PYTHON = """#!/bin/sh
case "$2 $3" in
*.run_folder\\ target) echo 30 ;;
titan_ext\\ show) [ "$5" != wrong ] || {{ echo "$4: wrong" >&2; exit 1; }} ;;
*.run_folder\\ report) echo "a report of $4 to $5" ;;
*) echo "$@"; {python} -I -S -c {worker} "$@"; exit $? ;;
esac
"""


def _environment(folder: Path) -> dict[str, str]:
    python = folder / "python"
    python.write_text(PYTHON.format(python=sys.executable, worker=shlex.quote(WORKER)))
    python.chmod(0o755)
    values = {"PYTHON": str(python), "CONFIG": "a.toml", "RUN_FOLDER": "out", "STEPS": "30"}
    return {**os.environ, **values, "NGPU": "2"}


@contextlib.contextmanager
def _training(
    folder: Path, *flags: str, shell: str = "sh", ignored: tuple[signal.Signals, ...] = ()
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """train.sh in a process group of its own, and its torchrun, once the worker is ready."""

    def dispositions() -> None:  # `make test &` ignores SIGINT
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN if signum in ignored else signal.SIG_DFL)

    launcher = subprocess.Popen(
        [*shell.split(), LAUNCH / "train.sh", *flags],
        env=_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=dispositions,
    )
    assert launcher.stdout is not None
    command, ready = launcher.stdout.readline(), launcher.stdout.readline()
    assert command.startswith("-m torch.distributed.run --nproc_per_node=2 "), command
    assert " --shutdown-timeout=600 " in command, "torchrun's own 30 s are less than a slow step"
    given = ["--dump_folder", "out", "--training.steps", "30", *flags]  # a flag given twice wins
    assert command.split()[-len(given) :] == given
    time.sleep(0.2)  # until the shell waits
    try:
        yield launcher, int(ready.split()[1])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)


@pytest.mark.parametrize(("signals", "shell"), [("HUP", "sh"), ("TERM INT", "bash --posix")])
def test_a_signal_asks_the_workers_once(signals: str, shell: str, tmp_path: Path):
    """Two signals at once, as of ``timeout``, are one request."""
    with _training(tmp_path, "listen", shell=shell) as (launcher, _):
        for name in signals.split():
            os.killpg(launcher.pid, getattr(signal, f"SIG{name}"))
        output, _ = launcher.communicate(timeout=PATIENCE_S)
    assert output == "SIGTERM\na report of out to 30\n"
    assert launcher.returncode == 0


@pytest.mark.parametrize("is_training", [True, False])
def test_a_later_signal_or_one_before_training_kills(is_training: bool, tmp_path: Path):
    flags = ["listen", "goes-on"] if is_training else []
    with _training(tmp_path, *flags) as (launcher, torchrun):
        os.kill(launcher.pid, signal.SIGINT)
        if is_training:
            time.sleep(1.5)
            os.kill(launcher.pid, signal.SIGINT)
        output, _ = launcher.communicate(timeout=PATIENCE_S)
    saves = "SIGTERM\n" if is_training else ""
    assert output == f"{saves}stopped at once; what was not saved is lost\n"
    assert launcher.returncode == 130
    wait_until(lambda: not is_alive(torchrun), "torchrun outlived its launcher")


def test_what_a_shell_ignores_does_not_stop_a_run(tmp_path: Path):
    """nohup ignores SIGHUP, which a terminal sends as it closes."""
    with _training(tmp_path, "listen", ignored=(signal.SIGHUP,)) as (launcher, _):
        os.kill(launcher.pid, signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.communicate(timeout=0.5)
        os.kill(launcher.pid, signal.SIGTERM)
        assert launcher.wait(timeout=PATIENCE_S) == 0


def test_a_launcher_that_is_killed_takes_torchrun_along(tmp_path: Path):
    """As by ``timeout -k``. The workers end with torchrun (run/stop.py)."""
    with _training(tmp_path, "listen") as (launcher, torchrun):
        launcher.kill()
        wait_until(lambda: not is_alive(torchrun), "torchrun outlived its launcher")


def test_a_mistake_is_told_before_torchrun_starts(tmp_path: Path):
    done = subprocess.run(
        [LAUNCH / "train.sh", "wrong"], env=_environment(tmp_path), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "a.toml: wrong\n")


def test_a_torchrun_that_fails_has_no_report(tmp_path: Path):
    with _training(tmp_path, "listen") as (launcher, torchrun):
        os.kill(torchrun, signal.SIGKILL)
        assert launcher.wait(timeout=PATIENCE_S) == 137


def test_ctrl_c_ends_make_train_in_good_order(tmp_path: Path):
    """With torchrun itself, on a terminal: no traceback, and the last line is ours."""
    worker = WORKER.replace('"listen" in sys.argv', "True").replace("sys.argv", "[]")
    # Who does not listen yet is not asked; ranks of a real run agree.
    worker = worker.replace('print("ready"', f'{BOTH_LISTEN}print("ready"')
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "__init__.py").touch()
    (tmp_path / "torchtitan" / "train.py").write_text(worker)
    (tmp_path / RECORD).write_text(json.dumps({"starts": [{"ending": "stopped", "step": 27}]}))
    (tmp_path / "checkpoint" / "step-27").mkdir(parents=True)
    (tmp_path / "checkpoint" / "step-27" / ".metadata").touch()
    python = tmp_path / "python"  # but for show, which would take that torchtitan
    python.write_text(f'#!/bin/sh\n[ "$2" = titan_ext ] || exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    values = f"PYTHON={python} CONFIG=moe_debug.toml RUN_FOLDER=. STEPS=30 NGPU=2"
    recipe = f"exec env PYTHONPATH={ROOT} {values} {LAUNCH}/train.sh"
    (tmp_path / "Makefile").write_text(f"train:\n\t@{recipe}\n")
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # `make test &` ignores it
        os.chdir(tmp_path)
        for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):  # of the make that runs the tests
            os.environ.pop(name, None)
        os.execvp("make", ["make", "train"])
    printed, is_asked = b"", False
    with contextlib.suppress(OSError):  # EIO: all have ended
        while chunk := os.read(terminal, 4096) if _is_readable(terminal) else b"":
            printed += chunk
            if not is_asked and printed.count(b"ready") == 1:  # the filter shows rank 0 alone
                is_asked = True
                os.write(terminal, b"\x03")
    os.close(terminal)  # hangs up, if it waits for ever
    output = printed.decode()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGINT, "make dies of it"
    assert "SIGTERM" in output
    assert "Traceback" not in output
    assert "***" not in output
    assert (
        output.splitlines()[-1] == "stopped at step 27 of 30; the same command trains on from there"
    )


def _is_readable(file: int) -> bool:
    return bool(select.select([file], [], [], PATIENCE_S)[0])
