# SPDX-License-Identifier: BSD-3-Clause
"""Stored tensors that wait on the host, in pinned memory, instead of on their device.

    offload = Offload(limit=64 * 2**30)
    group = offload.begin("layers.3")        # a forward of this block
    kept = group.put(x)                      # None: the limit is reached
    kept.get()                               # in backward: x again, bit for bit

**Out.** A copy starts at once, on a stream of its own. Device memory is held until the next block
but one begins; then the computation waits for the copy, if it must: a link that is too slow costs
time, never memory. Backward takes the last two blocks from the device.

**Back.** The first tensor that backward asks for in a block starts the copies of its block and of
the block before it. Each forward has groups of its own, so several may wait for their backward.

**Order.** The computation waits for each copy before it uses the result or frees the source, and
each copy waits for the computation. So the order of the computation's stream is that of all.

**Whole storages** are copied, each once, as autograd would keep them; views share a copy. Buffers
are kept for the process, since pinning is slow. On a CPU all is the same but the streams. Copies of
fake tensors are fake.
"""

import functools
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

_logger = logging.getLogger(__name__)

_ALIGNMENT = 256
SLAB = 64 * 2**20
"""Bytes that are pinned at once, at least. A power of two, to which torch would round."""


class Lane:
    """Copies in one direction, in order, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device=device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Start a copy after what the computation has been given so far; return its event."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def join(self, event: Any) -> None:
        """Let the computation go on when a copy is done; the host does not wait."""
        torch.accelerator.current_stream(self._device).wait_event(event)


class Inline:
    """Copies on a CPU, done when they return."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        target.copy_(source)

    def join(self, event: Any) -> None:
        pass


def _allocate(nbytes: int, *, pinned: bool) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


@dataclass(eq=False)
class _Slab:
    memory: torch.Tensor
    end: int = 0
    """Offset of the next region; all are free again when the last one is."""
    regions: int = 0


class _Region:
    """Bytes of a slab, until ``free``."""

    def __init__(self, slab: _Slab, nbytes: int) -> None:
        self._slab = slab
        self.memory = slab.memory[slab.end : slab.end + nbytes]
        slab.end += _aligned(nbytes)
        slab.regions += 1

    def free(self) -> None:
        self._slab.regions -= 1
        if not self._slab.regions:
            self._slab.end = 0


class HostMemory:
    """The buffers for one device, and the two directions.

    Attributes:
        reserved: Bytes that are pinned, in use or not.
    """

    def __init__(self, device: torch.device, *, out: Any = None, back: Any = None) -> None:
        self._is_cpu = device.type == "cpu"
        make = Inline if self._is_cpu else functools.partial(Lane, device)
        self.out, self.back = out or make(), back or make()
        self.reserved = 0
        self._slabs: list[_Slab] = []

    def take(self, nbytes: int, limit: int | None) -> _Region | None:
        """A region; None if more than ``limit`` bytes would have to be reserved for it."""
        size = _aligned(nbytes)
        for slab in self._slabs:
            if slab.end + size <= slab.memory.numel():
                return _Region(slab, nbytes)
        room = None if limit is None else limit - self.reserved
        wanted = max(SLAB, 1 << (size - 1).bit_length())
        while room is not None and wanted > room and wanted >= 2 * size:
            wanted //= 2
        if room is not None and wanted > room:
            return None
        slab = _Slab(_allocate(wanted, pinned=not self._is_cpu))
        self.reserved += wanted
        self._slabs.append(slab)
        return _Region(slab, nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class _FakeMemory:
    """Memory for fake tensors, which have no bytes."""

    out = back = Inline()
    reserved = 0

    def take(self, nbytes: int, limit: int | None) -> _Region:
        return _Region(_Slab(_allocate(nbytes, pinned=False)), nbytes)


@functools.cache
def host_memory(device: torch.device) -> HostMemory:
    """The process's own, shared by all models."""
    return HostMemory(device)


class _Copy:
    """A storage on the host."""

    def __init__(self, group: "HostGroup", x: torch.Tensor, memory: Any, region: Any) -> None:
        self.group = group
        self.nbytes = x.untyped_storage().nbytes()
        # While this lives, no other storage gets the address.
        self._address = StorageWeakRef(x.untyped_storage())
        self._memory, self._region = memory, region
        assert self.nbytes % x.itemsize == 0
        self._bytes = region.memory.view(x.dtype)
        flat = x.detach().as_strided((self._bytes.numel(),), (1,), 0)
        self._source: torch.Tensor | None = flat
        self._version = flat._version
        self._device = flat.device
        self._left = memory.out.copy(self._bytes, flat)
        self._coming: tuple[torch.Tensor, Any] | None = None
        self._there: tuple[torch.Tensor, int] | None = None

    def free(self) -> None:
        """Free the device memory; the copy to the host is done before anything else is there.

        Raises RuntimeError if the tensor was modified in place meanwhile: the copy may be of
        either value.
        """
        if self._source is not None:
            self._check()
            self._memory.out.join(self._left)
            self._source = None
        self._there = None

    def start_back(self) -> None:
        """Start the copy back, unless the tensor is on the device."""
        if self._source is None and self._coming is None and self._there is None:
            flat = torch.empty_like(self._bytes, device=self._device, pin_memory=False)
            self._coming = flat, self._memory.back.copy(flat, self._bytes)

    def get(self) -> torch.Tensor:
        """The storage on its device, as a flat tensor."""
        self.group.begin_backward()
        if self._source is not None:
            self._check()
            return self._source
        if self._there is not None:
            flat, version = self._there
            if flat._version == version:  # else a recompute has written to it
                return flat
            self._there = None
        self.start_back()
        assert self._coming is not None
        flat, arrived = self._coming
        self._memory.back.join(arrived)
        self._coming = None
        self._there = flat, flat._version
        return flat

    def _check(self) -> None:
        assert self._source is not None
        if (now := self._source._version) != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation while it was copied to the host: {self._source.dtype}, "
                f"{self.nbytes} bytes, of {self.group.block}, is at version {now}; expected "
                f"version {self._version} instead."
            )

    def __del__(self) -> None:
        if (coming := getattr(self, "_coming", None)) is not None:
            self._memory.back.join(coming[1])  # before its memory is used for something else
        if (region := getattr(self, "_region", None)) is not None:
            region.free()


@dataclass(frozen=True, eq=False)
class HostTensor:
    """A view of a storage that is on the host."""

    copy: _Copy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def get(self) -> torch.Tensor:
        """The tensor, on its device, with its strides."""
        flat = self.copy.get().view(self.dtype)
        return flat.as_strided(self.size, self.stride, self.offset)


class HostGroup:
    """The tensors that one forward of a block keeps on the host. Make it with ``Offload.begin``."""

    def __init__(self, offload: "Offload", block: str, previous: "HostGroup | None") -> None:
        self.block = block
        self._offload = offload
        self._previous = weakref.ref(previous) if previous is not None else lambda: None
        self._copies: weakref.WeakValueDictionary[Any, _Copy] = weakref.WeakValueDictionary()
        self._task: int | None = None

    def put(self, x: torch.Tensor) -> HostTensor | None:
        """Start copying the storage of a plain tensor; None if there is no room.

        Raises RuntimeError if this rank is out of host memory.
        """
        key = (x.untyped_storage()._cdata, x._version)
        copy = self._copies.get(key)
        if copy is None:
            copy = self._offload.copy(self, x)
            if copy is None:
                return None
            self._copies[key] = copy
        return HostTensor(copy, x.dtype, x.size(), x.stride(), int(x.storage_offset()))

    def copies(self) -> Iterator[_Copy]:
        """Those that live, in the order in which they were put."""
        yield from list(self._copies.values())

    def begin_backward(self) -> None:
        """Start the copies back of this group and of the one before it, once in a backward."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        for group in self._offload.keep_on_device(self, self._previous()):
            for copy in group.copies():
                copy.start_back()


class Offload:
    """Moves what the blocks of one model keep.

    Args:
        limit: Bytes of host memory that this process may reserve; None for any.
        limit_name: Of the setting, in messages.
    """

    def __init__(self, limit: int | None = None, limit_name: str = "limit") -> None:
        self._limit, self._limit_name = limit, limit_name
        self._blocks: set[str] = set()
        self._newest: HostGroup | None = None
        self._on_device: list[HostGroup] = []
        self._is_full = False

    def begin(self, block: str) -> HostGroup:
        """A forward of ``block`` begins; free the device memory of the last block but one."""
        if block in self._blocks:  # another forward of the model
            self._blocks.clear()
        previous = self._newest if self._blocks else None
        self._blocks.add(block)
        self._newest = HostGroup(self, block, previous)
        self.keep_on_device(self._newest, previous)
        return self._newest

    def keep_on_device(self, *groups: HostGroup | None) -> list[HostGroup]:
        """Free the device memory of all other groups; return those that there are of these."""
        for group in self._on_device:
            if group not in groups:
                for copy in group.copies():
                    copy.free()
        self._on_device = [group for group in groups if group is not None]
        return self._on_device

    def copy(self, group: HostGroup, x: torch.Tensor) -> _Copy | None:
        """A copy of the storage of ``x``; None, and once a warning, if there is no room."""
        memory = _FakeMemory() if isinstance(x, FakeTensor) else host_memory(x.device)
        nbytes = x.untyped_storage().nbytes()
        try:
            region = memory.take(nbytes, self._limit)
        except RuntimeError as error:
            rank = dist.get_rank() if dist.is_initialized() else 0
            raise RuntimeError(
                f"rank {rank} is out of host memory: it holds {memory.reserved} bytes for "
                f"offloaded activations, and {nbytes} more for {group.block} cannot be had. Lower "
                f"{self._limit_name}, which all ranks of a node add up, or offload less."
            ) from error
        if region is not None:
            return _Copy(group, x, memory, region)
        if not self._is_full:
            self._is_full = True
            _logger.warning(
                f"{self._limit_name} is reached: {self._limit} bytes. {nbytes} bytes of "
                f"{group.block}, and whatever finds no room from here on, stay on the device."
            )
        return None
