# SPDX-License-Identifier: BSD-3-Clause
"""The exchanges of tokens of a job, decided once, before a model is parallelized."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from torchtitan.config import TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, BaseEPTokenDispatcher
from torchtitan.protocols.module import Module

from titan_ext.base.nodes import Nodes
from titan_ext.base.titan.batch import tokens_of_microbatch
from titan_ext.base.titan.parallelism import has_experts
from titan_ext.components.dispatch import FunctionalAllToAllTokenDispatcher
from titan_ext.components.exchange import ExchangeDtype, ExchangeRows
from titan_ext.components.rows import sends_fewer

SaveAllToAll = Literal["auto", "always", "never"]
OverlapExchanges = Literal["none", "shared_experts", "halves"]


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """The exchanges of tokens between expert-parallel ranks.

    The same on all ranks and in all chunks of a pipeline: every rank makes the meshes that it asks
    for, whatever it holds of the model.
    """

    ep: int = 1
    """How many ranks exchange tokens; 1 if none travel."""
    saved: bool = True
    """Whether selective activation checkpointing saves what they deliver. Else its recompute sends
    the tokens again."""
    overlap: OverlapExchanges = "none"
    """What computes while tokens travel: shared experts while they travel back, the other half of a
    batch and shared experts, or nothing."""
    dtype: ExchangeDtype | None = None
    """In what tokens travel to their experts; None for their own dtype."""
    rows: ExchangeRows = "expert"
    """Whether a token travels once for each of its experts, or once to a rank or a node of them."""
    nodes: int = 0
    """Among how many nodes, if once to each."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Lines for the log: which key does nothing, and why."""

    def rows_of(self, top_k: int, num_experts: int) -> ExchangeRows:
        """``rows`` of one MoE layer: "expert" where no rank or node has two of a token's."""
        fewer = sends_fewer(top_k, num_experts, self.nodes or self.ep)
        return self.rows if fewer else "expert"

    def order_blocks(self, model: Decoder.Config) -> bool:
        """True if blocks of ``model`` wait for them, or run in halves: none is compiled whole."""
        shares = (
            moe.shared_experts is not None for _, moe, *_ in cast(Any, model).traverse(MoE.Config)
        )
        overlaps = self.overlap == "halves" or (self.overlap == "shared_experts" and any(shares))
        return overlaps or self.dtype is not None or self.rows != "expert"


def resolve_exchanges(
    model: Decoder.Config,
    parallelism: Any,
    training: TrainingConfig,
    parallel_dims: ParallelDims,
    nodes: Nodes,
    *,
    compiled: bool,
) -> Exchanges:
    """Decide from the config: ``parallelism`` is Titan's section, with its defaults, or ours.

    ``model`` is the whole model's config, of which the chunk of a pipeline stage may have no MoE
    layer. The ranks that exchange tokens are neighbours, so they span nodes if a node has fewer.
    """
    ep = parallel_dims.ep if has_experts(model) else 1
    notes: list[str] = []
    # Where Titan's exchange is a functional collective, which its selective policy saves.
    stock_saves = compiled or parallelism.spmd_backend != "spmd_types"
    save: SaveAllToAll = getattr(parallelism, "save_all_to_all", "auto")
    saved = save == "always" or (save == "auto" and (stock_saves or ep > nodes.ranks))
    overlap: OverlapExchanges = getattr(parallelism, "overlap_exchanges", "shared_experts")
    if overlap == "halves" and (why_not := _no_halves(parallelism, training, ep)):
        notes.append(f'parallelism.overlap_exchanges = "halves" does nothing: {why_not}.')
        overlap = "shared_experts"
    if overlap == "shared_experts" and (ep == 1 or parallel_dims.tp_enabled):
        overlap = "none"
    rows: ExchangeRows = getattr(parallelism, "exchange_rows", "expert")
    among = nodes.among(ep) if rows == "node" else 0
    if rows == "node" and not among:
        why = f"{ep} ranks exchange tokens, and NVLink joins {nodes.nvlink_domain}"
        notes.append(f'parallelism.exchange_rows = "node" works as "rank": {why}.')
        rows = "rank"
    if rows != "expert" and not any(
        # _owner is the class that a config builds; of Titan's dispatchers ours alone has this.
        hasattr(config._owner, "sends_once")
        and sends_fewer(config.top_k, config.num_experts, among or ep)
        for _, config, *_ in cast(Any, model).traverse(AllToAllTokenDispatcher.Config)
        if ep > 1
    ):
        key = f'parallelism.exchange_rows = "{rows}"'
        notes.append(f"{key} does nothing: no {rows} here has two experts of a token.")
        rows, among = "expert", 0
    return Exchanges(
        ep=ep,
        saved=saved,
        overlap=overlap,
        dtype=getattr(parallelism, "exchange_dtype", None) if ep > 1 else None,
        rows=rows,
        nodes=among,
        notes=tuple(notes),
    )


def without_halves(parallelism: Any) -> Any:
    """A ``[parallelism]`` section whose batches run whole; the same object if they do already."""
    if getattr(parallelism, "overlap_exchanges", "none") != "halves":
        return parallelism
    return replace(parallelism, overlap_exchanges="shared_experts")


def wrong_dispatchers(model: Module.Config, changed: Mapping[str, str]) -> Iterator[str]:
    """A message for each of the exchanges ``changed`` that a dispatcher of the model lacks."""
    for key, value in changed.items():
        for _, config, _, _ in model.traverse(BaseEPTokenDispatcher.Config):
            if not isinstance(config, FunctionalAllToAllTokenDispatcher.Config):
                yield (
                    f"parallelism.{key} = {value!r} needs TorchTitan's all-to-all dispatcher; this "
                    f"model has {type(config).__qualname__.removesuffix('.Config')}, whose kernels "
                    "send tokens as they are."
                )


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
        """The chance that a token has none of a rank's experts, of so many chosen groups."""
        here = open_groups * min(of_rank, of_group)
        return math.comb(may - here, router.top_k) / math.comb(may, router.top_k)

    missed = sum(
        math.comb(on_rank, n) * math.comb(groups - on_rank, chosen - n) * misses(n)
        for n in range(min(on_rank, chosen) + 1)
    ) / math.comb(groups, chosen)
    return ep * (1 - missed)


def _no_halves(parallelism: Any, training: TrainingConfig, ep: int) -> str:
    """The reason why a batch does not run as two halves; "" if it does."""
    if ep == 1:
        return "no tokens travel (EP 1)"
    tokens, of_sequence = tokens_of_microbatch(training, parallelism)
    return "" if tokens > of_sequence else "a forward has one sequence"
