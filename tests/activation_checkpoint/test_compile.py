"""torch.compile with submodule units. That whole blocks equal stock's is in the matrix."""

from dataclasses import replace

import pytest

from tests.helpers.training import Run, Runs

pytestmark = pytest.mark.slow

COMPILED = Run(world=2, ep=2, ac="none", compiled=True, steps=4)


def test_selective_checkpointing_stays_selective_in_compiled_submodules(runs: Runs):
    """What is saved is not computed again, and the tokens of the MoE layer are sent once.

    With the checkpoint around compiled modules nearly every operation would run again.
    """
    run = replace(
        COMPILED, parallelize="submodule", ac="selective", layers=2, seq_len=32, profiled_step=4
    )
    result, eager = runs.get(run), runs.get(replace(run, compiled=False))
    for mine, its in zip(result.ranks, eager.ranks, strict=True):
        # Attention, dense feed-forward, norm, router, experts, scores, shared experts: once each.
        assert mine.graphs == 7
        assert mine.operations["_c10d_functional::all_to_all_single"] == 5
        assert mine.operations["aten::topk"] == 1
        assert mine.operations["aten::mm"] < its.operations["aten::mm"]
    assert result.losses == pytest.approx(eager.losses, rel=1e-3)
