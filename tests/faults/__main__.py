"""``python -m tests.faults FOLDER``: every fault trial that takes minutes, one line each."""

import argparse
import shutil
import sys
import time
from pathlib import Path

from tests.faults import kill_saves, torchrun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50, help="kill -9 trials during saves")
    parser.add_argument("--only", default="", help="the trials whose name contains this")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    trials = [t for t in torchrun.TRIALS if arguments.only in t.__name__]
    failed = 0
    if trials:
        torchrun.reference(folder / "reference")
    for trial in trials:
        shutil.rmtree(folder / trial.__name__, ignore_errors=True)
        failed += not _run(trial.__name__, lambda: trial(folder / trial.__name__))  # noqa: B023
    if arguments.only in "kill_saves":
        asynchronous = arguments.kills // 5
        for mode, count in (
            ("disabled", arguments.kills - asynchronous),
            ("async", asynchronous),
        ):
            name = f"kill_saves_{mode}"
            failed += not _run(name, lambda: kill_saves.trials(count, folder / name, mode))  # noqa: B023
    return min(failed, 1)


def _run(name: str, trial) -> bool:
    begun = time.monotonic()
    try:
        seen, passed = trial(), True
    except AssertionError as error:
        seen, passed = f"FAILED: {error}", False
    print(f"{name} ({time.monotonic() - begun:.0f} s): {seen}", flush=True)
    return passed


if __name__ == "__main__":
    sys.exit(main())
