"""Collectives of a step, by unit: the numbers of docs/fsdp.md, their order, their bytes.

Counted on fake tensors (``helpers.collectives``), as one of 64 ranks. tests/plan holds such a step
against one of real ranks.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.collectives import Collective, PlannedStep, count
from tests.helpers.training import Run, Runs
from titan_ext.plan.live import MemoryKind

# One dense block and two MoE blocks. Dense groups gather over all ranks; experts over efsdp, which
# has world / EP ranks: one rank gathers nothing. ChunkedLoss runs norm and lm_head apart, so
# the pair is gathered three times and reduced twice.
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


_PLAIN = Run(world=64, ep=8, global_batch=64, parallelize="submodule", narrow=True)
_KEPT = (("attention", "never"), ("layers.2.attention", "always"), ("embedding", "never"))
_ACROSS = {
    "plain": _PLAIN,
    "saved": replace(_PLAIN, save_all_to_all="always"),
    "experts": replace(
        _PLAIN, parallelize="experts", prefetch="auto", reduce_scatter_buffers=2, ac="full"
    ),
    "nothing ahead": replace(_PLAIN, prefetch=0, ac="none"),
    "two ahead": replace(_PLAIN, prefetch=2, ac="full"),
    "never": replace(_PLAIN, reshard="never"),
    "kept": replace(_PLAIN, reshard_groups=_KEPT),
    "fewer bytes": replace(_PLAIN, float8_all_gather="experts", expert_reduce_scatter="bfloat16"),
    "float8 blocks": replace(_PLAIN, float8_all_gather="blocks"),
}
"""Of the same degrees, so that one process plans them all."""


@pytest.fixture
def steps(runs: Runs) -> Mapping[str, PlannedStep]:
    return dict(zip(_ACROSS, runs.planned(*_ACROSS.values()), strict=True))


def _check(run: Run, step: PlannedStep, recompute_exchanges: int) -> None:
    expected = _expected(run.parallelize, run.world, run.ep, recompute_exchanges)
    counted = count(step.collectives)
    assert {kind: counted[kind] for kind in expected} == expected, run


def test_collectives_per_step(steps: Mapping[str, PlannedStep]):
    """ "auto" on one node does as stock, which exchanges the tokens again. So does full
    checkpointing; no policy gathers parameters again.
    """
    recomputed = {"plain": 3, "saved": 0, "experts": 3, "two ahead": 3, "nothing ahead": 0}
    for name, exchanges in recomputed.items():
        _check(_ACROSS[name], steps[name], exchanges)


@pytest.mark.parametrize(
    ("layout", "rank", "wraps"),
    [
        # A rank has its experts whole. Stock under spmd_types exchanges again with selective
        # checkpointing, as ours by "auto".
        ({"world": 8, "global_batch": 8}, 0, {"submodule": 3, "stock": 3}),
        # Of 5 experts the last ranks have none, and most ranks no row of the router.
        ({"ep": 1, "experts": 5}, 63, {"block": 0, "submodule": 0}),
    ],
    ids=["whole experts", "without rows"],
)
def test_collectives_of_other_layouts(
    layout: dict[str, Any], rank: int, wraps: dict[str, int], runs: Runs
):
    of_wraps = [replace(_PLAIN, **layout, parallelize=wrap) for wrap in wraps]
    planned = runs.planned(*of_wraps, rank=rank)
    for run, step, exchanges in zip(of_wraps, planned, wraps.values(), strict=True):
        _check(run, step, exchanges)


def _gathers(step: PlannedStep) -> Counter[str]:
    return Counter(e.main_module for e in step.collectives if e.kind == "all_gather")


def test_collectives_per_unit(steps: Mapping[str, PlannedStep]):
    blocks = {
        **{f"layers.{i}.attention": 2 for i in range(3)},
        "layers.0.feed_forward": 2,
        "layers.1.moe": 4,
        "layers.2.moe": 4,
    }
    for name in ("saved", "plain", "nothing ahead", "two ahead"):
        assert _gathers(steps[name]) == {"tok_embeddings": 1, **blocks, "lm_head": 3}
    # Chunked loss frees it by itself.
    once = {unit: gathers // 2 for unit, gathers in blocks.items()}
    assert _gathers(steps["never"]) == {"tok_embeddings": 1, **once, "lm_head": 3}
    kept = {"layers.0.attention": 1, "layers.1.attention": 1}
    assert _gathers(steps["kept"]) == {"tok_embeddings": 1, **blocks, **kept, "lm_head": 3}
    recomputed = [e for e in steps["saved"].collectives if e.kind == "all_to_all" and e.in_backward]
    assert len(recomputed) == 2 * _MOE_BLOCKS  # only the two that carry gradients


def test_the_next_unit_is_gathered_before_this_one_exchanges_tokens(
    steps: Mapping[str, PlannedStep],
):
    """The exchange stops the host, so prefetch comes first."""
    events = steps["saved"].collectives

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


def test_prefetch_is_as_far_ahead_as_it_says(steps: Mapping[str, PlannedStep]):
    """Which units have been gathered when the tokens of the first MoE layer are sent."""
    before: dict[str, list[str]] = {}
    for name in ("nothing ahead", "plain", "two ahead"):
        events = steps[name].collectives
        first = next(i for i, e in enumerate(events) if e.kind == "all_to_all")
        before[name] = [e.main_module for e in events[:first] if e.kind == "all_gather"]
    upto = ["tok_embeddings", "layers.0.attention", "layers.0.feed_forward"]
    upto += ["layers.1.attention", "layers.1.moe", "layers.1.moe"]
    assert before["nothing ahead"] == upto
    assert before["plain"] == [*upto, "layers.2.attention"]
    assert before["two ahead"] == [*upto, "layers.2.attention", "layers.2.moe", "layers.2.moe"]


def test_microbatches_of_a_pipeline(runs: Runs):
    """By default a stage, here the last, gathers its units once for all of them."""
    run = Run(world=64, pp=2, global_batch=128, layers=2, narrow=True, parallelize="block")
    default, always = map(_gathers, runs.planned(run, replace(run, reshard="always"), rank=63))
    microbatches = 4
    # Titan's chunked loss gathers and frees the head in each microbatch, in stock too.
    assert default == {"layers.1": 1, "lm_head": 2 * microbatches + 1}
    # A pipeline's backward keeps what it gathers for the next forward.
    assert always == {"layers.1": microbatches + 1, "lm_head": 2 * microbatches + 1}


def _pairs(steps: Mapping[str, PlannedStep], other: str) -> list[tuple[Collective, Collective]]:
    return list(zip(steps["plain"].collectives, steps[other].collectives, strict=True))


def test_fewer_bytes_of_experts_and_of_no_others(steps: Mapping[str, PlannedStep]):
    """In float8 forth, in bfloat16 back, in the same order."""
    pairs = _pairs(steps, "fewer bytes")
    assert [(a.unit, a.in_backward) for a, _ in pairs] == [
        (b.unit, b.in_backward) for _, b in pairs
    ]
    changed = [(a, b) for a, b in pairs if (a.kind, a.nbytes) != (b.kind, b.nbytes)]
    shares = Counter((a.kind, b.kind, b.nbytes / a.nbytes) for a, b in changed)
    assert shares == {
        # Two layers, forward and backward.
        ("all_gather", "all_gather", (1 + 1 / 128) / 2): 4,
        ("reduce_scatter", "all_to_all", 0.5): 2,
    }
    assert {a.main_module for a, _ in changed} == {"layers.1.moe", "layers.2.moe"}


def test_all_matrices_of_blocks_travel_in_float8(steps: Mapping[str, PlannedStep]):
    """Units do not matter: blocks of a scale begin with a parameter."""
    pairs = _pairs(steps, "float8 blocks")
    assert [a for a, _ in pairs] == [b for _, b in pairs]
    gathers = [(a, b) for a, b in pairs if a.kind == "all_gather"]
    exact = {a.main_module for a, b in gathers if a.nbytes == b.nbytes}
    assert exact == {"tok_embeddings", "lm_head"}
    shares = [b.nbytes / a.nbytes for a, b in gathers if a.main_module not in exact]
    assert all(0.5 < share < 0.53 for share in shares), shares


def test_bytes_of_a_reduction(steps: Mapping[str, PlannedStep]):
    """The sum of the loss's chunks waits for the norm's backward; a unit's input, for the next."""
    step = steps["plain"]
    reduced = {
        unit: max(e.nbytes for e in step.collectives if (e.kind, e.main_module) == (kind, unit))
        for kind, unit in (("reduce_scatter", "lm_head"), ("reduce_scatter", "layers.1.attention"))
    }
    held = {phase.phase: phase.by_kind for phase in step.phases}
    # Its gradient, which waits for its unit's; torch 2.14 keeps it in bf16.
    of_norm = 256 * (2 if torch.__version__ < "2.15" else 4)
    assert held["backward of norm"][MemoryKind.REDUCE] == reduced["lm_head"] + of_norm
    of_two = held["backward of layers.1"][MemoryKind.REDUCE] / reduced["layers.1.attention"]
    assert 2 < of_two < 2.6, "and what the next has made by then"


_SUBMODULE = Run(world=2, ep=2, parallelize="submodule", narrow=True, steps=2)
_WHOLE = replace(_SUBMODULE, ep=1, parallelize="block")
_MEASURED = [
    # Two blocks of three; FSDP2 by itself has three.
    {_WHOLE: 11_874_304, replace(_WHOLE, stock_copy_out=True): 17_811_456},
    {
        replace(_SUBMODULE, global_batch=8): 6_364_672,
        replace(
            _SUBMODULE,
            prefetch="2MiB",
            reshard_groups=(("attention", "never"), ("layers.2.*", "always")),
        ): 10_365_440,
    },
]


@pytest.mark.parametrize("measured", _MEASURED, ids=["whole blocks", "submodules"])
def test_bytes_held_unsharded(measured: dict[Run, int], runs: Runs):
    """As a tracker on FSDP2's storages read them, event by event, on two gloo ranks.

    The tree had one until commit 3026e80 (fsdp/tracker.py).
    """
    planned = runs.planned(*measured)
    assert [step.unsharded for step in planned] == list(measured.values())
