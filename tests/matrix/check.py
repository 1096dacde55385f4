"""Hold one row against its reference, or a refused layout against its messages."""

import re
from pathlib import Path

from tests.cluster import PATIENCE_S, RankError
from tests.matrix.refused import Refusal
from tests.matrix.rows import reference_of
from tests.training import Result, Run, train

__all__ = ["References", "differences", "train_row", "wrong_refusals"]


class References:
    """Stock runs, each trained once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results: dict[Run, Result] = {}

    def get(self, row: Run) -> Result:
        reference = reference_of(row)
        if reference not in self._results:
            self._results[reference] = train_row(reference, self._folder)
        return self._results[reference]


def train_row(run: Run, folder: Path) -> Result:
    """Train ``run`` in a folder of its own, with time for a compiler."""
    return train(run, folder / str(run), timeout_s=(2 if run.compiled else 1) * PATIENCE_S)


def differences(ours: Result, stock: Result) -> list[str]:
    """What differs, in words; nothing if the runs are equal bit for bit."""
    found = []
    for name in ("losses", "grad_norms"):
        a, b = getattr(ours, name), getattr(stock, name)
        if a != b:
            step = next((i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), None)  # noqa: B905
            found.append(f"{name} differ from step {step}: {a} and {b}")
    for rank, (a, b) in enumerate(zip(ours.ranks, stock.ranks, strict=True)):
        if a.state_hash != b.state_hash:
            found.append(f"rank {rank}: parameters or optimizer states differ")
    return found


def wrong_refusals(refusal: Refusal, folder: Path) -> list[str]:
    """In which way ours or stock Titan does not do what ``refusal`` says; nothing if both do."""
    expected: list[tuple[Run, str | None]] = [(refusal.run, refusal.message)]
    stock = reference_of(refusal.run)
    if stock.parallelize == "stock":  # which has no float8 activations
        expected.append((stock, refusal.stock_message))
    found = []
    for run, message in expected:
        error = _error_of(run, folder)
        if message is None and error:
            found.append(f"{run} should train: {error}")
        elif message is not None and not re.search(message, error):
            found.append(f"{run} should fail with {message!r}: {error or 'it trains'}")
    return found


def _error_of(run: Run, folder: Path) -> str:
    try:
        train_row(run, folder)
    except RankError as error:
        return str(error)
    return ""
