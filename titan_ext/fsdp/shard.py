# SPDX-License-Identifier: BSD-3-Clause
"""Apply FSDP2 to a decoder, unit by unit, on the meshes of either SPMD backend.

Dense parameters are sharded over the data-parallel axes. Expert parallelism has already split the
routed experts, so they are sharded over the rest of those axes (``efsdp``). FSDP2 gets the full
SPMD mesh under ``spmd_types``, with the names of its data-parallel axes, and the data-parallel mesh
alone under ``partial_dtensor``.

Source of the order of calls and of the rules for experts: torchtitan/distributed/fsdp.py.
"""

import warnings
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
from torchtitan.distributed.fsdp import (
    apply_fsdp_to_vision_encoder,
    disable_fsdp_gradient_division,
    enable_fsdp_symm_mem,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.logging import logger

from titan_ext.base.no_accelerator import reduce_without_premul_sum
from titan_ext.base.nodes import Nodes
from titan_ext.base.titan.parallelism import dense_mesh, experts_mesh
from titan_ext.fsdp.collectives import set_collectives
from titan_ext.fsdp.nf4 import quantize_at_first_forward
from titan_ext.fsdp.plan import FSDPPlan, GroupKind, UnitPlan, count_units
from titan_ext.fsdp.prefetch import set_prefetch
from titan_ext.fsdp.reads import refuse_reads_of_shards
from titan_ext.fsdp.resolve import resolve_sharding
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.fsdp.units import (
    UnitKind,
    before_first_forward,
    decoder_blocks,
    innermost_first,
    param_groups,
)
from titan_ext.fsdp.unmanaged import refuse_unmanaged_parameters, replicate_undeclared


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

    def placement_fn(
        self, model: nn.Module, unit: UnitPlan
    ) -> Callable[[nn.Parameter], Shard | ShardPlacementResult]:
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


def shard_decoder(
    model: Decoder, parallel_dims: ParallelDims, settings: FSDPSettings | None = None
) -> FSDPPlan:
    """Shard a Titan decoder and its vision towers with FSDP2, in place, and nothing else.

    ``model`` is a decoder or pipeline chunk, after tensor and expert parallelism, activation
    checkpointing and compile. Returns what was done with each unit, in forward order. Gradients are
    summed, not averaged: Titan divides the loss by the global number of tokens.

    Raises ValueError for a setting that does not fit the model, or a name that is not in it.
    """
    nodes = Nodes.agreed()
    plan = resolve_sharding(model, settings or FSDPSettings(), parallel_dims, nodes)
    shard(model, plan, parallel_dims)
    return plan


def shard(model: Decoder, plan: FSDPPlan, parallel_dims: ParallelDims) -> None:
    """Do with FSDP2 what ``plan`` says, in place."""
    meshes = FSDPMeshes(parallel_dims)
    if meshes.dense_axes is not None:
        replicate_undeclared(model, parallel_dims, plan.ignored)
    _fully_shard(model, plan, meshes)
    quantize_at_first_forward(model, plan.quantized)
    # These two walk the FSDP modules that exist, so they come after the last fully_shard.
    if plan.symm_mem:
        enable_fsdp_symm_mem(model)
    disable_fsdp_gradient_division(model)  # Titan divides the loss by all tokens
    if meshes.dense.device_type == "cpu":
        reduce_without_premul_sum(model)
    set_collectives(model, plan)
    set_prefetch(model, plan.decoder_units)
    refuse_reads_of_shards(model, plan)
    for unit in plan.decoder_units:
        if not unit.gathers_in_backward:
            unit.fsdp_module(model).set_unshard_in_backward(False)
    if plan.reduce_scatter_buffers > 1:
        cast(FSDPModule, model).set_reduce_scatter_max_input_buffers(plan.reduce_scatter_buffers)
        # Also for experts, of which a pipeline stage may have none: torch names later groups by
        # the number of groups made, which has to be the same on all ranks.
        process_groups = meshes.separate_groups()
        for group in param_groups(model.modules()):
            # The public function for all modules refuses those that are replicated.
            if isinstance(group.mesh_info, FSDPMeshInfo):
                group._set_separate_reduce_scatter_group(True, process_groups)
    why = f", {plan.why}" if plan.why else ""
    logger.info(f"FSDP units: {plan.wrap}, {count_units(plan.decoder_units)}{why}")
    logger.info(f"FSDP plan (bytes on one rank):\n{plan.table()}")
    model.__dict__["_fsdp_plan"] = plan  # for ``plan_of``, as long as the model lives
    before_first_forward(model, lambda: refuse_unmanaged_parameters([model]))


def _fully_shard(model: Decoder, plan: FSDPPlan, meshes: FSDPMeshes) -> None:
    """The calls of ``fully_shard``, innermost modules first."""
    _ignore_view_warning(model)
    # Before the root, which takes every parameter that is in no unit yet.
    precision: Any = plan.precision
    for tower in (unit for unit in plan.units if unit.kind is UnitKind.VISION):
        apply_fsdp_to_vision_encoder(
            model.get_submodule(tower.name),
            meshes.dense,
            precision.param_dtype,
            precision.reduce_dtype,
            reshard_after_forward_policy="always" if tower.reshard_after_forward else "never",
            dp_mesh_dims=meshes.dense_axes,
        )
    arguments = meshes.arguments(plan)
    arguments["ignored_params"] = {model.get_parameter(name) for name in plan.ignored} or None
    for group in plan.replicated:
        modules = [model.get_submodule(name) for name in group.module_names]
        meshes.replicate(modules, group.kind, arguments)
    arguments |= {"mesh": meshes.dense, "dp_mesh_dims": meshes.dense_axes}
    for unit in innermost_first(plan.decoder_units):
        modules = unit.modules(model)
        fully_shard(
            modules[0] if len(modules) == 1 else modules,
            **arguments,
            reshard_after_forward=unit.reshard_after_forward,
            shard_placement_fn=meshes.placement_fn(model, unit),
        )
    # The root, even if it owns nothing: the state that runs first becomes the root, and torch
    # refuses a root of several modules (FSDPState._lazy_init).
    fully_shard(model, **arguments)


def _ignore_view_warning(model: Decoder) -> None:
    """Silence FSDP2's warning of units that return views, for blocks of Titan's.

    An operation in place on such a view would drop the hook that gathers the unit for backward.
    Titan's MoE without shared experts returns a view, and Titan's blocks add it out of place
    (tests/fp8/test_view_warning.py). Of other blocks we cannot know.
    """
    blocks = [
        # The class of a CheckpointWrapper says nothing of the block inside.
        getattr(block, "_checkpoint_wrapped_module", block)
        for _, block in decoder_blocks(model)
    ]
    if all(type(block).__module__.startswith("torchtitan.models.") for block in blocks):
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
