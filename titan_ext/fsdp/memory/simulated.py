"""The parts of a simulated FSDP: units, their groups, and the flat buffers of those."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from titan_ext.fsdp.memory.accounting import Bytes

if TYPE_CHECKING:
    from titan_ext.fsdp.plan import GroupPlan, UnitPlan

__all__ = ["Buffer", "Group", "Phase", "SimulatedUnit"]


class Phase(Enum):
    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


@dataclass(eq=False)
class Buffer:
    """A flat buffer. Of an all-gather over one rank, which needs none, it has no bytes."""

    group: "Group"
    name: str
    nbytes: int


@dataclass(eq=False)
class Group:
    plan: "GroupPlan"
    unit: "SimulatedUnit"
    name: str
    phase: Phase = Phase.IDLE
    is_unsharded: bool = False
    kept_nbytes: int = 0  # after a reshard to a smaller world
    pending: Buffer | None = None  # unshard has been called, nothing copied out yet
    reshards_after_forward: bool | int = True
    reshards_after_backward: bool = True
    reduces: bool = True
    post_backward_pending: bool = False
    gradients: set[int] = field(default_factory=set)  # unsharded ones, by index of the parameter
    sharded_gradients: set[int] = field(default_factory=set)

    def live_bytes(self, buffers: Sequence[Buffer], issuing: bool) -> Bytes:
        full = self.plan.gathered_nbytes
        of = dict.fromkeys(("all_gather", "reduce_scatter", "gradients"), 0)
        for buffer in buffers:
            if buffer.group is self:
                of[buffer.name] += buffer.nbytes
        return Bytes(
            gathered=(full if self.is_unsharded else 0) + self.kept_nbytes,
            logical=full if self.is_logical or issuing else 0,
            **of,
        )

    @property
    def is_logical(self) -> bool:
        return self.is_unsharded or self.pending is not None


@dataclass(eq=False)
class SimulatedUnit:
    """A unit and where it is in its forward. ``roles`` are the parts of it that run apart."""

    plan: "UnitPlan"
    roles: tuple[str, ...]
    groups: list[Group] = field(default_factory=list)
    phase: Phase = Phase.IDLE
    roles_to_run: set[str] = field(default_factory=set)
