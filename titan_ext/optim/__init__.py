# SPDX-License-Identifier: BSD-3-Clause
"""Titan's optimizers, with parameter groups that do not depend on how the model is wrapped.

Titan matches patterns on raw names. Activation checkpointing adds a segment to these
(``layers.0._checkpoint_wrapped_module.attention...``), unless the checkpoint is inside compiled
code. So a pattern like ``layers\\.0\\.attention`` would take other parameters under another policy.
Here names have no wrapper segments, as in checkpoints. And a pattern must match in the model, not
in every pipeline stage.

Muon orthogonalises whole matrices, and a rank holds a part of each. DistMuon needs to know, by
parameter, where to compute the whole, on mesh axes by name; those differ between SPMD backends and
for experts. Titan writes that by hand for Kimi. Here it follows from how a parameter is sharded:
one rank owns a matrix, and each rank keeps its own experts of a stack.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer as TitanOptimizersContainer
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.distributed.flex_shard import BucketConfig, ComputeLayout, Owned
from torchtitan.tools.logging import logger

from titan_ext.optim.param_groups import MUON, check_param_groups, resolve_groups

__all__ = ["OptimizersContainer", "check_param_groups"]

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
        named: Any = _CanonicalNames(model)
        taken = resolve_groups(_trainable(model), param_group_configs)
        groups = [
            _without_implementation(group) if group.optimizer_name == MUON else group
            for group, names in zip(param_group_configs, taken, strict=True)
            if names
        ]
        return TitanOptimizersContainer._build_param_groups(named, groups, impl_kwargs)


class _CanonicalNames:
    """A model, as far as Titan's matching uses it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, param in self._model.named_parameters():
            yield canonical_fqn(name), param


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    named = _CanonicalNames(model).named_parameters()
    return {name: param for name, param in named if param.requires_grad}


def _without_implementation(group: ParamGroupConfig) -> ParamGroupConfig:
    """DistMuon has one implementation, and refuses ``optimizer.implementation``'s flags."""
    return replace(
        group, optimizer_kwargs={"fused": False, "foreach": False, **group.optimizer_kwargs}
    )


def _muon_arguments(parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """The arguments of ``build_dist_muon`` besides the parameters, for matrices and experts.

    Args:
        parameters: Parameters for DistMuon, of every model part of this rank, by canonical name:
            DTensors ``[rows, columns]`` or ``[experts, rows, columns]``.

    Returns:
        ``compute_sharding_by_fqn`` and ``bucket_configs``: one bucket a layer for its matrices, and
        one for its experts, which have other ranks to talk to.
    """
    buckets = defaultdict(list)
    for name, param in parameters.items():
        layer = _LAYER.match(name)
        kind = "matrices" if param.ndim == 2 else "experts"
        buckets[f"{layer[0] if layer else ''}{kind}"].append(name)
    return {
        "compute_sharding_by_fqn": {n: _layout(n, param) for n, param in parameters.items()},
        "bucket_configs": tuple(
            BucketConfig(name=name, patterns=tuple(names)) for name, names in buckets.items()
        ),
    }


def _layout(name: str, param: nn.Parameter) -> ComputeLayout:
    if not isinstance(param, DTensor):
        raise ValueError(f"DistMuon takes parameters that FSDP has sharded, and {name} is not.")
    axes = param.device_mesh.mesh_dim_names or ()
    compute = Owned() if param.ndim == 2 else Shard(0)
    return ComputeLayout(
        shardings_by_mesh_axis={
            axis: compute
            for axis, placement in zip(axes, param.placements, strict=True)
            if not isinstance(placement, Replicate)
        }
    )
