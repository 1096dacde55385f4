"""One MoE block of a model, as the middle stage of a pipeline has it: no embedding, no head.

At one process it is a plain module; at more it is parallelized, by Titan's function ("stock", with
Titan's token dispatcher) or by ours. Parameters in bf16, on the CPU, with attention as one op.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.utils import set_default_dtype

from benchmarks.fused_attention import observed_logits, use_fused_attention
from titan_ext.api import ParallelismConfig, extend_model_spec
from titan_ext.base import no_accelerator
from titan_ext.components.early_scores import use_early_scores
from titan_ext.components.exchange_policy import SaveAllToAll

__all__ = ["GEOMETRIES", "BlockLayout", "BlockRun", "block_spec", "build_chunk"]

GEOMETRIES = ("deepseek_v3_16b", "qwen3_30b_a3b", "gpt_oss_20b", "debug")
"""The first layer with experts of each."""


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Where the block lies. ``stock``: parallelized by Titan itself, without the last key."""

    ep: int = 1
    backend: Literal["spmd_types", "partial_dtensor"] = "spmd_types"
    stock: bool = False
    save_all_to_all: SaveAllToAll = "auto"


def block_spec(geometry: str, layers: int = 1) -> ModelSpec:
    """A fresh spec of ``layers`` MoE layers of a model."""
    from torchtitan.models import deepseek_v3, gpt_oss, qwen3

    spec, first = {
        "deepseek_v3_16b": lambda: (deepseek_v3.model_registry("16B"), 1),
        "qwen3_30b_a3b": lambda: (qwen3.model_registry("30B-A3B", attn_backend="flex"), 0),
        "gpt_oss_20b": lambda: (gpt_oss.model_registry("20b"), 0),
        "debug": lambda: (deepseek_v3.model_registry("debugmodel"), 1),
    }[geometry]()
    config = cast(Decoder.Config, spec.model)
    config.layers = config.layers[first : first + layers]
    use_fused_attention(spec)
    return spec


def build_chunk(
    spec: ModelSpec,
    ac_config: ActivationCheckpointing.Config | None,
    layout: BlockLayout,
    parallel_dims: ParallelDims | None,
) -> Decoder:
    """The blocks of ``spec``, initialised; alike for equal seeds, whatever ``ac_config`` is."""
    no_accelerator.enable()
    parallelism = ParallelismConfig(
        expert_parallel_degree=layout.ep,
        spmd_backend=layout.backend,
        fsdp_reshard_after_forward="always",
        save_all_to_all=layout.save_all_to_all,
    )
    if getattr(ac_config, "score_before_last_gemm", False):
        use_early_scores(spec)
    if parallel_dims is not None:
        spec = spec if layout.stock else extend_model_spec(spec)
        spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"), set_default_dtype(torch.bfloat16):
        model = cast(Any, spec.model.build())
    model.tok_embeddings = model.norm = model.lm_head = None
    if parallel_dims is None:
        if ac_config is not None:
            ac_config.build().apply(model)
    else:
        spec.parallelize_fn(
            model,
            parallel_dims=parallel_dims,
            training=TrainingConfig(dtype="bfloat16"),
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=ac_config,
            dump_folder="",
        )
        no_accelerator.reduce_without_premul_sum(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad(), no_accelerator.layout_independent_init():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model.train()


class BlockRun:
    """Builds, feeds and differentiates one block under one layout; one for each process.

    Args:
        tokens: A rank's, in one sequence.
        logits: If given, the query weights are scaled until the largest attention logit is this.
    """

    def __init__(
        self, geometry: str, layout: BlockLayout, tokens: int, logits: float | None = None
    ) -> None:
        self.geometry, self.layout, self.logits = geometry, layout, logits
        self._query_factor: float | None = None
        self._parallel_dims: ParallelDims | None = None
        # As Titan does: the recompute needs this thread's meshes.
        torch.autograd.set_multithreading_enabled(False)
        rank = 0
        if layout.ep > 1:
            no_accelerator.enable()
            dist.init_process_group("gloo")
            rank = dist.get_rank()
            parallelism = ParallelismConfig(
                expert_parallel_degree=layout.ep, spmd_backend=layout.backend
            )
            self._parallel_dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        dist_utils.set_spmd_backend(layout.backend)
        dim = cast(Any, block_spec(geometry).model).dim
        generator = torch.Generator().manual_seed(1 + rank)
        self.input_BLD = torch.randn(1, tokens, dim, generator=generator).bfloat16()
        self.grad_BLD = torch.randn(1, tokens, dim, generator=generator).bfloat16()

    def build(self, ac_config: ActivationCheckpointing.Config | None, stock: bool) -> Decoder:
        layout = replace(self.layout, stock=stock)
        model = build_chunk(block_spec(self.geometry), ac_config, layout, self._parallel_dims)
        if self.logits is not None:
            if self._query_factor is None:
                self._query_factor = self._find_query_factor(model)
            _scale_queries(model, self._query_factor)
        return model

    def forward(self, model: Decoder, leaf_BLD: torch.Tensor) -> torch.Tensor:
        """The loss, whose graph keeps nothing of the block's output; ``()`` in fp32."""
        h_BLD = leaf_BLD.clone()  # the input of the block: made here, and so counted
        return (model(h_BLD).float() * self.grad_BLD).sum()

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """What surrounds forward and backward: the meshes, and gloo's missing all-to-all."""
        with contextlib.ExitStack() as stack:
            if self._parallel_dims is not None:
                stack.enter_context(no_accelerator.list_all_to_all())
                meshes = dist_utils.get_spmd_context(parallel_dims=self._parallel_dims)
                stack.enter_context(meshes())
            yield

    def _find_query_factor(self, model: Decoder) -> float:
        with torch.no_grad(), observed_logits() as seen, self.context():
            model(self.input_BLD.clone())
        largest = torch.tensor(max(seen))
        if dist.is_initialized():
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        assert self.logits is not None
        return self.logits / largest.item()


def _scale_queries(model: Decoder, factor: float) -> None:
    """Logits are linear in the queries: scale what makes them last (a norm, if there is one)."""
    names = [name for name, _ in model.named_parameters()]
    for end in ("attention.q_norm.weight", "attention.wq.weight"):
        if found := [name for name in names if name.endswith(end)]:
            break
    else:
        raise ValueError(f"no query projection among {names}")
    with torch.no_grad():
        for name in found:
            model.get_parameter(name).mul_(factor)
