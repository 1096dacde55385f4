"""What FSDP will do with each unit, as plain data, before it does it.

A plan is made from shapes and settings alone: of a mesh it needs the sizes, of a model the shapes,
which the meta device has. The log prints it, prefetching by bytes reads it, and the parameter
memory of a run is predicted from it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn

from titan_ext.fsdp.prefetch import Prefetch
from titan_ext.fsdp.units import UnitKind

__all__ = [
    "FSDPPlan",
    "GroupPlan",
    "ParamPlan",
    "UnitPlan",
    "format_bytes",
    "plan_of",
    "remember_plan",
]


@dataclass(frozen=True, kw_only=True)
class ParamPlan:
    """One parameter as FSDP gathers it.

    Attributes:
        name: Within its unit ("attention.wq.weight").
        shape: On this rank before FSDP shards it: what tensor and expert parallelism have left.
        shard_dim: The dim that FSDP shards.
        dtype: In which it is gathered.
        reduce_dtype: In which its gradient is reduced.
        requires_grad: Whether it has a gradient.
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    requires_grad: bool = True

    def padded_numel(self, world: int) -> int:
        """Elements when gathered from ``world`` ranks: the sharded dim is padded to a multiple."""
        if not self.shape:
            return 1
        rows = math.ceil(self.shape[self.shard_dim] / world) * world
        others = [size for dim, size in enumerate(self.shape) if dim != self.shard_dim]
        return rows * math.prod(others)


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """Parameters that one collective gathers.

    Attributes:
        kind: "dense", or "experts" (on the expert mesh, when EP > 1).
        shard_world: Ranks that they are sharded over; 1 gathers nothing, but still copies.
        params: In the order of the collective's buffer.
    """

    kind: Literal["dense", "experts"]
    shard_world: int
    params: tuple[ParamPlan, ...]

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the gathered parameters, padding included, while they are unsharded."""
        return sum(p.padded_numel(self.shard_world) * p.dtype.itemsize for p in self.params)

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of the buffer whose reduce-scatter gives the gradients."""
        return sum(
            p.padded_numel(self.shard_world) * p.reduce_dtype.itemsize
            for p in self.params
            if p.requires_grad
        )


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """What FSDP does with one unit.

    Attributes:
        name: The unit's.
        kind: The unit's.
        groups: Its parameter groups, in the order in which they are gathered.
        reshard_after_forward: True, False, or the size of the smaller world.
        forward_prefetch: Units to gather while this one runs forward, by name.
        backward_prefetch: The same in backward.
    """

    name: str
    kind: UnitKind
    groups: tuple[GroupPlan, ...]
    reshard_after_forward: bool | int
    forward_prefetch: tuple[str, ...] = ()
    backward_prefetch: tuple[str, ...] = ()

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of its parameters while they are unsharded, on one rank."""
        return sum(group.gathered_nbytes for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class FSDPPlan:
    """The units of a model, or of the chunk of a pipeline stage, in forward order.

    Attributes:
        units: What FSDP shards.
        replicated: What is kept whole on every rank (``fsdp.replicated``); in no unit.
        late: Parameters that were given to FSDP afterwards (``fsdp.late``); in no unit.
    """

    units: tuple[UnitPlan, ...]
    replicated: tuple[ParamPlan, ...] = ()
    late: tuple[str, ...] = ()

    @property
    def replicated_nbytes(self) -> int:
        """Bytes of the replicated parameters in the dtype that they are used in."""
        return sum(p.padded_numel(1) * p.dtype.itemsize for p in self.replicated)

    def __getitem__(self, name: str) -> UnitPlan:
        return next(unit for unit in self.units if unit.name == name)

    @property
    def prefetch(self) -> dict[str, Prefetch]:
        """What is gathered while each unit runs, by unit."""
        return {u.name: Prefetch(u.forward_prefetch, u.backward_prefetch) for u in self.units}

    def table(self) -> str:
        """One line for each run of like units: how many, what is done with them, at what cost."""
        rows = [("unit", "gathered", "after forward", "ahead", "ahead in backward")]
        for first, last, count in _runs_of_like_units(self.units):
            name = first.name if count == 1 else f"{first.name} ... {last.name} ({count})"
            rows.append(
                (
                    name,
                    " + ".join(format_bytes(group.gathered_nbytes) for group in first.groups),
                    _say_reshard(first.reshard_after_forward),
                    str(len(first.forward_prefetch)),
                    str(len(first.backward_prefetch)),
                )
            )
        if self.replicated:
            name = f"replicated ({len(self.replicated)} parameters)"
            rows.append((name, format_bytes(self.replicated_nbytes), "kept", "", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


_PLANS: WeakKeyDictionary[nn.Module, FSDPPlan] = WeakKeyDictionary()


def remember_plan(model: nn.Module, plan: FSDPPlan) -> None:
    """Keep ``plan`` for ``plan_of``, as long as the model lives."""
    _PLANS[model] = plan


def plan_of(model: nn.Module) -> FSDPPlan:
    """What FSDP does with the units of a model that ``parallelize`` or ``shard_decoder`` sharded.

    Raises:
        ValueError: for a model that has not been sharded by titan_ext.
    """
    try:
        return _PLANS[model]
    except KeyError:
        raise ValueError("titan_ext has not sharded this model: it has no FSDP plan.") from None


def format_bytes(nbytes: int) -> str:
    """``nbytes`` in the largest binary unit in which it is at least 1."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"


def _runs_of_like_units(
    units: Sequence[UnitPlan],
) -> list[tuple[UnitPlan, UnitPlan, int]]:
    """Units that differ in nothing but the name, each kind in the place of its first."""
    runs: dict[object, list[UnitPlan]] = {}
    for unit in units:
        key = (
            unit.kind,
            tuple((group.kind, group.gathered_nbytes) for group in unit.groups),
            unit.reshard_after_forward,
            len(unit.forward_prefetch),
            len(unit.backward_prefetch),
        )
        runs.setdefault(key, []).append(unit)
    return [(run[0], run[-1], len(run)) for run in runs.values()]


def _say_reshard(reshard: bool | int) -> str:
    if reshard is True:
        return "resharded"
    if reshard is False:
        return "kept"
    return f"resharded to {reshard} ranks"
