"""The receipt of float8 activation checkpointing in a run of the trainer, told once."""

from typing import Any

from titan_ext.activation_checkpoint.policy import FP8AC, check_stored, receipt_of

__all__ = ["ReceiptLog"]


class ReceiptLog:
    """After the first step: the receipt goes to Titan's metrics, and an empty one is an error.

    Args:
        trainer: Any; with another policy than ours nothing happens.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._is_due = isinstance(trainer.config.activation_checkpoint, FP8AC.Config)

    def after_step(self) -> None:
        """Called after every step.

        Raises:
            RuntimeError: if float8 was asked for and nothing was stored in it.
        """
        if not self._is_due:
            return
        self._is_due = False
        trainer = self._trainer
        check_stored(trainer.model_parts)
        metrics = receipt_of(trainer.model_parts).metrics()
        trainer.metrics_processor.logger.log(metrics, trainer.step)
