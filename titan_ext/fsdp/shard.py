"""Apply FSDP2 to a decoder, unit by unit.

``apply_fsdp_to_decoder`` has the signature of Titan's function of that name plus ``wrap``, so it
can stand in for it, and a change here can go upstream. Source of the expert sharding rules:
torchtitan/distributed/fsdp.py.
"""

from collections import Counter
from collections.abc import Callable
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
from titan_ext.fsdp.prefetch import set_prefetch
from titan_ext.fsdp.reshard import reshard_after_forward
from titan_ext.fsdp.units import Unit, plan_units, resolve_wrap, vision_modules
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
    reshard_after_forward_policy: str = "default",
    enable_symm_mem: bool = False,
    wrap: str = "auto",
) -> list[Unit]:
    """Shard a Titan decoder and its vision towers with FSDP2 over the axes of ``parallel_dims``.

    See ``apply_fsdp_to_decoder`` for the arguments, the result and the errors.
    """
    meshes = resolve_meshes(parallel_dims)
    # A vision tower is one unit each. With pipeline parallelism a microbatch may have no images,
    # and a unit that never runs trips FSDP2: there its parameters stay with the root.
    for tower in vision_modules(model).values() if not parallel_dims.pp_enabled else ():
        apply_fsdp_to_vision_encoder(
            tower,
            meshes.dense,
            param_dtype,
            reduce_dtype,
            reshard_after_forward_policy=reshard_after_forward_policy,
            dp_mesh_dims=meshes.dense_axes,
        )
    units = apply_fsdp_to_decoder(
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
    )
    if meshes.dense.device_type == "cpu":
        reduce_without_premul_sum(model)
    return units


def apply_fsdp_to_decoder(
    model: Decoder,
    dp_mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    pp_enabled: bool,
    cpu_offload: bool = False,
    reshard_after_forward_policy: str = "default",
    ep_degree: int = 1,
    edp_mesh: DeviceMesh | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    edp_mesh_dims: DataParallelMeshDims | None = None,
    enable_symm_mem: bool = False,
    *,
    wrap: str = "auto",
) -> list[Unit]:
    """Shard a Titan decoder with FSDP2 in place.

    Args:
        model: The decoder or pipeline chunk, after tensor and expert parallelism, activation
            checkpointing and compile.
        dp_mesh: Mesh for dense parameters (see ``fsdp.mesh``).
        param_dtype: Dtype in which parameters are gathered and used.
        reduce_dtype: Dtype in which gradients are reduced.
        pp_enabled: Whether the model is a pipeline chunk; decides the "default" reshard policy.
        cpu_offload: Keep sharded parameters, gradients and optimizer states in host memory.
        reshard_after_forward_policy: "default", "always" or "never".
        ep_degree: Size of the expert axis.
        edp_mesh: Mesh for routed experts; required when ``ep_degree > 1``.
        dp_mesh_dims: Data-parallel axes of ``dp_mesh`` where it is the full SPMD mesh.
        edp_mesh_dims: The same for ``edp_mesh``.
        enable_symm_mem: Symmetric-memory collectives (Titan's option).
        wrap: "submodule", "block" or "auto" (see ``fsdp.units``).

    Returns:
        The units, in forward order. Gradients are summed, not averaged: Titan divides the loss by
        the global number of tokens.

    Raises:
        ValueError: for an unknown ``wrap`` or reshard policy.
    """
    resolved_wrap = resolve_wrap(wrap, ep_degree)
    units = plan_units(model, resolved_wrap)

    config: dict[str, Any] = {
        "mesh": dp_mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        ),
    }
    if dp_mesh_dims is not None:
        config["dp_mesh_dims"] = dp_mesh_dims
    if cpu_offload:
        config["offload_policy"] = CPUOffloadPolicy()

    placements = _ExpertPlacement(dp_mesh, dp_mesh_dims, edp_mesh, edp_mesh_dims, ep_degree)
    for unit in _innermost_first(units):
        fully_shard(
            unit.modules[0] if len(unit.modules) == 1 else list(unit.modules),
            **config,
            reshard_after_forward=reshard_after_forward(
                unit, reshard_after_forward_policy, pp_enabled
            ),
            shard_placement_fn=placements.function_for(unit),
        )
    fully_shard(model, **config)

    if enable_symm_mem:
        enable_fsdp_symm_mem(model)
    disable_fsdp_gradient_division(model)
    # With EP = 1 and whole blocks FSDP2's own prefetching does the same, as in stock Titan.
    if resolved_wrap == "submodule" or ep_degree > 1:
        set_prefetch(units)

    _log_units(wrap, resolved_wrap, units, ep_degree)
    return units


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

    def function_for(self, unit: Unit) -> ShardPlacementFn | None:
        """FSDP2's ``shard_placement_fn`` for ``unit``; None where its default is right."""
        if unit.experts is None:
            return None
        expert_params = set(unit.experts.parameters())
        expert_shard = Shard(1 if self._num_expert_ranks > unit.experts.num_experts else 0)
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


def _innermost_first(units: list[Unit]) -> list[Unit]:
    # fully_shard goes bottom up: a unit claims what its submodules' units have left.
    return sorted(units, key=lambda unit: -unit.name.count("."))


def _log_units(asked: str, wrap: str, units: list[Unit], ep_degree: int) -> None:
    kinds = Counter(unit.kind.value for unit in units)
    groups = sum(unit.num_groups(ep_degree) for unit in units)
    reason = f" (auto, EP {ep_degree})" if asked == "auto" else ""
    logger.info(
        f"FSDP units: {wrap}{reason}, {len(units)} units in {groups} groups: "
        + ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    )
