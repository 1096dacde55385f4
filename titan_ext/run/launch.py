# SPDX-License-Identifier: BSD-3-Clause
"""torchrun for one machine, with an orderly end at Ctrl-C.

``python -m titan_ext.run.launch`` takes torchrun's arguments. torchrun itself passes a signal on to
its workers and then fails, with a traceback and exit code 1, however well they end. This one asks
the workers, which finish their step and save (``run.stop``), and torchrun ends as they do: with 0.
A second request, or one before training begins, kills all of them. ``--report FOLDER`` in front
draws the losses of that dump_folder at a good end: ``make`` starts no command after a signal.

It leaves out torchrun's own traceback, which says only that a worker failed. The last lines are the
message of the rank that failed first.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_ONE_REQUEST_S = 1.0  # as in run.stop
_INTERRUPTED = 130  # as a shell says it
_POLL_S = 1.0  # for one that was started with SIGCHLD ignored
_ASKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_NO_MESSAGE = "To enable traceback see"
"""What torchrun has for a worker that wrote no error file."""
_LIBC = ctypes.CDLL(None)


class _Launch:
    """torchrun and its workers, and what a signal does to them.

    One request can arrive as several signals: ``timeout`` signals a process and then its group,
    Slurm sends pairs. So signals are blocked, and taken one at a time. A handler would run again in
    the middle of its own work. A signal that we were started to ignore (``nohup``) stays ignored.
    """

    def __init__(self, command: list[str]) -> None:
        self._asks = {signum for signum in _ASKS if signal.getsignal(signum) != signal.SIG_IGN}
        signal.pthread_sigmask(signal.SIG_BLOCK, {*self._asks, signal.SIGCHLD})
        # torchao 0.18 registers two enums in a way that torch warns of in each process.
        environment = {"TORCH_LOGS": "-torch.utils._pytree", **os.environ}
        # In a group of its own, which a terminal's Ctrl-C does not reach.
        self._torchrun = subprocess.Popen(
            command, env=environment, process_group=0, preexec_fn=_before_torchrun
        )
        self._asked_at_s: float | None = None
        self._killed = False

    def wait(self) -> int:
        """The exit code."""
        while (code := self._torchrun.poll()) is None:
            signum = signal.sigtimedwait({*self._asks, signal.SIGCHLD}, _POLL_S)
            if signum is not None and signum.si_signo in self._asks:
                self._stop(signum.si_signo)
        if self._killed:
            return _INTERRUPTED
        if code < 0:
            print(f"torchrun was ended by {signal.Signals(-code).name}", file=sys.stderr)
        return code if code >= 0 else 128 - code

    def _stop(self, signum: int) -> None:
        if self._asked_at_s is not None and time.monotonic() - self._asked_at_s < _ONE_REQUEST_S:
            return
        torchrun = self._torchrun.pid
        if self._asked_at_s is None:
            listening = [pid for pid in _children(torchrun) if _is_worker_that_listens(pid)]
            _signal(listening, signal.SIGTERM if signum == signal.SIGHUP else signum)
            self._killed = not listening
        else:
            self._killed = True
        if self._killed:
            _signal([torchrun], signal.SIGSTOP)  # so that it starts no worker meanwhile
            _signal([*_children(torchrun), torchrun], signal.SIGKILL)
            print("stopped at once; what was not saved is lost", file=sys.stderr)
        self._asked_at_s = time.monotonic()  # what has come until now belongs to this request


def _before_torchrun() -> None:
    """Let torchrun's process end with the launcher, and unblock its signals."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_ASKS, signal.SIGCHLD})


def _children(parent: int) -> list[int]:
    """The process ids of the children of a process."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int((process / "stat").read_bytes().rpartition(b")")[2].split()[1]) == parent:
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found


def _is_worker_that_listens(child: int) -> bool:
    """Whether torchrun's child is a worker whose ``run.stop`` listens.

    SIGTERM has no handler before training begins, nor after it has ended.
    """
    process = Path("/proc", str(child))
    try:
        is_worker = b"\0LOCAL_RANK=" in b"\0" + (process / "environ").read_bytes()
        caught = int((process / "status").read_text().partition("SigCgt:")[2].split()[0], 16)
    except OSError:  # it has ended
        return False
    return is_worker and bool(caught >> (signal.SIGTERM - 1) & 1)


def _signal(processes: list[int], signum: int) -> None:
    for pid in processes:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


@contextlib.contextmanager
def _terminal() -> Iterator[None]:
    """Ctrl-C is ours alone: ``make`` would die of it.

    The terminal is the process's own, which need not be its standard input.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # there is none
        yield
        return
    had = os.getpgrp()
    if os.tcgetpgrp(terminal) != had:  # in the background
        yield
        return
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # stops a background process that takes it
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # the shell would not see that we stopped
    if had != os.getpid():
        os.setpgid(0, 0)
    os.tcsetpgrp(terminal, os.getpgrp())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it was closed
            os.tcsetpgrp(terminal, had)


def torchrun() -> None:
    """torchrun with the arguments in ``sys.argv``; a worker's failure ends it with 1."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    sys.argv[0] = "titan_ext.run.launch"  # in torchrun's usage
    try:
        run.main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"torchrun: {error}")
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        in_file = failure.error_file_data.get("message")
        message, extra = failure.message, {}
        if isinstance(in_file, dict):
            message, extra = in_file.get("message", message), in_file.get("extraInfo", {})
        if extra.get("py_callstack") != message:  # not a user's mistake: see names
            print(error, file=sys.stderr)
        if _NO_MESSAGE in message:
            message = f"ended with exit code {failure.exitcode}, and left no message"
        sys.exit(f"rank {rank}: {message}")


def main() -> int:
    arguments = sys.argv[1:]
    folder = arguments[1:2] if arguments[:1] == ["--report"] else []
    if folder:
        del arguments[:2]
    from titan_ext.toml.find import check_config, module_and_config

    known, _ = module_and_config(arguments)
    try:
        if known.module == "titan_ext" and known.config:
            check_config(known.config)  # before torch is imported, by torchrun and by each rank
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    program = "from titan_ext.run.launch import torchrun; torchrun()"
    with _terminal():
        code = _Launch([sys.executable, "-c", program, *arguments]).wait()
        if folder and code == 0:
            from titan_ext.base.run_folder import report

            try:
                print(report(Path(folder[0])))
            except (OSError, ValueError) as error:
                print(error, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
