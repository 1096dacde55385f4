# SPDX-License-Identifier: BSD-3-Clause
"""An all-to-all of rows in two steps, so that something else runs meanwhile; in float8; fewer rows.

``Start`` sends and ``Finish`` waits, in forward. In backward ``Finish`` sends the gradients and
``Start`` waits for them. Whatever runs between the two in forward overlaps the exchange, and so
does its backward.

**In float8** (``parallelism.exchange_dtype``), as DeepSeek-V3's report (section 3.3) has it: tokens
travel to their experts in e4m3 with a scale for 128 values, and so do the gradients of what comes
back. What the experts return, and the gradients of tokens, stay in bf16: they are sums' terms. A
row is packed as its values and then its scales, in one buffer of 0.508 of bf16's bytes::

    packed_NW   uint8, W = D + ceil(D / 128), and zeros up to a multiple of 16

A token is packed once and copied for each of its experts, and what arrives is sorted by expert
while it is packed. Checkpointing saves what arrived as it is: nothing is quantized twice.

**One row a token and rank** (``parallelism.exchange_rows``): a token goes to a rank once, however
many of its experts live there. The scores travel beside, each with the row that it belongs to. The
rank copies the row for each of its experts, and sends back one sum of their outputs times the
scores, which is made in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as nnf
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.common.token_dispatcher import AllToAllDispatchMetadata

from titan_ext.fp8.codec import ALIGNMENT, Codec, Quantized, codec_name, note_decoded
from titan_ext.fp8.saved_tensors import compiles_for

ExchangeDtype = Literal["float8"]
ExchangeRows = Literal["expert", "rank"]
_CODEC = Codec()

# Shape suffixes, as in dispatch.py: T = tokens, N = routed tokens that are sent, R = that arrive,
# D = model dimension, W = bytes of a packed row. K = experts of a token, E = experts, EP = ranks,
# e = experts of one rank, M = rows that are sent or arrive where a token goes to a rank once.


@dataclass(eq=False, slots=True)
class Turn:
    """Tokens of one layer that are on their way, to their experts or back."""

    sent: Any = None
    """What ``Start`` returned."""
    exchange: "Exchange | None" = None
    counts: Any = None
    """Of the tokens that this rank's experts get, by rank and expert ``(E,)``."""
    metadata: Any = None
    packed: torch.Tensor | None = None
    """Rows ``(N, W)`` that are sent in float8."""
    rows: "RankRows | None" = None
    """Where a token goes to a rank once."""


class Inside(nn.Module):
    """Runs a function where its hooks tell that it runs inside of the module that this is in."""

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


class RankRows:
    """The rows of one layer's exchanges, where a token goes to a rank once.

    Attributes:
        tokens_N, scores_N: Of the routed tokens, in the order of their experts.
        sends, receives: Rows for each rank, and from each; known once the counts have come.
    """

    sends: list[int]
    receives: list[int]

    def __init__(
        self, scores_TK: torch.Tensor, expert_ids_TK: torch.Tensor, ranks: int, experts: int
    ) -> None:
        rank_TK = expert_ids_TK // (experts // ranks)
        goes_TEP = rank_TK.new_zeros(len(rank_TK), ranks).scatter_(1, rank_TK, 1)
        self._sends_EP = goes_TEP.sum(0)
        row_TK = (goes_TEP.cumsum(0) - 1).gather(1, rank_TK)  # among those for its rank
        # As Titan's ``_local_reorder``: by expert, and so by rank.
        order_N = torch.argsort(expert_ids_TK.flatten(), stable=True)
        self.tokens_N, self.scores_N = order_N // rank_TK.shape[1], scores_TK.flatten()[order_N]
        self._rank_N, self._row_N = (x.flatten()[order_N] for x in (rank_TK, row_TK))

    def counts_to_tell(self, tokens_E: torch.Tensor) -> torch.Tensor:
        """Counts of tokens by expert ``(E,)`` -> with one of rows for each rank ``(EP, e + 1)``."""
        ranks = len(self._sends_EP)
        return torch.cat((tokens_E.view(ranks, -1), self._sends_EP.unsqueeze(1)), dim=1)

    def counts_to_read(self, tokens_E: torch.Tensor, told_EP_e: torch.Tensor) -> torch.Tensor:
        """What the host reads: tokens and rows sent, tokens and rows expected, ``(4, EP)``.

        ``told_EP_e`` is what other ranks had to tell.
        """
        self._tokens_from_EP, self._rows_from_EP = told_EP_e[:, :-1].sum(1), told_EP_e[:, -1]
        tokens_EP = tokens_E.view(len(told_EP_e), -1).sum(1)
        expected = self._tokens_from_EP, self._rows_from_EP
        return torch.stack((tokens_EP, self._sends_EP, *expected))

    def select(self, x_TD: torch.Tensor, turn: Turn | None) -> torch.Tensor:
        """The rows that are sent ``(M, D)``; packed, if there is a ``turn`` to keep them."""
        starts_EP = self._sends_EP.cumsum(0) - self._sends_EP
        place_N = starts_EP[self._rank_N] + self._row_N
        tokens_M = self.tokens_N.new_empty(sum(self.sends)).scatter_(0, place_N, self.tokens_N)
        self._tokens_M = tokens_M
        return Select.apply(x_TD, tokens_M, turn)

    def send_scores(self, mesh: DeviceMesh, sends: list[int], receives: list[int]) -> None:
        """Begin to send the scores, each with its row, to the ranks of their experts.

        ``sends`` and ``receives`` count routed tokens.
        """
        assert max(self.sends) <= 2**24, "rows are sent as floats, exact up to there"
        # Flat: policies keep it, as they do scores.
        dtype = torch.promote_types(self.scores_N.dtype, torch.float32)
        pairs_N2 = torch.stack((self.scores_N.to(dtype), self._row_N.to(dtype)), dim=1)
        self._exchange = Exchange(mesh, [2 * n for n in sends], [2 * n for n in receives])
        self._sent = Start.apply(pairs_N2.flatten(), self._exchange)

    def receive(
        self, turn: Turn, permute: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor, AllToAllDispatchMetadata]:
        """Tokens by expert ``(R, D)``, counts ``(e,)``, and what ``_rows_back`` needs of them.

        ``permute`` is Titan's function of a dispatcher.
        """
        pairs_R2 = Finish.apply(self._sent, self._exchange).view(-1, 2)
        scores_R, row_R = pairs_R2.unbind(1)
        starts_EP = self._rows_from_EP.cumsum(0) - self._rows_from_EP
        starts_R = starts_EP.repeat_interleave(self._tokens_from_EP, output_size=len(row_R))
        place_R1 = (starts_R + row_R.detach().long()).unsqueeze(1)
        _, place_R1, order_R, counts_e = permute(place_R1, turn.counts)
        place_R, rows, exchange = place_R1.squeeze(1), sum(self.receives), turn.exchange
        assert exchange is not None, "send() has run"
        if exchange.float8 == "out":
            packed_RW = exchange.arrived()[place_R]
            routed_RD = FinishSorted.apply(turn.sent, exchange, packed_RW, place_R, rows)
        else:
            routed_RD = Finish.apply(turn.sent, exchange)[place_R]
        metadata = AllToAllDispatchMetadata(
            token_indices_experts_sorted_N=self._tokens_M,
            topk_scores_experts_sorted_N=scores_R[order_R],
            input_shape=(rows, routed_RD.shape[1]),
            permuted_indices=place_R,
            input_splits=self.sends,
            output_splits=self.receives,
        )
        return routed_RD, counts_e, metadata


class Exchange:
    """Rows that travel out, and whose gradients travel back.

    Args:
        mesh: The ranks that exchange.
        sends: Rows for each rank.
        receives: Rows from each rank.
        float8: Which of the two ways is packed.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        sends: list[int],
        receives: list[int],
        *,
        float8: Literal["", "out", "back"] = "",
    ) -> None:
        self._mesh = mesh
        self._sends, self._receives = sends, receives
        self.float8 = float8
        self._arriving: torch.Tensor | None = None

    def start(self, rows: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """Send ``rows``; ``back``: to where rows came from. Returns what is on its way."""
        sends, receives = self._sends, self._receives
        if back:
            sends, receives = receives, sends
        # The operation itself: torch's function waits at once under fake tensors, where a dry run
        # would see nothing overlap (_are_we_tracing in torch/distributed/_functional_collectives).
        group = self._mesh.get_group().group_name
        exchange = torch.ops._c10d_functional.all_to_all_single
        self._arriving = exchange(rows.contiguous(), receives, sends, group)
        return self._arriving

    def arrived(self) -> torch.Tensor:
        """What ``start`` sent last, as it is here; waits for it."""
        arriving, self._arriving = self._arriving, None
        assert arriving is not None, "start() has run"
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
        return _placeholder(x_TD, len(indices_N))

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
    def backward(ctx: Any, grad_RD: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        exchange = ctx.exchange
        if exchange.float8 != "back":
            return exchange.start(grad_RD, back=True), None
        exchange.start(pack(grad_RD), back=True)
        return _placeholder(grad_RD, ctx.rows), None  # ``Start`` takes what arrives


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
    def backward(ctx: Any, grad_RD: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:  # type: ignore[override]
        (indices_R,) = ctx.saved_tensors
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
    def backward(ctx: Any, grad_MD: torch.Tensor) -> tuple[Any, None, None, Any]:  # type: ignore[override]
        indices_R, scores_R, x_RD = ctx.saved_tensors
        grad_RD = grad_MD[indices_R]
        if scores_R is None:
            return grad_RD, None, None, None
        grad_scores_R = (grad_RD * x_RD.to(scores_R.dtype)).sum(1)
        torch.mul(grad_RD, scores_R.unsqueeze(1), out=grad_RD)
        return grad_RD, None, None, grad_scores_R


def _placeholder(like: torch.Tensor, rows: int) -> torch.Tensor:
    return like.new_zeros(()).expand(rows, like.shape[-1])


@torch.no_grad()
def pack(x_TD: torch.Tensor) -> torch.Tensor:
    """Rows ``(T, D)`` in bf16, fp16 or fp32 -> uint8 ``(T, W)``: values in e4m3, then scales.

    With each row at a multiple of 16 bytes, copies and the decoder move 16 bytes at once.
    """
    quantize = torch.ops.titan_ext.float8_quantize
    data, scales = quantize(x_TD, codec_name(_CODEC), compiles_for(x_TD.device))
    scales = nnf.pad(scales, (0, -(data.shape[1] + scales.shape[1]) % ALIGNMENT))
    return torch.cat((data.view(torch.uint8), scales), dim=-1)


@torch.no_grad()
def unpack(packed_RW: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The rows ``(R, D)``, D = ``width``, that ``pack`` packed; a store keeps them as they came."""
    quantized = Quantized(packed_RW[:, :width].view(_CODEC.float8), packed_RW[:, width:])
    dequantize = torch.ops.titan_ext.float8_dequantize
    one_kernel = compiles_for(packed_RW.device)
    rows_RD = dequantize(*quantized, codec_name(_CODEC), dtype, one_kernel)
    note_decoded(rows_RD, quantized, _CODEC)
    return rows_RD
