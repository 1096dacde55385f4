# SPDX-License-Identifier: BSD-3-Clause
"""The drop-in model spec: Titan's own, with titan_ext's parallelize function and dispatcher."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.nn as nn
from torchtitan.components.optimizer import OptimizersContainer, register_moe_load_balancing_hook
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger

from titan_ext.base.titan.parallelism import has_experts
from titan_ext.components.dispatch import use_our_dispatchers
from titan_ext.components.hf_export import for_replicated_weights
from titan_ext.components.lora import lora_settings
from titan_ext.fsdp.units import decoder_blocks
from titan_ext.parallelize.passes import parallelize


@dataclasses.dataclass
class ExtendedModelSpec(ModelSpec):
    """A model spec of Titan's that titan_ext has extended."""

    stock_parallelize_fn: Callable[..., nn.Module] = lambda model, **_: model
    """Titan's own, for a dry run of stock."""
    extends: str = dataclasses.field(default="", compare=False, repr=False)
    """The config function that its config comes from, as a file has it; "" if a config was made in
    Python."""
    choices: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """The [model] section of its file, by key."""


def balance_all_blocks(
    optimizers: OptimizersContainer, model_parts: list[Decoder], parallel_dims: ParallelDims
) -> None:
    """Titan's balancing of experts, for the blocks of multi-token prediction too.

    Titan's hook walks ``layers`` of each model part (torchtitan/components/optimizer/optimizer.py).
    The blocks are the models' own; only the lists of them are made here.
    """
    lists = []
    for part in model_parts:
        lists.append(nn.Module())
        # A module's name has no dots, and Titan's hook ignores these names.
        blocks = {name.replace(".", "_"): block for name, block in decoder_blocks(part)}
        lists[-1].layers = nn.ModuleDict(blocks)
    register_moe_load_balancing_hook(optimizers, lists, parallel_dims)


def extend_model_spec(spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with titan_ext's parallelize function and expert dispatcher.

    Model, pipelining function and checkpoints stay Titan's. So does its balancing of experts, for
    blocks of multi-token prediction too. The Hugging Face adapter also learns HSDP and LoRA. The
    result shares the model config of ``spec``, whose dispatchers are swapped in place. So give it a
    fresh spec, as Titan's ``model_registry`` functions return.

    A model with LoRA adapters gets no load balancing. Balancing would keep changing the routers'
    bias, which belongs to the frozen base, and exported adapters would not fit that base. Raises
    ValueError if the model is not a decoder: its blocks, and so its units, are unknown.
    """
    if not isinstance(spec.model, Decoder.Config):
        raise ValueError(
            f"titan_ext does not serve the model {spec.name!r}: its config is a "
            f"{type(spec.model).__qualname__}, not one of a decoder "
            "(torchtitan.models.common.decoder.Decoder)."
        )
    use_our_dispatchers(spec)
    adapter = spec.state_dict_adapter
    after_optimizer = spec.post_optimizer_build_fn
    if after_optimizer is register_moe_load_balancing_hook and lora_settings(spec.model):
        after_optimizer = None
        if has_experts(spec.model):
            logger.info("LoRA: load balancing is off, the routers' bias is frozen with the base.")
    elif after_optimizer is register_moe_load_balancing_hook:
        after_optimizer = balance_all_blocks
    if isinstance(spec, ExtendedModelSpec):
        return spec
    return ExtendedModelSpec(
        name=spec.name,
        flavor=spec.flavor,
        model=spec.model,
        parallelize_fn=parallelize,
        pipelining_fn=spec.pipelining_fn,
        post_optimizer_build_fn=after_optimizer,
        state_dict_adapter=for_replicated_weights(adapter) if adapter else None,
        stock_parallelize_fn=spec.parallelize_fn,
    )
