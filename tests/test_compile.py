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


def test_selective_checkpointing_stays_selective_in_compiled_submodules(tmp_path: Path):
    """What is saved is not computed again, and the tokens of the MoE layer are sent once.

    With the checkpoint around compiled modules nearly every operation would run again.
    """
    run = replace(
        COMPILED, parallelize="submodule", ac="selective", layers=2, seq_len=32, profiled_step=4
    )
    result = train(run, tmp_path)
    eager = train(replace(run, compiled=False), tmp_path / "eager")
    for mine, its in zip(result.ranks, eager.ranks, strict=True):
        assert mine.graphs == 3, "attention, MoE, dense feed-forward; never compiled again"
        assert mine.operations["_c10d_functional::all_to_all_single"] == 5
        assert mine.operations["aten::topk"] == 1
        assert mine.operations["aten::mm"] < its.operations["aten::mm"]
    assert result.losses == pytest.approx(eager.losses, rel=1e-3)
