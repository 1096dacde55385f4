"""Hold one row against its reference, or one refusal against its words."""

import os
import re
import unittest.mock
from pathlib import Path

from tests.helpers.cluster import RankError
from tests.helpers.training import Result, Run, Runs, make_config
from tests.matrix.refused import Refusal
from tests.matrix.rows import reference_of


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


def config_error(run: Run, folder: Path) -> str:
    """The error with which the config of ``run`` is refused where it is made; "" if it is not."""
    with unittest.mock.patch.dict(os.environ, WORLD_SIZE=str(run.world)):
        try:
            make_config(run, folder / str(run))
        except (ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def error_of(run: Run, folder: Path) -> str:
    """The error that ``run`` ends with; "" if it trains. No rank starts for a refused config."""
    if error := config_error(run, folder):
        return error
    try:
        Runs(folder).get(run)
    except RankError as error:
        return str(error)
    return ""


def wrong_refusals(refusal: Refusal, folder: Path) -> list[str]:
    """Where ``refusal`` no longer holds, in words; nothing if it does, under stock too."""
    found = _unlike("ours", error_of(refusal.run, folder), refusal.message)
    stock = reference_of(refusal.run)
    if stock.parallelize == "stock":  # which has no float8 activations
        found += _unlike("stock", error_of(stock, folder), refusal.stock_message)
    return found


def _unlike(who: str, error: str, expected: str | None) -> list[str]:
    if expected is None:
        return [f"{who} should train and does not: {error}"] if error else []
    if not error:
        return [f"{who} trains and should end with {expected!r}"]
    return [] if re.search(expected, error) else [f"{who} should end with {expected!r}: {error}"]
