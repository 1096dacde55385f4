"""What FSDP will do with each unit, as plain data, before it does it.

A plan is made from shapes and settings alone: of a mesh it needs the sizes, of a model the shapes,
which the meta device has. The log prints it, prefetching by bytes reads it, and the parameter
memory of a run is predicted from it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from titan_ext.fsdp.prefetch import NOTHING_AHEAD, Prefetch, Reach, plan_prefetch
from titan_ext.fsdp.reshard import Reshard, reshard_after_forward
from titan_ext.fsdp.units import Unit, UnitKind, innermost_first

__all__ = [
    "FSDPPlan",
    "GroupPlan",
    "ParamPlan",
    "UnitPlan",
    "format_bytes",
    "make_plan",
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
    """The units of a model, or of the chunk of a pipeline stage, in forward order."""

    units: tuple[UnitPlan, ...]

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
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def make_plan(
    units: Sequence[Unit],
    *,
    shard_world: int,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    experts_world: int | None = None,
    expert_shard_dims: Mapping[str, int] | None = None,
    reshard: Reshard = "default",
    reshard_groups: Mapping[str, Reshard] | None = None,
    pp_enabled: bool = False,
    prefetch: Reach = NOTHING_AHEAD,
    prefetch_backward: Reach = NOTHING_AHEAD,
) -> FSDPPlan:
    """Plan what FSDP does with ``units``.

    Args:
        units: In forward order, before ``fully_shard``.
        shard_world: Ranks that dense parameters are sharded over.
        param_dtype: In which floating-point parameters are gathered.
        reduce_dtype: In which gradients are reduced.
        experts_world: Ranks that routed experts are sharded over when EP > 1, else None.
        expert_shard_dims: The dim that routed experts are sharded along, by unit; else 0.
        reshard: ``parallelism.fsdp_reshard_after_forward``.
        reshard_groups: ``parallelism.fsdp_reshard_groups``.
        pp_enabled: Whether this is a chunk of a pipeline.
        prefetch: How far ahead in forward.
        prefetch_backward: How far ahead in backward.

    Raises:
        ValueError: for a reshard setting that does not fit.
    """
    owned = _owned_parameters(units)
    groups = {
        unit.name: _groups_of(
            unit,
            owned[unit.name],
            shard_world,
            experts_world,
            param_dtype,
            reduce_dtype,
            (expert_shard_dims or {}).get(unit.name, 0),
        )
        for unit in units
    }
    nbytes = {name: sum(group.gathered_nbytes for group in groups[name]) for name in groups}
    largest = max(nbytes.values(), default=0)
    ahead = plan_prefetch(units, nbytes, prefetch, prefetch_backward)
    return FSDPPlan(
        units=tuple(
            UnitPlan(
                name=unit.name,
                kind=unit.kind,
                groups=groups[unit.name],
                reshard_after_forward=reshard_after_forward(
                    unit,
                    reshard,
                    reshard_groups or {},
                    pp_enabled=pp_enabled,
                    is_rounding_error=nbytes[unit.name] * 100 <= largest,
                    has_dtensors=any(isinstance(p, DTensor) for _, p in owned[unit.name]),
                    group_worlds=[group.shard_world for group in groups[unit.name]],
                ),
                forward_prefetch=ahead[unit.name].forward,
                backward_prefetch=ahead[unit.name].backward,
            )
            for unit in units
        )
    )


_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."
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


def _groups_of(
    unit: Unit,
    named: Sequence[tuple[str, nn.Parameter]],
    shard_world: int,
    experts_world: int | None,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    expert_shard_dim: int,
) -> tuple[GroupPlan, ...]:
    experts = set(unit.experts.parameters()) if unit.experts is not None else set()

    def plan(name: str, param: nn.Parameter) -> ParamPlan:
        local = param.to_local() if isinstance(param, DTensor) else param
        floating = param.is_floating_point()
        return ParamPlan(
            name=name,
            shape=tuple(local.shape),
            shard_dim=expert_shard_dim if param in experts else 0,
            dtype=param_dtype if floating else param.dtype,
            reduce_dtype=reduce_dtype if floating else param.dtype,
            requires_grad=param.requires_grad,
        )

    own_mesh = experts if experts_world is not None else set()
    dense = tuple(plan(name, p) for name, p in named if p not in own_mesh)
    routed = tuple(plan(name, p) for name, p in named if p in own_mesh)
    groups = []
    if dense:
        groups.append(GroupPlan(kind="dense", shard_world=shard_world, params=dense))
    if routed:
        assert experts_world is not None
        groups.append(GroupPlan(kind="experts", shard_world=experts_world, params=routed))
    return tuple(groups)


def _owned_parameters(units: Sequence[Unit]) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """The parameters of each unit by its name; the innermost unit that holds one owns it."""
    owned: dict[str, list[tuple[str, nn.Parameter]]] = {}
    taken: set[nn.Parameter] = set()
    for unit in innermost_first(units):
        owned[unit.name] = []
        for prefix, module in zip(unit.module_names, unit.modules, strict=True):
            for name, param in module.named_parameters(prefix):
                if param not in taken:
                    taken.add(param)
                    owned[unit.name].append((name.replace(_CHECKPOINT_PREFIX, ""), param))
    return owned


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
