# SPDX-License-Identifier: BSD-3-Clause
"""Expert-parallel token dispatch whose all-to-alls are functional collectives on every backend.

Titan's ``AllToAllTokenDispatcher`` exchanges tokens with ``torch.distributed.all_to_all`` (a list
of uneven chunks) under the ``spmd_types`` backend in eager mode. So gloo, which has no uneven list
all-to-all, cannot run it. And selective activation checkpointing cannot see it, so the recompute
sends every token again. ``_c10d_functional.all_to_all_single`` does the same exchange, bit for bit,
and is an op that gloo runs and a checkpoint policy can save. Titan itself uses it for its other
backends and under torch.compile.

While tokens travel something else may run: the other half of a batch (``overlap``), and a layer's
shared experts while the experts' outputs travel back.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config.override import derive
from torchtitan.distributed.spmd_types import current_spmd_mesh, maybe_set_sparse_mesh
from torchtitan.models.common.token_dispatcher import (
    AllToAllDispatchMetadata,
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
    HybridEPTokenDispatcher,
    LocalDispatchMetadata,
)
from torchtitan.ops.scatter_add import deterministic_scatter_add
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils as titan_utils

from titan_ext.components.exchange import (
    AddUp,
    Exchange,
    Finish,
    FinishSorted,
    ScoreOutputs,
    Select,
    Start,
    Turn,
)
from titan_ext.components.overlap import current_half, in_half, pause
from titan_ext.components.rows import Hops, TokenRows

# Shape suffixes, as in torchtitan/models/common/moe.py. N = routed tokens of this rank (tokens x
# top-k), R = routed tokens received by this rank's experts, D = model dimension. T = tokens, E =
# experts, EP = ranks of the expert axis, e = experts of one rank, M = rows that travel, if fewer.


class FunctionalAllToAllTokenDispatcher(AllToAllTokenDispatcher):
    """Titan's all-to-all dispatcher with its exchanges (counts, tokens, outputs) as functional
    collectives; with ``sends_scores`` a fourth brings routing scores to the experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        sends_scores: bool = False
        """Experts apply the routing scores (``components.early_scores``)."""

    counts_group: dist.ProcessGroup | None = None
    """On which ranks tell each other how many tokens they send, where a batch runs as two halves
    (``pause_at_exchanges``); None: that of the tokens."""
    shared_experts: Any = None
    """The shared experts, which run while routed outputs travel back."""
    sends_float8 = False
    """Tokens on their way out, and gradients of what comes back (``exchange_in_float8``)."""
    sends_once: Hops | None = None
    """The hops of a token that goes to a rank or a node once (``exchange_once``)."""
    score_outputs: ScoreOutputs | None = None
    """Multiplies outputs of experts by their scores, where that is compiled."""
    meter: Any = None
    """In steps that are logged: what measures waits for counts (``run.pace.Meter``)."""
    _dispatched: LocalDispatchMetadata | None = None
    """The metadata that waits for ``send_scores``."""
    _turn: Turn | None = None
    """None: an exchange waits at once. Set while ``send`` and ``collect`` use Titan's functions,
    which then start an exchange, or finish one."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._sends_scores = config.sends_scores

    def dispatch(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        if self._stopwatch is not None and self.ep_mesh is not None:
            self._stopwatch.worst = len(args[0]) * most_rows_of_token(self)
        in_steps = self._in_half or self.sends_float8 or self.sends_once
        if in_steps and self._turn is None and self.ep_mesh is not None:
            self._pause_for_a_hop(half=1)
            turn = self.send(*args, **kwargs)
            self._pause()
            self.relay(turn)
            self._pause_for_a_hop(half=0)
            return *self.receive(turn), turn.metadata
        routed_RD, counts_E, metadata = super().dispatch(*args, **kwargs)
        if self._sends_scores:
            self._dispatched = metadata
        return routed_RD, counts_E, metadata

    def combine(
        self, routed_output_RD: torch.Tensor, metadata: AllToAllDispatchMetadata, x_TD: torch.Tensor
    ) -> torch.Tensor:
        """Do what Titan's does: outputs ``(R, D)`` -> ``(T, D)``; ``x_TD`` are the tokens."""
        rows = getattr(metadata, "rows", None)
        in_steps = rows or (self._in_half and isinstance(metadata, AllToAllDispatchMetadata))
        if in_steps and self._turn is None:
            turn = Turn(metadata=metadata, rows=rows)
            self._pause_for_a_hop(half=1)
            self.send_back(turn, routed_output_RD)
            self._pause()
            self.relay_back(turn)
            self._pause_for_a_hop(half=0)
            if self.shared_experts is not None:
                self.shared_experts.run_ahead()
                self._pause()
            return self.collect(turn, x_TD)
        is_compiled = self.score_outputs is not None and not spmd.is_type_checking()
        if self._sends_scores or self.sends_once or is_compiled:
            return self._add_up(routed_output_RD, metadata, x_TD)
        return super().combine(routed_output_RD, metadata, x_TD)

    def pause_at_exchanges(self, counts: dist.ProcessGroup) -> None:
        """Let the other half of a batch go on while tokens travel (``overlap.overlap_in_halves``).

        A compiler of a whole layer leaves out what pauses.
        """
        self.counts_group = counts
        self.dispatch = torch._dynamo.disable(self.dispatch)
        self.combine = torch._dynamo.disable(self.combine)

    @property
    def _stopwatch(self) -> Any:
        """``meter``; None in a block that is compiled whole, where no clock can be read."""
        return None if torch.compiler.is_compiling() else self.meter

    @property
    def orders_block(self) -> bool:
        """Whether it decides what runs while tokens travel, or how: no compiler can follow."""
        ways = (self.counts_group, self.shared_experts, self.sends_once)
        return self.sends_float8 or any(way is not None for way in ways)

    @property
    def _in_half(self) -> bool:
        return self.counts_group is not None and in_half()

    def _pause(self) -> None:
        if self._in_half:
            pause()

    def _pause_for_a_hop(self, half: int) -> None:
        """In two hops: A's second one begins before B's first, and is over after it."""
        two_hops = self.sends_once is not None and len(self.sends_once.meshes) > 1
        if two_hops and current_half() == half:
            self._pause()

    # ``dispatch`` and ``combine`` in two steps each, for whoever computes while tokens travel.

    def send(self, *args: Any, **kwargs: Any) -> Turn:
        """Begin what ``dispatch`` does, with its arguments."""
        self._turn = turn = Turn()
        try:
            turn.sent, turn.counts, turn.metadata = self.dispatch(*args, **kwargs)
        finally:
            self._turn = None
        return turn

    def relay(self, turn: Turn) -> None:
        """Between ``send`` and ``receive``, which else does it: begin a second hop, if any."""
        if turn.rows is not None:
            with maybe_set_sparse_mesh():
                turn.rows.relay(turn)

    def relay_back(self, turn: Turn) -> None:
        """The same between ``send_back`` and ``collect``."""
        if turn.rows is not None:
            with maybe_set_sparse_mesh():
                turn.rows.relay_back(turn)

    def receive(self, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        """The rest of ``dispatch``: tokens by expert ``(R, D)``, and counts ``(e,)``."""
        exchange = turn.exchange
        # The context in which Titan's dispatch exchanges and permutes.
        assert exchange is not None, "send() has run"
        with maybe_set_sparse_mesh():
            if turn.rows is not None:
                routed_RD, counts_e, turn.metadata = turn.rows.receive(turn)
                self._dispatched = turn.metadata if self._sends_scores else None
                return routed_RD, counts_e
            if exchange.float8 == "out":  # in the order of experts while they are still packed
                packed_RW = exchange.arrived()
                _, packed_RW, indices, counts_e = self._permute(packed_RW, turn.counts)
                routed_RD = FinishSorted.apply(
                    turn.sent, exchange, packed_RW, indices, len(packed_RW)
                )
                shape = routed_RD.shape
            else:
                received_RD = Finish.apply(turn.sent, exchange)
                shape, routed_RD, indices, counts_e = self._permute(received_RD, turn.counts)
        turn.metadata = replace(turn.metadata, input_shape=shape, permuted_indices=indices)
        self._dispatched = turn.metadata if self._sends_scores else None
        return routed_RD, counts_e

    def send_back(self, turn: Turn, routed_output_RD: torch.Tensor) -> None:
        """Begin what ``combine`` does with outputs of experts ``(R, D)``."""
        metadata = turn.metadata
        with maybe_set_sparse_mesh():
            rows_RD = self._rows_back(routed_output_RD, metadata)
            if turn.rows is not None:
                turn.rows.start_back(rows_RD, turn, float8=self.sends_float8)
                return
            turn.exchange = self._exchange_back(metadata.input_splits, metadata.output_splits)
            turn.sent = Start.apply(rows_RD, turn.exchange)

    def collect(self, turn: Turn, x_TD: torch.Tensor) -> torch.Tensor:
        """The rest of ``combine``; ``x_TD`` are the tokens."""
        self.relay_back(turn)
        self._turn = turn
        try:
            return self.combine(turn.sent, turn.metadata, x_TD)
        finally:
            self._turn = None

    # The steps of Titan's dispatch and combine, which it calls by these private names
    # (torchtitan/models/common/token_dispatcher.py).
    def _local_reorder(self, x_TD, topk_scores_TK, topk_expert_ids_TK):
        turn = self._turn
        if turn is not None and self.sends_once is not None:
            hops, experts = self.sends_once, self.num_experts
            turn.rows = TokenRows(topk_scores_TK, topk_expert_ids_TK, hops, experts)
            return x_TD, topk_expert_ids_TK, topk_scores_TK  # how many rows is not known yet
        if turn is None or not self.sends_float8:
            return super()._local_reorder(x_TD, topk_scores_TK, topk_expert_ids_TK)
        # Of the tokens only their order: each is packed once, however often it is sent.
        _, indices_N, scores_N = super()._local_reorder(
            x_TD[:, :0], topk_scores_TK, topk_expert_ids_TK
        )
        return Select.apply(x_TD, indices_N, turn), indices_N, scores_N

    def _permute(self, routed_input_RD, num_global_tokens_per_local_expert_E):
        if self._turn is not None:  # nothing has come yet
            return (), routed_input_RD, None, num_global_tokens_per_local_expert_E
        return super()._permute(routed_input_RD, num_global_tokens_per_local_expert_E)

    def _unpermute(self, routed_output_RD, input_shape, permuted_indices):
        if self._turn is not None:  # as they were sent back
            return routed_output_RD
        return super()._unpermute(routed_output_RD, input_shape, permuted_indices)

    def _rows_back(
        self, routed_output_RD: torch.Tensor, metadata: AllToAllDispatchMetadata
    ) -> torch.Tensor:
        """Outputs of experts as the rows that go back."""
        if self._turn is not None or self.sends_once is None:
            return self._unpermute(
                routed_output_RD, metadata.input_shape, metadata.permuted_indices
            )
        scores_R = None if self._sends_scores else metadata.topk_scores_experts_sorted_N
        return AddUp.apply(
            routed_output_RD, metadata.permuted_indices, metadata.input_shape[0], scores_R
        )

    def send_scores(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Send the scores of the tokens dispatched last to their experts.

        Returns fp32 scores ``(R,)``, as they arrive, and int64 indices ``(R,)``, which sort them by
        expert; None if they are sorted: without expert parallelism, or where they came with rows.
        """
        metadata, self._dispatched = self._dispatched, None
        assert metadata is not None, "dispatch has run"
        scores_N = metadata.topk_scores_experts_sorted_N
        if self.sends_once is not None or not isinstance(metadata, AllToAllDispatchMetadata):
            return scores_N, None
        with maybe_set_sparse_mesh():
            scores_N = _on_this_mesh(scores_N)
            with _unchecked(scores_N, self._group):
                scores_R = all_to_all_single(
                    scores_N, metadata.output_splits, metadata.input_splits, self._ep_mesh
                )
            return _typed_like(scores_N, scores_R), metadata.permuted_indices

    def _add_up(
        self, routed_output_RD: torch.Tensor, metadata: LocalDispatchMetadata, x_TD: torch.Tensor
    ) -> torch.Tensor:
        """Titan's ``combine``, of outputs that have their scores or get them in a piece."""
        routed_ND = routed_output_RD
        if isinstance(metadata, AllToAllDispatchMetadata):
            with maybe_set_sparse_mesh():
                routed_RD = self._rows_back(routed_output_RD, metadata)
                routed_ND = self._combine_token_exchange(
                    routed_RD, self._group, metadata.input_splits, metadata.output_splits
                )
            routed_ND = _on_this_mesh(routed_ND)
        if not (self._sends_scores or self.sends_once):
            assert self.score_outputs is not None
            routed_ND = self.score_outputs(routed_ND, metadata.topk_scores_experts_sorted_N)
        index_ND = metadata.token_indices_experts_sorted_N.unsqueeze(-1).expand(-1, x_TD.shape[-1])
        return deterministic_scatter_add(torch.zeros_like(x_TD), index_ND, routed_ND)

    # Each exchange issues its collective itself: reports on hangs name the function that does.

    @property
    def _ep_mesh(self) -> DeviceMesh:
        assert self.ep_mesh is not None, "Titan exchanges tokens only when EP > 1"
        return self.ep_mesh

    @property
    def _group(self) -> Any:
        return (current_spmd_mesh() or self._ep_mesh).get_group("ep")

    def _exchange_back(self, input_splits: list[int], output_splits: list[int]) -> Exchange:
        float8 = "back" if self.sends_float8 else ""
        return Exchange(self._ep_mesh, output_splits, input_splits, float8=float8)

    def _token_count_exchange(
        self, num_local_tokens_per_expert_E: torch.Tensor, pg, ep_size: int
    ) -> torch.Tensor:
        """Tell every rank how many tokens it gets: ``(E,)`` int64 -> ``(EP, e)`` int64."""
        counts_EP_e = num_local_tokens_per_expert_E.view(ep_size, -1)
        if self._turn is not None and self._turn.rows is not None:
            counts_EP_e = self._turn.rows.counts_to_tell(num_local_tokens_per_expert_E)
        with _unchecked(counts_EP_e, pg):
            group = self.counts_group or self._ep_mesh
            received_EP_e = all_to_all_single(counts_EP_e, None, None, group)
        return _typed_like(counts_EP_e, received_EP_e)

    def _sync_token_count_exchange(
        self,
        num_local_tokens_per_expert_E: torch.Tensor,
        num_global_tokens_per_local_expert_EP_e: torch.Tensor,
        ep_size: int,
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        """As Titan's: waits for the counts, and reads how many rows to send and to expect."""
        received_EP_e = num_global_tokens_per_local_expert_EP_e
        if self._stopwatch is not None:
            # Here, so that the wait alone is timed: Titan's function then finds the counts there.
            with self._stopwatch.timing("wait"):
                received_EP_e = wait_tensor(received_EP_e)
        rows = None if self._turn is None else self._turn.rows
        if rows is None:
            counts_E, sends, expects = super()._sync_token_count_exchange(
                num_local_tokens_per_expert_E, received_EP_e, ep_size
            )
        else:
            counts = rows.counts_to_read(wait_tensor(received_EP_e))
            counts_E, sends = received_EP_e, []
            # Spelled as in Titan, whose selective policy knows by this call the
            # copies to the host that it saves.
            expects = [rows.read(counts.to(torch.device("cpu")).tolist())]
        if self._stopwatch is not None:
            self._stopwatch.tokens = sum(expects)
        return counts_E, sends, expects

    def _dispatch_token_exchange(
        self, routed_input_ND: torch.Tensor, pg, output_splits: list[int], input_splits: list[int]
    ) -> torch.Tensor:
        """Send tokens to the ranks of their experts: ``(N, D)`` -> ``(R, D)``, rank-major."""
        if (turn := self._turn) is not None:
            if turn.rows is not None:
                return turn.rows.start(routed_input_ND, turn, float8=self.sends_float8)
            packed_NW, turn.packed = turn.packed, None
            float8 = "" if packed_NW is None else "out"
            turn.exchange = Exchange(self._ep_mesh, input_splits, output_splits, float8=float8)
            return Start.apply(routed_input_ND, turn.exchange, packed_NW)
        timing = self._stopwatch.timing("travel") if self._stopwatch else contextlib.nullcontext()
        with _unchecked(routed_input_ND, pg), timing:
            received_RD = all_to_all_single(
                routed_input_ND, output_splits, input_splits, self._ep_mesh
            )
            if self._stopwatch is not None:
                # The collective returns at once: the time that it takes ends here.
                received_RD = wait_tensor(received_RD)
        return _typed_like(routed_input_ND, received_RD)

    def _combine_token_exchange(
        self, routed_output_RD: torch.Tensor, pg, input_splits: list[int], output_splits: list[int]
    ) -> torch.Tensor:
        """Send the experts' outputs back: ``(R, D)``, rank-major -> ``(N, D)``."""
        if self._turn is not None:
            return Finish.apply(routed_output_RD, self._turn.exchange)
        if spmd.is_type_checking():  # not in a recompute, which must do as the forward did
            self.shared_experts = None
        if self.shared_experts is not None or self.sends_float8:
            exchange = self._exchange_back(input_splits, output_splits)
            sent_RD = Start.apply(routed_output_RD, exchange)
            if self.shared_experts is not None:
                self.shared_experts.run_ahead()
            return Finish.apply(sent_RD, exchange)
        with _unchecked(routed_output_RD, pg):
            received_ND = all_to_all_single(
                routed_output_RD, input_splits, output_splits, self._ep_mesh
            )
        return _typed_like(routed_output_RD, received_ND)


class CountedHybridEPTokenDispatcher(HybridEPTokenDispatcher):
    """Titan's HybridEP dispatcher, which counts what it drops: deep_ep does so in silence.

    Its counts of an expert are of all rows that were sent to it. What would lie in the last row of
    the buffer, or behind it, is dropped (``csrc/hybrid_ep/extension/permute.cu`` of deep_ep, which
    counts rows from one). The counter stays on the device, so that a replayed CUDA graph counts,
    too. A recompute counts again: shares of its sums are right, the sums are not.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HybridEPTokenDispatcher.Config):
        pass

    rows: torch.Tensor
    """Rows that came, rows of them that were dropped, and the most that one pass needs room for,
    since somebody looked: int64 ``(3,)``."""
    worst = 0
    """Rows that come if all tokens go to this rank."""

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        super().wire_meshes(ep_mesh=ep_mesh)
        self.rows = torch.zeros(3, dtype=torch.int64, device=titan_utils.device_type)

    def dispatch(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E):
        routed_RD, counts_e, metadata = super().dispatch(
            x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
        )
        self.worst = len(x_TD) * most_rows_of_token(self)
        came = counts_e.detach().sum()
        room = len(routed_RD) - 1 if (self.non_blocking_capacity_factor or 1) < 1 else self.worst
        self.rows[:2].add_(torch.stack([came, (came - room).clamp(min=0)]))
        self.rows[2:].clamp_(min=came + 1)
        return routed_RD, counts_e, metadata


def most_rows_of_token(dispatcher: Any) -> int:
    """Rows that come to a rank if all ranks send it all, for each token of one of them."""
    ranks = dispatcher.ep_mesh.size()
    return ranks * min(dispatcher.num_experts // ranks, dispatcher.top_k)


def _on_this_mesh(x: torch.Tensor) -> torch.Tensor:
    """``x`` for the SPMD type checker, which types what is exchanged on another mesh."""
    return spmd.reinterpret_mesh(x, spmd.current_mesh()) if spmd.is_type_checking() else x


def _unchecked(sent: torch.Tensor, pg) -> contextlib.AbstractContextManager[None]:
    """A context without SPMD type checking, which has no rule for the functional collective."""
    if not spmd.is_type_checking():
        return contextlib.nullcontext()
    spmd.assert_type(sent, {pg: spmd.V})
    return spmd.no_typecheck()


def _typed_like(sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """``received`` with the types that the checker gives to the result of Titan's own exchange."""
    if spmd.is_type_checking():
        spmd.assert_type_like(received, sent)
    return received


def replace_configs(tree: Any, kind: type, replacement: Callable[[Any], Any]) -> None:
    """Put ``replacement(config)`` in place of each config of ``kind`` in a config or model spec."""
    for _, config, parent, key in list(tree.traverse(kind)):
        assert key is not None, "no such config is the root of its tree"
        if isinstance(parent, list):
            parent[int(key)] = replacement(config)
        else:
            setattr(parent, str(key), replacement(config))


def use_our_dispatchers(spec: ModelSpec) -> None:
    """Swap Titan's all-to-all and HybridEP dispatchers for ours in a model spec, in place.

    It swaps the exact stock classes only. DeepEP, the padded torchao dispatcher and a user's own
    subclass stay as they are.
    """
    ours: dict[type, Any] = {
        AllToAllTokenDispatcher.Config: FunctionalAllToAllTokenDispatcher.Config,
        HybridEPTokenDispatcher.Config: CountedHybridEPTokenDispatcher.Config,
    }

    def replacement(config: Any) -> Any:
        kind = ours.get(type(config))
        return derive(config, kind) if kind else config

    replace_configs(spec, BaseEPTokenDispatcher.Config, replacement)


def exchange_in_float8(model: nn.Module) -> None:
    """Let the MoE layers of ``model`` send in float8 what exchange.py says."""
    for module in model.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if isinstance(dispatcher, FunctionalAllToAllTokenDispatcher):
            dispatcher.sends_float8 = True
