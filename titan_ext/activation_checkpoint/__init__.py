"""Activation checkpointing that can keep an activation in float8.

``verdicts`` is the data model, ``presets`` the verdicts for Titan's decoders, ``sites`` names the
operations of a running block, ``drops`` shows that nothing reads what is dropped, ``blocks``
checkpoints one block, ``uncheckpointed`` is a block that recomputes nothing, ``receipts`` counts,
``policy`` is the configuration, ``api`` the way in without Titan's trainer.
``compiled`` does the same where torch.compile runs the blocks.
"""

from titan_ext.activation_checkpoint.api import (
    enable_fp8_activation_checkpointing,
    measure_block,
)
from titan_ext.activation_checkpoint.policy import FP8AC, check_stored, receipt_of
from titan_ext.activation_checkpoint.receipts import BlockReceipt, OpRow, RunReceipt
from titan_ext.activation_checkpoint.verdicts import Rule, Site, Verdict

__all__ = [
    "FP8AC",
    "BlockReceipt",
    "OpRow",
    "Rule",
    "RunReceipt",
    "Site",
    "Verdict",
    "check_stored",
    "enable_fp8_activation_checkpointing",
    "measure_block",
    "receipt_of",
]
