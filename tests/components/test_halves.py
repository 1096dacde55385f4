"""Two halves of a batch take turns at the exchanges of tokens: the same sums, the same FSDP."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask
from torchtitan.models.common.attention import (
    get_causal_mask_mod,
    get_efficient_causal_mask_mod_for_packed_document,
)

from tests.helpers.cluster import run_ranks
from tests.helpers.collectives import Collective, count
from tests.helpers.fp8_activations import debug_model
from tests.helpers.training import Run, Runs, degrees, make_config, observed
from titan_ext.base.thread_state import ThreadState
from titan_ext.components import validate
from titan_ext.components.overlap import (
    _BlockInHalves,
    _Masks,
    _SharedExperts,
    overlap_in_halves,
    runs_in_halves,
)
from titan_ext.components.validate import Validator
from titan_ext.run import trainer as run_trainer
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


class _Block(nn.Module):
    """Adds its positions to its tokens, and what ``finish`` makes of them is its output."""

    def __init__(self, finish: Callable[[torch.Tensor], Any] = lambda out: out) -> None:
        super().__init__()
        self.linear, self._finish = nn.Linear(4, 4), finish

    def forward(self, x_BLD: Any, masks: Any = None, positions: Any = None, gain: int = 1) -> Any:
        return self._finish(gain * self.linear(x_BLD + positions.unsqueeze(-1)))


def test_what_cannot_be_divided_or_joined_is_refused():
    x_BLD = torch.randn(3, 5, 4)
    for positions in (torch.arange(5.0).expand(3, -1), torch.arange(5.0).unsqueeze(0)):
        block = _Block()
        halves = _BlockInHalves("layers.0", block, _Masks(None))  # type: ignore[arg-type]
        assert torch.equal(halves(x_BLD, None, positions), block(x_BLD, None, positions))
    with pytest.raises(ValueError, match="is called with gain, which titan_ext cannot divide"):
        halves(x_BLD, None, positions, gain=2)
    pairs = _BlockInHalves("layers.0", _Block(lambda x: (x, 1)), _Masks(None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="returns a tuple, which titan_ext cannot join"):
        pairs(x_BLD, None, positions)


def test_masks_that_the_model_did_not_make_are_refused():
    """It makes those of half a batch, and a window of the caller's would be lost."""

    def window(width: int) -> Callable[..., Any]:
        return lambda b, h, q, k: q - k < width

    def masks(width: int, rows: int) -> Any:
        mask = create_block_mask(and_masks(window(width), window(9)), rows, None, 32, 32, "cpu")
        return {"window": mask}

    model: Any = SimpleNamespace(get_attention_masks=lambda positions: masks(5, len(positions)))
    halves, positions = (slice(0, 2), slice(2, 4)), torch.arange(32).expand(4, -1)
    for given in (masks(5, 4), masks(5, 4)):
        made = _Masks(model)(given, positions, halves)
        assert [mask["window"].shape[0] for mask in made] == [2, 2]
    of_model = _Masks(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="this call has masks of another kind"):
            of_model(masks(6, 4), positions, halves)


def test_masks_of_one_row_are_made_by_other_code():
    """Of two sequences each half has one (torchtitan/models/common/attention.py)."""

    def masks(positions: torch.Tensor) -> Any:
        documents = get_efficient_causal_mask_mod_for_packed_document(positions)
        made = and_masks(get_causal_mask_mod(), documents)
        return create_block_mask(made, len(positions), None, 32, 32, "cpu")

    positions = torch.arange(32).expand(2, -1)
    made = _Masks(SimpleNamespace(get_attention_masks=masks))(  # type: ignore[arg-type]
        masks(positions), positions, (slice(0, 1), slice(1, 2))
    )
    assert [mask.shape[0] for mask in made] == [1, 1]


def test_ranks_of_halves_get_as_many_sequences(monkeypatch: pytest.MonkeyPatch, one_rank: None):
    """One with a single sequence and one with two would wait for each other."""
    dims = degrees(dp_shard=1)
    taken: list[bool] = []
    config: Any = SimpleNamespace(
        dataloader=SimpleNamespace(infinite=False),
        training=SimpleNamespace(disable_cuda_graphs=True),
    )
    trainer: Any = Trainer.__new__(Trainer)
    vars(trainer).update(config=config, parallel_dims=dims, gradient_accumulation_steps=1)
    trainer.num_pipeline_parallel_microbatches = 1
    for module in (run_trainer, validate):
        monkeypatch.setattr(module, "together", lambda *_, alike: taken.append(alike) or ())
    validator: Any = Validator.__new__(Validator)
    loader = SimpleNamespace(infinite=False, build=lambda: [])
    vars(validator).update(parallel_dims=dims, _data=loader)
    for _ in range(2):
        Trainer.batch_generator(trainer, [])
        validator._batches()
        if not runs_in_halves(dims):
            no_blocks: Any = SimpleNamespace(layers={})
            overlap_in_halves(no_blocks, dims)
    assert taken == [False, False, True, True]


def test_shared_experts_do_not_run_ahead_of_a_hook():
    """They may read what a hook of the routed ones has set, and theirs may be read."""
    for hooked in ("", "routed_experts", "shared_experts.w1"):
        moe: Any = debug_model(layers=2).get_submodule("layers.1.moe")
        ahead = _SharedExperts(moe)
        if hooked:
            moe.get_submodule(hooked).register_forward_hook(lambda *_: None)
        x_BLD = torch.randn(1, 8, 256).bfloat16()
        ahead._called[0] = x_BLD, ThreadState.read()
        ahead.run_ahead()
        assert bool(ahead._ahead) == (not hooked)
    ahead._ahead[0] = x_BLD, torch.zeros(1)
    out = moe.shared_experts(x=x_BLD)  # by keyword it is another call
    assert out.shape == x_BLD.shape
