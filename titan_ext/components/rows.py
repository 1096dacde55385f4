# SPDX-License-Identifier: BSD-3-Clause
"""The rows that travel where a token goes once to a rank, or once to a node (``exchange_rows``).

By default a token travels once for each of its experts, and so do their outputs. With ``"rank"`` it
goes once to each rank of its experts. With ``"node"`` it goes once to each node of them, to the
rank that has the sender's place there, and on to the ranks. Of two hops the network sees one::

    node 0, place 1  --network-->  node 2, place 1  --NVLink-->  node 2, places 0 and 5

Beside a row travel its ``routes``: scores and experts of the token. By them whoever gets it makes
copies, for ranks or for experts. What goes back are sums: of outputs times scores on the rank of
the experts, made in fp32 and rounded once, and of the sums of a node's ranks on the way.

The host reads all counts at once, ahead of the first hop, as every rank tells every other what it
sends to it and to its neighbours.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.token_dispatcher import AllToAllDispatchMetadata

from titan_ext.base.titan.parallelism import mesh_with_axes
from titan_ext.components.exchange import (
    Exchange,
    Finish,
    FinishSorted,
    Inside,
    Select,
    Start,
    Turn,
    placeholder,
)

# Shape suffixes, as in exchange.py: T = rows that are here, K = experts of a token, E = experts,
# e = experts of one rank, M = rows that are sent, R = rows of this rank's experts, D = model
# dimension, W = bytes of a packed row, P = places to which rows are copied, G = nodes, L = ranks of
# a node, EP = G * L.


class Hops(NamedTuple):
    """The hops of rows."""

    meshes: Sequence[DeviceMesh]
    """The ranks that exchange them in each hop: across nodes, then in this one. Of a single hop, to
    ranks, each of these is a node of its own."""
    routes: nn.Module
    second: nn.Module
    """Inside of which the exchanges of routes and the second hop run: policies count exchanges by
    module."""


@dataclass(frozen=True, kw_only=True)
class RowsMetadata(AllToAllDispatchMetadata):
    """Metadata of rows that have come; ``rows`` sends back what is made of them."""

    rows: "TokenRows"


class _Copies:
    """Copies of rows: one for each of ``places`` in which a token has an expert, by place.

    ``width`` experts have a place, from expert ``first`` on. Others of a token are elsewhere.
    """

    def __init__(self, ids_TK: torch.Tensor, first: int, width: int, places: int) -> None:
        place_TK = torch.div(ids_TK - first, width, rounding_mode="floor")
        self._place_TK = place_TK.where((place_TK >= 0) & (place_TK < places), places)
        goes_TP = ids_TK.new_zeros(len(ids_TK), places + 1).scatter_(1, self._place_TK, 1)
        self._places, self._goes_TP = places, goes_TP[:, :places]
        self.counts_P = self._goes_TP.sum(0)

    def make(self, copies: int) -> torch.Tensor:
        """The source row of each copy ``(M,)``; M = ``copies``, which the host has to know."""
        # The last slot takes what does not go, and is cut off: the host would wait for a mask.
        starts_P = self.counts_P.cumsum(0) - self.counts_P
        slot_TP = (starts_P - 1 + self._goes_TP.cumsum(0)).where(self._goes_TP.bool(), copies)
        source_TP = torch.arange(slot_TP.numel(), device=slot_TP.device)
        source_M = source_TP.new_empty(copies + 1).scatter_(0, slot_TP.flatten(), source_TP)
        self._source_M = source_M[:copies]
        return self._source_M // self._places

    def scores(self, scores_TK: torch.Tensor) -> torch.Tensor:
        """Scores of the copies that ``make`` made ``(M,)``, where each place is an expert."""
        scores_TP = scores_TK.new_zeros(len(scores_TK), self._places + 1)
        scores_TP = scores_TP.scatter_add(1, self._place_TK, scores_TK)[:, : self._places]
        return scores_TP.flatten()[self._source_M]


class TokenRows:
    """The rows of one layer's exchanges; ``ranks`` are those of a node."""

    sends: Sequence[list[int]]
    receives: Sequence[list[int]]
    """Rows of each hop to each rank of it, and from each; known once the counts have come."""

    def __init__(
        self, scores_TK: torch.Tensor, ids_TK: torch.Tensor, hops: Hops, experts: int
    ) -> None:
        self._hops = hops
        self._nodes, self.ranks = hops.meshes[0].size(), 1
        self._node, self._place = hops.meshes[0].get_local_rank(), 0
        if len(hops.meshes) == 2:
            self.ranks, self._place = hops.meshes[1].size(), hops.meshes[1].get_local_rank()
        self._width = experts // (self._nodes * self.ranks)
        self._by_node = _Copies(ids_TK, 0, self._width * self.ranks, self._nodes)
        self._by_rank = self._by_node
        if self.ranks > 1:
            self._by_rank = _Copies(ids_TK, 0, self._width, self._nodes * self.ranks)
        # Experts as floats, which are exact below 2^24.
        scores_TK = scores_TK.to(torch.promote_types(scores_TK.dtype, torch.float32))
        self._routes_T2K = torch.cat((scores_TK, ids_TK.to(scores_TK.dtype)), dim=1)

    def counts_to_tell(self, tokens_E: torch.Tensor) -> torch.Tensor:
        """For each rank ``(EP, L + 2)``: rows for its node, rows for each rank of that, and the
        tokens of its experts, which ``tokens_E`` has."""
        nodes, ranks = self._nodes, self.ranks
        to_node_GL1 = self._by_node.counts_P.view(nodes, 1, 1).expand(-1, ranks, -1)
        to_ranks_GLL = self._by_rank.counts_P.view(nodes, 1, ranks).expand(-1, ranks, -1)
        tokens_GL1 = tokens_E.view(nodes, ranks, -1).sum(2, keepdim=True)
        return torch.cat((to_node_GL1, to_ranks_GLL, tokens_GL1), dim=2).flatten(0, 1)

    def counts_to_read(self, told: torch.Tensor) -> torch.Tensor:
        """The counts that the host reads for ``read``; ``told`` is what other ranks had to tell."""
        place, told = self._place, told.view(self._nodes, self.ranks, -1)
        from_nodes_G, to_ranks_L = told[:, place, 0], told[:, place, 1:-1].sum(0)
        from_ranks_L, tokens_1 = told[:, :, 1 + place].sum(0), told[..., -1].sum().view(1)
        return torch.cat((self._by_node.counts_P, from_nodes_G, to_ranks_L, from_ranks_L, tokens_1))

    def read(self, counts: Sequence[int]) -> int:
        """Take in what ``counts_to_read`` made; returns how many rows this rank's experts get."""
        *counts, self._routed = counts
        hops = counts[: 2 * self._nodes], counts[2 * self._nodes :]
        self.sends = [both[: len(both) // 2] for both in hops]
        self.receives = [both[len(both) // 2 :] for both in hops]
        return self._routed

    def start(self, x_TD: torch.Tensor, turn: Turn, *, float8: bool) -> torch.Tensor:
        """Begin the first hop of the tokens."""
        self._tokens_M = self._by_node.make(sum(self.sends[0]))
        self._send_routes(self._routes_T2K, self._tokens_M, hop=0)
        rows_MD = Select.apply(x_TD, self._tokens_M, turn if float8 else None)
        turn.exchange = self._exchange(0, "out" if float8 else "")
        packed_MW, turn.packed = turn.packed, None
        return Start.apply(rows_MD, turn.exchange, packed_MW)

    def relay(self, turn: Turn) -> None:
        """Begin the second hop, if there is one, once the first is over. A second call does
        nothing."""
        if self._hop < len(self._hops.meshes) - 1:
            self._hops.second(self._relay, turn)

    def _relay(self, turn: Turn) -> None:
        routes_T2K, first = self._routes_here(), turn.exchange
        assert first is not None, "start() has run"
        ids_TK = _experts_of(routes_T2K)
        of_node = self._node * self.ranks * self._width
        copies_M = _Copies(ids_TK, of_node, self._width, self.ranks).make(sum(self.sends[1]))
        self._send_routes(routes_T2K, copies_M, hop=1)
        turn.exchange = self._exchange(1, first.float8)
        self._copies = copies_M, len(ids_TK)
        turn.sent = Relay.apply(turn.sent, first, turn.exchange, *self._copies, False)

    def receive(self, turn: Turn) -> tuple[torch.Tensor, torch.Tensor, RowsMetadata]:
        """Tokens by expert ``(R, D)``, counts ``(e,)``, and what is needed for the way back."""
        self.relay(turn)
        routes_T2K, exchange = self._routes_here(), turn.exchange
        assert exchange is not None, "start() has run"
        ids_TK, rank = _experts_of(routes_T2K), self._node * self.ranks + self._place
        copies = _Copies(ids_TK, rank * self._width, 1, self._width)
        source_R, rows = copies.make(self._routed), len(ids_TK)
        if exchange.float8 == "out":
            packed_RW = exchange.arrived()[source_R]
            routed_RD = FinishSorted.apply(turn.sent, exchange, packed_RW, source_R, rows)
        else:
            routed_RD = Finish.apply(turn.sent, exchange)[source_R]
        metadata = RowsMetadata(
            rows=self,
            token_indices_experts_sorted_N=self._tokens_M,
            topk_scores_experts_sorted_N=copies.scores(routes_T2K.chunk(2, dim=1)[0]),
            input_shape=(rows, routed_RD.shape[1]),
            permuted_indices=source_R,
            input_splits=self.sends[0],
            output_splits=self.receives[0],
        )
        return routed_RD, copies.counts_P, metadata

    def start_back(self, sums_TD: torch.Tensor, turn: Turn, *, float8: bool) -> None:
        """Begin to send the sums of this rank's experts back."""
        turn.exchange = self._exchange(self._hop, "back" if float8 else "", back=True)
        inside = functools.partial(self._hops.second, Start.apply) if self._hop else Start.apply
        turn.sent = inside(sums_TD, turn.exchange)

    def relay_back(self, turn: Turn) -> None:
        """Begin to send sums of a node's ranks back, once theirs have come, if there are two hops.
        A second call does nothing."""
        if self._hop:
            second, self._hop = turn.exchange, 0
            assert second is not None, "start_back() has run"
            turn.exchange = self._exchange(0, second.float8, back=True)
            turn.sent = Relay.apply(turn.sent, second, turn.exchange, *self._copies, True)

    def _exchange(self, hop: int, float8: Any, *, back: bool = False) -> Exchange:
        self._hop = hop
        splits = self.sends[hop], self.receives[hop]
        return Exchange(self._hops.meshes[hop], *splits[:: -1 if back else 1], float8=float8)

    def _send_routes(self, routes_T2K: torch.Tensor, rows_M: torch.Tensor, hop: int) -> None:
        width = routes_T2K.shape[1]
        sends, receives = ([width * n for n in rows[hop]] for rows in (self.sends, self.receives))
        self._routes = Exchange(self._hops.meshes[hop], sends, receives)
        # Flat: policies keep it, as they do scores.
        flat = routes_T2K[rows_M].flatten()
        self._sent = self._hops.routes(Start.apply, flat, self._routes)

    def _routes_here(self) -> torch.Tensor:
        return Finish.apply(self._sent, self._routes).view(-1, self._routes_T2K.shape[1])


def _experts_of(routes_T2K: torch.Tensor) -> torch.Tensor:
    return routes_T2K.detach().chunk(2, dim=1)[1].long()


class Relay(torch.autograd.Function):
    """Waits for one exchange, and starts the next with what came.

    These are the rows ``copies_M`` of it, or with ``adds`` for each of ``rows`` rows the sum of its
    copies. Rows in float8 stay packed. What is returned has no values. Backward does the other of
    the two with the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        sent_TD: torch.Tensor,
        arriving: Exchange,
        leaving: Exchange,
        copies_M: torch.Tensor,
        rows: int,
        adds: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(copies_M)
        ctx.exchanges, ctx.rows, ctx.sent, ctx.adds = (arriving, leaving), rows, len(sent_TD), adds
        leaves = _copied_or_added(arriving.arrived(), copies_M, rows, adds)
        leaving.start(leaves)
        return placeholder(sent_TD, len(leaves))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None, None, None, None, None]:  # type: ignore[override]
        (copies_M,), (arriving, leaving) = ctx.saved_tensors, ctx.exchanges
        leaves = _copied_or_added(leaving.arrived(), copies_M, ctx.rows, not ctx.adds)
        arriving.start(leaves, back=True)
        return placeholder(grad, ctx.sent), None, None, None, None, None


def _copied_or_added(
    came_TD: torch.Tensor, copies_M: torch.Tensor, rows: int, adds: bool
) -> torch.Tensor:
    if not adds:
        return came_TD.index_select(0, copies_M)
    # In their own dtype: kernels of a GPU add up in fp32, and fp32 copies take longer than bytes
    # that travel.
    sums = came_TD.new_zeros(rows, came_TD.shape[1])
    return sums.index_put_((copies_M,), came_TD, accumulate=True)


def hops_across_nodes(parallel_dims: ParallelDims, nodes: int) -> tuple[DeviceMesh, DeviceMesh]:
    """The ranks of either hop, where those that exchange tokens lie in so many nodes.

    Made once a job. Every rank has to call it, whatever it holds of the model: all ranks of the job
    make a process group together.
    """
    made = vars(parallel_dims).setdefault("_hops_across_nodes", {})
    if nodes not in made:
        ep = parallel_dims.ep  # those that exchange are neighbours
        sizes = dist.get_world_size() // ep, nodes, ep // nodes
        names = ("exchanging", "across_nodes", "within_node")
        device_type = mesh_with_axes(parallel_dims, ["ep"]).device_type
        world = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        made[nodes] = world["across_nodes"], world["within_node"]
    return made[nodes]


def sends_fewer(top_k: int, experts: int, places: int) -> bool:
    """True if a token has two experts in one of ``places``, where it goes once."""
    return min(top_k, experts // places) > 1


def exchange_once(model: nn.Module, hops: Sequence[DeviceMesh] = ()) -> None:
    """Let a token go to a rank once in MoE layers where that sends less.

    Or to a node, by the ``hops_across_nodes``. Call it after expert parallelism.
    """
    for module in list(model.modules()):
        dispatcher: Any = getattr(module, "token_dispatcher", None)
        if not hasattr(dispatcher, "sends_once") or dispatcher.ep_mesh is None:
            continue
        meshes = hops or [cast(DeviceMesh, dispatcher.ep_mesh)]
        if not sends_fewer(dispatcher.top_k, dispatcher.num_experts, meshes[0].size()):
            continue
        dispatcher.sends_once = Hops(meshes, Inside(), Inside())
        if hops:
            module.add_module("second_hop", dispatcher.sends_once.second)
        module.add_module("row_scores", dispatcher.sends_once.routes)
