# SPDX-License-Identifier: BSD-3-Clause
"""The rule behind "auto" for FSDP's units, prefetch and reduce-scatter buffers, without a model.

Smaller units hold less and gather more often, and each costs the host time. Experts that lie whole
on a rank are never gathered, and gathers within a node hide behind computation, so attention apart
saves next to nothing there: whole blocks. On one H100 it took 10 % of an eager step more for 0.3 %
of the memory; planned on 8, up to 4 % more, and no less memory is reserved.

Across nodes gathers may not hide. There the unit of experts alone issues as many collectives as a
whole block. With two gathers ahead and two reduce-scatters behind backward it takes no more time
than stock's blocks, by the clock of a dry run (benchmarks/LOG.md), and holds no more bytes. But its
block is compiled in pieces, which hold more and fuse less. Where exchanges would leave blocks whole
for the compiler, it is the last choice: by the same clock it takes 2 to 15 % more time there, on 64
and 128 H100s, and attention apart at most 1 % less or 0.2 % more than whole blocks.

Several reduce-scatter buffers let backward go on while earlier reduce-scatters run, for the bytes
of a unit's gradients each. They also give reduce-scatters a process group of their own, so that
these do not wait for all-gathers (a second communicator: 0.5 to 0.7 GiB with NCCL, as
others report; not measured here).
"""

from dataclasses import dataclass, replace

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder

from titan_ext.base.nodes import Nodes
from titan_ext.base.titan.parallelism import has_experts
from titan_ext.fsdp.names import unknown_units
from titan_ext.fsdp.prefetch import PrefetchLimit
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.fsdp.units import Wrap, plan_units

AUTO_FORWARD = PrefetchLimit(units=1)
AUTO_BACKWARD = PrefetchLimit(units=1, from_attention=2)
"""Attention is too short to hide both the next gather and the reduce-scatter that follows it."""


@dataclass(frozen=True)
class Choice:
    """Units, and what goes with them."""

    wrap: Wrap
    """``fsdp_wrap`` without "auto"."""
    backward: PrefetchLimit = AUTO_BACKWARD
    """How far ahead to gather in backward, where fsdp_prefetch is "auto"."""
    buffers: int = 1
    """Inputs of reduce-scatters that may live at the same time."""
    why: str = ""
    """What "auto" became, and why; "" where the config itself says all of it."""


_NEAR = (Choice("block"), Choice("submodule"), Choice("experts"))
# Two buffers beside the unit of experts are the bytes that stock has in flight too: its unit has
# two groups, each with a buffer. Attention and MoE apart have twice the reduce-scatters of a block.
_ACROSS_NODES = (
    Choice("experts", backward=PrefetchLimit(units=2), buffers=2),
    Choice("block"),
    Choice("submodule", buffers=3),
)
_ACROSS_NODES_COMPILED = _ACROSS_NODES[::-1]


def choose(
    model: Decoder,
    settings: FSDPSettings,
    parallel_dims: ParallelDims,
    nodes: Nodes,
    *,
    compiles_blocks: bool = False,
) -> Choice:
    """Choose the units of ``model``: those of ``settings``, or by rule where they are "auto".

    Of a decoder or pipeline chunk only names of units are looked at, and whether the whole model
    has experts, so that all stages of a pipeline choose alike. ``compiles_blocks``: blocks are
    compiled whole, unless the experts are a unit.
    """
    ep, shards = parallel_dims.ep, parallel_dims.dp_shard * parallel_dims.cp * parallel_dims.tp
    if ep == 1 or not has_experts(model.config):
        return Choice("block" if settings.wrap == "auto" else settings.wrap)
    where, choices, near = "across nodes", _ACROSS_NODES, shards <= max(ep, nodes.ranks)
    if near:
        where, choices = "whole on a rank" if shards in (ep, 1) else "on one node", _NEAR
    elif compiles_blocks:
        where, choices = "across nodes, blocks compiled", _ACROSS_NODES_COMPILED
    has_buffers = hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers")  # torch 2.14.1 has it
    can_wait = has_buffers and not settings.symm_mem  # which has one input buffer
    candidates = [
        choice
        for choice in choices
        if settings.wrap in ("auto", choice.wrap)
        # With one buffer small units would cost time.
        and (near or can_wait or choice.wrap == "block" or settings.wrap != "auto")
    ]
    may_be_elsewhere = parallel_dims.pp_enabled
    named = (
        choice
        for choice in candidates
        if may_be_elsewhere or not unknown_units(settings, plan_units(model, choice.wrap))
    )
    choice = next(named, candidates[-1])
    reasons = [f'auto is "{choice.wrap}"'] if settings.wrap == "auto" else []
    if not can_wait:
        choice = replace(choice, buffers=1)
    if choice.buffers > 1:
        reasons.append(f"{choice.buffers} reduce-scatter buffers")
    if not near and not has_buffers:
        reasons.append(
            f"one reduce-scatter buffer in torch {torch.__version__}: from 2.14.1 on small units "
            "are as fast as whole blocks"
        )
    why = f"{', '.join(reasons)} (EP {ep}, experts' shards {where})" if reasons else ""
    return replace(choice, why=why)
