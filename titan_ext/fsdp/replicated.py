# SPDX-License-Identifier: BSD-3-Clause
"""Parameters that every rank holds whole, and those that FSDP ignores.

A router or a norm is small: sharding it saves nothing, and gathering it costs. Replicated, it is an
FSDP2 group that gathers nothing and sums gradients by one all-reduce over the data axes. Results
are those of a sharded parameter. So are the dtype of the computation, gradient accumulation,
microbatches of a pipeline, and the placement that checkpoints and gradient clipping see.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import torch.nn as nn
from torchtitan.models.common.decoder import Decoder

from titan_ext.fsdp.settings import REPLICATE
from titan_ext.fsdp.units import Unit, innermost_first, modules_with_parameters
from titan_ext.names import did_you_mean, matches

_KINDS = ("router", "norms", "adapters")
_ADAPTERS = ("lora_a", "lora_b")


def find_replicated(model: Decoder, names: Sequence[str], *, is_chunk: bool) -> list[str]:
    """The modules whose own parameters ``parallelism.fsdp_replicate`` keeps whole.

    Args:
        model: A decoder, before FSDP.
        names: "router", "norms", "adapters", or patterns for names of modules or parameters.
        is_chunk: Whether the model is the chunk of a pipeline stage, which may lack a name.

    Returns:
        Their names, in forward order. torch shards or replicates a module's own parameters
        together.

    Raises:
        ValueError: for a name that is not in the model, or what torch cannot replicate.
    """
    replicated: list[str] = []
    used: set[str] = set()
    for path, module, params in modules_with_parameters(model):
        found = {param: _names_for(path, module, param, names) for param in params}
        used.update(name for some in found.values() for name in some)
        if not any(found.values()):
            continue
        if not all(found.values()):
            missing = next(param for param, some in found.items() if not some)
            raise ValueError(
                f"{REPLICATE}: {path} also has {missing.rsplit('.', 1)[-1]}, which no name in it "
                "matches; torch replicates or shards the parameters of one module together. "
                f"Expected {path!r}."
            )
        replicated.append(path)
    _check_names(model, () if is_chunk else names, used)
    _check_modules(model, replicated)
    return replicated


def find_ignored(
    model: nn.Module, names: Sequence[str], *, is_chunk: bool
) -> dict[str, nn.Parameter]:
    """The parameters whose name, or that of a module around them, matches one of ``names``.

    Raises:
        ValueError: for a name that is not in the model.
    """
    found = {
        name: module.get_parameter(name.rsplit(".", 1)[-1])
        for _, module, params in modules_with_parameters(model)
        for name in params
        if any(matches(name, pattern) for pattern in names)
    }
    for pattern in () if is_chunk else names:
        if not any(matches(name, pattern) for name in found):
            raise ValueError(f"ignored: this model has no parameter {pattern!r}.")
    return found


def units_without(
    model: nn.Module, units: Sequence[Unit], replicated: Collection[str]
) -> list[Unit]:
    """``units`` without the modules ``replicated``, and without units that are then empty."""
    if not replicated:
        return list(units)
    gone = {p for name in replicated for p in model.get_submodule(name).parameters(recurse=False)}
    return [
        dataclasses.replace(
            unit,
            module_names=tuple(name for name in unit.module_names if name not in replicated),
            experts=unit.experts if unit.experts not in replicated else None,
        )
        for unit in units
        if any(param not in gone for module in unit.modules(model) for param in module.parameters())
    ]


def replicated_by_unit(units: Sequence[Unit], replicated: Iterable[str]) -> list[list[str]]:
    """``replicated``, grouped by the innermost unit around them; those outside come last."""
    left = list(replicated)
    groups = []
    for unit in innermost_first(units):
        inside = [
            name for part in unit.module_names for name in left if f"{name}.".startswith(f"{part}.")
        ]
        groups.append(inside)
        left = [name for name in left if name not in inside]
    return [group for group in (*groups, left) if group]


def _names_for(path: str, module: nn.Module, param: str, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that mean the parameter ``param`` of the module at ``path``."""
    parts = path.split(".")
    kinds = {
        "router": "router" in parts,
        "norms": isinstance(module, nn.RMSNorm | nn.LayerNorm),
        "adapters": parts[-1] in _ADAPTERS,
    }
    return [name for name in names if (kinds[name] if name in kinds else matches(param, name))]


def _check_names(model: Decoder, names: Sequence[str], used: set[str]) -> None:
    for name in names:
        if name in used:
            continue
        paths = [path for path, _, _ in modules_with_parameters(model)]
        parents = {".".join(p.split(".")[:n]) for p in paths for n in range(1, p.count(".") + 2)}
        raise ValueError(
            f"{REPLICATE}: this model has no {name!r}; expected {', '.join(_KINDS)}, or a pattern "
            f"for names of modules or parameters such as {paths[len(paths) // 2]}"
            f"{did_you_mean(name, [*_KINDS, *sorted(parents)])}"
        )


def _check_modules(model: Decoder, replicated: Sequence[str]) -> None:
    modules = {path: model.get_submodule(path) for path in replicated}
    inside = {id(p) for module in modules.values() for p in module.parameters(recurse=False)}
    for path, module in modules.items():
        is_head = path.split(".")[0] == "lm_head"
        if is_head or (path == "tok_embeddings" and model.enable_weight_tying):
            raise ValueError(
                f"{REPLICATE}: {path} cannot be replicated: TorchTitan's chunked loss tells the "
                "head when to reshard, which torch allows only for sharded parameters."
            )
        if any(id(param) not in inside for param in module.parameters()):
            raise ValueError(
                f"{REPLICATE}: {path} cannot be replicated without the modules inside it; expected "
                f'"{path}.*" as well, or its children only.'
            )
