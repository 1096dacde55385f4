"""Hold one row against its reference."""

from pathlib import Path

from tests.cluster import PATIENCE_S
from tests.matrix.rows import reference_of
from tests.training import Result, Run, train

__all__ = ["References", "differences"]


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
