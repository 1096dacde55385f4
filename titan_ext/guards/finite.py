# SPDX-License-Identifier: BSD-3-Clause
"""Stops a run before it applies or saves gradients that are not finite.

The reduction spreads one rank's NaN to all ranks, and the step to every weight. Titan checks only
the loss, when it logs: too late if it saves a checkpoint first. This check waits for the device, so
it runs only on steps that are logged or saved anyway: weights that became NaN in between make the
next gradients NaN as well.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from titan_ext.guards import RunCheck


class FiniteGradients(RunCheck):
    """Checks the clipped gradients before the optimizers use them.

    Raises RuntimeError in the step, on the ranks that hold gradients that are not finite: after
    clipping by a norm that is NaN, all of them.
    """

    def after_build(self, trainer: Any) -> None:
        def check(*_) -> None:
            if not _is_logged_or_saved(trainer):
                return
            gradients = [
                param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
                for part in trainer.model_parts
                for param in part.parameters()
                if param.grad is not None
            ]
            largest = torch.nn.utils.get_total_norm(gradients, norm_type=float("inf"))
            if torch.isfinite(largest):
                return
            try:
                trainer.checkpointer.maybe_wait_for_saving()  # it may be the last good one
            finally:
                raise RuntimeError(
                    f"step {trainer.step}: gradients are not finite. The optimizer's step was not "
                    "taken and nothing was saved since the last checkpoint. To learn which rank "
                    "and unit they come from, run again with --debug.record_collectives."
                )

        trainer.optimizers.register_step_pre_hook(check)


def _is_logged_or_saved(trainer: Any) -> bool:
    return is_saved_anyway(trainer) or trainer.metrics_processor.should_log(trainer.step)


def is_saved_anyway(trainer: Any) -> bool:
    """Whether Titan's checkpointer saves the trainer's step without being asked."""
    checkpoint, step = trainer.config.checkpoint, trainer.step
    return checkpoint.enable and (
        step % checkpoint.interval == 0
        or step == trainer.config.training.steps
        or (step == 1 and checkpoint.enable_first_step_checkpoint)
    )
