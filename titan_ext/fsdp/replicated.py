"""Parameters that are kept whole on every rank, beside those that FSDP shards.

A router or a norm is small: sharding it saves nothing, and gathering it costs. Kept, it is a group
of FSDP2's that replicates: nothing is gathered, gradients are summed by one all-reduce over the
data axes, and everything else (the dtype of the computation, gradient accumulation, microbatches
of a pipeline, the placement that a checkpoint and the clipping of gradients see) is as for a
sharded one. So the result is too.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, fully_shard
from torchtitan.models.common.decoder import Decoder

from titan_ext.fsdp.names import join, matches, modules_with_parameters
from titan_ext.fsdp.units import Unit, innermost_first

__all__ = [
    "KEY",
    "find_kept",
    "kept_by_unit",
    "replicate_modules",
    "units_without",
]

KEY = "parallelism.fsdp_keep_replicated"
_KINDS = ("router", "norms", "adapters")
_ADAPTERS = ("lora_a", "lora_b")


def find_kept(model: Decoder, names: Sequence[str], *, is_chunk: bool) -> dict[str, nn.Module]:
    """The modules whose own parameters ``parallelism.fsdp_keep_replicated`` keeps whole.

    Args:
        model: A decoder, before FSDP.
        names: "router", "norms", "adapters", or patterns for names of modules or parameters.
        is_chunk: Whether the model is the chunk of a pipeline stage, which may lack a name.

    Returns:
        Modules by name, in forward order. torch shards or replicates the parameters that a module
        itself has together.

    Raises:
        ValueError: for a name that nothing answers to, or what torch cannot keep.
    """
    kept: dict[str, nn.Module] = {}
    answered: set[str] = set()
    for path, module, params in modules_with_parameters(model):
        answers = {param: _answers(path, module, param, names) for param in params}
        answered.update(name for found in answers.values() for name in found)
        if not any(answers.values()):
            continue
        if not all(answers.values()):
            missing = next(param for param, found in answers.items() if not found)
            raise ValueError(
                f"{KEY}: {path} has {missing} too, which no name in it answers to; torch keeps or "
                f"shards the parameters of one module together. Expected {path!r}."
            )
        kept[path] = module
    _check_names(model, names if not is_chunk else (), answered)
    _check_modules(model, kept)
    return kept


def units_without(units: Sequence[Unit], kept: Iterable[nn.Module]) -> list[Unit]:
    """``units`` less the modules that are kept, and less the units that have nothing else."""
    chosen = set(kept)
    if not chosen:
        return list(units)
    params = {param for module in chosen for param in module.parameters(recurse=False)}
    rest = []
    for unit in units:
        if all(param in params for module in unit.modules for param in module.parameters()):
            continue
        left = [
            (name, module)
            for name, module in zip(unit.module_names, unit.modules, strict=True)
            if module not in chosen
        ]
        experts = unit.experts if unit.experts not in chosen else None
        rest.append(
            dataclasses.replace(
                unit,
                modules=tuple(module for _, module in left),
                module_names=tuple(name for name, _ in left),
                experts=experts,
            )
        )
    return rest


def kept_by_unit(units: Sequence[Unit], kept: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """The kept modules of each unit, the innermost that has them; last those outside all units."""
    left = dict.fromkeys(kept)
    groups = []
    for unit in innermost_first(units):
        inside = [m for part in unit.modules for m in part.modules() if m in left]
        groups.append(inside)
        for module in inside:
            del left[module]
    return [group for group in (*groups, list(left)) if group]


def replicate_modules(
    kept: Sequence[nn.Module],
    mesh: DeviceMesh,
    axes: DataParallelMeshDims | None,
    config: Mapping[str, Any],
) -> None:
    """Make one replicating group of FSDP2's of ``kept``; call it before FSDP shards what is around.

    Args:
        kept: Modules of one unit.
        mesh: The mesh that their parameters would be sharded over (``fsdp.mesh``).
        axes: Its data-parallel axes where it has others too.
        config: ``mp_policy``, ``offload_policy`` and ``ignored_params`` of ``fully_shard``.
    """
    modules = list(kept)
    if not modules:
        return
    if axes is None:
        replicate(modules, mesh=mesh, **config)
    else:
        data_axes = {*axes.replicate_names, *axes.shard_names}
        assert mesh.mesh_dim_names is not None
        in_order = tuple(name for name in mesh.mesh_dim_names if name in data_axes)
        fully_shard(
            modules, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate=in_order), **config
        )
    for module in modules:
        if isinstance(module, FSDPModule):  # not one inside of another
            # An empty list would mean FSDP2's own choice, which is to gather another unit.
            module.set_modules_to_backward_prefetch([module])


def _answers(path: str, module: nn.Module, param: str, names: Sequence[str]) -> list[str]:
    parts = path.split(".")
    kinds = {
        "router": "router" in parts,
        "norms": isinstance(module, nn.RMSNorm | nn.LayerNorm),
        "adapters": parts[-1] in _ADAPTERS,
    }
    full_name = join(path, param)
    return [name for name in names if (kinds[name] if name in kinds else matches(full_name, name))]


def _check_names(model: Decoder, names: Sequence[str], answered: set[str]) -> None:
    for name in names:
        if name in answered:
            continue
        paths = [path for path, _, _ in modules_with_parameters(model)]
        parents = {".".join(p.split(".")[:n]) for p in paths for n in range(1, p.count(".") + 2)}
        close = get_close_matches(name, [*_KINDS, *sorted(parents)], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(
            f"{KEY}: nothing in this model answers to {name!r}; expected {', '.join(_KINDS)}, or "
            f"a pattern for names of modules or parameters such as {paths[len(paths) // 2]}{hint}"
        )


def _check_modules(model: Decoder, kept: Mapping[str, nn.Module]) -> None:
    for path, module in kept.items():
        is_head = path.split(".")[0] == "lm_head"
        if is_head or (path == "tok_embeddings" and model.enable_weight_tying):
            raise ValueError(
                f"{KEY}: {path} cannot be kept: TorchTitan's chunked loss tells the head when to "
                "reshard, which torch refuses for what is not sharded."
            )
        own = {id(param) for param in module.parameters(recurse=False)}
        inside = {id(p) for m in kept.values() for p in m.parameters(recurse=False)}
        if any(id(param) not in own | inside for param in module.parameters()):
            raise ValueError(
                f"{KEY}: {path} cannot be kept without the modules inside it; expected "
                f'"{path}.*" as well, or its children only.'
            )
