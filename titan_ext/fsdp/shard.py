"""Apply FSDP2 to a decoder, unit by unit.

``apply_fsdp_to_decoder`` has the signature of Titan's function of that name plus ``wrap``, so it
can stand in for it, and a change here can go upstream. Source of the expert sharding rules:
torchtitan/distributed/fsdp.py.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
from torch.distributed.tensor import Shard
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.fsdp import (
    apply_fsdp_to_vision_encoder,
    disable_fsdp_gradient_division,
    enable_fsdp_symm_mem,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.logging import logger

from titan_ext.fsdp.mesh import resolve_meshes
from titan_ext.fsdp.plan import FSDPPlan, remember_plan
from titan_ext.fsdp.planning import make_plan
from titan_ext.fsdp.prefetch import parse_reach, set_prefetch
from titan_ext.fsdp.reshard import Reshard
from titan_ext.fsdp.units import (
    Unit,
    innermost_first,
    plan_units,
    resolve_wrap,
    vision_units,
)
from titan_ext.no_accelerator import reduce_without_premul_sum

__all__ = ["apply_fsdp_to_decoder", "shard_decoder"]

ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


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
    )
    if meshes.dense.device_type == "cpu":
        reduce_without_premul_sum(model)
    plan = FSDPPlan(units=towers_plan.units + plan.units)
    logger.info(f"FSDP plan (bytes on one rank):\n{plan.table()}")
    remember_plan(model, plan)
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

    Returns:
        What was done with each unit, in forward order. Gradients are summed, not averaged: Titan
        divides the loss by the global number of tokens.

    Raises:
        ValueError: for an unknown ``wrap``, reshard policy or prefetch.
    """
    resolved_wrap = resolve_wrap(wrap, ep_degree)
    units = plan_units(model, resolved_wrap)
    placements = _ExpertPlacement(dp_mesh, dp_mesh_dims, edp_mesh, edp_mesh_dims, ep_degree)
    ahead = parse_reach("parallelism.fsdp_prefetch", prefetch)
    behind = ahead
    if prefetch_backward is not None:
        behind = parse_reach("parallelism.fsdp_prefetch_backward", prefetch_backward)
    plan = make_plan(
        units,
        shard_world=_shard_world(dp_mesh, dp_mesh_dims),
        experts_world=edp_mesh["efsdp"].size() if ep_degree > 1 and edp_mesh else None,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        expert_shard_dims={unit.name: placements.shard_dim(unit) for unit in units},
        reshard=reshard_after_forward_policy,
        reshard_groups=reshard_groups or {},
        pp_enabled=pp_enabled,
        prefetch=ahead,
        prefetch_backward=behind,
    )

    config: dict[str, Any] = {
        "mesh": dp_mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        ),
    }
    if dp_mesh_dims is not None:
        config["dp_mesh_dims"] = dp_mesh_dims
    if cpu_offload:
        # Memory is pinned for copies to an accelerator; a CPU has none that could pin it.
        config["offload_policy"] = CPUOffloadPolicy(pin_memory=dp_mesh.device_type != "cpu")

    for unit in innermost_first(units):
        fully_shard(
            unit.modules[0] if len(unit.modules) == 1 else list(unit.modules),
            **config,
            reshard_after_forward=plan[unit.name].reshard_after_forward,
            shard_placement_fn=placements.function_for(unit),
        )
    fully_shard(model, **config)

    if enable_symm_mem:
        enable_fsdp_symm_mem(model)
    disable_fsdp_gradient_division(model)
    set_prefetch(units, plan.prefetch)
    _log_units(wrap, resolved_wrap, units, ep_degree)
    return plan


class _ExpertPlacement:
    """Where the parameters of a unit with routed experts are sharded, as Titan does it.

    Experts are split along the expert dim, Shard(0), unless there are more ranks than experts:
    then along the next one, Shard(1), so that no rank holds padding only.
    """

    def __init__(
        self,
        dp_mesh: DeviceMesh,
        dp_mesh_dims: DataParallelMeshDims | None,
        edp_mesh: DeviceMesh | None,
        edp_mesh_dims: DataParallelMeshDims | None,
        ep_degree: int,
    ) -> None:
        self._experts_mesh_info: FSDPMeshInfo | None = None
        self._dense_mesh_info: FSDPMeshInfo | None = None
        if ep_degree == 1:
            self._num_expert_ranks = dp_mesh.size()
            return
        assert edp_mesh is not None, "expert parallelism needs a mesh for the experts"
        self._num_expert_ranks = edp_mesh["efsdp"].size() * ep_degree
        # Built once: FSDP2 requires parameters of one process group to share the object.
        self._experts_mesh_info = _fsdp_mesh_info(edp_mesh, edp_mesh_dims)
        self._dense_mesh_info = _fsdp_mesh_info(dp_mesh, dp_mesh_dims)

    def shard_dim(self, unit: Unit) -> int:
        """The dim that the routed experts of ``unit`` are sharded along; 0 if it has none."""
        if unit.experts is None:
            return 0
        return 1 if self._num_expert_ranks > unit.experts.num_experts else 0

    def function_for(self, unit: Unit) -> ShardPlacementFn | None:
        """FSDP2's ``shard_placement_fn`` for ``unit``; None where its default is right."""
        if unit.experts is None:
            return None
        expert_params = set(unit.experts.parameters())
        expert_shard = Shard(self.shard_dim(unit))
        experts_mesh_info, dense_mesh_info = self._experts_mesh_info, self._dense_mesh_info

        if experts_mesh_info is None or dense_mesh_info is None:
            if expert_shard == Shard(0):
                return None
            return lambda param: expert_shard if param in expert_params else None

        def place(param: nn.Parameter) -> ShardPlacementResult:
            if param in expert_params:
                return ShardPlacementResult(placement=expert_shard, mesh_info=experts_mesh_info)
            return ShardPlacementResult(placement=Shard(0), mesh_info=dense_mesh_info)

        return place


def _fsdp_mesh_info(mesh: DeviceMesh, axes: DataParallelMeshDims | None) -> FSDPMeshInfo:
    info = _get_mesh_info(mesh, axes)
    assert isinstance(info, FSDPMeshInfo), "the FSDP mesh always has a shard axis"
    return info


def _shard_world(mesh: DeviceMesh, axes: DataParallelMeshDims | None) -> int:
    return _fsdp_mesh_info(mesh, axes).shard_mesh_size


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
