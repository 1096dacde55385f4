# SPDX-License-Identifier: BSD-3-Clause
"""What a job does with its exchanges of tokens, decided once, when a model is parallelized.

The passes, the plan, the budget and the record of a run read the same object, so that none of them
says what another does not do.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from torch import nn
from torchtitan.config import TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.tools.logging import logger

from titan_ext.base.op_cost import nvlink_domain, ranks_per_node
from titan_ext.base.titan.batch import tokens_of_microbatch
from titan_ext.components.exchange import ExchangeDtype, ExchangeRows
from titan_ext.components.rows import sends_fewer

SaveAllToAll = Literal["auto", "always", "never"]
OverlapExchanges = Literal["none", "halves"]
_AS_STOCK: dict[str, Any] = {
    "overlap_exchanges": "none",
    "exchange_dtype": None,
    "exchange_rows": "expert",
}


@dataclass(frozen=True)
class ExchangePolicy:
    """The exchanges of tokens between expert-parallel ranks.

    Attributes:
        ep: How many ranks exchange tokens; 1 if none travel.
        saved: Whether selective activation checkpointing saves what they deliver. Else its
            recompute sends the tokens again.
        stock_saves: The same of stock Titan's selective policy.
        overlap: What computes while tokens travel: the other half of a batch, shared experts
            while they travel back, or nothing.
        dtype: In what tokens travel to their experts; None for their own dtype.
        rows: Whether a token travels once for each of its experts, or once to a rank or a node of
            them.
        nodes: Among how many nodes, if once to each.
    """

    ep: int
    saved: bool
    stock_saves: bool
    overlap: Literal["none", "shared experts", "halves"]
    dtype: ExchangeDtype | None
    rows: ExchangeRows = "expert"
    nodes: int = 0

    @classmethod
    def decide(
        cls,
        parallelism: Any,
        training: TrainingConfig,
        parallel_dims: ParallelDims,
        *,
        compiled: bool,
    ) -> "ExchangePolicy":
        """Decide from the config: ``parallelism`` is Titan's section, with its defaults, or ours.

        The ranks that exchange tokens are neighbours, so that they span nodes if a node has fewer.
        All ranks decide alike. The log says why a key does nothing.
        """
        ep = parallel_dims.ep
        # Where Titan's exchange is a functional collective, which its selective policy saves.
        stock_saves = compiled or parallelism.spmd_backend != "spmd_types"
        save: SaveAllToAll = getattr(parallelism, "save_all_to_all", "auto")
        saved = save == "always"
        if save == "auto":
            saved = stock_saves or ep > ranks_per_node()
        overlap = "none"
        may_overlap = ep > 1 and not (parallel_dims.tp_enabled or compiled)
        if may_overlap and getattr(parallelism, "overlap_shared_experts", True):
            overlap = "shared experts"
        if getattr(parallelism, "overlap_exchanges", "none") == "halves":
            if why_not := _no_halves(parallelism, training, parallel_dims):
                logger.info(f'parallelism.overlap_exchanges = "halves" does nothing: {why_not}.')
            else:
                overlap = "halves"
        dtype = getattr(parallelism, "exchange_dtype", None)
        rows: ExchangeRows = getattr(parallelism, "exchange_rows", "expert")
        nodes = nodes_among(ep) if rows == "node" else 0
        if rows == "node" and not nodes:
            why = f"{ep} ranks exchange tokens, and NVLink joins {nvlink_domain()}"
            logger.info(f'parallelism.exchange_rows = "node" does as "rank": {why}.')
            rows = "rank"
        return cls(ep, saved, stock_saves, overlap, dtype, rows, nodes)

    def of_model(self, model: Decoder.Config) -> "ExchangePolicy":
        """This policy for a whole model, of which a pipeline stage may have no MoE layer.

        Ranks that decide by their own part make other process groups than the rest, which hangs.
        """
        if self.rows == "expert" or any(
            hasattr(dispatcher._owner, "sends_once")
            and sends_fewer(dispatcher.top_k, dispatcher.num_experts, self.nodes or self.ep)
            for _, dispatcher, *_ in cast(Any, model).traverse(AllToAllTokenDispatcher.Config)
            if self.ep > 1
        ):
            return self
        key = f'parallelism.exchange_rows = "{self.rows}"'
        logger.info(f"{key} does nothing: no {self.rows} here has two experts of a token.")
        return replace(self, rows="expert", nodes=0)

    def log_saved(self, model: Decoder) -> None:
        """Say what selective activation checkpointing does with the exchanges, and its price."""
        layers = cast(Any, model.config).layers
        moe = next((layer.moe for layer in layers if layer.moe is not None), None)
        if moe is None:
            return
        early = getattr(moe.routed_experts.token_dispatcher, "sends_scores", False)
        # What combine brings back is not read again where scores were applied before.
        exchanges = 1 if early or self.rows != "expert" else 2
        rows = moe.router.top_k if self.rows == "expert" else ranks_of_token(moe.router, self.ep)
        mib = exchanges * rows * cast(Any, model.config).dim * 2 * 1024 / 2**20
        where = "on one node" if self.ep <= ranks_per_node() else "across nodes"
        does = (
            "are saved: that keeps"
            if self.saved
            else "run again in the recompute: saving them keeps"
        )
        logger.info(
            f"All-to-alls (EP {self.ep}, {where}) {does} {mib:.1f} MiB in bf16 for 1024 tokens and "
            "a MoE layer (parallelism.save_all_to_all)"
        )

    def leave_with(self, model: nn.Module) -> None:
        """Let ``exchange_policy_of`` find this as long as the model lives."""
        model.__dict__["_exchanges"] = self


def exchange_policy_of(model: nn.Module) -> ExchangePolicy | None:
    """What was decided for a model or pipeline chunk; None if titan_ext did not parallelize it."""
    return cast(Any, model).__dict__.get("_exchanges")


def changed_exchanges(parallelism: Any) -> dict[str, str]:
    """The keys of a ``[parallelism]`` section with which tokens do not travel as in stock.

    A stock section has none of them.
    """
    return {
        key: value
        for key, stock in _AS_STOCK.items()
        if (value := getattr(parallelism, key, stock)) != stock
    }


def nodes_among(ep: int) -> int:
    """In how many nodes ``ep`` ranks lie that exchange tokens in two hops.

    A node is what NVLink joins. 0 if it is one, if not all are whole, or if each has one rank.
    """
    joined = nvlink_domain()
    return 0 if ep % joined or joined in (1, ep) else ep // joined


def ranks_of_token(router: TokenChoiceTopKRouter.Config, ep: int) -> float:
    """To how many of ``ep`` ranks a token goes on average, if no expert is likelier than another.

    A token chooses among all experts, or among those of some groups (node-limited routing).
    """
    experts, groups = router.num_experts, router.num_expert_groups or 1
    chosen = router.num_limited_groups or 1 if groups > 1 else 1
    of_group, of_rank = experts // groups, experts // ep
    on_rank = max(of_rank // of_group, 1)  # groups of which a rank has experts
    may = chosen * of_group

    def misses(open_groups: int) -> float:
        """Of a rank with experts of so many chosen groups, the chance that a token has none."""
        here = open_groups * min(of_rank, of_group)
        return math.comb(may - here, router.top_k) / math.comb(may, router.top_k)

    missed = sum(
        math.comb(on_rank, n) * math.comb(groups - on_rank, chosen - n) * misses(n)
        for n in range(min(on_rank, chosen) + 1)
    ) / math.comb(groups, chosen)
    return ep * (1 - missed)


def _no_halves(parallelism: Any, training: TrainingConfig, parallel_dims: ParallelDims) -> str:
    """Why a batch does not run as two halves; "" if it does."""
    if not parallel_dims.ep_enabled:
        return "no tokens travel (EP 1)"
    pipelined = parallelism if parallel_dims.pp_enabled else None
    tokens, of_sequence = tokens_of_microbatch(training, pipelined)
    return "" if tokens > of_sequence else "a forward has one sequence"
