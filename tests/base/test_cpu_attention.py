"""CausalAttention against SDPA, and against the definition where SDPA gives no answer."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torchtitan.models.common.attention import create_varlen_metadata_for_document

from titan_ext.base.no_accelerator import CausalAttention, PlainVarlenAttention

B, L, N, H = 2, 9, 4, 8


def _qkv(kv_heads: int = N) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, L, n, H, requires_grad=True) for n in (N, kv_heads, kv_heads)]


@pytest.mark.parametrize("kv_heads", [N, 2])
def test_equals_sdpa_forward_and_backward(kv_heads: int):
    ours, theirs = _qkv(kv_heads), _qkv(kv_heads)
    out = CausalAttention.Config().build()(*ours, scale=0.3, enable_gqa=kv_heads != N)
    q, k, v = (t.transpose(1, 2) for t in theirs)
    expected = scaled_dot_product_attention(
        q, k, v, scale=0.3, is_causal=True, enable_gqa=kv_heads != N
    ).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    (out**2).sum().backward()
    (expected**2).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_window_and_log_sum_exp_by_definition():
    q, k, v = _qkv()
    seen = {}

    def transform(out, lse):
        seen["lse"] = lse
        return out * 2

    out = CausalAttention.Config(window=3).build()(q, k, v, out_transform=transform)
    for i in range(L):
        near = slice(max(0, i - 2), i + 1)
        scores = torch.einsum("bnh,bknh->bnk", q[:, i], k[:, near]) / H**0.5
        expected = torch.einsum("bnk,bknh->bnh", scores.softmax(-1), v[:, near])
        torch.testing.assert_close(out[:, i], 2 * expected)
        torch.testing.assert_close(seen["lse"][:, i], scores.logsumexp(-1))


def test_log_sum_exp_carries_a_gradient():
    q, k, v = _qkv()
    CausalAttention.Config().build()(q, k, v, out_transform=lambda _, lse: lse).sum().backward()
    assert q.grad is not None
    assert q.grad.abs().sum() > 0
    assert v.grad is None or not v.grad.any()


@pytest.mark.parametrize("window", [None, 3])
def test_documents_are_those_of_varlen_attention(window: int | None):
    """Two in the first sequence and three in the second one, each with its own positions."""
    positions_BL = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 0, 1, 2, 3, 4]])
    q, k, v = torch.randn(3, 2, 8, 4, 16)
    attention = PlainVarlenAttention.Config(window_size=((window or 0) - 1, 0)).build()
    masks = create_varlen_metadata_for_document(positions_BL)
    out = attention(q, k, v, attention_masks=masks)
    of_documents = CausalAttention.Config(window=window).build()
    documents_BL = (positions_BL == 0).cumsum(-1)
    assert torch.equal(out, of_documents(q, k, v, attention_masks=documents_BL))
    alone = of_documents(*(t[1:, 3:] for t in (q, k, v)))
    torch.testing.assert_close(out[1:, 3:], alone)
    assert not torch.allclose(out, of_documents(q, k, v))
