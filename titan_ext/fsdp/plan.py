# SPDX-License-Identifier: BSD-3-Clause
"""The plan of what FSDP does with each unit, as plain data.

``resolve`` makes it, the log prints it, and ``shard`` follows it.
"""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch.nn as nn
from torch import dtype
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchtitan.distributed import ParallelDims

from titan_ext.base.messages import format_bytes
from titan_ext.fsdp.units import Unit, UnitKind, Wrap

GroupKind = Literal["dense", "experts"]


@dataclass(frozen=True, kw_only=True)
class ShardSizes:
    """Numbers of ranks that parameters are sharded over."""

    dense: int
    experts: int | None = None
    """Routed experts when EP > 1; None: they are sharded as the others."""
    expert_ranks: int = 1
    """The ranks that the experts of a layer are spread over, EP included."""

    @classmethod
    def of(cls, dims: ParallelDims) -> "ShardSizes":
        """The sizes of the meshes that ``fsdp.shard.FSDPMeshes`` has, from degrees alone."""
        dense = dims.dp_shard * dims.cp
        if dims.ep_enabled:
            experts = dense * dims.tp // dims.ep
            return cls(dense=dense, experts=experts, expert_ranks=experts * dims.ep)
        # Under spmd_types FSDP2 gets the whole SPMD mesh, with the axis of TP.
        tp = dims.tp if dims.spmd_backend == "spmd_types" else 1
        return cls(dense=dense, expert_ranks=dims.dp_replicate * dense * tp)

    def expert_shard_dim(self, num_experts: int) -> int:
        """The dim that FSDP shards routed experts along, as in Titan: 0, the experts.

        With more ranks than experts it is 1, so that no rank holds only padding.
        """
        return 1 if self.expert_ranks > num_experts else 0


@dataclass(frozen=True, kw_only=True)
class ParamPlan:
    """One parameter as FSDP gathers it."""

    name: str
    """In the model ("layers.3.attention.wq.weight")."""
    shape: tuple[int, ...]
    """On this rank before FSDP shards it, after tensor and expert parallelism."""
    dtype: dtype
    shard_dim: int = 0
    float8: bool = False

    def padded_numel(self, world: int) -> int:
        """Elements when gathered from ``world`` ranks: the sharded dim is padded to a multiple."""
        if not self.shape:
            return 1
        rows = math.ceil(self.shape[self.shard_dim] / world) * world
        others = [size for dim, size in enumerate(self.shape) if dim != self.shard_dim]
        return rows * math.prod(others)


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """Parameters that one collective gathers."""

    kind: GroupKind
    """Experts are on the expert mesh, when EP > 1."""
    shard_world: int
    """Ranks that they are sharded over; 1 gathers nothing, but still copies."""
    params: tuple[ParamPlan, ...]
    """In the order of the collective's buffer."""
    reduce_scatter: Literal["bfloat16"] | None = None
    """What travels, if not their dtypes (``fsdp.collectives``)."""

    @functools.cached_property
    def gathered_nbytes(self) -> int:
        """Bytes of the gathered parameters, padding included, while they are unsharded."""
        return sum(p.padded_numel(self.shard_world) * p.dtype.itemsize for p in self.params)

    @property
    def gathers_float8(self) -> bool:
        """True if some of what its all-gather sends is float8."""
        return self.shard_world > 1 and any(param.float8 for param in self.params)


@dataclass(frozen=True, kw_only=True)
class ReplicatedPlan(GroupPlan):
    """Parameters that every rank holds whole; one all-reduce sums their gradients."""

    module_names: tuple[str, ...]
    """The modules whose own parameters they are."""


@dataclass(frozen=True, kw_only=True)
class UnitPlan(Unit):
    """A unit, and what FSDP does with it."""

    groups: tuple[GroupPlan, ...]
    """Its parameter groups, in the order in which they are gathered."""
    reshard_after_forward: bool | int = True
    """True, False, or the size of the smaller world."""
    forward_prefetch: tuple[str, ...] = ()
    backward_prefetch: tuple[str, ...] = ()
    """Units to gather while this one runs, by name."""
    frees_buffer: bool = False
    """Whether forward frees its all-gather buffer before the next copy-out."""

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
    """The units of a model, or of the chunk of a pipeline stage, in forward order."""

    units: tuple[UnitPlan, ...]
    """What FSDP shards; vision towers first."""
    replicated: tuple[ReplicatedPlan, ...] = ()
    """Parameters that every rank holds whole (``fsdp.units``); in no unit."""
    quantized: tuple[str, ...] = ()
    """Names of the linears whose shards are quantized (``fsdp.nf4``)."""
    ignored: tuple[str, ...] = ()
    """Names of the parameters that FSDP leaves alone."""
    wrap: Wrap = "block"
    """``fsdp_wrap`` without "auto"."""
    why: str = field(default="", compare=False)
    """What "auto" became, and why; "" without "auto"."""
    reduce_scatter_buffers: int = 1
    """Inputs of reduce-scatters that may live at the same time."""
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    """In which dtypes parameters are used, and gradients summed."""
    cpu_offload: bool = False
    """Whether parameters, gradients and optimizer states stay in host memory."""
    symm_mem: bool = False

    @property
    def decoder_units(self) -> list[UnitPlan]:
        """All units but vision towers."""
        return [unit for unit in self.units if unit.kind is not UnitKind.VISION]

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
            nbytes = format_bytes(sum(group.gathered_nbytes for group in self.replicated))
            rows.append((f"replicated ({count} parameters)", nbytes, "kept", "", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def count_units(units: Sequence[UnitPlan]) -> str:
    """ "4 units in 5 groups: 1 embedding, 1 block, 1 norm, 1 head"."""
    kinds = Counter(unit.kind.value for unit in units)
    by_kind = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{len(units)} units in {sum(len(unit.groups) for unit in units)} groups: {by_kind}"


def plan_of(model: nn.Module) -> FSDPPlan | None:
    """The plan by which FSDP sharded a model; None if titan_ext has not sharded it."""
    return cast(Any, model).__dict__.get("_fsdp_plan")
