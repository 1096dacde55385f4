"""The configuration keys that titan_ext adds to Titan's sections.

They subclass Titan's own dataclasses, so that a key of ours is an ordinary Titan key: it has a
command-line flag, it is printed with the rest of the config, and Titan's own code reads the
section without knowing of it.
"""

from dataclasses import dataclass
from typing import Literal

from torchtitan.config import DebugConfig as TitanDebugConfig
from torchtitan.config import ParallelismConfig as TitanParallelismConfig

from titan_ext.fsdp.units import resolve_wrap

__all__ = [
    "SUPPORTED_SPMD_BACKENDS",
    "DebugConfig",
    "FSDPWrap",
    "ParallelismConfig",
    "check_parallelism",
]

FSDPWrap = Literal["auto", "submodule", "block"]
SUPPORTED_SPMD_BACKENDS = ("spmd_types", "partial_dtensor")


@dataclass(kw_only=True, slots=True)
class ParallelismConfig(TitanParallelismConfig):
    """Titan's ``parallelism`` section with the keys that decide what one FSDP unit is."""

    fsdp_wrap: FSDPWrap = "auto"
    """
    What one FSDP unit of a transformer block is:

    - "block": the whole block, as in stock Titan.
    - "submodule": attention (with its norm) and MoE or feed-forward (with its norm) are units of
      their own, so that half a block is unsharded at a time. More, smaller collectives.
    - "auto": "submodule" when expert_parallel_degree > 1, "block" otherwise.

    The losses and gradient norms do not depend on it. See docs/fsdp_units.md.
    """

    def __post_init__(self) -> None:
        TitanParallelismConfig.__post_init__(self)
        check_parallelism(self)


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
            stock trainer) has no ``fsdp_wrap``; that reads as "auto".

    Raises:
        ValueError: for an unknown ``fsdp_wrap``, or an SPMD backend that is not supported.
    """
    resolve_wrap(getattr(parallelism, "fsdp_wrap", "auto"), parallelism.expert_parallel_degree)
    if parallelism.spmd_backend not in SUPPORTED_SPMD_BACKENDS:
        raise ValueError(
            f"parallelism.spmd_backend is {parallelism.spmd_backend!r}, which titan_ext does not "
            "support (TorchTitan removed it after 0.3); expected one of "
            f"{', '.join(SUPPORTED_SPMD_BACKENDS)}."
        )
