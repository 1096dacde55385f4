# SPDX-License-Identifier: BSD-3-Clause
"""Gathered parameters where they are used, with fewer copies than FSDP2 makes.

**Copy out directly.** Where routed experts have more ranks than there are experts, they are sharded
along dim 1. FSDP2 copies such parameters into a temporary of the whole group, and concatenates that
into place. A copy between strided views does it at once, bit for bit.

**Gather in place** (``fsdp_gather_in_place``). FSDP2 gathers into a buffer, from which it copies.
Here the parameters of a group are views of one buffer, one after the other, and each is gathered
into its place: no second copy of a unit, and no copy-out.

FSDP2 has an object that gathers and a function that copies out for each parameter group (private;
tests/test_contracts.py). Only groups that need ours get them.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, ``foreach_all_gather`` and
``_default_all_gather_output_fn``; _fsdp_param.py, ``init_unsharded_param``.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad
from torch.distributed.fsdp._fully_shard._fsdp_param import (
    FSDPParam,
    ShardedState,
    _get_dtensor_spec_with_dtype,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from titan_ext.fsdp.units import param_groups

if TYPE_CHECKING:
    from titan_ext.fsdp.plan import GroupPlan, UnitPlan


def copies_out_directly() -> bool:
    """Whether this torch (2.15) lets a parameter group bring its own copy-out."""
    return hasattr(_fsdp_collectives, "_default_all_gather_output_fn")


def copy_out_directly(model: nn.Module) -> None:
    """Give the groups under ``model`` that are sharded along other dims than 0 our copy-out."""
    if not copies_out_directly():
        return
    for group in param_groups(model.modules()):
        if any(param.fsdp_placement.dim != 0 for param in group.fsdp_params):
            group._all_gather_output_fn = _copy_out


@torch.no_grad()
def _copy_out(params: list[FSDPParam], result: Any, world: int) -> None:
    """Fill the unsharded tensors of ``params`` from the flat buffer of ``world`` ranks' shards."""
    buffer, _, _, dtypes, numels, splits = result
    is_plain = all(
        param.sharded_state == ShardedState.SHARDED
        and not hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
        for param in params
    )
    if not is_plain or buffer.dtype == torch.uint8:  # extensions, or several dtypes as bytes
        _fsdp_collectives._default_all_gather_output_fn(params, result, world)
        return
    shards = buffer.view(world, -1).split_with_sizes(splits, dim=1)
    for param, shard, its_numels, its_dtypes in zip(params, shards, numels, dtypes, strict=True):
        param.init_all_gather_outputs(its_numels, its_dtypes, world, buffer.device)
        param.alloc_all_gather_outputs()
        (whole,) = param.all_gather_outputs
        dim, shape = param.fsdp_placement.dim, param.padded_sharded_param_size
        by_rank = whole.view(*shape[:dim], world, *shape[dim:]).movedim(dim, 0)
        kept = () if whole.is_inference() else (whole,)  # as FSDP2: autograd sees no change
        with torch.autograd._unsafe_preserve_version_counter(kept):
            by_rank.copy_(shard.unflatten(1, shape))


def fits_in_place(group: "GroupPlan") -> bool:
    """Whether the ranks' shards of each parameter, one after the other, are the parameter."""
    dtypes = {param.dtype for param in group.params}
    is_even = all(
        param.shape and param.shard_dim == 0 and param.shape[0] % group.shard_world == 0
        for param in group.params
    )
    return is_even and group.shard_world > 1 and group.all_gather is None and len(dtypes) == 1


def gather_in_place(model: nn.Module, units: Iterable["UnitPlan"]) -> None:
    """Give the groups that are planned so an all-gather into the parameters themselves."""
    for unit in units:
        groups = param_groups([unit.fsdp_module(model)])
        for planned, group in zip(unit.groups, groups, strict=True):
            if planned.in_place:
                comm = InPlaceAllGather(group)
                group._all_gather_comm = comm
                group._all_gather_output_fn = comm.finish


class InPlaceAllGather(AllGather):
    """Gathers each parameter of a group into its part of one buffer.

    FSDP2 frees the storage of every parameter, which here is one. It fills the same storage again,
    so tensors that autograd has saved are right in backward.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        self._params: list[FSDPParam] = group.fsdp_params
        self._buffer: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The memory of the parameters, (ranks * n,); as a new tensor, which FSDP2 drops."""
        numel = int(size[0])
        if self._buffer is None:
            self._buffer = torch.empty(numel, dtype=dtype, device=device)
            self._set_unsharded_params(self._buffer)
        self._buffer.untyped_storage().resize_(numel * dtype.itemsize)
        return self._buffer.data

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather, on the current stream, in one launch where the backend can.

        Args:
            output_tensor: (ranks * n,).
            input_tensor: (n,), this rank's shards; a part of ``output_tensor``, where others go.
            group: Whose ranks' shards to gather.
            async_op: Ignored.
        """
        numels = [param.padded_sharded_param_size.numel() for param in self._params]
        shards = input_tensor.clone().split(numels)
        targets = output_tensor.split([numel * group.size() for numel in numels])
        with _coalescing_manager(group):
            for target, shard in zip(targets, shards, strict=True):
                dist.all_gather_into_tensor(target, shard, group=group)

    def finish(self, params: list[FSDPParam], result: Any, world: int) -> None:
        """Called in place of the copy-out, on the stream that computes with the parameters."""
        assert self._buffer is not None
        if self._buffer.device.type != "cpu":
            # It was allocated on the stream that gathers, and is freed on this one.
            self._buffer.record_stream(torch.accelerator.current_stream(self._buffer.device))

    def _set_unsharded_params(self, buffer: torch.Tensor) -> None:
        """What FSDP2 does after the first gather, but for where in the buffer each begins."""
        world = buffer.numel() // sum(p.padded_sharded_param_size.numel() for p in self._params)
        start = 0
        for param in self._params:
            numel = param.padded_sharded_param_size.numel() * world
            # With a version counter of its own: autograd must not see the next gather.
            view = buffer.data.narrow(0, start, numel)
            start += numel
            param.all_gather_outputs = [view]
            whole = view.view(param._orig_size)
            if not param.is_spmd_types and param._unsharded_dtensor_spec is not None:
                spec = _get_dtensor_spec_with_dtype(param._unsharded_dtensor_spec, whole.dtype)
                whole = _from_local_no_grad(whole, spec)
            requires_grad = param.sharded_param.requires_grad
            param._unsharded_param = nn.Parameter(whole, requires_grad=requires_grad)
            param._unsharded_param.grad_dtype = param.unsharded_grad_dtype
