"""FlexAttention in plain torch, so that context parallelism can train on a CPU.

Titan's context parallelism needs FlexAttention under ``spmd_types``, and torch refuses its backward
on a CPU. The tests put these operations in place of the kernel, for stock Titan and for ours alike:
masks, sharding, exchanges and gradients are Titan's own.
"""

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel
from torch.nn.attention.flex_attention import AuxOutput, create_block_mask, create_mask
from torchtitan.models.common import attention
from torchtitan.models.common.attention import FlexAttention

from titan_ext import no_accelerator

__all__ = ["flex_on_cpu"]


# Shape suffixes: B = batch, N = heads, L = sequence of the queries, S = of the keys, H = head.


def _flex_attention(
    q_BNLH: torch.Tensor,
    k_BNSH: torch.Tensor,
    v_BNSH: torch.Tensor,
    *,
    block_mask: Any,
    scale: float | None,
    score_mod: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, AuxOutput]:
    assert score_mod is None
    queries_per_key = q_BNLH.size(1) // k_BNSH.size(1)
    k_BNSH = k_BNSH.repeat_interleave(queries_per_key, dim=1)
    v_BNSH = v_BNSH.repeat_interleave(queries_per_key, dim=1)
    scale = q_BNLH.size(-1) ** -0.5 if scale is None else scale
    scores_BNLS = (q_BNLH.float() @ k_BNSH.float().transpose(-2, -1)) * scale
    batch, _, queries, keys = scores_BNLS.shape
    device = scores_BNLS.device
    visible_BNLS = create_mask(block_mask.mask_mod, batch, 1, queries, keys, device=device)
    scores_BNLS = scores_BNLS.masked_fill(~visible_BNLS, float("-inf"))
    lse_BNL = torch.logsumexp(scores_BNLS, dim=-1)
    weights_BNLS = torch.exp(scores_BNLS - lse_BNL.unsqueeze(-1)).to(v_BNSH.dtype)
    return weights_BNLS @ v_BNSH, AuxOutput(lse=lse_BNL)


@contextlib.contextmanager
def flex_on_cpu() -> Iterator[None]:
    """Keep FlexAttention in the model, run it as plain operations and make its masks eagerly."""
    patch = unittest.mock.patch.object
    with (
        patch(no_accelerator, "adapt_spec"),
        patch(FlexAttention, "compiled_flex_attn", staticmethod(_flex_attention)),
        patch(attention, "_compiled_create_block_mask", create_block_mask),
        patch(context_parallel, "_compiled_create_block_mask", create_block_mask),
    ):
        yield
