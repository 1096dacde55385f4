"""What one FSDP unit is: the modules whose parameters are gathered and freed together.

Stock Titan makes a unit of every transformer block. With expert parallelism the experts of a block
are most of its parameters, yet they lie unsharded while attention runs, and attention while the
experts run. ``wrap="submodule"`` makes two units of a block instead.

Norms are never units of their own: a group of a few KiB costs the same collectives as a large one.
A unit may therefore have several modules, which FSDP2 runs as one group: gathered before the first
of them runs, freed after the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, cast

import torch.nn as nn
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts, MoE

__all__ = [
    "Unit",
    "UnitKind",
    "Wrap",
    "decoder_blocks",
    "innermost_first",
    "plan_units",
    "resolve_wrap",
    "vision_modules",
    "vision_units",
]

Wrap = Literal["submodule", "block"]

# Children of a block in the order in which they run, by the names that Titan's decoders use: enorm,
# hnorm, eh_proj and mtp_norm belong to multi-token prediction (deepseek_v3/mtp.py), attn to
# qwen3_5, the post norms to muse_glimmer.
_ATTENTION_CHILDREN = (
    "enorm",
    "hnorm",
    "eh_proj",
    "attention_norm",
    "attention",
    "attn",
    "post_attention_norm",
)
_FFN_CHILDREN = ("ffn_norm", "moe", "feed_forward", "post_ffn_norm", "mtp_norm")
_VISION_MODULES = ("vision_encoder", "vision_adapter")


class UnitKind(StrEnum):
    """What a unit holds; policies (reshard, prefetch) are decided by it."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MOE = "moe"
    FEED_FORWARD = "feed_forward"
    BLOCK = "block"
    HEAD = "head"
    VISION = "vision"
    TIED = "tied_embedding_and_head"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One FSDP unit.

    Attributes:
        name: Fully qualified name in the model, without wrapper prefixes ("layers.3.moe").
        kind: What it holds.
        modules: Its modules, in the order in which they run.
        module_names: Their names in the block or model that holds them; "" for a whole block.
        experts: The routed experts inside it, which live on the expert mesh when EP > 1.
    """

    name: str
    kind: UnitKind
    modules: tuple[nn.Module, ...]
    module_names: tuple[str, ...]
    experts: GroupedExperts | None = None

    def num_groups(self, ep_degree: int) -> int:
        """Parameter groups, each with collectives of its own: 2 if it has experts and EP > 1."""
        return 2 if self.experts is not None and ep_degree > 1 else 1


def resolve_wrap(fsdp_wrap: str, ep_degree: int) -> Wrap:
    """Resolve ``parallelism.fsdp_wrap``: "auto" is "submodule" when EP > 1, else "block".

    Raises:
        ValueError: for any other name.
    """
    match fsdp_wrap:
        case "auto":
            return "submodule" if ep_degree > 1 else "block"
        case "submodule" | "block":
            return fsdp_wrap
        case _:
            raise ValueError(
                f"parallelism.fsdp_wrap is {fsdp_wrap!r}; expected one of auto, submodule, block."
            )


def decoder_blocks(model: Decoder) -> list[tuple[str, nn.Module]]:
    """The transformer blocks of a decoder in forward order, multi-token-prediction blocks last."""
    blocks = [(f"layers.{name}", block) for name, block in model.layers.items()]
    for index, block in enumerate(getattr(model, "mtp_layers", None) or []):
        blocks.append((f"mtp_layers.{index}", block))
    return blocks


def vision_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The vision towers that a multimodal decoder owns, by name; empty for a text model."""
    found = {name: getattr(model, name, None) for name in _VISION_MODULES}
    return {name: module for name, module in found.items() if module is not None}


def vision_units(model: nn.Module) -> list[Unit]:
    """A unit for each vision tower of a multimodal decoder."""
    return [
        _unit(name, UnitKind.VISION, {"": tower}) for name, tower in vision_modules(model).items()
    ]


def plan_units(model: Decoder, wrap: Wrap) -> list[Unit]:
    """Split a Titan decoder into FSDP units, in the order in which they first run.

    Args:
        model: A decoder, or the chunk of one that a pipeline stage holds (embeddings, norm or
            head may be None). Its blocks may be wrapped by activation checkpointing, not yet by
            FSDP.
        wrap: What a unit of a block is.

    Returns:
        The units. Together they hold every parameter of a text decoder of Titan's, so that the
        root owns none; what a model keeps elsewhere (a vision tower, parameters of its own) is
        not in them.
    """
    first = _children(model, ("tok_embeddings",))
    head = _children(model, ("norm", "lm_head"))
    units: list[Unit] = []

    if model.enable_weight_tying:
        # One parameter, so one unit: embeddings and head cannot be freed apart.
        units.append(_unit("tok_embeddings+lm_head", UnitKind.TIED, first | head))
    elif first:
        units.append(_unit("tok_embeddings", UnitKind.EMBEDDING, first))

    for name, block in decoder_blocks(model):
        units.extend(_block_units(name, block, wrap))

    if head and not model.enable_weight_tying:
        units.append(_unit("lm_head" if model.lm_head is not None else "norm", UnitKind.HEAD, head))
    return units


def innermost_first(units: Sequence[Unit]) -> list[Unit]:
    """The order in which ``fully_shard`` takes them: a unit gets what those inside it have left."""
    return sorted(units, key=lambda unit: -unit.name.count("."))


def _block_units(name: str, block: nn.Module, wrap: Wrap) -> list[Unit]:
    moe = _moe_of(block)
    experts = moe.routed_experts.inner_experts if moe is not None else None
    whole = _unit(name, UnitKind.BLOCK, {"": block}, experts)
    if wrap == "block":
        return [whole]

    attention = _children(block, _ATTENTION_CHILDREN)
    ffn = _children(block, _FFN_CHILDREN)
    ffn_kind = UnitKind.MOE if experts is not None else UnitKind.FEED_FORWARD
    units = [
        _unit(f"{name}.{kind.value}", kind, modules, unit_experts)
        for kind, modules, unit_experts in (
            (UnitKind.ATTENTION, attention, None),
            (ffn_kind, ffn, experts),
        )
        if any(True for m in modules.values() for _ in m.parameters())
    ]
    covered = {id(p) for unit in units for m in unit.modules for p in m.parameters()}
    if any(id(p) not in covered for p in block.parameters()):
        # A block with parameters of its own: they form the block's group, gathered around both.
        units.insert(0, _unit(name, UnitKind.BLOCK, {"": block}))
    return units


def _unit(
    name: str,
    kind: UnitKind,
    modules: dict[str, nn.Module],
    experts: GroupedExperts | None = None,
) -> Unit:
    return Unit(
        name=name,
        kind=kind,
        modules=tuple(modules.values()),
        module_names=tuple(modules),
        experts=experts,
    )


def _moe_of(block: nn.Module) -> MoE | None:
    # Dense models (llama3) have no moe_enabled at all. A CheckpointWrapper forwards getattr.
    if not getattr(block, "moe_enabled", False):
        return None
    return cast(MoE, block.moe)


def _children(parent: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    children = {name: getattr(parent, name, None) for name in names}
    return {name: child for name, child in children.items() if child is not None}
