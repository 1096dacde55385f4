"""The launches of the README, as a user types them.

TorchTitan's run_train.sh is in its repository, not in the wheel. It ends in the torchrun command
line below with MODULE and CONFIG put in (release/0.3), so that command line is what runs here.
"""

import contextlib
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.torchrun import is_alive
from tests.helpers.cluster import PATIENCE_S, run_line
from titan_ext.base.run_folder import LOSS

ROOT = Path(__file__).parents[2]
TORCHRUN = str(Path(sys.executable).parent / "torchrun")


def _launch(config: str, *flags: str, cwd: Path = ROOT, processes: int = 2) -> str:
    """The last lines of run_train.sh with NGPU=2, MODULE=titan_ext and CONFIG=config."""
    command = [TORCHRUN, f"--nproc_per_node={processes}", "--rdzv_backend", "c10d"]
    command += ["--rdzv_endpoint=localhost:0", "--local-ranks-filter", "0", "--role", "rank"]
    command += ["--tee", "3", "-m", "torchtitan.train", "--module", "titan_ext"]
    command += ["--config", config, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    output = done.stdout + done.stderr
    return re.sub(r"\x1b\[[0-9;]*m", "", output)


def _small(dump_folder: Path, *more: str) -> list[str]:
    flags = ["--training.steps", "1", "--training.seq_len", "64", "--training.local_batch_size"]
    flags += ["1", "--checkpoint.no-enable", "--debug.seed", "42"]
    return [*flags, "--dump_folder", str(dump_folder), *more]


def _fork(config: str, *flags: str) -> str:
    """As ``_launch``, without torchrun and its imports."""
    folder = Path(flags[-1])
    line = f"torchrun --nproc_per_node=2 -m torchtitan.train --module titan_ext --config {config} "
    ranks = run_line(folder, line + shlex.join(flags))
    return re.sub(r"\x1b\[[0-9;]*m", "", ranks[0].out + ranks[0].error)


@pytest.mark.parametrize("launch", [_fork, pytest.param(_launch, marks=pytest.mark.slow)])
def test_toml_with_flags_that_win(launch: Callable[..., str], tmp_path: Path):
    output = launch(str(ROOT / "train_configs/moe_debug.toml"), *_small(tmp_path))
    assert re.search(r"step:  1  loss:  8\.\d+", output), output[-3000:]
    assert "sequence length 64, total steps 1" in output
    assert 'FSDP units: auto is "submodule" (EP 2' in output
    assert "FSDP units: submodule, 15 units" in output


@pytest.mark.slow
def test_config_function_of_titan(tmp_path: Path):
    """MODULE=deepseek_v3 to MODULE=titan_ext, and everything else kept."""
    data = ["--dataloader.dataset", "python_stdlib", "--hf_assets_path", str(_tokenizer())]
    flags = _small(tmp_path, *data, "--parallelism.expert_parallel_degree", "2")
    output = _launch("deepseek_v3_debugmodel", *flags)
    assert re.search(r"step:  1  loss:  8\.\d+", output), output[-3000:]
    assert 'FSDP units: auto is "submodule" (EP 2' in output
    assert "FSDP units: submodule, 15 units" in output


@pytest.mark.slow
def test_dry_run_of_a_large_job(tmp_path: Path):
    """run_train.sh with NGPU=64 COMM_MODE=fake_backend: one process, no torchrun."""
    command = [sys.executable, "-m", "torchtitan.train", "--module", "titan_ext", "--config"]
    command += ["train_configs/moe_debug.toml", *_small(tmp_path), "--comm.mode=fake_backend"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NGPU": "64", "LOCAL_RANK": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    output = done.stdout + done.stderr
    assert "dp_shard=64" in output, output[-3000:]
    assert "Training completed" in output


@pytest.mark.slow
def test_a_wrong_name_ends_before_any_process_group(tmp_path: Path):
    # One process: torchrun would end the other rank, and its message, when the first has failed.
    output = _launch("deepseek_v3_debugmodl", *_small(tmp_path), processes=1)
    assert "did you mean 'deepseek_v3_debugmodel'?" in output
    assert "device mesh" not in output


def _tokenizer() -> Path:
    from titan_ext.base.stdlib_corpus import default_tokenizer_path, make_corpus

    make_corpus()
    return default_tokenizer_path()


_WORKER = """
import os, signal, sys, time
def stop(signum, frame):
    print(f"rank {os.environ['RANK']}: {signal.Signals(signum).name}", flush=True)
    time.sleep(0.5)  # the rest of its step
    sys.exit(0)
if len(sys.argv) == 1:
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


def _make_train(folder: Path, *arguments: str, then: str = "") -> None:
    """In this process: ``make``, which runs titan_ext.run.launch with two workers."""
    (folder / "worker.py").write_text(_WORKER)
    launch = f"exec {sys.executable} -m titan_ext.run.launch --report . --nproc_per_node=2"
    launch += f" --rdzv_backend c10d --rdzv_endpoint=localhost:0 worker.py {' '.join(arguments)}"
    (folder / "Makefile").write_text(f"train:\n\t@{launch} </dev/null\n")
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(ROOT)
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):  # of the make that runs the tests
        os.environ.pop(name, None)
    os.execvp("make", ["make", "train"])


def _stop_when_ready(pid: int, output: int, stop: Callable[[], object]) -> tuple[int, str]:
    """``stop`` when both workers are ready; the exit code and what was printed."""
    printed, stopped = b"", False
    with contextlib.suppress(OSError):  # EIO: all have ended
        while chunk := os.read(output, 4096):
            printed += chunk
            if not stopped and printed.count(b"ready") == 2:
                stopped = True
                stop()
    _, status = os.waitpid(pid, 0)
    os.close(output)
    return os.waitstatus_to_exitcode(status), printed.decode()


def _press_ctrl_c(folder: Path, *arguments: str) -> tuple[int, str]:
    """On a terminal, with another standard input."""
    pid, terminal = pty.fork()
    if pid == 0:
        _make_train(folder, *arguments)
    return _stop_when_ready(pid, terminal, lambda: os.write(terminal, b"\x03"))


def _signal_the_group(folder: Path, signum: int) -> tuple[int, str]:
    """Without a terminal, as ``timeout`` and a supervisor do."""
    output, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.dup2(theirs, 1)
        os.dup2(theirs, 2)
        _make_train(folder)
    os.close(theirs)
    return _stop_when_ready(pid, output, lambda: os.killpg(pid, signum))


def _with_losses(folder: Path) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tb")) as writer:
        writer.add_scalar(LOSS, 8.0, 1)
    return folder


def test_ctrl_c_ends_make_train_in_good_order(tmp_path: Path):
    code, output = _press_ctrl_c(_with_losses(tmp_path))
    assert code == 0, output
    assert "rank 0: SIGINT" in output
    assert "rank 1: SIGINT" in output
    assert output.rstrip().splitlines()[-1].startswith("loss 8.000 at step 1")
    assert "Traceback" not in output


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_make_and_its_group_saves_and_reports(tmp_path: Path, signum: signal.Signals):
    code, output = _signal_the_group(_with_losses(tmp_path), signum)
    assert code == -signum, "make dies of it whatever it runs"
    assert output.count(signum.name) == 2, output
    assert output.rstrip().splitlines()[-1].startswith("loss 8.000 at step 1")
    assert "***" not in output


def test_ctrl_c_before_training_ends_at_once(tmp_path: Path):
    code, output = _press_ctrl_c(tmp_path, "starting")
    assert code == 2, output  # make's, for a command that failed
    assert "stopped at once; what was not saved is lost" in output
    assert "Error 130" in output
    assert "Traceback" not in output


_LAUNCHER = """
import signal, sys
from titan_ext.run.launch import _Launch
signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
for _ in range(int(sys.argv[2])):
    code = _Launch(["sh", "-c", sys.argv[1]]).wait()
    while signal.sigtimedwait(signals, 0):  # those of the last trial
        pass
    print(code, flush=True)
"""
_WORKER_OF_STUB = """
import os, signal, sys, time
launcher, torchrun = int(os.environ["L"]), int(os.environ["T"])
def listen(ends=True):
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: ends and os._exit(0))
"""


@contextlib.contextmanager
def _launcher(worker: str, times: int = 1, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """The launcher, with a shell for torchrun and one worker, which runs ``worker``."""
    program = shlex.join([sys.executable, "-I", "-S", "-c", _WORKER_OF_STUB + worker])
    command = f"export L=$PPID T=$$; LOCAL_RANK=0 {program}; exit $?"
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, command, str(times)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    with process:
        yield process


def test_two_signals_at_once_are_one_request():
    """The second comes while the launcher looks for its workers; a hundred times."""
    for first, second in (("TERM", "TERM"), ("TERM", "INT"), ("INT", "TERM"), ("HUP", "TERM")):
        sends = f"os.kill(launcher, signal.SIG{first}); os.kill(launcher, signal.SIG{second})"
        with _launcher(f"listen()\n{sends}\ntime.sleep(99)", times=25) as launcher:
            output, error = launcher.communicate(timeout=PATIENCE_S)
        assert output.split() == ["0"] * 25, (first, second, error)


def test_a_later_signal_ends_at_once():
    sends = "os.kill(launcher, signal.SIGTERM); time.sleep(1.2)\n" * 2
    with _launcher(f"listen(ends=False)\n{sends}time.sleep(99)") as launcher:
        output, error = launcher.communicate(timeout=PATIENCE_S)
    assert output == "130\n"
    assert error == "stopped at once; what was not saved is lost\n"


def test_what_a_shell_ignores_does_not_stop_a_run():
    """nohup ignores SIGHUP, which a terminal sends as it closes."""

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    worker = "listen()\nos.kill(launcher, signal.SIGHUP); time.sleep(0.2); sys.exit(3)"
    with _launcher(worker, preexec_fn=ignore) as launcher:
        assert launcher.communicate(timeout=PATIENCE_S)[0] == "3\n"


def test_torchrun_ends_with_its_launcher():
    """Killed, as by ``timeout -k`` or Ctrl-\\."""
    with _launcher("print(torchrun, flush=True); os.read(0, 1)", stdin=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        torchrun = int(launcher.stdout.readline())
        assert is_alive(torchrun)
        launcher.kill()
        deadline = time.monotonic() + PATIENCE_S
        while is_alive(torchrun):
            assert time.monotonic() < deadline, "torchrun outlived its launcher"
            time.sleep(0.01)


def test_a_torchrun_that_was_killed_is_said():
    with _launcher("os.kill(torchrun, signal.SIGKILL)") as launcher:
        output, error = launcher.communicate(timeout=PATIENCE_S)
    assert (output, error) == ("137\n", "torchrun was ended by SIGKILL\n")
