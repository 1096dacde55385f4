# SPDX-License-Identifier: BSD-3-Clause
"""The configuration keys that titan_ext adds to Titan's sections, and which do not go together.

They subclass Titan's own dataclasses, so each is an ordinary Titan key with a command-line flag.
Titan prints it with the config and reads the section as always.
"""

import os
from dataclasses import dataclass, field
from typing import Annotated, Literal, cast

import torch
from torchtitan.config import DebugConfig as TitanDebugConfig
from torchtitan.config import ParallelismConfig as TitanParallelismConfig
from torchtitan.config import TrainingConfig
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model import BaseModel

from titan_ext.base.messages import are_checked_later, set_known_key, table_flag
from titan_ext.components.exchange import ExchangeDtype, ExchangeRows
from titan_ext.components.exchange_policy import OverlapExchanges, SaveAllToAll, changed_exchanges
from titan_ext.fsdp.make_plan import make_plan
from titan_ext.fsdp.nf4 import find_frozen_linears
from titan_ext.fsdp.plan import ShardSizes
from titan_ext.fsdp.settings import (
    ALL_GATHER,
    EXPERT_REDUCE_SCATTER,
    QUANTIZE_FROZEN,
    FSDPSettings,
    Reshard,
    check_divides,
    read_reshard,
)
from titan_ext.fsdp.units import (
    REPLICATE,
    FSDPWrap,
    Wrap,
    find_replicated,
    plan_units,
    resolve_wrap,
    units_without,
    vision_units,
)

_SPMD_BACKENDS = ("spmd_types", "partial_dtensor")


@dataclass(kw_only=True, slots=True)
class ParallelismConfig(TitanParallelismConfig):
    """Titan's ``parallelism`` section with the keys that decide what FSDP gathers and when."""

    fsdp_wrap: FSDPWrap = "auto"
    """
    What one FSDP unit of a transformer block is:

    - "block": the whole block, as in stock Titan.
    - "submodule": two units, attention with its norm, and MoE or feed-forward with its norm. Half a
      block is unsharded at a time. More, smaller collectives.
    - "experts": the routed experts, and all else in the block. As many collectives as "block" when
      expert_parallel_degree > 1; the experts are gathered only while they run. Not with compile.
    - "auto": "block" without expert parallelism. With it, "submodule" if the experts' shards lie on
      one node, or whole on a rank. Else "experts", two units ahead in backward, two buffers.

    The losses and gradient norms do not depend on it. See docs/fsdp_units.md.
    """

    # A wider type for a field of the parent.
    fsdp_reshard_after_forward: Reshard = "default"  # pyrefly: ignore[bad-override]
    """
    Whether FSDP frees a unit's parameters after its forward (see docs/fsdp_memory.md):

    - "default": yes, except in a pipeline, and except the last norm and head and small units
      outside the blocks.
    - "always": yes, the head's too.
    - "never": they stay until backward.
    - a number of ranks: FSDP shards them over a smaller world of that many ranks, which must divide
      the shard axis. It does not limit concurrent all-gathers. With spmd_backend "partial_dtensor"
      only, for units whose parameters nothing but FSDP splits.
    """

    fsdp_reshard_groups: Annotated[dict[str, Reshard], table_flag(read_reshard)] = field(
        default_factory=dict
    )
    """
    The same for some units: by kind (embedding, attention, moe, feed_forward, experts, block, head,
    vision) or by pattern for their names ("layers.0.*", "layers.[0-3].moe"). A pattern beats a
    kind, a later pattern beats an earlier one, and both beat fsdp_reshard_after_forward.
    """

    fsdp_prefetch: int | str = "auto"
    """
    How far ahead of the running unit to gather: a number of units (0, 1, 2, ...), or a size
    ("512MiB"). A size takes as many units as fit, by their gathered bytes on one rank. "auto": one
    unit; in backward two from an attention unit, or two from each where fsdp_wrap "auto" says so.
    """

    fsdp_prefetch_backward: int | str | None = None
    """The same in backward. None: as fsdp_prefetch."""

    fsdp_reduce_scatter_buffers: int | Literal["auto"] = "auto"
    """
    How many inputs of reduce-scatters may live at the same time. 1 is FSDP2's default: backward
    waits for one reduce-scatter before it starts the next. More let backward go on, for the bytes
    of a unit's gradients each. They also give reduce-scatters a process group of their own, so that
    these do not wait for all-gathers. On a GPU that is a second communicator (0.5 to 0.7 GiB with
    NCCL). "auto": chosen with fsdp_wrap; 1 where gathers stay on a node.
    """

    save_all_to_all: SaveAllToAll = "auto"
    """
    Whether selective activation checkpointing (stock's, and policy fp8) saves what the all-to-alls
    of expert parallelism deliver, 2 * top_k * dim values a token and MoE layer:

    - "always": the recompute sends no token again.
    - "never": it sends all of them again.
    - "auto": saved if expert_parallel_degree spans nodes; else as in stock Titan, which sends again
      with spmd_backend "spmd_types" in eager mode, and saves otherwise.
    """

    overlap_shared_experts: bool = True
    """
    Run the shared experts of a MoE layer while the outputs of its routed experts travel back to
    their ranks, in forward and backward. The results stay the same. Only with expert parallelism,
    and without tensor parallelism and compile, which orders operations by itself.
    """

    overlap_exchanges: OverlapExchanges = "none"
    """
    What runs while tokens travel between expert-parallel ranks. "halves": MoE blocks run their
    batch as two halves that take turns, so it needs two sequences or more on a rank. Other
    rounding: weight gradients are sums of two halves. See docs/fsdp_units.md.
    """

    exchange_dtype: ExchangeDtype | None = None
    """
    What tokens travel in to the experts of other ranks, and gradients of what comes back. "float8":
    e4m3 and a byte of scale for 128 values, 0.504 of bfloat16's bytes; lossy. The other two
    exchanges stay as they are. None: mixed_precision_param. See docs/fsdp_units.md.
    """

    exchange_rows: ExchangeRows = "expert"
    """
    How often a token travels to a rank where several of its experts live. "expert": once for each.
    "rank": once; what goes back is one sum of their outputs, times the token's scores, made in
    float32. "node": once to each node of them, and from there to the ranks; where expert
    parallelism does not span several whole nodes it is "rank". Other rounding. Nothing changes
    where no rank can have two of a token's experts. See docs/fsdp_units.md.
    """

    fsdp_replicate: list[str] = field(default_factory=list)
    """
    Parameters that every rank holds whole instead of sharded: "router", "norms", "adapters" (of
    LoRA), or patterns for names of modules or parameters ("layers.0.*"). FSDP gathers nothing for
    them; one all-reduce a unit sums their gradients over the data axes. The computation stays in
    mixed_precision_param, and the results stay the same. See docs/lora.md.
    """

    fsdp_quantize_frozen: Literal["nf4"] | None = None
    """
    Hold and gather the shards of frozen linears in fewer bits from the first forward on (QLoRA).
    "nf4" is torchao's 4-bit NF4. Not with tensor parallelism, compile, CPU offload, or on modules
    that fsdp_replicate names. See docs/lora.md.
    """

    fsdp_quantize_frozen_modules: list[str] = field(default_factory=list)
    """
    The linears that fsdp_quantize_frozen quantizes, by patterns for their names
    ("layers.*.attention"). Empty: all frozen ones in the blocks, except routers and those whose
    size NF4 does not fit.
    """

    fsdp_all_gather: Literal["float8"] | None = None
    """
    What FSDP's all-gathers of blocks send. "float8": their matrices, routed experts too, in e4m3
    and a byte of scale for 128 values. Routers, norms and biases stay exact, and so do embedding
    and head. That rounds the gathered weights. None: mixed_precision_param. See docs/fsdp_units.md.
    """

    fsdp_expert_all_gather: Literal["float8"] | None = None
    """
    What FSDP's all-gathers of routed experts send. "float8": e4m3 and a byte of scale for 128
    values, 0.504 of bfloat16's bytes. That rounds the gathered weights; master weights and
    checkpoints stay as they are. None: mixed_precision_param. Needs expert_parallel_degree > 1 or
    fsdp_wrap "experts". See docs/fsdp_units.md.
    """

    fsdp_expert_reduce_scatter: Literal["bfloat16"] | None = None
    """
    What FSDP's reduce-scatters of routed experts' gradients send. "bfloat16": the gradients as they
    are, half of the bytes of float32, by an all-to-all; each rank sums them in float32. None:
    mixed_precision_reduce. Needs what fsdp_expert_all_gather needs, and no pipeline.
    """

    __setattr__ = set_known_key

    def __post_init__(self) -> None:
        TitanParallelismConfig.__post_init__(self)
        if not are_checked_later():
            check_parallelism(self)


@dataclass(kw_only=True, slots=True)
class DebugConfig(TitanDebugConfig):
    """Titan's ``debug`` section with the watchdog over the order of collectives."""

    record_collectives: bool = False
    """
    Record every collective of every rank outside its process before it is issued, and compare the
    ranks. Reports on a hang, an abort or a silent mismatch name the ranks, the position in the
    order and the units. Also checks gradients for NaN and infinity before a rank reduces them.
    Costs some 50 microseconds a collective. See docs/hangs_and_faults.md.
    """

    __setattr__ = set_known_key


def check_parallelism(
    parallelism: TitanParallelismConfig,
    training: TrainingConfig | None = None,
    *,
    compiled: bool = False,
) -> FSDPSettings:
    """Return the FSDP settings of a section, checked with the keys around them.

    Raises ValueError for a value that a key cannot have, or keys that do not go together.

    Args:
        parallelism: Titan's section or ours. A stock section (a drop-in model spec under the
            stock trainer) has none of our keys; they read as their defaults.
        training: Titan's section, where it is known.
    """
    settings = FSDPSettings.from_config(parallelism, training)
    if parallelism.spmd_backend not in _SPMD_BACKENDS:
        raise ValueError(
            f"parallelism.spmd_backend is {parallelism.spmd_backend!r}, which titan_ext does not "
            "support (TorchTitan removed it after 0.3); expected one of "
            f"{', '.join(_SPMD_BACKENDS)}."
        )
    if settings.wrap == "experts" and compiled:
        raise ValueError(
            'parallelism.fsdp_wrap = "experts" does not go with compile.enable = true: FSDP would '
            'gather the experts inside a compiled block; expected "submodule" or "block".'
        )
    for key, value in changed_exchanges(parallelism).items():
        if key == "overlap_exchanges":
            _check_halves(parallelism, compiled)
        else:
            _check_exchanges(f'parallelism.{key} = "{value}"', parallelism, compiled)
    if settings.replicate:
        _check_replicate(parallelism, compiled)
    if settings.quantize_frozen and parallelism.tensor_parallel_degree > 1:
        raise ValueError(
            f"{QUANTIZE_FROZEN} needs parallelism.tensor_parallel_degree = 1: NF4Tensor can be "
            "sharded only once, along its rows."
        )
    if settings.quantize_frozen and compiled:
        raise ValueError(
            f"{QUANTIZE_FROZEN} does not go with compile.enable = true: torchao keeps NF4Tensor "
            "out of torch.compile."
        )
    for key, value, _ in settings.collectives:
        if value is not None and key != ALL_GATHER:
            _check_experts_are_sharded(key, settings.wrap, parallelism)
    if settings.expert_reduce_scatter and parallelism.pipeline_parallel_degree > 1:
        raise ValueError(
            f"{EXPERT_REDUCE_SCATTER} needs parallelism.pipeline_parallel_degree = 1: a pipeline "
            "sums the gradients of its microbatches in float32 before FSDP sends them."
        )
    for key, value in settings.reshard_by_key.items():
        if isinstance(value, int):
            _check_reshard_world(key, value, parallelism)
    return settings


def check_unit_names(model: BaseModel.Config, parallelism: TitanParallelismConfig) -> None:
    """Raise ValueError for names in our keys that are not in the model.

    Also for a unit of another ``fsdp_wrap``, or one that cannot be resharded to a number of ranks.
    Builds the model on the meta device, if there are names or such a number.
    """
    settings = FSDPSettings.from_config(parallelism)
    quantizes = settings.quantize_frozen is not None
    reshards_to_ranks = any(isinstance(n, int) for n in settings.reshard_by_key.values())
    if not (settings.reshard_groups or settings.replicate or quantizes or reshards_to_ranks):
        return
    with torch.device("meta"):
        built = cast(Decoder, model.build())
    replicated = find_replicated(built, settings.replicate, is_chunk=False)
    if quantizes:
        shards = _shard_axis(parallelism)
        names = settings.quantize_frozen_modules
        find_frozen_linears(built, names, shard_world=shards, is_chunk=False, replicated=replicated)
    wraps: list[Wrap] = ["submodule", "experts", "block"]  # "auto" takes one that has the names
    if settings.wrap != "auto" or parallelism.expert_parallel_degree == 1:
        wraps = [resolve_wrap(settings.wrap, parallelism.expert_parallel_degree, model)]
    # In a pipeline a vision tower is no unit (fsdp.plan).
    towers = vision_units(built) if parallelism.pipeline_parallel_degree == 1 else []
    units = [u for w in wraps for u in units_without(built, plan_units(built, w), replicated)]
    settings.check_reshard_groups([*towers, *units])
    shards, ep = _shard_axis(parallelism), parallelism.expert_parallel_degree
    if reshards_to_ranks and shards is not None and ep == 1:  # as fsdp.shard will, on the ranks
        ranks = shards * parallelism.data_parallel_replicate_degree
        sizes = ShardSizes(dense=shards, expert_ranks=ranks)
        make_plan(built, plan_units(built, wraps[0]), settings, sizes)


def _check_halves(parallelism: TitanParallelismConfig, compiled: bool) -> None:
    halves = 'parallelism.overlap_exchanges = "halves"'
    if compiled:
        raise ValueError(
            f"{halves} does not go with compile.enable = true, which orders the operations of a "
            'block by itself; expected "none".'
        )
    if parallelism.context_parallel_degree > 1:
        raise ValueError(
            f"{halves} needs parallelism.context_parallel_degree = 1: masks of half a batch are "
            "made from positions, of which a rank then has a part."
        )


def _check_exchanges(key: str, parallelism: TitanParallelismConfig, compiled: bool) -> None:
    if parallelism.expert_parallel_degree == 1:
        raise ValueError(
            f"{key} needs parallelism.expert_parallel_degree > 1: without expert parallelism no "
            "token travels."
        )
    if compiled:
        raise ValueError(
            f"{key} does not go with compile.enable = true: the compiler would have to see through "
            "an exchange in two steps. Expected no such key."
        )


def _check_replicate(parallelism: TitanParallelismConfig, compiled: bool) -> None:
    if compiled:
        raise ValueError(
            f"{REPLICATE} does not go with compile.enable = true: replicated parameters form an "
            "FSDP group inside a compiled module, and torch.compile refuses its hooks there."
        )
    backend = parallelism.spmd_backend
    if backend == "partial_dtensor" and parallelism.data_parallel_replicate_degree > 1:
        raise ValueError(
            f"{REPLICATE} needs parallelism.data_parallel_replicate_degree = 1 with "
            'spmd_backend = "partial_dtensor": torch replicates over one axis only. Use '
            '"spmd_types".'
        )
    if backend == "spmd_types" and parallelism.context_parallel_degree > 1:
        raise ValueError(
            f"{REPLICATE} needs parallelism.context_parallel_degree = 1 with spmd_backend "
            '= "spmd_types": torch would put sharded and replicated parameters on two meshes, and '
            'TorchTitan\'s gradient norm takes one mesh only. Use "partial_dtensor".'
        )


def _check_experts_are_sharded(key: str, wrap: str, parallelism: TitanParallelismConfig) -> None:
    ep, world = parallelism.expert_parallel_degree, _shard_axis(parallelism)
    if ep == 1 and wrap != "experts":
        raise ValueError(
            f"{key} needs parallelism.expert_parallel_degree > 1 or parallelism.fsdp_wrap = "
            f'"experts": with fsdp_wrap = "{wrap}" and without expert parallelism one collective '
            "carries the experts and the parameters around them."
        )
    ranks = None if world is None else world * parallelism.tensor_parallel_degree // max(ep, 1)
    if ranks is not None and ranks <= 1:
        raise ValueError(
            f"{key} needs experts that FSDP shards: with parallelism.expert_parallel_degree = {ep} "
            "each rank holds its experts whole. Expected a smaller degree, or no such key."
        )


def _check_reshard_world(key: str, ranks: int, parallelism: TitanParallelismConfig) -> None:
    if parallelism.spmd_backend != "partial_dtensor":
        raise ValueError(
            f"{key} is {ranks}, a number of ranks, which torch does not offer with "
            f'parallelism.spmd_backend = "{parallelism.spmd_backend}" (fully_shard refuses it on a '
            'mesh with other axes). Use "always" or "never", or spmd_backend = "partial_dtensor"; '
            "to keep gathering inside a machine use data_parallel_replicate_degree (HSDP)."
        )
    if parallelism.tensor_parallel_degree > 1:
        raise ValueError(
            f"{key} is {ranks}, a number of ranks, which torch does not offer with "
            "parallelism.tensor_parallel_degree > 1 (FSDP2 reshards only plain tensors to a "
            'smaller world). Use "always" or "never".'
        )
    world = _shard_axis(parallelism)
    if world is not None:
        check_divides(key, ranks, world, "parameters are")


def _shard_axis(parallelism: TitanParallelismConfig) -> int | None:
    """Ranks that dense parameters are sharded over; None if not known yet."""
    shard = parallelism.data_parallel_shard_degree
    cp = parallelism.context_parallel_degree
    if shard > 0:
        return shard * cp
    if "WORLD_SIZE" not in os.environ:
        return None
    others = (
        parallelism.data_parallel_replicate_degree
        * parallelism.tensor_parallel_degree
        * parallelism.pipeline_parallel_degree
    )
    return max(int(os.environ["WORLD_SIZE"]) // others, 1)
