# SPDX-License-Identifier: BSD-3-Clause
"""FSDP units: the modules whose parameters are gathered and freed together.

Stock Titan makes a unit of every transformer block. With expert parallelism the experts hold most
of a block's parameters, and they stay gathered while attention runs, as attention does while the
experts run. ``wrap="submodule"`` makes two units of a block instead: attention, and MoE or feed
forward. ``wrap="experts"`` makes a unit of the routed experts and one of all else in the block. The
collectives are then those of stock, which gathers the two in groups of their own. But the experts
are gathered only while they run.

Norms are in the unit of what follows them: a group of a few KiB costs the same collectives as a
large one. So a unit may have several modules. FSDP2 gathers them before the first one runs and
frees them after the last.

A router or a norm is small: sharding it saves nothing, and gathering it costs. Replicated
(``fsdp_replicate``), it is in no unit: every rank holds it whole, in an FSDP2 group that gathers
nothing and sums gradients by one all-reduce over the data axes. Results are those of a sharded
parameter. So are the dtype of the computation, gradient accumulation, microbatches of a pipeline,
and the placement that checkpoints and gradient clipping see.

``parallelize`` plans the units once; activation checkpointing, compile and FSDP share them. A unit
names its modules instead of holding them, because those passes may wrap them.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar, cast

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torchtitan.models.common.decoder import Decoder

REPLICATE = "parallelism.fsdp_replicate"
Wrap = Literal["submodule", "experts", "block"]
FSDPWrap = Literal["auto", "submodule", "experts", "block"]

# Children of a block in the order in which they run, by the names that Titan's decoders use. enorm,
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
    """The kind of a unit, on which reshard and prefetch policies depend."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MOE = "moe"
    FEED_FORWARD = "feed_forward"
    EXPERTS = "experts"
    BLOCK = "block"
    HEAD = "head"
    VISION = "vision"
    TIED = "tied_embedding_and_head"


SUBMODULE_KINDS = (UnitKind.ATTENTION, UnitKind.MOE, UnitKind.FEED_FORWARD, UnitKind.EXPERTS)
BLOCK_KINDS = (*SUBMODULE_KINDS, UnitKind.BLOCK)
"""Kinds of the units that a transformer block is split into; with the one of a whole block."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One FSDP unit. Names are fully qualified and free of wrapper prefixes."""

    name: str
    """The unit's own name ("layers.3.moe")."""
    kind: UnitKind
    module_names: tuple[str, ...] = ()
    """Its modules, in the order in which they run."""
    experts: str | None = None
    """The routed experts inside it, which live on the expert mesh when EP > 1."""

    @property
    def block(self) -> str:
        """Its block: "layers.3" for "layers.3" and "layers.3.moe"; outside of blocks its name."""
        return ".".join(self.name.split(".")[:2])

    @property
    def kind_name(self) -> str:
        """Its kind, as fsdp_reshard_groups names it."""
        # Tied weights are the head's: they are needed first in backward.
        return (UnitKind.HEAD if self.kind is UnitKind.TIED else self.kind).value

    def is_named(self, name: str) -> bool:
        """True if a name in fsdp_reshard_groups, a kind or a pattern, means this unit."""
        return name == self.kind_name or fnmatchcase(self.name, name)

    @property
    def gathers_in_backward(self) -> bool:
        """True if its backward reads its parameters: the gradient of an embedding does not."""
        return self.kind is not UnitKind.EMBEDDING

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """Its modules in ``model``, with the wrappers they have by now."""
        return [model.get_submodule(name) for name in self.module_names]

    def fsdp_module(self, model: nn.Module) -> FSDPModule:
        """One of its modules, after FSDP; they share one FSDP state."""
        module = model.get_submodule(self.module_names[0])
        assert isinstance(module, FSDPModule), f"unit {self.name} has not been sharded"
        return module


def param_groups(modules: Iterable[nn.Module | FSDPModule]) -> list[FSDPParamGroup]:
    """FSDP2's parameter groups of those of ``modules`` that it shards, each once."""
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    # Private: nothing public lists the groups, and FSDPState._fsdp_param_group raises for two.
    groups = (g for module in sharded for g in module._get_fsdp_state()._fsdp_param_groups)
    return list(dict.fromkeys(groups))


def before_first_forward(model: nn.Module, do: Callable[[], object]) -> None:
    """Call ``do`` when ``model`` first runs forward, before FSDP's hook; once, unless it raises."""

    @torch._dynamo.disable  # as FSDP's own hooks are
    def once(module: nn.Module, args: object) -> None:
        do()
        handle.remove()

    handle = model.register_forward_pre_hook(once, prepend=True)


def decoder_blocks(model: Decoder) -> list[tuple[str, nn.Module]]:
    """The transformer blocks of a decoder in forward order, multi-token-prediction blocks last."""
    blocks = [(f"layers.{name}", block) for name, block in model.layers.items()]
    for index, block in enumerate(cast(Any, getattr(model, "mtp_layers", None)) or []):
        blocks.append((f"mtp_layers.{index}", block))
    return blocks


def vision_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The vision towers that a multimodal decoder owns, by name; empty for a text model."""
    found = {name: getattr(model, name, None) for name in _VISION_MODULES}
    return {name: module for name, module in found.items() if module is not None}


def plan_units(model: Decoder, wrap: Wrap) -> list[Unit]:
    """Split a Titan decoder into FSDP units, in the order in which they first run.

    Or the chunk of one that a pipeline stage holds (embeddings, norm or head may be None).
    Activation checkpointing may wrap its blocks; FSDP may not yet. Together units hold every
    parameter of Titan's text decoders, so that the root owns none. What a model keeps elsewhere (a
    vision tower, parameters of its own) is in none.
    """
    first = _present(model, "", ("tok_embeddings",))
    head = _present(model, "", ("norm", "lm_head"))
    units: list[Unit] = []

    if model.enable_weight_tying:
        # One parameter, so one unit: embeddings and head cannot be freed apart.
        name = "tok_embeddings+lm_head"
        units.append(Unit(name=name, kind=UnitKind.TIED, module_names=first + head))
    elif first:
        units.append(Unit(name=first[0], kind=UnitKind.EMBEDDING, module_names=first))

    for name, block in decoder_blocks(model):
        units.extend(_block_units(name, block, wrap))

    # Norm and head together, as in stock. Titan's chunked loss runs the head by itself. FSDP2 would
    # take each chunk's backward of a head alone for the end of backward and visit all groups:
    # 24 ms of the host for 8 layers, beside an H100 (benchmarks/gpu_receipts.md).
    if head and not model.enable_weight_tying:
        units.append(Unit(name=head[-1], kind=UnitKind.HEAD, module_names=head))
    return units


def splits_blocks(units: Sequence[Unit]) -> bool:
    """True if some unit is a part of a block, so that FSDP's hooks run inside of blocks."""
    return any(unit.kind in SUBMODULE_KINDS for unit in units)


_AnyUnit = TypeVar("_AnyUnit", bound=Unit)


def innermost_first(units: Sequence[_AnyUnit]) -> list[_AnyUnit]:
    """The order for ``fully_shard``: inner units first, an outer one gets the rest."""
    return sorted(units, key=lambda unit: -unit.name.count("."))


def units_without(
    model: nn.Module, units: Sequence[Unit], replicated: Collection[str]
) -> list[Unit]:
    """``units`` without the modules ``replicated``, and without units that are then empty."""
    if not replicated:
        return list(units)
    gone = {p for name in replicated for p in model.get_submodule(name).parameters(recurse=False)}
    return [
        replace(
            unit,
            module_names=tuple(name for name in unit.module_names if name not in replicated),
            experts=unit.experts if unit.experts not in replicated else None,
        )
        for unit in units
        if any(param not in gone for module in unit.modules(model) for param in module.parameters())
    ]


def replicated_by_unit(units: Sequence[Unit], replicated: Iterable[str]) -> list[list[str]]:
    """``replicated``, grouped by the innermost unit around them; those outside come last."""
    left = list(replicated)
    groups = []
    for unit in innermost_first(units):
        inside = [
            name
            for outer in unit.module_names
            for name in left
            if f"{name}.".startswith(f"{outer}.")
        ]
        groups.append(inside)
        left = [name for name in left if name not in inside]
    return [group for group in (*groups, left) if group]


def _block_units(name: str, block: nn.Module, wrap: Wrap) -> list[Unit]:
    # Dense models (llama3) have no moe_enabled at all. A CheckpointWrapper forwards getattr.
    is_moe = getattr(block, "moe_enabled", False)
    if is_moe and getattr(block, "moe", None) is None:
        children = ", ".join(child for child, _ in block.named_children())
        raise ValueError(
            f"{name} says that it has experts (moe_enabled), but it has no child called moe, where "
            f"titan_ext looks for them; its children are {children}."
        )
    experts = f"{name}.moe.routed_experts.inner_experts" if is_moe else None
    whole = Unit(name=name, kind=UnitKind.BLOCK, module_names=(name,), experts=experts)
    if wrap == "block" or (wrap == "experts" and experts is None):
        return [whole]
    if wrap == "experts":
        assert experts is not None
        kind = UnitKind.EXPERTS
        inner = Unit(name=f"{name}.experts", kind=kind, module_names=(experts,), experts=experts)
        return [replace(whole, experts=None), inner]

    ffn_kind = UnitKind.MOE if is_moe else UnitKind.FEED_FORWARD
    units = []
    covered: set[nn.Parameter] = set()
    for kind, children, inside in (
        (UnitKind.ATTENTION, _ATTENTION_CHILDREN, None),
        (ffn_kind, _FFN_CHILDREN, experts),
    ):
        paths = _present(block, name, children)
        modules = [block.get_submodule(path.removeprefix(f"{name}.")) for path in paths]
        params = {param for module in modules for param in module.parameters()}
        if params:
            unit = f"{name}.{kind.value}"
            units.append(Unit(name=unit, kind=kind, module_names=paths, experts=inside))
        covered |= params
    if any(param not in covered for param in block.parameters()):
        # A block with parameters of its own: they form the block's group, gathered around both.
        units.insert(0, replace(whole, experts=None))
    return units


def _present(parent: nn.Module, path: str, children: Sequence[str]) -> tuple[str, ...]:
    """Full names of those ``children`` that ``parent``, which is at ``path``, has."""
    prefix = f"{path}." if path else ""
    return tuple(prefix + name for name in children if getattr(parent, name, None) is not None)
