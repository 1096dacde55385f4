"""Ours against stock TorchTitan: equal losses, norms, parameters and optimizer states.

``make matrix`` compares every layout; a few are here.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.training import Run, Runs, observed
from tests.matrix.exact import FAST, differences, reference_of
from titan_ext.activation_checkpoint import FP8AC

_LAYERS = {"qwen3_moe": 1, "qwen3": 2, "deepseek_v3_mtp": 2}
"""Of models that have nothing else in a third layer."""


def _short(row: Run) -> Run:
    """With two layers where no other test has use for the run with three."""
    own = row.world == 1 or row.tp > 1
    return replace(observed(row), layers=2 if own else _LAYERS.get(row.model, row.layers))


_SLOW = [row for row in FAST if row.world == 4]


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (row in _SLOW)) for row in FAST], ids=str
)
def test_equals_stock(row: Run, runs: Runs):
    ours, stock = runs.get(_short(row)), runs.get(reference_of(_short(row)))
    assert len(ours.losses) == _short(row).steps
    assert differences(ours, stock) == []


def test_a_gather_inside_a_block_is_no_operation_of_its_checkpoint(runs: Runs):
    """A float8 gather concatenates; units of half a block gather where the forward is watched.

    Torch knows an operation by its place among those of its kind. A gather that counts gives
    the recompute another operation's output.
    """
    saves_cat = FP8AC.Config(preset="stock", op_policies={"attention:aten.cat": "save"})
    run = Run(
        world=2,
        ep=2,
        layers=2,
        steps=2,
        ac=saves_cat,
        float8_all_gather="blocks",
        exchange_rows="rank",
    )
    run = observed(run)
    halves, whole = (runs.get(replace(run, parallelize=x)) for x in ("submodule", "block"))
    assert differences(halves, whole) == []


@pytest.mark.parametrize("wrap", ["block", pytest.param("experts", marks=pytest.mark.slow)])
def test_replicated_norms_inside_of_a_checkpointed_block(wrap: str, runs: Runs):
    """FSDP opens a profiler range for the first group of a recompute, which torch counts."""
    run = observed(Run(world=2, ep=2, layers=2, steps=2, ac="selective"))
    ours = runs.get(replace(run, parallelize=wrap, replicate=("norms",)))
    stock = runs.get(reference_of(run))
    assert (ours.losses, ours.grad_norms) == (stock.losses, stock.grad_norms)


def test_hash_sees_a_change_of_one_bit(runs: Runs):
    """The comparison above can fail: another batch size is another run."""
    row = _short(FAST[0])
    other = runs.get(replace(row, global_batch=2))
    assert len(differences(other, runs.get(reference_of(row)))) == 3


@pytest.mark.slow
def test_gloo_own_order_of_sums_shows_in_the_last_bits_only(runs: Runs):
    """Without ``exact_sums``, from 3 ranks on: at most 2 ulp of a gradient's largest value."""
    run = Run(model="qwen3", world=4, layers=2, steps=1, keep_gradients=True)
    stock, ours = runs.get(run), runs.get(replace(run, parallelize="submodule"))
    assert ours.losses == stock.losses
    assert ours.grad_norms == pytest.approx(stock.grad_norms, rel=1e-6)
    ulp = np.finfo(np.float32).eps
    for name, expected in stock.ranks[0].gradients.items():
        error = np.abs(ours.ranks[0].gradients[name] - expected).max()
        assert error <= 2 * ulp * np.abs(expected).max(), name
