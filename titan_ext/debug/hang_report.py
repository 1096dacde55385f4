# SPDX-License-Identifier: BSD-3-Clause
"""A report on the ranks of a run that differ, wait or died, from what they have recorded.

``python -m titan_ext.debug.hang_report FOLDER`` compares what ``debug.record_collectives`` has
recorded, while a run hangs or when it has died. gloo ends a process with SIGABRT when two ranks'
collectives do not match, NCCL's watchdog at a timeout: no handler or ``finally`` of the rank runs
then. But the kernel has what a process has written to a file.

The files of a machine's ranks are in a folder of its name: thousands of ranks in one folder would
make every look into it slow. Nothing here needs torch or Titan.
"""

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from titan_ext.base.messages import ranks_in_words

_TAIL_NBYTES = 1 << 18
"""A record with the splits of 8,192 ranks fits into it."""
# Not measured, nor is the next: a report must not grow with the job.
_SHOWN = 5
_MOST_COMPARED = 8
"""Groups of one kind that are compared, and states that are told."""


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
        ending: "finished", or the error that ended it; "" while it runs, or if it was killed.
    """

    rank: int
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
        # Whole or not at all: a report may read while the run writes.
        os.replace(staging, path)

    @classmethod
    def read_all(cls, run: Path) -> dict[int, Self]:
        """The facts of every rank that has begun, by rank."""
        found = [cls(**json.loads(path.read_text())) for path in run.glob("*/rank_*.json")]
        return {info.rank: info for info in sorted(found, key=lambda info: info.rank)}


def trace_files(folder: Path, rank: int) -> tuple[Path, Path]:
    """The files of a rank's trace, the older first."""
    return folder / f"rank_{rank}.old.trace", folder / f"rank_{rank}.trace"


def _whole_lines(path: Path, nbytes: int) -> list[bytes]:
    """The lines in the last bytes of a file, but for one that is not written yet; the first of
    them may lack its begin. None of a file that is not there."""
    try:
        with path.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - nbytes, 0))
            return file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def read_trace(folder: Path, rank: int) -> list[Record]:
    """The whole records of a rank, oldest first."""
    files = trace_files(folder, rank)
    lines = [line for path in files for line in _whole_lines(path, sys.maxsize)]
    return [Record(**json.loads(line)) for line in lines]


def newest_record(folder: Path, rank: int) -> Record | None:
    """The last whole record of a rank, from the end of its trace; None if there is none."""
    # The newer file is empty, or not there, just after a writer has begun a new one.
    for path in reversed(trace_files(folder, rank)):
        if lines := _whole_lines(path, _TAIL_NBYTES):
            return Record(**json.loads(lines[-1]))
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


class Comparison:
    """Compares the records of all ranks with files in ``folder``.

    All ranks of a process group must issue its collectives in the same order. The order between
    groups may differ, as it does between pipeline stages. So position 57 of a group must be the
    same collective on all its ranks. A pair of sender and receiver has a group of its own.

    Ranks that have issued the same on groups of the same kind are one class. Only the newest record
    of each rank is read, and in full the traces of a few: one for each class in a group.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.infos = RankInfo.read_all(folder)
        self._newest: dict[int, Record] = {}
        self._class: dict[int, tuple[int, int]] = {}
        members: dict[str, set[int]] = defaultdict(set)
        for rank, info in self.infos.items():
            record = newest_record(info.folder(folder), rank)
            if record is not None:
                self._newest[rank] = record
            self._class[rank] = (record.index, record.history) if record else (-1, 0)
            for group, ranks in info.groups.items():
                members[group] |= set(ranks) & self.infos.keys()
        self._members = {group: sorted(ranks) for group, ranks in members.items()}
        self._differences: list[tuple[int, int, str]] = []
        self._waits: list[tuple[int, int, str]] = []
        for group, classes in self._to_compare():
            self._compare(group, classes)
        places: dict[tuple[str, int], dict[int, Record]] = defaultdict(dict)
        for rank, record in self._newest.items():
            places[record.group, record.position][rank] = record
        for (group, _), records in places.items():
            self._note_difference(group, records, {})
        if not (self._differences or self._waits):  # rows may differ among ranks of one history
            one_of_each = {kind_of(group): group for group in self._members}
            for group in one_of_each.values():
                self._compare(group, [[rank] for rank in self._members[group][:_SHOWN]])

    @property
    def difference(self) -> str:
        """The first difference, in words; "" if there is none."""
        return min(self._differences, default=(0, 0, ""))[2]

    @property
    def waiting(self) -> str:
        """The waits, in words, one collective a paragraph; "" if nobody waits."""
        return "\n".join(text for *_, text in sorted(self._waits)[:_SHOWN])

    @property
    def states(self) -> str:
        """The states of the ranks, a line for all that are alike."""
        alike: dict[str, list[int]] = defaultdict(list)
        first: dict[str, str] = {}
        for rank, info in self.infos.items():
            key = re.sub(r"\d+", "", info.ending)  # ports, addresses, indices
            first.setdefault(key, info.ending or "no end recorded: running, or killed")
            alike[key].append(rank)
        lines = [f"{ranks_in_words(ranks)}: {first[key]}" for key, ranks in alike.items()]
        return "\n".join(lines[:_MOST_COMPARED])

    def parts(self) -> list[str]:
        return [self.difference, self.waiting, self.states]

    def _to_compare(self) -> Iterator[tuple[str, list[list[int]]]]:
        """Groups whose ranks differ in what they have issued, with their ranks by class.

        One group stands for all of its kind with the same classes. Of many classes the largest is
        taken, and those that are behind.
        """
        seen: dict[str, set[frozenset]] = defaultdict(set)
        for group, ranks in self._members.items():
            by_class: dict[tuple[int, int], list[int]] = defaultdict(list)
            for rank in ranks:
                by_class[self._class[rank]].append(rank)
            classes, alike = frozenset(by_class), seen[kind_of(group)]
            if len(classes) == 1 or classes in alike or len(alike) == _MOST_COMPARED:
                continue
            alike.add(classes)
            largest = max(by_class, key=lambda key: len(by_class[key]))
            others = sorted(classes - {largest})[: _SHOWN - 1]
            yield group, [by_class[key] for key in (largest, *others)]

    def _compare(self, group: str, classes: Sequence[list[int]]) -> None:
        """Note the first difference on a group, and who waits; each class by its first rank."""
        traces: dict[int, dict[int, Record]] = {}
        like: dict[int, list[int]] = {}
        for ranks in classes:
            records = read_trace(self.infos[ranks[0]].folder(self._folder), ranks[0])
            trace = {x.position: x for x in records if x.group == group}
            if trace or not records or records[0].index == 0:  # else they are overwritten
                traces[ranks[0]], like[ranks[0]] = trace, ranks
        if not traces:
            return
        for position in sorted(set.intersection(*map(set, traces.values()))):
            at = {rank: trace[position] for rank, trace in traces.items()}
            if self._note_difference(group, at, like):
                break
        reached = {rank: max(trace, default=-1) for rank, trace in traces.items()}
        position = min(reached.values()) + 1
        waits = [rank for rank in traces if position in traces[rank]]
        if waits:
            first = traces[waits[0]][position]
            ranks = [rank for one in waits for rank in like[one]]
            behind = [like[rank] for rank in traces if reached[rank] < position]
            text = f"{ranks_in_words(ranks)} {'wait' if len(ranks) > 1 else 'waits'} in collective "
            text += f"{position} of group {group}: {describe(first)}"
            lines = [text, *(self._elsewhere(ranks) for ranks in behind)]
            self._waits.append((first.step, first.index, "\n".join(lines)))

    def _elsewhere(self, ranks: Sequence[int]) -> str:
        it, has = ("it", "has") if len(ranks) == 1 else (f"rank {ranks[0]}", "have")
        said = f"  {ranks_in_words(ranks)} {has} not issued it"
        if (last := self._newest.get(ranks[0])) is None:
            return f"{said}, nor any other collective"
        where = f"collective {last.position} of group {last.group}"
        return f"{said}; the last that {it} issued is {where}: {describe(last)}"

    def _note_difference(
        self, group: str, records: Mapping[int, Record], like: Mapping[int, list[int]]
    ) -> bool:
        by_signature: dict[str, list[int]] = defaultdict(list)
        for rank, record in records.items():
            by_signature[record.signature()].append(rank)
        lines = _wrong_splits(self._members.get(group, []), records)
        if len(by_signature) > 1:
            lines = [
                f"  {ranks_in_words([r for one in ranks for r in like.get(one, [one])])}: "
                f"{describe(records[ranks[0]])}"
                for ranks in by_signature.values()
            ]
        if lines:
            first = min(records.values(), key=lambda record: record.index)
            head = f"the ranks differ at collective {first.position} of group {group}:"
            text = "\n".join([head, *lines[:_SHOWN]])
            self._differences.append((first.step, first.index, text))
        return bool(lines)


def _wrong_splits(members: Sequence[int], records: Mapping[int, Record]) -> list[str]:
    """The pairs of ranks of an all-to-all that disagree about how many rows go between them."""
    at = {rank: i for i, rank in enumerate(members)}
    splits = {rank: record.splits for rank, record in records.items() if record.splits}
    if any(len(sends) != len(members) for sends, _ in splits.values()):
        return []  # some ranks of the group are out of sight
    return [
        f"  rank {sender} sends {sent} rows to rank {receiver}, which expects {expected}: "
        f"{describe(records[sender])}"
        for sender, (sends, _) in splits.items()
        for receiver, (_, expects) in splits.items()
        if (sent := sends[at[receiver]]) != (expected := expects[at[sender]])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a folder of records: collectives/<run>")
    print("\n".join(filter(None, Comparison(parser.parse_args().folder).parts())))


if __name__ == "__main__":
    main()
