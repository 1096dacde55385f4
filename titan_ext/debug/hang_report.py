# SPDX-License-Identifier: BSD-3-Clause
"""A small process that outlives the ranks and reports which of them differ, wait or died.

gloo ends a process with SIGABRT when two ranks' collectives do not match. After that, as after
SIGKILL, no handler, thread or ``finally`` runs. But the kernel has what a process has written to a
file. So a rank writes a record of each collective (``TraceWriter``), and another process reads them
(``Comparison``), also when the rank has died.

Local rank 0 of each machine starts an observer of its ranks; rank 0's looks at all ranks. It
reports on standard error and in ``report.txt`` beside the records:

- when two ranks' collectives differ;
- who waits for whom, when some rank waits and no rank has issued anything for half the timeout;
- when a rank of this machine has died, or torch reported that its wait timed out. It then kills the
    machine's stopped ranks (SIGSTOP), so that the run can end.

``python -m titan_ext.debug.hang_report FOLDER`` reports once on existing records. Nothing here
needs torch or Titan.
"""

import argparse
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from titan_ext.base.messages import ranks_in_words

REPORT = "report.txt"
_POLL_S = 0.1
_SETTLE_S = 1.0
"""How long others may take to notice a death before the report is written."""
_SHOWN = 5
PART_RECORDS = 4096
"""A rank's newest records are in two files of so many each, one a line."""


@dataclass(frozen=True, kw_only=True)
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
        self._trace = folder / f"rank_{rank}"
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
        self._file = open(f"{self._trace}.{part}.trace", "wb", buffering=0)  # noqa: SIM115
        Path(f"{self._trace}.{part - 2}.trace").unlink(missing_ok=True)


class TraceReader:
    """Reads another process's records, also after its death; each record once."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._trace = folder / f"rank_{rank}"
        self._part = 0
        self._offset = 0

    def __iter__(self) -> Iterator[Record]:
        """The records since the last call; skips parts that are already deleted."""
        while True:
            is_complete = Path(f"{self._trace}.{self._part + 1}.trace").exists()
            try:
                with open(f"{self._trace}.{self._part}.trace", "rb") as file:
                    file.seek(self._offset)
                    lines, newline, _ = file.read().rpartition(b"\n")
            except FileNotFoundError:  # deleted before it was read
                if not any(self._trace.parent.glob(f"{self._trace.name}.*.trace")):
                    return
                lines, newline, is_complete = b"", b"", True
            self._offset += len(lines + newline)
            for line in lines.splitlines():
                yield Record(**json.loads(line))
            if not is_complete:
                return
            self._part, self._offset = self._part + 1, 0


class Comparison:
    """Compares the records of all ranks with files in ``folder``, or of those on ``host``.

    All ranks of a process group must issue its collectives in the same order. The order between
    groups may differ, as it does between pipeline stages. So position 57 of a group must be the
    same collective on all its ranks. A pair of sender and receiver has a group of its own.
    """

    def __init__(self, folder: Path, *, host: str = "") -> None:
        self._folder = folder
        self._host = host
        self._readers: dict[int, TraceReader] = {}
        self._pending: dict[tuple[str, int], dict[int, Record]] = defaultdict(dict)
        self._newest: dict[tuple[int, str], int] = {}
        self.infos: dict[int, RankInfo] = {}
        self.last: dict[int, Record] = {}
        """The newest record of each rank."""
        self.difference = ""
        """The first difference, in words; "" if there is none."""

    def advance(self) -> bool:
        """Read and compare new records; return whether there were any."""
        everyone = RankInfo.read_all(self._folder)
        self.infos = {r: i for r, i in everyone.items() if self._host in ("", i.host)}
        news = False
        for rank in self.infos:
            for record in self._readers.setdefault(rank, TraceReader(self._folder, rank)):
                news = True
                self.last[rank] = record
                self._newest[rank, record.group] = record.position
                self._pending[record.group, record.position][rank] = record
        first = {k: min((r.step, r.index) for r in of.values()) for k, of in self._pending.items()}
        for key in sorted(first, key=first.__getitem__):
            if self._missing(key):
                continue
            records = self._pending.pop(key)
            if set(records) == self._ranks_of(key[0]):  # not so if some were overwritten unread
                self.difference = self.difference or _difference(key, records)
        return news

    def waiting(self) -> str:
        """Who waits for whom, in words, one collective a line; "" if nobody does."""
        lines = []
        for (group, position), records in sorted(self._pending.items(), key=lambda i: i[0][1]):
            if any(key[0] == group and key[1] < position for key in self._pending):
                continue  # an earlier collective on this group says it already
            missing = self._missing((group, position))
            lines.append(
                f"{ranks_in_words(records)} waits in collective {position} of group {group}: "
                f"{describe(next(iter(records.values())))}\n"
                + "\n".join(self._elsewhere(rank) for rank in sorted(missing)[:_SHOWN])
            )
        return "\n".join(lines[:_SHOWN])

    def _elsewhere(self, rank: int) -> str:
        said = f"  rank {rank} has not issued it"
        if (last := self.last.get(rank)) is None:
            return f"{said}, nor any other collective"
        where = f"collective {last.position} of group {last.group}"
        return f"{said}; the last that it issued is {where}: {describe(last)}"

    def _missing(self, key: tuple[str, int]) -> set[int]:
        """The ranks that have not reached this position of the group."""
        group, position = key
        return {r for r in self._ranks_of(group) if self._newest.get((r, group), -1) < position}

    def _ranks_of(self, group: str) -> set[int]:
        """The ranks of a group whose files we see; those on another machine's disk we do not."""
        members = next((i.groups[group] for i in self.infos.values() if group in i.groups), [])
        return set(members) & set(self.infos)


def describe(record: Record) -> str:
    """One collective in words: what, how much, who, where."""
    shapes = ", ".join("x".join(map(str, shape)) or "scalar" for shape in record.inputs)
    moved = f" of {record.dtype}[{shapes}], {record.num_bytes:,} bytes" if shapes else ""
    by = f" by {record.unit}" if record.unit else ""
    site = f" in {record.site}" if record.site else ""
    phase = ", backward" if record.backward else ""
    splits = f", sends {record.splits[0]}, expects {record.splits[1]}" if record.splits else ""
    return f"{record.op}{moved}{by}{site}{phase}, step {record.step}{splits}"


def _difference(key: tuple[str, int], records: dict[int, Record]) -> str:
    group, position = key
    by_signature: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, record in sorted(records.items()):
        by_signature[_signature(record)].append(rank)
    head = f"the ranks differ at collective {position} of group {group}:"
    lines = _wrong_splits(records)
    if len(by_signature) > 1:
        lines = [
            f"  {ranks_in_words(ranks)}: {describe(records[ranks[0]])}"
            for ranks in by_signature.values()
        ]
    return "\n".join([head, *lines[:_SHOWN]]) if lines else ""


def _signature(record: Record) -> tuple[str, str]:
    """What must be equal on all ranks."""
    if record.op in ("send", "recv"):  # the two ends of a pipeline are different modules
        tensors = record.inputs or record.outputs
        return repr(tensors), record.dtype
    shapes: list = [record.inputs, record.outputs]
    if record.op == "all_to_all":
        # How many rows is each rank's own; the split matrix says whether they fit.
        shapes = [[shape[1:] for shape in tensors[:1]] for tensors in shapes]
    elif record.op in ("scatter", "all_gather"):
        shapes = [record.outputs]
    elif record.op in ("gather", "reduce_scatter"):
        shapes = [record.inputs]
    identity = dataclasses.replace(record, index=0, inputs=[], outputs=[], num_bytes=0, splits=None)
    return repr(shapes), repr(identity)


def _wrong_splits(records: dict[int, Record]) -> list[str]:
    """The pairs of ranks of an all-to-all that disagree about how many rows go between them."""
    ranks = sorted(records)
    splits = {rank: records[rank].splits or ([], []) for rank in ranks}
    if any(len(sends) != len(ranks) for sends, _ in splits.values()):
        return []  # unknown, or some ranks of the group are out of sight
    return [
        f"  rank {sender} sends {sent} rows to rank {receiver}, which expects {expected}: "
        f"{describe(records[sender])}"
        for i, sender in enumerate(ranks)
        for j, receiver in enumerate(ranks)
        if (sent := splits[sender][0][j]) != (expected := splits[receiver][1][i])
    ]


def start(folder: Path, *, of_all_machines: bool) -> None:
    """Start an observer of this machine's ranks, or of all ranks, in its own session."""
    command = [sys.executable, "-m", "titan_ext.debug.hang_report", str(folder), "--follow"]
    command += [] if of_all_machines else ["--host", socket.gethostname()]
    # A session of its own: torchrun ends a worker with everything in the worker's session.
    subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)


def report_once(folder: Path) -> str:
    """Report how the run ended, from the records in ``folder``."""
    comparison = Comparison(folder)
    comparison.advance()
    return "\n".join(filter(None, _parts(comparison)))


class _Observer:
    def __init__(self, folder: Path, host: str) -> None:
        self._folder = folder
        self._comparison = Comparison(folder, host=host)
        self._last_news = time.monotonic()
        self._said: set[str] = set()

    def follow(self) -> None:
        while True:
            if self._comparison.advance():
                self._last_news = time.monotonic()
            self._say(self._comparison.difference)
            states = [_state(info) for info in self._local().values()]
            if any(state.startswith(("died", "failed")) for state in states):
                time.sleep(_SETTLE_S)
                self._comparison.advance()
                for part in _parts(self._comparison):
                    self._say(part)
                self._end_stopped_ranks()
                return
            if states and all(state == "finished" for state in states):
                self._say(self._comparison.waiting())
                return
            quiet_s = time.monotonic() - self._last_news
            timeout_s = min((i.timeout_s for i in self._local().values()), default=float("inf"))
            if quiet_s >= timeout_s / 2 and (waiting := self._comparison.waiting()):
                self._say(f"{waiting}\n{_parts(self._comparison)[-1]}")
            time.sleep(_POLL_S)

    def _local(self) -> dict[int, RankInfo]:
        host = socket.gethostname()
        return {r: i for r, i in self._comparison.infos.items() if i.host == host}

    def _end_stopped_ranks(self) -> None:
        """torchrun asks with SIGTERM, which a stopped process cannot hear, and waits 30 seconds."""
        for info in self._local().values():
            if not info.ending and _process_state(info.pid) == "T":
                os.kill(info.pid, signal.SIGKILL)
                self._say(f"rank {info.rank} was stopped; now killed (process {info.pid})")

    def _say(self, text: str) -> None:
        if not text or text in self._said:
            return
        self._said.add(text)
        with open(self._folder / REPORT, "a") as file:
            file.write(text + "\n")
        lines = [f"[collectives] {line}" for line in text.splitlines()]
        print("\n".join(lines), file=sys.stderr, flush=True)


def _parts(comparison: Comparison) -> list[str]:
    """The first difference, who waits, and how each rank is."""
    states = [f"rank {rank}: {_state(info)}" for rank, info in comparison.infos.items()]
    return [comparison.difference, comparison.waiting(), "\n".join(states)]


def _state(info: RankInfo) -> str:
    """Of one rank: "running", "stopped ...", "died ...", "failed: <error>", or "finished"."""
    if info.ending:
        return info.ending
    if info.host != socket.gethostname():
        return f"running on {info.host}, as far as its records say"
    match _process_state(info.pid):
        case "":
            return f"died without an error (process {info.pid}): killed, or aborted by its backend"
        case "T":
            return f"stopped by a signal (process {info.pid})"
        case _:
            return f"running (process {info.pid})"


def _process_state(pid: int) -> str:
    """The letter of ps(1); "" if the process has ended; "?" where the system does not say."""
    try:
        os.kill(pid, 0)
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return ""
    except OSError:
        return "?"
    return "" if letter in "ZX" else letter


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a folder of records: collectives/<run>")
    parser.add_argument("--follow", action="store_true", help="watch until the ranks have ended")
    parser.add_argument("--host", default="", help="only the ranks of this machine")
    parsed = parser.parse_args(arguments)
    if parsed.follow:
        _Observer(parsed.folder, parsed.host).follow()
    else:
        print(report_once(parsed.folder) or "no difference, and nobody waits")


if __name__ == "__main__":
    main()
