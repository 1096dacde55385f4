"""Expert parallelism computes what no expert parallelism does, whatever the router sends where."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.training import Run, Runs, observed


def _run(ep: int, world: int = 4, **kwargs) -> Run:
    return Run(
        world=world,
        ep=ep,
        parallelize="submodule",
        param_dtype="float32",
        layers=2,
        steps=1,
        keep_gradients=True,
        **kwargs,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_gradients_equal_those_without_ep(world: int, ep: int, runs: Runs):
    result, without_ep = runs.get(_run(ep, world)), runs.get(_run(1, world))
    gradients, expected = result.ranks[0].gradients, without_ep.ranks[0].gradients
    assert gradients.keys() == expected.keys()
    assert any("inner_experts" in name for name in gradients)
    for name, gradient in gradients.items():
        # Experts compute in bf16 whatever their parameters are (GroupedExperts.forward).
        tolerance = 5e-3 if "inner_experts" in name else 1e-6
        assert _relative_error(gradient, expected[name]) <= tolerance, name

    assert math.isclose(result.grad_norms[0], without_ep.grad_norms[0], rel_tol=1e-6)
    norms = {rank.grad_norms[0] for rank in result.ranks}
    assert len(norms) == 1, f"the clip norm differs between ranks: {norms}"


@pytest.mark.slow
@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("ac", ["selective", "none"])
def test_ranks_without_tokens_complete_and_agree(ep: int, ac, runs: Runs):
    """Every token goes to the first 3 of 8 experts: with EP 4 two ranks get no token at all."""
    routed = runs.get(_run(ep, routing="one_expert", ac=ac))
    expected = runs.get(_run(1, routing="one_expert", ac=ac))
    assert math.isclose(routed.losses[0], expected.losses[0], rel_tol=1e-6)
    assert len({rank.grad_norms[0] for rank in routed.ranks}) == 1
    assert math.isclose(routed.grad_norms[0], expected.grad_norms[0], rel_tol=1e-5)

    experts = {k: g for k, g in routed.ranks[0].gradients.items() if "inner_experts" in k}
    for name, gradient_EFD in experts.items():
        assert np.any(gradient_EFD[:3]), name
        assert not np.any(gradient_EFD[3:]), name


def test_exchanges_tokens_under_spmd_type_checking(runs: Runs):
    def run(parallelize: str) -> Run:
        return Run(world=2, ep=2, parallelize=parallelize, typechecked=True, layers=2, steps=1)

    ours, stock = runs.get(run("submodule")), runs.get(run("stock"))
    assert ours.losses == stock.losses
    assert [r.state_hash for r in ours.ranks] == [r.state_hash for r in stock.ranks]


def _relative_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_nodes_of_unequal_size_exchange_as_one(runs: Runs):
    """The second pair of ranks lies on both nodes, the first on one: all save, or none."""
    run = observed(Run(world=4, ep=2, layers=2, steps=2))
    stock, ours = (
        runs.get(replace(run, parallelize=parallelize, nodes=nodes))
        for parallelize, nodes in (("stock", ()), ("auto", (3, 1)))
    )
    assert ours.losses == stock.losses
    assert ours.grad_norms == stock.grad_norms
    assert (
        len({Counter(c.kind for c in rank.collectives)["all_to_all"] for rank in ours.ranks}) == 1
    )
