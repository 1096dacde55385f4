# SPDX-License-Identifier: BSD-3-Clause
"""Policies for the outputs of each operation of a block, and the rules that choose them.

The user's rules come first, then the preset's; the first that matches decides. If none matches, the
plan saves what stock selective checkpointing saves, or what is expensive. Eager and compiled code
ask the same ``Resolver``. Nothing here touches autograd.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import CheckpointPolicy
from torchtitan.distributed.activation_checkpoint import SelectiveAC

from titan_ext.activation_checkpoint.early_scores import EarlyScoreRoutedExperts
from titan_ext.names import did_you_mean, matches

if TYPE_CHECKING:
    from titan_ext.activation_checkpoint.policy import FP8AC

INPUT = "input"
"""Stands for the floating-point inputs of the block, instead of an operation's name."""

ROOT = "(block)"
"""Stands for the block without the modules inside it, instead of a module's name."""

Preset = Literal["memory", "balanced", "speed", "gemms", "attention", "stock"]
Attention = Literal["auto", "save", "save_float8", "recompute"]
StockPolicy = Callable[..., CheckpointPolicy]
"""Titan's policy for torch's selective checkpointing; called for each operation, in order."""

_GROUPED = ("aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_grouped_mm_v2")
_CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
GEMMS = ("aten.mm", "aten.addmm", "aten.linear", "aten._scaled_mm", *_GROUPED)
_EXPERTS = "moe.routed_experts.inner_experts"
_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class OpPolicy(StrEnum):
    """What is kept of the outputs of an operation.

    Attributes:
        SAVE: The outputs.
        SAVE_FLOAT8: The outputs in float8, where the codec can hold them (docs/fp8_ac.md).
        RECOMPUTE: Nothing; the operation runs again in backward.
        DISCARD: Nothing, and the operation does not run again. Backward must not read its outputs;
            titan_ext checks that.
    """

    SAVE = "save"
    SAVE_FLOAT8 = "save_float8"
    RECOMPUTE = "recompute"
    DISCARD = "discard"


class OpLocation(NamedTuple):
    """The location of an operation.

    Attributes:
        module: The innermost module that runs it, named within the block ("" for the block).
        op: Namespace and name without overload ("aten.mm"), or ``INPUT``.
        operand: The parameter that it works on, named within ``module`` ("w2_EDF"), or "".
    """

    module: str
    op: str
    operand: str = ""

    def __str__(self) -> str:
        return ":".join(part for part in (self.module or ROOT, self.op, self.operand) if part)


@functools.cache
def op_name(func: Any) -> str:
    """``aten.mm`` for ``aten.mm.default``; higher-order operators have a name only."""
    packet = getattr(func, "overloadpacket", None)
    return str(packet) if packet is not None else str(getattr(func, "__name__", func))


@dataclass(frozen=True)
class Rule:
    """A policy for the operations that match.

    Attributes:
        policy: The policy of their outputs.
        module: Glob for the name of a module, within the block or in the model: it and all modules
            inside it. "(block)" is the block without them.
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
        return matches(module, self.module) or matches(join(block, module), self.module)


def parse_rules(rules: Mapping[str, str], key: str = "op_policies") -> tuple[Rule, ...]:
    """Parse the rules of a TOML table, in its order.

    Args:
        rules: ``"module[:op[:operand[:occurrence]]]"`` to a policy, for example
            ``{"moe.routed_experts:aten._grouped_mm:w2*": "recompute", "input": "save"}``.
        key: The table's name in messages.

    Raises:
        ValueError: for a malformed pattern, or a policy, operation or input that there cannot be.
    """
    return tuple(_parse(pattern, policy, key) for pattern, policy in rules.items())


def _parse(pattern: str, policy: str, key: str) -> Rule:
    names = [p.value for p in OpPolicy]
    if policy not in names:
        raise ValueError(
            f"{key}.{pattern!r} is {policy!r}; expected one of {', '.join(names)}"
            f"{did_you_mean(policy, names)}"
        )
    parts = pattern.split(":")
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
    if module == INPUT and policy not in ("save", "save_float8"):
        raise ValueError(
            f'{key}."{INPUT}" is {policy!r}; a block cannot recompute its inputs: expected save '
            "or save_float8."
        )
    return Rule(OpPolicy(policy), module, op, operand, int(occurrence))


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
        return op in self.stock_ops or op in _GROUPED or op == _CPU_ATTENTION

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
        applying = [rule for rule in user_rules if self._applies(rule)]
        if applying:
            self._used_rules.add(applying[0])
            policy = applying[0].policy
        else:
            policy = next((r.policy for r in preset_rules if self._may_decide(r, location)), base)
        return OpPolicy.SAVE if is_exempt and policy is OpPolicy.SAVE_FLOAT8 else policy

    def _applies(self, rule: Rule) -> bool:
        if not rule.occurrence:
            return True
        self._matches[rule] = self._matches.get(rule, 0) + 1
        return self._matches[rule] == rule.occurrence

    def _may_decide(self, rule: Rule, location: OpLocation) -> bool:
        return rule.policy is not OpPolicy.DISCARD or location not in self._refused_discards


def make_plan(
    block: nn.Module, name: str, config: "FP8AC.Config", *, saves_all_to_all: bool = True
) -> BlockPlan:
    """The plan of one block called ``name`` in the model, for mode "selective" or "full".

    Expert parallelism has been applied to ``block``, if it will be. ``saves_all_to_all`` says
    whether to save what an exchange of tokens delivers, and not only the counts of it.
    """
    mode, preset = config.mode, config.preset
    stock = SelectiveAC(SelectiveAC.Config())
    # The wrapper is not used, its policy is.
    wrapper = cast(CheckpointWrapper, stock._wrap_block(block, base_fqn=name))
    contexts = wrapper.checkpoint_fn.keywords["context_fn"]
    attention = _resolve_attention(config.attention, preset, block)
    float8 = mode == "full" or preset != "stock"
    exact = mode == "selective" and _recomputes_qkv(preset, attention, block)
    base = "stock" if preset in ("memory", "stock") else "expensive"
    preset_rules = _preset_rules(preset, attention, block, saves_all_to_all)
    return BlockPlan(
        name=name,
        user_rules=config.rules(),
        preset_rules=() if mode == "full" else preset_rules,
        base="routing" if mode == "full" else base,
        saved=OpPolicy.SAVE_FLOAT8 if float8 else OpPolicy.SAVE,
        attention=attention if float8 else None,
        input=OpPolicy.SAVE_FLOAT8 if float8 and not exact else OpPolicy.SAVE,
        saves_all_to_all=saves_all_to_all,
        exempt=tuple(config.exempt),
        stock_policy=lambda: contexts()[0].policy_fn,
        stock_ops=frozenset(op_name(op) for op in stock.get_save_ops()),
    )


def _resolve_attention(attention: Attention, preset: Preset, block: nn.Module) -> OpPolicy:
    """Resolve "auto": "save", except for presets that have no room for that.

    They store multi-head latent attention in float8. They recompute grouped-query attention, whose
    output is larger than the model dimension; "gemms" saves it.
    """
    if attention != "auto":
        return OpPolicy(attention)
    if preset not in ("balanced", "speed", "gemms"):
        return OpPolicy.SAVE
    if hasattr(getattr(block, "attention", None), "wkv_a"):
        return OpPolicy.SAVE_FLOAT8
    return OpPolicy.SAVE if preset == "gemms" else OpPolicy.RECOMPUTE


def is_exempt(exempt: Sequence[str], block: str, module: str) -> bool:
    """Whether ``module`` of ``block`` matches one of the globs ``exempt``."""
    return any(matches(join(block, module), pattern) for pattern in exempt)


def _preset_rules(
    preset: Preset, attention: OpPolicy, block: nn.Module, saves_all_to_all: bool
) -> tuple[Rule, ...]:
    if preset == "stock":
        return ()
    # Backward does not read these results: they are only added. The gradient of the routing scores
    # reads that of the routed experts, unless the exchange behind it is saved.
    rules = _for_modules(OpPolicy.DISCARD, "moe.shared_experts.w2", "feed_forward.w2")
    last_gemm = {"module": _EXPERTS, "op": "aten.*grouped_mm*", "operand": "w2*"}
    if (saves_all_to_all and _has_exchange(block)) or _scores_come_first(block):
        rules.append(Rule(OpPolicy.DISCARD, **last_gemm))
    rules += _for_modules(OpPolicy.RECOMPUTE, "moe.router")
    if preset == "attention":
        return (*rules, *_for_modules(OpPolicy.RECOMPUTE, "attention", "attn"))
    if attention is OpPolicy.SAVE:
        # Exact projections make q, k and v exact in the recompute; low-rank ones where there are.
        again = _recomputes_qkv(preset, attention, block)
        qkv = OpPolicy.RECOMPUTE if again else OpPolicy.SAVE
        rules += _for_modules(qkv, "attention.qkv_linear")
        rules += _for_modules(OpPolicy.SAVE, "attention.wkv_a", "attention.wq_a", "attention.wq")
        rules += _for_modules(OpPolicy.RECOMPUTE, "attention.wkv_b", "attention.wq_b")
    if preset == "balanced":
        # Most of the bytes: what the routed experts compute.
        rules.append(Rule(OpPolicy.RECOMPUTE, **{**last_gemm, "operand": "*"}))
    if preset == "speed":
        # FLOPs saved per byte are the length of the dot products: a low rank goes first.
        low_rank = ("attention.wkv_a", "attention.wkv_b", "attention.wq_b")
        rules += _for_modules(OpPolicy.RECOMPUTE, *low_rank)
        rules.append(Rule(OpPolicy.RECOMPUTE, **last_gemm))
        if attention is OpPolicy.SAVE:
            # Exact q, k and v recompute them exactly; saved, they would exceed stock's bytes.
            rules += _for_modules(OpPolicy.RECOMPUTE, "attention.inner_attention", "attention.wo")
    return tuple(rules)


def _recomputes_qkv(preset: Preset, attention: OpPolicy, block: nn.Module) -> bool:
    """Whether q, k and v, which no low-rank projection gives, come from an exact block input."""
    has_qkv = hasattr(getattr(block, "attention", None), "qkv_linear")
    return preset == "memory" and attention is OpPolicy.SAVE and has_qkv


def _for_modules(policy: OpPolicy, *modules: str) -> list[Rule]:
    return [Rule(policy, module) for module in modules]


def _scores_come_first(block: nn.Module) -> bool:
    return isinstance(_routed_experts(block), EarlyScoreRoutedExperts)


def _has_exchange(block: nn.Module) -> bool:
    """Whether the routed experts' outputs go through an all-to-all before anything reads them."""
    dispatcher = getattr(_routed_experts(block), "token_dispatcher", None)
    return getattr(dispatcher, "ep_mesh", None) is not None


def _routed_experts(block: nn.Module) -> Any:
    return getattr(getattr(block, "moe", None), "routed_experts", None)


def is_exchange(op: str) -> bool:
    """Whether an operation is the all-to-all of tokens, or of their counts."""
    return op.endswith("all_to_all_single")


def is_copy_to_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a ``_to_copy`` goes to the host, as the counts of an exchange do."""
    device = kwargs.get("device")
    return (
        device is not None and torch.device(device).type == "cpu" and args[0].device.type != "cpu"
    )


def join(block: str, module: str) -> str:
    """The name in the model of a module of ``block``; either may be ""."""
    return ".".join(part for part in (block, module) if part)
