"""Titan's quantising converters by short name, as runs of the matrix ask for them.

A converter rewrites the model config before the model is built, so that stock Titan and titan_ext
get the same converted config. One whose format this machine cannot compute raises when it is made.
"""

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

from torchtitan.components.quantization import (
    Float8GroupedExpertsConverter,
    Float8LinearConverter,
    MXFP8GroupedExpertsConverter,
    MXFP8LinearConverter,
    NVFP4LinearConverter,
    float8,
    mx,
    nvfp4,
)

from titan_ext.components.float8_linears import TensorwiseFloat8LinearConverter

# Emulated, Float8Linear has one scale a tensor, whatever the recipe (Titan drops its name).
_CONVERTERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "float8_linear": (Float8LinearConverter, {"emulate": True, "filter_fqns": ["lm_head"]}),
    "float8_tensorwise": (
        TensorwiseFloat8LinearConverter,
        {"emulate": True, "filter_fqns": ["lm_head"], "enable_fsdp_float8_all_gather": False},
    ),
    "float8_gather": (
        TensorwiseFloat8LinearConverter,
        {"emulate": True, "filter_fqns": ["lm_head"]},
    ),
    "float8_experts": (Float8GroupedExpertsConverter, {}),
    "mxfp8_linear": (MXFP8LinearConverter, {}),
    "mxfp8_experts": (MXFP8GroupedExpertsConverter, {}),
    # NVFP4 wants dimensions that 128 divides; wkv_a of the debug model has 576.
    "nvfp4_linear": (NVFP4LinearConverter, {"fqns": ["wq", "wo", "feed_forward"]}),
}


def convert(model_config: Any, names: tuple[str, ...], *, compiled: bool = False) -> Any:
    """``model_config`` after the converters called ``names``.

    Raises:
        ValueError: from Titan, where the machine cannot compute in that format.
    """
    for name in names:
        converter, settings = _CONVERTERS[name]
        config = converter.Config(model_compile_enabled=compiled, **settings)
        model_config = config.build().convert(model_config)
    return model_config


@contextlib.contextmanager
def any_gpu() -> Iterator[None]:
    """Let every converter believe in a GPU of its kind; nothing can be computed with them."""
    with contextlib.ExitStack() as stack:
        for module in (float8, mx, nvfp4):
            stack.enter_context(
                unittest.mock.patch.object(module, "has_cuda_capability", return_value=True)
            )
        yield
