# SPDX-License-Identifier: BSD-3-Clause
"""What torch's caching allocator would reserve for a step's storages, by replaying them.

The allocator keeps a pool for each stream, and gives nothing of one to another. A pool grows when
none of its free blocks is large enough, and does not shrink. So a job reserves more than ever lives
at once: each stream's own peak, and what its blocks leave over. That is counted here, and no factor
stands for it. The rules are those of ``CUDACachingAllocator.cpp`` with expandable segments, which
Titan's ``run_train.sh`` switches on.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

_SMALLEST = 512  # kMinBlockSize: sizes are multiples of it
_SMALL = 2**20  # kSmallSize: up to it, a storage lies in a pool of small ones
_PAGES = {True: 2 * 2**20, False: 20 * 2**20}  # kSmallBuffer, kLargeBuffer: what a pool grows by


class Event(NamedTuple):
    """A storage is made, of ``nbytes`` in the pool of a stream, or freed, where ``nbytes`` is 0."""

    storage: int
    stream: int
    nbytes: int


class _Pool:
    """One stream's blocks of one size class, in an address space of their own."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.reserved = 0
        self._top = 0
        """Where the last used block ends; what is reserved beyond it can grow."""
        self._free: list[tuple[int, int]] = []
        """Size and address of each hole below it, smallest first."""
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    def take(self, size: int) -> int:
        """The address of a block: the best fit among holes, otherwise at the top."""
        at = bisect_left(self._free, (size, 0))
        if at == len(self._free):
            start, self._top = self._top, self._top + size
            missing = max(self._top - self.reserved, 0)
            self.reserved += -(-missing // self.page) * self.page
            return start
        found, start = self._free[at]
        self._remove(found, start)
        if found > size:
            self._insert(found - size, start + size)
        return start

    def give(self, size: int, start: int) -> None:
        """Free a block, and join it with the holes beside it."""
        if (after := self._starts.get(start + size)) is not None:
            self._remove(after, start + size)
            size += after
        if (before := self._ends.get(start)) is not None:
            start -= before
            self._remove(before, start)
            size += before
        if start + size == self._top:
            self._top = start
        else:
            self._insert(size, start)

    def _insert(self, size: int, start: int) -> None:
        insort(self._free, (size, start))
        self._starts[start] = self._ends[start + size] = size

    def _remove(self, size: int, start: int) -> None:
        del self._free[bisect_left(self._free, (size, start))]
        del self._starts[start], self._ends[start + size]


class Pools:
    """The allocator of one device."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._blocks: dict[int, tuple[_Pool, int, int]] = {}

    def replay(self, events: Iterable[Event]) -> None:
        for storage, stream, nbytes in events:
            if not nbytes:
                if (block := self._blocks.pop(storage, None)) is not None:
                    pool, size, start = block
                    pool.give(size, start)
                continue
            size, is_small = -(-nbytes // _SMALLEST) * _SMALLEST, nbytes <= _SMALL
            pool = self._pools.setdefault((stream, is_small), _Pool(_PAGES[is_small]))
            self._blocks[storage] = pool, size, pool.take(size)

    @property
    def reserved(self) -> dict[int, int]:
        """Bytes by stream."""
        found: dict[int, int] = {}
        for (stream, _), pool in self._pools.items():
            found[stream] = found.get(stream, 0) + pool.reserved
        return found
