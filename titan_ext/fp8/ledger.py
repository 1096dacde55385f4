"""What the saved-tensor store holds right now, in bytes, by class of tensor.

Storages are counted, not shapes, and each of them once: an expanded view has the bytes of what it
expands, and two views of one storage have its bytes together. Nothing is added up as it happens, so
nothing can drift: every figure is read off the entries that are alive.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from titan_ext.fp8.local import plain_tensors

__all__ = ["Ledger", "Row", "StoredEntry", "storages_of"]


class StoredEntry(Protocol):
    """What the ledger asks of an entry of the store."""

    name: str
    treatment: str
    owns_bytes: bool
    original: tuple[tuple[int, int], ...]  # (storage, bytes) that autograd would have kept

    def tensors(self) -> Iterator[torch.Tensor]: ...


@dataclass(frozen=True)
class Row:
    """One class of stored tensors.

    Attributes:
        name: What the caller named it (``SavedTensorStore.hooks``): a module, for example.
        treatment: "float8 e4m3", "exact: <why>" or "passed through: <why>".
        entries: How many tensors; one saved several times is one.
        nbytes: Bytes of the storages that the store keeps alive. 0 for parameters and buffers,
            which the model owns.
        original_nbytes: Bytes of the storages that autograd would have kept alive instead.
    """

    name: str
    treatment: str
    entries: int
    nbytes: int
    original_nbytes: int


class Ledger:
    """Rows over entries, computed when asked for. A storage counts in the first row that has it."""

    def __init__(self, entries: Iterable[StoredEntry]) -> None:
        self._entries = entries

    def rows(self) -> list[Row]:
        """One row for each name and treatment that is alive, sorted."""
        classes: dict[tuple[str, str], list[StoredEntry]] = defaultdict(list)
        for entry in list(self._entries):
            classes[entry.name, entry.treatment].append(entry)
        counted: set[int] = set()
        counted_original: set[int] = set()
        rows = []
        for (name, treatment), entries in sorted(classes.items()):
            nbytes = original_nbytes = 0
            for entry in entries:
                for part in entry.tensors() if entry.owns_bytes else ():
                    storage = part.untyped_storage()
                    if storage._cdata not in counted:
                        counted.add(storage._cdata)
                        nbytes += storage.nbytes()
                for storage_id, size in entry.original if entry.owns_bytes else ():
                    if storage_id not in counted_original:
                        counted_original.add(storage_id)
                        original_nbytes += size
            rows.append(Row(name, treatment, len(entries), nbytes, original_nbytes))
        return rows

    @property
    def nbytes(self) -> int:
        """Bytes that the store keeps alive."""
        return sum(row.nbytes for row in self.rows())

    @property
    def original_nbytes(self) -> int:
        """Bytes that autograd would keep alive without the store."""
        return sum(row.original_nbytes for row in self.rows())

    def __str__(self) -> str:
        lines = [f"{'tensors':>8} {'bytes':>14} {'without':>14}  class"]
        for row in self.rows():
            label = f"{row.name}: {row.treatment}" if row.name else row.treatment
            lines.append(f"{row.entries:8} {row.nbytes:14,} {row.original_nbytes:14,}  {label}")
        return "\n".join(lines)


def storages_of(x: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """(id, bytes) of the storages behind ``x``; an id is good while a reference to it is held."""
    storages = [part.untyped_storage() for part in plain_tensors(x)]
    return tuple((storage._cdata, storage.nbytes()) for storage in storages)
