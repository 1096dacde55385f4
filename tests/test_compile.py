"""torch.compile with both kinds of unit. Blocks compile as in stock Titan, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.matrix.check import References, differences, train_row
from tests.training import Run, train

COMPILED = Run(world=2, ep=2, ac="none", compiled=True, steps=4)


def test_compiled_blocks_equal_stock(references: References, tmp_path: Path):
    row = replace(COMPILED, parallelize="block")
    assert differences(train_row(row, tmp_path), references.get(row)) == []


def test_compiled_submodules_train_like_eager_ones(tmp_path: Path):
    """Fused kernels keep more bits between operations than eager ones do: close, not equal."""
    compiled = train_row(replace(COMPILED, parallelize="submodule"), tmp_path)
    eager = train(replace(COMPILED, parallelize="submodule", compiled=False), tmp_path / "eager")
    assert compiled.losses != eager.losses, "nothing was compiled"
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-3)
    assert compiled.grad_norms == pytest.approx(eager.grad_norms, rel=2e-2)
