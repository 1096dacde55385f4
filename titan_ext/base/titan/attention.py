# SPDX-License-Identifier: BSD-3-Clause
# pyrefly: ignore-errors
"""Attention written for a batch of sequences, under models that call it with packed tokens.

0.3's models call their inner attention with queries, keys and values ``(B, L, N, H)``, main's with
``(T, N, H)``: all tokens of a microbatch in a row, with masks for the documents in it. Kernels want
a batch, and main's ``ScaledDotProductAttention`` (models/common/attention.py) still does: no model
of main's can use it.

Shape suffixes: B = batch, L = sequence, T = packed tokens, N = heads, H = head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torchtitan.config import TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention


def with_packed_tokens(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # Not functools.wraps: Titan looks the names of these parameters up in its sharding config.
    def packed(
        self: Any,
        q_TNH: torch.Tensor,
        k_TNH: torch.Tensor,
        v_TNH: torch.Tensor,
        *,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        rows = getattr(self, "rows", 1)
        batch = [x.unflatten(0, (rows, -1)) for x in (q_TNH, k_TNH, v_TNH)]
        if out_transform is None:
            return forward(self, *batch, **kwargs).flatten(0, 1)

        def transform(out_BLNH: torch.Tensor, lse_BLN: torch.Tensor) -> torch.Tensor:
            return out_transform(out_BLNH.flatten(0, 1), lse_BLN.flatten(0, 1))

        return forward(self, *batch, out_transform=transform, **kwargs)

    return packed


if "max_context_length" in {f.name for f in fields(TrainingConfig)}:  # main

    class PlainAttention(ScaledDotProductAttention):
        """Titan's ``ScaledDotProductAttention``, causal over all tokens of a microbatch."""

        @dataclass(kw_only=True, slots=True)
        class Config(ScaledDotProductAttention.Config):
            pass

        forward = with_packed_tokens(ScaledDotProductAttention.forward)

    as_models_call = with_packed_tokens

    def rows_of(tokens: int, length: int) -> int:
        return tokens // length if tokens % length == 0 else 1

else:
    PlainAttention = ScaledDotProductAttention

    def as_models_call(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A forward for q, k and v of ``(B, L, N, H)``, as models call it.

        On main it is called with ``(T, N, H)``, and takes it for ``self.rows`` sequences, by
        default one.
        """
        return forward

    def rows_of(tokens: int, length: int) -> int:
        """Sequences of ``length`` that ``tokens`` of a microbatch are, where models pack them."""
        return 1
