"""Gradients that are not finite are neither applied nor saved.

One NaN in one rank's gradients is in every rank's after the reduction, and in every weight after
the step. Titan looks at the loss, when it logs: too late where a checkpoint is saved first. The
check reads the device, so it is made only on steps that are logged or saved anyway: weights that
became NaN in between make the next gradients NaN as well.
"""

import torch
from torch.distributed.tensor import DTensor
from torchtitan.trainer import Trainer

__all__ = ["refuse_gradients_that_are_not_finite"]


def refuse_gradients_that_are_not_finite(trainer: Trainer) -> None:
    """Check the clipped gradients of ``trainer`` before its optimizers see them.

    The hook raises RuntimeError in the step, on the ranks that hold such gradients: after
    clipping by a norm that is NaN, all of them.
    """

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
        if not torch.isfinite(largest):
            try:
                trainer.checkpointer.maybe_wait_for_saving()  # it may be the last good one
            finally:
                raise RuntimeError(
                    f"step {trainer.step}: gradients are not finite. The optimizer's step was not "
                    "taken and nothing was saved since the last checkpoint. To learn which rank "
                    "and unit they come from, run again with --debug.record_collectives."
                )

    trainer.optimizers.register_step_pre_hook(check)


def _is_logged_or_saved(trainer: Trainer) -> bool:
    checkpoint, step = trainer.config.checkpoint, trainer.step
    saved = checkpoint.enable and (
        step % checkpoint.interval == 0
        or step == trainer.config.training.steps
        or (step == 1 and checkpoint.enable_first_step_checkpoint)
    )
    return saved or trainer.metrics_processor.should_log(step)
