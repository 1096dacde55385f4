# SPDX-License-Identifier: BSD-3-Clause
"""Which rank of a run is late, and for which unit, from what the ranks have noted.

``python -m titan_ext.debug.hang_report FOLDER`` reads the notes of ``debug.record_collectives``
while a run hangs or when it has died. All collectives before, with shapes, times and stacks, are in
torch's Flight Recorder, which ``torchfrtrace`` reads. Nothing here needs torch or Titan.
"""

import argparse
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from titan_ext.base.messages import ranks_in_words

KEPT = 8  # notes of a group: ranks may be so many ahead of a late one
_NBYTES = 256  # of a note
_SHOWN = 5


class Note(NamedTuple):
    """One of the newest collectives that a rank was about to issue."""

    group: str  # process group; a pair of ranks for point-to-point operations
    position: int  # among the collectives on the group; -1 for a group that has none yet
    order: int = 0  # hash of what the rank has issued on the group, with this one
    index: int = -1  # among all collectives of the rank
    words: str = ""  # what, by whom, when

    def write(self, file: int, slot: int) -> None:
        """Write it as one of the ``slot``-th group; it survives the end of the process."""
        line = "\t".join(map(str, self)).encode("ascii", "replace")[: _NBYTES - 1]
        place = slot * KEPT + self.position % KEPT
        os.pwrite(file, line.ljust(_NBYTES - 1) + b"\n", place * _NBYTES)

    @classmethod
    def read_all(cls, path: Path) -> Iterator["Note"]:
        for line in path.read_text().replace("\0", "").split("\n")[:-1]:
            group, at, order, index, words = line.rstrip(" ").split("\t")
            yield cls(group, int(at), int(order), int(index), words)


def report(folder: Path) -> str:
    """Where ranks differ, and who waits for whom, in words, the earliest first; "" for neither.

    All ranks of a process group must issue its collectives in the same order. The order between
    groups may differ, as it does between pipeline stages. So collective 57 of a group must be the
    same on all its ranks, and what came before it. A pair of ranks has a group of its own.
    """
    groups: dict[str, dict[int, dict[int, Note]]] = defaultdict(lambda: defaultdict(dict))
    last: dict[int, Note] = {}
    for rank in sorted(int(path.stem.removeprefix("rank_")) for path in folder.glob("rank_*")):
        for note in Note.read_all(folder / f"rank_{rank}.notes"):
            groups[note.group][rank][note.position] = note
            last[rank] = max(last.get(rank, note), note, key=lambda x: x.index)
    said = sorted(said for group in groups for said in _compare(group, groups[group], last))
    return "\n".join(text for *_, text in said[:_SHOWN])


def _compare(
    group: str, notes: Mapping[int, Mapping[int, Note]], last: Mapping[int, Note]
) -> Iterator[tuple[bool, int, str]]:
    """What is wrong on a group: whether it is a wait, when it begins, and the words."""
    low = min(max(of_rank) for of_rank in notes.values())
    alike: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, of_rank in notes.items():
        if note := of_rank.get(low):
            alike[note.order, note.words].append(rank)
    ahead = [rank for rank, of_rank in notes.items() if max(of_rank) > low]
    late = [rank for rank in notes if rank not in ahead]
    if len(alike) > 1:
        lines = [f"  {ranks_in_words(ranks)}: {words}" for (_, words), ranks in alike.items()]
        head = f"the ranks differ at or before collective {low} of group {group}:"
        yield False, notes[late[0]][low].index, "\n".join([head, *lines[:_SHOWN]])
    elif ahead:
        mine = notes[ahead[0]]
        first = mine[min(position for position in mine if position > low)]
        verb = "wait" if len(ahead) > 1 else "waits"
        it, has = ("it", "has") if len(late) == 1 else (f"rank {late[0]}", "have")
        issued = last[late[0]]
        text = f"{ranks_in_words(ahead)} {verb} in collective {first.position} of group {group}: "
        text += f"{first.words}\n  {ranks_in_words(late)} {has} not issued it; the last that {it} "
        text += f"issued is collective {issued.position} of group {issued.group}: {issued.words}"
        yield True, first.index, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a folder of notes: collectives/<run>")
    print(report(parser.parse_args().folder))


if __name__ == "__main__":
    main()
