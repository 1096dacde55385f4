# SPDX-License-Identifier: BSD-3-Clause
"""Records of a rank's collectives in files, and their readers for another process.

The files of a machine's ranks are in a folder of its name: thousands of ranks in one folder would
make every look into it slow. Nothing here needs torch or Titan.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

PART_RECORDS = 4096
"""A rank's newest records are in two files of so many each, one a line."""
_TAIL_NBYTES = 1 << 13


@dataclass(kw_only=True)
class Record:
    """One collective that a rank was about to issue."""

    index: int  # among all collectives of the rank, from 0
    step: int  # of training; 0 before the first
    group: str  # process group; a pair of ranks for point-to-point operations
    position: int  # among the collectives on that group, from 0
    op: str  # "all_gather", "all_to_all", ...
    inputs: list[list[int]]  # shapes of the tensors, at most MAX_SHAPES
    outputs: list[list[int]]
    dtype: str = ""  # of the first tensor
    num_bytes: int = 0  # of all tensors
    root: int = -1  # rank within the group of a broadcast, gather or scatter
    unit: str = ""  # the FSDP unit or module that issues it, if one is on the stack
    site: str = ""  # the function outside of torch that issues it
    backward: bool = False  # whether autograd's backward is running
    splits: tuple[list[int], list[int]] | None = None  # rows sent to, and expected from, each rank
    history: int = 0  # hash of what the rank has issued before, in any order

    MAX_SHAPES = 4

    def signature(self) -> str:
        """The part of a record that must be equal on all ranks of the group."""
        if self.op in ("send", "recv"):  # the two ends of a pipeline are different modules
            return repr((self.position, self.inputs or self.outputs, self.dtype))
        shapes: list = [self.inputs, self.outputs]
        if self.op == "all_to_all":
            # How many rows is each rank's own; the split matrix says whether they fit.
            shapes = [[shape[1:] for shape in tensors[:1]] for tensors in shapes]
        elif self.op in ("scatter", "all_gather"):
            shapes = [self.outputs]
        elif self.op in ("gather", "reduce_scatter"):
            shapes = [self.inputs]
        what = (self.position, self.op, shapes, self.dtype, self.root)
        return repr((*what, self.step, self.unit, self.site, self.backward))


@dataclass(kw_only=True)
class RankInfo:
    """Facts of one rank's whole run.

    Attributes:
        groups: The ranks of each process group that it is in, by name.
        ending: "" while it runs, "finished", or the error that ended it.
    """

    rank: int
    pid: int
    host: str
    groups: dict[str, list[int]] = field(default_factory=dict)
    ending: str = ""

    def folder(self, run: Path) -> Path:
        """The folder with the files of this machine's ranks."""
        return run / self.host

    def write(self, run: Path) -> None:
        path = self.folder(run) / f"rank_{self.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = path.with_suffix(".tmp")
        staging.write_text(json.dumps(self.__dict__))
        os.replace(staging, path)

    @classmethod
    def read_all(cls, run: Path) -> dict[int, Self]:
        """The facts of every rank that has begun, by rank."""
        found = [cls(**json.loads(path.read_text())) for path in run.glob("*/rank_*.json")]
        return {info.rank: info for info in sorted(found, key=lambda info: info.rank)}


class TraceWriter:
    """Writes the records of a rank into the folder of its machine."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._trace = folder / f"rank_{rank}"
        self._count = 0
        self._start_part(0)

    def write(self, record: Record) -> None:
        part, index = divmod(self._count, PART_RECORDS)
        if index == 0 and part > 0:
            self._file.close()
            self._start_part(part)
        # Unbuffered: the kernel has it when the process is killed or aborts.
        self._file.write(json.dumps(record.__dict__).encode() + b"\n")
        self._count += 1

    def _start_part(self, part: int) -> None:
        self._file = open(f"{self._trace}.{part}.trace", "wb", buffering=0)  # noqa: SIM115
        Path(f"{self._trace}.{part - 2}.trace").unlink(missing_ok=True)


def _parts_of(folder: Path, rank: int) -> list[Path]:
    """The files of a rank's trace, oldest first."""
    return sorted(folder.glob(f"rank_{rank}.*.trace"), key=lambda path: int(path.suffixes[-2][1:]))


def _end_of(part: Path, nbytes: int) -> bytes:
    """The last bytes of a file; none of one that its rank has just deleted."""
    try:
        with part.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - nbytes, 0))
            return file.read()
    except FileNotFoundError:
        return b""


def read_trace(folder: Path, rank: int, group: str = "") -> Iterator[Record]:
    """The whole records of a rank, oldest first; those on ``group`` alone if it is given."""
    wanted = json.dumps(group).encode() if group else b""
    for part in _parts_of(folder, rank):
        lines, _, _ = _end_of(part, sys.maxsize).rpartition(b"\n")
        for line in lines.splitlines():
            if wanted in line:
                yield Record(**json.loads(line))


def newest_record(folder: Path, rank: int) -> Record | None:
    """The last whole record of a rank, from the end of its trace; None if there is none."""
    for part in reversed(_parts_of(folder, rank)):
        nbytes, lines = _TAIL_NBYTES, [b""]
        while len(lines) < 3 and nbytes < sys.maxsize:  # the first may lack its begin
            end = _end_of(part, nbytes)
            lines, nbytes = end.split(b"\n"), 8 * nbytes if len(end) == nbytes else sys.maxsize
        if len(lines) > 1:
            return Record(**json.loads(lines[-2]))
    return None


def kind_of(group: str) -> str:
    """The part of a name that groups of the same use have in common."""
    return group.rpartition("/")[0] + (" pair" if "->" in group else "")


def describe(record: Record) -> str:
    """One collective in words: what, how much, who, where."""
    shapes = ", ".join("x".join(map(str, shape)) or "scalar" for shape in record.inputs)
    moved = f" of {record.dtype}[{shapes}], {record.num_bytes:,} bytes" if shapes else ""
    by = f" by {record.unit}" if record.unit else ""
    site = f" in {record.site}" if record.site else ""
    phase = ", backward" if record.backward else ""
    splits = f", sends {record.splits[0]}, expects {record.splits[1]}" if record.splits else ""
    return f"{record.op}{moved}{by}{site}{phase}, step {record.step}{splits}"
