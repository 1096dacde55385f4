# SPDX-License-Identifier: BSD-3-Clause
"""Parameters that FSDP2 does not manage: refuse them, or hand them to FSDP2.

FSDP2 manages the parameters that a module has when ``fully_shard`` is called. One that is added
later (an adapter injected after wrapping, a new head) trains on each rank's own data. The ranks'
copies then drift apart without an error. The model's first forward refuses such parameters, in any
training loop.

Until the model has run, FSDP2 takes new units, so ``synchronize_unmanaged_parameters`` makes some.
FSDP2 then shards the new parameters and sums, scales, accumulates and clips their gradients as
usual. The new modules of one unit form one group. It stays gathered from forward to backward.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn as nn
from spmd_types.runtime import has_local_type
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    DataParallelMeshDims,
    FSDPModule,
    FullyShardedDataParallel,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.config import TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module

from titan_ext.base.messages import and_more
from titan_ext.base.titan.parallelism import keep_frozen, mesh_with_axes
from titan_ext.fsdp.mesh import FSDPMeshes
from titan_ext.fsdp.plan import GroupKind, plan_of
from titan_ext.fsdp.prefetch import hide_fsdp, prefetch_unplanned
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.fsdp.units import param_groups


def refuse_fsdp1(model: nn.Module) -> None:
    """Raise ValueError naming the first module of ``model`` that FSDP1 wraps."""
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                f"{name or 'The model'} is wrapped by FSDP1 "
                "(torch.distributed.fsdp.FullyShardedDataParallel), which titan_ext does not "
                "support; expected a module that is not wrapped: titan_ext applies FSDP2."
            )


def refuse_unmanaged_parameters(models: Iterable[nn.Module]) -> None:
    """Raise ValueError for parameters that were added after ``fully_shard``; call before a step.

    ``models`` is the model, or the chunks of it that the pipeline stages of this rank hold. One
    without FSDP2 (nothing was sharded) passes.
    """
    found = [name for model in models for name in unmanaged_parameters(model)]
    if found:
        raise ValueError(
            f"{and_more(found)}: added to the model, or replaced, after fully_shard. FSDP does not "
            "manage them, so their gradients would not be summed over the ranks. Add parameters "
            "before the model is parallelized: through its config "
            "(torchtitan.components.lora.LoRAConverter for LoRA) or before "
            "titan_ext.api.parallelize. Or give new ones to "
            "titan_ext.api.synchronize_unmanaged_parameters before the optimizer is built."
        )


def unmanaged_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters of ``model`` that FSDP2 should manage and does not.

    Parameters that it was told to ignore do not count, nor new ones that are frozen: they have no
    gradients to sum. Without FSDP2 there are none.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return []
    managed = set(_managed_places(model))
    # Those that stand in for shards now: a pipeline schedule gathers before the first forward.
    gathered = {
        id(param._unsharded_param)
        for group in param_groups(model.modules())
        for param in group.fsdp_params
        if hasattr(param, "_unsharded_param")
    }
    plan = plan_of(model)
    ignored = plan.ignored if plan else ()
    found = []
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            full_name = canonical_fqn(f"{path}.{name}" if path else name)
            if (module, name) in managed:
                # Replaced: FSDP has another one.
                is_unmanaged = not isinstance(param, DTensor) and id(param) not in gathered
            else:
                is_unmanaged = param.requires_grad and full_name not in ignored
            if is_unmanaged:
                found.append(full_name)
    return found


def synchronize_unmanaged_parameters(
    model: nn.Module, *, parallel_dims: ParallelDims, training: TrainingConfig
) -> list[str]:
    """Have FSDP2 shard and synchronise the parameters that were added to ``model`` after it.

    Call it on every rank, after the modules were added and before the optimizer is built and the
    model runs. Parameters that hold values become rank 0's on all data axes; those on the meta
    device are initialised with the rest. Frozen parameters beside trainable ones are sharded too.

    Args:
        model: The model, or the chunk of a pipeline stage, that ``parallelize`` returned.
        training: As ``parallelize`` had it: the dtypes of computation and reduction, CPU offload.

    Returns:
        The names of what FSDP2 manages from now on; empty if it managed everything before.

    Raises:
        ValueError: naming a parameter that FSDP cannot take. It replaces a parameter of FSDP's, is
            on a module that is a unit itself, or is inside of what is compiled. Or an axis would
            split it in a way that its module does not declare. Also if the model has run.
    """
    names = set(unmanaged_parameters(model))
    if not names:
        return []
    assert isinstance(model, FSDPModule)
    # Set by the first forward (FSDPState._lazy_init), which hands its streams to the states that
    # exist: one made later would lack them.
    if model._get_fsdp_state()._is_root is not None:
        raise ValueError(
            "synchronize_unmanaged_parameters: the model has run already; expected a call before "
            "its first forward, when FSDP still takes new parameters."
        )
    by_path = {canonical_fqn(path): module for path, module in model.named_modules()}
    managed = set(_managed_places(model))
    managed_params = {getattr(module, name) for module, name in managed}
    modules = {
        path: module
        for path, module in by_path.items()
        if any(name in names for name, _ in module.named_parameters(path, recurse=False))
    }
    for path in modules:
        _check_place(path, by_path, managed)
    _place_on_model_axes(modules, parallel_dims)

    meshes = FSDPMeshes(parallel_dims)
    arguments = meshes.arguments(FSDPSettings.from_config(training=training))
    # A checkpoint around a block has the block's name, and is the unit.
    units = {
        canonical_fqn(path): module
        for path, module in model.named_modules()
        if isinstance(module, FSDPModule)
    }
    groups: dict[tuple[Any, GroupKind], list[nn.Module]] = {}
    for path, module in modules.items():
        around = _path_and_parents(path)
        unit = next(units[parent] for parent in around if parent in units)
        in_experts = any(isinstance(by_path[parent], GroupedExperts) for parent in around)
        kind = "experts" if in_experts and parallel_dims.ep_enabled else "dense"
        groups.setdefault((unit._get_fsdp_state(), kind), []).append(module)
    for (_, kind), group in groups.items():
        mesh, axes = meshes.mesh_and_axes(kind)
        ignored = {p for m in group for p in m.parameters() if p in managed_params}
        _make_equal([p for m in group for p in m.parameters() if p not in ignored], mesh, axes)
        fully_shard(
            group,
            mesh=mesh,
            dp_mesh_dims=axes,
            ignored_params=ignored or None,
            reshard_after_forward=False,
            **arguments,
        )
        prefetch_unplanned(group, gathers=True)
        hide_fsdp(group)  # none of it is inside of what is compiled
    meshes.sum_gradients(model)
    assert not unmanaged_parameters(model)
    return sorted(names)


def _managed_places(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Module and attribute of every parameter that FSDP2 swaps; tied ones once per module."""
    for group in param_groups(model.modules()):
        for param in group.fsdp_params:
            # The modules and attributes on which FSDPParam.to_sharded sets its tensors.
            info = param._module_info
            yield info.module, info.param_name
            yield from zip(info.shared_modules, info.shared_param_names, strict=True)


def _check_place(
    path: str, by_path: dict[str, nn.Module], managed: set[tuple[nn.Module, str]]
) -> None:
    """Refuse what FSDP2 cannot take at ``path``."""
    module = by_path[path]
    for name, param in module.named_parameters(recurse=False):
        if (module, name) in managed and not isinstance(param, DTensor):
            raise ValueError(
                f"{path}.{name} replaces a parameter that FSDP manages, and FSDP would put its own "
                "back; expected new parameters beside it."
            )
    if isinstance(module, FSDPModule):
        raise ValueError(
            f"{path or 'The model'} is an FSDP unit, and a parameter was added directly to it; "
            "expected new parameters in a module of their own inside it."
        )
    for parent in _path_and_parents(path):
        # What nn.Module.compile sets; nothing public tells that a module is compiled.
        if by_path[parent]._compiled_call_impl is not None:
            raise ValueError(
                f"{path} was added to {parent or 'the model'}, which is compiled already: "
                "torch.compile refuses FSDP's hooks inside. Add it before the model is "
                "parallelized, or train without compile."
            )


def _path_and_parents(path: str) -> list[str]:
    """``path`` and the names of all modules that it is in, the innermost first."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _place_on_model_axes(modules: dict[str, nn.Module], parallel_dims: ParallelDims) -> None:
    """Parallelize Titan's modules by their sharding config; others only if nothing is split."""
    typed = parallel_dims.spmd_backend == "spmd_types"
    if not (typed or parallel_dims.tp_enabled or parallel_dims.ep_enabled):
        return
    for path, module in modules.items():
        if isinstance(module, Module) and module._sharding_config is not None:
            # Titan's Module.parallelize() raises for a second call.
            if not module._parallelized:
                with keep_frozen(module):
                    module.parallelize(parallel_dims)
            continue
        if parallel_dims.tp_enabled or (".inner_experts." in f".{path}." and parallel_dims.ep > 1):
            raise ValueError(
                f"{path} does not say how tensor or expert parallelism split it; expected a module "
                "of torchtitan's with a sharding_config (as its LoRA adapters have)."
            )
        if typed:
            _annotate_replicated(module, parallel_dims)


def replicate_undeclared(
    model: nn.Module, parallel_dims: ParallelDims, ignored: Collection[str] = ()
) -> None:
    """Declare parameters that no ``sharding_config`` mentions to be equal on every rank.

    FSDP2 wants a declaration of every parameter under ``spmd_types``. Where no axis splits modules
    there is one choice; where one may, we raise ValueError. Call it before ``fully_shard``. FSDP
    leaves the parameters named in ``ignored`` alone.
    """
    for path, module in model.named_modules():
        path = canonical_fqn(path)
        params = dict(module.named_parameters(path, recurse=False))
        undeclared = [
            name for name in params if name not in ignored and not has_local_type(params[name])
        ]
        if not undeclared:
            continue
        is_routed = parallel_dims.ep_enabled and ".inner_experts." in f".{path}."
        if parallel_dims.tp_enabled or parallel_dims.cp_enabled or is_routed:
            raise ValueError(
                f"{and_more(undeclared)}: no sharding_config says how tensor, context or expert "
                "parallelism treats it; give its module one (docs/your_model.md), or use FSDP "
                "and pipelines alone."
            )
        _annotate_replicated(module, parallel_dims)


def _annotate_replicated(module: nn.Module, parallel_dims: ParallelDims) -> None:
    layout = dense_param_placement(tp=spmd.R)
    mesh = mesh_with_axes(parallel_dims, [axis.value for axis in layout.axes()])
    with set_current_spmd_mesh(mesh):
        for param in module.parameters(recurse=False):
            if not has_local_type(param):
                spmd.assert_type(param, layout.axis_types, layout.partition_spec)


def _make_equal(
    params: Sequence[nn.Parameter], mesh: DeviceMesh, axes: DataParallelMeshDims | None
) -> None:
    """Copy the first data-parallel rank's values to all others."""
    names = mesh.mesh_dim_names or ()
    for index in range(mesh.ndim):
        is_data = axes is None or names[index] in {*axes.replicate_names, *axes.shard_names}
        if not is_data or mesh.size(index) == 1:
            continue
        for param in params:
            local = param.to_local() if isinstance(param, DTensor) else param
            if not local.is_meta:
                with torch.no_grad():
                    dist.broadcast(local, group=mesh.get_group(index), group_src=0)
