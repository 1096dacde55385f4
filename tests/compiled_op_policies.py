"""An activation checkpointing policy with policies of every kind, for compiled code."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn as nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from titan_ext.activation_checkpoint.compiled.checkpoint import Decide, Decisions
from titan_ext.activation_checkpoint.compiled.partition import Saved
from titan_ext.activation_checkpoint.rules import OpLocation, OpPolicy, Rule, parse_rules
from titan_ext.fp8 import Codec

RULES = {
    "*:aten.topk": "save",
    "*:_c10d_functional.all_to_all_single:*:1": "save",  # the counts
    "*:_c10d_functional.all_to_all_single": "save_float8",
    "attention:aten.mm": "save",
    "moe.shared_experts:aten.mm": "save_float8",
    "moe.routed_experts.inner_experts:aten._grouped_mm:w1_EFD": "save_float8",
    "moe.routed_experts.inner_experts:aten._grouped_mm:w3_EFD": "save",
    "feed_forward:aten.mm": "discard",
}


def rule_decisions(rules: Sequence[Rule], *, inputs: OpPolicy = OpPolicy.SAVE) -> Decisions:
    """The first rule that matches decides; what none matches is recomputed."""

    def begin() -> Decide:
        seen: Counter[Rule] = Counter()

        def decide(location: OpLocation, *_: Any) -> OpPolicy:
            matching = [rule for rule in rules if rule.matches(location)]
            seen.update(matching)
            applying = [rule for rule in matching if rule.occurrence in (0, seen[rule])]
            return applying[0].policy if applying else OpPolicy.RECOMPUTE

        return decide

    return Decisions(begin, repr(tuple(rules)), inputs)


class OpPolicyAC(ActivationCheckpointing):
    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        pass

    rules: ClassVar[dict[str, str]] = RULES
    inputs = OpPolicy.SAVE_FLOAT8

    def prepare(self, model: nn.Module) -> None: ...

    def compiled_codec(self) -> Codec:
        return Codec()

    def take_graph(self, saved: list[Saved]) -> None: ...

    def compiled_decisions(self, block: nn.Module, name: str) -> Decisions | None:
        return rule_decisions(parse_rules(self.rules), inputs=self.inputs)
