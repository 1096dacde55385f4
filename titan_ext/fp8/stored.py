# SPDX-License-Identifier: BSD-3-Clause
"""A tensor that is stored between forward and backward, and the bytes of many of them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from titan_ext.fp8.host import HostTensor
from titan_ext.fp8.local import plain_tensors


class StoredEntry:
    """One stored tensor; alive as long as autograd holds it."""

    name = ""
    treatment = ""
    owns_bytes = True
    original: tuple[tuple[int, int], ...] = ()
    """(id, bytes) of the storages that autograd would have kept alive."""
    weak_storages: Sequence[StorageWeakRef] = ()
    on_host: Sequence[HostTensor] = ()

    def restore(self) -> torch.Tensor:
        """What was stored, or its approximation."""
        raise NotImplementedError

    def tensors(self) -> Iterator[torch.Tensor]:
        """The plain tensors that are kept alive on the device."""
        raise NotImplementedError


@dataclass(frozen=True)
class MemoryRow:
    """Stored tensors of one class.

    Attributes:
        name: The caller's name for it (``SavedTensorStore.hooks``): a module, for example.
        treatment: "float8 e4m3", "exact: <why>" or "passed through: <why>"; and whether it waits on
            the host.
        entries: How many tensors; one saved several times is one.
        nbytes: Of the storages that are kept alive on the device; 0 for parameters and buffers.
        original_nbytes: Of the storages that autograd would have kept alive instead.
        host_nbytes: Of the copies on the host.
    """

    name: str
    treatment: str
    entries: int
    nbytes: int
    original_nbytes: int
    host_nbytes: int = 0


def memory_rows(entries: Iterable[StoredEntry]) -> list[MemoryRow]:
    """What is held now, a row for each name and treatment, sorted.

    Each storage counts once, in the first row that has it. So views of one storage share its bytes,
    and an expanded view has those of its base.
    """
    classes: dict[tuple[str, str], list[StoredEntry]] = defaultdict(list)
    for entry in {id(entry): entry for entry in entries}.values():
        classes[entry.name, entry.treatment].append(entry)
    counted: set[int] = set()
    counted_original: set[int] = set()
    counted_copies: set[int] = set()
    rows = []
    for (name, treatment), members in sorted(classes.items()):
        owners = [entry for entry in members if entry.owns_bytes]
        held = dict(s for entry in owners for part in entry.tensors() for s in storages_of(part))
        original = dict(s for entry in owners for s in entry.original)
        nbytes = sum(size for storage, size in held.items() if storage not in counted)
        original_nbytes = sum(n for s, n in original.items() if s not in counted_original)
        copies = {id(x.copy): x.copy.nbytes for entry in owners for x in entry.on_host}
        host_nbytes = sum(n for copy, n in copies.items() if copy not in counted_copies)
        counted |= held.keys()
        counted_original |= original.keys()
        counted_copies |= copies.keys()
        rows.append(MemoryRow(name, treatment, len(members), nbytes, original_nbytes, host_nbytes))
    return rows


class StoreMemoryReport:
    """What a store holds now, in bytes."""

    def __init__(self, entries: Iterable[StoredEntry]) -> None:
        self._entries = entries

    def rows(self) -> list[MemoryRow]:
        return memory_rows(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes that the store keeps alive on the device."""
        return sum(row.nbytes for row in self.rows())

    @property
    def original_nbytes(self) -> int:
        """Bytes that autograd would keep alive without the store."""
        return sum(row.original_nbytes for row in self.rows())

    def __str__(self) -> str:
        lines = [f"{'tensors':>8} {'bytes':>14} {'on the host':>14} {'without':>14}  class"]
        for row in self.rows():
            label = f"{row.name}: {row.treatment}" if row.name else row.treatment
            lines.append(
                f"{row.entries:8} {row.nbytes:14,} {row.host_nbytes:14,} "
                f"{row.original_nbytes:14,}  {label}"
            )
        return "\n".join(lines)


def storages_of(x: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """(id, bytes) of the storages behind ``x``; an id is good while a reference to it is held."""
    storages = [part.untyped_storage() for part in plain_tensors(x)]
    return tuple((storage._cdata, storage.nbytes()) for storage in storages)
