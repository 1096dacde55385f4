"""Apply FSDP2 to a decoder, unit by unit.

``apply_fsdp_to_decoder`` has the signature of Titan's function of that name plus ``wrap``, so it
can stand in for it, and a change here can go upstream. Source of the expert sharding rules:
torchtitan/distributed/fsdp.py.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    fully_shard,
)
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.fsdp import (
    apply_fsdp_to_vision_encoder,
    disable_fsdp_gradient_division,
    enable_fsdp_symm_mem,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.tools.logging import logger

from titan_ext.fsdp.experts import ExpertPlacement, fsdp_mesh_info
from titan_ext.fsdp.mesh import resolve_meshes
from titan_ext.fsdp.names import matching_parameters
from titan_ext.fsdp.plan import FSDPPlan, remember_plan
from titan_ext.fsdp.planning import make_plan
from titan_ext.fsdp.prefetch import parse_reach, set_prefetch
from titan_ext.fsdp.quantized import find_frozen_linears, quantize_at_first_forward
from titan_ext.fsdp.replicated import (
    find_kept,
    kept_by_unit,
    replicate_modules,
    units_without,
)
from titan_ext.fsdp.reshard import Reshard
from titan_ext.fsdp.units import (
    Unit,
    innermost_first,
    plan_units,
    resolve_wrap,
    vision_units,
)
from titan_ext.guards.late_parameters import (
    refuse_late_parameters_at_first_forward,
    remember_ignored,
)
from titan_ext.no_accelerator import reduce_without_premul_sum

__all__ = ["apply_fsdp_to_decoder", "shard_decoder"]


def shard_decoder(
    model: Decoder,
    parallel_dims: ParallelDims,
    *,
    param_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    cpu_offload: bool = False,
    reshard_after_forward_policy: Reshard = "default",
    enable_symm_mem: bool = False,
    wrap: str = "auto",
    reshard_groups: Mapping[str, Reshard] | None = None,
    prefetch: int | str = 1,
    prefetch_backward: int | str | None = None,
    keep_replicated: Sequence[str] = (),
    frozen_nf4: Sequence[str] = (),
    ignored: Sequence[str] = (),
) -> FSDPPlan:
    """Shard a Titan decoder and its vision towers with FSDP2 over the axes of ``parallel_dims``.

    See ``apply_fsdp_to_decoder`` for the arguments, the result and the errors.
    """
    meshes = resolve_meshes(parallel_dims)
    # A vision tower is one unit each. With pipeline parallelism a microbatch may have no images,
    # and a unit that never runs trips FSDP2: there its parameters stay with the root.
    towers = vision_units(model) if not parallel_dims.pp_enabled else []
    towers_plan = make_plan(
        towers,
        shard_world=_shard_world(meshes.dense, meshes.dense_axes),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard=reshard_after_forward_policy,
        reshard_groups=reshard_groups or {},
    )
    for tower, plan in zip(towers, towers_plan.units, strict=True):
        apply_fsdp_to_vision_encoder(
            tower.modules[0],
            meshes.dense,
            param_dtype,
            reduce_dtype,
            reshard_after_forward_policy=_titan_name(plan.reshard_after_forward, tower.name),
            dp_mesh_dims=meshes.dense_axes,
        )
    plan = apply_fsdp_to_decoder(
        model,
        meshes.dense,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        pp_enabled=parallel_dims.pp_enabled,
        cpu_offload=cpu_offload,
        reshard_after_forward_policy=reshard_after_forward_policy,
        ep_degree=parallel_dims.ep,
        edp_mesh=meshes.experts,
        dp_mesh_dims=meshes.dense_axes,
        edp_mesh_dims=meshes.experts_axes,
        enable_symm_mem=enable_symm_mem,
        wrap=wrap,
        reshard_groups=reshard_groups,
        prefetch=prefetch,
        prefetch_backward=prefetch_backward,
        keep_replicated=keep_replicated,
        frozen_nf4=frozen_nf4,
        ignored=ignored,
    )
    if meshes.dense.device_type == "cpu":
        reduce_without_premul_sum(model)
    plan = dataclasses.replace(plan, units=towers_plan.units + plan.units)
    logger.info(f"FSDP plan (bytes on one rank):\n{plan.table()}")
    remember_plan(model, plan)
    refuse_late_parameters_at_first_forward(model)
    return plan


def apply_fsdp_to_decoder(
    model: Decoder,
    dp_mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    pp_enabled: bool,
    cpu_offload: bool = False,
    reshard_after_forward_policy: Reshard = "default",
    ep_degree: int = 1,
    edp_mesh: DeviceMesh | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    edp_mesh_dims: DataParallelMeshDims | None = None,
    enable_symm_mem: bool = False,
    *,
    wrap: str = "auto",
    reshard_groups: Mapping[str, Reshard] | None = None,
    prefetch: int | str = 1,
    prefetch_backward: int | str | None = None,
    keep_replicated: Sequence[str] = (),
    frozen_nf4: Sequence[str] = (),
    ignored: Sequence[str] = (),
) -> FSDPPlan:
    """Shard a Titan decoder with FSDP2 in place.

    Args:
        model: The decoder or pipeline chunk, after tensor and expert parallelism, activation
            checkpointing and compile.
        dp_mesh: Mesh for dense parameters (see ``fsdp.mesh``).
        param_dtype: Dtype in which parameters are gathered and used.
        reduce_dtype: Dtype in which gradients are reduced.
        pp_enabled: Whether the model is a pipeline chunk; decides the "default" reshard policy.
        cpu_offload: Keep sharded parameters, gradients and optimizer states in host memory.
        reshard_after_forward_policy: "default", "always", "never" or a number of ranks (see
            ``fsdp.reshard``).
        ep_degree: Size of the expert axis.
        edp_mesh: Mesh for routed experts; required when ``ep_degree > 1``.
        dp_mesh_dims: Data-parallel axes of ``dp_mesh`` where it is the full SPMD mesh.
        edp_mesh_dims: The same for ``edp_mesh``.
        enable_symm_mem: Symmetric-memory collectives (Titan's option).
        wrap: "submodule", "block" or "auto" (see ``fsdp.units``).
        reshard_groups: Reshard policies by kind of unit or by pattern for its name.
        prefetch: Units, or bytes ("512MiB"), to gather ahead (see ``fsdp.prefetch``).
        prefetch_backward: The same in backward; None: as ``prefetch``.
        keep_replicated: What stays whole on every rank (see ``fsdp.replicated``).
        frozen_nf4: Frozen linears that are held and gathered in 4 bits (see ``fsdp.quantized``).
        ignored: Patterns for names of parameters, or of modules, that FSDP neither shards nor
            synchronises.

    Returns:
        What was done with each unit, in forward order. Gradients are summed, not averaged: Titan
        divides the loss by the global number of tokens.

    Raises:
        ValueError: for an unknown ``wrap``, reshard policy, prefetch or name.
    """
    resolved_wrap = resolve_wrap(wrap, ep_degree)
    ignored_params = matching_parameters(model, ignored, is_chunk=pp_enabled)
    kept = find_kept(model, keep_replicated, is_chunk=pp_enabled)
    shard_world = _shard_world(dp_mesh, dp_mesh_dims)
    quantized = find_frozen_linears(model, frozen_nf4, shard_world=shard_world, is_chunk=pp_enabled)
    all_units = plan_units(model, resolved_wrap)
    units = units_without(all_units, kept.values())
    placements = ExpertPlacement(dp_mesh, dp_mesh_dims, edp_mesh, edp_mesh_dims, ep_degree)
    ahead = parse_reach("parallelism.fsdp_prefetch", prefetch)
    behind = ahead
    if prefetch_backward is not None:
        behind = parse_reach("parallelism.fsdp_prefetch_backward", prefetch_backward)
    plan = make_plan(
        units,
        shard_world=shard_world,
        experts_world=edp_mesh["efsdp"].size() if ep_degree > 1 and edp_mesh else None,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        expert_shard_dims={unit.name: placements.shard_dim(unit) for unit in units},
        reshard=reshard_after_forward_policy,
        reshard_groups=reshard_groups or {},
        pp_enabled=pp_enabled,
        prefetch=ahead,
        prefetch_backward=behind,
        kept=kept,
        ignored=set(ignored_params.values()),
    )

    config: dict[str, Any] = {
        "ignored_params": set(ignored_params.values()) or None,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        ),
    }
    if cpu_offload:
        config["offload_policy"] = CPUOffloadPolicy()

    for modules in kept_by_unit(all_units, kept.values()):
        routed = [m for m in modules if ep_degree > 1 and isinstance(m, GroupedExperts)]
        replicate_modules([m for m in modules if m not in routed], dp_mesh, dp_mesh_dims, config)
        if routed:
            assert edp_mesh is not None
            replicate_modules(routed, edp_mesh, edp_mesh_dims, config)
    config |= {"mesh": dp_mesh, "dp_mesh_dims": dp_mesh_dims}
    for unit in innermost_first(units):
        fully_shard(
            unit.modules[0] if len(unit.modules) == 1 else list(unit.modules),
            **config,
            reshard_after_forward=plan[unit.name].reshard_after_forward,
            shard_placement_fn=placements.function_for(unit),
        )
    fully_shard(model, **config)

    remember_ignored(model, ignored_params)
    quantize_at_first_forward(model, quantized)
    if enable_symm_mem:
        enable_fsdp_symm_mem(model)
    disable_fsdp_gradient_division(model)
    set_prefetch(units, plan.prefetch)
    _log_units(wrap, resolved_wrap, units, ep_degree)
    return plan


def _shard_world(mesh: DeviceMesh, axes: DataParallelMeshDims | None) -> int:
    return fsdp_mesh_info(mesh, axes).shard_mesh_size


def _titan_name(reshard: bool | int, tower: str) -> str:
    if not isinstance(reshard, bool):
        raise ValueError(
            f"{tower} cannot be resharded to {reshard} ranks: TorchTitan shards it as one unit, "
            'always or never. Give "vision" one of these in parallelism.fsdp_reshard_groups.'
        )
    return "always" if reshard else "never"


def _log_units(asked: str, wrap: str, units: list[Unit], ep_degree: int) -> None:
    kinds = Counter(unit.kind.value for unit in units)
    groups = sum(unit.num_groups(ep_degree) for unit in units)
    reason = f" (auto, EP {ep_degree})" if asked == "auto" else ""
    logger.info(
        f"FSDP units: {wrap}{reason}, {len(units)} units in {groups} groups: "
        + ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    )
