"""A Titan model spec into ours: same model, same adapters and hooks, our parallelize function."""

import dataclasses

from torchtitan.config import ParallelismConfig
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec

from titan_ext.dispatch import use_functional_all_to_all
from titan_ext.hf_adapter import for_replicated_weights
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

    The model, the pipelining function and the post-optimizer hook (expert load balancing) stay
    Titan's, and so do checkpoints; its Hugging Face adapter is extended for HSDP. The model config
    of ``spec`` is shared with the result and its dispatchers are swapped in place, so give it a
    fresh spec, as Titan's ``model_registry`` functions return. Extending twice is harmless.

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
    return dataclasses.replace(
        spec,
        parallelize_fn=parallelize,
        state_dict_adapter=for_replicated_weights(adapter) if adapter else None,
    )


def check_model_limits(name: str, parallelism: ParallelismConfig) -> None:
    """Refuse what Titan's own parallelize function refuses for the model called ``name``.

    Raises:
        ValueError: naming the key.
    """
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
