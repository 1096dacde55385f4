"""Ours against stock TorchTitan: equal losses, norms, parameters and optimizer states."""

from pathlib import Path

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
    row = Run(world=1, parallelize="submodule")
    other = train_row(Run(world=1, parallelize="submodule", global_batch=2), tmp_path)
    assert len(differences(other, references.get(row))) == 3
