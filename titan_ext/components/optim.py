# SPDX-License-Identifier: BSD-3-Clause
"""Titan's optimizers, with parameter groups that do not depend on how the model is wrapped.

Titan matches the patterns of ``optimizer.param_groups`` on the ranks, and on raw names. Activation
checkpointing adds a segment to those (``layers.0._checkpoint_wrapped_module.attention...``), unless
the checkpoint is inside compiled code. Here names have no such segments, as in checkpoints. A
pattern must match in the model, not in every pipeline stage. ``check_param_groups`` checks patterns
on the meta device before anything starts. It also checks the optimizers' keys, for torch ignores a
misspelt ``weight_decay``.

Muon orthogonalises whole matrices, and a rank holds a part of each. DistMuon needs to know, by
parameter, where to compute the whole, on mesh axes by name; those differ between SPMD backends and
for experts. Titan writes that by hand for Kimi. Here it follows from how a parameter is sharded:
one rank owns a matrix, and each rank keeps its own experts of a stack.

Gradient clipping is Titan's: ``training.max_norm``.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer as TitanOptimizersContainer
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.config import ParallelismConfig
from torchtitan.distributed.flex_shard import BucketConfig, ComputeLayout, Owned
from torchtitan.distributed.flex_shard.dist_muon import DistMuon
from torchtitan.protocols.model import BaseModel
from torchtitan.tools.logging import logger

from titan_ext.base.messages import and_more, check_choice, did_you_mean

MUON = "DistMuon"
"""The ``optimizer_name`` of Titan's Muon."""

_OPTIMIZERS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, MUON: DistMuon}
# Arguments that torch, Titan or _muon_arguments give, and no file.
_NOT_KEYS = ("self", "params", "compute_sharding_by_fqn", "bucket_configs")
_IMPLEMENTATION = ("fused", "foreach")
_CATCH_ALL = (".*", "")
_LAYER = re.compile(r"^.*?layers\.\d+\.")


class OptimizersContainer(TitanOptimizersContainer):
    """Titan's container; its checkpoints are Titan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanOptimizersContainer.Config):
        pass

    def __init__(
        self, config: TitanOptimizersContainer.Config, *, model_parts: list[nn.Module]
    ) -> None:
        trainable = {name: p for part in model_parts for name, p in _trainable(part).items()}
        taken = resolve_groups(trainable, config.param_groups)
        factories = dict(config.optimizer_factory_kwargs_by_name)
        for group, names in zip(config.param_groups, taken, strict=True):
            if not names:
                logger.warning(
                    f"optimizer.param_groups: pattern {group.pattern!r} takes no parameter of the "
                    "model parts of this rank; that is right only for a stage of a pipeline."
                )
            elif group.optimizer_name == MUON and MUON not in factories:
                factories[MUON] = _muon_arguments({name: trainable[name] for name in names})
        config = replace(config, optimizer_factory_kwargs_by_name=factories)
        super().__init__(config, model_parts=model_parts)

    @staticmethod
    def _build_param_groups(
        model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        # Titan's function asks a model for named_parameters alone, and matches raw names.
        named: Any = SimpleNamespace(named_parameters=lambda: _named_parameters(model))
        taken = resolve_groups(_trainable(model), param_group_configs)
        groups = [group for group, names in zip(param_group_configs, taken, strict=True) if names]
        for index, group in enumerate(groups):
            if group.optimizer_name == MUON:  # it has one implementation, and refuses the flags
                kwargs = {"fused": False, "foreach": False, **group.optimizer_kwargs}
                groups[index] = replace(group, optimizer_kwargs=kwargs)
        return TitanOptimizersContainer._build_param_groups(named, groups, impl_kwargs)


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((canonical_fqn(name), param) for name, param in model.named_parameters())


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in _named_parameters(model) if param.requires_grad}


def _muon_arguments(parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """The arguments of ``build_dist_muon`` besides ``parameters``, for matrices and experts.

    ``parameters`` are of every model part of this rank, by canonical name: DTensors ``[rows,
    columns]`` or ``[experts, rows, columns]``. A layer has one bucket for its matrices, and one for
    its experts, which have other ranks to talk to. What FSDP keeps whole has buckets of its own:
    beside sharded matrices DistMuon gives both the updates of others, in silence.
    """
    buckets, layouts = defaultdict(list), {}
    for name, param in parameters.items():
        if not isinstance(param, DTensor):
            raise ValueError(f"DistMuon takes parameters that FSDP has sharded, and {name} is not.")
        axes = param.device_mesh.mesh_dim_names or ()
        sharded = [
            axis
            for axis, placement in zip(axes, param.placements, strict=True)
            if not isinstance(placement, Replicate)
        ]
        kind, compute = ("matrices", Owned()) if param.ndim == 2 else ("experts", Shard(0))
        # One rank of the last axis computes what is whole on all: DistMuon must be told of an axis,
        # and has no replicated computation (torchtitan/distributed/flex_shard/dist_muon.py).
        layouts[name] = ComputeLayout(
            shardings_by_mesh_axis=dict.fromkeys(sharded or axes[-1:], compute)
        )
        layer = _LAYER.match(name)
        buckets[f"{layer[0] if layer else ''}{'' if sharded else 'whole '}{kind}"].append(name)
    return {
        "compute_sharding_by_fqn": layouts,
        "bucket_configs": tuple(
            BucketConfig(name=name, patterns=tuple(names)) for name, names in buckets.items()
        ),
    }


def resolve_groups(names: Iterable[str], groups: Sequence[ParamGroupConfig]) -> list[list[str]]:
    """The canonical names that each of ``groups`` takes: those whose first matching pattern it has.

    ``names`` are of trainable parameters; wrapper segments in them are ignored. A name that no
    pattern matches is in no group.
    """
    patterns = [re.compile(group.pattern) for group in groups]
    taken: list[list[str]] = [[] for _ in groups]
    for name in map(canonical_fqn, names):
        first = next((i for i, pattern in enumerate(patterns) if pattern.search(name)), None)
        if first is not None:
            taken[first].append(name)
    return taken


def check_param_groups(
    config: TitanOptimizersContainer.Config,
    model_config: BaseModel.Config,
    parallelism: ParallelismConfig,
) -> None:
    """Raise ValueError for a wrong key of ``optimizer.param_groups``, or what DistMuon cannot take.

    A pattern is wrong if it is not a regular expression or takes no parameter of the model. Every
    trainable parameter must be in a group, and every optimizer and its keys must exist.
    """
    for index, group in enumerate(config.param_groups):
        _check_group(f"optimizer.param_groups.{index}", group)
    muon = _check_muon(config.param_groups, parallelism)
    if len(config.param_groups) == 1 and config.param_groups[0].pattern in _CATCH_ALL:
        return
    with torch.device("meta"):
        model = model_config.build()
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    taken = resolve_groups(shapes, config.param_groups)
    for index, names in enumerate(taken):
        if not names:
            raise ValueError(_takes_nothing(index, config.param_groups, list(shapes)))
    if left := [name for name in shapes if not any(name in names for names in taken)]:
        raise ValueError(
            f"optimizer.param_groups: no group takes {and_more(left, 1)}; expected every trainable "
            'parameter in a group: add a last one with pattern ".*".'
        )
    for name in taken[muon] if muon is not None else ():
        if len(shapes[name]) not in (2, 3):
            raise ValueError(
                f"optimizer.param_groups.{muon}.pattern takes {name} of shape "
                f"{tuple(shapes[name])}; {MUON} expects matrices, or experts with a matrix each."
            )


def _check_muon(groups: Sequence[ParamGroupConfig], parallelism: ParallelismConfig) -> int | None:
    """The index of DistMuon's group, if there is one."""
    muons = [i for i, group in enumerate(groups) if group.optimizer_name == MUON]
    if not muons:
        return None
    key = f"optimizer.param_groups.{muons[-1]}"
    if len(muons) > 1:
        raise ValueError(
            f"{key}.optimizer_name is {MUON!r}, as in group {muons[0]}; expected one group of it: "
            "join the patterns with |."
        )
    if len(groups) == 1 and groups[0].pattern in _CATCH_ALL:
        raise ValueError(
            f"{key}.pattern takes all parameters, and {MUON} matrices only; expected a pattern for "
            "matrices, and a group after it for the rest."
        )
    if parallelism.tensor_parallel_degree > 1:
        raise ValueError(
            f"{key}.optimizer_name is {MUON!r}, and parallelism.tensor_parallel_degree is "
            f"{parallelism.tensor_parallel_degree}; expected 1: TorchTitan's {MUON} takes matrices "
            "that one axis splits."
        )
    return muons[0]


def _check_group(key: str, group: ParamGroupConfig) -> None:
    try:
        re.compile(group.pattern)
    except re.error as error:
        raise ValueError(
            f"{key}.pattern is {group.pattern!r}: expected a regular expression, {error}."
        ) from error
    check_choice(f"{key}.optimizer_name", group.optimizer_name, _OPTIMIZERS)
    known = inspect.signature(_OPTIMIZERS[group.optimizer_name]).parameters
    keys = [*(name for name in known if name not in _NOT_KEYS), *_IMPLEMENTATION]
    for name in group.optimizer_kwargs:
        if name not in keys:
            raise ValueError(
                f"{key}.optimizer_kwargs.{name}: {group.optimizer_name} has no such key; expected "
                f"one of {', '.join(dict.fromkeys(keys))}{did_you_mean(name, keys)}"
            )


def _takes_nothing(index: int, groups: Sequence[ParamGroupConfig], names: list[str]) -> str:
    said = f"optimizer.param_groups.{index}.pattern is {groups[index].pattern!r}, which takes no "
    (alone,) = resolve_groups(names, [groups[index]])
    if not alone:
        literal = re.sub(r"\\d[+*]?", "0", groups[index].pattern)
        literal = re.sub(r"[\\^$()?*+|\[\]]", "", literal)
        hint = get_close_matches(literal, names, n=1, cutoff=0.0)[0]
        return f"{said}trainable parameter; names are as in {hint}, without names of wrappers."
    earlier = next(i for i, taken in enumerate(resolve_groups(names, groups)) if alone[0] in taken)
    return (
        f"{said}parameter: groups before it take all that it matches (group {earlier} "
        f"takes {alone[0]}); expected the special patterns first, as the first match wins."
    )
