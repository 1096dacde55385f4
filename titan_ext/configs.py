"""The configuration keys that titan_ext adds to Titan's sections.

They subclass Titan's own dataclasses, so that a key of ours is an ordinary Titan key: it has a
command-line flag, it is printed with the rest of the config, and Titan's own code reads the
section without knowing of it.
"""

import os
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

import torch
from torchtitan.config import DebugConfig as TitanDebugConfig
from torchtitan.config import ParallelismConfig as TitanParallelismConfig
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model import BaseModel

from titan_ext.flag_tables import table_flag
from titan_ext.fsdp.prefetch import parse_reach
from titan_ext.fsdp.quantized import KEY as FROZEN_NF4
from titan_ext.fsdp.replicated import KEY as KEEP_REPLICATED
from titan_ext.fsdp.replicated import find_kept, units_without
from titan_ext.fsdp.reshard import Reshard, check_reshard, check_reshard_groups, read_reshard
from titan_ext.fsdp.units import plan_units, resolve_wrap, vision_units

__all__ = [
    "SUPPORTED_SPMD_BACKENDS",
    "DebugConfig",
    "FSDPWrap",
    "ParallelismConfig",
    "check_compiled",
    "check_parallelism",
    "check_unit_names",
    "fsdp_settings",
]

FSDPWrap = Literal["auto", "submodule", "block"]
SUPPORTED_SPMD_BACKENDS = ("spmd_types", "partial_dtensor")


@dataclass(kw_only=True, slots=True)
class ParallelismConfig(TitanParallelismConfig):
    """Titan's ``parallelism`` section with the keys that decide what FSDP gathers and when."""

    fsdp_wrap: FSDPWrap = "auto"
    """
    What one FSDP unit of a transformer block is:

    - "block": the whole block, as in stock Titan.
    - "submodule": attention (with its norm) and MoE or feed-forward (with its norm) are units of
      their own, so that half a block is unsharded at a time. More, smaller collectives.
    - "auto": "submodule" when expert_parallel_degree > 1, "block" otherwise.

    The losses and gradient norms do not depend on it. See docs/fsdp_units.md.
    """

    # A wider type for a field of the parent.
    fsdp_reshard_after_forward: Reshard = "default"  # pyrefly: ignore[bad-override]
    """
    When the parameters of a unit are freed after its forward (see docs/fsdp_memory.md):

    - "default": for blocks, not pp_enabled; the last norm and head stay, and so does what is
      small outside the blocks.
    - "always": after every forward, the head's too.
    - "never": they stay until backward.
    - a number of ranks: they are sharded over a smaller world of that many ranks, which must divide
      the shard axis. It is no limit on concurrent all-gathers. With spmd_backend
      "partial_dtensor" only, for units whose parameters nothing but FSDP splits.
    """

    fsdp_reshard_groups: Annotated[dict[str, Reshard], table_flag(read_reshard)] = field(
        default_factory=dict
    )
    """
    The same for some units: by kind (embedding, attention, moe, feed_forward, block, head, vision)
    or by pattern for their names ("layers.0.*", "layers.[0-3].moe"). A pattern goes before a kind,
    a later pattern before an earlier one, and both before fsdp_reshard_after_forward.
    """

    fsdp_prefetch: int | str = 1
    """
    How far ahead of the unit that runs to gather: a number of units (0, 1, 2, ...), or a size
    ("512MiB"): as many units as fit into it, counted as gathered on one rank.
    """

    fsdp_prefetch_backward: int | str | None = None
    """The same in backward. None: as fsdp_prefetch."""

    fsdp_keep_replicated: list[str] = field(default_factory=list)
    """
    What stays whole on every rank instead of being sharded; its gradients are summed over the data
    axes by one all-reduce a unit. Nothing is gathered for it. "router", "norms", "adapters" (of
    LoRA), or patterns for names of modules or parameters ("layers.0.*", "lm_head"). It is computed
    in the dtype of all others, mixed_precision_param, and the results do not depend on it. See
    docs/lora.md.
    """

    fsdp_frozen_nf4: list[str] = field(default_factory=list)
    """
    Frozen linears whose shards are kept and gathered in NF4, 4 bits, from the first forward on
    (QLoRA): patterns for their names ("layers.*.attention"), or "linears" for those of all blocks.
    Not with tensor parallelism, compile, CPU offload or what is kept replicated. See docs/lora.md.
    """

    fsdp_track_memory: bool = False
    """
    Measure what FSDP holds on every rank: gathered parameters, all-gather and reduce-scatter
    buffers, by unit and step. The peak goes to the log and to the metrics; steps and a picture of
    one of them to fsdp_memory/ in dump_folder. Off, it costs nothing.
    """

    def __post_init__(self) -> None:
        TitanParallelismConfig.__post_init__(self)
        check_parallelism(self)


def fsdp_settings(parallelism: TitanParallelismConfig) -> dict[str, Any]:
    """The settings of ``shard_decoder`` in a section of ours, or the defaults for Titan's own."""
    ours = parallelism if isinstance(parallelism, ParallelismConfig) else ParallelismConfig()
    return {
        "wrap": ours.fsdp_wrap,
        "reshard_after_forward_policy": parallelism.fsdp_reshard_after_forward,
        "reshard_groups": ours.fsdp_reshard_groups,
        "prefetch": ours.fsdp_prefetch,
        "prefetch_backward": ours.fsdp_prefetch_backward,
        "keep_replicated": ours.fsdp_keep_replicated,
        "frozen_nf4": ours.fsdp_frozen_nf4,
    }


@dataclass(kw_only=True, slots=True)
class DebugConfig(TitanDebugConfig):
    """Titan's ``debug`` section with the watch over the order of collectives."""

    record_collectives: bool = False
    """
    Record every collective of every rank outside its process before it is issued, and compare the
    ranks: a hang, an abort or a silent mismatch is reported with the ranks, the place in the order
    and the units that differ. Gradients that a rank is about to reduce are checked for NaN and
    infinity. Costs time at every operation. See docs/hangs_and_faults.md.
    """


def check_parallelism(parallelism: TitanParallelismConfig) -> None:
    """Refuse what titan_ext cannot serve, by name, before any process group starts.

    Args:
        parallelism: Titan's section or ours. A stock section (a drop-in model spec under the
            stock trainer) has none of our keys; they read as their defaults.

    Raises:
        ValueError: for a value that a key cannot have, or an SPMD backend that is not supported.
    """
    settings = fsdp_settings(parallelism)
    resolve_wrap(settings["wrap"], parallelism.expert_parallel_degree)
    if parallelism.spmd_backend not in SUPPORTED_SPMD_BACKENDS:
        raise ValueError(
            f"parallelism.spmd_backend is {parallelism.spmd_backend!r}, which titan_ext does not "
            "support (TorchTitan removed it after 0.3); expected one of "
            f"{', '.join(SUPPORTED_SPMD_BACKENDS)}."
        )
    parse_reach("parallelism.fsdp_prefetch", settings["prefetch"])
    if settings["prefetch_backward"] is not None:
        parse_reach("parallelism.fsdp_prefetch_backward", settings["prefetch_backward"])
    for key, name in ((KEEP_REPLICATED, "keep_replicated"), (FROZEN_NF4, "frozen_nf4")):
        if not isinstance(settings[name], list) or not all(
            isinstance(n, str) for n in settings[name]
        ):
            raise ValueError(f"{key} is {settings[name]!r}; expected a list of names.")
    _check_keep_replicated(settings["keep_replicated"], parallelism)
    if settings["frozen_nf4"] and parallelism.tensor_parallel_degree > 1:
        raise ValueError(
            f"{FROZEN_NF4} needs parallelism.tensor_parallel_degree = 1: NF4Tensor can be cut "
            "along its rows only, once."
        )
    everywhere = {"fsdp_reshard_after_forward": settings["reshard_after_forward_policy"]}
    groups = {
        f"fsdp_reshard_groups.{name}": value for name, value in settings["reshard_groups"].items()
    }
    for key, value in (everywhere | groups).items():
        check_reshard(f"parallelism.{key}", value)
        if isinstance(value, int):
            if settings["frozen_nf4"]:
                raise ValueError(
                    f"parallelism.{key} is {value}, a number of ranks, which torch does not offer "
                    f'for weights in NF4 ({FROZEN_NF4}); expected "always" or "never".'
                )
            _check_reshard_world(f"parallelism.{key}", value, parallelism)


def check_compiled(parallelism: TitanParallelismConfig, *, compiled: bool) -> None:
    """Refuse what does not go with a compiled model.

    Raises:
        ValueError: naming the key.
    """
    settings = fsdp_settings(parallelism)
    if compiled and settings["keep_replicated"]:
        raise ValueError(
            f"{KEEP_REPLICATED} does not go with compile.enable = true: what is kept is a group of "
            "FSDP's inside of what is compiled, and torch.compile refuses its hooks there."
        )
    if compiled and settings["frozen_nf4"]:
        raise ValueError(
            f"{FROZEN_NF4} does not go with compile.enable = true: torchao keeps NF4Tensor out of "
            "torch.compile."
        )


def check_unit_names(model: BaseModel.Config, parallelism: ParallelismConfig) -> None:
    """Refuse names in our tables and lists that nothing in the model answers to.

    Raises:
        ValueError: for such a name; one that is a unit with another ``fsdp_wrap`` included.
    """
    if not parallelism.fsdp_reshard_groups and not parallelism.fsdp_keep_replicated:
        return
    with torch.device("meta"):
        built = cast(Decoder, model.build())
    kept = find_kept(built, parallelism.fsdp_keep_replicated, is_chunk=False)
    wrap = resolve_wrap(parallelism.fsdp_wrap, parallelism.expert_parallel_degree)
    # In a pipeline a vision tower is no unit (fsdp.shard).
    towers = vision_units(built) if parallelism.pipeline_parallel_degree == 1 else []
    units = units_without(plan_units(built, wrap), kept.values())
    check_reshard_groups(parallelism.fsdp_reshard_groups, [*towers, *units])


def _check_keep_replicated(names: list[str], parallelism: TitanParallelismConfig) -> None:
    if not names:
        return
    backend = parallelism.spmd_backend
    if backend == "partial_dtensor" and parallelism.data_parallel_replicate_degree > 1:
        raise ValueError(
            f"{KEEP_REPLICATED} needs parallelism.data_parallel_replicate_degree = 1 with "
            'spmd_backend = "partial_dtensor": torch replicates over one axis only. Use '
            '"spmd_types".'
        )
    if backend == "spmd_types" and parallelism.context_parallel_degree > 1:
        raise ValueError(
            f"{KEEP_REPLICATED} needs parallelism.context_parallel_degree = 1 with spmd_backend "
            '= "spmd_types": what torch shards over two axes lies on another mesh than what it '
            "replicates, and TorchTitan's gradient norm takes one mesh only. Use "
            '"partial_dtensor".'
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
    if world is not None and world % ranks:
        fitting = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise ValueError(
            f"{key} is {ranks}, the number of ranks over which to reshard, but parameters are "
            f"sharded over {world}; expected one of {fitting}."
        )


def _shard_axis(parallelism: TitanParallelismConfig) -> int | None:
    """Ranks that dense parameters are sharded over; None if it is not known yet."""
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
