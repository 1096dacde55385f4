"""Layouts that do not run, as data: who refuses them, in which words, and what stock Titan does.

A layout that leaves ``ROWS`` comes here with its reproduction, so that a release that lifts the
limit turns a test red and the layout can move back.
"""

from dataclasses import dataclass
from typing import Literal

from tests.training import Run

__all__ = ["REFUSALS", "Refusal"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A run of ours that ends with an error before or in its first step."""

    run: Run
    by: Literal["titan_ext", "torchtitan", "torch"]
    """Whose limit it is."""
    message: str
    """A regular expression, found in the error of our run."""
    stock_message: str | None
    """The same for the stock run of this layout; None if stock trains it."""
    reason: str
    """One plain sentence."""
    address: str = ""
    """The upstream issue, pull request or file that says so; "" if there is none."""

    def __str__(self) -> str:
        return str(self.run)


_TITAN = "https://github.com/pytorch/torchtitan/blob/release/0.3/torchtitan/"
_WRAPS = ("block", "submodule")
_BACKENDS = ("spmd_types", "partial_dtensor")

# Converters for formats that a CPU does not have; tests.matrix.rows.DRY holds them without one.
_FORMATS = [
    ("float8_experts", "Float8 MoE training only supported on NVIDIA SM89", "float8.py"),
    ("mxfp8_linear", "MXFP8 is only supported on SM100", "mx.py"),
    ("mxfp8_experts", "MXFP8 is only supported on SM100", "mx.py"),
    ("nvfp4_linear", "NVFP4 is only supported on SM100", "nvfp4.py"),
]
_CONVERTERS = [
    Refusal(
        run=Run(world=2, ep=2, converters=(name,), backend=backend, parallelize="submodule"),
        by="torchtitan",
        message=message,
        stock_message=message,
        reason="the converter wants a GPU that computes in its format.",
        address=f"{_TITAN}components/quantization/{file}",
    )
    for name, message, file in _FORMATS
    for backend in _BACKENDS
]
_CONVERTERS += [
    Refusal(
        run=Run(world=2, converters=("float8_linear",), compiled=True, parallelize=wrap),
        by="torchtitan",
        message="float8.emulate. to True in eager mode",
        stock_message="float8.emulate. to True in eager mode",
        reason="emulated Float8, the only one on a CPU, is for eager mode.",
        address=f"{_TITAN}components/quantization/float8.py",
    )
    for wrap in _WRAPS
]
# Context parallelism without the tests' FlexAttention in plain operations.
_CONTEXT = [
    Refusal(
        run=Run(world=2, cp=2, backend="spmd_types", parallelize="submodule"),
        by="torchtitan",
        message="CP is not supported with ScaledDotProductAttention",
        stock_message="CP is not supported with ScaledDotProductAttention",
        reason="context parallelism needs FlexAttention, whose backward torch has not on a CPU.",
        address="https://github.com/pytorch/pytorch/issues/169224",
    ),
    Refusal(
        run=Run(model="llama3", world=2, cp=2, backend="partial_dtensor", parallelize="submodule"),
        by="torch",
        message="_scaled_dot_product_flash_attention_for_cpu.* sharding strategy",
        stock_message="_scaled_dot_product_flash_attention_for_cpu.* sharding strategy",
        reason="the ring attention of DTensor knows the attention kernels of GPUs only.",
    ),
]
_MTP = [
    Refusal(
        run=Run(model="deepseek_v3_mtp", world=2, pp=pp, cp=cp, parallelize="submodule"),
        by="torchtitan",
        message=f"MTP does not support {name} parallelism yet",
        stock_message=f"MTP does not support {name} parallelism yet",
        reason=f"multi-token prediction is not written for {name} parallelism.",
        address=f"{_TITAN}models/deepseek_v3/mtp.py",
    )
    for pp, cp, name in ((2, 1, "pipeline"), (1, 2, "context"))
]

_MUSE_GLIMMER = [
    Refusal(
        run=Run(model="muse_glimmer", world=2, backend="partial_dtensor", parallelize=wrap),
        by="torchtitan",
        message="spmd_types",
        stock_message="Muse Glimmer only supports spmd_backend='spmd_types'",
        reason="the model is written for one SPMD backend.",
        address=f"{_TITAN}models/muse_glimmer/parallelize.py",
    )
    for wrap in _WRAPS
]
_SMALLER_WORLD = [
    Refusal(
        run=Run(world=world, tp=tp, ep=ep, backend=backend, parallelize=wrap, reshard=2),
        by="titan_ext",
        message=message,
        stock_message=None,
        reason=reason,
        address=address,
    )
    for world, tp, ep, backend, message, reason, address in (
        (
            *(2, 1, 1, "spmd_types"),
            "which torch does not offer with parallelism.spmd_backend",
            "torch reshards to a smaller world only on a mesh of the data axes alone.",
            "https://github.com/pytorch/pytorch/blob/v2.15.0/torch/distributed/fsdp/_fully_shard/"
            "_fully_shard.py",
        ),
        (
            *(4, 2, 4, "partial_dtensor"),
            "which torch does not offer with parallelism.tensor_parallel_degree",
            "torch reshards only plain tensors to a smaller world.",
            "https://github.com/pytorch/pytorch/blob/v2.15.0/torch/distributed/fsdp/_fully_shard/"
            "_fsdp_param.py",
        ),
    )
    for wrap in _WRAPS
]

REFUSALS: list[Refusal] = [*_MUSE_GLIMMER, *_SMALLER_WORLD, *_CONVERTERS, *_CONTEXT, *_MTP]
