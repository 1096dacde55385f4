# SPDX-License-Identifier: BSD-3-Clause
"""The meshes of a job, by a function each, and what mends TorchTitan 0.3 around them.

Everything else asks here for a mesh, since ``ParallelismContext`` replaces ``ParallelDims`` on
TorchTitan's main (upstream/titan_main.md).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh, resolve_sparse_fsdp_mesh
from torchtitan.distributed.utils import dist_sum
from torchtitan.models.common.moe import MoE
from torchtitan.protocols.module import Module

DEGREES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
}
"""Keys of degrees by axis, as ``ParallelDims`` has it."""
EXPERT_SHARDS = "efsdp"
"""The axis of ``experts_mesh`` over which FSDP shards routed experts."""


def has_experts(model: Module.Config) -> bool:
    """True if a model of this config, of all pipeline stages, has routed experts."""
    return any(True for _ in model.traverse(MoE.Config))


def dense_mesh(parallel_dims: ParallelDims) -> tuple[DeviceMesh, DataParallelMeshDims | None]:
    """The mesh for dense parameters, and its data-parallel axes; None where it has no others."""
    if parallel_dims.spmd_backend == "spmd_types":
        return resolve_fsdp_mesh(parallel_dims)
    return parallel_dims.get_mesh([*_replicate(parallel_dims), "fsdp"]), None


def experts_mesh(parallel_dims: ParallelDims) -> tuple[Any, DataParallelMeshDims | None]:
    """The same for routed experts, under expert parallelism."""
    if parallel_dims.spmd_backend == "spmd_types":
        return resolve_sparse_fsdp_mesh(parallel_dims)
    return parallel_dims.get_mesh([*_replicate(parallel_dims), EXPERT_SHARDS]), None


def _replicate(parallel_dims: ParallelDims) -> list[str]:
    return ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []


def ranks_without_data(parallel_dims: ParallelDims, *, mine: bool, device: Any) -> tuple[int, int]:
    """Number of data-parallel ranks without more data, and of all; the device is waited for."""
    if not parallel_dims.dp_enabled:
        return int(mine), 1
    batch = parallel_dims.get_mesh("batch")
    return int(dist_sum(torch.tensor(int(mine), device=device), batch)), batch.size()


def data_rank(parallel_dims: ParallelDims) -> int:
    """This rank among those that read different data."""
    return parallel_dims.get_mesh("batch").get_local_rank() if parallel_dims.dp_enabled else 0


def load_groups(parallel_dims: ParallelDims) -> Iterator[Any]:
    """The process groups over which Titan sums the tokens of each expert, one after another.

    As its hook on the optimizer does (torchtitan/components/optimizer/optimizer.py).
    """
    if parallel_dims.ep_enabled and parallel_dims.tp > 1:
        yield parallel_dims.get_mesh("tp").get_group()
    if (mesh := parallel_dims.get_optional_mesh("loss")) is not None:
        yield mesh.get_group()


def context_mesh(parallel_dims: ParallelDims) -> DeviceMesh:
    """The axis of context parallelism, which is on."""
    return parallel_dims.get_mesh("cp")


def pipeline_mesh(parallel_dims: ParallelDims) -> DeviceMesh | None:
    """The axis of the pipeline; None without one."""
    return parallel_dims.get_optional_mesh("pp")


def mesh_with_axes(parallel_dims: ParallelDims, axes: Sequence[str]) -> DeviceMesh:
    """The mesh with these axes, those of one rank too."""
    mesh = parallel_dims.get_optional_mesh(list(axes), include_singleton_axes=True)
    assert mesh is not None
    return mesh


@contextmanager
def keep_frozen(model: nn.Module) -> Iterator[None]:
    """Around a pass that replaces parameters: freeze again, by name, what was frozen.

    With the SPMD backend ``spmd_types`` TorchTitan 0.3.0 replaces each parameter by a trainable one
    when it distributes it, so LoRA would train the whole model. Later versions keep the flag (their
    PR 4267).
    """
    frozen = [
        name
        for name, param in model.named_parameters(remove_duplicate=False)
        if not param.requires_grad
    ]
    yield
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
