# SPDX-License-Identifier: BSD-3-Clause
"""A check of a training run, which of its steps are checked, and how many ranks it has.

A check stops a bad run with one clear error, or says something of a good one.
``run.checks.RUN_CHECKS`` lists all; ``run.trainer`` calls each at these points.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

ONE_PROCESS_MODES = ("fake_backend", "local_tensor")
"""Values of ``comm.mode`` that train in one process."""


def world_size(config: Any) -> int | None:
    """Number of ranks of the run; None if unknown.

    As ``init_distributed`` counts them (torchtitan/distributed/utils.py).
    """
    names = ("WORLD_SIZE", "NGPU") if config.comm.mode in ("default", "torchcomms") else ("NGPU",)
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


def is_saved_anyway(trainer: "Trainer") -> bool:
    """True if Titan's checkpointer saves the trainer's step without being asked."""
    checkpoint, step = trainer.config.checkpoint, trainer.step
    return checkpoint.enable and (
        step % checkpoint.interval == 0
        or step == trainer.config.training.steps
        or (step == 1 and checkpoint.enable_first_step_checkpoint)
    )


def is_logged_or_saved(trainer: "Trainer") -> bool:
    """True if the trainer's step waits for the device anyway, the same on all ranks."""
    return is_saved_anyway(trainer) or trainer.metrics_processor.should_log(trainer.step)


class RunCheck:
    """One check of a training run. Each method is a point of the run; by default it does nothing.

    The trainer makes one object of each class in the list. At each point it calls all of them, on
    every rank, in the order of the list.
    """

    def before_start(self, config: "Trainer.Config") -> None:
        """Before any process group exists. Refuse here what would fail later on many ranks."""

    def before_build(self, config: "Trainer.Config") -> None:
        """The process groups exist, the model does not."""

    def after_build(self, trainer: "Trainer") -> None:
        """The trainer is complete, and no checkpoint has been loaded."""

    def around_run(self, trainer: "Trainer") -> AbstractContextManager[None]:
        """Around loading the checkpoint and all steps."""
        return nullcontext()

    def around_step(self, trainer: "Trainer") -> AbstractContextManager[None]:
        """Around forward, backward and optimizer of one step; saving comes after it."""
        return nullcontext()

    def ends_run(self, trainer: "Trainer") -> bool:
        """True if training ends here, the same on all ranks; asked before every step."""
        return False

    def receipts(self) -> dict[str, Any]:
        """What the run's record says at its end, by subject."""
        return {}
