"""Named sets of verdicts for the blocks of Titan's decoders, and what stock Titan would save.

Where the rules end, a base decides: whether stock selective checkpointing saves the operation, or
whether it is expensive at all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import CheckpointPolicy
from torchtitan.distributed.activation_checkpoint import SelectiveAC

from titan_ext.activation_checkpoint.early_scores import EarlyScoreRoutedExperts
from titan_ext.activation_checkpoint.sites import op_name
from titan_ext.activation_checkpoint.verdicts import Rule, Site, Verdict

__all__ = ["PRESETS", "Attention", "BlockPlan", "Preset", "StockPolicy", "make_plan"]

Preset = Literal["memory", "speed", "attention", "stock"]
PRESETS = ("memory", "speed", "attention", "stock")
Attention = Literal["auto", "exact", "float8", "recompute"]

StockPolicy = Callable[..., CheckpointPolicy]
"""What Titan gives to torch's selective checkpointing: called for each operation, in order."""

_GROUPED = ("aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_grouped_mm_v2")
_CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
GEMMS = ("aten.mm", "aten.addmm", "aten.linear", "aten._scaled_mm", *_GROUPED)
_EXPERTS = "moe.routed_experts.inner_experts"

# Backward reads none of these results: they are only added. The routed experts' is read by the
# gradient of the routing scores, unless the exchange behind it is stored.
_ONLY_ADDED = ("moe.shared_experts.w2", "feed_forward.w2")


@dataclass(frozen=True)
class BlockPlan:
    """How the operations of one block are decided.

    Attributes:
        user_rules: Of the configuration; they come first, and an unsound "drop" is an error.
        preset_rules: Come next; an unsound "drop" is passed over.
        base: What decides where no rule matches: "stock" (what stock selective saves), "expensive"
            (GEMMs, attention, exchanges) or "routing" (nothing but what fixes the routing).
        saved: The verdict for what the base saves.
        attention: For the attention operation itself; None leaves it to the base.
        input: For the inputs of the block.
        exempt: Says whether a module, named within the block, keeps its float8 set exact.
        stock_policy: Makes Titan's policy for one forward.
        expensive_ops: Names of operations.
    """

    user_rules: tuple[Rule, ...]
    preset_rules: tuple[Rule, ...]
    base: Literal["stock", "expensive", "routing"]
    saved: Verdict
    attention: Verdict | None
    input: Verdict
    exempt: Callable[[str], bool]
    stock_policy: Callable[[], StockPolicy]
    expensive_ops: frozenset[str]

    def base_verdict(self, site: Site, out: Any, *, stock_saves: bool) -> Verdict:
        """The verdict where no rule matches."""
        if site.op == "aten.topk":
            return Verdict.EXACT
        if self.base == "routing":
            counts = site.op.endswith("all_to_all_single") and not out.is_floating_point()
            return Verdict.EXACT if counts else Verdict.RECOMPUTE
        saves = stock_saves if self.base == "stock" else site.op in self.expensive_ops
        if "inner_attention" in site.module.split(".") and self.attention is not None:
            return self.attention if saves else Verdict.RECOMPUTE
        return self.saved if saves else Verdict.RECOMPUTE


def make_plan(
    block: nn.Module,
    name: str,
    *,
    mode: str,
    preset: Preset,
    attention: Attention,
    user_rules: tuple[Rule, ...],
    exempt: Callable[[str], bool],
) -> BlockPlan:
    """The plan of one block.

    Args:
        block: Parallelized over the expert axis already, if it will be.
        name: In the model ("layers.3").
        mode: "selective" or "full".
    """
    stock = SelectiveAC(SelectiveAC.Config())
    # The wrapper is not used, its policy is.
    wrapper = cast(CheckpointWrapper, stock._wrap_block(block, base_fqn=name))
    contexts = wrapper.checkpoint_fn.keywords["context_fn"]
    saved = {op_name(op) for op in stock.get_save_ops()}
    verdict = resolve_attention(attention, preset, block)
    float8 = mode == "full" or preset != "stock"
    return BlockPlan(
        user_rules=user_rules,
        preset_rules=() if mode == "full" else _preset_rules(preset, verdict, block),
        base=_base(mode, preset),
        saved=Verdict.FLOAT8 if float8 else Verdict.EXACT,
        attention=verdict if float8 else None,
        input=Verdict.FLOAT8 if float8 else Verdict.EXACT,
        exempt=exempt,
        stock_policy=lambda: contexts()[0].policy_fn,
        expensive_ops=frozenset({*saved, *_GROUPED, _CPU_ATTENTION} - {"aten.max", "aten.topk"}),
    )


def resolve_attention(attention: Attention, preset: Preset, block: nn.Module) -> Verdict:
    """What "auto" means: "exact", but "speed" has no bytes for it.

    There, multi-head latent attention is stored in float8; of grouped-query attention, whose
    output is larger than the model dimension, the operation is recomputed.
    """
    if attention != "auto":
        return Verdict(attention)
    if preset != "speed":
        return Verdict.EXACT
    return Verdict.FLOAT8 if hasattr(_attention_of(block), "wkv_a") else Verdict.RECOMPUTE


def _base(mode: str, preset: Preset) -> Literal["stock", "expensive", "routing"]:
    if mode == "full":
        return "routing"
    return "expensive" if preset in ("speed", "attention") else "stock"


def _preset_rules(preset: Preset, attention: Verdict, block: nn.Module) -> tuple[Rule, ...]:
    if preset == "stock":
        return ()
    rules = [Rule(Verdict.DROP, module) for module in _ONLY_ADDED]
    last_gemm = {"module": _EXPERTS, "op": "aten.*grouped_mm*", "operand": "w2*"}
    if _exchange_is_stored(block) or _scores_come_first(block):
        rules.append(Rule(Verdict.DROP, **last_gemm))
    rules.append(Rule(Verdict.RECOMPUTE, "moe.router"))
    if preset == "attention":
        return (*rules, Rule(Verdict.RECOMPUTE, "attention"), Rule(Verdict.RECOMPUTE, "attn"))
    if attention is Verdict.EXACT:
        rules += _exact_attention()
    if preset == "speed":
        # FLOPs saved per byte are the length of the dot products: a low rank goes first.
        rules += [Rule(Verdict.RECOMPUTE, f"attention.{w}") for w in ("wkv_a", "wkv_b", "wq_b")]
        rules.append(Rule(Verdict.RECOMPUTE, **last_gemm))
        if attention is Verdict.EXACT:
            # From exact q, k and v they come out exact, and stock's bytes do not hold them.
            rules.append(Rule(Verdict.RECOMPUTE, "attention.inner_attention"))
            rules.append(Rule(Verdict.RECOMPUTE, "attention.wo"))
    return tuple(rules)


def _exact_attention() -> list[Rule]:
    """Exact q, k and v in the recompute: exact projections, of a low rank where there is one."""
    exact = ("attention.wkv_a", "attention.wq_a", "attention.wq", "attention.qkv_linear")
    rules = [Rule(Verdict.EXACT, module) for module in exact]
    return rules + [Rule(Verdict.RECOMPUTE, f"attention.{w}") for w in ("wkv_b", "wq_b")]


def _attention_of(block: nn.Module) -> nn.Module | None:
    return getattr(block, "attention", None)


def _scores_come_first(block: nn.Module) -> bool:
    experts = getattr(getattr(block, "moe", None), "routed_experts", None)
    return isinstance(experts, EarlyScoreRoutedExperts)


def _exchange_is_stored(block: nn.Module) -> bool:
    """Whether the routed experts' outputs go through an all-to-all before anything reads them."""
    experts = getattr(getattr(block, "moe", None), "routed_experts", None)
    dispatcher = getattr(experts, "token_dispatcher", None)
    return getattr(dispatcher, "ep_mesh", None) is not None
