"""What FSDP holds: measured, event by event, and held against a plan of the same step."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, Runs, make_config, observed, patched, planned_config
from titan_ext.fsdp.memory_log import _CLASS_COLOURS, _KIND_COLOURS, FOLDER
from titan_ext.fsdp.settings import copies_out_directly
from titan_ext.fsdp.tracker import CLASSES, MemoryTracker, Timeline
from titan_ext.fsdp.units import Unit, UnitKind

TRACKED = Run(steps=2, tracked=True, narrow=True)
LAYOUTS = [
    replace(TRACKED, world=2, ep=1, parallelize="block", ac="none"),
    replace(TRACKED, world=2, ep=2, parallelize="submodule", global_batch=8),
    replace(
        TRACKED,
        world=2,
        ep=2,
        parallelize="submodule",
        prefetch="2MiB",
        reshard_groups=(("attention", "never"), ("layers.2.*", "always")),
    ),
]
OTHER_DIM = replace(TRACKED, world=2, parallelize="submodule", layers=2, expert_shard_dim=1)
"""Experts beside dense parameters in one group, as without EP."""
if copies_out_directly():  # torch 2.14 copies out into a temporary that nothing can watch
    LAYOUTS += [OTHER_DIM, replace(OTHER_DIM, stock_copy_out=True)]
WHOLE = observed(Run(world=2, parallelize="block", tracked=True))
"""As tests/fsdp/test_collective_counts.py has it."""
LAYOUTS += [WHOLE]
HEAD_ALONE = replace(TRACKED, world=2, ep=2, parallelize="submodule")
NORM_REPLICATED = replace(HEAD_ALONE, replicate=("norm",))
SLOW_LAYOUTS = [
    NORM_REPLICATED,
    replace(WHOLE, stock_copy_out=True),
    replace(HEAD_ALONE, ac="none", layers=4),
    replace(HEAD_ALONE, chunked_loss=False),
    replace(HEAD_ALONE, parallelize="block", reshard="always", prefetch=2, accumulate=2),
    replace(HEAD_ALONE, reshard_groups=(("layers.0.feed_forward", "never"),)),
    replace(NORM_REPLICATED, reshard_groups=(("layers.0.feed_forward", "never"),)),
    replace(NORM_REPLICATED, chunked_loss=False),
    replace(NORM_REPLICATED, parallelize="block", reshard="always", prefetch=2, accumulate=2),
    replace(TRACKED, world=2, ep=2, parallelize="block", ac="full", reshard="never"),
    replace(TRACKED, world=4, ep=2, parallelize="submodule", backend="partial_dtensor"),
    replace(TRACKED, world=2, pp=2, parallelize="block", reshard="always"),
    replace(TRACKED, world=4, ep=2, pp=2, parallelize="submodule"),
    replace(TRACKED, world=2, model="qwen3", parallelize="submodule"),
    replace(TRACKED, world=4, parallelize="submodule", backend="partial_dtensor", reshard=2),
    replace(TRACKED, world=2, ep=2, parallelize="submodule", prefetch=2, prefetch_backward=0),
    replace(WHOLE, reshard="never"),
    replace(TRACKED, world=4, ep=2, parallelize="experts"),
    replace(TRACKED, world=4, ep=2, pp=2, parallelize="experts"),
    replace(TRACKED, world=4, ep=2, parallelize="experts", prefetch=2, reduce_scatter_buffers=2),
    replace(
        TRACKED, world=4, ep=2, parallelize="submodule", prefetch="auto", reduce_scatter_buffers=3
    ),
]

if copies_out_directly():
    OTHER_DIM_EP = replace(OTHER_DIM, world=4, ep=2, layers=3)
    SLOW_LAYOUTS += [OTHER_DIM_EP, replace(OTHER_DIM_EP, stock_copy_out=True)]


@pytest.mark.parametrize(
    "run", [*LAYOUTS, *(pytest.param(run, marks=pytest.mark.slow) for run in SLOW_LAYOUTS)], ids=str
)
def test_measured_is_planned(run: Run, runs: Runs, tmp_path: Path):
    """To the byte: the same storages, seen by hooks of FSDP's and by every operation."""
    for rank, result in enumerate(runs.get(run).ranks):
        logs = tmp_path / f"planned{rank}"
        (planned,) = run_ranks(_planned_unsharded, 1, run, rank, tmp_path, log_folder=logs)
        assert result.memory is not None
        measured = result.memory.peak("unsharded")
        # A plan runs one step, the first. In a pipeline, and with shards of a smaller world, that
        # one holds a little more.
        differs = run.pp > 1 or isinstance(run.reshard, int)
        assert planned == measured or (differs and measured < planned < 1.1 * measured)
        assert result.memory.left_over() == ()
        assert result.memory.peak("gathered") > 0
        if run.pp == 1:
            break  # the others are like it


def _planned_unsharded(run: Run, rank: int, folder: Path) -> int:
    from titan_ext.plan.dry_run import dry_run
    from titan_ext.plan.memory import DeviceMemory
    from titan_ext.plan.stand_ins import as_rank

    with as_rank(run.world, rank), patched(run):
        config = planned_config(run, folder)
        budget = DeviceMemory(memory=0)
        done = dry_run(config, run.world, rank, budget=budget, as_on_a_gpu=False)
    assert done.memory is not None
    return done.memory.unsharded


def _with_each_copy_out(run: Run, runs: Runs) -> list[tuple[Timeline, Timeline]]:
    """Each rank's timelines with our copy-out and with FSDP2's, which train to the same bits."""
    ours, stock = (runs.get(replace(run, stock_copy_out=name)) for name in (False, True))
    assert ours.losses == stock.losses
    assert [r.state_hash for r in ours.ranks] == [r.state_hash for r in stock.ranks]
    pairs = [(a.memory, b.memory) for a, b in zip(ours.ranks, stock.ranks, strict=True)]
    assert all(timeline is not None for pair in pairs for timeline in pair)
    return cast(Any, pairs)


@pytest.mark.skipif(not copies_out_directly(), reason="torch 2.14 has no copy-out of ours")
def test_experts_of_more_ranks_than_experts_are_copied_out_without_a_temporary(runs: Runs):
    """And to the same bits as by FSDP2, whose temporary is as large as a layer's experts."""
    for mine, torchs in _with_each_copy_out(OTHER_DIM, runs):
        assert not [event for event in mine.events if event.action == "copying"]
        events = torchs.events
        assert [e.unit for e in events if e.action == "copying"] == ["layers.1.moe"] * 2
        (temporary,) = [
            before.bytes_of().all_gather - after.bytes_of().all_gather
            for before, after in itertools.pairwise(events)
            if (before.action, after.action) == ("copying", "copied")
        ]
        assert temporary == 2 * 8 * 3 * 256 * 256  # bf16, 8 experts, 3 weights


def test_whole_blocks_free_their_gather_buffers_at_once(runs: Runs):
    """Stock holds the running block, the next one in its buffer, and the running one's buffer."""
    for mine, torchs in _with_each_copy_out(WHOLE, runs):
        assert mine.peaks()["blocks_unsharded"] * 3 == torchs.peaks()["blocks_unsharded"] * 2
        assert mine.unshards() == torchs.unshards()


def test_a_head_without_its_norm_is_gathered_once(runs: Runs):
    """And not three times: for the norm, for the chunked loss, and in backward.

    Not where units of blocks stay gathered: with its norm it is gathered three times.
    """
    kept = LAYOUTS[2]
    assert ("attention", "never") in kept.reshard_groups
    alone, together = runs.get(HEAD_ALONE), runs.get(kept)
    assert alone.losses == together.losses
    assert [r.state_hash for r in alone.ranks] == [r.state_hash for r in together.ranks]
    for mine, its in zip(alone.ranks, together.ranks, strict=True):
        assert mine.memory is not None
        assert its.memory is not None
        assert (mine.memory.unshards()["lm_head"], its.memory.unshards()["lm_head"]) == (1, 3)


def test_a_tracked_run_is_bit_identical_and_leaves_files(runs: Runs):
    run = replace(observed(Run(world=2, ep=2, parallelize="submodule")), steps=3)
    plain, tracked = runs.get(run), runs.get(replace(run, tracked=True))
    assert tracked.losses == plain.losses
    assert [r.state_hash for r in tracked.ranks] == [r.state_hash for r in plain.ranks]
    assert not (runs.folder(run) / FOLDER).exists()

    run_folder = runs.folder(replace(run, tracked=True))
    folder = run_folder / FOLDER
    for rank in range(2):
        lines = [json.loads(t) for t in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert ["events" in line for line in lines] == [False, True, False]
        assert lines[2]["unshards"]["layers.1.moe"] == lines[2]["reshards"]["layers.1.moe"] == 2
        assert (folder / f"rank{rank}.png").stat().st_size > 10_000
    log = (run_folder / "logs" / "rank_0.log").read_text()
    assert log.count("FSDP peak: ") == 1


def _small_model() -> tuple[nn.Module, list[Unit]]:
    """Three linear layers, a unit each, sharded over every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    units = []
    for index, layer in enumerate(model):
        dim = index % 2  # a tracker watches the copy-out of dim 1, too
        fully_shard(layer, shard_placement_fn=lambda _, dim=dim: Shard(dim))
        units.append(
            Unit(
                name=f"layers.{index}.attention",
                kind=UnitKind.ATTENTION,
                module_names=(str(index),),
            )
        )
    fully_shard(model)
    return model, units


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 64)).sum().backward()


def _watched(run: Run, folder: Path) -> tuple[int, int]:
    """Hooks of ours, and groups with communication of ours, in the model of a run."""
    import torch.distributed as dist

    trainer = make_config(run, folder).build()
    (model,) = trainer.model_parts
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    comms = {g._all_gather_comm for state in states for g in state._fsdp_param_groups}
    trainer.close()
    dist.destroy_process_group()
    ours = [hook for hook in hooks if "MemoryTracker" in getattr(hook, "__qualname__", "")]
    return len(ours), sum("_Watched" in type(comm).__name__ for comm in comms)


def test_off_it_registers_nothing(tmp_path: Path):
    run = Run(parallelize="submodule", layers=1)
    assert run_ranks(_watched, 1, run, tmp_path, log_folder=tmp_path) == [(0, 0)]
    run = replace(run, tracked=True)
    ((hooks, comms),) = run_ranks(_watched, 1, run, tmp_path, log_folder=tmp_path)
    assert hooks > 0
    assert comms == 4  # embedding, attention, feed-forward; norm and head


def _planted(fault: str) -> tuple[dict[str, int], tuple[str, ...]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model, units = _small_model()
    tracker = MemoryTracker([(model, units)])
    leaked = []
    if fault == "leaked all-gather buffer":
        state = units[1].fsdp_module(model)._get_fsdp_state()
        group = cast(Any, state._fsdp_param_groups[0])
        allocate = group._all_gather_comm.inner.allocate

        def leak(*args, **kwargs):
            leaked.append(allocate(*args, **kwargs))
            return leaked[-1]

        group._all_gather_comm.inner.allocate = leak
    elif fault == "never resharded":
        for layer in model.children():
            assert isinstance(layer, FSDPModule)
            layer.set_reshard_after_backward(False)
    _step(model)
    tracker.begin_step()
    _step(model)
    timeline = tracker.end_step()
    dist.destroy_process_group()
    last = timeline.events[-1].bytes_of()
    return {name: getattr(last, name) for name in CLASSES}, timeline.left_over()


_LAYER = 64 * 64 * 4


@pytest.mark.parametrize(
    ("fault", "gathered", "all_gather", "left_over"),
    [
        ("none", 0, 0, ()),
        # Two gathers a step, two steps.
        ("leaked all-gather buffer", 0, 4 * _LAYER, ("all_gather buffers",)),
        ("never resharded", 3 * _LAYER, 0, tuple(f"layers.{i}.attention" for i in range(3))),
    ],
)
def test_planted_faults_show_up(fault, gathered, all_gather, left_over, tmp_path: Path):
    for live, left in run_ranks(_planted, 2, fault, log_folder=tmp_path):
        assert (live["gathered"], live["all_gather"]) == (gathered, all_gather)
        assert left == left_over


def test_a_colour_in_the_picture_means_one_thing():
    assert set(_KIND_COLOURS) == {str(kind) for kind in UnitKind}
    colours = [*_CLASS_COLOURS, *_KIND_COLOURS.values()]
    assert len(set(colours)) == len(colours)
