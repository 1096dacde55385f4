"""Expert parallelism computes what no expert parallelism does, whatever the router sends where."""

import math
from pathlib import Path

import numpy as np
import pytest

from tests.training import Result, Run, train


def _run(ep: int, **kwargs) -> Run:
    return Run(
        world=4,
        ep=ep,
        parallelize="submodule",
        param_dtype="float32",
        steps=1,
        keep_gradients=True,
        **kwargs,
    )


@pytest.fixture(scope="module")
def without_ep(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(_run(ep=1), tmp_path_factory.mktemp("ep1"))


@pytest.mark.parametrize("ep", [2, 4])
def test_gradients_equal_those_without_ep(ep: int, without_ep: Result, tmp_path: Path):
    result = train(_run(ep), tmp_path)
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


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("ac", ["selective", "none"])
def test_ranks_without_tokens_complete_and_agree(ep: int, ac, tmp_path: Path):
    """Every token goes to the first 3 of 8 experts: with EP 4 two ranks get no token at all."""
    routed = train(_run(ep, routing="one_expert", ac=ac), tmp_path / "ep")
    expected = train(_run(1, routing="one_expert", ac=ac), tmp_path / "no_ep")
    assert math.isclose(routed.losses[0], expected.losses[0], rel_tol=1e-6)
    assert len({rank.grad_norms[0] for rank in routed.ranks}) == 1
    assert math.isclose(routed.grad_norms[0], expected.grad_norms[0], rel_tol=1e-5)

    experts = {k: g for k, g in routed.ranks[0].gradients.items() if "inner_experts" in k}
    for name, gradient_EFD in experts.items():
        assert np.any(gradient_EFD[:3]), name
        assert not np.any(gradient_EFD[3:]), name


def _relative_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
