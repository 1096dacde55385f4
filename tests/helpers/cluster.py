"""Run a function on N gloo ranks, each a process, in seconds.

A fork server imports torch and torchtitan once (``tests.helpers.preload``); every rank is forked
from it. A rank that fails ends the others, and the error that the test sees is the first rank's
own, with the end of its log.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import resource
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
import unittest.mock
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

from titan_ext.base.messages import without_phases
from titan_ext.verify.ranks import free_port

_ROOT = Path(__file__).parents[2]
SCRIPT = Path(sys.executable).parent / "titan_ext"
"""As pip installs it."""

PATIENCE_S = 240.0
"""After which a test calls a hang what has not happened; nothing that passes waits for it.

Far more than anything takes on a machine of its own: tests share theirs with other work. Less than
the limit of a whole test (pyproject.toml), which knows no rank's log.
"""


class RankError(AssertionError):
    """A rank failed, or did not end in time."""


def wait_until(
    happens: Callable[[], bool], otherwise: str, launcher: subprocess.Popen | None = None
) -> None:
    """Fail after ``PATIENCE_S``, or when the launcher has ended, where it does not happen."""
    deadline = time.monotonic() + PATIENCE_S
    while not happens():
        assert launcher is None or launcher.poll() is None, "the launcher has ended"
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def refusal_of(call: Callable[..., Any], *args: Any, **named: Any) -> str:
    """What the call says as it raises ValueError; "" if it does not. For a rank to report."""
    try:
        call(*args, **named)
    except ValueError as error:
        return str(error)
    return ""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    log_folder: Path,
    timeout_s: float = PATIENCE_S,
) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` processes; return their results by rank.

    The processes have RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun;
    the function initialises the process group if it needs one, which ends with its process. Their
    output goes to ``log_folder/rank_N.log``.

    Raises:
        RankError: if a rank raises, dies, or runs past ``timeout_s``.
    """
    ranks = start_ranks(function, world_size, *args, log_folder=log_folder)
    try:
        return _collect(ranks, time.monotonic() + timeout_s)
    finally:
        kill_ranks(ranks)


class Command(NamedTuple):
    """What a command of ``titan_ext`` did."""

    code: int
    out: str
    error: str
    cpu_s: float
    peak_gib: float


def run_command(folder: Path, *arguments: str) -> Command:
    """``titan_ext ARGUMENTS`` in ``folder``, in a process of its own that need not import torch."""
    return run_line(folder, shlex.join(["titan_ext", *arguments]))[0]


def run_line(folder: Path, line: str) -> list[Command]:
    """``titan_ext ...``, ``python -m MODULE ...``, or all ranks of ``torchrun ... -m MODULE ...``.

    In ``folder``. No launcher runs, and no process need import torch. Nor need the commands of
    titan_ext that these begin themselves. titan_ext is the script that is installed.
    """
    program, *rest = shlex.split(line, comments=True)
    launched = program == "torchrun"
    ranks = int(rest.pop(0).removeprefix("--nproc_per_node=")) if launched else 1
    if program == "titan_ext":
        module, arguments = str(SCRIPT), rest
    else:
        flag, module, *arguments = rest
        assert flag == "-m", line
    log = folder.parent / f"{folder.name}.logs"
    return run_ranks(_run_module, ranks, folder, module, arguments, log, launched, log_folder=log)


def _run_module(
    folder: Path, module: str, arguments: list[str], log: Path, launched: bool
) -> Command:
    out, error = (log / f"{name}_{os.environ['RANK']}" for name in ("out", "error"))
    if not launched:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]  # as in a terminal
    os.environ["PYTHONPATH"] = str(_ROOT)
    os.chdir(folder)
    # A script has its own folder first on its path, and python -m the current one.
    is_script = module == str(SCRIPT)
    sys.path.insert(0, str(SCRIPT.parent if is_script else folder))
    sys.argv = [module, *arguments]
    for path, stream in ((out, sys.stdout), (error, sys.stderr)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), stream.fileno())
    before = resource.getrusage(resource.RUSAGE_SELF)
    try:
        # The program ends its process; this one has an answer to give.
        with forked_commands(), unittest.mock.patch.object(os, "_exit", sys.exit):
            (runpy.run_path if is_script else runpy.run_module)(module, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = cast(int, end.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    said = without_phases(error.read_text())
    return Command(code, out.read_text(), said, cpu_s, after.ru_maxrss / 2**20)


@contextlib.contextmanager
def forked_commands() -> Iterator[None]:
    """In a rank: the commands of titan_ext that it begins are forked too, as in ``run_command``.

    Their environment is the server's.
    """
    start = subprocess.run

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess:
        if command[:3] != [sys.executable, "-m", "titan_ext"]:
            return start(command, **options)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder)
            arguments = (Path.cwd(), "titan_ext", command[3:], log, False)
            (done,) = run_ranks(_run_module, 1, *arguments, log_folder=log)
        if not options.get("capture_output"):
            print(done.out, end="", flush=True)
            print(done.error, end="", file=sys.stderr, flush=True)
        return subprocess.CompletedProcess(command, done.code, done.out, done.error)

    with unittest.mock.patch.object(subprocess, "run", run):
        yield


def start_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, log_folder: Path
) -> list[Any]:
    """Begin what ``run_ranks`` does, and return a (process, receiver, log) for each rank."""
    context = _fork_server()
    log_folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    ranks = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        log = log_folder / f"rank_{rank}.log"
        process = context.Process(
            target=_run_rank, args=(sender, log, rank, world_size, port, function, args)
        )
        process.start()
        sender.close()
        ranks.append((process, receiver, log))
    return ranks


def kill_ranks(ranks: list[Any]) -> None:
    """SIGKILL what still runs of them."""
    for process, _, _ in ranks:
        if process.is_alive():
            process.kill()
    for process, _, _ in ranks:
        process.join()


def _collect(ranks: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {receiver: rank for rank, (_, receiver, _) in enumerate(ranks)}
    while waiting:
        remaining = deadline - time.monotonic()
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, remaining))
        if not ready:
            late = sorted(waiting.values())
            raise RankError(f"ranks {late} did not end in time\n{_tail(ranks[late[0]][2])}")
        for receiver in ready:
            rank = waiting.pop(receiver)
            try:
                ok, value = cast(Connection, receiver).recv()
            except EOFError:
                ok, value = False, f"rank {rank} died"
            if not ok:
                raise RankError(f"rank {rank}: {value}\n{_tail(ranks[rank][2])}")
            results[rank] = value
    return [results[rank] for rank in range(len(ranks))]


def _run_rank(sender, log: Path, rank: int, world_size: int, port: int, function, args) -> None:
    assert "tests.helpers.preload" in sys.modules, "the fork server preloaded nothing"
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    with open(log, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    try:
        sender.send((True, function(*args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(0)  # no interpreter shutdown: gloo threads of a failed rank would hang it


def _tail(log: Path, lines: int = 80) -> str:
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _fork_server():
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    if "tests.helpers.preload" in sys.modules:  # a rank: its own server serves it
        server: Any = multiprocessing.forkserver._forkserver
        server.ensure_running = multiprocessing.resource_tracker.ensure_running
        return context
    context.set_forkserver_preload(["tests.helpers.preload"])
    with contextlib.chdir(_ROOT):  # which the server has on its path
        multiprocessing.forkserver.ensure_running()
    return context
