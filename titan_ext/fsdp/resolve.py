# SPDX-License-Identifier: BSD-3-Clause
"""Decides what FSDP does with each unit, from settings, degrees and shapes, before any pass runs.

A model on the meta device is enough. Neither a mesh nor a process group is needed, so a dry run,
the checks of a config and the log know it before anything is sharded.

FSDP may free a unit's parameters after its forward, to gather them again for its backward.
Parameters that stay gathered save an all-gather and cost their bytes from forward to backward. An
int is in between: after forward FSDP shards the parameters over a smaller world of that many
neighbouring ranks. Each rank then holds a larger shard, and backward gathers within that world (on
one machine, say). It does not limit the number of concurrent all-gathers.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import spmd_types as spmd
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts

from titan_ext.base.nodes import Nodes
from titan_ext.fsdp.auto import AUTO_FORWARD, choose
from titan_ext.fsdp.names import (
    check_reshard_groups,
    find_frozen_linears,
    find_ignored,
    find_replicated,
)
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
    EXPERT_REDUCE_SCATTER,
    RESHARD,
    RESHARD_GROUPS,
    FSDPSettings,
)
from titan_ext.fsdp.units import (
    BLOCK_KINDS,
    Unit,
    UnitKind,
    innermost_first,
    plan_units,
    replicated_by_unit,
    units_without,
    vision_modules,
)


def resolve_sharding(
    model: Decoder,
    settings: FSDPSettings,
    parallel_dims: ParallelDims,
    nodes: Nodes,
    *,
    compiles_blocks: bool = False,
) -> FSDPPlan:
    """Decide what FSDP does with the units of ``model``, and with its vision towers.

    Args:
        model: A decoder or the chunk of a pipeline stage, on the meta device or not, before FSDP;
            before tensor and expert parallelism, or after them. It stays as it is. Some names may
            be in other chunks, and "default" keeps the units of a chunk gathered after forward.
        parallel_dims: Of it only the degrees and the backend are read.
        compiles_blocks: Whether blocks are compiled whole, unless the experts are a unit.

    Raises ValueError for a setting that does not fit the model, or a name that is not in it.
    """
    choice = choose(model, settings, parallel_dims, nodes, compiles_blocks=compiles_blocks)
    sizes = ShardSizes.of(parallel_dims)
    of = _Job(model, settings, parallel_dims, sizes, is_chunk=parallel_dims.pp_enabled)
    # With pipeline parallelism a microbatch may have no images, and FSDP2 fails on a unit that
    # never runs. So there the parameters of a vision tower stay with the root.
    names = () if of.is_chunk else vision_modules(model)
    towers = [Unit(name=n, kind=UnitKind.VISION, module_names=(n,)) for n in names]
    ignored = find_ignored(model, settings.ignored, is_chunk=of.is_chunk)
    replicated = find_replicated(model, settings.replicate, is_chunk=of.is_chunk)
    quantized: list[str] = []
    if settings.quantize_frozen:
        quantized = find_frozen_linears(
            model,
            settings.quantize_frozen,
            shard_world=sizes.dense,
            is_chunk=of.is_chunk,
            replicated=replicated,
        )
    units: Sequence[Unit] = plan_units(model, choice.wrap)
    replicated_plans = [
        plan
        for names in replicated_by_unit(units, replicated)
        for plan in _plan_replicated(of, names)
    ]
    units = units_without(model, units, replicated)
    if not of.is_chunk:
        check_reshard_groups(settings, [*towers, *units])
    others = {*ignored.values()}
    for name in replicated:
        others |= {*model.get_submodule(name).parameters(recurse=False)}
    planned = _plan_units(of, units, others)
    _check_collectives(of, planned)
    limit = settings.prefetch_limit
    return FSDPPlan(
        units=(
            *_plan_units(of, towers),
            *plan_prefetch(planned, limit or AUTO_FORWARD, limit or choice.backward),
        ),
        replicated=tuple(replicated_plans),
        quantized=tuple(quantized),
        ignored=tuple(ignored),
        wrap=choice.wrap,
        why=choice.why,
        reduce_scatter_buffers=choice.buffers,
        precision=MixedPrecisionPolicy(
            settings.param_dtype, settings.reduce_dtype, cast_forward_inputs=False
        ),
        cpu_offload=settings.cpu_offload,
        symm_mem=settings.symm_mem,
    )


@dataclass(frozen=True)
class _Job:
    """Arguments that the functions below share."""

    model: Decoder
    settings: FSDPSettings
    dims: ParallelDims
    sizes: ShardSizes
    is_chunk: bool


_Owned = tuple[nn.Parameter, tuple[int, ...], bool]
"""A parameter of a unit, its shape on a rank, and whether TP or EP make a new one of it."""


def _plan_units(
    of: _Job, units: Sequence[Unit], others: Collection[nn.Parameter] = ()
) -> list[UnitPlan]:
    """Plan ``units``, but for prefetching; ``others`` are parameters outside all of them."""
    owned = _owned_parameters(of, units, others)
    plans = []
    for unit in units:
        plan = UnitPlan(**vars(unit), groups=_plan_groups(of, unit, owned[unit.name]))
        is_new = any(is_new for *_, is_new in owned[unit.name].values())
        on_model_axis = is_new and of.dims.spmd_backend != "spmd_types"
        reshard = _reshard_of(of, plan, on_model_axis=on_model_axis)
        plans.append(replace(plan, reshard_after_forward=reshard))
    return plans


def _reshard_of(of: _Job, unit: UnitPlan, *, on_model_axis: bool) -> bool | int:
    """FSDP2's ``reshard_after_forward`` for one unit.

    Of several patterns for its name the last counts, then its kind, then the setting for all.
    "default" frees a unit after forward, except in a pipeline, which would gather it again for
    every microbatch, and except the head. The head runs first in backward, so of the settings for
    all units only "always" frees it. An int frees the embedding: no backward would gather its
    larger shard, and FSDP2 would hold that until the next forward.

    ``on_model_axis``: another kind of parallelism makes DTensors of its parameters; torch cannot
    reshard those to a smaller world. Raises ValueError for an int that does not fit.
    """
    groups = of.settings.reshard_groups
    kind = unit.kind_name
    names = [name for name in groups if name != kind and unit.is_named(name)]
    names = [kind] * (kind in groups) + names
    key, value = RESHARD, of.settings.reshard_after_forward
    if names:
        key, value = f"{RESHARD_GROUPS}.{names[-1]}", groups[names[-1]]
    is_head = kind == UnitKind.HEAD
    if is_head and not names:
        return value == "always"
    if isinstance(value, int):
        if unit.kind is UnitKind.VISION:
            raise ValueError(
                f"{key} is {value}, a number of ranks; TorchTitan reshards {unit.name} always or "
                f'never. Give it "always" or "never" in {RESHARD_GROUPS}.'
            )
        if on_model_axis:
            raise ValueError(
                f"{key} is {value}, a number of ranks. FSDP2 reshards only plain tensors to a "
                "smaller world, but tensor or expert parallelism has split the parameters of "
                f'{unit.name}. Give it "always" or "never" in {RESHARD_GROUPS}.'
            )
        for group in unit.groups:
            if (world := group.shard_world) % value:
                fitting = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
                raise ValueError(
                    f"{key} is {value}, the number of ranks over which to reshard, but "
                    f"{unit.name} is sharded over {world}; expected one of {fitting}."
                )
            if any(param.shard_dim for param in group.params):
                raise ValueError(
                    f"{key} is {value}, a number of ranks. FSDP2 reshards only dim 0 to a "
                    f"smaller world, but more ranks share the routed experts of {unit.name} "
                    "than there are experts, so FSDP shards their dim 1. "
                    f'Give it "always" or "never" in {RESHARD_GROUPS}.'
                )
        return value if unit.gathers_in_backward else True
    if value == "default" and is_head:
        return False
    return get_fsdp_reshard_after_forward_policy(value, of.is_chunk)


def _plan_groups(of: _Job, unit: Unit, owned: Mapping[str, _Owned]) -> tuple[GroupPlan, ...]:
    settings, sizes = of.settings, of.sizes
    experts: Any = of.model.get_submodule(unit.experts) if unit.experts else None
    routed = set(experts.parameters()) if experts is not None else set()
    expert_dim = sizes.expert_shard_dim(experts.num_experts) if experts is not None else 0
    alone = sizes.experts is not None or unit.kind is UnitKind.EXPERTS
    of_blocks = settings.float8_all_gather == "blocks" and unit.kind in BLOCK_KINDS
    of_experts = settings.float8_all_gather == "experts" and alone
    # In the order of their first parameters, as FSDP2 makes its groups: where a router and a norm
    # are replicated, the experts come first.
    by_mesh: dict[GroupKind, list[ParamPlan]] = {}
    for name, (param, shape, _) in owned.items():
        is_routed = param in routed
        mesh: GroupKind = "experts" if is_routed and sizes.experts is not None else "dense"
        # A bias is one value a row: its neighbours in a block of 128 are those of other rows.
        is_matrix = len(shape) == (3 if is_routed else 2) and ".router." not in name
        float8 = is_matrix and (of_blocks or (is_routed and of_experts))
        if float8 and hasattr(param, "fsdp_pre_all_gather"):
            raise ValueError(
                f"{ALL_GATHER} rounds what is gathered, and {name}, which a converter has made, "
                "decides itself what travels. Expected a config without this key."
            )
        shard_dim = expert_dim if is_routed else 0
        plan = _plan_param(of, name, param, shape, shard_dim=shard_dim, float8=float8)
        by_mesh.setdefault(mesh, []).append(plan)
    return tuple(
        GroupPlan(
            kind=mesh,
            shard_world=(sizes.experts or 1) if mesh == "experts" else sizes.dense,
            params=tuple(params),
            reduce_scatter=settings.expert_reduce_scatter
            if mesh == "experts" or unit.kind is UnitKind.EXPERTS
            else None,
        )
        for mesh, params in by_mesh.items()
    )


def _check_collectives(of: _Job, units: Sequence[UnitPlan]) -> None:
    """Refuse keys for collectives that FSDP has not: over one rank, or of experts that are none."""
    groups = [group for unit in units for group in unit.groups if group.shard_world > 1]
    gathers = any(group.gathers_float8 for group in groups)
    reduces = any(group.reduce_scatter for group in groups)
    for key, value in of.settings.collectives.items():
        if not of.is_chunk and not (reduces if key == EXPERT_REDUCE_SCATTER else gathers):
            sharded = "matrices of blocks" if value == "blocks" else "routed experts"
            raise ValueError(f'{key} = "{value}": FSDP shards no {sharded} of this model.')


def _plan_replicated(of: _Job, names: Sequence[str]) -> list[ReplicatedPlan]:
    """One group for the modules ``names`` of a unit, and one for its routed experts under EP."""
    kinds: dict[GroupKind, list[str]] = {}
    for name in names:
        is_routed = isinstance(of.model.get_submodule(name), GroupedExperts)
        kind = "experts" if is_routed and of.sizes.experts is not None else "dense"
        kinds.setdefault(kind, []).append(name)
    return [
        ReplicatedPlan(
            kind=kind,
            shard_world=1,
            module_names=tuple(modules),
            params=tuple(
                _plan_param(of, f"{path}.{name}", param, _local_shape(of, module, name, param)[0])
                for path, module in ((path, of.model.get_submodule(path)) for path in modules)
                for name, param in module.named_parameters(recurse=False)
            ),
        )
        for kind, modules in kinds.items()
    ]


def _plan_param(
    of: _Job, name: str, param: nn.Parameter, shape: tuple[int, ...], **how: Any
) -> ParamPlan:
    dtype = of.settings.param_dtype if param.is_floating_point() else param.dtype
    return ParamPlan(name=name, shape=shape, dtype=dtype, **how)


def _local_shape(
    of: _Job, module: nn.Module, name: str, param: nn.Parameter
) -> tuple[tuple[int, ...], bool]:
    """The shape of ``module``'s parameter on one rank, with TP and EP but without FSDP.

    Its module's ``_sharding_config`` says what ``Module.parallelize`` will make of it
    (torchtitan/protocols/module.py): of unequal shards the largest counts. Also returns whether
    that makes a new parameter.
    """
    layouts = getattr(getattr(module, "_sharding_config", None), "state_shardings", {})
    layout = layouts.get(name)
    if layout is None or getattr(module, "_parallelized", False):
        local = param._local_tensor if isinstance(param, DTensor) else param
        return tuple(local.shape), isinstance(param, DTensor)
    shape, is_new = list(param.shape), of.dims.spmd_backend == "spmd_types"
    degrees = {"tp": of.dims.tp, "ep": of.dims.ep}
    for axis, kind in layout.per_axis_spmd_types().items():
        degree = degrees.get(axis.value, 1)
        is_new |= degree > 1
        if isinstance(kind, spmd.Shard) and degree > 1:
            shape[kind.dim] = math.ceil(shape[kind.dim] / degree)
    return tuple(shape), is_new


def _in_order(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules as FSDP2 takes their parameters: children before their parents.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_init.py, ``_get_managed_modules``. In a
    module with parameters of its own (gpt_oss' attention has sinks) that is not the order of
    ``named_parameters``, and ``collectives.Float8AllGather`` finds parameters by their place.
    """
    for name, child in module.named_children():
        yield from _in_order(f"{path}.{name}", child)
    yield path, module


def _owned_parameters(
    of: _Job, units: Sequence[Unit], others: Collection[nn.Parameter]
) -> dict[str, dict[str, _Owned]]:
    """The parameters of each unit by its name, less ``others``; the innermost unit owns one.

    Tied parameters are one, unless Titan makes a new one for each module and ties them later.
    """
    owned: dict[str, dict[str, _Owned]] = {}
    taken: set[Any] = set()
    for unit in innermost_first(units):
        owned[unit.name] = {}
        for path, top in zip(unit.module_names, unit.modules(of.model), strict=True):
            for prefix, module in _in_order(path, top):
                for name, param in module.named_parameters(recurse=False):
                    shape, is_new = _local_shape(of, module, name, param)
                    key = (module, name) if is_new else param
                    if key not in taken and param not in others:
                        taken.add(key)
                        fqn = canonical_fqn(f"{prefix}.{name}")
                        owned[unit.name][fqn] = param, shape, is_new
    return owned
