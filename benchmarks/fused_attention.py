"""Attention as one op on a CPU: it saves q, k, v, out and log-sum-exp, as FlashAttention does.

torch's CPU flash kernel takes heads of one size only, and multi-head latent attention has 192 and
128. The math kernel is left, whose S x S buffers would be the largest tensors of a block.
``aten._scaled_dot_product_fused_attention_overrideable`` is an op without a kernel, for backends
out of tree to fill in. It has torch's own derivative, and stock selective checkpointing saves it.
So a policy sees here what it sees in a flash kernel. The kernels below give it to CPU tensors of
this process, one head at a time, in fp32. No window, and no gradient through the log-sum-exp that
gpt_oss scales its output by: bytes and FLOPs do not depend on them.
"""

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count
from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)
from torchtitan.protocols.model_spec import ModelSpec

from titan_ext.components.dispatch import replace_configs

__all__ = ["FLOP_FORMULAS", "FusedAttention", "observed_logits", "use_fused_attention"]

# Shape suffixes: B = batch, N = heads (fewer of k and v), L = sequence, H = head dimension.

_FORWARD = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
_BACKWARD = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward
_observers: list[list[float]] = []


class FusedAttention(ScaledDotProductAttention):
    """Titan's causal SDPA through the one op."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        _register_kernels()

    def forward(
        self, q_BLNH, k_BLNH, v_BLNH, *, scale=None, out_transform=None, **kwargs: Any
    ) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        out_BNLH, lse_BNL, *_ = _FORWARD(q, k, v, is_causal=True, scale=scale)
        if out_transform is None:
            return out_BNLH.transpose(1, 2)
        return out_transform(out_BNLH.transpose(1, 2), lse_BNL.transpose(1, 2))


def use_fused_attention(spec: ModelSpec) -> None:
    """Put ``FusedAttention`` in the place of every inner attention of ``spec``."""
    for kind in (FlexAttention, VarlenAttention, ScaledDotProductAttention):
        replace_configs(spec, kind.Config, lambda _: FusedAttention.Config())


@contextlib.contextmanager
def observed_logits():
    """A list that receives the largest absolute attention logit of each head that is run."""
    seen: list[float] = []
    _observers.append(seen)
    try:
        yield seen
    finally:
        _observers.remove(seen)


def _forward_flops(q, k, v, *args, **kwargs) -> int:
    return sdpa_flop_count(q, k, v)


def _backward_flops(grad_out, q, k, v, *args, **kwargs) -> int:
    return sdpa_backward_flop_count(grad_out, q, k, v)


FLOP_FORMULAS = {_FORWARD: _forward_flops, _BACKWARD: _backward_flops}
"""For ``FlopCounterMode(custom_mapping=...)``. All S x S logits count, as in torch's own."""


@functools.cache
def _register_kernels() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl(_FORWARD.default, _forward)
    library.impl(_BACKWARD.default, _backward)
    return library  # cached: the kernels live as long as it does


def _heads(q: torch.Tensor, k: torch.Tensor):
    queries_per_key = q.size(1) // k.size(1)
    for b in range(q.size(0)):
        for n in range(q.size(1)):
            yield (b, n), (b, n // queries_per_key)


def _logits(q_LH: torch.Tensor, k_LH: torch.Tensor, scale: float) -> torch.Tensor:
    """fp32; minus infinity above the diagonal."""
    s_LL = (q_LH.float() @ k_LH.float().t()).mul_(scale)
    if _observers:
        largest = s_LL.tril().abs().max().item()
        for seen in _observers:
            seen.append(largest)
    hidden_LL = torch.ones(s_LL.shape, dtype=torch.bool).triu_(1)
    return s_LL.masked_fill_(hidden_LL, float("-inf"))


def _forward(
    q, k, v, attn_bias=None, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    assert is_causal
    assert attn_bias is None
    assert not dropout_p
    scale = q.size(-1) ** -0.5 if scale is None else scale
    B, N, L, _ = q.shape
    # Laid out as (B, L, N, H), so that what follows needs no copy.
    out = q.new_empty(B, L, N, v.size(-1)).transpose(1, 2)
    lse = q.new_empty(B, N, L, dtype=torch.float32)
    for i, j in _heads(q, k):
        s_LL = _logits(q[i], k[j], scale)
        lse[i] = torch.logsumexp(s_LL, -1)
        out[i] = s_LL.sub_(lse[i].unsqueeze(-1)).exp_() @ v[j].float()
    none = q.new_empty(0)
    return out, lse, none, none, L, k.size(2), none, none, none


def _backward(
    grad_out,
    q,
    k,
    v,
    attn_bias,
    grad_input_mask,
    out,
    lse,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    philox_seed,
    philox_offset,
    *,
    scale=None,
):
    scale = q.size(-1) ** -0.5 if scale is None else scale
    grads = [torch.zeros(t.shape, dtype=torch.float32) for t in (q, k, v)]
    grad_q, grad_k, grad_v = grads
    for i, j in _heads(q, k):
        p_LL = _logits(q[i], k[j], scale).sub_(lse[i].unsqueeze(-1)).exp_()
        g_LH = grad_out[i].float()
        grad_v[j] += p_LL.t() @ g_LH
        delta_L1 = (g_LH * out[i].float()).sum(-1, keepdim=True)
        ds_LL = (g_LH @ v[j].float().t()).sub_(delta_L1).mul_(p_LL).mul_(scale)
        grad_q[i] += ds_LL @ k[j].float()
        grad_k[j] += ds_LL.t() @ q[i].float()
    return *(g.to(t.dtype) for g, t in zip(grads, (q, k, v), strict=True)), q.new_empty(0)
