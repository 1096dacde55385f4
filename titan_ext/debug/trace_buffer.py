# SPDX-License-Identifier: BSD-3-Clause
"""The records of one rank in files that outlive the process that writes them.

gloo ends the process with SIGABRT when two ranks' collectives do not match. After that, as after
SIGKILL, no handler, thread or ``finally`` runs. But the kernel has what a process has written to a
file, however the process ends (unless the machine goes down).

A rank has ``rank_N.json`` with facts of the whole run (process id, host, the process groups). Its
newest records are in ``rank_N.PART.trace``, one a line, in two parts of ``PART_RECORDS`` each.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

PART_RECORDS = 4096


@dataclass(frozen=True, kw_only=True)
class Record:
    """One collective that a rank was about to issue.

    Attributes:
        index: Its position among all collectives of the rank, from 0.
        step: The training step, 0 before the first.
        group: Name of the process group; a pair of ranks for point-to-point operations.
        position: Its position among the collectives on that group, from 0.
        op: "all_gather", "all_to_all", ...
        inputs: Shapes of the input tensors (at most ``MAX_SHAPES``).
        outputs: The same of the output tensors.
        dtype: Of the first tensor.
        num_bytes: Bytes of all tensors.
        root: Rank within the group that a broadcast or gather starts from or goes to; else -1.
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


@dataclass(kw_only=True)
class RankInfo:
    """Facts of one rank's whole run.

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
        return {info.rank: info for info in sorted(found, key=lambda info: info.rank)}


class TraceWriter:
    """Writes the records of this rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._count = 0
        self._start_part(0)

    def write(self, record: Record) -> None:
        part, index = divmod(self._count, PART_RECORDS)
        if index == 0 and part > 0:
            self._file.close()
            self._start_part(part)
        self._file.write(json.dumps(record.__dict__).encode() + b"\n")
        self._count += 1

    def _start_part(self, part: int) -> None:
        self._file = open(_path(self._folder, self._rank, part), "wb", buffering=0)  # noqa: SIM115
        _path(self._folder, self._rank, part - 2).unlink(missing_ok=True)


class TraceReader:
    """Reads another process's records, also after its death; each record once."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._part = 0
        self._offset = 0

    def __iter__(self) -> Iterator[Record]:
        """The records since the last call; skips parts that are already deleted."""
        while True:
            is_complete = self._path(self._part + 1).exists()
            try:
                with open(self._path(self._part), "rb") as file:
                    file.seek(self._offset)
                    lines, newline, _ = file.read().rpartition(b"\n")
            except FileNotFoundError:  # deleted before it was read
                if not any(self._folder.glob(f"rank_{self._rank}.*.trace")):
                    return
                lines, newline, is_complete = b"", b"", True
            self._offset += len(lines + newline)
            for line in lines.splitlines():
                yield Record(**json.loads(line))
            if not is_complete:
                return
            self._part, self._offset = self._part + 1, 0

    def _path(self, part: int) -> Path:
        return _path(self._folder, self._rank, part)


def _path(folder: Path, rank: int, part: int) -> Path:
    return folder / f"rank_{rank}.{part}.trace"
