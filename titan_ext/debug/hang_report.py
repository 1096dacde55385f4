# SPDX-License-Identifier: BSD-3-Clause
"""A report on the ranks of a run that differ, wait or died, from what they have recorded.

``python -m titan_ext.debug.hang_report FOLDER`` compares what ``debug.record_collectives`` has
recorded, while a run hangs or when it has died. gloo ends a process with SIGABRT when two ranks'
collectives do not match, NCCL's watchdog at a timeout: no handler or ``finally`` of the rank runs
then. But the kernel has what a process has written to a file.

Nothing here needs torch or Titan.
"""

import argparse
import os
import re
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from titan_ext.base.messages import and_more, ranks_in_words
from titan_ext.debug.records import (
    RankInfo,
    Record,
    describe,
    kind_of,
    newest_record,
    read_trace,
)

_SHOWN = 5
_MOST_COMPARED = 8
"""Groups of one kind that are compared, and states that are told."""


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
        words: dict[str, str] = {}
        for rank, info in self.infos.items():
            state = _state(info)
            key = re.sub(r"\d+", "", state)  # ports, addresses, indices
            words.setdefault(key, state)
            alike[key].append(rank)
        lines = []
        for key, ranks in alike.items():
            pids = and_more([self.infos[rank].pid for rank in ranks])
            process = f" (process {pids})" if key.startswith(("died", "stopped")) else ""
            lines.append(f"{ranks_in_words(ranks)}: {words[key]}{process}")
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
            folder = self.infos[ranks[0]].folder(self._folder)
            trace = {x.position: x for x in read_trace(folder, ranks[0], group)}
            if trace or (folder / f"rank_{ranks[0]}.0.trace").exists():  # else they are overwritten
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


def _state(info: RankInfo) -> str:
    """The state of a rank: "running", "stopped ...", "died ...", "failed: ..." or "finished"."""
    if info.ending:
        return info.ending
    if info.host != socket.gethostname():
        return "running on another machine, as far as the records say"
    match _process_state(info.pid):
        case "":
            return "died without an error: killed, or aborted by its backend"
        case "T":
            return "stopped by a signal"
        case _:
            return "running"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a folder of records: collectives/<run>")
    print("\n".join(filter(None, Comparison(parser.parse_args().folder).parts())))


if __name__ == "__main__":
    main()
