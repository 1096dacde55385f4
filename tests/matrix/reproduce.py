"""``python -m tests.matrix.reproduce NAME``: how one refused layout ends under stock TorchTitan.

NAME is as in docs/support.md. Run it to see the error in full; ``--ours`` shows ours.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.matrix.check import error_of
from tests.matrix.refused import REFUSALS
from tests.matrix.rows import reference_of


def main() -> int:
    runs = {str(refusal): refusal.run for refusal in REFUSALS}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("name", choices=runs, metavar="NAME")
    parser.add_argument("--ours", action="store_true", help="under titan_ext instead")
    arguments = parser.parse_args()
    run = runs[arguments.name]
    with tempfile.TemporaryDirectory() as folder:
        error = error_of(run if arguments.ours else reference_of(run), Path(folder))
    print(error or "it trains")
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main())
