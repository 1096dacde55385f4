"""The records of one rank in a file of fixed size, which outlives the process that writes it.

gloo ends the process with SIGABRT when two ranks' collectives do not match, and SIGKILL asks
nobody; no handler, thread or ``finally`` runs then. Bytes stored in a shared file mapping belong to
the kernel, so they are there whatever ends the process (not when the machine itself goes down).

A rank has two files: ``rank_N.ring``, the last ``SLOTS`` records, and ``rank_N.json``, what is true
of the whole run (process id, host, the process groups).
"""

import json
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

__all__ = ["SLOTS", "SLOT_BYTES", "Facts", "Record", "RingReader", "RingWriter"]

SLOTS = 4096
SLOT_BYTES = 1024
_HEADER = struct.Struct("<8sQ")  # magic, number of records ever written
_LENGTH = struct.Struct("<I")
_MAGIC = b"TXRING01"
_FILE_BYTES = _HEADER.size + SLOTS * SLOT_BYTES


@dataclass(frozen=True, kw_only=True)
class Record:
    """One collective that a rank was about to issue.

    Attributes:
        index: Its place among all collectives of the rank, from 0.
        step: The training step, 0 before the first.
        group: Name of the process group; a pair of ranks for point-to-point operations.
        position: Its place among the collectives on that group, from 0.
        op: "all_gather", "all_to_all", ...
        inputs: Shapes of the input tensors (at most ``MAX_SHAPES``).
        outputs: The same of the output tensors.
        dtype: Of the first tensor.
        num_bytes: Bytes of all tensors.
        root: Rank within the group that an asymmetric operation starts from or goes to; or -1.
        unit: The FSDP unit or module that issues it; "" where neither is on the stack.
        site: The function outside of torch that issues it.
        backward: Whether autograd's backward is running.
        splits: For all-to-alls: rows sent to each rank, and rows received from each; or None.
    """

    index: int
    step: int
    group: str
    position: int
    op: str
    inputs: list[list[int]]
    outputs: list[list[int]]
    dtype: str = ""
    num_bytes: int = 0
    root: int = -1
    unit: str = ""
    site: str = ""
    backward: bool = False
    splits: tuple[list[int], list[int]] | None = None

    MAX_SHAPES = 4

    def encode(self) -> bytes:
        """As JSON that fits a slot; splits of very large groups do not, and are left out."""
        room = SLOT_BYTES - _LENGTH.size
        text = json.dumps(self.__dict__, separators=(",", ":")).encode()
        if len(text) > room:
            short = {**self.__dict__, "splits": None, "unit": self.unit[-200:]}
            text = json.dumps(short, separators=(",", ":")).encode()
        assert len(text) <= room, f"a record of {len(text)} bytes"
        return text


@dataclass(kw_only=True)
class Facts:
    """What is true of one rank's whole run.

    ``ending`` is "" while it runs, "finished", or the error that ended it.
    """

    rank: int
    world_size: int
    pid: int
    host: str
    timeout_s: float
    groups: dict[str, list[int]] = field(default_factory=dict)
    ending: str = ""

    def write(self, folder: Path) -> None:
        path = folder / f"rank_{self.rank}.json"
        staging = path.with_suffix(".tmp")
        staging.write_text(json.dumps(self.__dict__))
        os.replace(staging, path)

    @classmethod
    def read_all(cls, folder: Path) -> dict[int, Self]:
        """By rank, of every rank that has begun."""
        found = [cls(**json.loads(path.read_text())) for path in folder.glob("rank_*.json")]
        return {facts.rank: facts for facts in sorted(found, key=lambda facts: facts.rank)}


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.ring"


class RingWriter:
    """Writes the records of this rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        with open(_path(folder, rank), "w+b") as file:
            file.truncate(_FILE_BYTES)
            self._map = mmap.mmap(file.fileno(), _FILE_BYTES)
        self._count = 0
        _HEADER.pack_into(self._map, 0, _MAGIC, 0)

    def write(self, record: Record) -> None:
        text = record.encode()
        start = _HEADER.size + (self._count % SLOTS) * SLOT_BYTES
        _LENGTH.pack_into(self._map, start, len(text))
        self._map[start + _LENGTH.size : start + _LENGTH.size + len(text)] = text
        # The count comes last: a record that is not counted was not written in full.
        self._count += 1
        _HEADER.pack_into(self._map, 0, _MAGIC, self._count)


class RingReader:
    """Reads what another process has written, now or before it died; each record once."""

    def __init__(self, folder: Path, rank: int) -> None:
        with open(_path(folder, rank), "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._next = 0
        self.lost = 0
        """Records that were overwritten before they were read."""

    def __iter__(self) -> Iterator[Record]:
        magic, count = _HEADER.unpack_from(self._map, 0)
        assert magic == _MAGIC, "not a ring file of this version"
        oldest = max(0, count - SLOTS)
        self.lost += max(0, oldest - self._next)
        for index in range(max(self._next, oldest), count):
            record = self._read(index)
            if record is None:
                self.lost += 1
            else:
                yield record
        self._next = count

    def _read(self, index: int) -> Record | None:
        start = _HEADER.size + (index % SLOTS) * SLOT_BYTES
        (length,) = _LENGTH.unpack_from(self._map, start)
        try:
            values: dict[str, Any] = json.loads(
                self._map[start + _LENGTH.size : start + _LENGTH.size + length]
            )
        except ValueError:  # being overwritten: the writer is a whole ring ahead
            return None
        record = Record(**values)
        return record if record.index == index else None
