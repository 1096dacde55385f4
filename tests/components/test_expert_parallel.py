"""Expert parallelism beside what decides it: SPMD type checking, and nodes of unequal size."""

from collections import Counter
from dataclasses import replace

from tests.helpers.training import Run, Runs, observed

_EP2 = observed(Run(world=2, ep=2))


def test_exchanges_tokens_under_spmd_type_checking(runs: Runs):
    ours = runs.get(replace(_EP2, parallelize="submodule", typechecked=True))
    stock = runs.get(_EP2)
    assert ours.losses == stock.losses
    assert [r.state_hash for r in ours.ranks] == [r.state_hash for r in stock.ranks]


def test_nodes_of_unequal_size_exchange_as_one(runs: Runs):
    """The second pair of ranks lies on both nodes, the first on one: all save, or none."""
    run = observed(Run(world=4, ep=2, layers=2, parallelize="auto", nodes=(3, 1)))
    kinds = [Counter(c.kind for c in rank.collectives) for rank in runs.get(run).ranks]
    assert len({kind["all_to_all"] for kind in kinds}) == 1
