"""``make matrix``: every row verified, every exact one beside stock TorchTitan, every refusal.

``python -m tests.matrix.runner FOLDER [-k TEXT]`` takes those whose name contains TEXT, ``--part
2/4`` each fourth of them. What verify said of a row lies in the folder.
"""

import argparse
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.helpers.training import Run, Runs
from tests.matrix.exact import RUNS, differences, reference_of
from tests.matrix.rows import REFUSED, WRONG_IN_STOCK, rows
from tests.verify.search import NOT_VERIFIED, RIGHT, WRONG, Job, verify


def checks(folder: Path) -> dict[str, Callable[[], str]]:
    """By name, what says "" if a row is as expected; else what is not, in words."""
    folder = folder.resolve()  # jobs run in it
    folder.mkdir(parents=True, exist_ok=True)
    runs = Runs(folder / "runs")

    def judged(name: str, job: Job) -> str:
        code, words = RIGHT, "RIGHT"
        for other, table in ((NOT_VERIFIED, REFUSED), (WRONG, WRONG_IN_STOCK)):
            code, words = (other, table[name]) if name in table else (code, words)
        found = verify(job, folder)
        (folder / f"{name}.txt").write_text(found.said)
        return "" if found.code == code and words in found.said else found.said or "nothing said"

    def trained(run: Run) -> str:
        try:
            return "\n".join(differences(runs.get(run), runs.get(reference_of(run))))
        except AssertionError as error:  # a rank failed or hung
            return str(error)

    one = functools.partial
    found = {name: one(judged, name, job) for name, job in rows().items()}
    return found | {f"exact: {run}": one(trained, run) for run in sorted(RUNS, key=str)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", dest="text", default="", help="only what has it in its name")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="such as 2/4")
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import titan_ext.verify.legs  # noqa: F401  once, for all forks

    number, parts = arguments.part
    chosen = {k: v for k, v in checks(arguments.folder).items() if arguments.text in k}
    chosen = dict(itertools.islice(chosen.items(), number - 1, None, parts))
    start, failed = time.monotonic(), 0
    for name, check in chosen.items():
        said = check()
        failed += bool(said)
        print(f"{'FAILED' if said else 'ok'}  {name}\n{said}".rstrip(), flush=True)
    print(f"{time.monotonic() - start:.0f} s: {len(chosen) - failed} of {len(chosen)} as expected")
    return 1 if failed or not chosen else 0


def _part(text: str) -> tuple[int, int]:
    number, parts = map(int, text.split("/"))  # argparse says what a ValueError is of
    if not 1 <= number <= parts:
        raise argparse.ArgumentTypeError(f"it is {text}; expected K/N with K from 1 to N")
    return number, parts


if __name__ == "__main__":
    sys.exit(main())
