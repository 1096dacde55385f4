# SPDX-License-Identifier: BSD-3-Clause
"""Routed experts at half the bytes between ranks, opt-in: FSDP2 with collectives of ours.

FSDP2 lets a parameter group bring the object that allocates its buffers and runs its collectives.
Those here change what travels, and nothing else: FSDP2's buffers, sharded parameters, optimizer
states and checkpoints are as before. Only groups that hold nothing but routed experts get them:
these are most of a model's bytes, and no router, norm or embedding is rounded.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torchtitan.models.common.moe import GroupedExperts

from titan_ext.fp8.codec import codec_name
from titan_ext.fp8.saved_tensors import compiles_for
from titan_ext.fsdp.plan import WIRE_CODEC, FSDPPlan, GroupPlan
from titan_ext.fsdp.settings import EXPERT_ALL_GATHER, FSDPSettings
from titan_ext.fsdp.units import param_groups

_PIECES = 8


class Float8AllGather(DefaultAllGather):
    """An all-gather of float8 that fills FSDP2's buffer with the values that float8 stands for.

    Every rank sends ``WIRE_CODEC``'s data and scales of its shard, in one collective. They arrive
    in the end of the buffer that they are decoded into, so that they need no buffer of their own.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather, on the current stream; ``None`` tells FSDP2 that there is nothing to wait for.

        Args:
            output_tensor: (ranks * n,), bf16, fp16 or fp32; ``input_tensor`` may be a part of it.
            input_tensor: (n,), the same dtype.
            group: Whose ranks' shards to gather.
            async_op: Ignored.
        """
        ops, codec = torch.ops.titan_ext, codec_name(WIRE_CODEC)
        one_kernel = compiles_for(input_tensor.device)
        numel, ranks = input_tensor.numel(), group.size()
        data, scales = ops.float8_quantize(input_tensor, codec, None, one_kernel)
        sent = torch.cat((data.view(torch.uint8), scales))
        received = output_tensor.view(torch.uint8)[-ranks * sent.numel() :]
        dist.all_gather_into_tensor(received, sent, group=group)
        # From the front, where a shard's values never reach the bytes of the shards after it. In
        # pieces, since the codec returns new tensors.
        packed, values = received.view(ranks, -1), output_tensor.view(ranks, numel)
        step = math.ceil(ranks / _PIECES)
        for piece, target in zip(packed.split(step), values.split(step), strict=True):
            float8 = piece[:, :numel].view(WIRE_CODEC.float8)
            target.copy_(
                ops.float8_dequantize(
                    float8, piece[:, numel:], codec, output_tensor.dtype, one_kernel
                )
            )


class BFloat16ReduceScatter(DefaultReduceScatter):
    """A reduce-scatter of bf16 that sums in the dtype of its output, by an all-to-all.

    Gradients of bf16 parameters are bf16 until FSDP2 copies them into the buffer, so this loses
    nothing. The sum over two ranks is the same to the bit; over more its order may differ.
    """

    _next_is_output = False  # FSDP2 allocates the input first

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
        """Sum, on the current stream.

        Args:
            output_tensor: (n,), fp32.
            input_tensor: (ranks * n,), bf16.
            group: Whose ranks' gradients to sum.
            op: SUM; Titan divides the loss, not the gradients.
            async_op: Ignored.
        """
        assert op == dist.ReduceOp.SUM
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        by_rank = received.view(group.size(), -1)
        torch.sum(by_rank, 0, dtype=output_tensor.dtype, out=output_tensor)


def set_expert_collectives(
    model: nn.Module, plan: FSDPPlan, settings: FSDPSettings, *, is_chunk: bool
) -> None:
    """Give the groups of routed experts the collectives that ``plan`` says.

    Args:
        model: Sharded according to ``plan``.
        is_chunk: Whether it is the chunk of a pipeline stage, which may have no experts.

    Raises:
        ValueError: for a model without sharded experts, or experts with other than matrices.
    """
    if not any(value for _, value, _ in settings.expert_collectives):
        return
    found = False
    for unit in plan.decoder_units:
        groups = param_groups([unit.fsdp_module(model)])
        for planned, group in zip(unit.groups, groups, strict=True):
            if not (planned.all_gather or planned.reduce_scatter) or planned.shard_world == 1:
                continue
            found = True
            modules = [param._module_info.module for param in group.fsdp_params]
            assert all(isinstance(module, GroupedExperts) for module in modules)
            # What FSDPModule.set_custom_all_gather and set_custom_reduce_scatter do; they refuse a
            # unit of two groups.
            if planned.all_gather:
                _refuse_vectors(planned)
                group._all_gather_comm = Float8AllGather()
            if planned.reduce_scatter:
                group._reduce_scatter_comm = BFloat16ReduceScatter()
                unit.fsdp_module(model).set_force_sum_reduction_for_comms(True)
    if not found and not is_chunk:
        key = next(key for key, value, _ in settings.expert_collectives if value)
        raise ValueError(f"{key}: FSDP shards no routed experts of this model.")


def _refuse_vectors(planned: GroupPlan) -> None:
    # A bias is one value a row: its neighbours in a block of 128 are those of other rows.
    for param in planned.params:
        if len(param.shape) < 3:
            raise ValueError(
                f"{EXPERT_ALL_GATHER} sends the matrices of experts in float8; {param.name} is a "
                "bias, which would be rounded too. Expected no such key for this model."
            )
