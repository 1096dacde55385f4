"""Titan's optimizers, with parameter groups that do not depend on how the model is wrapped.

Titan matches patterns on raw names, in which activation checkpointing has put a segment of its own
(``layers.0._checkpoint_wrapped_module.attention...``), or not, where the checkpoint is inside of
compiled code. A pattern like ``layers\\.0\\.attention`` would so take other parameters under
another policy. Here names have no wrapper segments, as in checkpoints. And a pattern may match
nothing in a pipeline stage: it is the model, not the stage, that it must match.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch.nn as nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer as TitanOptimizersContainer
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.tools.logging import logger

from titan_ext.optim.groups import MUON, resolve_groups
from titan_ext.optim.muon import muon_arguments

__all__ = ["OptimizersContainer", "extend_optimizer"]


class OptimizersContainer(TitanOptimizersContainer):
    """Titan's container; its checkpoints are Titan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanOptimizersContainer.Config):
        pass

    def __init__(
        self, config: TitanOptimizersContainer.Config, *, model_parts: list[nn.Module]
    ) -> None:
        _warn_of_patterns_without_parameters(config, model_parts)
        super().__init__(_with_muon_arguments(config, model_parts), model_parts=model_parts)

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


def extend_optimizer(config: TitanOptimizersContainer.Config) -> TitanOptimizersContainer.Config:
    """Titan's own config as ours; one of another class, ours included, as it is."""
    if type(config) is not TitanOptimizersContainer.Config:
        return config
    return OptimizersContainer.Config(**{f.name: getattr(config, f.name) for f in fields(config)})


class _CanonicalNames:
    """A model as far as Titan's matching looks at it."""

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


def _with_muon_arguments(
    config: TitanOptimizersContainer.Config, model_parts: list[nn.Module]
) -> TitanOptimizersContainer.Config:
    if MUON in config.optimizer_factory_kwargs_by_name:
        return config
    parameters = {}
    for part in model_parts:
        trainable = _trainable(part)
        for group, names in zip(
            config.param_groups, resolve_groups(trainable, config.param_groups), strict=True
        ):
            if group.optimizer_name == MUON:
                parameters |= {name: trainable[name] for name in names}
    if not parameters:
        return config
    arguments = {**config.optimizer_factory_kwargs_by_name, MUON: muon_arguments(parameters)}
    return replace(config, optimizer_factory_kwargs_by_name=arguments)


def _warn_of_patterns_without_parameters(
    config: TitanOptimizersContainer.Config, model_parts: list[nn.Module]
) -> None:
    names = [name for part in model_parts for name in _trainable(part)]
    taken = resolve_groups(names, config.param_groups)
    for group, found in zip(config.param_groups, taken, strict=True):
        if not found:
            logger.warning(
                f"optimizer.param_groups: pattern {group.pattern!r} takes no parameter of the "
                "model parts of this rank; that is right only for a stage of a pipeline."
            )
