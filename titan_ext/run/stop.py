# SPDX-License-Identifier: BSD-3-Clause
"""Stops a run from outside: save on a signal, and end workers with their launcher.

A scheduler that takes a machine back sends SIGTERM, Ctrl-C sends SIGINT. A worker that gets one
says so at once, finishes the step with all the others, saves a normal checkpoint, and ends. All
ranks must do so after the same step. A thread of each looks once a second, in the job's store,
whether another rank has got one (``base.agreement.LastStep``), so no step waits for it.

One request can arrive as several signals: Slurm signals every process of a job, and torchrun passes
on its own signal. So only a signal that comes later means "now".
"""

import atexit
import contextlib
import ctypes
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_ext.base.agreement import LastStep, this_job
from titan_ext.base.messages import ranks_in_words
from titan_ext.base.run_check import RunCheck, is_saved_anyway
from titan_ext.base.tensors import are_finite

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ONE_REQUEST_S = 1.0
_ENDS_WITHIN_S = 60.0
"""A store that does not answer for so long has died."""
_LOOKS_EVERY_S = 1.0
"""One server answers all ranks; at 4,096 this is a few percent of one of its cores."""


def end_with_launcher() -> None:
    """Have the kernel end this process (SIGKILL) when the torchrun that started it has died.

    torchrun's workers have their own sessions: after a SIGKILL of torchrun they would keep
    training, and writing into the folder that the next launch reads. Does nothing where torchrun
    did not start it, and on systems other than Linux.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or platform.system() != "Linux":
        return
    launcher = os.getppid()
    failed = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if failed:
        logger.warning("this worker cannot be ended with its launcher: prctl refused.")
    elif os.getppid() != launcher:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def warn_of_restarts_that_hang() -> None:
    """Warn if ``torchrun --max-restarts`` is on but would hang.

    torchrun keeps one store for all attempts. In the second one torch 2.15 reads the first one's
    addresses from it, and ``init_process_group`` waits for processes that are gone.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts > 0 and shares_store and os.environ.get("LOCAL_RANK") == "0":
        logger.warning(
            f"torchrun --max-restarts={restarts}: a restart hangs in init_process_group unless "
            "torchrun is started with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment."
        )


class StopOnSignal(RunCheck):
    """When any rank gets a signal, ends the run on every rank after the same step, saved once.

    It is the step that they are in. Those that hear of it up to a second later may have begun the
    next, which is then the last.

    SIGTERM and SIGINT mean the same. Another one, a second or longer after the first, does what it
    did before ``after_build``: SIGTERM ends the process, SIGINT raises KeyboardInterrupt. A signal
    that the process was started to ignore stays ignored.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock  # seconds
        self._asked_by = 0  # the signal
        self._asked_at_s = 0.0
        self._loaded_step: int | None = None
        self._last_step: LastStep | None = None
        self._is_over = False
        self._before: dict[int, Any] = {}
        self._thread: threading.Thread | None = None
        self._sender: socket.socket | None = None  # the interpreter's end; open until both are gone

    def before_start(self, config: Trainer.Config) -> None:
        end_with_launcher()
        warn_of_restarts_that_hang()

    def after_build(self, trainer: Trainer) -> None:
        self._last_step = LastStep(this_job())
        for signum in _STOP_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._note)
        ending = ", which is saved" if _can_save(trainer) else "; nothing is saved"
        self._answer_at_once(self._last_step, ending)

    @contextlib.contextmanager
    def around_run(self, trainer: Trainer) -> Iterator[None]:
        try:
            yield
        finally:  # there is no step left to wait for
            signal.set_wakeup_fd(-1)
            self._end_thread()
            for signum, handler in self._before.items():
                signal.signal(signum, handler)

    def ends_run(self, trainer: Trainer) -> bool:
        if self._loaded_step is None:
            self._loaded_step = trainer.step
        assert self._last_step is not None, "asked before after_build"
        if self._asked_by:  # the thread may not have come to it
            self._last_step.ask(self._asked_by)
        if self._last_step.may_begin(trainer.step + 1):
            return False
        name, saved = signal.Signals(self._last_step.reason()).name, "nothing was saved"
        checkpointer: Any = trainer.checkpointer
        if _can_save(trainer) and trainer.step:
            if trainer.step != self._loaded_step and not is_saved_anyway(trainer):
                check_weights(trainer, name)
                # Not last_step=True: by its default Titan then saves weights only, and nobody can
                # resume from those.
                checkpointer.interval = 1  # whichever step it is
                checkpointer.save(trainer.step)
            checkpointer.maybe_wait_for_saving()
            saved = f"saved in {checkpointer.folder}/step-{trainer.step}"
        logger.info(f"{name}: stopped after step {trainer.step}, {saved}.")
        return True

    def _answer_at_once(self, last_step: LastStep, ending: str) -> None:
        """Log a line within moments of the first signal, and tell the other ranks.

        Python runs its handlers between two operations of the main thread, which may wait for a
        device or another rank. The interpreter writes the signal to a file descriptor at once.
        """
        receiver, sender = socket.socketpair()
        receiver.settimeout(_LOOKS_EVERY_S)
        sender.setblocking(False)
        self._sender = sender
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)

        def answer() -> None:
            said = is_asked = False
            while not self._is_over:
                signum = 0
                with contextlib.suppress(TimeoutError):
                    signum = next(iter(receiver.recv(1)), 0)
                if self._is_over:
                    return
                is_stop = signum in self._before
                if is_stop and not said:
                    said = True
                    name = signal.Signals(signum).name
                    again = "A second signal ends the run at once."
                    logger.info(f"{name}: stopping after this step{ending}. {again}")
                if is_asked:
                    continue
                try:
                    if is_stop:
                        last_step.ask(signum)
                    is_asked = is_stop or last_step.look()
                except RuntimeError as error:  # its process has ended
                    if not self._is_over:
                        logger.warning(f"signals to other ranks are no longer noticed: {error}")
                    return

        self._thread = threading.Thread(target=answer, name="stop", daemon=True)
        self._thread.start()
        atexit.register(self._end_thread)  # of a start that fails before it trains

    def _end_thread(self) -> None:
        """Wait for the thread, which may be inside of the store's C++.

        A daemon thread that is there when the interpreter ends would abort the process (SIGABRT):
        torchrun would take a finished run for a failed one.
        """
        self._is_over = True
        if self._sender is not None and self._thread is not None:
            with contextlib.suppress(OSError):  # full, so that it is awake
                self._sender.send(b"\0")
            self._thread.join(_ENDS_WITHIN_S)

    def _note(self, signum: int, frame: Any) -> None:
        if not self._asked_by:
            self._asked_by, self._asked_at_s = signum, self._clock()
        elif self._clock() - self._asked_at_s >= _ONE_REQUEST_S:
            signal.signal(signum, self._before[signum])
            signal.raise_signal(signum)


def check_weights(trainer: Trainer, why: str) -> None:
    """Raise RuntimeError on every rank if one has weights that are not finite.

    Gradients are checked in steps that are logged or saved, and this step was to be neither.
    """
    parameters = (param for part in trainer.model_parts for param in part.parameters())
    said = "" if are_finite(p for p in parameters if p.requires_grad) else "not finite"

    def verdict_of(classes: list[tuple[str, list[int]]]) -> str:
        return " and ".join(ranks_in_words(ranks) for wrong, ranks in classes if wrong)

    if ranks := this_job().compare("weights", said, verdict_of):
        raise RuntimeError(
            f"{why}: stopped after step {trainer.step}, whose weights are not finite on "
            f"{ranks}. Nothing was saved since the last checkpoint."
        )


def _can_save(trainer: Trainer) -> bool:
    checkpointer = trainer.checkpointer
    can = checkpointer.enable and hasattr(checkpointer, "interval")
    return can and not trainer.config.checkpoint.load_only
