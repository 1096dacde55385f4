"""Ours against stock TorchTitan: equal losses, norms, parameters and optimizer states.

``make matrix`` compares every layout; a few are here.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from tests.helpers.training import Run, Runs, observed, state_hash
from tests.matrix.exact import FAST, differences, reference_of
from titan_ext.activation_checkpoint import FP8AC

_EP2 = observed(Run(world=2, ep=2))


def _short(row: Run) -> Run:
    """With two layers where no other test has use for the run with three."""
    return replace(observed(row), layers=2 if row.tp > 1 or row.model == "qwen3" else row.layers)


_SLOW = [row for row in FAST if row.world == 4]


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (row in _SLOW)) for row in FAST], ids=str
)
def test_equals_stock(row: Run, runs: Runs):
    ours, stock = runs.get(_short(row)), runs.get(reference_of(_short(row)))
    assert len(ours.losses) == 2
    assert differences(ours, stock) == []


def test_a_gather_inside_a_block_is_no_operation_of_its_checkpoint(runs: Runs):
    """A float8 gather concatenates; units of half a block gather where the forward is watched.

    Torch knows an operation by its place among those of its kind. A gather that counts gives
    the recompute another operation's output.
    """
    saves_cat = FP8AC.Config(preset="stock", op_policies={"attention:aten.cat": "save"})
    run = replace(_EP2, layers=2, ac=saves_cat, float8_all_gather="blocks", exchange_rows="rank")
    halves, whole = (runs.get(replace(run, parallelize=x)) for x in ("submodule", "block"))
    assert differences(halves, whole) == []


@pytest.mark.parametrize("wrap", ["block", pytest.param("experts", marks=pytest.mark.slow)])
def test_replicated_norms_inside_of_a_checkpointed_block(wrap: str, runs: Runs):
    """FSDP opens a profiler range for the first group of a recompute, which torch counts."""
    ours = runs.get(replace(_EP2, parallelize=wrap, replicate=("norms",)))
    stock = runs.get(reference_of(_EP2))
    assert (ours.losses, ours.grad_norms) == (stock.losses, stock.grad_norms)


def test_the_hash_sees_a_change_of_one_bit():
    """Of a parameter, a buffer or an optimizer's state: the comparison above can fail."""
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    trainer = SimpleNamespace(
        model_parts=[model], optimizers=SimpleNamespace(optimizers=[optimizer])
    )
    hashes = [state_hash(trainer)]
    for tensor in (model.weight.data, model.running_mean, optimizer.state[model.bias]["exp_avg"]):
        assert isinstance(tensor, torch.Tensor)
        tensor.view(torch.int32)[1] ^= 1
        hashes.append(state_hash(trainer))
    assert len(set(hashes)) == 4
