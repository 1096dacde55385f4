"""Faults to plant, one at a time, and the tests that should see each (``-m tests.mutants``)."""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """A piece of one file of titan_ext, what stands there instead, and tests below ``tests/``."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def folder(self) -> str:
        return self.file.split("/")[1]


def read_faults() -> list[Fault]:
    """Those of faults.txt, as it says."""
    text = (Path(__file__).parent / "faults.txt").read_text()
    faults = []
    for part in text.split("\n\n")[1:]:
        head, *lines = part.strip("\n").split("\n")
        name, file, *tests = head.split()
        old, new = ("\n".join(x[1:] for x in lines if x[0] == sign) for sign in "-+")
        faults.append(Fault(name, f"titan_ext/{file}", old, new, tuple(tests)))
    return faults
