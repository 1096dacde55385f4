# SPDX-License-Identifier: BSD-3-Clause
"""Turns a Titan model spec into ours: the same model and hooks, our parallelize function."""

import dataclasses

from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.config import ParallelismConfig
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger

from titan_ext.dispatch import use_functional_all_to_all
from titan_ext.hf_export import for_replicated_weights
from titan_ext.lora import lora_settings
from titan_ext.parallelize import parallelize

__all__ = ["REFUSED_MODELS", "check_model_limits", "extend_model_spec"]

REFUSED_MODELS = {
    "flux": "it is no decoder (so its units are unknown) and has a training loop of its own",
}
"""Titan's models that titan_ext does not serve, by their ``--module`` name, and why."""

# Titan models whose own parallelize function refuses something, by ModelSpec.name.
_NO_CONTEXT_PARALLEL = ("kimi_k2_5", "qwen3_5")
_SPMD_TYPES_ONLY = ("muse_glimmer",)


def extend_model_spec(spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with titan_ext's parallelize function and expert dispatcher.

    Model, pipelining function, post-optimizer hook (expert load balancing) and checkpoints stay
    Titan's. The Hugging Face adapter also learns HSDP and LoRA. The result shares the model config
    of ``spec``, whose dispatchers are swapped in place. So give it a fresh spec, as Titan's
    ``model_registry`` functions return.

    A model with LoRA adapters gets no load balancing. Balancing would keep changing the routers'
    bias, which belongs to the frozen base, and exported adapters would not fit that base.

    Raises:
        ValueError: if the model is not a decoder: its blocks, and so its units, are unknown.
    """
    if not isinstance(spec.model, Decoder.Config):
        raise ValueError(
            f"titan_ext does not serve the model {spec.name!r}: its config is a "
            f"{type(spec.model).__qualname__}, not one of a decoder "
            "(torchtitan.models.common.decoder.Decoder)."
        )
    use_functional_all_to_all(spec)
    adapter = spec.state_dict_adapter
    after_optimizer = spec.post_optimizer_build_fn
    if after_optimizer is register_moe_load_balancing_hook and lora_settings(spec.model):
        after_optimizer = None
        if list(spec.model.traverse(MoE.Config)):
            logger.info("LoRA: load balancing is off, the routers' bias is frozen with the base.")
    return dataclasses.replace(
        spec,
        post_optimizer_build_fn=after_optimizer,
        parallelize_fn=parallelize,
        state_dict_adapter=for_replicated_weights(adapter) if adapter else None,
    )


def check_model_limits(name: str, parallelism: ParallelismConfig) -> None:
    """Raise ValueError for what Titan refuses for the model ``name``, or computes wrongly."""
    if name in _NO_CONTEXT_PARALLEL and parallelism.context_parallel_degree > 1:
        raise ValueError(
            f"parallelism.context_parallel_degree is {parallelism.context_parallel_degree}; "
            f"{name} needs 1: TorchTitan does not support context parallelism for it."
        )
    if name in _SPMD_TYPES_ONLY and parallelism.spmd_backend != "spmd_types":
        raise ValueError(
            f"parallelism.spmd_backend is {parallelism.spmd_backend!r}; {name} supports only "
            "'spmd_types', as in TorchTitan."
        )
    tp, ep = parallelism.tensor_parallel_degree, parallelism.expert_parallel_degree
    if name == "gpt_oss" and tp > 1 and ep == 1 and parallelism.spmd_backend == "spmd_types":
        raise ValueError(
            f"parallelism.tensor_parallel_degree is {tp} and expert_parallel_degree 1; under "
            "'spmd_types' TorchTitan 0.3 then adds the bias of gpt_oss' experts once for each of "
            f"the {tp} ranks, and the loss is wrong. Expected spmd_backend = 'partial_dtensor', or "
            "expert_parallel_degree > 1."
        )
