"""Collectives of one step, by unit: the numbers of docs/fsdp_units.md."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.helpers.collectives import Collective, count
from tests.helpers.training import Run, Runs, observed
from tests.matrix.exact import EXPERTS_TUNED

# One dense block and two MoE blocks. Dense groups gather over all ranks; experts over efsdp, which
# has world / EP ranks: one rank gathers nothing. ChunkedLoss runs norm and lm_head apart. Stock
# gathers the pair three times and reduces it twice; we gather the norm twice and the head once.
_DENSE_BLOCKS, _MOE_BLOCKS = 1, 2
_BLOCKS = _DENSE_BLOCKS + _MOE_BLOCKS
_HEAD_GATHERS, _HEAD_REDUCES = 3, 2


def _expected(wrap: str, world: int, ep: int, recompute_exchanges: int) -> dict[str, int]:
    groups = _BLOCKS * (2 if wrap == "submodule" else 1)
    if ep > 1 and world // ep > 1:
        groups += _MOE_BLOCKS
    exchanges = 3 + 2 + recompute_exchanges if ep > 1 else 0  # counts, dispatch, combine; 2 back
    return {
        # The embedding once: its backward does not read it.
        "all_gather": 1 + (wrap == "stock") + 2 * groups + _HEAD_GATHERS,
        "reduce_scatter": 1 + groups + _HEAD_REDUCES,
        "all_to_all": _MOE_BLOCKS * exchanges,
    }


def _slow(run: Run, recompute_exchanges: int):
    return pytest.param(run, recompute_exchanges, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("run", "recompute_exchanges"),
    [
        (Run(world=2, ep=1, parallelize="block"), 0),
        (Run(world=2, ep=2, parallelize="submodule", save_all_to_all="always"), 0),
        # "auto" on one node does as stock.
        (Run(world=2, ep=2, parallelize="submodule"), 3),
        _slow(Run(world=4, ep=2, parallelize="block"), 3),
        (Run(world=4, ep=2, parallelize="submodule", save_all_to_all="always"), 0),
        (EXPERTS_TUNED, 3),
        _slow(Run(world=4, ep=2, parallelize="experts"), 3),
        _slow(Run(world=4, ep=2, parallelize="submodule", backend="partial_dtensor"), 0),
        _slow(Run(world=4, ep=2, parallelize="submodule", ac="none"), 0),
        # Full checkpointing exchanges the tokens again; no policy gathers parameters again.
        _slow(Run(world=4, ep=2, parallelize="submodule", ac="full"), 3),
        # Stock under spmd_types does so with selective checkpointing too.
        (Run(world=2, ep=2, parallelize="stock"), 3),
    ],
    ids=str,
)
def test_collectives_per_step(run: Run, recompute_exchanges: int, runs: Runs):
    result = runs.get(observed(run))
    expected = _expected(run.parallelize, run.world, run.ep, recompute_exchanges)
    for rank in result.ranks:
        counted = count(rank.collectives)
        assert {kind: counted[kind] for kind in expected} == expected


@pytest.fixture
def events(runs: Runs) -> list[Collective]:
    """Of a rank, in the order in which it issues them."""
    run = Run(world=4, ep=2, parallelize="submodule", save_all_to_all="always")
    return runs.get(observed(run)).ranks[0].collectives


def test_collectives_per_unit(events: list[Collective]):
    gathers = Counter(e.main_module for e in events if e.kind == "all_gather")
    assert gathers == {
        "tok_embeddings": 1,
        **{f"layers.{i}.attention": 2 for i in range(3)},
        "layers.0.feed_forward": 2,
        "layers.1.moe": 4,
        "layers.2.moe": 4,
        "norm": 2,
        "lm_head": 1,
    }
    recomputed = [e for e in events if e.kind == "all_to_all" and e.in_backward]
    assert len(recomputed) == 2 * _MOE_BLOCKS  # only the two that carry gradients


def test_a_head_without_its_norm_is_gathered_once(runs: Runs):
    """And not three times: for the norm, for the chunked loss, and in backward.

    Not where units of blocks stay gathered: with its norm it is gathered three times.
    """
    run = Run(world=2, ep=2, parallelize="submodule")
    kept = replace(run, reshard_groups=(("attention", "never"),))
    alone, together = runs.get(observed(run)), runs.get(observed(kept))
    assert alone.losses == together.losses
    assert [r.state_hash for r in alone.ranks] == [r.state_hash for r in together.ranks]

    def gathers(events: list[Collective]) -> list[str]:
        found = [e.main_module for e in events if e.kind == "all_gather"]
        return [module for module in found if module in ("norm", "lm_head")]

    for mine, its in zip(alone.ranks, together.ranks, strict=True):
        assert sorted(gathers(mine.collectives)) == ["lm_head", "norm", "norm"]
        assert len(gathers(its.collectives)) == 3, "of both in one"


def test_the_next_unit_is_gathered_before_this_one_exchanges_tokens(events: list[Collective]):
    """The exchange stops the host, so prefetch comes first."""

    def gathered(unit: str, in_backward: bool) -> int:
        return next(
            i
            for i, e in enumerate(events)
            if e.kind == "all_gather" and e.in_backward is in_backward and e.main_module == unit
        )

    forward = [i for i, e in enumerate(events) if e.kind == "all_to_all" and not e.in_backward]
    backward = [i for i, e in enumerate(events) if e.kind == "all_to_all" and e.in_backward]
    first_of_layer = {"1": forward[0], "2": forward[3]}
    assert gathered("layers.1.moe", False) < gathered("layers.2.attention", False)
    assert gathered("layers.2.attention", False) < first_of_layer["1"]
    assert first_of_layer["1"] < gathered("layers.2.moe", False), "two units ahead, not one"
    assert gathered("lm_head", False) < first_of_layer["2"]
    assert gathered("layers.2.attention", True) < backward[0]
    assert backward[0] < gathered("layers.1.moe", True) < gathered("layers.1.attention", True)
    assert gathered("layers.1.attention", True) < backward[2]
