"""Parameters that were added after ``fully_shard`` are given to FSDP2 as units of their own.

FSDP2 takes new units as long as the model has not run: so an adapter that is injected late is
sharded, its gradient summed over the data axes and scaled, accumulated and clipped as that of any
parameter, by the code that does it for all others. The late modules of one unit form one more
group, so that they cost one all-gather and one reduce-scatter together.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module

from titan_ext.fsdp.mesh import resolve_meshes
from titan_ext.fsdp.names import join
from titan_ext.fsdp.plan import plan_of, remember_plan
from titan_ext.fsdp.settings import unit_settings
from titan_ext.guards.late_parameters import late_parameters, managed_places
from titan_ext.lora.frozen import keep_frozen
from titan_ext.no_accelerator import reduce_without_premul_sum

__all__ = ["synchronize_late_parameters"]


def synchronize_late_parameters(
    model: nn.Module, *, parallel_dims: ParallelDims, training: TrainingConfig
) -> list[str]:
    """Have FSDP2 shard and synchronise the parameters that were added to ``model`` after it.

    Call it on every rank, after the modules were added and before the optimizer is built and the
    model runs. Parameters that hold values become rank 0's on all data axes; those on the meta
    device are initialised with the rest. Frozen parameters beside trainable ones are sharded too.

    Args:
        model: The model, or the chunk of a pipeline stage, that ``parallelize`` returned.
        parallel_dims: As ``parallelize`` had it.
        training: As ``parallelize`` had it: the dtypes of computation and reduction, CPU offload.

    Returns:
        The names of what is synchronised now; empty if nothing was late.

    Raises:
        ValueError: naming a parameter that cannot be given to FSDP: one that replaces a parameter
            of FSDP's, belongs to a module that is a unit itself, is split over an axis that its
            module does not declare, or is inside of what is compiled; or if the model has run.
    """
    late = set(late_parameters(model))
    if not late:
        return []
    places = _Places(model)
    modules = [
        (path, module)
        for path, module in places.modules
        if any(join(path, name) in late for name, _ in module.named_parameters(recurse=False))
    ]
    for path, module in modules:
        places.check(path, module)
    _place_on_model_axes(modules, parallel_dims)

    meshes = resolve_meshes(parallel_dims)
    config = unit_settings(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cpu_offload=training.enable_cpu_offload,
        device_type=meshes.dense.device_type,
    )
    for routed, group in places.by_unit(modules, parallel_dims.ep_enabled):
        mesh, axes = meshes.dense, meshes.dense_axes
        if routed:
            assert meshes.experts is not None
            mesh, axes = meshes.experts, meshes.experts_axes
        ignored = {p for m in group for p in m.parameters() if p in places.managed_params}
        _make_equal([p for m in group for p in m.parameters() if p not in ignored], mesh, axes)
        fully_shard(
            group,
            mesh=mesh,
            dp_mesh_dims=axes,
            ignored_params=ignored or None,
            reshard_after_forward=False,
            **config,
        )
        for module in group:
            if isinstance(module, FSDPModule):  # not one inside of another
                # An empty list would mean FSDP2's own choice, which is to gather another unit.
                module.set_modules_to_backward_prefetch([module])
    disable_fsdp_gradient_division(model)
    if meshes.dense.device_type == "cpu":
        reduce_without_premul_sum(model)
    assert not late_parameters(model)
    with contextlib.suppress(ValueError):  # of a model that somebody else has sharded
        remember_plan(model, dataclasses.replace(plan_of(model), late=tuple(sorted(late))))
    return sorted(late)


class _Places:
    """Where FSDP2 has put what, at the time when something was added."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [(canonical_fqn(path), module) for path, module in model.named_modules()]
        self._by_path = dict(self.modules)
        self._managed = set(managed_places(model))
        self.managed_params = {getattr(module, name) for module, name in self._managed}
        assert isinstance(model, FSDPModule)
        if model._get_fsdp_state()._is_root is not None:
            raise ValueError(
                "synchronize_late_parameters: the model has run already; expected a call before "
                "its first forward, when FSDP still takes new parameters."
            )

    def check(self, path: str, module: nn.Module) -> None:
        """Refuse what FSDP2 cannot take at ``path``."""
        for name, param in module.named_parameters(recurse=False):
            if (module, name) in self._managed and not isinstance(param, DTensor):
                raise ValueError(
                    f"{join(path, name)} replaces a parameter of FSDP's, which would put its own "
                    "back; expected new parameters beside it."
                )
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"{path or 'The model'} is an FSDP unit and has got a parameter of its own; "
                "expected late parameters in a module of their own inside of it."
            )
        for parent, above in self._above(path):
            if above._compiled_call_impl is not None:
                raise ValueError(
                    f"{path} was added to {parent or 'the model'}, which is compiled already: "
                    "torch.compile refuses FSDP's hooks inside. Add it before the model is "
                    "parallelized, or train without compile."
                )

    def by_unit(
        self, modules: Iterable[tuple[str, nn.Module]], ep_enabled: bool
    ) -> list[tuple[bool, list[nn.Module]]]:
        """Modules by the unit around them; whether they are on the experts' mesh."""
        groups: dict[tuple[Any, bool], list[nn.Module]] = {}
        for path, module in modules:
            around = [above for _, above in self._above(path)]
            unit = next(above for above in around if isinstance(above, FSDPModule))
            routed = ep_enabled and any(isinstance(above, GroupedExperts) for above in around)
            groups.setdefault((unit._get_fsdp_state(), routed), []).append(module)
        return [(routed, group) for (_, routed), group in groups.items()]

    def _above(self, path: str) -> list[tuple[str, nn.Module]]:
        """``path`` and all that it is in, the innermost first."""
        parts = path.split(".") if path else []
        paths = [".".join(parts[:count]) for count in range(len(parts), -1, -1)]
        return [(found, self._by_path[found]) for found in paths]


def _place_on_model_axes(
    modules: Sequence[tuple[str, nn.Module]], parallel_dims: ParallelDims
) -> None:
    """Titan's modules by their own sharding config; others are replicated, if nothing is split."""
    typed = parallel_dims.spmd_backend == "spmd_types"
    if not (typed or parallel_dims.tp_enabled or parallel_dims.ep_enabled):
        return
    for path, module in modules:
        if isinstance(module, Module) and module._sharding_config is not None:
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


def _annotate_replicated(module: nn.Module, parallel_dims: ParallelDims) -> None:
    layout = dense_param_placement(tp=spmd.R)
    axes = [axis.value for axis in layout.axes()]
    mesh = parallel_dims.get_optional_mesh(axes, include_singleton_axes=True)
    assert mesh is not None
    with set_current_spmd_mesh(mesh):
        for param in module.parameters(recurse=False):
            spmd.assert_type(param, layout.axis_types, layout.partition_spec)


def _make_equal(
    params: Sequence[nn.Parameter], mesh: DeviceMesh, axes: DataParallelMeshDims | None
) -> None:
    """Give every rank of the data axes the values of the first."""
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
