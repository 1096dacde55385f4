"""Where FSDP shards routed experts: on what expert parallelism has left of the data axes."""

from collections.abc import Callable

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
from torch.distributed.tensor import Shard

from titan_ext.fsdp.units import Unit

__all__ = ["ExpertPlacement", "fsdp_mesh_info"]

ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


class ExpertPlacement:
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
        self._experts_mesh_info = fsdp_mesh_info(edp_mesh, edp_mesh_dims)
        self._dense_mesh_info = fsdp_mesh_info(dp_mesh, dp_mesh_dims)

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


def fsdp_mesh_info(mesh: DeviceMesh, axes: DataParallelMeshDims | None) -> FSDPMeshInfo:
    """What FSDP2 makes of a mesh and the names of its data-parallel axes (``fsdp.mesh``)."""
    info = _get_mesh_info(mesh, axes)
    assert isinstance(info, FSDPMeshInfo), "the FSDP mesh always has a shard axis"
    return info
