# SPDX-License-Identifier: BSD-3-Clause
"""Which storages of an eager step would not exist if its modules were compiled.

A dry run runs compiled modules eagerly. What Inductor makes of them follows from rules of torch's
partitioner (``torch/_functorch/partitioners.py``), applied to the operations that ran:

- what a fusible operation makes for fusible ones only is never in memory: they are one kernel;
- what a fusible operation makes is not kept for backward if backward's fusible operations can make
  it again, from tensors that are there anyway.

Everything else stays, above all what products, attention and exchanges read and write. Kernels that
Inductor does not fuse, though it could, are not known here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._functorch.partitioners import get_default_op_list

from titan_ext.plan.pools import Event

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


def is_fusible(func: Any) -> bool:
    packet = func.overloadpacket
    is_listed = packet in _DECOMPOSED or packet in get_default_op_list().fusible_ops
    return is_listed or torch.Tag.pointwise in func.tags


class _Use(NamedTuple):
    at: int
    """How many events were before it."""
    region: str
    is_fusible: bool
    in_backward: bool


@dataclass(slots=True)
class _Made:
    region: str
    in_backward: bool
    inputs: Sequence[int]
    uses: list[_Use] = field(default_factory=list)


class Fusion:
    """Watches the operations of a step that would be compiled, and edits its events.

    A storage is known by its ``Event.storage``.
    """

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}
        """By fusible operations."""

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
        """An operation of ``region``: a block's forward or backward, or the loss; "" if eager."""
        fusible = bool(region) and is_fusible(func)
        for storage in read:
            if (one := self._made.get(storage)) is not None:
                one.uses.append(_Use(at, region, fusible, in_backward))
        if fusible:
            for storage in made:
                self._made[storage] = _Made(region, in_backward, tuple(read))

    def apply(self, events: Sequence[Event]) -> list[Event]:
        """``events`` without what is fused away, and with what is not kept freed early."""
        end = {event.storage: at for at, event in enumerate(events) if not event.nbytes}
        gone, early = set(), {}
        for storage, made in self._made.items():
            if (last := self._last_use(storage, made, end)) is None:
                continue
            if last < 0:
                gone.add(storage)
            else:
                early.setdefault(last, []).append(storage)
        freed = {storage for some in early.values() for storage in some}
        edited = []
        for at, event in enumerate(events):
            edited += [Event(storage, 0, 0) for storage in early.get(at, ())]
            if event.storage not in gone and (event.nbytes or event.storage not in freed):
                edited.append(event)
        return edited

    def _last_use(self, storage: int, made: _Made, end: dict[int, int]) -> int | None:
        """Where it can be freed; -1 if it never exists; None if it is as in eager mode."""
        if storage not in end or any(use.region != made.region for use in self._here(made)):
            return None
        later = [use for use in made.uses if use.in_backward and not made.in_backward]
        if later and not (
            all(use.is_fusible for use in later)
            and self._can_be_made_again(made, later[-1].at, end)
        ):
            return None
        solid = [use.at for use in made.uses if not use.is_fusible]
        if not solid:
            return -1
        return solid[-1] + 1 if later else None

    @staticmethod
    def _here(made: _Made) -> Iterator[_Use]:
        """Uses that a compiled region of its own would have: not those of its backward."""
        for use in made.uses:
            if made.in_backward or not use.in_backward:
                yield use

    def _can_be_made_again(self, made: _Made, at: int, end: dict[int, int]) -> bool:
        """Whether all its inputs are there at ``at``, or can be made again."""
        for storage in made.inputs:
            one = self._made.get(storage)
            if end.get(storage, at + 1) < at and not (
                one is not None and self._can_be_made_again(one, at, end)
            ):
                return False
        return True
