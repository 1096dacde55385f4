# SPDX-License-Identifier: BSD-3-Clause
"""The bytes that FSDP holds on one rank, event by event.

Plain data, which the tracker fills from storages.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from titan_ext.fsdp.units import BLOCK_KINDS


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Live bytes on one rank, by class.

    Attributes:
        gathered: Storages of unsharded parameters; of parameters resharded to a smaller world, the
            part that stays.
        all_gather: Flat buffers that all-gathers write into, until they are copied out and freed,
            and what a copy-out allocates for itself.
        reduce_scatter: Flat buffers of unsharded gradients, the inputs of reduce-scatters.
        gradients: Outputs of reduce-scatters. If dtypes agree they are the sharded gradients and
            live until the next ``zero_grad``; else they are freed at once.
        logical: Gathered parameters between unshard and reshard, whether or not they have arrived;
            not extra storages.
    """

    gathered: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0
    gradients: int = 0
    logical: int = 0

    @property
    def unsharded(self) -> int:
        """Gathered parameters and their all-gather buffers."""
        return self.gathered + self.all_gather

    @property
    def total(self) -> int:
        """All that FSDP holds beyond sharded parameters and gradients."""
        return self.unsharded + self.reduce_scatter

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(**{name: getattr(self, name) + getattr(other, name) for name in CLASSES})


CLASSES = tuple(field.name for field in fields(Bytes))


@dataclass(frozen=True, kw_only=True)
class Event:
    """A change in live bytes.

    Attributes:
        action: Of an all-gather: "unshard" (issued), "copying" (its copy-out has a temporary) and
            "copied" (its buffer goes). Of a unit: "forward" and "backward" (ready to run), "after
            forward" and "after backward" (resharded, or staying). Of a reduce-scatter: "reduce"
            (input) and "reduced" (output). Also "step" and "after step". What changes without an
            action of its own (a reshard at the very end of backward) shows in the next event.
        unit: The unit concerned; "" for the model.
        live: By kind of unit, after the change.
        unsharded: The units between unshard and reshard, in forward order; a group with a
            collective of its own as "layers.1.moe/experts".
    """

    action: str
    unit: str
    live: Mapping[str, Bytes]
    unsharded: tuple[str, ...]

    def bytes_of(self, kinds: Iterable[str] | None = None) -> Bytes:
        """Live bytes of the units of ``kinds``; of all by default."""
        chosen = self.live if kinds is None else [k for k in kinds if k in self.live]
        return sum((self.live[kind] for kind in chosen), Bytes())


class GroupBytes(NamedTuple):
    """The live bytes of one parameter group; ``name`` is as in ``Event.unsharded``."""

    name: str
    kind: str
    live: Bytes
    is_unsharded: bool


class Timeline:
    """The events of one step on one rank."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, action: str, unit: str, groups: Iterable[GroupBytes]) -> None:
        """Append an event, from all groups in forward order, if the last one differs in bytes."""
        live: dict[str, Bytes] = {}
        unsharded = []
        for group in groups:
            live[group.kind] = live.get(group.kind, Bytes()) + group.live
            if group.is_unsharded:
                unsharded.append(group.name)
        event = Event(action=action, unit=unit, live=live, unsharded=tuple(unsharded))
        last = self.events[-1] if self.events else None
        if last is None or (last.live, last.unsharded) != (event.live, event.unsharded):
            self.events.append(event)

    def peak(self, measure: str, kinds: Iterable[str] | None = None) -> int:
        """The most bytes of one class ("gathered") or measure ("unsharded"), over ``kinds``."""
        chosen = tuple(kinds) if kinds is not None else None
        return max((getattr(event.bytes_of(chosen), measure) for event in self.events), default=0)

    def peaks(self) -> dict[str, int]:
        """Peaks by class (each at its own time), of all kinds of units, and of blocks alone."""
        of_all = {name: self.peak(name) for name in (*CLASSES, "unsharded", "total")}
        of_blocks = {
            f"blocks_{name}": self.peak(name, BLOCK_KINDS) for name in ("logical", "unsharded")
        }
        return of_all | of_blocks

    def unshards(self) -> dict[str, int]:
        """How often each group was unsharded, by name."""
        return self._count(lambda before, after: after - before)

    def reshards(self) -> dict[str, int]:
        """How often each group was resharded, by name."""
        return self._count(lambda before, after: before - after)

    def left_over(self) -> tuple[str, ...]:
        """What a step should have freed but did not: unsharded units, flat buffers."""
        if not self.events:
            return ()
        last = self.events[-1]
        live = last.bytes_of()
        buffers = [n for n in ("all_gather", "reduce_scatter") if getattr(live, n)]
        return (*last.unsharded, *(f"{name} buffers" for name in buffers))

    def _count(self, change: Callable[[set[str], set[str]], set[str]]) -> dict[str, int]:
        counts: Counter[str] = Counter()
        before: set[str] = set()
        for event in self.events:
            after = set(event.unsharded)
            counts.update(change(before, after))
            before = after
        return dict(sorted(counts.items()))
