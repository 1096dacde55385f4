"""Two halves of a batch take turns at the exchanges of tokens: the same sums, the same FSDP."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.training import Run, Runs, observed

PLAIN = observed(Run(world=2, ep=2, global_batch=8, layers=3))


@pytest.mark.parametrize("wrap", ["block", "submodule", "experts"])
def test_units_gather_and_reduce_once(wrap: str, runs: Runs):
    """Weight gradients are sums of two halves, so losses differ in their last digits."""
    plain = runs.get(replace(PLAIN, parallelize=wrap))
    halves = runs.get(replace(PLAIN, parallelize=wrap, overlap_exchanges="halves"))
    assert halves.losses[0] == plain.losses[0]
    assert halves.losses == pytest.approx(plain.losses, rel=1e-4)
    assert halves.grad_norms == pytest.approx(plain.grad_norms, rel=1e-3)
    for mine, its in zip(halves.ranks, plain.ranks, strict=True):
        ours, stock = (Counter(e.kind for e in rank.collectives) for rank in (mine, its))
        assert ours["all_to_all"] == 2 * stock["all_to_all"] > 0
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            assert ours[kind] == stock[kind] > 0
