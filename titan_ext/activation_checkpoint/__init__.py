# SPDX-License-Identifier: BSD-3-Clause
"""Activation checkpointing that can keep an activation in float8.

``policy`` is the configuration and the entry point. ``op_rules`` reads the rules of a table, and
``op_policies`` decides for each operation, by the names that ``locator`` gives them.
``blocks`` runs one block under them, ``no_recompute`` one of which nothing runs again. ``discards``
proves that nothing reads what is discarded, and ``memory_report`` counts bytes. ``partition``
stores in float8 what ``compile`` compiles.
"""

from titan_ext.activation_checkpoint.memory_report import BlockMemoryReport, memory_report_of
from titan_ext.activation_checkpoint.op_rules import OpPolicy, Rule
from titan_ext.activation_checkpoint.policy import (
    FP8AC,
    enable_fp8_activation_checkpointing,
    measure_block,
)

__all__ = [
    "FP8AC",
    "BlockMemoryReport",
    "OpPolicy",
    "Rule",
    "enable_fp8_activation_checkpointing",
    "measure_block",
    "memory_report_of",
]
