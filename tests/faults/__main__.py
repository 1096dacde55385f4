"""``python -m tests.faults FOLDER``: every fault trial that takes minutes, one line each."""

import argparse
import functools
import shutil
import sys
import time
from collections.abc import Callable
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
    passed = []
    if trials:
        torchrun.reference(folder / "reference")
    for trial in trials:
        own = folder / trial.__name__
        shutil.rmtree(own, ignore_errors=True)
        passed.append(_run(trial.__name__, functools.partial(trial, own)))
    if arguments.only in "kill_saves" and arguments.kills > 0:
        asynchronous = arguments.kills // 5
        for mode, count in (("disabled", arguments.kills - asynchronous), ("async", asynchronous)):
            name = f"kill_saves_{mode}"
            kills = functools.partial(kill_saves.trials, count, folder / name, mode)
            passed.append(_run(name, kills))
    return 0 if all(passed) else 1


def _run(name: str, trial: Callable[[], str]) -> bool:
    begun = time.monotonic()
    try:
        seen, passed = trial(), True
    except AssertionError as error:
        seen, passed = f"FAILED: {error}", False
    print(f"{name} ({time.monotonic() - begun:.0f} s): {seen}", flush=True)
    return passed


if __name__ == "__main__":
    sys.exit(main())
