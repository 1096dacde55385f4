# SPDX-License-Identifier: BSD-3-Clause
"""Policies for the outputs of each operation of a block, and the rules that choose them.

The user's rules come first, then the preset's; the first that matches decides. If none matches, the
plan saves what stock selective checkpointing saves, or what is expensive. Eager and compiled code
ask the same ``Resolver``. Nothing here touches autograd.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointPolicy

from titan_ext.activation_checkpoint.rules import (
    GROUPED_GEMMS,
    INPUT,
    OpLocation,
    OpPolicy,
    Rule,
    join,
    op_name,
)
from titan_ext.names import matches

StockPolicy = Callable[..., CheckpointPolicy]
"""Titan's policy for torch's selective checkpointing; called for each operation, in order."""

_CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


@dataclass(frozen=True)
class BlockPlan:
    """How the operations of one block are decided.

    Attributes:
        name: Of the block, in the model ("layers.3").
        user_rules: Rules of the configuration. They come first; an unsound "discard" is an error.
        preset_rules: Come next; an unsound "discard" is skipped.
        base: What to save where no rule matches: "stock" (what stock selective saves), "expensive"
            (GEMMs, attention, exchanges) or "routing" (only what fixes the routing).
        saved: The policy for what the base saves; ``input``: for the inputs of the block.
        attention: For the attention operation itself; None leaves it to the base.
        saves_all_to_all: Whether what an exchange of tokens delivers may be saved.
        exempt: Globs for modules that use no float8.
        stock_policy: Makes Titan's policy for one forward; it may save ``stock_ops``.
    """

    name: str
    user_rules: tuple[Rule, ...]
    preset_rules: tuple[Rule, ...]
    base: Literal["stock", "expensive", "routing"]
    saved: OpPolicy
    attention: OpPolicy | None
    input: OpPolicy
    saves_all_to_all: bool
    exempt: tuple[str, ...]
    stock_policy: Callable[[], StockPolicy]
    stock_ops: frozenset[str]
    _by_location: dict[OpLocation, "_Candidates"] = field(default_factory=dict, repr=False)
    _by_op: dict[int, bool] = field(default_factory=dict, repr=False)

    @property
    def names_operands(self) -> bool:
        """Whether a rule or a message needs the parameter of an operation."""
        rules = (*self.user_rules, *self.preset_rules)
        return any(rule.operand != "*" or rule.policy is OpPolicy.DISCARD for rule in rules)

    def base_policy(self, location: OpLocation, out: Any, *, stock_saves: bool) -> OpPolicy:
        """The policy where no rule matches."""
        if location.op == "aten.topk":
            return OpPolicy.SAVE
        exchanges = is_exchange(location.op)
        if self.base == "routing" or (exchanges and not self.saves_all_to_all):
            counts = exchanges and not out.is_floating_point()
            return OpPolicy.SAVE if counts else OpPolicy.RECOMPUTE
        saves = stock_saves if self.base == "stock" else self.is_expensive(location.op)
        if self.attention is not None and "inner_attention" in location.module.split("."):
            return self.attention if saves else OpPolicy.RECOMPUTE
        return self.saved if saves else OpPolicy.RECOMPUTE

    def is_expensive(self, op: str) -> bool:
        """Whether a rule without an operation applies to ``op``."""
        if op in ("aten.max", "aten.topk"):
            return False
        return op in self.stock_ops or op in GROUPED_GEMMS or op == _CPU_ATTENTION

    def may_save(self, func: Any) -> bool:
        """False for an operation that is always recomputed, as most are; but see
        ``is_copy_to_host``.
        """
        known = self._by_op.get(id(func))  # operations are never freed, and slow to hash
        if known is None:
            op = op_name(func)
            known = self._by_op[id(func)] = (
                op in self.stock_ops
                or self.is_expensive(op)
                or is_exchange(op)
                or any(
                    rule.op != "*" and fnmatchcase(op, rule.op)
                    for rule in (*self.user_rules, *self.preset_rules)
                )
            )
        return known

    def candidates(self, location: OpLocation) -> "_Candidates":
        """The rules that match ``location``, occurrences apart; looked up once."""
        known = self._by_location.get(location)
        if known is None:
            expensive = self.is_expensive(location.op)

            def matching(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
                return tuple(
                    r for r in rules if r.matches(location, self.name, expensive=expensive)
                )

            known = _Candidates(
                matching(self.user_rules),
                matching(self.preset_rules),
                is_exempt(self.exempt, self.name, location.module),
            )
            self._by_location[location] = known
        return known


class _Candidates(NamedTuple):
    user_rules: tuple[Rule, ...]
    preset_rules: tuple[Rule, ...]
    is_exempt: bool


class Resolver:
    """Decides for one forward of a block. Ask in the order of its operations: some rules count.

    ``used_rules`` collects the user's rules that decided an operation. At ``refused_discards`` a
    preset must not discard, because something reads the output.
    """

    def __init__(
        self,
        plan: BlockPlan,
        used_rules: set[Rule] | None = None,
        refused_discards: set[OpLocation] | frozenset[OpLocation] = frozenset(),
    ) -> None:
        self._plan = plan
        self._stock_policy = plan.stock_policy()
        self._used_rules = used_rules if used_rules is not None else set()
        self._refused_discards = refused_discards
        self._matches: dict[Rule, int] = {}

    def resolve_input(self) -> OpPolicy:
        return self._decide(OpLocation("", INPUT), self._plan.input)

    def resolve(
        self, location: OpLocation, ctx: Any, func: Any, args: Any, kwargs: dict[str, Any], out: Any
    ) -> OpPolicy:
        """The policy of an operation's outputs; the arguments after ``location`` are torch's.

        Callers may skip operations for which ``BlockPlan.may_save`` is False.
        """
        stock_saves = self._stock_policy(ctx, func, *args, **kwargs) in _SAVES
        if func is torch.ops.aten._to_copy.default and is_copy_to_host(args, kwargs):
            return OpPolicy.SAVE
        base = self._plan.base_policy(location, out, stock_saves=stock_saves)
        return base if location.op == "aten.topk" else self._decide(location, base)

    def _decide(self, location: OpLocation, base: OpPolicy) -> OpPolicy:
        user_rules, preset_rules, is_exempt = self._plan.candidates(location)
        # Every rule counts its matches, so each is asked, whatever an earlier one decides.
        by_user = [rule for rule in user_rules if self._applies(rule)]
        by_preset = [rule for rule in preset_rules if self._applies(rule)]
        if by_user:
            self._used_rules.add(by_user[0])
            policy = by_user[0].policy
        else:
            policy = next((r.policy for r in by_preset if self._may_decide(r, location)), base)
        return policy.exact if is_exempt else policy

    def _applies(self, rule: Rule) -> bool:
        if not rule.occurrence:
            return True
        self._matches[rule] = self._matches.get(rule, 0) + 1
        return self._matches[rule] == rule.occurrence

    def _may_decide(self, rule: Rule, location: OpLocation) -> bool:
        return rule.policy is not OpPolicy.DISCARD or location not in self._refused_discards


def is_exempt(exempt: Sequence[str], block: str, module: str) -> bool:
    """Whether ``module`` of ``block`` matches one of the globs ``exempt``."""
    return any(matches(join(block, module), pattern) for pattern in exempt)


def is_exchange(op: str) -> bool:
    """Whether an operation is the all-to-all of tokens, or of their counts."""
    return op.endswith("all_to_all_single")


def is_copy_to_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a ``_to_copy`` goes to the host, as the counts of an exchange do."""
    device = kwargs.get("device")
    return (
        device is not None and torch.device(device).type == "cpu" and args[0].device.type != "cpu"
    )
