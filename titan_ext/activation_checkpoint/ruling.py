"""The verdicts of one forward of one block: rules from the top, then what its plan falls back on.

Eager and compiled code ask the same object, so that they decide alike.
"""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from titan_ext.activation_checkpoint.presets import BlockPlan
from titan_ext.activation_checkpoint.verdicts import INPUT, Rule, Site, Verdict

__all__ = ["Ruling"]

_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class Ruling:
    """Asked about every operation of a forward, in order: some rules count.

    Args:
        plan: Of the block.
        used_rules: Gets the user's rules that have decided something.
        refused_drops: Where a preset must not drop, as backward has been seen to read it.
    """

    def __init__(
        self,
        plan: BlockPlan,
        used_rules: set[Rule] | None = None,
        refused_drops: set[Site] | frozenset[Site] = frozenset(),
    ) -> None:
        self._plan = plan
        self._stock_policy = plan.stock_policy()
        self._used_rules = used_rules if used_rules is not None else set()
        self._refused_drops = refused_drops
        self._matches: dict[Rule, int] = {}

    def on_input(self) -> Verdict:
        """For the inputs of the block."""
        site = Site("", INPUT)
        rule = next((r for r in self._plan.user_rules if r.matches(site)), None)
        if rule is not None:
            self._used_rules.add(rule)
        return self._exempted(rule.verdict if rule else self._plan.input, site)

    def on(
        self, site: Site, ctx: Any, func: Any, args: Any, kwargs: dict[str, Any], out: Any
    ) -> Verdict:
        """For the outputs of an operation; the arguments after ``site`` are torch's."""
        stock_saves = self._stock_policy(ctx, func, *args, **kwargs) in _SAVES
        if _is_copy_to_host(func, args, kwargs):
            return Verdict.EXACT
        base = self._plan.base_verdict(site, out, stock_saves=stock_saves)
        if site.op == "aten.topk":
            return base
        for rule in self._plan.user_rules:
            if self._applies(rule, site):
                self._used_rules.add(rule)
                return self._exempted(rule.verdict, site)
        for rule in self._plan.preset_rules:
            refused = rule.verdict is Verdict.DROP and site in self._refused_drops
            if not refused and self._applies(rule, site):
                return self._exempted(rule.verdict, site)
        return self._exempted(base, site)

    def _applies(self, rule: Rule, site: Site) -> bool:
        if not rule.matches(site, expensive=site.op in self._plan.expensive_ops):
            return False
        if not rule.occurrence:
            return True
        self._matches[rule] = self._matches.get(rule, 0) + 1
        return self._matches[rule] == rule.occurrence

    def _exempted(self, verdict: Verdict, site: Site) -> Verdict:
        if verdict is Verdict.FLOAT8 and self._plan.exempt(site.module):
            return Verdict.EXACT
        return verdict


def _is_copy_to_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A copy of counts to the host, for the split lists of an exchange."""
    device = kwargs.get("device")
    return (
        func is torch.ops.aten._to_copy.default
        and device is not None
        and torch.device(device).type == "cpu"
        and args[0].device.type != "cpu"
    )
