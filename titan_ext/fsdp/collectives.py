# SPDX-License-Identifier: BSD-3-Clause
"""Collectives and copies of ours for FSDP2's parameter groups.

FSDP2 lets a parameter group bring the object that allocates its buffers and runs its collectives,
and a function that copies out (private; tests/project/test_contracts.py). Only groups whose plan
says so get ours; sharded parameters, optimizer states and checkpoints are as before.

**Copy out directly.** Where routed experts have more ranks than there are experts, they are sharded
along dim 1. FSDP2 copies such parameters into a temporary of the whole group, and concatenates that
into place. A copy between strided views does it at once, bit for bit.

**Matrices at half the bytes** between ranks: of routed experts, which are most of a model's bytes
(``fsdp_float8_all_gather`` "experts", and ``fsdp_expert_reduce_scatter``), or of all blocks
("blocks"). No router, norm, bias or embedding is rounded.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, ``foreach_all_gather`` and
``_default_all_gather_output_fn``.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torchtitan.models.common.moe import GroupedExperts

from titan_ext.base.tensors import out_of_sight_of_checkpointing
from titan_ext.fp8.codec import ALIGNMENT, codec_name, default_codec
from titan_ext.fsdp.plan import FSDPPlan
from titan_ext.fsdp.units import param_groups

_PIECES = 8


def set_collectives(model: nn.Module, plan: FSDPPlan) -> None:
    """Give the groups of ``model``, which is sharded by ``plan``, what the plan says."""
    for unit in plan.decoder_units:
        module = unit.fsdp_module(model)
        for planned, group in zip(unit.groups, param_groups([module]), strict=True):
            # Float8AllGather finds parameters by their place. Without paths, since
            # FSDPParam._param_fqn is not set before the first forward (FSDPState._init_fqns).
            names = [p._module_info.param_name for p in group.fsdp_params]
            assert names == [p.name.rpartition(".")[2] for p in planned.params], unit.name
            if copies_out_directly() and any(p.shard_dim for p in planned.params):
                group._all_gather_output_fn = _copy_out  # pyrefly: ignore[missing-attribute]
            # What FSDPModule.set_custom_all_gather and set_custom_reduce_scatter do; they refuse a
            # unit of two groups.
            if planned.gathers_float8:
                # FSDP's own sizes: of uneven shards of tensor parallelism a plan has the largest.
                sizes = [p.padded_sharded_param_size.numel() for p in group.fsdp_params]
                float8 = [p.float8 for p in planned.params]
                group._all_gather_comm = Float8AllGather(list(zip(sizes, float8, strict=True)))
            if planned.reduce_scatter and planned.shard_world > 1:
                modules = [param._module_info.module for param in group.fsdp_params]
                assert all(isinstance(module, GroupedExperts) for module in modules)
                group._reduce_scatter_comm = BFloat16ReduceScatter()
                # Titan's divide factor of 1.0 makes the operation PREMUL_SUM otherwise
                # (_get_gradient_divide_factors in _fsdp_collectives.py), which ours does not do.
                module.set_force_sum_reduction_for_comms(True)


def copies_out_directly() -> bool:
    """True if this torch (2.15) lets a parameter group bring its own copy-out."""
    return hasattr(_fsdp_collectives, "_default_all_gather_output_fn")


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
        copy_out = _fsdp_collectives._default_all_gather_output_fn  # pyrefly: ignore
        copy_out(params, result, world)
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


class Float8AllGather(DefaultAllGather):
    """An all-gather of float8 that fills FSDP2's buffer with the values that float8 stands for.

    Every rank sends its shard in one collective: what stays exact, then the codec's data and
    scales. They arrive in the end of the buffer that they are decoded into, so that they need no
    buffer of their own. ``params`` are, of each parameter, in the order of the buffer, its elements
    and whether they travel in float8. Blocks of a scale begin with a parameter, so that its values
    do not depend on what is gathered with it.
    """

    def __init__(self, params: Sequence[tuple[int, bool]]) -> None:
        self._runs: list[tuple[int, bool]] = []
        block = default_codec().block
        for numel, float8 in params:
            before, before_too = self._runs[-1] if self._runs else (0, None)
            if float8 == before_too and (not float8 or before % block == 0):
                self._runs[-1] = before + numel, float8
            else:
                self._runs.append((numel, float8))

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather (n,) into (ranks * n,), on the current stream, in bf16, fp16 or fp32.

        ``input_tensor`` may be a part of ``output_tensor``; ``async_op`` is ignored. Returning
        ``None`` tells FSDP2 that there is nothing to wait for.
        """
        # Not all of FSDP2's hook: hooks of two halves of a batch (components.overlap) interleave.
        with out_of_sight_of_checkpointing():
            self._gather(output_tensor, input_tensor, group)

    def _gather(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        quantize, codec = torch.ops.titan_ext.float8_quantize, codec_name(default_codec())
        numel, ranks = input_tensor.numel(), group.size()
        total = sum(numel for numel, _ in self._runs)
        runs = [(size * numel // total, float8) for size, float8 in self._runs]
        exact, packed = [], []
        for values, (_, float8) in zip(input_tensor.split([n for n, _ in runs]), runs, strict=True):
            if float8:
                packed += [t.view(torch.uint8) for t in quantize(values, codec)]
            else:
                exact.append(values.view(torch.uint8))
        sizes = _sizes(runs, input_tensor.dtype)
        sent = torch.cat(
            [
                piece if len(piece) == size else nn.functional.pad(piece, (0, size - len(piece)))
                for piece, size in zip(exact + packed, sizes, strict=True)
            ]
        )
        received = output_tensor.view(torch.uint8)[-ranks * sent.numel() :]
        dist.all_gather_into_tensor(received, sent, group=group)
        # From the front, where a shard's values never reach the bytes of the shards after it. In
        # pieces, since the codec returns new tensors.
        step = math.ceil(ranks / _PIECES)
        rows, targets = received.view(ranks, -1), output_tensor.view(ranks, numel)
        for piece, target in zip(rows.split(step), targets.split(step), strict=True):
            values = _decoded(piece, runs, output_tensor.dtype)
            target.copy_(values[0] if len(values) == 1 else torch.cat(values, dim=1))


def _sizes(runs: Sequence[tuple[int, bool]], dtype: torch.dtype) -> list[int]:
    """Bytes of what a rank sends: exact runs, then data and scales of each other one.

    Padded, so that each begins where the codec reads 16 bytes at once; but not in tiny shards,
    which would then take more bytes than they have values.
    """
    codec = default_codec()
    sizes = [numel * dtype.itemsize for numel, float8 in runs if not float8]
    for numel in (numel for numel, float8 in runs if float8):
        sizes += [codec.width(numel, dtype), *codec.scales_shape(torch.Size([numel]))]
    padded = [size + -size % ALIGNMENT for size in sizes]
    if sum(padded) <= sum(numel for numel, _ in runs) * dtype.itemsize:
        return padded
    sizes[-1] += -sum(sizes) % dtype.itemsize
    return sizes


def _decoded(
    rows: torch.Tensor, runs: Sequence[tuple[int, bool]], dtype: torch.dtype
) -> list[torch.Tensor]:
    """The values of ``runs`` in the bytes that some ranks sent, a row each."""
    codec = default_codec()
    pieces = iter(rows.split_with_sizes(_sizes(runs, dtype), dim=1))
    whole = [next(pieces)[:, : n * dtype.itemsize].view(dtype) for n, float8 in runs if not float8]
    rounded = [
        torch.ops.titan_ext.float8_dequantize(
            next(pieces)[:, : codec.width(n, dtype)].view(codec.float8),
            next(pieces),
            codec_name(codec),
            dtype,
        )
        for n, float8 in runs
        if float8
    ]
    return [(rounded if float8 else whole).pop(0) for _, float8 in runs]


class BFloat16ReduceScatter(DefaultReduceScatter):
    """A reduce-scatter of bf16 that sums in the dtype of its output, by an all-to-all.

    Gradients of bf16 parameters are bf16 until FSDP2 copies them into the buffer, so this loses
    nothing. But it rounds what accumulates in fp32 under ``set_requires_gradient_sync(False)``:
    FSDP2 says nothing of that where it allocates the buffer. The sum over two ranks is the same to
    the bit; over more its order may differ.
    """

    _next_is_output = False  # FSDP2 allocates the input first (foreach_reduce)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The input in bf16, the output in ``dtype``."""
        is_output, self._next_is_output = self._next_is_output, not self._next_is_output
        return super().allocate(size, dtype=dtype if is_output else torch.bfloat16, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum (ranks * n,) in bf16 into (n,) in fp32, on the current stream.

        ``op`` is SUM: Titan divides the loss, not the gradients. ``async_op`` is ignored.
        """
        assert op == dist.ReduceOp.SUM
        # Not after an exception between the two that somebody caught.
        assert input_tensor.dtype == torch.bfloat16, "FSDP2 allocates an input, and then an output"
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        by_rank = received.view(group.size(), -1)
        torch.sum(by_rank, 0, dtype=output_tensor.dtype, out=output_tensor)
