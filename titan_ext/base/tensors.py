# SPDX-License-Identifier: BSD-3-Clause
"""The data behind a tensor: this rank's shard of a DTensor, its storages, its layout in them.

And what runs with it: a backward, a checkpoint that watches.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

PACKED = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of rows that travel packed (``components.exchange``)."""
_FLOAT8_WEIGHT = "WeightWithDynamicFloat8CastTensor"
"""torchao's, by name: to import torchao takes long. Its ``__tensor_flatten__`` reads a scale."""
# One is pushed in the forward, the other in the recompute (torch/utils/checkpoint.py).
_OF_CHECKPOINTING = _CachedTorchDispatchMode, _CachingTorchDispatchMode
_NO_NEST = (type(None), int, float, str, torch.dtype, torch.device)


def has_values(x: torch.Tensor) -> bool:
    """True if ``x`` holds numbers, or numbers packed as bytes, and no indices or masks."""
    return x.is_floating_point() or x.dtype == torch.uint8


@dataclass(frozen=True)
class Sharding:
    """How a DTensor is sharded: everything but its values.

    ``shape`` and ``stride`` are those of the whole tensor; an uneven local shard does not tell
    them.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: DTensor) -> "Sharding":
        return cls(x.device_mesh, tuple(x.placements), x.shape, x.stride())

    def wrap(self, local: torch.Tensor) -> DTensor:
        """A DTensor that is sharded so, around ``local``; nothing is sent or checked."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def wrapping(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from a local tensor to one like ``x``, which ``may_wrap``; it holds no tensor."""
    return Sharding.of(x).wrap if isinstance(x, DTensor) else lambda local: local


def may_wrap(x: torch.Tensor) -> bool:
    """True if ``x`` is a DTensor or of no subclass."""
    return is_plain(x) or type(x) is DTensor


def local_tensor(x: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, or the tensor itself; waits for async tensors."""
    if isinstance(x, DTensor):
        # to_local() is an operation that autograd records where gradients are on (torch's _api.py).
        x = x._local_tensor
    if isinstance(x, AsyncCollectiveTensor):
        x = x.trigger_wait()
    return x


def is_plain(x: torch.Tensor) -> bool:
    """True if ``x`` is a tensor of no subclass; a fake tensor, which has shapes only, counts."""
    return type(x) in (torch.Tensor, FakeTensor)


def storages_of(x: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """(id, bytes) of the storages behind ``x``; an id is good while a reference to it is held."""
    # Not data_ptr(): it is 0 for fake and meta tensors, and for what FSDP has freed.
    storages = [part.untyped_storage() for part in plain_tensors(x)]
    return tuple((storage._cdata, storage.nbytes()) for storage in storages)


def as_in_memory(x: torch.Tensor) -> torch.Tensor:
    """``x`` as it lies in memory: without expanded axes, the others from outermost to innermost."""
    if x.dim() and x.shape[-1] > 1 and x.is_contiguous():
        return x
    order = _memory_order(x)
    expanded = [d for d in range(x.dim()) if d not in order]
    x = x.permute(expanded + order)  # SPMD type checking knows this, but not as_strided
    for _ in expanded:
        x = x[0]
    return x


def _memory_order(x: torch.Tensor) -> list[int]:
    # An axis without elements has no first to take, whatever its stride.
    kept = [d for d, size in enumerate(x.shape) if x.stride(d) or size < 2]
    return sorted(kept, key=lambda d: -x.stride(d))


def strides_without_gaps(x: torch.Tensor) -> list[int]:
    """The strides of ``x`` in a contiguous copy of ``as_in_memory(x)``."""
    strides, step = list(x.stride()), 1
    for d in reversed(_memory_order(x)):
        strides[d], step = step, step * x.shape[d]
    return strides


def extent(x: torch.Tensor) -> tuple[int, int]:
    """Its first element in its storage, and the one behind its last."""
    start = int(x.storage_offset())
    steps = zip(x.shape, x.stride(), strict=True)
    return start, start + sum((size - 1) * stride for size, stride in steps) + 1


def view_key(x: torch.Tensor) -> tuple[Any, ...]:
    """A key that is equal for the same view of the same bytes at the same version."""
    parts = tuple(
        (p.untyped_storage()._cdata, p.storage_offset(), p.shape, p.stride(), p.dtype, p._version)
        for p in plain_tensors(x)
    )
    sharding = Sharding.of(x) if isinstance(x, DTensor) else None
    return (type(x), x.shape, x._version, x.is_conj(), x.is_neg(), sharding, parts)


# These run for each operation of a block, on the host: lists and loops, generators are slow.


def storage_ids(values: Any) -> list[int]:
    """The storages behind the tensors in a nest of arguments or results."""
    return [part.untyped_storage()._cdata for part in parts_in(values)]


def parts_in(values: Any) -> list[torch.Tensor]:
    """The plain tensors in a nest of arguments or results."""
    return [part for x in tensors_in(values) for part in plain_tensors(x)]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors of any kind in a nest of arguments or results."""
    if isinstance(values, torch.Tensor):
        return [values]
    if not isinstance(values, (tuple, list)):
        return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
    found = []
    for value in values:  # as arguments are; ``tree_leaves`` is slow
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif not isinstance(value, _NO_NEST):
            found += tensors_in(value)
    return found


def plain_tensors(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """The plain tensors in ``x``: itself, or the parts of a tensor subclass; none if sparse."""
    if type(x) is torch.Tensor or not hasattr(x, "__tensor_flatten__"):
        return (x,) if x.layout is torch.strided else ()
    if any(kind.__name__ == _FLOAT8_WEIGHT for kind in type(x).__mro__):
        return plain_tensors(x._tensor)  # pyrefly: ignore[missing-attribute]
    names, _ = x.__tensor_flatten__()
    parts = [getattr(x, name) for name in names]
    # A DTensor names its mesh, too.
    return [p for part in parts if isinstance(part, torch.Tensor) for p in plain_tensors(part)]


def optimizer_states(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The tensors that optimizers keep of their parameters."""
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    return [x for state in states for x in state.values() if isinstance(x, torch.Tensor)]


def in_backward() -> bool:
    """True if autograd runs backward in this thread, a recompute included."""
    return torch._C._current_graph_task_id() != -1


def out_of_sight_of_checkpointing() -> contextlib.AbstractContextManager[Any]:
    """A context without the mode of selective checkpointing, if that is the innermost.

    Torch knows an operation by its place among those of its kind. A unit inside of a block gathers
    in the forward, or in the recompute, and mostly not in both.
    """
    mode = _get_current_dispatch_mode()
    if isinstance(mode, _OF_CHECKPOINTING) or hasattr(mode, "is_of_checkpointing"):
        return _pop_mode_temporarily()
    return contextlib.nullcontext()


@torch.no_grad()
def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """True if all values that this rank holds of ``tensors`` are finite; waits for the device."""
    parts = [part for x in tensors for part in plain_tensors(x)]
    # torch refuses the largest of nothing, and a rank may have no row of a parameter.
    some = [part for part in parts if part.numel()]
    return bool(torch.isfinite(torch.nn.utils.get_total_norm(some, norm_type=float("inf"))))
