"""What FSDP will do with each unit, as plain data, before it does it."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from titan_ext.fsdp.units import UnitKind

__all__ = ["GroupPlan", "ParamPlan", "UnitPlan"]


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
