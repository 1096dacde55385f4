# SPDX-License-Identifier: BSD-3-Clause
"""The presets: which rules a block gets, by the names that its modules and operations have.

Each is a point near the frontier that ``budget`` finds, of bytes held against milliseconds to
recompute the rest. A preset first keeps what saves the most recompute time per byte: attention, the
router's gate, then GEMMs by the length of their dot products. Last come q, k and v: they are
recomputed from the block's input, exactly if that is exact. A preset discards what backward does
not read, if our proof agrees.
"""

from typing import Any, Literal, cast, get_args

import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torchtitan.distributed.activation_checkpoint import SelectiveAC

from titan_ext.activation_checkpoint.op_effects import op_name
from titan_ext.activation_checkpoint.op_policies import BlockPolicies, BlockRecipe
from titan_ext.activation_checkpoint.op_rules import ROOT, OpPolicy, Rule
from titan_ext.components.early_scores import has_early_scores
from titan_ext.components.exchange_policy import Exchanges

Preset = Literal["memory", "balanced", "speed", "gemms", "stock"]
PRESET_NAMES: tuple[Preset, ...] = get_args(Preset)
_EXPERTS = "moe.routed_experts.inner_experts"


def block_recipe(block: nn.Module, config: Any, exchanges: Exchanges | None = None) -> BlockRecipe:
    """The recipe of one block by a config of policy ``fp8``.

    ``exchanges`` are those of its job. If None, expert parallelism has been applied to ``block``,
    if it will be, and what an exchange delivers is saved.
    """
    preset = config.preset if config.mode == "selective" else ""
    base = "stock" if preset in ("memory", "stock") else "expensive"
    if not preset:
        base = "routing" if config.mode == "full" else "autograd"
    return BlockRecipe(
        user_rules=config.rules(),
        preset_rules=_preset_rules(preset, block, exchanges) if preset else (),
        base=base,
        saved=OpPolicy.SAVE if preset == "stock" else OpPolicy.SAVE_FLOAT8,
        input=OpPolicy.SAVE_FLOAT8 if preset in ("", "gemms") else OpPolicy.SAVE,
        saves_all_to_all=exchanges is None or exchanges.saved,
        exempt=tuple(config.exempt),
    )


def block_policies(block: nn.Module, name: str, recipe: BlockRecipe) -> BlockPolicies:
    """The policies of a block by its recipe, with what Titan's selective policy does in it."""
    stock = SelectiveAC(SelectiveAC.Config())
    # Titan makes its policy inside of this private method, and shows it nowhere else.
    # The wrapper is not used, its policy is.
    wrapper = cast(CheckpointWrapper, stock._wrap_block(block, base_fqn=name))
    contexts = wrapper.checkpoint_fn.keywords["context_fn"]
    return BlockPolicies(
        name=name,
        recipe=recipe,
        stock_policy=lambda: contexts()[0].policy_fn,
        stock_ops=frozenset(op_name(op) for op in stock.get_save_ops()),
    )


_QKV = ("attention.qkv_linear", "attention.wq", "attention.wq_a", "attention.wkv_a")
_FEED_FORWARDS = ("moe.shared_experts", "feed_forward")
_ROUTED, _INNER = "(moe.routed_experts)", f"({_EXPERTS})"
_SECOND_HOP = "moe.routed_experts.second_hop"


def _gemm(policy: OpPolicy, operand: str) -> Rule:
    """The rule for a grouped GEMM of the routed experts."""
    return Rule(policy, _EXPERTS, "aten.*grouped_mm*", operand)


# What backward does not read, if our proof agrees: at the end of a block results are only added.
_UNREAD = (
    Rule(OpPolicy.DISCARD, "moe.shared_experts.w2"),
    Rule(OpPolicy.DISCARD, "feed_forward.w2"),
    Rule(OpPolicy.DISCARD, "(moe)", "aten.add"),
    # After ``x + attention(..)`` the second sum of a block is its output, ``x + moe(..)``.
    Rule(OpPolicy.DISCARD, ROOT, "aten.add", occurrence=2),
)
_UNREAD_SUM_OF_EXPERTS = (
    Rule(OpPolicy.DISCARD, _ROUTED, "aten.zeros_like"),
    Rule(OpPolicy.DISCARD, _ROUTED, "torchtitan.deterministic_scatter_add"),
)
_UNREAD_PRODUCTS = (
    Rule(OpPolicy.DISCARD, _ROUTED, "aten.mul"),
    Rule(OpPolicy.DISCARD, _ROUTED, "aten._to_copy", occurrence=2),
)
# The gradient of the routing scores reads the routed experts' results, or an exchange behind them.
_UNREAD_BY_SCORES = (
    _gemm(OpPolicy.DISCARD, "[wm]*2*"),
    Rule(OpPolicy.DISCARD, _INNER, "aten.index_select", occurrence=2),
    Rule(OpPolicy.DISCARD, _INNER, "aten.add", occurrence=2),
    Rule(OpPolicy.DISCARD, _ROUTED, "aten.index_put_"),
)
# Nor does anything read what the exchange brings back, if scores are applied before it.
# Exchanges in order: counts (1), tokens to their experts (2) and back (3).
_UNREAD_TOKENS = (
    Rule(OpPolicy.DISCARD, _ROUTED, "*all_to_all_single", occurrence=3),
    Rule(OpPolicy.DISCARD, _SECOND_HOP, "*all_to_all_single", occurrence=2),
)
# Nor what is sent in float8, or once to a rank, if what arrives is kept.
_UNREAD_SENT = (
    Rule(OpPolicy.DISCARD, _ROUTED, "titan_ext.float8_quantize"),
    Rule(OpPolicy.DISCARD, _ROUTED, "aten.cat"),
    Rule(OpPolicy.DISCARD, _ROUTED, "aten.index_select"),
)
# Nor what the first of two hops brings, if what the second does is kept.
_FORWARDED = (
    Rule(OpPolicy.DISCARD, _ROUTED, "*all_to_all_single", occurrence=2),
    Rule(OpPolicy.DISCARD, _SECOND_HOP, "aten.index_select"),
)
# Of the tokens that an exchange brings, their order by expert is kept instead.
_PERMUTED = (
    Rule(OpPolicy.DISCARD, _ROUTED, "aten.index", occurrence=2),
    Rule(OpPolicy.DISCARD, _ROUTED, "*all_to_all_single", occurrence=2),
    Rule(OpPolicy.SAVE_FLOAT8, _ROUTED, "aten.index", occurrence=5),
)
# gpt_oss adds a bias after each GEMM: the sum is kept, not what is added.
_BIASED = (
    _gemm(OpPolicy.DISCARD, "mlp1*"),
    Rule(OpPolicy.DISCARD, _INNER, "aten.index_select", occurrence=1),
    Rule(OpPolicy.SAVE_FLOAT8, _INNER, "aten.add", occurrence=1),
)


def _preset_rules(
    preset: Preset, block: nn.Module, exchanges: Exchanges | None
) -> tuple[Rule, ...]:
    """The rules of a preset for one block. The first that matches an operation decides."""
    if preset == "stock":
        return ()
    rules = [*_UNREAD]
    sends, once, two_hops = _hops(block, exchanges)
    saves_exchange = sends and (exchanges is None or exchanges.saved)
    early = has_early_scores(block)
    if (saves_exchange and not once) or early:
        rules += _UNREAD_BY_SCORES
    if early or once:
        rules += _UNREAD_TOKENS
    if not _has_other_kernels(block):
        # Where sums are sent back, their own backward (``AddUp``) reads what they are made of.
        rules += [*_UNREAD_SUM_OF_EXPERTS, *(() if once else _UNREAD_PRODUCTS)]
        if saves_exchange:  # a token that came once takes fewer bytes than its copies
            rules += [*_UNREAD_SENT, *(() if once else _PERMUTED)]
            rules += _FORWARDED if two_hops else ()
    rules += _for_modules(OpPolicy.SAVE, "moe.router.gate")
    rules += _for_modules(OpPolicy.RECOMPUTE, "attention.wkv_b", "attention.wq_b")
    rules += _for_modules(OpPolicy.SAVE if preset == "gemms" else OpPolicy.RECOMPUTE, *_QKV)
    if preset == "memory":
        # Exact attention over groups of queries leaves no room for it.
        groups = hasattr(getattr(block, "attention", None), "qkv_linear")
        wo = OpPolicy.RECOMPUTE if groups else OpPolicy.SAVE_FLOAT8
        rules += _for_modules(wo, "attention.wo")
        rules += _for_modules(OpPolicy.RECOMPUTE, _EXPERTS)
        rules += _for_modules(OpPolicy.SAVE_FLOAT8, *_FEED_FORWARDS)
    if preset == "balanced":
        rules += _for_modules(OpPolicy.RECOMPUTE, *(f"{name}.w1" for name in _FEED_FORWARDS))
        rules.append(_gemm(OpPolicy.RECOMPUTE, "[wm]*1*"))
    if preset in ("speed", "gemms"):
        rules += _BIASED
    rules.append(_gemm(OpPolicy.RECOMPUTE, "[wm]*2*"))
    return tuple(rules)


def _has_other_kernels(block: nn.Module) -> bool:
    """True if quantized GEMMs may hide reads: then little can be proved, and is not tried."""
    return any(".quantization." in type(module).__module__ for module in block.modules())


def _for_modules(policy: OpPolicy, *modules: str) -> list[Rule]:
    """Rules for expensive operations alone: name the operation of any other in a ``Rule``."""
    return [Rule(policy, module) for module in modules]


def _hops(block: nn.Module, exchanges: Exchanges | None) -> tuple[bool, bool, bool]:
    """Three answers: tokens of a block travel, once to a rank or a node, and in two hops."""
    routed = getattr(getattr(block, "moe", None), "routed_experts", None)
    dispatcher: Any = getattr(routed, "token_dispatcher", None)
    if not hasattr(dispatcher, "ep_mesh"):
        return False, False, False
    if exchanges is None:
        once = getattr(dispatcher, "sends_once", None)
        return dispatcher.ep_mesh is not None, bool(once), bool(once) and len(once.meshes) > 1
    if exchanges.ep == 1:
        return False, False, False
    rows = exchanges.rows_of(dispatcher.top_k, dispatcher.num_experts)
    once = rows != "expert" and hasattr(dispatcher, "sends_once")
    return True, once, once and exchanges.nodes > 0
