# SPDX-License-Identifier: BSD-3-Clause
"""Policies for the outputs of each operation of a block, and the rules that choose them.

The user's rules come first, then the preset's; the first that matches decides. If none matches, the
plan saves what stock selective checkpointing saves, or what is expensive. Eager and compiled code
ask the same ``Resolver``. Nothing here touches autograd.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import CheckpointPolicy
from torchtitan.distributed.activation_checkpoint import SelectiveAC

from titan_ext.activation_checkpoint.early_scores import EarlyScoreRoutedExperts
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

if TYPE_CHECKING:
    from titan_ext.activation_checkpoint.policy import FP8AC

Preset = Literal["memory", "balanced", "speed", "gemms", "attention", "stock"]
Attention = Literal["auto", "save", "save_float8", "recompute"]
StockPolicy = Callable[..., CheckpointPolicy]
"""Titan's policy for torch's selective checkpointing; called for each operation, in order."""

_CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
_EXPERTS = "moe.routed_experts.inner_experts"
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
        applying = [rule for rule in user_rules if self._applies(rule)]
        if applying:
            self._used_rules.add(applying[0])
            policy = applying[0].policy
        else:
            policy = next((r.policy for r in preset_rules if self._may_decide(r, location)), base)
        return policy.exact if is_exempt else policy

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
