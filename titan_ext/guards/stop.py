# SPDX-License-Identifier: BSD-3-Clause
"""Stops a run from outside: save on a signal, and end workers with their launcher.

A scheduler that takes a machine back sends SIGTERM, Ctrl-C sends SIGINT. A worker that gets one
finishes the step, does one more with all the others, saves a normal checkpoint, and ends. All ranks
must do so after the same step, so they ask each other once a step, on their own gloo group: a
message between hosts, for which no device waits.

One request can arrive as several signals: Slurm signals every process of a job, and torchrun passes
on its own signal. So only a signal that comes later means "now".

torchrun's workers have their own sessions. After a SIGKILL of torchrun they would keep training,
and writing into the folder that the next launch reads. Linux ends a process with its parent on
request.
"""

import ctypes
import os
import platform
import signal
import time
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torchtitan.tools.logging import logger

from titan_ext.guards import RunCheck

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ONE_REQUEST_S = 1.0


def end_with_launcher() -> None:
    """Have the kernel end this process (SIGKILL) when the torchrun that started it has died.

    Does nothing where torchrun did not start it, and on systems other than Linux.
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

    torchrun keeps one store for all attempts, and torch 2.15 reads the first attempt's addresses
    from it in the second: ``init_process_group`` then waits for processes that are gone.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts > 0 and shares_store and os.environ.get("LOCAL_RANK") == "0":
        logger.warning(
            f"torchrun --max-restarts={restarts}: a restart hangs in init_process_group unless "
            "torchrun is started with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment."
        )


class StopOnSignal(RunCheck):
    """When any rank gets a signal, ends the run on every rank after a saved step.

    SIGTERM and SIGINT mean the same. Another one, a second or longer after the first, does what it
    did before ``after_build``: SIGTERM ends the process, SIGINT raises KeyboardInterrupt. A signal
    that the process was started to ignore stays ignored. Without checkpoints a signal ends the
    process at once.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock  # seconds
        self._asked_by = 0
        self._asked_at_s = 0.0
        self._last_step = False
        self._group: dist.ProcessGroup | None = None
        self._before: dict[int, Any] = {}

    def before_start(self, config: Any) -> None:
        end_with_launcher()
        warn_of_restarts_that_hang()

    def after_build(self, trainer: Any) -> None:
        checkpointer = trainer.checkpointer
        communicates = dist.get_backend() != "fake" and dist.is_gloo_available()
        if checkpointer.enable and hasattr(checkpointer, "interval") and communicates:
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", group_desc="stop"))
            for signum in _STOP_SIGNALS:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._note)

    def ends_run(self, trainer: Any) -> bool:
        if self._last_step:
            trainer.checkpointer.maybe_wait_for_saving()
            return True
        if self._group is not None and (asked_by := self._asked_on_any_rank(self._group)):
            name = signal.Signals(asked_by).name
            logger.info(f"{name}: one more step, which is saved, and then the run ends.")
            trainer.checkpointer.interval = 1  # the step that follows is saved, whichever it is
            self._last_step = True
        return False

    def _note(self, signum: int, frame: Any) -> None:
        if not self._asked_by:
            self._asked_by, self._asked_at_s = signum, self._clock()
        elif self._clock() - self._asked_at_s >= _ONE_REQUEST_S:
            signal.signal(signum, self._before[signum])
            signal.raise_signal(signum)

    def _asked_on_any_rank(self, group: dist.ProcessGroup) -> int:
        """The signal; 0 for none."""
        asked_by = torch.tensor(self._asked_by, dtype=torch.int32)
        dist.all_reduce(asked_by, op=dist.ReduceOp.MAX, group=group)
        return int(asked_by)
