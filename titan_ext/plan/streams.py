# SPDX-License-Identifier: BSD-3-Clause
"""Simulation of a rank's streams: queues wait for each other, and messages share links.

A queue (a stream, a communicator, a copy engine) does its items one after the other. An item may
first wait for items of other queues. Messages share a link: as many as are on it at once each get
an equal share of its rate (processor sharing), as kernels of several communicators do that send at
the same time. First come, first served would let an exchange, which the computation waits for,
stand behind a gather that nobody needs yet. A short message, which is nearly all latency, is hardly
held up by long ones.

``Streams`` records the items; ``run`` finds when each began and ended.
"""

import itertools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Item(NamedTuple):
    """The ``index``-th item of a queue; to wait for it is to wait for its end."""

    queue: Hashable
    index: int


@dataclass(eq=False, slots=True)
class Work:
    """An item of a queue."""

    ms: float
    """How long it takes by itself; a message's latency."""
    after: tuple[tuple[Item, Any], ...] = ()
    """Items of other queues that have to end first, in this order, and why."""
    link: str = ""
    """The link that a message takes; "" for other work."""
    on_link_ms: float = 0.0
    """How long a message takes on a link of its own, beside its latency."""
    label: Any = None
    """Whatever the caller wants to find again."""
    free: float = 0.0
    start: float = 0.0
    end: float | None = None
    """In ms, once they are known. ``free`` is when the queue could have begun it."""


@dataclass(eq=False, slots=True)
class _Message:
    """A message on its link: when it gets there, and what is left of it."""

    work: Work
    arrival: float
    left_ms: float


@dataclass(eq=False)
class _Link:
    """A link that all messages on it share equally."""

    now: float = 0.0
    messages: list[_Message] = field(default_factory=list)

    def first_end(self, *, commit: bool = False) -> tuple[float, Work] | None:
        """The message that ends first, and when; ``commit`` goes on to that time."""
        now, left = self.now, {id(m): m.left_ms for m in self.messages}
        while self.messages:
            active = [m for m in self.messages if m.arrival <= now]
            later = min((m.arrival for m in self.messages if m.arrival > now), default=None)
            if not active:
                assert later is not None
                now = later
                continue
            first = min(active, key=lambda m: left[id(m)])
            end = now + left[id(first)] * len(active)
            until = end if later is None else min(end, later)
            for message in active:
                left[id(message)] -= (until - now) / len(active)
            now = until
            if until < end:
                continue
            if commit:
                self.now = now
                self.messages.remove(first)
                for message in self.messages:
                    message.left_ms = max(left[id(message)], 0.0)
            return now, first.work
        return None


class Streams:
    """Queues of work, in the order in which the host gives it to them."""

    def __init__(self) -> None:
        self.queues: dict[Hashable, list[Work]] = {}
        self._waited: dict[Hashable, dict[Hashable, int]] = {}
        self._next: dict[Hashable, list[tuple[Item, Any]]] = {}

    def wait(self, queue: Hashable, items: Iterable[Item], why: Any = None) -> None:
        """Let the next item of ``queue`` wait for ``items``."""
        waited = self._waited.setdefault(queue, {})
        for item in items:
            # A queue is in order: who has waited for an item has waited for all before it.
            if item.queue != queue and item.index > waited.get(item.queue, -1):
                waited[item.queue] = item.index
                self._next.setdefault(queue, []).append((item, why))

    def add(self, queue: Hashable, work: Work) -> Item:
        if (waits := self._next.pop(queue, None)) is not None:
            work.after += tuple(waits)
        items = self.queues.setdefault(queue, [])
        items.append(work)
        return Item(queue, len(items) - 1)

    def last(self, queue: Hashable) -> tuple[Item, ...]:
        """The last item of ``queue``, if it has one; and what its next one has to wait for."""
        items = self.queues.get(queue)
        done = (Item(queue, len(items) - 1),) if items else ()
        return (*done, *(item for item, _ in self._next.get(queue, ())))

    def waits(self, work: Work) -> Iterator[tuple[Any, float]]:
        """Causes by which ``work`` began later than its queue could have, and the ms of each."""
        at = work.free
        for item, why in work.after:
            end = self.queues[item.queue][item.index].end
            assert end is not None, "run() has been called"
            if end > at:
                yield why, end - at
                at = end

    def run(self) -> None:
        """Set start and end of all work, which may have other times than before.

        Raises AssertionError if queues wait for each other.
        """
        # How many items of each queue are done, when it is free, and what is on links.
        for work in itertools.chain(*self.queues.values()):
            work.end = None  # of a run with other times
        self._done = dict.fromkeys(self.queues, 0)
        self._free = dict.fromkeys(self.queues, 0.0)
        self._links: dict[str, _Link] = {}
        self._on_link: dict[int, Hashable] = {}
        waiting = set(self.queues)
        while True:
            moved = True
            while moved:
                moved = False
                for queue in waiting:
                    moved |= self._advance(queue)
                waiting = {q for q in waiting if self._done[q] < len(self.queues[q])}
            ends = [(found, link) for link in self._links.values() if (found := link.first_end())]
            if not ends:
                break
            # Every queue waits for a message: nothing can begin before the first of them ends.
            (end, work), link = min(ends, key=lambda end: end[0][0])
            link.first_end(commit=True)
            work.end = end
            queue = self._on_link.pop(id(work))
            self._free[queue] = work.end
            self._done[queue] += 1
            waiting = {q for q in self.queues if self._done[q] < len(self.queues[q])}
        assert not waiting, "queues wait for each other"

    def _advance(self, queue: Hashable) -> bool:
        """Run ``queue`` until it waits; return whether anything began."""
        items, began = self.queues[queue], False
        while self._done[queue] < len(items):
            work = items[self._done[queue]]
            if id(work) in self._on_link:
                return began
            ends = [self.queues[item.queue][item.index].end for item, _ in work.after]
            if any(end is None for end in ends):
                return began
            work.free = self._free[queue]
            work.start = max([work.free, *(end for end in ends if end is not None)])
            began = True
            if work.link:
                message = _Message(work, work.start + work.ms, work.on_link_ms)
                self._links.setdefault(work.link, _Link()).messages.append(message)
                self._on_link[id(work)] = queue
                return began
            work.end = self._free[queue] = work.start + work.ms
            self._done[queue] += 1
        return began
