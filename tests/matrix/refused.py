"""Layouts that do not run, as data: who refuses them, in which words, and what stock Titan does.

A layout that leaves ``ROWS`` comes here with its reproduction. When a release lifts the limit, a
test turns red and the layout can move back.
"""

from dataclasses import dataclass, replace
from typing import Literal

from tests.helpers.training import Run
from tests.matrix.layouts import BACKENDS, WRAPS

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


_TITAN = "https://github.com/pytorch/torchtitan/blob/release/0.3/torchtitan"
_TORCH = "https://github.com/pytorch/pytorch/blob/release/2.15/torch"

_ZERO_BUBBLE = Run(
    world=2,
    pp=2,
    layers=4,
    schedule="ZBVZeroBubble",
    ac="none",
    chunked_loss=False,
    parallelize="submodule",
    steps=1,
)

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
        reason="The converter wants a GPU that computes in its format.",
        address=f"{_TITAN}/components/quantization/{file}",
    )
    for name, message, file in _FORMATS
    for backend in BACKENDS
]
_CONVERTERS += [
    Refusal(
        run=Run(world=2, converters=("float8_linear",), compiled=True, parallelize=wrap),
        by="torchtitan",
        message="float8.emulate. to True in eager mode",
        stock_message="float8.emulate. to True in eager mode",
        reason="Emulated Float8, the only one on a CPU, is for eager mode.",
        address=f"{_TITAN}/components/quantization/float8.py",
    )
    for wrap in WRAPS
]
# Context parallelism without the tests' FlexAttention in plain operations.
_CONTEXT = [
    Refusal(
        run=Run(world=2, cp=2, backend="spmd_types", parallelize="submodule"),
        by="torchtitan",
        message="CP is not supported with ScaledDotProductAttention",
        stock_message="CP is not supported with ScaledDotProductAttention",
        reason="Context parallelism needs FlexAttention, whose backward torch lacks on a CPU.",
        address="https://github.com/pytorch/pytorch/issues/169224",
    ),
    Refusal(
        run=Run(model="llama3", world=2, cp=2, backend="partial_dtensor", parallelize="submodule"),
        by="torch",
        message="_scaled_dot_product_flash_attention_for_cpu.* sharding strategy",
        stock_message="_scaled_dot_product_flash_attention_for_cpu.* sharding strategy",
        reason="The ring attention of DTensor knows the attention kernels of GPUs only.",
        address=f"{_TORCH}/distributed/tensor/experimental/_context_parallel/_attention.py",
    ),
]
_CONTEXT += [
    Refusal(
        run=Run(model="deepseek_v3_mtp", world=2, cp=2, parallelize="submodule", steps=1),
        by="torchtitan",
        message="context_parallel_degree is 2, .* support with multi-token prediction",
        stock_message="MTP does not support context parallelism yet",
        reason="Multi-token prediction would need tokens of other ranks.",
        address=f"{_TITAN}/models/deepseek_v3/mtp.py",
    )
]

REFUSALS: list[Refusal] = [
    *_CONVERTERS,
    *_CONTEXT,
    *(
        Refusal(
            run=replace(_ZERO_BUBBLE, ac=ac),
            by="torch",
            message=f"'ZBVZeroBubble', which splits backward.* policy \"{ac}\".* one backward only",
            stock_message=stock_message,
            reason=(
                "A schedule that splits backward runs it twice, and torch's selective checkpoints "
                'allow one; "full" and "none" train.'
            ),
            address=f"{_TORCH}/utils/checkpoint.py",
        )
        for ac, stock_message in [("selective", "Trying to backward an extra time"), ("fp8", None)]
    ),
    Refusal(
        run=replace(_ZERO_BUBBLE, compiled=True, parallelize="block"),
        by="torch",
        message="splits backward: torch.compile",
        stock_message="donated buffers",
        reason="Compiled code lets go of its buffers in the first of two backwards.",
        address=f"{_TORCH}/_functorch/config.py",
    ),
    Refusal(
        run=replace(_ZERO_BUBBLE, chunked_loss=True),
        by="torch",
        message="splits backward: with the chunked loss the last norm would get no gradient",
        stock_message=None,
        reason="Stock trains on without the gradient of the last norm; a plain loss is right.",
        address=f"{_TORCH}/distributed/pipelining/_backward.py",
    ),
    Refusal(
        run=replace(_ZERO_BUBBLE, reshard="always"),
        by="torch",
        message="freed after forward would get no gradient",
        stock_message=None,
        reason="Stock trains on with gradients missing; reshard default or never is right.",
        address=f"{_TORCH}/distributed/pipelining/_backward.py",
    ),
    Refusal(
        run=Run(model="kimi_text", world=2, pp=2, parallelize="submodule", steps=1),
        by="torchtitan",
        message="pipeline_parallel_degree=1",
        stock_message="pipeline_parallel_degree=1",
        reason="Kimi's config refuses pipelines because of its optimizer, DistMuon.",
        address=f"{_TITAN}/models/kimi_k2_7/config_registry.py",
    ),
    Refusal(
        run=Run(model="qwen3", world=2, pp=2, parallelize="submodule", steps=1),
        by="torchtitan",
        message="Weight tying is not supported with Pipeline Parallel",
        stock_message="Weight tying is not supported with Pipeline Parallel",
        reason="The embedding and the head, one tensor, would lie on different ranks.",
        address=f"{_TITAN}/models/common/decoder.py",
    ),
    Refusal(
        run=Run(model="deepseek_v3_mtp", world=2, pp=2, parallelize="submodule", steps=1),
        by="torchtitan",
        message="pipeline_parallel_degree is 2, .* support with multi-token prediction",
        stock_message="MTP does not support pipeline parallelism yet",
        reason="The blocks of multi-token prediction have no stage of their own.",
        address=f"{_TITAN}/models/deepseek_v3/mtp.py",
    ),
    Refusal(
        run=Run(
            model="muse_glimmer",
            world=2,
            backend="partial_dtensor",
            parallelize="submodule",
            steps=1,
        ),
        by="torchtitan",
        message="muse_glimmer supports only 'spmd_types'",
        stock_message="only supports spmd_backend='spmd_types'",
        reason="The model is written for one backend.",
        address=f"{_TITAN}/models/muse_glimmer/parallelize.py",
    ),
    Refusal(
        run=Run(model="gpt_oss", world=2, tp=2, parallelize="submodule", steps=1),
        by="titan_ext",
        message="the bias of gpt_oss' experts once for each of the 2 ranks",
        stock_message=None,
        reason="TorchTitan 0.3 adds a bias once for each rank: the loss is wrong.",
    ),
    Refusal(
        run=Run(world=2, ep=2, backend="full_dtensor", parallelize="submodule", steps=1),
        by="titan_ext",
        message="spmd_backend is 'full_dtensor', which titan_ext does not support",
        stock_message=None,
        reason="TorchTitan has removed this backend since 0.3.",
    ),
    Refusal(
        run=Run(world=2, parallelize="submodule", reshard=2, steps=1),
        by="torch",
        message="a number of ranks, which torch does not offer with",
        stock_message=None,
        reason=(
            "FSDP2 reshards to a smaller world only on a mesh that has no other axes; stock has no "
            "such setting."
        ),
        address=f"{_TORCH}/distributed/fsdp/_fully_shard/_fully_shard.py",
    ),
    Refusal(
        run=Run(
            world=4,
            experts=3,
            backend="partial_dtensor",
            parallelize="submodule",
            reshard=2,
            steps=1,
        ),
        by="torch",
        message="more ranks share the routed experts of layers.1.moe than there are experts",
        stock_message=None,
        reason=(
            "FSDP2 reshards only dim 0 to a smaller world. Of fewer experts than ranks it shards "
            "dim 1; stock has no such setting."
        ),
        address=f"{_TORCH}/distributed/fsdp/_fully_shard/_fsdp_param.py",
    ),
    Refusal(
        run=Run(
            world=4, tp=2, backend="partial_dtensor", parallelize="submodule", reshard=2, steps=1
        ),
        by="torch",
        message="torch does not offer with parallelism.tensor_parallel_degree > 1",
        stock_message=None,
        reason="FSDP2 reshards only plain tensors to a smaller world; stock has no such setting.",
        address=f"{_TORCH}/distributed/fsdp/_fully_shard/_fsdp_param.py",
    ),
]
