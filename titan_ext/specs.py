"""A Titan model spec into ours: same model, same adapters and hooks, our parallelize function."""

import dataclasses

from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec

from titan_ext.dispatch import use_functional_all_to_all
from titan_ext.parallelize import parallelize

__all__ = ["SUPPORTED_MODELS", "extend_model_spec"]

SUPPORTED_MODELS = ("deepseek_v3", "qwen3")
"""``ModelSpec.name`` of the Titan models whose layouts titan_ext is tested with."""


def extend_model_spec(spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with titan_ext's parallelize function and expert dispatcher.

    The model, the state-dict adapter (and so every checkpoint), the pipelining function and the
    post-optimizer hook (expert load balancing) stay Titan's. The model config of ``spec`` is
    shared with the result and its dispatchers are swapped in place, so give it a fresh spec, as
    Titan's ``model_registry`` functions return. Extending twice is harmless.

    Raises:
        ValueError: if the model is not one that titan_ext serves.
    """
    if spec.name not in SUPPORTED_MODELS or not isinstance(spec.model, Decoder.Config):
        raise ValueError(
            f"titan_ext does not serve the model {spec.name!r}; expected one of "
            f"{', '.join(SUPPORTED_MODELS)}."
        )
    use_functional_all_to_all(spec)
    return dataclasses.replace(spec, parallelize_fn=parallelize)
