"""``make matrix``: every row against its reference, with a progress bar and a verdict a row.

Refused layouts come last: they must be refused, in the words that ``refused.py`` has for them.
``python -m tests.matrix.runner [-k TEXT]`` runs the rows whose name contains TEXT.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from tests.matrix.check import References, differences, train_row, wrong_refusals
from tests.matrix.refused import REFUSALS, Refusal
from tests.matrix.rows import ROWS
from tests.training import Run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("-k", dest="text", default="", help="only rows whose name contains it")
    text = parser.parse_args().text
    # Rows that share a reference come together, so that a bad reference shows early.
    rows = sorted((row for row in ROWS if text in str(row)), key=str)
    refusals = [refusal for refusal in REFUSALS if text in str(refusal)]
    if not rows and not refusals:
        names = map(str, [*ROWS, *REFUSALS])
        print(f"no row's name contains {text!r}; there are:", *names, sep="\n  ")
        return 2

    folder = Path(tempfile.mkdtemp(prefix="titan_ext_matrix_"))
    references = References(folder)
    failures: dict[str, str] = {}
    start = time.monotonic()
    with tqdm([*rows, *refusals], unit="row") as progress:
        for row in progress:
            progress.set_description(str(row))
            error = _error(row, references, folder)
            if error:
                failures[str(row)] = error
                progress.write(f"FAILED {row}\n  {error}")
    if failures:
        print(f"logs: {folder}")
    else:
        shutil.rmtree(folder)
    print(f"{time.monotonic() - start:.0f} s, every other row equals its reference bit for bit")
    print(f"{len(rows) + len(refusals) - len(failures)} as expected, {len(failures)} not")
    return 1 if failures else 0


def _error(row: Run | Refusal, references: References, folder: Path) -> str:
    if isinstance(row, Refusal):
        return "\n  ".join(wrong_refusals(row, folder))
    try:
        return "\n  ".join(differences(train_row(row, folder), references.get(row)))
    except AssertionError as error:  # a rank failed or hung
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
