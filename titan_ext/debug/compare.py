# SPDX-License-Identifier: BSD-3-Clause
"""Finds where the ranks' collectives differ, and who waits for whom.

All ranks of a process group must issue its collectives in the same order. The order between groups
may differ, as it does between pipeline stages. So we compare group by group: position 57 of a
group must be the same collective on all its ranks. Point-to-point operations pair up by sender and
receiver: the recorder gives each pair its own group.
"""

import dataclasses
from collections import defaultdict
from pathlib import Path

from titan_ext.debug.trace_buffer import RankInfo, Record, TraceReader
from titan_ext.names import ranks_in_words

_SHOWN = 5


class Comparison:
    """Compares the records of all ranks with files in ``folder``, or of those on ``host``."""

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
            if rank not in self._readers:
                self._readers[rank] = TraceReader(self._folder, rank)
            for record in self._readers[rank]:
                news = True
                self.last[rank] = record
                self._newest[rank, record.group] = record.position
                self._pending[record.group, record.position][rank] = record
        for key in sorted(self._pending, key=self._first_step):
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
        last = self.last.get(rank)
        if last is None:
            return f"  rank {rank} has not issued it, nor any other collective"
        return (
            f"  rank {rank} has not issued it; the last that it issued is collective "
            f"{last.position} of group {last.group}: {describe(last)}"
        )

    def _missing(self, key: tuple[str, int]) -> set[int]:
        """The ranks that have not reached this position of the group."""
        group, position = key
        return {r for r in self._ranks_of(group) if self._newest.get((r, group), -1) < position}

    def _ranks_of(self, group: str) -> set[int]:
        """The ranks of a group whose files we see; those on another machine's disk we do not."""
        members = next((i.groups[group] for i in self.infos.values() if group in i.groups), [])
        return set(members) & set(self.infos)

    def _first_step(self, key: tuple[str, int]) -> tuple[int, int]:
        return min((record.step, record.index) for record in self._pending[key].values())


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
    if len(by_signature) > 1:
        return "\n".join(
            [head]
            + [
                f"  {ranks_in_words(ranks)}: {describe(records[ranks[0]])}"
                for ranks in list(by_signature.values())[:_SHOWN]
            ]
        )
    wrong = _split_mismatch(records)
    return f"{head}\n{wrong}" if wrong else ""


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


def _split_mismatch(records: dict[int, Record]) -> str:
    """The pair of ranks of an all-to-all that disagree about how many rows go between them."""
    splits = [record.splits for _, record in sorted(records.items())]
    ranks = sorted(records)
    if any(split is None or len(split[0]) != len(ranks) for split in splits):
        return ""  # unknown, or some ranks of the group are out of sight
    lines = [
        f"  rank {sender} sends {sends[0][j]} rows to rank {receiver}, which expects "
        f"{expects[1][i]}: {describe(records[sender])}"
        for i, (sender, sends) in enumerate(zip(ranks, splits, strict=True))
        for j, (receiver, expects) in enumerate(zip(ranks, splits, strict=True))
        if sends is not None and expects is not None and sends[0][j] != expects[1][i]
    ]
    return "\n".join(lines[:_SHOWN])
