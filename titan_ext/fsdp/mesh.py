"""The device meshes that FSDP shards over, for both SPMD backends.

Dense parameters are sharded over the data-parallel axes; routed experts, which expert parallelism
has already split, over what is left of them (``efsdp``). Under ``spmd_types`` FSDP2 is given the
full SPMD mesh and told which of its axes are data parallel; under ``partial_dtensor`` it is given
just the data-parallel mesh.
"""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh, resolve_sparse_fsdp_mesh

__all__ = ["FSDPMeshes", "resolve_meshes"]


@dataclass(frozen=True, kw_only=True)
class FSDPMeshes:
    """Meshes for dense parameters and, when EP > 1, for routed experts.

    ``*_axes`` names the data-parallel axes of the mesh; None where the mesh has no others.
    """

    dense: DeviceMesh
    dense_axes: DataParallelMeshDims | None = None
    experts: DeviceMesh | None = None
    experts_axes: DataParallelMeshDims | None = None


def resolve_meshes(parallel_dims: ParallelDims) -> FSDPMeshes:
    """Resolve the FSDP meshes of ``parallel_dims``. They exist at every size, 1 included."""
    if parallel_dims.spmd_backend == "spmd_types":
        dense, dense_axes = resolve_fsdp_mesh(parallel_dims)
        experts, experts_axes = resolve_sparse_fsdp_mesh(parallel_dims)
        return FSDPMeshes(
            dense=dense, dense_axes=dense_axes, experts=experts, experts_axes=experts_axes
        )
    replicate = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    return FSDPMeshes(
        dense=parallel_dims.get_mesh([*replicate, "fsdp"]),
        experts=(
            parallel_dims.get_optional_mesh([*replicate, "efsdp"])
            if parallel_dims.ep_enabled
            else None
        ),
    )
