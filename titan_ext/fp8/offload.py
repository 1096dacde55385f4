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
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

_logger = logging.getLogger(__name__)

# A tensor views its region in its own dtype, so that must begin at a multiple of its item size.
_ALIGNMENT = 256
# Not fitted. Measured: 1.3 to 1.6 times what lives is pinned, as a slab is reused whole.
SLAB = 64 * 2**20
"""Bytes that are pinned at once, at least. A power of two, to which torch would round."""


class Lane:
    """Copies in one direction, in order, on a stream of their own; on a CPU, done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Start a copy after what the computation has been given so far; return its event."""
        if self._stream is None:
            target.copy_(source)
            return None
        # The source may not be written yet, or the target still be read by what came before.
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def join(self, event: Any) -> None:
        """Let the computation go on when a copy is done; the host does not wait."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)


class _Slab:
    """Host memory that is given out from its start; all is free again when nothing is used."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.end = self.regions = 0

    def has_room(self, nbytes: int) -> bool:
        return self.end + nbytes <= self._memory.numel()

    def take(self, nbytes: int) -> torch.Tensor:
        """Bytes to use until ``give_back``."""
        # First: to make a view may collect garbage, and the last other region with it.
        self.regions += 1
        start, self.end = self.end, self.end + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._memory[start : start + nbytes]

    def give_back(self) -> None:
        self.regions -= 1
        if not self.regions:
            self.end = 0


class HostMemory:
    """The buffers for one device, and the two directions.

    ``reserved`` are the bytes that are pinned, in use or not.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type != "cpu"
        self.out, self.back = Lane(device), Lane(device)
        self.reserved = 0
        self._slabs: list[_Slab] = []

    def slab_for(self, nbytes: int, limit: int | None) -> _Slab | None:
        """A slab with room; None if more than ``limit`` bytes would have to be reserved for it."""
        for slab in self._slabs:
            if slab.has_room(nbytes):
                return slab
        least = max(_ALIGNMENT, 1 << (nbytes - 1).bit_length())
        wanted = max(SLAB, least)
        if limit is not None:
            room = limit - self.reserved
            while wanted > max(room, least):
                wanted //= 2
            if wanted > room:
                return None
        slab = _Slab(wanted, pinned=self._is_pinned)
        self.reserved += wanted
        self._slabs.append(slab)
        return slab


class _FakeMemory(HostMemory):
    """Memory for fake tensors, which have no bytes: as many as are used, for a plan to count."""

    def slab_for(self, nbytes: int, limit: int | None) -> _Slab:
        return _Slab(nbytes, pinned=False)


@functools.cache
def host_memory(device: torch.device) -> HostMemory:
    """The process's own, shared by all models."""
    return HostMemory(device)


class _Copy:
    """A storage on the host, and on the device until it has left and from when it comes back.

    Its state is "source" while what was stored is on the device, "away" while only the copy is
    there, "coming" once the copy back has started, and "back" when it may be read.
    """

    def __init__(
        self, group: "HostGroup", x: torch.Tensor, memory: HostMemory, slab: _Slab
    ) -> None:
        self.state: Literal["source", "away", "coming", "back"] = "away"
        self.group = group
        self.nbytes = x.untyped_storage().nbytes()
        # While this lives, no other storage gets the address.
        self._address = StorageWeakRef(x.untyped_storage())
        self._memory, self._slab, region = memory, slab, slab.take(self.nbytes)
        assert self.nbytes % x.itemsize == 0
        self._bytes = region.view(x.dtype)
        self._flat: Any = x.detach().as_strided((self._bytes.numel(),), (1,), 0)
        self._version = self._flat._version
        self._device = x.device
        self._event = memory.out.copy(self._bytes, self._flat)
        self.state = "source"

    def free(self) -> None:
        """Free the device memory; the copy to the host is done before anything else is there.

        Raises RuntimeError if the tensor was modified in place meanwhile: the copy may be of
        either value.
        """
        if self.state == "source":
            self._check()
            # In place of ``record_stream``: memory is freed in the computation's order.
            self._memory.out.join(self._event)
        if self.state in ("source", "back"):
            self.state, self._flat = "away", None

    def start_back(self) -> None:
        """Start the copy back, unless the tensor is on the device."""
        if self.state == "away":
            self._flat = torch.empty_like(self._bytes, device=self._device, pin_memory=False)
            self._event = self._memory.back.copy(self._flat, self._bytes)
            self.state = "coming"

    def get(self) -> torch.Tensor:
        """The storage on its device, as a flat tensor."""
        self.group.begin_backward()
        if self.state == "source":
            self._check()
        elif self.state == "back" and self._flat._version != self._version:
            self.state = "away"  # a recompute has written to it
        self.start_back()
        if self.state == "coming":
            self._memory.back.join(self._event)
            self.state, self._version = "back", self._flat._version
        return self._flat

    def _check(self) -> None:
        if (now := self._flat._version) != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation while it was copied to the host: {self._flat.dtype}, "
                f"{self.nbytes} bytes, of {self.group.block}, is at version {now}; expected "
                f"version {self._version} instead."
            )

    def __del__(self) -> None:
        if self.state == "coming":
            self._memory.back.join(self._event)  # before its memory is used for something else
        self._slab.give_back()


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
        # Weak: else each group would keep all groups before it.
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
        # Torch's number of the running backward: a second backward of the same graph has another.
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        for group in self._offload.keep_on_device(self, self._previous()):
            for copy in group.copies():
                copy.start_back()


class Offload:
    """Moves what the blocks of one model keep.

    ``limit`` are the bytes of host memory that this process may reserve, None for any;
    ``limit_name`` is the setting's name in messages.
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
        is_fake = isinstance(x, FakeTensor)
        memory = _FakeMemory(torch.device("cpu")) if is_fake else host_memory(x.device)
        nbytes = x.untyped_storage().nbytes()
        try:
            slab = memory.slab_for(nbytes, self._limit)
        except RuntimeError as error:
            rank = dist.get_rank() if dist.is_initialized() else 0
            raise RuntimeError(
                f"rank {rank} is out of host memory: it holds {memory.reserved} bytes for "
                f"offloaded activations, and {nbytes} more for {group.block} cannot be allocated. "
                f"Lower {self._limit_name}, which all ranks of a node add up, or offload less."
            ) from error
        if slab is not None:
            return _Copy(group, x, memory, slab)
        if not self._is_full:
            self._is_full = True
            _logger.warning(
                f"{self._limit_name} is reached: {self._limit} bytes. {nbytes} bytes of "
                f"{group.block}, and all later copies that do not fit, stay on the device."
            )
        return None
