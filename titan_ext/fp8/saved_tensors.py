# SPDX-License-Identifier: BSD-3-Clause
"""The tensors that autograd saves between forward and backward, kept in float8.

    store = SavedTensorStore(Codec(), modules=[block])
    with store.hooks("layers.3"):
        y = block(x)
    print(store.memory_report)
    y.sum().backward()

Callers choose how each tensor is stored, by its name: exact or in float8, on the device or on the
host. The first rule that matches applies: parameters and buffers; tensor subclasses other than
DTensor, and sparse tensors; dtypes that the codec does not take; views of a storage that is kept
anyhow; what the policy names (by default fp32 and small tensors); what would not shrink. These are
kept exactly, and the memory report says why. Parameters and buffers are kept by reference, and
recognised by their storage: a detached or localised weight is a plain tensor, and a copy would
defeat FSDP, which empties a gathered weight. Small tensors stay on the device.

The store waits for every tensor: inside selective checkpointing the output of a running collective
is a plain tensor. It stores values once, and decodes them once, however often they and views of
them are saved; nothing is stored whose storage is kept by reference anyhow. Like autograd it raises
when a tensor kept by reference was changed in place; a float8 copy has the value at the time of
saving.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn as nn
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.multiprocessing.reductions import StorageWeakRef

from titan_ext.base.tensors import (
    as_in_memory,
    extent,
    is_plain,
    local_tensor,
    may_wrap,
    plain_tensors,
    storages_of,
    strides_without_gaps,
    view_key,
    wrapping,
)
from titan_ext.fp8.codec import SUPPORTED_DTYPES, Codec, codec_name, default_codec
from titan_ext.fp8.offload import HostGroup, HostTensor

Policy = Callable[[torch.Tensor], str | None]
"""Takes a plain tensor (the local shard); returns why it must stay exact, or None for float8."""

# Not measured: at most 4 KiB of bf16 would be saved.
SMALL = 4096
"""Tensors with fewer values stay exact, and on the device."""


def keep_exact(x: torch.Tensor) -> str | None:
    """The default policy, for ``x`` without expanded axes: fp32 and small tensors stay exact.

    A policy sees shapes and dtypes, not values: attention masks with -inf, or anything else that
    float8 cannot hold, must be recognised by those.
    """
    if x.dtype == torch.float32:
        return "float32"
    return "small" if x.numel() < SMALL else None


class StoredEntry:
    """One stored tensor; alive as long as autograd holds it.

    Args:
        treatment: As in ``MemoryRow``.
        tensors: What it keeps on the device.
        decode: Makes the tensor of them, or of what comes back from the host.
        on_host: What it keeps on the host instead.
        owns_bytes: False for tensors of the model.
    """

    name = ""
    packs = 0
    """Number of times that it or a view of it was packed; a backward unpacks it as often."""
    original: tuple[tuple[int, int], ...] = ()
    """(id, bytes) of the storages that autograd would have kept alive."""
    weak_storages: Sequence[StorageWeakRef] = ()
    """Held so that no other storage gets these ids."""

    def __init__(
        self,
        treatment: str,
        tensors: Sequence[torch.Tensor] = (),
        decode: Callable[..., torch.Tensor] = lambda x: x,
        on_host: Sequence[HostTensor] = (),
        *,
        owns_bytes: bool = True,
    ) -> None:
        self.treatment, self.on_host, self.owns_bytes = treatment, on_host, owns_bytes
        self._tensors, self._decode = tensors, decode
        self._versions = [x._version for x in tensors]

    @classmethod
    def of(
        cls,
        treatment: str,
        tensors: Sequence[torch.Tensor],
        decode: Callable[..., torch.Tensor],
        host: HostGroup | None,
    ) -> Self:
        """An entry of plain ``tensors``, which wait on the host if it is given and has room."""
        if host is None:
            return cls(treatment, tensors, decode)
        copies = [copy for x in tensors if (copy := host.put(x)) is not None]
        if len(copies) < len(tensors):
            return cls(f"{treatment}, no room on the host", tensors, decode)
        return cls(f"{treatment}, on the host", (), decode, copies)

    @property
    def whole(self) -> "StoredEntry":
        """The entry that is stored: itself, unless it is a view of that."""
        return self

    def restore(self) -> torch.Tensor:
        """The tensor that was stored, or its approximation.

        Raises RuntimeError, as autograd does, if what it keeps was modified in place.
        """
        for x, version in zip(self._tensors, self._versions, strict=True):
            if x._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: [{x.type()} {list(x.shape)}] is at version {x._version}; "
                    f"expected version {version} instead."
                )
        return self._decode(*(self._tensors or (copy.get() for copy in self.on_host)))

    def tensors(self) -> Iterator[torch.Tensor]:
        """The plain tensors that it keeps on the device."""
        for x in self._tensors:
            yield from plain_tensors(x)


class _Float8(StoredEntry):
    """Values in float8, decoded once for all that packed them or views of them.

    They stay decoded from a backward's first unpack to its last. ``start`` and ``end`` are their
    ``extent``.
    """

    start = end = 0
    _decoded: tuple[torch.Tensor, int] | None = None
    _unpacks = 0

    def restore(self) -> torch.Tensor:
        self._unpacks += 1
        x, version = self._decoded or (None, 0)
        if x is None or x._version != version:  # a recompute may write to what it got
            x = super().restore()
        self._decoded = (x, x._version) if self._unpacks % self.packs else None
        return x

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from super().tensors()
        if self._decoded is not None:
            yield self._decoded[0]


class _View(StoredEntry):
    """A tensor whose values are among those of ``whole``."""

    def __init__(
        self,
        whole: _Float8,
        view: tuple[Sequence[int], Sequence[int], int],
        wrap: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(whole.treatment)
        self._whole, self._view, self._wrap = whole, view, wrap

    @property
    def whole(self) -> StoredEntry:
        return self._whole

    def restore(self) -> torch.Tensor:
        return self._wrap(self._whole.restore().as_strided(*self._view))


def _by_reference(x: torch.Tensor, treatment: str, *, owns_bytes: bool = True) -> StoredEntry:
    # Without its graph, which may hold the entry. A subclass has its own idea of detach.
    x = x.detach() if is_plain(x) or type(x) is nn.Parameter else x
    return StoredEntry(treatment, (x,), owns_bytes=owns_bytes)


@dataclass(frozen=True)
class MemoryRow:
    """Stored tensors of one class."""

    name: str
    """The caller's name for it (``SavedTensorStore.hooks``): a module, for example."""
    treatment: str
    """As "float8 e4m3", "exact: <why>", "passed through: <why>"; and if it waits on the host."""
    entries: int
    """How many tensors; one saved several times is one."""
    nbytes: int
    """Of the storages that are kept alive on the device; 0 for parameters and buffers."""
    original_nbytes: int
    """Of the storages that autograd would have kept alive instead."""
    host_nbytes: int = 0
    """Of the copies on the host."""


class MemoryRows(tuple[MemoryRow, ...]):
    """Rows of a report; as a string, a table."""

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self)

    @property
    def host_nbytes(self) -> int:
        return sum(row.host_nbytes for row in self)

    def __str__(self) -> str:
        lines = [f"{'tensors':>8} {'MiB':>10} {'host MiB':>10} {'bf16 MiB':>10}  treatment, class"]
        for row in self:
            sizes = (row.nbytes, row.host_nbytes, row.original_nbytes)
            columns = " ".join(f"{nbytes / 2**20:10.3f}" for nbytes in sizes)
            lines.append(f"{row.entries:8} {columns}  {row.treatment}, {row.name}")
        return "\n".join(lines)


def memory_rows(entries: Iterable[StoredEntry]) -> MemoryRows:
    """The tensors that are held now, a row for each name and treatment, sorted.

    Each storage counts once, in the first row that has it: views share its bytes.
    """
    wholes = {id(entry.whole): entry.whole for entry in entries}.values()
    rows: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    counted: set[tuple[int, int]] = set()
    for entry in sorted(wholes, key=lambda entry: (entry.name, entry.treatment)):
        row = rows[entry.name, entry.treatment]
        row[0] += 1
        held = [s for part in entry.tensors() for s in storages_of(part)]
        copies = [(id(x.copy), x.copy.nbytes) for x in entry.on_host]
        for column, storages in enumerate((held, entry.original, copies), start=1):
            for storage, nbytes in storages if entry.owns_bytes else ():
                if (column, storage) not in counted:
                    counted.add((column, storage))
                    row[column] += nbytes
    return MemoryRows(MemoryRow(*key, *row) for key, row in rows.items())


class SavedTensorStore:
    """Packs the tensors that autograd saves, and reports their bytes; one for each block.

    Args:
        codec: How float8 tensors are stored.
        modules: Whose parameters and buffers are never packed; every pack looks through them. Do
            not replace submodules afterwards; parameters may be replaced, as FSDP does.
        policy: What else stays exact, and why.
    """

    def __init__(
        self,
        codec: Codec | None = None,
        *,
        modules: Iterable[nn.Module] = (),
        policy: Policy = keep_exact,
    ) -> None:
        self.codec = codec or default_codec()
        self._policy = policy
        self._slots = [
            (tensors, name)
            for root in modules
            for module in root.modules()
            for tensors in (module._parameters, module._buffers)
            for name in tensors
        ]
        self._by_key: weakref.WeakValueDictionary[Any, StoredEntry] = weakref.WeakValueDictionary()
        # By storage: what is exact, and (by dtype, version and sign too) what is in float8.
        self._exact: weakref.WeakValueDictionary[int, StoredEntry] = weakref.WeakValueDictionary()
        self._float8: weakref.WeakValueDictionary[Any, _Float8] = weakref.WeakValueDictionary()

    def hooks(self, name: str = "") -> torch.autograd.graph.saved_tensors_hooks:
        """A context that stores what autograd saves inside it, as ``name`` in the report."""
        return torch.autograd.graph.saved_tensors_hooks(
            functools.partial(self.pack, name=name), self.unpack
        )

    @property
    def memory_report(self) -> MemoryRows:
        """Rows for the tensors that are stored now."""
        return memory_rows(self._by_key.values())

    @torch.no_grad()
    def pack(
        self,
        x: torch.Tensor,
        *,
        name: str = "",
        exact: str | None = None,
        host: HostGroup | None = None,
    ) -> StoredEntry:
        """Store ``x``. Only the result keeps it stored; pass it to ``unpack``.

        ``exact`` says why it must stay exact, where the caller knows; else the policy is asked.
        With ``host`` it waits there, if it can.
        """
        if isinstance(x, AsyncCollectiveTensor):
            x = local_tensor(x)
        if x.layout is not torch.strided:  # no storage to go by
            return _by_reference(x, "passed through: sparse", owns_bytes=False)
        key = view_key(x)
        entry = self._by_key.get(key)
        if entry is None:
            entry = self._by_key[key] = self._store(x, exact, host)
        whole = entry.whole
        if not whole.packs:
            whole.name = name
            whole.original = storages_of(x)
            whole.weak_storages = [StorageWeakRef(t.untyped_storage()) for t in plain_tensors(x)]
        whole.packs += 1
        return entry

    @torch.no_grad()
    def unpack(self, entry: StoredEntry) -> torch.Tensor:
        """The packed tensor, or its float8 approximation with the same shape and dtype.

        Raises RuntimeError if it is kept by reference and was modified in place.
        """
        return entry.restore()

    def float8_nbytes(self, x: torch.Tensor) -> int | None:
        """The bytes that ``pack`` would keep of a plain tensor in float8; None if exactly."""
        dense = as_in_memory(x)
        return None if self._why_exact(x, dense, None) else self.codec.nbytes(dense.shape)

    def _store(self, x: torch.Tensor, exact: str | None, host: HostGroup | None) -> StoredEntry:
        if (passed := self._passed_through(x)) is not None:
            return passed
        local = local_tensor(x)
        # Where a collective is still writing to it. On an accelerator the stream waits.
        # The size is asked first, since the wait costs the host time for every tensor.
        if _get_work_registry_size():
            torch.ops._c10d_functional.wait_tensor(local)
        if local.numel() < SMALL or local.is_neg() or local.is_conj():  # a copy has no such bits
            host = None
        storage = local.untyped_storage()._cdata
        dense = as_in_memory(local)
        held = self._exact.get(storage)
        if held is not None and (host or not held.on_host):
            exact = exact or "its storage is kept anyhow"
            host = host if held.on_host else None
        if why := self._why_exact(local, dense, exact):
            entry = StoredEntry.of(f"exact: {why}", (local,), wrapping(x), host)
            if not entry.on_host:
                entry = _by_reference(x, entry.treatment)
            self._exact[storage] = entry
            return entry
        return self._view_of_float8(x, local, dense, host)

    def _passed_through(self, x: torch.Tensor) -> StoredEntry | None:
        """An entry for what belongs to the model, or is of a class that nobody else may copy."""
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):
            return _by_reference(x, "passed through: parameter", owns_bytes=False)
        if self.is_module_state(x):
            return _by_reference(x, "passed through: parameter or buffer", owns_bytes=False)
        if not may_wrap(x):
            return _by_reference(x, f"passed through: {type(x).__name__}")
        local = local_tensor(x)
        if not is_plain(local):  # a DTensor of quantised weights, for example
            kinds = f"{type(x).__name__} of {type(local).__name__}"
            return _by_reference(x, f"passed through: {kinds}")
        return None

    def _view_of_float8(
        self, x: torch.Tensor, local: torch.Tensor, dense: torch.Tensor, host: HostGroup | None
    ) -> StoredEntry:
        """A view of what is in float8 of the storage of ``local``, the values of ``x``."""
        (start, end), strides = extent(local), local.stride()
        key = (local.untyped_storage()._cdata, local.dtype, local._version, local.is_neg())
        whole = self._float8.get(key)
        if whole is None or start < whole.start or whole.end < end:
            whole = self._to_float8(dense, host)
            whole.start, whole.end = start, end
            if dense.is_contiguous():
                self._float8[key] = whole
            else:
                strides = strides_without_gaps(local)
        return _View(whole, (local.shape, strides, start - whole.start), wrapping(x))

    def _why_exact(self, x: torch.Tensor, dense: torch.Tensor, exact: str | None) -> str | None:
        if x.dtype not in SUPPORTED_DTYPES:
            return str(x.dtype).removeprefix("torch.")
        if why := exact or self._policy(dense):
            return why
        # What is empty may be a view of much.
        would_shrink = self.codec.nbytes(dense.shape) < x.untyped_storage().nbytes()
        return None if would_shrink and x.numel() else "would not shrink"

    def _to_float8(self, dense: torch.Tensor, host: HostGroup | None) -> _Float8:
        codec, dtype, ops = codec_name(self.codec), dense.dtype, torch.ops.titan_ext

        def decode(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            return ops.float8_dequantize(data, scales, codec, dtype)

        # Two dimensions, so that the kernel does not depend on their number.
        matrix = dense.reshape(-1, dense.shape[-1]) if dense.dim() else dense.reshape(1, 1)
        stored = ops.float8_quantize(matrix, codec)
        return _Float8.of(f"float8 {self.codec.dtype}", stored, decode, host)

    def is_module_state(self, x: torch.Tensor) -> bool:
        """True if ``x`` is a parameter or buffer of its modules, or a view of one."""
        # Looked up anew each time: FSDP puts other parameters in place before each forward.
        state = {
            part.untyped_storage()._cdata
            for tensors, name in self._slots
            if (tensor := tensors.get(name)) is not None
            for part in plain_tensors(tensor)
        }
        return any(part.untyped_storage()._cdata in state for part in plain_tensors(x))
