# SPDX-License-Identifier: BSD-3-Clause
"""An all-to-all of rows in two steps, so that something else runs meanwhile; in float8; fewer rows.

``Start`` sends and ``Finish`` waits, in forward. In backward ``Finish`` sends the gradients and
``Start`` waits for them. Whatever runs between the two in forward overlaps the exchange, and so
does its backward.

**In float8** (``parallelism.exchange_dtype``), as DeepSeek-V3's report (section 3.3) has it: tokens
travel to their experts in e4m3 with a scale for 128 values, and so do the gradients of what comes
back. What the experts return, and the gradients of tokens, stay in bf16: they are sums' terms. A
row is packed as its values and then its scales, in one buffer of 0.504 of bf16's bytes::

    packed_NW   uint8, W = D + ceil(D / 128), and zeros up to a multiple of 16

A token is packed once and copied for each of its experts, and what arrives is sorted by expert
while it is packed. Selective checkpointing saves what arrived as it is; a store that quantizes it
again gets the same values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as nnf
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_ext.fp8.codec import ALIGNMENT, Quantized, codec_name, default_codec

ADDED = ("row_scores", "second_hop", "score_outputs")
"""Modules that exchanges add to routed experts, once a model is parallelized."""
ExchangeDtype = Literal["float8"]
ExchangeRows = Literal["expert", "rank", "node"]

# A backward that exchanges, or writes in place, would lose gradients of gradients, and say nothing:
# ``once_differentiable`` refuses them.

# Shape suffixes, as in dispatch.py: T = tokens, N = routed tokens that are sent, R = that arrive,
# D = model dimension, W = bytes of a packed row, M = rows that are sent or arrive, if fewer.


@dataclass(eq=False, slots=True)
class Turn:
    """Tokens of one layer that are on their way, to their experts or back."""

    sent: Any = None
    """The result of ``Start``."""
    exchange: "Exchange | None" = None
    counts: Any = None
    """Counts of the tokens that this rank's experts get, by rank and expert ``(E,)``."""
    metadata: Any = None
    packed: torch.Tensor | None = None
    """Rows ``(N, W)`` that are sent in float8."""
    rows: Any = None
    """``rows.TokenRows``, where a token goes to a rank or a node once."""


class Inside(nn.Module):
    """Runs a function where its hooks tell that it runs inside of the module that this is in."""

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


class ScoreOutputs(nn.Module):
    """Outputs of experts ``(N, D)`` times their scores ``(N,)``, in fp32 and back, as Titan's.

    A module of its own where blocks are compiled in pieces: one kernel each way, that keeps outputs
    in their own dtype. Eager code writes, reads and keeps them in fp32, the largest of a block.
    """

    def forward(self, x_ND: torch.Tensor, scores_N: torch.Tensor) -> torch.Tensor:
        return (x_ND.to(torch.float32) * scores_N.reshape(-1, 1)).to(x_ND.dtype)


@dataclass(eq=False)
class Exchange:
    """Rows that travel out, and whose gradients travel back."""

    mesh: DeviceMesh
    """The ranks that exchange."""
    sends: list[int]
    """Rows for each rank."""
    receives: list[int]
    """Rows from each rank."""
    float8: Literal["", "out", "back"] = ""
    """Which of the two ways is packed."""
    _arriving: torch.Tensor | None = None

    def start(self, rows: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """Send ``rows``; ``back``: to where rows came from. Returns what is on its way."""
        sends, receives = self.sends, self.receives
        if back:
            sends, receives = receives, sends
        # The operation itself: torch's function waits at once under fake tensors, where a dry run
        # would see nothing overlap (_are_we_tracing in torch/distributed/_functional_collectives).
        group = self.mesh.get_group().group_name
        exchange = torch.ops._c10d_functional.all_to_all_single
        self._arriving = exchange(rows.contiguous(), receives, sends, group)
        return self._arriving

    def arrived(self) -> torch.Tensor:
        """The tensor that ``start`` sent last, as it has arrived here; waits for it."""
        arriving, self._arriving = self._arriving, None
        assert arriving is not None, "start() has run"
        # Before anything reads it: to pack what had not come gave NaN, and no error.
        return wait_tensor(arriving)


class Select(torch.autograd.Function):
    """``x_TD[indices_N]``, which is sent; or what has its place in the graph, but no values.

    ``turn`` then gets the rows packed, each token once. Ahead of the exchange, which first waits
    for counts, the host has something to give out.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, indices_N: torch.Tensor, turn: Turn | None
    ) -> torch.Tensor:
        ctx.tokens = len(x_TD)
        ctx.save_for_backward(indices_N)
        if turn is None:
            return x_TD.index_select(0, indices_N)
        turn.packed = pack(x_TD).index_select(0, indices_N)
        return placeholder(x_TD, len(indices_N))

    @staticmethod
    def backward(ctx: Any, grad_ND: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (indices_N,) = ctx.saved_tensors
        # As autograd's for an index.
        grad_TD = grad_ND.new_zeros(ctx.tokens, grad_ND.shape[-1])
        return grad_TD.index_put_((indices_N,), grad_ND, accumulate=True), None, None


class Start(torch.autograd.Function):
    """Starts an exchange, returns what it sends. Backward waits for what ``Finish`` started."""

    @staticmethod
    def forward(
        ctx: Any, sent_ND: torch.Tensor, exchange: Exchange, packed_NW: torch.Tensor | None = None
    ) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.start(sent_ND if packed_NW is None else packed_NW)
        return sent_ND.view_as(sent_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        arrived = ctx.exchange.arrived()
        if ctx.exchange.float8 == "back":
            arrived = unpack(arrived, grad_ND.shape[-1], grad_ND.dtype)
        return arrived, None, None


class Finish(torch.autograd.Function):
    """Waits for an exchange. Its backward starts that of the gradients."""

    @staticmethod
    def forward(ctx: Any, sent_ND: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange, ctx.rows = exchange, len(sent_ND)
        return exchange.arrived()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        exchange = ctx.exchange
        if exchange.float8 != "back":
            return exchange.start(grad_RD, back=True), None
        exchange.start(pack(grad_RD), back=True)
        return placeholder(grad_RD, ctx.rows), None  # ``Start`` takes what arrives


class FinishSorted(torch.autograd.Function):
    """``Finish`` for rows that arrived packed, and have been sorted by expert.

    ``indices_R`` says where each sorted row was among the ``rows`` that arrived, one of which may
    be there for several experts. Backward starts the exchange of the gradients, in bf16.
    """

    @staticmethod
    def forward(
        ctx: Any,
        sent_ND: torch.Tensor,
        exchange: Exchange,
        packed_RW: torch.Tensor,
        indices_R: torch.Tensor,
        rows: int,
    ) -> torch.Tensor:
        ctx.exchange, ctx.rows = exchange, rows
        ctx.save_for_backward(indices_R)
        return unpack(packed_RW, sent_ND.shape[-1], sent_ND.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:  # type: ignore[override]
        (indices_R,) = ctx.saved_tensors
        # Without copies each row is written once, and a buffer of zeros would be written twice.
        adds = ctx.rows < len(grad_RD)
        grad_MD = (grad_RD.new_zeros if adds else grad_RD.new_empty)(ctx.rows, grad_RD.shape[1])
        grad_MD.index_put_((indices_R,), grad_RD, accumulate=adds)
        return ctx.exchange.start(grad_MD, back=True), None, None, None, None


class AddUp(torch.autograd.Function):
    """The sums ``(M, D)`` of the rows of ``x_RD`` that ``indices_R`` has for each of ``rows`` rows.

    Of their products with ``scores_R``, if given. Products and sums are made in fp32. Autograd by
    itself would keep them, and make the gradient of ``x_RD`` in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: torch.Tensor,
        indices_R: torch.Tensor,
        rows: int,
        scores_R: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(indices_R, scores_R, None if scores_R is None else x_RD)
        dtype = torch.promote_types(x_RD.dtype, torch.float32)
        terms_RD = x_RD.to(dtype) if scores_R is None else x_RD * scores_R.to(dtype).unsqueeze(1)
        sums_MD = terms_RD.new_zeros(rows, x_RD.shape[1])
        return sums_MD.index_put_((indices_R,), terms_RD, accumulate=True).to(x_RD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: torch.Tensor) -> tuple[Any, None, None, Any]:  # type: ignore[override]
        indices_R, scores_R, x_RD = ctx.saved_tensors
        grad_RD = grad_MD[indices_R]
        if scores_R is None:
            return grad_RD, None, None, None
        grad_scores_R = (grad_RD * x_RD.to(scores_R.dtype)).sum(1)
        torch.mul(grad_RD, scores_R.unsqueeze(1), out=grad_RD)
        return grad_RD, None, None, grad_scores_R


def placeholder(like: torch.Tensor, rows: int) -> torch.Tensor:
    # One element, expanded: autograd wants the shape, and nobody reads the values.
    return like.new_zeros(()).expand(rows, like.shape[-1])


@torch.no_grad()
def pack(x_TD: torch.Tensor) -> torch.Tensor:
    """Rows ``(T, D)`` in bf16, fp16 or fp32 -> uint8 ``(T, W)``: values in e4m3, then scales.

    With each row at a multiple of 16 bytes, copies and the decoder move 16 bytes at once.
    """
    data, scales = torch.ops.titan_ext.float8_quantize(x_TD, codec_name(default_codec()))
    scales = nnf.pad(scales, (0, -(data.shape[1] + scales.shape[1]) % ALIGNMENT))
    return torch.cat((data.view(torch.uint8), scales), dim=-1)


@torch.no_grad()
def unpack(packed_RW: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The rows ``(R, D)``, D = ``width``, that ``pack`` packed."""
    codec = default_codec()
    columns = codec.width(width, dtype)
    quantized = Quantized(packed_RW[:, :columns].view(codec.float8), packed_RW[:, columns:])
    dequantize = torch.ops.titan_ext.float8_dequantize
    return dequantize(*quantized, codec_name(codec), dtype)
