"""Ours against stock TorchTitan: equal losses, norms, parameters and optimizer states."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.matrix.check import References, differences, train_row
from tests.matrix.rows import FAST
from tests.training import Run


@pytest.mark.parametrize("row", FAST, ids=str)
def test_equals_stock(row: Run, references: References, tmp_path: Path):
    ours = train_row(row, tmp_path)
    assert len(ours.losses) == row.steps
    assert differences(ours, references.get(row)) == []


def test_hash_sees_a_change_of_one_bit(references: References, tmp_path: Path):
    """The comparison above can fail: another batch size is another run."""
    row = FAST[0]
    other = train_row(replace(row, global_batch=2), tmp_path)
    assert len(differences(other, references.get(row))) == 3


def test_gloo_own_order_of_sums_shows_in_the_last_bits_only(tmp_path: Path):
    """Without ``exact_sums``, from 3 ranks on: at most 2 ulp of a gradient's largest value."""
    run = Run(model="qwen3", world=4, steps=1, keep_gradients=True)
    stock = train_row(run, tmp_path)
    ours = train_row(replace(run, parallelize="submodule"), tmp_path)
    assert ours.losses == stock.losses
    assert ours.grad_norms == pytest.approx(stock.grad_norms, rel=1e-6)
    ulp = np.finfo(np.float32).eps
    for name, expected in stock.ranks[0].gradients.items():
        error = np.abs(ours.ranks[0].gradients[name] - expected).max()
        assert error <= 2 * ulp * np.abs(expected).max(), name
