# SPDX-License-Identifier: BSD-3-Clause
"""A small process that outlives the ranks and reports which of them differ, wait or died.

gloo ends a process with SIGABRT when two ranks' collectives do not match. After that, as after
SIGKILL, no handler, thread or ``finally`` runs. But the kernel has what a process has written to a
file. So a rank writes a record of each collective (``TraceWriter``), and another process reads them
(``Comparison``) when something is wrong, also when the rank has died.

Local rank 0 of each machine starts an observer. While all is well it looks only whether its own
ranks live and their files grow. It reports on standard error and in ``report.txt``

- who waits for whom, when no rank of this machine has issued anything for half the timeout;
- when a rank of this machine has died or failed, as at a difference or a timeout. It then kills the
    machine's stopped ranks (SIGSTOP), so that the run can end.

Rank 0's observer then compares all ranks, the others their own. Ranks with one history are one
class: of thousands of ranks a few are read in full.

``python -m titan_ext.debug.hang_report FOLDER`` reports once on existing records. Nothing here
needs torch or Titan.
"""

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from titan_ext.base.messages import and_more, ranks_in_words
from titan_ext.debug.records import (
    EVERYWHERE,
    RankInfo,
    Record,
    describe,
    ends_of,
    kind_of,
    newest_record,
    read_trace,
)

REPORT = "report.txt"
_POLL_S = 0.1
_SETTLE_S = 1.0
"""How long others may take to notice a death before the report is written."""
_SHOWN = 5
_KEPT_RUNS = 3
_MOST_COMPARED = 8
"""Groups of one kind that are compared, and states that are told."""


class Comparison:
    """Compares the records of all ranks with files in ``folder``, or of those on ``host``.

    All ranks of a process group must issue its collectives in the same order. The order between
    groups may differ, as it does between pipeline stages. So position 57 of a group must be the
    same collective on all its ranks. A pair of sender and receiver has a group of its own.

    Ranks that have issued the same on groups of the same kind are one class. Only the newest record
    of each rank is read, and in full the traces of a few: one for each class in a group.
    """

    def __init__(self, folder: Path, host: str = EVERYWHERE) -> None:
        self._folder = folder
        self.infos = RankInfo.read_all(folder, host)
        self._newest: dict[int, Record] = {}
        self._class: dict[int, tuple[int, int]] = {}
        members: dict[str, set[int]] = defaultdict(set)
        for rank, info in self.infos.items():
            record = newest_record(info.folder(folder), rank)
            if record is not None:
                self._newest[rank] = record
            self._class[rank] = (record.index, record.history) if record else (-1, 0)
            for group in info.groups:
                members[group] |= {rank, *ends_of(group)} & self.infos.keys()
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
        """Who waits for whom, in words, one collective a paragraph; "" if nobody does."""
        return "\n".join(text for *_, text in sorted(self._waits)[:_SHOWN])

    @property
    def states(self) -> str:
        """How the ranks are, a line for all that are alike."""
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


def start(folder: Path, *, of_all_machines: bool) -> None:
    """Start an observer of this machine's ranks, in its own session."""
    command = [sys.executable, "-m", "titan_ext.debug.hang_report", str(folder)]
    command += ["--follow", socket.gethostname(), *(["--all"] if of_all_machines else [])]
    # A session of its own: torchrun ends a worker with everything in the worker's session.
    subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)


class _Observer:
    """Watches the ranks of ``host``; its report is of all ranks if ``of_all``."""

    def __init__(self, folder: Path, host: str, *, of_all: bool) -> None:
        self._folder, self._host, self._of_all = folder, host, of_all
        self._nbytes, self._last_news = 0, time.monotonic()
        self._said: set[str] = set()

    def follow(self) -> None:
        if self._of_all:
            others = sorted(path for path in self._folder.parent.iterdir() if path.is_dir())
            for old in others[:-_KEPT_RUNS]:
                shutil.rmtree(old, ignore_errors=True)
        while True:
            ranks = RankInfo.read_all(self._folder, self._host).values()
            states = [_state(info) for info in ranks]
            if any(state.startswith(("died", "failed")) for state in states):
                time.sleep(_SETTLE_S)
                self._report()
                self._end_stopped(ranks)
                return
            if states and all(state == "finished" for state in states):
                return
            timeout_s = min((info.timeout_s for info in ranks), default=float("inf"))
            if self._quiet_s() >= timeout_s / 2:
                self._report(unless_nobody_waits=True)
                self._last_news = time.monotonic()
            time.sleep(_POLL_S)

    def _quiet_s(self) -> float:
        """How many seconds no rank of this machine has written a record."""
        traces = (self._folder / self._host).glob("*.trace")
        nbytes = sum(path.stat().st_size for path in traces)
        if nbytes != self._nbytes:
            self._nbytes, self._last_news = nbytes, time.monotonic()
        return time.monotonic() - self._last_news

    def _report(self, *, unless_nobody_waits: bool = False) -> None:
        comparison = Comparison(self._folder, EVERYWHERE if self._of_all else self._host)
        if comparison.waiting or comparison.difference or not unless_nobody_waits:
            for part in comparison.parts():
                self._say(part)

    def _end_stopped(self, ranks: Iterable[RankInfo]) -> None:
        """torchrun asks with SIGTERM, which a stopped process cannot hear, and waits 30 seconds."""
        for info in ranks:
            if not info.ending and _process_state(info.pid) == "T":
                os.kill(info.pid, signal.SIGKILL)
                self._say(f"rank {info.rank} was stopped; now killed (process {info.pid})")

    def _say(self, text: str) -> None:
        if not text or text in self._said:
            return
        self._said.add(text)
        folder = self._folder if self._of_all else self._folder / self._host
        with open(folder / REPORT, "a") as file:
            file.write(text + "\n")
        if self._of_all:  # one voice in the log of a job of hundreds of machines
            lines = [f"[collectives] {line}" for line in text.splitlines()]
            print("\n".join(lines), file=sys.stderr, flush=True)


def _state(info: RankInfo) -> str:
    """What a rank does: "running", "stopped ...", "died ...", "failed: <error>" or "finished"."""
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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a folder of records: collectives/<run>")
    parser.add_argument("--follow", default="", help="watch this machine's ranks until they end")
    parser.add_argument("--all", action="store_true", help="and report on those of all machines")
    parsed = parser.parse_args(arguments)
    if parsed.follow:
        _Observer(parsed.folder, parsed.follow, of_all=parsed.all).follow()
    else:
        print("\n".join(filter(None, Comparison(parsed.folder).parts())))


if __name__ == "__main__":
    main()
