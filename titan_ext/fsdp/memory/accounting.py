"""The bytes that FSDP holds on one rank, event by event: what is measured, and what is predicted.

Plain data, so that the tracker (which reads storages) and the predictor (which reads a plan) say
the same things in the same words, and can be compared without a tolerance.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["BLOCK_KINDS", "CLASSES", "Bytes", "Event", "Timeline"]

BLOCK_KINDS = ("attention", "moe", "feed_forward", "block")
"""Kinds of units that transformer blocks are made of."""


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Live bytes on one rank, by class.

    Attributes:
        gathered: Storages of unsharded parameters; of parameters resharded to a smaller world, the
            part that stays.
        all_gather: Flat buffers that all-gathers write into, until they have been copied out and
            let go of.
        reduce_scatter: Flat buffers of unsharded gradients, the inputs of reduce-scatters.
        gradients: Outputs of reduce-scatters. They are the sharded gradients until the next
            ``zero_grad`` where dtypes agree, else they are gone at once.
        logical: Gathered parameters between their unshard and their reshard, whether or not they
            have arrived. No storages of their own.
    """

    gathered: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0
    gradients: int = 0
    logical: int = 0

    @property
    def unsharded(self) -> int:
        """Gathered parameters and the flat buffers that they come from."""
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
    """A change of what is live.

    Attributes:
        action: "unshard" (an all-gather is issued), "copied" (its buffer goes), "forward" and
            "backward" (the unit is ready to run), "after forward" and "after backward" (it has
            been resharded, or stays), "reduce" and "reduced" (a reduce-scatter's input, output),
            "step" and "after step". What changes without an action of its own (a reshard at the
            very end of backward) shows in the next event.
        unit: The unit that it is about; "" for the model.
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


class Timeline:
    """The events of one step on one rank."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        """Append ``event`` unless nothing has changed since the last one."""
        last = self.events[-1] if self.events else None
        if last is None or (last.live, last.unsharded) != (event.live, event.unsharded):
            self.events.append(event)

    def peak(
        self, measure: str | Callable[[Bytes], int], kinds: Iterable[str] | None = None
    ) -> int:
        """The most bytes of one class ("gathered") or measure ("unsharded"), over ``kinds``."""
        of = measure if callable(measure) else lambda live: getattr(live, measure)
        chosen = tuple(kinds) if kinds is not None else None
        return max((of(event.bytes_of(chosen)) for event in self.events), default=0)

    def peaks(self) -> dict[str, int]:
        """Peaks by class (each at its own time), of all kinds of units, and of blocks alone."""
        of_all = {name: self.peak(name) for name in (*CLASSES, "unsharded", "total")}
        of_blocks = {
            f"blocks_{name}": self.peak(name, BLOCK_KINDS) for name in ("logical", "unsharded")
        }
        return of_all | of_blocks

    def unshards(self) -> dict[str, int]:
        """How often each group was unsharded, by name."""
        return self._changes(lambda before, after: after - before)

    def reshards(self) -> dict[str, int]:
        """How often each group was resharded, by name."""
        return self._changes(lambda before, after: before - after)

    def left_over(self) -> tuple[str, ...]:
        """What should be gone when a step is over and is not: unsharded units, flat buffers."""
        if not self.events:
            return ()
        last = self.events[-1]
        live = last.bytes_of()
        buffers = [n for n in ("all_gather", "reduce_scatter") if getattr(live, n)]
        return (*last.unsharded, *(f"{name} buffers" for name in buffers))

    def to_json(self) -> list[dict[str, Any]]:
        """The events as JSON can hold them."""
        return [
            {
                "action": event.action,
                "unit": event.unit,
                "unsharded": list(event.unsharded),
                "live": {kind: asdict(live) for kind, live in event.live.items()},
            }
            for event in self.events
        ]

    @classmethod
    def from_json(cls, events: Iterable[Mapping[str, Any]]) -> "Timeline":
        """What ``to_json`` gave."""
        timeline = cls()
        timeline.events = [
            Event(
                action=event["action"],
                unit=event["unit"],
                live={kind: Bytes(**live) for kind, live in event["live"].items()},
                unsharded=tuple(event["unsharded"]),
            )
            for event in events
        ]
        return timeline

    def _changes(self, new: Callable[[set[str], set[str]], set[str]]) -> dict[str, int]:
        counts: dict[str, int] = {}
        before: set[str] = set()
        for event in self.events:
            after = set(event.unsharded)
            for name in new(before, after):
                counts[name] = counts.get(name, 0) + 1
            before = after
        return dict(sorted(counts.items()))
