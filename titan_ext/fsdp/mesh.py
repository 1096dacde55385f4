# SPDX-License-Identifier: BSD-3-Clause
"""The device meshes that FSDP shards over, for both SPMD backends.

Dense parameters are sharded over the data-parallel axes. Expert parallelism has already split the
routed experts, so they are sharded over the rest of those axes (``efsdp``). FSDP2 gets the full
SPMD mesh under ``spmd_types``, with the names of its data-parallel axes, and the data-parallel mesh
alone under ``partial_dtensor``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch.distributed as dist
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
from torch.distributed.tensor import Shard
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division

from titan_ext.base.no_accelerator import reduce_without_premul_sum
from titan_ext.base.titan.parallelism import dense_mesh, experts_mesh
from titan_ext.fsdp.plan import FSDPPlan, GroupKind, UnitPlan

ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult]


class FSDPMeshes:
    """Meshes for dense parameters and, when EP > 1, for routed experts. They exist at size 1 too.

    Each with its data-parallel axes by name; None where the mesh has no others.
    """

    def __init__(self, parallel_dims: ParallelDims) -> None:
        self.dense, self.dense_axes = dense_mesh(parallel_dims)
        self._of: dict[GroupKind, tuple[Any, Any]] = {"dense": (self.dense, self.dense_axes)}
        if parallel_dims.ep_enabled:
            self._of["experts"] = experts_mesh(parallel_dims)

    def arguments(self, plan: FSDPPlan) -> dict[str, Any]:
        """Keyword arguments of ``fully_shard`` that are the same for all units of a model.

        Host memory is pinned for copies to an accelerator; on a CPU nothing could pin it.
        """
        arguments: dict[str, Any] = {"mp_policy": plan.precision}
        if plan.cpu_offload:
            pin = self.dense.device_type != "cpu"
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=pin)
        return arguments

    def replicate(
        self, modules: Sequence[nn.Module], kind: GroupKind, arguments: Mapping[str, Any]
    ) -> None:
        """Make one replicating FSDP2 group of ``modules`` of a unit, before what is around them.

        ``arguments`` are ``mp_policy``, ``offload_policy`` and ``ignored_params``.
        """
        mesh, axes = self._of[kind]
        # Without names of axes fully_shard shards over any mesh (_get_mesh_info); torch's private
        # replicate does not. With names fully_shard replicates over the axes that are named so.
        if axes is None:
            replicate(list(modules), mesh=mesh, **arguments)
        else:
            data_axes = {*axes.replicate_names, *axes.shard_names}
            names = tuple(name for name in mesh.mesh_dim_names or () if name in data_axes)
            axes = DataParallelMeshDims(replicate=names)
            fully_shard(list(modules), mesh=mesh, dp_mesh_dims=axes, **arguments)
        for module in modules:
            if isinstance(module, FSDPModule):  # not one inside of another
                # It is whole already. FSDP2 would choose a unit that its backward prefetches.
                module.set_modules_to_backward_prefetch([module])

    def sum_gradients(self, model: nn.Module) -> None:
        """Have FSDP2 sum gradients, not average them: Titan divides the loss by all tokens."""
        disable_fsdp_gradient_division(model)
        if self.dense.device_type == "cpu":
            reduce_without_premul_sum(model)

    def separate_groups(self) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """A new process group for the shards of each kind of parameters, by its ranks.

        In one order on all ranks: torch names such a group by how many were made before it, too
        (``_hash_ranks_to_str`` in distributed_c10d.py), and the ranks meet by that name.
        """
        infos = self._infos.values()
        of_infos = (tuple(dist.get_process_group_ranks(i.shard_process_group)) for i in infos)
        return {
            ranks: cast(
                dist.ProcessGroup,
                dist.new_group(
                    # As torch does it (FSDPParamGroup._set_separate_reduce_scatter_group): under
                    # HSDP a rank makes its own shards' group alone, and waits for no other.
                    list(ranks),
                    use_local_synchronization=True,
                    group_desc="fsdp_reduce_scatter",
                ),
            )
            for ranks in dict.fromkeys(of_infos)
        }

    def placement_fn(self, model: nn.Module, unit: UnitPlan) -> ShardPlacementFn:
        """FSDP2's ``shard_placement_fn`` for the parameters of ``unit``, as they are planned."""
        planned = {
            model.get_parameter(param.name): (group.kind, Shard(param.shard_dim))
            for group in unit.groups
            for param in group.params
        }

        def place(param: nn.Parameter) -> Shard | ShardPlacementResult:
            kind, shard = planned[param]
            if "experts" not in self._of:
                return shard
            return ShardPlacementResult(placement=shard, mesh_info=self._infos[kind])

        return place

    # Cached: FSDP2 requires parameters of one process group to share the object. Private, as in
    # Titan's apply_fsdp_to_decoder: a ShardPlacementResult takes this object, no mesh.
    @cached_property
    def _infos(self) -> dict[GroupKind, FSDPMeshInfo]:
        found: Any = {kind: _get_mesh_info(mesh, axes) for kind, (mesh, axes) in self._of.items()}
        assert all(isinstance(x, FSDPMeshInfo) for x in found.values()), "there is a shard axis"
        return found
