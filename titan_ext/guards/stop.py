"""How a run is stopped from outside: SIGTERM saves first, and no worker outlives its launcher.

A scheduler that takes a machine back sends SIGTERM. A worker that gets it finishes the step, does
one more with all the others, saves it as any other checkpoint, and ends. All ranks must do so after
the same step, so they ask each other once a step, on a gloo group of their own: that is a message
between hosts, which no device waits for.

torchrun's workers have sessions of their own: SIGKILL of torchrun leaves them training, and writing
into the folder that the next launch reads. Linux ends a process with its parent if asked to.
"""

import ctypes
import os
import platform
import signal
from typing import Any, cast

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.tools.logging import logger

__all__ = ["StopOnSignal", "end_with_launcher", "warn_of_restarts_that_hang"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
    """Ends the run after a step that has been saved, on every rank, when any rank gets SIGTERM."""

    def __init__(self, checkpointer: BaseCheckpointManager) -> None:
        """On every rank. Without checkpoints there is nothing to wait for: SIGTERM ends at once."""
        self._checkpointer: Any = checkpointer
        self._asked = False
        self._last_step = False
        self._group: dist.ProcessGroup | None = None
        communicates = dist.get_backend() != "fake" and dist.is_gloo_available()
        if checkpointer.enable and hasattr(checkpointer, "interval") and communicates:
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", group_desc="stop"))
            signal.signal(signal.SIGTERM, self._note)

    def now(self) -> bool:
        """Whether training ends here; asked before every step, on every rank."""
        if self._last_step:
            self._checkpointer.maybe_wait_for_saving()
            return True
        if self._group is not None and self._anyone_asked(self._group):
            logger.info("SIGTERM: one more step, which is saved, and then the run ends.")
            self._checkpointer.interval = 1  # the step that follows is saved, whichever it is
            self._last_step = True
        return False

    def _note(self, signum: int, frame: Any) -> None:
        self._asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends at once

    def _anyone_asked(self, group: dist.ProcessGroup) -> bool:
        asked = torch.tensor(int(self._asked), dtype=torch.int32)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=group)
        return bool(asked)
