# SPDX-License-Identifier: BSD-3-Clause
"""The modules and parameters that the names in FSDP's keys mean, and names that mean nothing."""

import functools
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
import torch.nn as nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.models.common.decoder import Decoder

from titan_ext.base.messages import did_you_mean
from titan_ext.fsdp.settings import QUANTIZE_FROZEN, RESHARD_GROUPS, FSDPSettings
from titan_ext.fsdp.units import REPLICATE, Unit, vision_modules

_REPLICATED_KINDS = ("router", "norms", "adapters")
_ADAPTERS = ("lora_a", "lora_b")
# to_nf4's defaults for block_size and scaler_block_size; a shard has to hold whole blocks, as
# torchao splits each inner tensor by itself (nf4_split in its nf4_tensor.py).
_BLOCK = 64 * 256  # elements whose scales have one scale of their own


@functools.lru_cache(2**16)
def matches(name: str, pattern: str) -> bool:
    """True if the glob ``pattern`` matches ``name``, or a module that ``name`` lies in.

    ``layers.0.moe.router.gate.weight`` is matched by ``*.router`` and by ``layers.0``.
    """
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


def modules_with_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Name, module, and full names of its own parameters, for each module that has some.

    Vision towers are left out: Titan shards each as one unit.
    """
    towers = tuple(f"{name}." for name in vision_modules(model))
    for path, module in model.named_modules():
        path = canonical_fqn(path)
        params = [name for name, _ in module.named_parameters(path, recurse=False)]
        if params and not f"{path}.".startswith(towers or ("\0",)):
            yield path, module, params


def find_replicated(model: Decoder, names: Sequence[str], *, is_chunk: bool) -> list[str]:
    """The modules whose own parameters ``parallelism.fsdp_replicate`` keeps whole.

    In forward order. ``names`` are "router", "norms", "adapters", or patterns for names of modules
    or parameters; torch shards or replicates a module's own parameters together. ``is_chunk``: it
    is the chunk of a pipeline stage, which may lack a name. Raises ValueError for a name that is
    not in the model, or what torch cannot replicate.
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

    Raises ValueError for a name that is not in the model.
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


def find_frozen_linears(
    model: nn.Module,
    patterns: Sequence[str],
    *,
    shard_world: int,
    is_chunk: bool,
    replicated: Collection[str] = (),
) -> list[str]:
    """Names of the linears whose frozen weights ``parallelism.fsdp_quantize_frozen`` quantizes.

    Args:
        model: A decoder, before FSDP, its parameters frozen or not.
        patterns: For names of modules. "*" means every frozen linear in the blocks that can be
            cut, except routers and replicated linears.
        shard_world: Ranks that dense parameters are sharded over.
        is_chunk: Whether the model is the chunk of a pipeline stage, which may lack a name.
        replicated: Names of the modules that ``parallelism.fsdp_replicate`` keeps whole.

    Raises ValueError for a model or a pattern without a frozen linear, or a weight that cannot be
    cut.
    """
    if shard_world == 1:
        raise ValueError(
            f"{QUANTIZE_FROZEN} needs an axis to shard over: over one rank torch copies a "
            "parameter and skips the all-gather that NF4 brings. Expected "
            "parallelism.data_parallel_shard_degree > 1."
        )
    frozen = {
        canonical_fqn(path): module.weight
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad
    }
    if not frozen and not is_chunk:
        raise ValueError(
            f"{QUANTIZE_FROZEN} quantizes frozen linears, and this model has none; expected LoRA "
            "adapters (docs/lora.md), which freeze the others, or a config without this key."
        )
    named = [pattern for pattern in patterns if pattern != "*"]
    for pattern in () if is_chunk else named:
        if not any(matches(path, pattern) for path in frozen):
            raise ValueError(
                f"{QUANTIZE_FROZEN}: this model has no frozen linear {pattern!r}"
                f"{did_you_mean(pattern, frozen)}"
            )
    chosen = {path for path in frozen if any(matches(path, pattern) for pattern in named)}
    for path in sorted(chosen):
        if path in replicated:
            raise ValueError(
                f"{QUANTIZE_FROZEN}: {path} is replicated by parallelism.fsdp_replicate; a "
                "linear can be one or the other."
            )
        if not _can_be_cut(frozen[path], shard_world):
            raise ValueError(
                f"{QUANTIZE_FROZEN}: {path}.weight has {frozen[path].numel()} elements; "
                f"{shard_world} ranks need equal rows and a multiple of "
                f"{_BLOCK * shard_world} (NF4's blocks)."
            )
    if "*" in patterns:
        chosen |= {
            path
            for path, weight in frozen.items()
            if path.startswith(("layers.", "mtp_layers."))
            and ".router." not in path
            and path not in replicated
            and _can_be_cut(weight, shard_world)
        }
    return [path for path in frozen if path in chosen]


def check_reshard_groups(settings: FSDPSettings, units: Sequence[Unit]) -> None:
    """Raise ValueError for a name in ``fsdp_reshard_groups`` that matches none of ``units``."""
    for name in unknown_units(settings, units):
        kinds = list(dict.fromkeys(unit.kind_name for unit in units))
        known = [*kinds, *(unit.name for unit in units)]
        raise ValueError(
            f"{RESHARD_GROUPS}: no unit of this model is called {name!r}; expected a kind "
            f"of unit ({', '.join(kinds)}) or a pattern for names such as "
            f"{units[len(units) // 2].name}{did_you_mean(name, known)}"
        )


def unknown_units(settings: FSDPSettings, units: Sequence[Unit]) -> list[str]:
    """The names in ``fsdp_reshard_groups`` that mean none of ``units``."""
    groups = settings.reshard_groups
    return [name for name in groups if not any(unit.is_named(name) for unit in units)]


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
    for name in [name for name in names if name not in used]:
        paths = [path for path, _, _ in modules_with_parameters(model)]
        parents = {".".join(p.split(".")[:n]) for p in paths for n in range(1, p.count(".") + 2)}
        raise ValueError(
            f"{REPLICATE}: this model has no {name!r}; expected {', '.join(_REPLICATED_KINDS)}, or "
            f"a pattern for names of modules or parameters such as {paths[len(paths) // 2]}"
            f"{did_you_mean(name, [*_REPLICATED_KINDS, *sorted(parents)])}"
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


def _can_be_cut(weight: torch.Tensor, shard_world: int) -> bool:
    rows, columns = weight.shape
    return rows % shard_world == 0 and rows * columns % (_BLOCK * shard_world) == 0
