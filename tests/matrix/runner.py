"""``make matrix``: every row, dry run and refusal, with a progress bar and a verdict each.

``python -m tests.matrix.runner [-k TEXT]`` takes those whose name contains TEXT, ``--part 2/4`` the
second quarter of them. Two run at a time: ranks wait for each other, and a machine with 2 cores
would wait with them.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from tests.helpers.training import Run, Runs
from tests.matrix.check import differences, wrong_refusals
from tests.matrix.dry import dry_differences
from tests.matrix.refused import REFUSALS
from tests.matrix.rows import DRY, ROWS, reference_of
from tests.matrix.table import counts

_Check = Callable[[], list[str]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("-k", dest="text", default="", help="only what has it in its name")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="such as 2/4")
    arguments = parser.parse_args()
    text = arguments.text
    number, parts = arguments.part
    folder = Path(tempfile.mkdtemp(prefix="titan_ext_matrix_"))
    everything = _checks(folder)
    names = [name for name in everything if text in name]
    size = -(-len(names) // parts)  # neighbours share references, so a part has neighbours
    checks = {name: everything[name] for name in names[(number - 1) * size : number * size]}
    if not names:
        print(f"no name contains {text!r}; there are:", *everything, sep="\n  ")
        return 2

    failures = 0
    start = time.monotonic()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = {pool.submit(_found, check): name for name, check in checks.items()}
        for done in (progress := tqdm(as_completed(running), total=len(running), unit="layout")):
            if found := done.result():
                failures += 1
                progress.write("\n  ".join([f"FAILED {running[done]}", *found]))
    if failures:
        print(f"logs: {folder}")
    else:
        shutil.rmtree(folder)
    print("all of them:", ", ".join(f"{n} {outcome}" for outcome, n in counts().items()))
    print(
        f"{time.monotonic() - start:.0f} s: {len(checks) - failures} of {len(checks)} are as "
        f"docs/support.md says, {failures} are not"
    )
    return 1 if failures else 0


def _part(text: str) -> tuple[int, int]:
    number, parts = map(int, text.split("/"))  # argparse says what a ValueError is of
    if not 1 <= number <= parts:
        raise argparse.ArgumentTypeError(f"it is {text}; expected K/N with K from 1 to N")
    return number, parts


def _checks(folder: Path) -> dict[str, _Check]:
    runs = Runs(folder)

    def trained(row: Run) -> list[str]:
        return differences(runs.get(row), runs.get(reference_of(row)))

    # Rows that share a reference come together, so that a bad reference shows early.
    checks: dict[str, _Check] = {}
    checks |= {str(row): lambda row=row: trained(row) for row in sorted(ROWS, key=str)}
    checks |= {f"dry {run}": lambda run=run: dry_differences(run, folder / "dry") for run in DRY}
    checks |= {
        f"refused {each}": lambda each=each: wrong_refusals(each, folder) for each in REFUSALS
    }
    return checks


def _found(check: _Check) -> list[str]:
    try:
        return check()
    except AssertionError as error:  # a rank failed or hung
        return [str(error)]


if __name__ == "__main__":
    sys.exit(main())
