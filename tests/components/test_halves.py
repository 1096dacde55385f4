"""Two halves of a batch take turns at the exchanges of tokens: the same sums, the same FSDP."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.cluster import run_ranks
from tests.helpers.collectives import Collective, count
from tests.helpers.training import Run, Runs, make_config, observed
from titan_ext.run.trainer import Trainer

PLAIN = observed(Run(world=2, ep=2, global_batch=8, layers=3))
_COUNTS = 1024
"""Bytes that the exchange of token counts stays below, and that of tokens does not."""


def _halves(run: Run) -> Run:
    return replace(run, overlap_exchanges="halves")


_PLANNED = Run(world=64, ep=8, global_batch=128, layers=2, narrow=True, parallelize="submodule")


def _assert_travel(halves: list[Collective], whole: list[Collective]) -> None:
    """In forward, in the recompute and in backward; counted by what ran between start and wait."""

    def alone(collectives: list[Collective]) -> Counter[tuple[bool, bool]]:
        tokens = [e for e in collectives if e.kind == "all_to_all" and e.nbytes > _COUNTS]
        return Counter((e.in_backward, not e.meanwhile) for e in tokens)

    ours, its = alone(halves), alone(whole)
    assert ours.keys() == {(False, False), (True, False)}
    assert its[False, True] > 0
    assert its[True, True] > 0


def test_tokens_travel_and_units_gather_once(runs: Runs):
    halves, whole = (step.collectives for step in runs.planned(_halves(_PLANNED), _PLANNED))
    _assert_travel(halves, whole)
    assert count(halves)["all_to_all"] == 2 * count(whole)["all_to_all"]
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        assert count(halves)[kind] == count(whole)[kind] > 0


@pytest.mark.slow
def test_float8_stores_what_an_exchange_brings_when_it_has_come(runs: Runs):
    run = replace(PLAIN, ac="fp8", save_all_to_all="always", parallelize="submodule")
    halves, whole = (runs.get(each).ranks[0].collectives for each in (_halves(run), run))
    _assert_travel(halves, whole)


def _outputs(run: Run, folder: Path) -> tuple[bool, bool]:
    trainer = make_config(run, folder).build()
    assert isinstance(trainer, Trainer)
    (model,) = trainer.model_parts
    model.eval()
    tokens_BL = torch.arange(2 * run.seq_len).view(2, -1) % 97
    positions_BL = torch.arange(run.seq_len).expand(2, -1)

    def run_model(rows: slice) -> torch.Tensor:
        with torch.no_grad():
            return model(tokens_BL[rows], positions=positions_BL[rows])

    whole, *alone = map(run_model, (slice(0, 2), slice(0, 1), slice(1, 2)))
    trainer.close()
    return torch.equal(whole, torch.cat(alone)), torch.equal(*alone)


def test_halves_are_what_each_is_alone(tmp_path: Path):
    """Bit for bit: a batch of one sequence runs whole."""
    run = _halves(replace(PLAIN, parallelize="submodule", backend="partial_dtensor"))
    assert run_ranks(_outputs, 2, run, tmp_path, log_folder=tmp_path) == [(True, False)] * 2


def test_a_stage_without_experts_takes_part(runs: Runs):
    """Layer 0 is dense, and new process groups need every rank: it hung."""
    run = replace(PLAIN, world=4, pp=2, microbatch_size=2, layers=2, steps=1, traced_step=0)
    result = runs.get(_halves(replace(run, parallelize="submodule")))
    assert np.isfinite(result.losses).all()


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(replace(PLAIN, global_batch=2), marks=pytest.mark.slow),
        replace(PLAIN, world=1, ep=1, layers=2, steps=2),
    ],
    ids=str,
)
def test_there_is_nothing_to_overlap(run: Run, runs: Runs):
    run = replace(run, parallelize="submodule", traced_step=0)
    assert runs.get(_halves(run)).losses == runs.get(run).losses
