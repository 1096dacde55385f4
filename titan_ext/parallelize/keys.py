# SPDX-License-Identifier: BSD-3-Clause
"""The configuration keys that titan_ext adds to Titan's sections; ``limits`` checks them, once a
config is whole. Each tells its ``KeyFacts``, from which ``FACTS`` is made.

They subclass Titan's own dataclasses, so each is an ordinary Titan key with a command-line flag.
Titan prints it with the config and reads the section as always.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torchtitan.config import DebugConfig as TitanDebugConfig
from torchtitan.config import ParallelismConfig as TitanParallelismConfig

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.base.facts import LOSSY, ROUNDING, Effect, KeyFacts, facts_of
from titan_ext.base.messages import table_flag
from titan_ext.base.titan.batch import GLOBAL_BATCH, LOCAL_BATCH
from titan_ext.components.exchange import ExchangeDtype, ExchangeRows
from titan_ext.components.exchange_policy import OverlapExchanges, SaveAllToAll
from titan_ext.fsdp.settings import Float8AllGather, Reshard, read_reshard
from titan_ext.fsdp.units import FSDPWrap


@dataclass(kw_only=True, slots=True)
class ParallelismConfig(TitanParallelismConfig):
    """Titan's ``parallelism`` section with the keys that decide what FSDP gathers and when."""

    fsdp_wrap: Annotated[FSDPWrap, KeyFacts(off="block")] = "auto"
    """The FSDP units of a transformer block:

    - "block": the whole block, as in stock Titan.
    - "submodule": two units, attention with its norm, and MoE or feed-forward with its norm. Half a
      block is unsharded at a time. More, smaller collectives.
    - "experts": the routed experts, and all else in the block. As many collectives as "block" when
      expert_parallel_degree > 1; the experts are gathered only while they run. Not with compile.
    - "auto": "block" without expert parallelism, and with experts that lie whole on a rank, which
      FSDP never gathers. "submodule" if the experts' shards lie on one node. Else "experts", two
      units ahead in backward, and two reduce-scatters that may run behind it.

    The losses and gradient norms do not depend on it. See docs/fsdp.md."""

    # A wider type for a field of the parent.
    fsdp_reshard_after_forward: Annotated[Reshard, KeyFacts(off="default")] = (  # pyrefly: ignore[bad-override]
        "default"
    )
    """When FSDP frees a unit's parameters, after its forward or not (see docs/fsdp.md):

    - "default": yes, except in a pipeline, and except the last norm and head.
    - "always": yes, the head's too.
    - "never": they stay until backward.
    - a number of ranks: FSDP shards them over a smaller world of that many ranks, which must divide
      the shard axis. It does not limit concurrent all-gathers. With spmd_backend "partial_dtensor"
      only, for units whose parameters nothing but FSDP splits."""

    fsdp_reshard_groups: Annotated[
        dict[str, Reshard], table_flag(read_reshard), KeyFacts(off={})
    ] = field(default_factory=dict)
    """The same for some units: by kind (embedding, attention, moe, feed_forward, experts, block,
    head, vision) or by pattern for their names ("layers.0.*", "layers.[0-3].moe"). A pattern beats
    a kind, a later pattern beats an earlier one, and both beat fsdp_reshard_after_forward."""

    fsdp_prefetch: Annotated[int | str, KeyFacts()] = "auto"
    """Distance of prefetch from the running unit, in forward and in backward: a number of units (0,
    1, 2, ...), or a size ("512MiB"). A size takes as many units as fit, by their gathered bytes on
    one rank. "auto": one unit; in backward two from an attention unit, or two from each where
    fsdp_wrap "auto" says so."""

    save_all_to_all: Annotated[SaveAllToAll, KeyFacts(off="auto")] = "auto"
    """Policy of selective activation checkpointing (stock's, and fp8) for what the all-to-alls
    of expert parallelism deliver, 2 * top_k * dim values a token and MoE layer:

    - "always": the recompute sends no token again.
    - "never": it sends all of them again.
    - "auto": saved if expert_parallel_degree spans nodes; else as in stock Titan, which sends again
      with spmd_backend "spmd_types" in eager mode, and saves otherwise."""

    overlap_exchanges: Annotated[
        OverlapExchanges, KeyFacts(ROUNDING, off="none", same=("shared_experts",))
    ] = "shared_experts"
    """Computation while tokens travel between expert-parallel ranks (see docs/exchanges.md):

    - "shared_experts": the shared experts of a MoE layer, while the outputs of its routed experts
      travel back, in forward and backward. The results stay the same. Only with expert parallelism,
      and without tensor parallelism and compile, which orders operations by itself.
    - "halves": MoE blocks run their batch as two halves that take turns, so it needs two sequences
      or more on a rank; shared experts, too. Changes floating-point rounding: weight gradients are
      sums of two halves.
    - "none": nothing."""

    exchange_dtype: Annotated[ExchangeDtype | None, KeyFacts(LOSSY, off=None)] = None
    """Dtype of tokens that travel to other ranks' experts, and of gradients of what comes back.
    "float8": e4m3 and a byte of scale for 128 values, 0.504 of bfloat16's bytes; lossy. The other
    two exchanges stay as they are. None: mixed_precision_param. See docs/exchanges.md."""

    exchange_rows: Annotated[ExchangeRows, KeyFacts(ROUNDING, off="expert")] = "expert"
    """Number of times that a token travels to a rank with several of its experts. "expert": once
    for each. "rank": once; what goes back is one sum of their outputs, times the token's scores,
    made in float32. "node": once to each node of them, and from there to the ranks; where expert
    parallelism does not span several whole nodes it is "rank". Changes floating-point rounding.
    Nothing changes where no rank can have two of a token's experts. See docs/exchanges.md."""

    # It rounds by one all-reduce, whose order of ranks is the backend's.
    fsdp_replicate: Annotated[
        list[str],
        KeyFacts(ROUNDING, off=[], eager_only="it refuses hooks of FSDP in a block"),
    ] = field(default_factory=list)
    """Parameters that every rank holds whole instead of sharded: "router", "norms", "adapters" (of
    LoRA), or patterns for names of modules or parameters ("layers.0.*"). FSDP gathers nothing for
    them; one all-reduce a unit sums their gradients over the data axes. The computation stays in
    mixed_precision_param, and the results stay the same. See docs/lora.md."""

    fsdp_quantize_frozen: Annotated[
        list[str],
        KeyFacts(LOSSY, off=[], narrow=True, eager_only="torchao keeps NF4Tensor out of it"),
    ] = field(default_factory=list)
    """Frozen linears whose shards are held and gathered in torchao's 4-bit NF4 from the first
    forward on (QLoRA), by patterns for their names ("layers.*.attention"). "*": all in the blocks,
    except routers and those whose size NF4 does not fit. Not with tensor parallelism, compile, CPU
    offload, or on modules that fsdp_replicate names. See docs/lora.md."""

    fsdp_float8_all_gather: Annotated[Float8AllGather, KeyFacts(LOSSY, off="none")] = "none"
    """Weights that FSDP's all-gathers send in e4m3 and a byte of scale for 128 values, 0.504 of
    bfloat16's bytes. That rounds the gathered weights; master weights and checkpoints stay as they
    are. "experts": routed experts; needs expert_parallel_degree > 1 or fsdp_wrap "experts".
    "blocks": all matrices of blocks, routed experts too. Routers, norms and biases stay exact, and
    so do embedding and head. See docs/fsdp.md."""

    fsdp_expert_reduce_scatter: Annotated[
        Literal["bfloat16"] | None, KeyFacts(ROUNDING, off=None, narrow=True)
    ] = None
    """Form of routed experts' gradients in FSDP's reduce-scatters. "bfloat16": the gradients as
    they are, half of the bytes of float32, by an all-to-all; each rank sums them in float32. None:
    mixed_precision_reduce. Needs what fsdp_float8_all_gather "experts" needs, and no pipeline."""


@dataclass(kw_only=True, slots=True)
class DebugConfig(TitanDebugConfig):
    """Titan's ``debug`` section with the watchdog over the order of collectives."""

    record_collectives: Annotated[bool, KeyFacts()] = False
    """Note every collective of every rank in a file before it is issued, and compare the ranks at
    steps that are logged or saved. After a hang or an abort, python -m titan_ext.debug.hang_report
    names the late rank, the position in the order and the unit. See docs/running.md."""


COMPILE = "compile.enable"
_ROUNDS = KeyFacts(ROUNDING)
FACTS: Mapping[str, KeyFacts] = {
    **facts_of("parallelism", ParallelismConfig),
    **facts_of("activation_checkpoint", FP8AC.Config),
    **facts_of("debug", DebugConfig),
    # Titan's
    "activation_checkpoint": KeyFacts(off=None),
    "parallelism.enable_sequence_parallel": KeyFacts(off=True),
    COMPILE: KeyFacts(ROUNDING, off=False),  # compiled operations round elsewhere
    LOCAL_BATCH: _ROUNDS,
    GLOBAL_BATCH: _ROUNDS,
    "parallelism.expert_parallel_degree": _ROUNDS,
    "parallelism.data_parallel_replicate_degree": _ROUNDS,
}
"""Facts of keys, by dotted key; of others nobody asks for any."""


def effect_of(change: Mapping[str, Any], now: Mapping[str, Any]) -> Effect:
    """Effect on results of a ``change`` of the values that are ``now``, by dotted key."""
    found = [
        FACTS[key].effect
        for key in change.keys() & FACTS.keys()
        if not all(map(FACTS[key].is_same, (change[key], now.get(key))))
    ]
    return max(found, key=list(Effect).index, default=Effect.NONE)
