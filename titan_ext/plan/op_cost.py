# SPDX-License-Identifier: BSD-3-Clause
"""Costs of operations and collectives: FLOPs, bytes, and milliseconds at a machine's rates.

A roofline of single kernels, from shapes alone: a matrix product takes the longer of its arithmetic
and its traffic, everything else its traffic. The planners of a step's time and of activation
checkpointing choose by it.
"""

import functools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GroupName, distributed_c10d

from titan_ext.activation_checkpoint.op_effects import ATTENTION, count_flops
from titan_ext.base.machines import KINDS, Machine
from titan_ext.base.nodes import nvlink_domain
from titan_ext.base.tensors import parts_in, tensors_in

# The next three lines are assumed. Nobody has timed a GPU's collectives here: the card of
# benchmarks/gpu_receipts.md was one, and benchmarks/cpu.toml is fitted to gloo.
_HOP_IN_NODE_MS, _HOP_MS = 0.001, 0.005  # of a step of a ring
_TREE_STEP_MS = 0.010  # of a step of NCCL's logarithmic algorithm, for one rank a node


@dataclass(frozen=True)
class OpCost:
    """One operation on one rank; ``nbytes`` are read and written."""

    flops: int
    nbytes: int
    ms: float


def op_cost(func: Any, args: Any, kwargs: Any, out: Any, machine: Machine) -> OpCost:
    """The cost of one call, from the shapes of what went in and came out.

    ``func`` is the operation (``torch._ops.OpOverload``), as a dispatch mode sees it, with any
    tensors: real, fake, meta or DTensors.
    """
    if moves_nothing(func) or (
        getattr(func, "overloadpacket", None) in ATTENTION and _share_masked(func, args) == 1
    ):
        return OpCost(0, 0, 0.0)
    made, read = _traffic(func, args, kwargs, out)
    # The schema has the name without the overload; func.name() is "aten::add.Tensor".
    if func._schema.name.endswith("all_to_all_single"):
        ranks = next(map(dist.get_process_group_ranks, groups_of(args)), [0])
        ms, _ = group_ms(machine, max(made, read), ranks, is_exchange=True)
        return OpCost(0, made + read, ms * machine.slower.get("exchanges", 1.0))
    flops = count_flops(func, args, kwargs, out)
    # The weakest estimate: one H100 took 1.40 times it for elementwise kernels, 1.43 for copies
    # (benchmarks/LOG.md). Held-out shapes have a mean error of 0.95 (benchmarks/gpu_receipts.md).
    seconds = max((made + read) / machine.memory, machine.launch)
    if flops:
        first = tensors_in(args)[0]
        rate = machine.fp32 if first.dtype == torch.float32 else machine.gemm
        if first.element_size() == 1:
            rate *= machine.float8
        if func.overloadpacket is _ops._grouped_mm:
            rows = _rows_of_a_group(*args)
            rate = machine.grouped * rows / (rows + machine.half_rate_rows)
        # An H100 took 0.44 of it, where masks of packed documents hide more than causality does
        # (benchmarks/LOG.md).
        if func.overloadpacket in ATTENTION:
            rate = 2 * machine.attention  # causal: half of the products are not computed
            rate /= max(1 - _share_masked(func, args), 1e-3)
        seconds = max(seconds, flops / rate)
    slower = machine.slower.get(kernel_class(func._schema.name), 1.0)
    return OpCost(flops, made + read, seconds * 1e3 * slower)


_KERNELS = {
    # The first kind that matches counts: a copy inside of the codec is the codec's.
    "codec": r"titan_ext::float8_",
    "exchanges": r"minimal_async_ep::|hybridep::",
    "collectives": r"c10d",  # of a fake process group: copies in place of messages
    "grouped GEMM": r"_grouped_mm",
    "attention": r"scaled_dot_product|flash_attn|flex_attention",
    "GEMM": r"::(mm|addmm|bmm|baddbmm|_scaled_mm)\b",
    "copies": r"fsdp::|::(copy_|_foreach_copy_|clone|_to_copy|cat)\b|Memcpy",
}
assert {*_KERNELS, "elementwise"} < {*KINDS}, "a machine's file can slow each kind down"


@functools.cache
def kernel_class(*names: str) -> str:
    """The class of a kernel, by the operation that launched it and those around that, in any order.

    The names may be a plan's (``aten::mm``) or a profile's, where operations lie in operations.
    """
    found = (kind for kind, at in _KERNELS.items() if any(re.search(at, name) for name in names))
    return next(found, "elementwise")


@functools.cache
def moves_nothing(func: Any) -> bool:
    """True if an operation only makes a view, waits, or leaves memory as it is."""
    namespace, name = func._schema.name.split("::")
    return (
        func.is_view
        or namespace in ("prim", "profiler")
        or name in ("wait_tensor", "record_stream", "_unsafe_view", "_reshape_alias", "lift_fresh")
        or "empty" in name
    )


_ops: Any = torch.ops.aten


def _rows_of_a_group(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *_: Any) -> float:
    """On average; also where it is rows that are summed over, for gradients of the weights."""
    # a is (rows, k) and b (experts, k, n), or for gradients of weights (m, rows) and (rows, n);
    # offs is (experts,).
    return max((a.shape[-1] if b.ndim == 2 else a.shape[-2]) / max(offs.numel(), 1), 1)


def _share_masked(func: Any, args: Sequence[Any]) -> float:
    """The share of a causal mask's scores that a dry run's attention leaves out (``stand_ins``)."""
    at = [argument.name for argument in func._schema.arguments].index("dropout_p")
    return args[at] if len(args) > at else 0.0


def _traffic(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """Bytes written and read. What is written in place may not be returned."""
    if func._schema.name == "fsdp::all_gather_copy_in":
        return (nbytes := _nbytes(args[0])), nbytes
    names, written, unread = _arguments(func)
    given = dict(zip(names, args, strict=False)) | (kwargs or {})
    made = _nbytes([given.get(name) for name in written] if written else out)
    return made, _nbytes([value for name, value in given.items() if name not in unread])


@functools.cache
def _arguments(func: Any) -> tuple[Sequence[str], Collection[str], Collection[str]]:
    """Names of an operation's arguments: all, those that it writes, those that it does not read."""
    # Only the schema says which arguments an operation writes.
    arguments = func._schema.arguments
    written = [a.name for a in arguments if a.is_write]
    overwrites = func.overloadpacket in _OVERWRITE
    unread = [a.name for a in arguments if a.is_out or (a.is_write and overwrites)]
    return [a.name for a in arguments], written, unread


_OVERWRITE = (_ops.copy_, _ops._foreach_copy_, _ops.fill_, _ops.zero_, _ops._foreach_zero_)


def _nbytes(tree: Any) -> int:
    """The bytes of all tensors in ``tree`` on this rank; an expanded dimension is read once."""
    return sum(
        x.element_size()
        * math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
        for x in parts_in(tree)
    )


_SORT = 12  # of 64-bit keys: a histogram, a scan, a pass for each of 8 digits, and two copies
_KERNELS_OF = {
    _ops.sort: _SORT,
    _ops.argsort: _SORT,
    _ops.topk: 3,
    _ops.histc: 2,
    _ops.cumsum: 2,
    _ops._grouped_mm: 2,
    _ops.embedding_dense_backward: _SORT + 4,
    _ops._scaled_dot_product_fused_attention_overrideable_backward: 3,
}
"""Operations of several kernels on an H100, by torch's sources; not counted on one."""
_FOREACH = "aten::_foreach", "aten::_fused"
_A_LAUNCH = 320 * 65536  # elements of a foreach kernel's blocks (torch's MultiTensorApply.cuh)


def kernels_of(func: Any, args: Sequence[Any]) -> int:
    """Kernels that an eager operation launches on a GPU."""
    packet = func.overloadpacket
    if packet is _ops.index_put_ or packet is _ops.index_put:
        accumulates = len(args) > 3 and args[3]  # by sorting the indices
        return _SORT + 3 if accumulates else 1
    if args and isinstance(args[0], list | tuple) and func._schema.name.startswith(_FOREACH):
        return max(-(-sum(x.numel() for x in parts_in(args[0])) // _A_LAUNCH), 1)
    return _KERNELS_OF.get(packet, 1)


def groups_of(args: Sequence[Any]) -> Iterator[dist.ProcessGroup]:
    """The process groups of more than one rank in the arguments of a collective."""
    for value in args:
        # c10d's operations get the group itself, boxed. Functional ones get its name, as their last
        # argument; an all-reduce has another string before it, the kind of its sum.
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            group = dist.ProcessGroup.unbox(value)
        elif value is args[-1] and isinstance(value, str):
            group = distributed_c10d._resolve_process_group(GroupName(value))
        else:
            continue
        if group.size() > 1:
            yield group


def group_ms(
    machine: Machine, nbytes: int, ranks: Sequence[int], *, is_exchange: bool = False
) -> tuple[float, str]:
    """``collective_ms`` among ``ranks`` of the job, by the NVLink domains that they lie in."""
    nodes = len({rank // nvlink_domain() for rank in ranks})
    per_node = max(len(ranks) // nodes, 1)
    return collective_ms(machine, nbytes, len(ranks), per_node, is_exchange=is_exchange)


def collective_ms(
    machine: Machine, nbytes: int, world: int, per_node: int, *, is_exchange: bool = False
) -> tuple[float, str]:
    """Time of a collective, and the link that it takes: "node" or "network".

    Args:
        nbytes: Of the whole buffer.
        world: Ranks that take part.
        per_node: Of them, on a node, or in an NVLink domain.
        is_exchange: Whether it is an all-to-all, where no rank of a node adds for others.
    """
    nodes = max(1, world // per_node)
    share = nbytes * (world - 1) / world if per_node > 1 else 0
    in_node_ms = share / (machine.in_node_all_to_all if is_exchange else machine.in_node) * 1e3
    if nodes == 1:
        return machine.collective * 1e3 + (world - 1) * _HOP_IN_NODE_MS + in_node_ms, "node"
    # Each rank of a node sends its share of what the node has added up or still lacks.
    sharing = 1 if is_exchange else per_node
    network_ms = nbytes * (nodes - 1) / nodes / sharing / machine.network * 1e3
    latency = nodes * _HOP_MS + (world - nodes) * _HOP_IN_NODE_MS
    if per_node == 1:
        latency = math.log2(world) * _TREE_STEP_MS
    if is_exchange:  # no ring: all messages are on their way at once
        latency = _HOP_MS + (world - 1) * _HOP_IN_NODE_MS
    return machine.collective * 1e3 + latency + max(in_node_ms, network_ms), "network"
