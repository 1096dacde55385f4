# SPDX-License-Identifier: BSD-3-Clause
"""Makes the plan of what FSDP does with each unit, from shapes and settings alone.

Sizes of a mesh and a model on the meta device are enough, so ``auto``, a dry run and the log know
it before anything is sharded.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts

from titan_ext.fsdp.nf4 import find_frozen_linears
from titan_ext.fsdp.plan import (
    FSDPPlan,
    GroupKind,
    GroupPlan,
    ParamPlan,
    ReplicatedPlan,
    ShardSizes,
    UnitPlan,
)
from titan_ext.fsdp.prefetch import plan_prefetch
from titan_ext.fsdp.settings import (
    ALL_GATHER,
    EXPERT_ALL_GATHER,
    EXPERT_REDUCE_SCATTER,
    FSDPSettings,
    copies_out_directly,
)
from titan_ext.fsdp.units import (
    BLOCK_KINDS,
    Unit,
    UnitKind,
    find_ignored,
    find_replicated,
    innermost_first,
    replicated_by_unit,
    units_without,
    vision_units,
    with_norm_apart,
)


def make_plan(
    model: Decoder,
    units: Sequence[Unit],
    settings: FSDPSettings,
    sizes: ShardSizes,
    *,
    is_chunk: bool = False,
) -> FSDPPlan:
    """Plan what FSDP does with ``units``, and with the vision towers of ``model``.

    Args:
        model: A decoder before FSDP, tensor and expert parallelism applied.
        units: Its units (``fsdp.units.plan_units``), in forward order.
        is_chunk: Whether a pipeline stage holds only this part of the model. Some names may be in
            other stages then, and "default" keeps units gathered after forward.

    Raises:
        ValueError: for a setting that does not fit the model, or a name that is not in it.
    """
    # With pipeline parallelism a microbatch may have no images, and FSDP2 fails on a unit that
    # never runs. So there the parameters of a vision tower stay with the root.
    towers = [] if is_chunk else vision_units(model)
    ignored = find_ignored(model, settings.ignored, is_chunk=is_chunk)
    replicated = find_replicated(model, settings.replicate, is_chunk=is_chunk)
    quantized: list[str] = []
    if settings.quantize_frozen:
        quantized = find_frozen_linears(
            model,
            settings.quantize_frozen_modules,
            shard_world=sizes.dense,
            is_chunk=is_chunk,
            replicated=replicated,
        )
    replicated_plans = [
        plan
        for names in replicated_by_unit(units, replicated)
        for plan in _plan_replicated(model, names, settings, sizes)
    ]
    units = units_without(model, units, replicated)
    if not is_chunk:
        settings.check_reshard_groups([*towers, *units])
    others = {*ignored.values()}
    for name in replicated:
        others |= {*model.get_submodule(name).parameters(recurse=False)}
    together = is_chunk or sizes.dense == 1  # over one rank nothing is gathered
    apart = units if together else with_norm_apart(units)
    planned = _plan_units(model, apart, settings, sizes, others, is_chunk=is_chunk)
    if apart != units and not _frees_blocks(planned):
        planned = _plan_units(model, units, settings, sizes, others)
    _check_collectives(planned, settings, is_chunk)
    return FSDPPlan(
        units=(
            *_plan_units(model, towers, settings, sizes),
            *plan_prefetch(planned, *settings.prefetch_limits),
        ),
        replicated=tuple(replicated_plans),
        quantized=tuple(quantized),
        ignored=tuple(ignored),
        reduce_scatter_buffers=settings.reduce_scatter_inputs,
        chosen=settings.chosen,
        copies_out_directly=copies_out_directly(),
    )


def _plan_units(
    model: nn.Module,
    units: Sequence[Unit],
    settings: FSDPSettings,
    sizes: ShardSizes,
    others: Collection[nn.Parameter] = (),
    *,
    is_chunk: bool = False,
) -> list[UnitPlan]:
    """Plan ``units``, but for prefetching; ``others`` are parameters outside all of them."""
    owned = _owned_parameters(model, units, others)
    plans = [
        UnitPlan(**vars(u), groups=_plan_groups(model, u, owned[u.name], settings, sizes))
        for u in units
    ]
    largest = max((plan.gathered_nbytes for plan in plans), default=0)
    return [
        replace(
            plan,
            reshard_after_forward=settings.reshard_of(
                plan,
                is_chunk=is_chunk,
                is_rounding_error=plan.gathered_nbytes * 100 <= largest,
                has_dtensors=any(isinstance(p, DTensor) for p in owned[plan.name].values()),
            ),
        )
        for plan in plans
    ]


def _frees_blocks(units: Sequence[UnitPlan]) -> bool:
    """Whether blocks are freed after forward, and nothing is resharded to a smaller world.

    If not, the last norm stays with the head: a head alone has FSDP2 free in the loss what is to
    stay gathered, and hold the shards of a smaller world until the next step.
    """
    return all(
        unit.reshard_after_forward is True
        or (unit.reshard_after_forward is False and unit.kind not in BLOCK_KINDS)
        for unit in units
    )


def _plan_groups(
    model: nn.Module,
    unit: Unit,
    owned: Mapping[str, nn.Parameter],
    settings: FSDPSettings,
    sizes: ShardSizes,
) -> tuple[GroupPlan, ...]:
    experts = unit.experts_in(model)
    routed = set(experts.parameters()) if experts is not None else set()
    expert_dim = sizes.expert_shard_dim(experts.num_experts) if experts is not None else 0
    dense, on_expert_mesh = [], []
    of_blocks = settings.all_gather if unit.kind in BLOCK_KINDS else None
    alone = sizes.experts is not None or unit.kind is UnitKind.EXPERTS
    of_experts = settings.expert_all_gather if alone else None
    for name, param in owned.items():
        is_routed = param in routed
        group = on_expert_mesh if is_routed and sizes.experts is not None else dense
        plan = _plan_param(name, param, settings, expert_dim if is_routed else 0)
        # A bias is one value a row: its neighbours in a block of 128 are those of other rows.
        is_matrix = len(plan.shape) == (3 if is_routed else 2) and ".router." not in name
        float8 = is_matrix and bool(of_blocks or (is_routed and of_experts))
        if float8 and hasattr(param, "fsdp_pre_all_gather"):
            raise ValueError(
                f"{ALL_GATHER if of_blocks else EXPERT_ALL_GATHER} rounds what is gathered, and "
                f"{name}, which a converter has made, says itself what travels. Expected no such "
                "key."
            )
        group.append(replace(plan, float8=float8))
    wire: dict[str, Any] = {"reduce_scatter": settings.expert_reduce_scatter}
    own = wire if unit.kind is UnitKind.EXPERTS else {}
    groups = [GroupPlan(kind="dense", shard_world=sizes.dense, params=tuple(dense), **own)]
    if sizes.experts is not None:
        params = tuple(on_expert_mesh)
        groups.append(GroupPlan(kind="experts", shard_world=sizes.experts, params=params, **wire))
    return tuple(group for group in groups if group.params)


def _check_collectives(units: Sequence[UnitPlan], settings: FSDPSettings, is_chunk: bool) -> None:
    """Refuse keys for collectives that FSDP has not: over one rank, or of experts that are none."""
    groups = [group for unit in units for group in unit.groups if group.shard_world > 1]
    gathers = any(group.gathers_float8 for group in groups)
    reduces = any(group.reduce_scatter for group in groups)
    for key, value, _ in settings.collectives:
        if value and not is_chunk and not (reduces if key == EXPERT_REDUCE_SCATTER else gathers):
            sharded = "matrices of blocks" if key == ALL_GATHER else "routed experts"
            raise ValueError(f"{key}: FSDP shards no {sharded} of this model.")


def _plan_replicated(
    model: nn.Module, names: Sequence[str], settings: FSDPSettings, sizes: ShardSizes
) -> list[ReplicatedPlan]:
    """One group for the modules ``names`` of a unit, and one for its routed experts under EP."""
    kinds: dict[GroupKind, list[str]] = {}
    for name in names:
        is_routed = isinstance(model.get_submodule(name), GroupedExperts)
        kind = "experts" if is_routed and sizes.experts is not None else "dense"
        kinds.setdefault(kind, []).append(name)
    return [
        ReplicatedPlan(
            kind=kind,
            module_names=tuple(modules),
            params=tuple(
                _plan_param(name, param, settings)
                for path in modules
                for name, param in model.get_submodule(path).named_parameters(path, recurse=False)
            ),
        )
        for kind, modules in kinds.items()
    ]


def _plan_param(
    name: str, param: nn.Parameter, settings: FSDPSettings, shard_dim: int = 0
) -> ParamPlan:
    local = param.to_local() if isinstance(param, DTensor) else param
    return ParamPlan(
        name=name,
        shape=tuple(local.shape),
        shard_dim=shard_dim,
        dtype=settings.param_dtype if param.is_floating_point() else param.dtype,
    )


def _owned_parameters(
    model: nn.Module, units: Sequence[Unit], others: Collection[nn.Parameter]
) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters of each unit by its name, less ``others``; the innermost unit owns one."""
    owned: dict[str, dict[str, nn.Parameter]] = {}
    taken = set(others)
    for unit in innermost_first(units):
        owned[unit.name] = {}
        for path, module in zip(unit.module_names, unit.modules(model), strict=True):
            for name, param in module.named_parameters(path):
                if param not in taken:
                    taken.add(param)
                    owned[unit.name][canonical_fqn(name)] = param
    return owned
