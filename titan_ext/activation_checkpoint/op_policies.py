# SPDX-License-Identifier: BSD-3-Clause
"""Policies for the outputs of each operation of a block, and the rules that choose them.

The user's rules (the table ``op_policies``) come first, then the preset's; the first that matches
decides. If none matches, the block saves what stock selective checkpointing saves, or what is
expensive. Eager and compiled code ask the same ``Resolver``. Nothing here touches autograd.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import spmd_types as spmd
import torch
import torch.nn as nn
from torch.utils.checkpoint import CheckpointPolicy

from titan_ext.activation_checkpoint.op_effects import chooses, op_name
from titan_ext.base.messages import did_you_mean, matches
from titan_ext.base.tensors import has_values
from titan_ext.components.halves import current_half

GROUPED_GEMMS = ("aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_grouped_mm_v2")
GEMMS = ("aten.mm", "aten.addmm", "aten.linear", "aten._scaled_mm", *GROUPED_GEMMS)
_CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
CHILDREN = ("attention", "attn", "moe", "feed_forward")
_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)

INPUT = "input"
"""Stands for the floating-point inputs of the block, instead of an operation's name."""

ROOT = "(block)"
"""Stands for the block without the modules inside it, instead of a module's name."""


# Regions of Titan's next release, and the patterns that mean the same here after a prefix.
_EXPERTS = "{}routed_experts.inner_experts:aten.*grouped_mm*"
_TOKENS = "({}routed_experts):*all_to_all_single:*"
_REGIONS = {
    "routed_experts.w13.grouped_mm": f"{_EXPERTS}:[wm]*[13]*",
    "routed_experts.w2.grouped_mm": f"{_EXPERTS}:[wm]*2*",
    "routed_experts.token_dispatcher.dispatch": f"{_TOKENS}:2",  # the first exchanges counts
    "routed_experts.token_dispatcher.combine": f"{_TOKENS}:3",
    "token_dispatcher.dispatch": f"{_TOKENS}:2",
    "token_dispatcher.combine": f"{_TOKENS}:3",
    ".linear": "{}:aten.*mm",
}


class OpPolicy(StrEnum):
    """What is kept of the outputs of an operation.

    Attributes:
        SAVE: The outputs.
        SAVE_FLOAT8: The outputs in float8, where the codec can hold them (docs/fp8_ac.md).
        OFFLOAD, OFFLOAD_FLOAT8: The same, on the host.
        RECOMPUTE: Nothing; the operation runs again in backward.
        DISCARD: Nothing, and the operation does not run again. Backward must not read its outputs;
            titan_ext checks that.
    """

    SAVE = "save"
    SAVE_FLOAT8 = "save_float8"
    OFFLOAD = "offload"
    OFFLOAD_FLOAT8 = "offload_float8"
    RECOMPUTE = "recompute"
    DISCARD = "discard"

    @property
    def keeps(self) -> bool:
        return self not in (OpPolicy.RECOMPUTE, OpPolicy.DISCARD)

    @property
    def is_float8(self) -> bool:
        return self in (OpPolicy.SAVE_FLOAT8, OpPolicy.OFFLOAD_FLOAT8)

    @property
    def on_host(self) -> bool:
        return self in (OpPolicy.OFFLOAD, OpPolicy.OFFLOAD_FLOAT8)

    @property
    def exact(self) -> "OpPolicy":
        """The same without float8."""
        return OpPolicy(self.removesuffix("_float8"))


class OpLocation(NamedTuple):
    """The location of an operation.

    Attributes:
        module: The innermost that runs it, named within the block ("" for the block).
        op: Namespace and name without overload ("aten.mm"), or ``INPUT``.
        operand: The parameter that it works on, named within ``module`` ("w2_EDF"), or "".
    """

    module: str
    op: str
    operand: str = ""

    def __str__(self) -> str:
        return ":".join(part for part in (self.module or ROOT, self.op, self.operand) if part)


@dataclass(frozen=True)
class Rule:
    """A policy for the operations that match.

    Attributes:
        policy: The policy of their outputs.
        module: Glob for the name of a module, within the block or in the model: it and all modules
            inside it. "(moe)" is the module without them, "(block)" the block.
        op: Glob for the operation; "*" for whatever is expensive (GEMMs, attention, exchanges).
        operand: Glob for the parameter.
        occurrence: Which of the matching operations in one forward is meant, from 1; 0 for all.
    """

    policy: OpPolicy
    module: str = "*"
    op: str = "*"
    operand: str = "*"
    occurrence: int = 0

    def matches(self, location: OpLocation, block: str = "", *, expensive: bool = True) -> bool:
        """Whether ``location`` in the block called ``block`` matches, its occurrence apart."""
        if self.module == INPUT or location.op == INPUT:
            return self.module in (INPUT, "*") and location.op == INPUT and self.op == "*"
        if self.op == "*" and not expensive:
            return False
        return (
            self.matches_module(location.module, block)
            and fnmatchcase(location.op, self.op)
            and fnmatchcase(location.operand, self.operand)
        )

    def matches_module(self, module: str, block: str = "") -> bool:
        """Whether a module matches, by its name in the block or by its name in the model."""
        if self.module == ROOT:
            return not module
        if self.module.startswith("("):
            pattern = self.module[1:-1]
            return fnmatchcase(module, pattern) or fnmatchcase(join(block, module), pattern)
        return matches(module, self.module) or matches(join(block, module), self.module)


def parse_rules(rules: Mapping[str, str], key: str = "op_policies") -> tuple[Rule, ...]:
    """Parse the rules of a TOML table called ``key``, in its order.

    For example ``{"moe.routed_experts:aten._grouped_mm:w2*": "recompute", "input": "save"}``.
    Raises ValueError for a malformed pattern, or a policy, operation or input that there cannot be.
    """
    return tuple(_parse(pattern, policy, key) for pattern, policy in rules.items())


def _parse(pattern: str, policy: str, key: str) -> Rule:
    names = [p.value for p in OpPolicy]
    if policy not in names:
        raise ValueError(
            f"{key}.{pattern!r} is {policy!r}; expected one of {', '.join(names)}"
            f"{did_you_mean(policy, names)}"
        )
    region = next((name for name in _REGIONS if pattern.endswith(name)), "")
    meant = _REGIONS.get(region, "{}").format(pattern.removesuffix(region))
    parts = meant.split(":")
    if not all(parts) or len(parts) > 4:
        raise ValueError(
            f"{key}: {pattern!r} is not a pattern; expected module[:op[:operand[:occurrence]]], "
            'for example "moe.shared_experts.w1" or "*:aten.mm".'
        )
    module, op, operand, occurrence = (*parts, *("*", "*", "*", "0")[len(parts) :])
    if not occurrence.isdecimal():
        raise ValueError(f"{key}: the occurrence in {pattern!r} must be a number from 1 on.")
    namespace, _, name = op.partition(".")
    if namespace == "aten" and name.isidentifier() and not hasattr(torch.ops.aten, name):
        raise ValueError(f"{key}: torch has no operation {op!r}{did_you_mean(op, GEMMS)}")
    if module == INPUT and not OpPolicy(policy).keeps:
        raise ValueError(
            f'{key}."{INPUT}" is {policy!r}; a block cannot recompute its inputs: expected save, '
            "save_float8, offload or offload_float8."
        )
    return Rule(OpPolicy(policy), module, op, operand, int(occurrence))


def check_names(
    section: str, rules: Iterable[Rule], exempt: Sequence[str], model: nn.Module
) -> None:
    """Raise ValueError for names of modules that the blocks of a model do not have.

    ``model`` is the decoder, or the chunk of a pipeline stage. Modules that its blocks lack (a
    dense stage has no ``moe``) may be in another stage.
    """
    layers = model.get_submodule("layers")
    inside = {name for block in layers.children() for name, _ in block.named_modules()} - {""}
    if not inside:
        return
    whole = getattr(getattr(model, "config", None), "layers", None) or list(layers.children())
    blocks = [f"layers.{index}" for index in range(len(whole))]
    in_model = {*blocks, *(f"{block}.{name}" for block in blocks for name in inside)}
    elsewhere = {name for name in CHILDREN if name not in inside}

    def check(key: str, patterns: Iterable[str], known: set[str], where: str) -> None:
        for pattern in patterns:
            is_elsewhere = elsewhere.intersection(pattern.split("."))
            if not (is_elsewhere or any(matches(name, pattern) for name in inside | in_model)):
                raise ValueError(
                    f"{section}.{key}: no module of {where} is called {pattern!r}"
                    f"{did_you_mean(pattern, known)}"
                )

    named = [r.module.strip("()") for r in rules if r.module not in (INPUT, ROOT)]
    check("op_policies", named, inside, "a block")
    check("exempt", exempt, in_model, "the model")


def join(block: str, module: str) -> str:
    """The name in the model of a module of ``block``; either may be ""."""
    return ".".join(part for part in (block, module) if part)


class _Candidates(NamedTuple):
    user_rules: tuple[Rule, ...]
    preset_rules: tuple[Rule, ...]
    is_exempt: bool


@dataclass(frozen=True)
class BlockPolicies:
    """How the operations of one block are decided.

    Attributes:
        name: Of the block, in the model ("layers.3").
        user_rules: Rules of the configuration. They come first; an unsound "discard" is an error.
        preset_rules: Come next; an unsound "discard" is skipped.
        base: What to save where no rule matches: "stock" (what stock selective saves), "expensive"
            (GEMMs, attention, exchanges) or "routing" (only what fixes the routing). With
            "autograd" nothing runs again, and ``module_policy`` decides.
        saved: The policy for what the base saves; ``input``: for the inputs of the block.
        attention: For the attention operation itself; None leaves it to the base.
        saves_all_to_all: Whether what an exchange of tokens delivers may be saved.
        exempt: Globs for modules that use no float8.
        stock_policy: Makes Titan's policy for one forward, to be called for each operation, in
            order; it may save ``stock_ops``.
    """

    name: str
    user_rules: tuple[Rule, ...]
    preset_rules: tuple[Rule, ...]
    base: Literal["stock", "expensive", "routing", "autograd"]
    saved: OpPolicy
    attention: OpPolicy | None
    input: OpPolicy
    saves_all_to_all: bool
    exempt: tuple[str, ...]
    stock_policy: Callable[[], Callable[..., CheckpointPolicy]]
    stock_ops: frozenset[str]
    _by_location: dict[OpLocation, _Candidates] = field(default_factory=dict, repr=False)
    _fixed: dict[tuple[int, str], CheckpointPolicy | None] = field(default_factory=dict, repr=False)
    _by_module: dict[str, tuple[OpPolicy, str]] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def rounds(self) -> bool:
        """Whether float8 may change what a recompute sees, so that choices have to be kept."""
        rules = (*self.user_rules, *self.preset_rules)
        policies = (self.saved, self.attention, self.input, *(rule.policy for rule in rules))
        return any(policy is not None and policy.is_float8 for policy in policies) and not (
            is_exempt(self.exempt, self.name, "")
        )

    @property
    def names_operands(self) -> bool:
        """Whether a rule or a message needs the parameter of an operation."""
        rules = (*self.user_rules, *self.preset_rules)
        return any(rule.operand != "*" or rule.policy is OpPolicy.DISCARD for rule in rules)

    def base_policy(self, location: OpLocation, out: Any, *, stock_saves: bool) -> OpPolicy:
        """The policy where no rule matches."""
        if fixes_routing(location.op, out):
            return OpPolicy.SAVE
        if self.base == "routing" or (is_exchange(location.op) and not self.saves_all_to_all):
            return OpPolicy.RECOMPUTE
        saves = stock_saves if self.base == "stock" else self.is_expensive(location.op)
        if self.attention is not None and "inner_attention" in location.module.split("."):
            return self.attention if saves else OpPolicy.RECOMPUTE
        return self.saved if saves else OpPolicy.RECOMPUTE

    def is_expensive(self, op: str) -> bool:
        """Whether a rule without an operation applies to ``op``."""
        if op in ("aten.max", "aten.topk"):
            return False
        return op in self.stock_ops or op in GROUPED_GEMMS or op == _CPU_ATTENTION

    def fixed(self, func: Any, module: str) -> CheckpointPolicy | None:
        """The answer for an operation of ``module`` that is always recomputed, as most are; but see
        ``is_copy_to_host`` and ``keeps_choice``. None for one that may be saved, or that a rule
        counts.
        """
        key = id(func), module  # operations are never freed, and slow to hash
        if key not in self._fixed:
            op = op_name(func)
            is_expensive = self.is_expensive(op)
            may_be_saved = (
                op == "aten.topk"
                or is_exchange(op)
                or (self.base != "routing" and (is_expensive or op in self.stock_ops))
                or any(
                    (is_expensive if rule.op == "*" else fnmatchcase(op, rule.op))
                    and rule.matches_module(module, self.name)
                    for rule in (*self.user_rules, *self.preset_rules)
                )
            )
            # "Must" spares torch a search for side effects, a tenth of the host's time.
            plain = op.startswith("aten.")
            again = CheckpointPolicy.MUST_RECOMPUTE if plain else CheckpointPolicy.PREFER_RECOMPUTE
            self._fixed[key] = None if may_be_saved else again
        return self._fixed[key]

    def keeps_choice(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> bool:
        """Whether an operation chooses by values that a recompute may see rounded."""
        return self.rounds and chooses(func, args, kwargs, out)

    def candidates(self, location: OpLocation) -> _Candidates:
        """The rules that match ``location``, occurrences apart; looked up once."""
        known = self._by_location.get(location)
        if known is None:
            expensive = self.is_expensive(location.op)
            user_rules, preset_rules = (
                tuple(r for r in rules if r.matches(location, self.name, expensive=expensive))
                for rules in (self.user_rules, self.preset_rules)
            )
            exempt = is_exempt(self.exempt, self.name, location.module)
            known = self._by_location[location] = _Candidates(user_rules, preset_rules, exempt)
        return known

    def module_policy(self, module: str) -> tuple[OpPolicy, str]:
        """The policy of what a module saves under base "autograd", and why if it is exact."""
        known = self._by_module.get(module)
        if known is None:
            parts, why = module.split("."), ""
            rule = next((r for r in self.user_rules if r.matches_module(module, self.name)), None)
            if rule is not None:
                why = "" if rule.policy.is_float8 else "by op_policies"
            elif "inner_attention" in parts and self.attention is not OpPolicy.SAVE_FLOAT8:
                why = "attention"
            elif "router" in parts:
                why = "routing"
            policy = rule.policy if rule else OpPolicy.SAVE if why else OpPolicy.SAVE_FLOAT8
            if is_exempt(self.exempt, self.name, module):
                policy, why = policy.exact, "exempt"
            known = self._by_module[module] = policy, why
        return known

    def key(self, modules: Sequence[str]) -> str:
        """Equal for two blocks, or parts of them, with such modules only if they decide alike."""
        exempted = [name for name in modules if is_exempt(self.exempt, self.name, name)]
        ruled = [
            (rule, named)
            for rule in (*self.user_rules, *self.preset_rules)
            if (named := [name for name in modules if rule.matches_module(name, self.name)])
        ]
        base = (self.base, self.saved, self.attention, self.saves_all_to_all)
        return f"{base} {exempted} {ruled}"


class Resolver:
    """Decides for one forward of a block. Ask in the order of its operations: some rules count.

    Where the batch runs as two halves, each is counted by itself (``components.halves``).
    ``used_rules`` collects the user's rules that decided an operation. A preset discards nothing at
    ``refused_discards``, which are read, nor under SPMD type checking, whose nodes hide readers.
    """

    def __init__(
        self,
        policies: BlockPolicies,
        used_rules: set[Rule] | None = None,
        refused_discards: set[OpLocation] | frozenset[OpLocation] = frozenset(),
    ) -> None:
        self._policies = policies
        self._stock_policies = policies.stock_policy(), policies.stock_policy()
        self._used_rules = used_rules if used_rules is not None else set()
        self._refused_discards = refused_discards
        self._refuses_discards = spmd.is_type_checking()
        self._matches: Counter[tuple[Rule, int]] = Counter()

    def resolve_input(self) -> OpPolicy:
        if self._policies.base == "autograd":
            return self._policies.module_policy("")[0]
        return self._decide(OpLocation("", INPUT), self._policies.input)

    def resolve(
        self, location: OpLocation, ctx: Any, func: Any, args: Any, kwargs: dict[str, Any], out: Any
    ) -> OpPolicy:
        """The policy of an operation's outputs; the arguments after ``location`` are torch's.

        Callers may skip operations for which ``BlockPolicies.fixed`` has an answer.
        """
        is_choice = self._policies.keeps_choice(func, args, kwargs, out)
        if self._policies.base == "autograd":
            policy = self._policies.module_policy(location.module)[0]
            return policy.exact if is_choice else policy
        # It counts the operations that it is asked about.
        stock_policy = self._stock_policies[current_half()]
        stock_saves = (
            self._policies.base == "stock" and stock_policy(ctx, func, *args, **kwargs) in _SAVES
        )
        if func is torch.ops.aten._to_copy.default and is_copy_to_host(args, kwargs):
            return OpPolicy.SAVE
        base = self._policies.base_policy(location, out, stock_saves=stock_saves)
        if fixes_routing(location.op, out):
            return self._decide(location, base, keeps_base=True)
        return self._decide(location, OpPolicy.SAVE if is_choice else base, is_choice=is_choice)

    def _decide(
        self,
        location: OpLocation,
        base: OpPolicy,
        *,
        keeps_base: bool = False,
        is_choice: bool = False,
    ) -> OpPolicy:
        user_rules, preset_rules, is_exempt = self._policies.candidates(location)
        if not user_rules and not preset_rules:
            return base.exact if is_exempt else base
        # Every rule counts its matches, so each is asked, whatever an earlier one decides.
        by_user = [rule for rule in user_rules if self._applies(rule)]
        by_preset = [rule for rule in preset_rules if self._applies(rule)]
        if keeps_base:
            return base
        if is_choice:  # the user's, if a rule names operations and not just modules
            by_preset = []
            by_user = [r for r in by_user if r.op != "*" and r.policy is not OpPolicy.DISCARD]
        if by_user:
            self._used_rules.add(by_user[0])
            policy = by_user[0].policy
        else:
            if self._refuses_discards or location in self._refused_discards:
                kept = [rule for rule in by_preset if rule.policy is not OpPolicy.DISCARD]
                if by_preset != kept and is_exchange(location.op) and not base.keeps:
                    base = OpPolicy.SAVE  # ranks that disagree must not exchange alone
                by_preset = kept
            policy = by_preset[0].policy if by_preset else base
        return policy.exact if is_exempt or is_choice else policy

    def _applies(self, rule: Rule) -> bool:
        if not rule.occurrence:
            return True
        self._matches[rule, current_half()] += 1
        return self._matches[rule, current_half()] == rule.occurrence


def is_exempt(exempt: Sequence[str], block: str, module: str) -> bool:
    """Whether ``module`` of ``block`` matches one of the globs ``exempt``."""
    return any(matches(join(block, module), pattern) for pattern in exempt)


def is_exchange(op: str) -> bool:
    """Whether an operation is the all-to-all of tokens, or of their counts or scores."""
    return op.endswith("all_to_all_single")


def fixes_routing(op: str, out: Any) -> bool:
    """Whether ``out`` is always kept: the router's choice, exchanged counts and scores."""
    return op == "aten.topk" or (is_exchange(op) and (out.dim() == 1 or not has_values(out)))


def is_copy_to_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a ``_to_copy`` goes to the host, as the counts of an exchange do."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cpu" != args[0].device.type
