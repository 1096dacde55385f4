# SPDX-License-Identifier: BSD-3-Clause
"""Which rank of a run is late, and for which unit, from what the ranks have noted.

``python -m titan_ext.debug.hang_report FOLDER`` reads the notes of ``debug.record_collectives``
while a run hangs or when it has died. Shapes, times and stacks of all collectives are in torch's
Flight Recorder, which ``torchfrtrace`` reads. Nothing here needs torch or Titan.
"""

import argparse
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from titan_ext.base.messages import ranks_in_words

KEPT = 2048
"""Notes of a group that a rank keeps."""
_NBYTES = 256  # of a note
_SHOWN = 5


class Note(NamedTuple):
    """One collective that a rank was about to issue."""

    group: str  # process group; a pair of ranks for point-to-point operations
    position: int  # among the collectives on the group; -1 for a group that has none yet
    order: int = 0  # hash of what the rank has issued on the group, with this one
    index: int = -1  # among all collectives of the rank
    words: str = ""  # what, by whom, when


class Notes:
    """The file of a rank's notes: for each of its groups the newest, then the last ``KEPT``."""

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        self._file = os.open(path, flags, 0o644)

    def write(self, slot: int, note: Note) -> None:
        """Write a note of the rank's ``slot``-th group; it survives the end of the process."""
        line = "\t".join(map(str, note)).encode("ascii", "replace")[: _NBYTES - 1]
        for position in {-1, note.position}:
            os.pwrite(self._file, line.ljust(_NBYTES - 1) + b"\n", self._offset(slot, position))

    def read(self, slot: int, position: int = -1) -> Note | None:
        """The note of a position, or the newest; None if it is overwritten or not there."""
        line = os.pread(self._file, _NBYTES, self._offset(slot, position))
        if not line.endswith(b"\n"):
            return None
        group, at, order, index, words = line.decode().rstrip(" \n").split("\t")
        note = Note(group, int(at), int(order), int(index), words)
        return note if position in (-1, note.position) else None

    def newest(self) -> Iterator[Note]:
        slot = 0
        while note := self.read(slot):
            yield note
            slot += 1

    def close(self) -> None:
        os.close(self._file)

    def _offset(self, slot: int, position: int) -> int:
        place = position % KEPT + 1 if position >= 0 else 0
        return (slot * (KEPT + 1) + place) * _NBYTES


class Comparison:
    """The first difference between ranks, and who waits for whom, in words; "" for none.

    All ranks of a process group must issue its collectives in the same order. The order between
    groups may differ, as it does between pipeline stages. So collective 57 of a group must be the
    same on all its ranks. A pair of sender and receiver has a group of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._slots: dict[str, dict[int, int]] = defaultdict(dict)
        reached: dict[str, dict[int, int]] = defaultdict(dict)
        self._last: dict[int, Note] = {}
        for rank in sorted(int(path.stem.removeprefix("rank_")) for path in folder.glob("rank_*")):
            notes = Notes(folder / f"rank_{rank}.notes")
            for slot, note in enumerate(notes.newest()):
                self._slots[note.group][rank] = slot
                reached[note.group][rank] = note.position
                self._last[rank] = max(self._last.get(rank, note), note, key=lambda x: x.index)
            notes.close()
        differences = [
            x for group, ranks in reached.items() for x in self._difference(group, ranks)
        ]
        waits = [x for group, ranks in reached.items() for x in self._wait(group, ranks)]
        self.difference = min(differences, default=(0, ""))[1]
        self.waiting = "\n".join(text for _, text in sorted(waits)[:_SHOWN])

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.difference, self.waiting)))

    def _at(self, group: str, position: int, ranks: Sequence[int]) -> dict[int, Note]:
        """The notes of a position, of the ranks that still have it."""
        found = {}
        for rank in ranks:
            notes = Notes(self._folder / f"rank_{rank}.notes")
            if note := notes.read(self._slots[group][rank], position):
                found[rank] = note
            notes.close()
        return found

    def _difference(self, group: str, reached: dict[int, int]) -> Iterator[tuple[int, str]]:
        def differ(position: int) -> bool:
            return len({x.order for x in self._at(group, position, list(reached)).values()}) > 1

        oldest, high = max(0, max(reached.values()) - KEPT + 1), min(reached.values())
        if high < oldest or not differ(high):
            return
        low = oldest
        while low < high:  # an order is of all that came before: once other, always other
            middle = (low + high) // 2
            low, high = (low, middle) if differ(middle) else (middle + 1, high)
        notes = self._at(group, low, list(reached))
        alike: dict[tuple[int, str], list[int]] = defaultdict(list)
        for rank, note in notes.items():
            alike[note.order, note.words].append(rank)
        earlier = " or earlier" if 0 < low == oldest else ""
        lines = [f"the ranks differ at collective {low} of group {group}{earlier}:"]
        lines += [f"  {ranks_in_words(ranks)}: {words}" for (_, words), ranks in alike.items()]
        yield min(note.index for note in notes.values()), "\n".join(lines[: _SHOWN + 1])

    def _wait(self, group: str, reached: dict[int, int]) -> Iterator[tuple[int, str]]:
        low = min(reached.values())
        waits = [rank for rank in reached if reached[rank] > low]
        late = [rank for rank in reached if reached[rank] == low]
        for note in self._at(group, low + 1, waits[:1]).values():
            verb = "wait" if len(waits) > 1 else "waits"
            place = f"collective {low + 1} of group {group}: {note.words}"
            text = f"{ranks_in_words(waits)} {verb} in {place}\n  {ranks_in_words(late)} "
            it, has = ("it", "has") if len(late) == 1 else (f"rank {late[0]}", "have")
            last = self._last[late[0]]
            where = f"collective {last.position} of group {last.group}: {last.words}"
            text += f"{has} not issued it; the last that {it} issued is {where}"
            yield note.index, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a folder of notes: collectives/<run>")
    print(Comparison(parser.parse_args().folder))


if __name__ == "__main__":
    main()
