# SPDX-License-Identifier: BSD-3-Clause
"""torchrun for one machine, with an orderly end at Ctrl-C.

``python -m titan_ext.launch`` takes torchrun's arguments. torchrun itself passes a signal on to its
workers and then fails, with a traceback and exit code 1, however well they end. This one asks the
workers, which finish their step and save (``guards.stop``), and torchrun ends as they do: with 0. A
second signal, or one before training begins, kills all of them.

It leaves out torchrun's own traceback, which says only that a worker failed. The last lines are the
message of the rank that failed first.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

_ONE_REQUEST_S = 1.0  # as in guards.stop
_INTERRUPTED = 130  # as a shell says it


class _Launch:
    """torchrun and its workers, and what a signal does to them."""

    def __init__(self, arguments: list[str]) -> None:
        program = "from titan_ext.launch import torchrun; torchrun()"
        command = [sys.executable, "-c", program, *arguments]
        # torchao 0.18 registers two enums in a way that torch warns of in each process.
        environment = {"TORCH_LOGS": "-torch.utils._pytree", **os.environ}
        # In a group of its own, which a terminal's Ctrl-C does not reach.
        self._torchrun = subprocess.Popen(command, env=environment, process_group=0)
        self._asked_at_s: float | None = None
        self._killed = False
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self._stop)

    def wait(self) -> int:
        """The exit code."""
        code = self._torchrun.wait()
        return _INTERRUPTED if self._killed else code

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._asked_at_s is not None and now_s - self._asked_at_s < _ONE_REQUEST_S:
            return
        workers = _workers(self._torchrun.pid)
        if self._asked_at_s is None and workers and all(map(_handles_sigterm, workers)):
            self._asked_at_s = now_s
            _signal(workers, signal.SIGTERM if signum == signal.SIGHUP else signum)
            return
        self._killed = True
        _signal([self._torchrun.pid, *workers], signal.SIGKILL)
        print("stopped at once; what was not saved is lost", file=sys.stderr)


def _workers(torchrun: int) -> list[int]:
    """The process ids of torchrun's workers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == torchrun and b"\0LOCAL_RANK=" in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found


def _handles_sigterm(worker: int) -> bool:
    """Whether ``guards.stop`` listens there: until then SIGTERM has no handler."""
    status = Path(f"/proc/{worker}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def _signal(processes: list[int], signum: int) -> None:
    for pid in processes:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def _take_terminal() -> int:
    """Make Ctrl-C ours alone: ``make`` would die of it. Return the group that had the terminal."""
    if not sys.stdin.isatty() or os.tcgetpgrp(0) != os.getpgrp():
        return 0
    had = os.getpgrp()
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # stops a background process that takes it
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # the shell would not see that we stopped
    if had != os.getpid():
        os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpgrp())
    return had


def torchrun() -> None:
    """torchrun with the arguments in ``sys.argv``; a worker's failure ends it with 1."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        in_file = failure.error_file_data.get("message")
        message, extra = failure.message, {}
        if isinstance(in_file, dict):
            message, extra = in_file.get("message", message), in_file.get("extraInfo", {})
        if extra.get("py_callstack") != message:  # not a user's mistake: see names
            print(error, file=sys.stderr)
        sys.exit(f"rank {rank}: {message}")


def main() -> int:
    had_terminal = _take_terminal()
    try:
        return _Launch(sys.argv[1:]).wait()
    finally:
        if had_terminal:
            os.tcsetpgrp(0, had_terminal)


if __name__ == "__main__":
    sys.exit(main())
