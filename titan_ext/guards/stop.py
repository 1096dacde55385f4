"""How a run is stopped from outside: a signal saves first, and no worker outlives its launcher.

A scheduler that takes a machine back sends SIGTERM, Ctrl-C sends SIGINT. A worker that gets one
finishes the step, does one more with all the others, saves it as any other checkpoint, and ends.
All ranks must do so after the same step, so they ask each other once a step, on a gloo group of
their own: that is a message between hosts, which no device waits for.

One request can arrive as several signals: Slurm signals every process of a job, and torchrun passes
on what it got itself. So only a signal that comes later than that means "now".

torchrun's workers have sessions of their own: SIGKILL of torchrun leaves them training, and writing
into the folder that the next launch reads. Linux ends a process with its parent if asked to.
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
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.tools.logging import logger

__all__ = ["StopOnSignal", "end_with_launcher", "warn_of_restarts_that_hang"]

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
    """Say how ``torchrun --max-restarts`` can work, where it was asked for and would not.

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


class StopOnSignal:
    """Ends the run after a step that has been saved, on every rank, when any rank gets a signal.

    SIGTERM and SIGINT are the same request. One more of either, a second or longer after the first,
    does what it did before this object was made: SIGTERM ends the process, SIGINT raises
    KeyboardInterrupt. A signal that the process was started to ignore stays ignored.
    """

    def __init__(
        self, checkpointer: BaseCheckpointManager, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """On every rank. Without checkpoints there is nothing to wait for: a signal ends at once.

        Args:
            checkpointer: What saves the last step.
            clock: Seconds, for tests.
        """
        self._checkpointer: Any = checkpointer
        self._clock = clock
        self._asked_by = 0
        self._asked_at_s = 0.0
        self._last_step = False
        self._group: dist.ProcessGroup | None = None
        self._before: dict[int, Any] = {}
        communicates = dist.get_backend() != "fake" and dist.is_gloo_available()
        if checkpointer.enable and hasattr(checkpointer, "interval") and communicates:
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", group_desc="stop"))
            for signum in _STOP_SIGNALS:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._note)

    def now(self) -> bool:
        """Whether training ends here; asked before every step, on every rank."""
        if self._last_step:
            self._checkpointer.maybe_wait_for_saving()
            return True
        if self._group is not None and (asked_by := self._asked_on_any_rank(self._group)):
            name = signal.Signals(asked_by).name
            logger.info(f"{name}: one more step, which is saved, and then the run ends.")
            self._checkpointer.interval = 1  # the step that follows is saved, whichever it is
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
