"""Causal attention in plain torch operations, for models that on a CPU need more than SDPA gives.

gpt_oss rescales its attention output by learned sinks, for which it needs the log-sum-exp of the
scores and its gradient, and half of its layers see a sliding window only. FlexAttention and varlen
attention do that and have no CPU backward; SDPA runs on a CPU and would leave both out silently.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common.attention import ScaledDotProductAttention

__all__ = ["CausalAttention"]

# Shape suffixes: B = batch, L = sequence, N = heads, H = head dimension.


class CausalAttention(ScaledDotProductAttention):
    """Stands in for FlexAttention or varlen attention; causal over packed documents.

    Memory is quadratic in the sequence: B x N x L x L scores are kept for backward.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        window: int | None = None
        """How many positions a query sees, itself included; None for all before it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.window = config.window

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        scale: float | None = None,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend. Key and value heads are repeated where there are fewer of them than queries'.

        Args:
            scale: Factor of the scores; 1 / sqrt(H) if None.
            out_transform: Called with the output ``(B, L, N, H)`` and the log-sum-exp of the
                scores ``(B, L, N)`` in fp32.

        Returns:
            ``(B, L, N, H)`` in the dtype of ``v``.
        """
        q_BNLH, k_BNLH, v_BNLH = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        queries_per_key = q_BNLH.size(1) // k_BNLH.size(1)
        k_BNLH = k_BNLH.repeat_interleave(queries_per_key, dim=1)
        v_BNLH = v_BNLH.repeat_interleave(queries_per_key, dim=1)

        scale = q_BNLH.size(-1) ** -0.5 if scale is None else scale
        scores_BNLL = (q_BNLH.float() @ k_BNLH.float().transpose(-2, -1)) * scale
        position = torch.arange(q_BNLH.size(2), device=q_BNLH.device)
        distance_LL = position[:, None] - position[None, :]
        hidden_LL = distance_LL < 0
        if self.window is not None:
            hidden_LL |= distance_LL >= self.window
        scores_BNLL = scores_BNLL.masked_fill(hidden_LL, float("-inf"))

        lse_BNL = torch.logsumexp(scores_BNLL, dim=-1)
        weights_BNLL = torch.exp(scores_BNLL - lse_BNL.unsqueeze(-1)).to(v_BNLH.dtype)
        out_BLNH = (weights_BNLL @ v_BNLH).transpose(1, 2)
        if out_transform is None:
            return out_BLNH
        return out_transform(out_BLNH, lse_BNL.transpose(1, 2))
