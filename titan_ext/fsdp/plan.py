# SPDX-License-Identifier: BSD-3-Clause
"""What FSDP will do with each unit, as plain data, before it does it.

``make_plan`` needs shapes and settings alone: sizes of a mesh, and a model on the meta device. The
log prints the plan, ``shard`` follows it, and ``memory.predict`` computes bytes from it.
"""

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch.nn as nn
from torch import Size, bfloat16, dtype
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts

from titan_ext.fp8 import Codec
from titan_ext.fsdp.mesh import GroupKind, ShardSizes
from titan_ext.fsdp.nf4 import find_frozen_linears
from titan_ext.fsdp.prefetch import plan_prefetch
from titan_ext.fsdp.settings import EXPERT_ALL_GATHER, FSDPSettings, copies_out_directly
from titan_ext.fsdp.units import (
    Unit,
    UnitKind,
    find_ignored,
    find_replicated,
    innermost_first,
    replicated_by_unit,
    units_without,
    vision_units,
)
from titan_ext.names import format_bytes

WIRE_CODEC = Codec()
"""How experts travel in float8: e4m3, and a byte of scale for 128 neighbours."""


@dataclass(frozen=True, kw_only=True)
class ParamPlan:
    """One parameter as FSDP gathers it.

    Attributes:
        name: In the model ("layers.3.attention.wq.weight").
        shape: On this rank before FSDP shards it, after tensor and expert parallelism.
        shard_dim: The dim that FSDP shards.
        dtype: The dtype in which it is gathered.
        reduce_dtype: The dtype in which its gradient is reduced.
        requires_grad: Whether it has a gradient.
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int
    dtype: dtype
    reduce_dtype: dtype
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
        all_gather, reduce_scatter: What travels, if not their dtypes (``fsdp.collectives``).
        in_place: Whether they are gathered into themselves, without a buffer.
    """

    kind: GroupKind
    shard_world: int
    params: tuple[ParamPlan, ...]
    all_gather: Literal["float8"] | None = None
    reduce_scatter: Literal["bfloat16"] | None = None
    in_place: bool = False

    @functools.cached_property
    def gathered_nbytes(self) -> int:
        """Bytes of the gathered parameters, padding included, while they are unsharded."""
        return sum(p.padded_numel(self.shard_world) * p.dtype.itemsize for p in self.params)

    @property
    def all_gather_nbytes(self) -> int:
        """Bytes of all ranks' shards as they travel."""
        if self.all_gather is None:
            return self.gathered_nbytes
        shards = sum(p.padded_numel(self.shard_world) for p in self.params) // self.shard_world
        return self.shard_world * WIRE_CODEC.nbytes(Size((shards,)))

    @property
    def sends_less(self) -> bool:
        """Whether what travels is not of its dtypes."""
        return bool(self.all_gather or self.reduce_scatter) and self.shard_world > 1

    @property
    def fits_in_place(self) -> bool:
        """Whether the ranks' shards of each parameter, one after the other, are the parameter."""
        dtypes = {param.dtype for param in self.params}
        is_even = all(
            param.shape and param.shard_dim == 0 and param.shape[0] % self.shard_world == 0
            for param in self.params
        )
        return is_even and self.shard_world > 1 and self.all_gather is None and len(dtypes) == 1

    def reduce_scatter_nbytes(self, params: Iterable[ParamPlan]) -> int:
        """Bytes of the gradients of ``params``, some of its own, as they travel."""
        sent = bfloat16 if self.reduce_scatter else None
        sizes = ((p, (sent or p.reduce_dtype).itemsize) for p in params)
        return sum(p.padded_numel(self.shard_world) * itemsize for p, itemsize in sizes)


@dataclass(frozen=True, kw_only=True)
class ReplicatedPlan:
    """Parameters that every rank holds whole; one all-reduce sums their gradients.

    Attributes:
        kind: "dense", or "experts" (on the expert mesh, when EP > 1).
        module_names: The modules whose own parameters they are.
        params: Those parameters.
    """

    kind: GroupKind
    module_names: tuple[str, ...]
    params: tuple[ParamPlan, ...]


@dataclass(frozen=True, kw_only=True)
class UnitPlan(Unit):
    """A unit, and what FSDP does with it.

    Attributes:
        groups: Its parameter groups, in the order in which they are gathered.
        reshard_after_forward: True, False, or the size of the smaller world.
        forward_prefetch, backward_prefetch: Units to gather while this one runs, by name.
        frees_buffer: Whether forward frees its all-gather buffer before the next copy-out.
    """

    groups: tuple[GroupPlan, ...]
    reshard_after_forward: bool | int = True
    forward_prefetch: tuple[str, ...] = ()
    backward_prefetch: tuple[str, ...] = ()
    frees_buffer: bool = False

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of its parameters while they are unsharded, on one rank."""
        return sum(group.gathered_nbytes for group in self.groups)

    @property
    def treatment(self) -> tuple[str, ...]:
        """Its kind, and the cells of its row in a plan's table: like units differ only by name."""
        after = self.reshard_after_forward
        if isinstance(after, bool):
            said = "resharded" if after else "kept"
        else:
            said = f"resharded to {after} ranks"
        return (
            self.kind,
            " + ".join(format_bytes(group.gathered_nbytes) for group in self.groups),
            said,
            str(len(self.forward_prefetch)),
            str(len(self.backward_prefetch)),
        )


@dataclass(frozen=True, kw_only=True)
class FSDPPlan:
    """The units of a model, or of the chunk of a pipeline stage, in forward order.

    Attributes:
        units: What FSDP shards; vision towers first.
        replicated: Parameters that every rank holds whole (``fsdp.units``); in no unit.
        quantized: Names of the linears whose shards are quantized (``fsdp.nf4``).
        ignored: Names of the parameters that FSDP leaves alone.
        unmanaged: Names of the parameters that FSDP got later (``fsdp.unmanaged``); in no unit.
        reduce_scatter_buffers: Inputs of reduce-scatters that may live at the same time.
        chosen: What "auto" became, and why; "" without "auto".
        copies_out_directly: Whether groups that are sharded along another dim than 0 are copied out
            without a temporary (``fsdp.collectives``).
    """

    units: tuple[UnitPlan, ...]
    replicated: tuple[ReplicatedPlan, ...] = ()
    quantized: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    unmanaged: tuple[str, ...] = ()
    reduce_scatter_buffers: int = 1
    chosen: str = ""
    copies_out_directly: bool = True

    @property
    def decoder_units(self) -> list[UnitPlan]:
        """All units but vision towers."""
        return [unit for unit in self.units if unit.kind is not UnitKind.VISION]

    @property
    def replicated_nbytes(self) -> int:
        """Bytes of the replicated parameters in the dtype that they are used in."""
        params = [param for group in self.replicated for param in group.params]
        return sum(p.padded_numel(1) * p.dtype.itemsize for p in params)

    def __getitem__(self, name: str) -> UnitPlan:
        return next(unit for unit in self.units if unit.name == name)

    def table(self) -> str:
        """A table with one line for each run of like units: their number, bytes and treatment."""
        rows: list[tuple[str, ...]] = [
            ("unit", "gathered", "after forward", "ahead", "ahead in backward")
        ]
        runs: dict[tuple[str, ...], list[UnitPlan]] = {}
        for unit in self.units:
            runs.setdefault(unit.treatment, []).append(unit)
        for (_, *treatment), (first, *others) in runs.items():
            last = f" ... {others[-1].name} ({len(others) + 1})" if others else ""
            rows.append((first.name + last, *treatment))
        if self.replicated:
            count = sum(len(group.params) for group in self.replicated)
            nbytes = format_bytes(self.replicated_nbytes)
            rows.append((f"replicated ({count} parameters)", nbytes, "kept", "", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def count_units(units: Iterable[UnitPlan]) -> str:
    """ "3 units in 4 groups: 1 embedding, 1 block, 1 head"."""
    units = list(units)
    kinds = Counter(unit.kind.value for unit in units)
    by_kind = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{len(units)} units in {sum(len(unit.groups) for unit in units)} groups: {by_kind}"


PLANS: WeakKeyDictionary[nn.Module, FSDPPlan] = WeakKeyDictionary()
"""Of the models that titan_ext has sharded, as long as they live."""


def plan_of(model: nn.Module) -> FSDPPlan:
    """What FSDP does with the units of a model that titan_ext has sharded; else ValueError."""
    if model not in PLANS:
        raise ValueError("titan_ext has not sharded this model: it has no FSDP plan.")
    return PLANS[model]


def make_plan(
    model: Decoder,
    units: Sequence[Unit],
    settings: FSDPSettings,
    sizes: ShardSizes,
    *,
    is_chunk: bool = False,
) -> FSDPPlan:
    """Plan what FSDP does with ``units``, and with the vision towers of ``model``.

    Args:
        model: A decoder before FSDP, tensor and expert parallelism applied.
        units: Its units (``fsdp.units.plan_units``), in forward order.
        is_chunk: Whether a pipeline stage holds only this part of the model. Some names may be in
            other stages then, and "default" keeps units gathered after forward.

    Raises:
        ValueError: for a setting that does not fit the model, or a name that is not in it.
    """
    # With pipeline parallelism a microbatch may have no images, and FSDP2 fails on a unit that
    # never runs. So there the parameters of a vision tower stay with the root.
    towers = [] if is_chunk else vision_units(model)
    ignored = find_ignored(model, settings.ignored, is_chunk=is_chunk)
    replicated = find_replicated(model, settings.replicate, is_chunk=is_chunk)
    quantized: list[str] = []
    if settings.quantize_frozen:
        quantized = find_frozen_linears(
            model,
            settings.quantize_frozen_modules,
            shard_world=sizes.dense,
            is_chunk=is_chunk,
            replicated=replicated,
        )
    replicated_plans = [
        plan
        for names in replicated_by_unit(units, replicated)
        for plan in _plan_replicated(model, names, settings, sizes)
    ]
    units = units_without(model, units, replicated)
    if not is_chunk:
        settings.check_reshard_groups([*towers, *units])
    others = {*ignored.values()}
    for name in replicated:
        others |= {*model.get_submodule(name).parameters(recurse=False)}
    planned = _plan_units(model, units, settings, sizes, others, is_chunk=is_chunk)
    _check_expert_collectives(planned, settings, is_chunk)
    frees_buffers = not settings.gather_in_place
    return FSDPPlan(
        units=(
            *_plan_units(model, towers, settings, sizes),
            *plan_prefetch(planned, *settings.prefetch_limits, frees_buffers=frees_buffers),
        ),
        replicated=tuple(replicated_plans),
        quantized=tuple(quantized),
        ignored=tuple(ignored),
        reduce_scatter_buffers=settings.reduce_scatter_inputs,
        chosen=settings.chosen,
        copies_out_directly=copies_out_directly(),
    )


def _plan_units(
    model: nn.Module,
    units: Sequence[Unit],
    settings: FSDPSettings,
    sizes: ShardSizes,
    others: Collection[nn.Parameter] = (),
    *,
    is_chunk: bool = False,
) -> list[UnitPlan]:
    """Plan ``units``, but for prefetching; ``others`` are parameters outside all of them."""
    owned = _owned_parameters(model, units, others)
    plans = [
        UnitPlan(**vars(u), groups=_plan_groups(model, u, owned[u.name], settings, sizes))
        for u in units
    ]
    largest = max((plan.gathered_nbytes for plan in plans), default=0)
    return [
        replace(
            plan,
            reshard_after_forward=settings.reshard_of(
                plan,
                is_chunk=is_chunk,
                is_rounding_error=plan.gathered_nbytes * 100 <= largest,
                has_dtensors=any(isinstance(p, DTensor) for p in owned[plan.name].values()),
            ),
        )
        for plan in plans
    ]


def _plan_groups(
    model: nn.Module,
    unit: Unit,
    owned: Mapping[str, nn.Parameter],
    settings: FSDPSettings,
    sizes: ShardSizes,
) -> tuple[GroupPlan, ...]:
    experts = unit.experts_in(model)
    routed = set(experts.parameters()) if experts is not None else set()
    expert_dim = sizes.expert_shard_dim(experts.num_experts) if experts is not None else 0
    dense, on_expert_mesh = [], []
    for name, param in owned.items():
        is_routed = param in routed
        group = on_expert_mesh if is_routed and sizes.experts is not None else dense
        group.append(_plan_param(name, param, settings, expert_dim if is_routed else 0))
    wire: dict[str, Any] = {
        "all_gather": settings.expert_all_gather,
        "reduce_scatter": settings.expert_reduce_scatter,
    }
    own = wire if unit.kind is UnitKind.EXPERTS else {}
    groups = [GroupPlan(kind="dense", shard_world=sizes.dense, params=tuple(dense), **own)]
    if sizes.experts is not None:
        params = tuple(on_expert_mesh)
        groups.append(GroupPlan(kind="experts", shard_world=sizes.experts, params=params, **wire))
    in_place = settings.gather_in_place
    return tuple(replace(g, in_place=in_place and g.fits_in_place) for g in groups if g.params)


def _check_expert_collectives(
    units: Sequence[UnitPlan], settings: FSDPSettings, is_chunk: bool
) -> None:
    """Refuse keys for a model without sharded experts, or for experts with other than matrices."""
    sent = [group for unit in units for group in unit.groups if group.sends_less]
    keys = [key for key, value, _ in settings.expert_collectives if value]
    if keys and not sent and not is_chunk:
        raise ValueError(f"{keys[0]}: FSDP shards no routed experts of this model.")
    for param in (param for group in sent if group.all_gather for param in group.params):
        # A bias is one value a row: its neighbours in a block of 128 are those of other rows.
        if len(param.shape) < 3:
            raise ValueError(
                f"{EXPERT_ALL_GATHER} sends the matrices of experts in float8; {param.name} is a "
                "bias, which would be rounded too. Expected no such key for this model."
            )


def _plan_replicated(
    model: nn.Module, names: Sequence[str], settings: FSDPSettings, sizes: ShardSizes
) -> list[ReplicatedPlan]:
    """One group for the modules ``names`` of a unit, and one for its routed experts under EP."""
    kinds: dict[GroupKind, list[str]] = {}
    for name in names:
        is_routed = isinstance(model.get_submodule(name), GroupedExperts)
        kind = "experts" if is_routed and sizes.experts is not None else "dense"
        kinds.setdefault(kind, []).append(name)
    return [
        ReplicatedPlan(
            kind=kind,
            module_names=tuple(modules),
            params=tuple(
                _plan_param(name, param, settings)
                for path in modules
                for name, param in model.get_submodule(path).named_parameters(path, recurse=False)
            ),
        )
        for kind, modules in kinds.items()
    ]


def _plan_param(
    name: str, param: nn.Parameter, settings: FSDPSettings, shard_dim: int = 0
) -> ParamPlan:
    local = param.to_local() if isinstance(param, DTensor) else param
    floating = param.is_floating_point()
    return ParamPlan(
        name=name,
        shape=tuple(local.shape),
        shard_dim=shard_dim,
        dtype=settings.param_dtype if floating else param.dtype,
        reduce_dtype=settings.reduce_dtype if floating else param.dtype,
        requires_grad=param.requires_grad,
    )


def _owned_parameters(
    model: nn.Module, units: Sequence[Unit], others: Collection[nn.Parameter]
) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters of each unit by its name, less ``others``; the innermost unit owns one."""
    owned: dict[str, dict[str, nn.Parameter]] = {}
    taken = set(others)
    for unit in innermost_first(units):
        owned[unit.name] = {}
        for path, module in zip(unit.module_names, unit.modules(model), strict=True):
            for name, param in module.named_parameters(path):
                if param not in taken:
                    taken.add(param)
                    owned[unit.name][canonical_fqn(name)] = param
    return owned
