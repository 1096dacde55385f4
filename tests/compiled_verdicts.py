"""An activation checkpointing policy with verdicts of every kind, for compiled code."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn as nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from titan_ext.activation_checkpoint.compiled.codec import Saved
from titan_ext.activation_checkpoint.compiled.decisions import Decisions, rule_decisions
from titan_ext.activation_checkpoint.verdicts import Verdict, parse_rules
from titan_ext.fp8 import Codec

__all__ = ["RULES", "VerdictAC"]

RULES = {
    "*:aten.topk": "exact",
    "*:_c10d_functional.all_to_all_single:*:1": "exact",  # the counts
    "*:_c10d_functional.all_to_all_single": "float8",
    "attention:aten.mm": "exact",
    "moe.shared_experts:aten.mm": "float8",
    "moe.routed_experts.inner_experts:aten._grouped_mm:w1_EFD": "float8",
    "moe.routed_experts.inner_experts:aten._grouped_mm:w3_EFD": "exact",
    "feed_forward:aten.mm": "drop",
}


class VerdictAC(ActivationCheckpointing):
    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        pass

    rules: ClassVar[dict[str, str]] = RULES
    inputs = Verdict.FLOAT8

    def prepare(self, model: nn.Module) -> None: ...

    def compiled_codec(self) -> Codec:
        return Codec()

    def take_graph(self, saved: list[Saved]) -> None: ...

    def compiled_decisions(self, block: nn.Module, name: str) -> Decisions | None:
        return rule_decisions(parse_rules(self.rules), inputs=self.inputs)
