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
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class Work:
    """An item of a queue; to wait for it is to wait for its end."""

    ms: float
    """How long it takes by itself; a message's latency."""
    link: str = ""
    """The link that a message takes; "" for other work."""
    on_link_ms: float = 0.0
    """How long a message takes on a link of its own, beside its latency."""
    label: Any = None
    """Whatever the caller wants to find again."""
    queue: Hashable = None
    index: int = -1
    """Its place in its queue, once it has been added."""
    after: Sequence[tuple["Work", Any]] = ()
    """Work of other queues that has to end first, in this order, and why."""
    free: float = 0.0
    start: float = 0.0
    end: float | None = None
    """In ms, once they are known. ``free`` is when the queue could have begun it."""


@dataclass(eq=False)
class _Link:
    """A link that all messages on it share equally."""

    now: float = 0.0
    left: dict[Work, float] = field(default_factory=dict)
    """Milliseconds of each message that are left by then."""

    def first_end(self) -> tuple[float, Work, dict[Work, float]] | None:
        """When the first message ends, which one that is, and what is left of the others then."""
        now, left = self.now, dict(self.left)
        arrivals = {message: message.start + message.ms for message in left}
        while left:
            active = [message for message in left if arrivals[message] <= now]
            later = min((at for at in arrivals.values() if at > now), default=None)
            if not active:
                assert later is not None
                now = later
                continue
            first = min(active, key=left.__getitem__)
            end = now + left[first] * len(active)
            until = end if later is None else min(end, later)
            for message in active:
                left[message] -= (until - now) / len(active)
            now = until
            if until < end:
                continue
            del left[first]
            return now, first, {message: max(ms, 0.0) for message, ms in left.items()}
        return None


class Streams:
    """Queues of work, in the order in which the host gives it to them."""

    def __init__(self) -> None:
        self.queues: dict[Hashable, list[Work]] = {}
        self._waited: dict[Hashable, dict[Hashable, int]] = {}
        self._next: dict[Hashable, list[tuple[Work, Any]]] = {}

    def wait(self, queue: Hashable, works: Iterable[Work], why: Any = None) -> None:
        """Let the next item of ``queue`` wait for ``works``."""
        waited = self._waited.setdefault(queue, {})
        for work in works:
            # A queue is in order: who has waited for an item has waited for all before it.
            if work.queue != queue and work.index > waited.get(work.queue, -1):
                waited[work.queue] = work.index
                self._next.setdefault(queue, []).append((work, why))

    def add(self, queue: Hashable, work: Work) -> Work:
        items = self.queues.setdefault(queue, [])
        work.queue, work.index, work.after = queue, len(items), self._next.pop(queue, ())
        items.append(work)
        return work

    def last(self, queue: Hashable) -> tuple[Work, ...]:
        """The last item of ``queue``, if it has one; and what its next one has to wait for."""
        items = self.queues.get(queue, [])
        return (*items[-1:], *(work for work, _ in self._next.get(queue, ())))

    def waits(self, work: Work) -> Iterator[tuple[Any, float]]:
        """Causes by which ``work`` began later than its queue could have, and the ms of each."""
        at = work.free
        for other, why in work.after:
            assert other.end is not None, "run() has been called"
            if other.end > at:
                yield why, other.end - at
                at = other.end

    def run(self) -> None:
        """Set start and end of all work, which may have other times than before.

        Raises AssertionError if queues wait for each other.
        """
        for work in itertools.chain(*self.queues.values()):
            work.end = None  # of a run with other times
        # How many items of each queue are done, when it is free, and what is on links.
        self._done = dict.fromkeys(self.queues, 0)
        self._free = dict.fromkeys(self.queues, 0.0)
        self._links: defaultdict[str, _Link] = defaultdict(_Link)
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
            (end, work, left), link = min(ends, key=lambda end: end[0][0])
            link.now, link.left = end, left
            work.end = self._free[work.queue] = end
            self._done[work.queue] += 1
            waiting = {q for q in self.queues if self._done[q] < len(self.queues[q])}
        assert not waiting, "queues wait for each other"

    def _advance(self, queue: Hashable) -> bool:
        """Run ``queue`` until it waits; return whether anything began."""
        items, began = self.queues[queue], False
        while self._done[queue] < len(items):
            work = items[self._done[queue]]
            ends = [other.end for other, _ in work.after]
            if work in self._links[work.link].left or any(end is None for end in ends):
                return began
            work.free = self._free[queue]
            work.start = max([work.free, *(end for end in ends if end is not None)])
            began = True
            if work.link:
                self._links[work.link].left[work] = work.on_link_ms
                return began
            work.end = self._free[queue] = work.start + work.ms
            self._done[queue] += 1
        return began
