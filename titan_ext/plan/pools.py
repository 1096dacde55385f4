# SPDX-License-Identifier: BSD-3-Clause
"""The memory that torch's caching allocator would reserve for a step, eager or compiled.

The allocator keeps a pool for each stream, and gives nothing of one to another. A pool grows when
none of its free blocks is large enough, and does not shrink. So a job reserves more than ever lives
at once: each stream's own peak, and what its blocks leave over. That is counted here, and no factor
stands for it. The rules are those of ``CUDACachingAllocator.cpp`` with expandable segments, which
Titan's ``run_train.sh`` switches on.

A dry run runs compiled modules eagerly. What Inductor makes of them follows from rules of torch's
partitioner (``torch/_functorch/partitioners.py``), applied to the operations that ran:

- what a fusible operation makes for fusible ones only is never in memory: they are one kernel;
- what a fusible operation makes is not kept for backward if backward's fusible operations can make
  it again, from tensors that are there anyway;
- what no operation of backward reads is not kept, though an eager checkpoint would keep it.

Everything else stays, above all what products, attention and exchanges read and write. Kernels that
Inductor does not fuse, though it could, are not known here.
"""

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._functorch.partitioners import get_default_op_list

# The allocator's own constants, none of them fitted. One H100 reserved 13.26 and 35.44 GiB where
# 13.24 and 35.40 were planned (benchmarks/gpu_receipts.md).
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
        """End of the last used block; what is reserved beyond it can grow."""
        self._holes: dict[int, int] = {}
        """Size of each hole below it, by its address."""

    def take(self, size: int) -> int:
        """The address of a block: the best fit among holes, otherwise at the top."""
        fits = [(hole, start) for start, hole in self._holes.items() if hole >= size]
        if not fits:
            # With expandable segments what is missing is mapped behind the last block.
            start, self._top = self._top, self._top + size
            missing = max(self._top - self.reserved, 0)
            self.reserved += -(-missing // self.page) * self.page
            return start
        found, start = min(fits)
        del self._holes[start]
        if found > size:
            self._holes[start + size] = found - size
        return start

    def give(self, size: int, start: int) -> None:
        """Free a block, and join it with the holes beside it."""
        before = next((at for at, hole in self._holes.items() if at + hole == start), start)
        size += self._holes.pop(start + size, 0) + self._holes.pop(before, 0)
        if before + size == self._top:
            self._top = before
        else:
            self._holes[before] = size


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


_ops: Any = torch.ops.aten
_DECOMPOSED = {
    _ops._log_softmax,
    _ops._log_softmax_backward_data,
    _ops.nll_loss_forward,
    _ops.nll_loss_backward,
    _ops._softmax,
    _ops._softmax_backward_data,
    _ops.copy_,
}
"""Fusible, once Inductor has decomposed them; the partitioner's list knows their parts."""


@functools.cache  # torch makes its list anew each time
def is_fusible(func: Any) -> bool:
    packet = func.overloadpacket
    # Rules, and nothing fitted: benchmarks/published.md has how far compiled jobs are off.
    is_listed = packet in _DECOMPOSED or packet in get_default_op_list().fusible_ops
    return is_listed or torch.Tag.pointwise in func.tags


COMPONENTS = "model", "loss"
"""What Titan compiles, if asked to: each block, and the loss."""


def component_of(region: str) -> str:
    """The one of ``COMPONENTS`` that a module belongs to; "" for what is never compiled."""
    return "loss" if region == "loss" else "model" if region.startswith("layers.") else ""


class _Op(NamedTuple):
    at: int
    """Count of the events before it."""
    region: str
    is_fusible: bool
    in_backward: bool
    inputs: Sequence[int]


class Fusion:
    """Watches the operations of a step that would be compiled, and edits its events.

    A storage is known by its ``Event.storage``.
    """

    def __init__(self) -> None:
        self._made: dict[int, _Op] = {}
        """By operations that a compiler may change."""
        self._uses: dict[int, list[_Op]] = {}

    def see(
        self,
        func: Any,
        region: str,
        at: int,
        *,
        in_backward: bool,
        read: Sequence[int],
        made: Sequence[int],
    ) -> None:
        """Note an operation of ``region``: a block, its backward, the loss, or "" if eager."""
        op = _Op(at, region, bool(region) and is_fusible(func), in_backward, tuple(read))
        for storage in self._uses.keys() & read:
            self._uses[storage].append(op)
        if op.is_fusible or (region and not in_backward and func.namespace == "aten"):
            for storage in made:
                self._made[storage], self._uses[storage] = op, []

    def apply(
        self, events: Sequence[Event], compiled: Collection[str]
    ) -> Iterator[tuple[int, Event]]:
        """``events`` without what is fused away, and with what is not kept freed early.

        Each with the place in ``events`` where it happens. ``compiled`` are some of ``COMPONENTS``.
        """
        if not compiled:
            yield from enumerate(events)
            return
        end = {event.storage: at for at, event in enumerate(events) if not event.nbytes}
        early: dict[int, list[int]] = {}
        for storage, made in self._made.items():
            is_compiled = component_of(made.region) in compiled
            if is_compiled and (last := self._last_use(storage, made, end)) is not None:
                early.setdefault(last, []).append(storage)
        gone = set(early.pop(-1, ()))
        freed = gone.union(*early.values())
        for at, event in enumerate(events):
            yield from ((at, Event(storage, 0, 0)) for storage in early.get(at, ()))
            if event.storage not in (gone if event.nbytes else freed):
                yield at, event

    def _last_use(self, storage: int, made: _Op, end: dict[int, int]) -> int | None:
        """Place where it can be freed; -1 if it never exists; None if it is as in eager mode."""
        uses = self._uses[storage]
        if not made.is_fusible:
            read_later = storage not in end or any(use.in_backward for use in uses)
            return None if read_later or not uses else uses[-1].at + 1
        # Uses that a compiled region of its own would have: not those of its backward.
        here = [use for use in uses if made.in_backward or not use.in_backward]
        if storage not in end or any(use.region != made.region for use in here):
            return None
        later = [use for use in uses if use.in_backward and not made.in_backward]
        if later and not (
            all(use.is_fusible for use in later)
            and self._can_be_made_again(made, later[-1].at, end)
        ):
            return None
        solid = [use.at for use in uses if not use.is_fusible]
        if not solid:
            return -1
        return solid[-1] + 1 if later else None

    def _can_be_made_again(self, made: _Op, at: int, end: dict[int, int]) -> bool:
        """True if all its inputs are there at ``at``, or can be made again."""
        gone = [storage for storage in made.inputs if end.get(storage, at + 1) < at]
        makers = [self._made.get(storage) for storage in gone]
        return all(
            one is not None and one.is_fusible and self._can_be_made_again(one, at, end)
            for one in makers
        )
