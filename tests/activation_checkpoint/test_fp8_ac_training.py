"""FP8 activation checkpointing under the trainer: several ranks, exchanges, pipelines, units."""

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.fp8_activations import SavesCasts
from tests.helpers.training import RankResult, Result, Run, Runs, observed, train
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.base.run_folder import read_scalar

Config = FP8AC.Config

_MOE_BLOCKS = 2
_EP2 = observed(Run(world=2, ep=2, parallelize="submodule"))


def _slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def _exchanges_in_backward(rank: RankResult) -> int:
    return sum(e.kind == "all_to_all" and e.in_backward for e in rank.collectives)


def _routes_alike(rank: RankResult) -> bool:
    """Every recompute of a router chose the experts that one of its forwards chose."""
    forward: dict[str, list[np.ndarray]] = defaultdict(list)
    recomputed: dict[str, list[np.ndarray]] = defaultdict(list)
    for name, in_backward, ids in rank.routing:
        (recomputed if in_backward else forward)[name].append(ids)
    assert forward
    assert forward.keys() == recomputed.keys()
    return all(
        len(forward[name]) == len(again)
        and all(np.array_equal(a, b) for a, b in zip(forward[name], again, strict=True))
        for name, again in recomputed.items()
    )


@pytest.fixture
def selective(runs: Runs) -> Result:
    return runs.get(_EP2)


def test_the_stock_preset_trains_as_stock_selective_does(selective: Result, tmp_path: Path):
    ours = train(dataclasses.replace(_EP2, ac=Config(preset="stock")), tmp_path)
    # It saves the counts of tokens, which tell each rank what to expect, whatever is sent again.
    assert [_exchanges_in_backward(r) for r in ours.ranks] == [4 * _MOE_BLOCKS] * 2
    assert [_exchanges_in_backward(r) for r in selective.ranks] == [5 * _MOE_BLOCKS] * 2
    assert ours.losses == selective.losses
    assert [r.state_hash for r in ours.ranks] == [r.state_hash for r in selective.ranks]
    others = [[e for e in r.collectives if e.kind != "all_to_all"] for r in ours.ranks]
    assert others == [[e for e in r.collectives if e.kind != "all_to_all"] for r in selective.ranks]


@pytest.mark.parametrize(
    "policy",
    [
        Config(preset="stock", op_policies={"*:aten._to_copy": "save"}),
        # A user's. Titan's own saves casts to the host, which only an accelerator has.
        SavesCasts.Config(),
        _slow(Config(preset="stock", op_policies={"*:aten.*": "save"})),
    ],
)
def test_what_fsdp_runs_is_not_counted(policy: Any, selective: Result, tmp_path: Path):
    """It casts experts of a group of one rank inside of the checkpoint, in the forward alone."""
    ours = train(dataclasses.replace(_EP2, ac=policy, reshard="always"), tmp_path)
    assert ours.losses == selective.losses
    assert [r.state_hash for r in ours.ranks] == [r.state_hash for r in selective.ranks]


@pytest.mark.parametrize(
    ("run", "exchanges"),
    [
        (dataclasses.replace(_EP2, ac=Config(), save_all_to_all="always"), 2),
        # As stock on one node: dispatch and combine again, but not the numbers of tokens.
        _slow(dataclasses.replace(_EP2, ac=Config()), 4),
        # Full exchanges the tokens again, but not their numbers.
        _slow(dataclasses.replace(_EP2, ac=Config(mode="full")), 4),
    ],
    ids=lambda value: str(value),
)
def test_under_expert_parallelism(run: Run, exchanges: int, selective: Result, tmp_path: Path):
    result = train(dataclasses.replace(run, watch_routing=True), tmp_path)
    _check_memory_report(tmp_path, result)
    for rank in result.ranks:
        assert _exchanges_in_backward(rank) == exchanges * _MOE_BLOCKS
        assert _routes_alike(rank)
    assert np.isfinite(result.losses + result.grad_norms).all()
    # What was quantised before it had arrived would show here.
    assert result.grad_norms[:2] == pytest.approx(selective.grad_norms[:2], rel=0.003)


def _check_memory_report(folder: Path, result: Result) -> None:
    """It is in the folder, in the metrics and in the log, once."""
    files = sorted(file.name for file in (folder / "activation_checkpoint").glob("*.json"))
    assert files == [f"rank{rank}_layers_0.json" for rank in range(len(result.ranks))]
    report = json.loads((folder / "activation_checkpoint" / files[0]).read_text())
    assert [block["block"] for block in report["blocks"]] == ["layers.0", "layers.1", "layers.2"]
    for name, value in report["totals"].items():
        assert read_scalar(folder, name) == {1: pytest.approx(value)}
    log = (folder / "logs" / "rank_0.log").read_text()
    assert log.count("Kept for backward") == 1
    assert "Kept for backward (3 blocks, one forward):" in log


@pytest.mark.parametrize("backend", ["spmd_types", _slow("partial_dtensor")])
def test_without_recompute_nothing_is_exchanged_twice(backend: str, runs: Runs):
    run = dataclasses.replace(_EP2, ac=Config(mode="no_recompute"), backend=backend)
    (step,) = runs.planned(run)
    exchanges = [e.in_backward for e in step.collectives if e.kind == "all_to_all"]
    assert exchanges.count(True) == 2 * _MOE_BLOCKS


def test_a_pipeline(runs: Runs):
    """The first step's gradient norm is bf16's, nearly, and so is the loss after it."""
    plain = observed(Run(world=2, pp=2, parallelize="submodule"))
    ours, bf16 = runs.get(dataclasses.replace(plain, ac=Config())), runs.get(plain)
    assert ours.losses[0] == bf16.losses[0]
    assert ours.grad_norms[0] == pytest.approx(bf16.grad_norms[0], rel=0.01)
    assert ours.grad_norms != bf16.grad_norms
    assert ours.losses[1] == pytest.approx(bf16.losses[1], rel=1e-3)


@pytest.mark.slow
def test_compiled_units_in_the_trainer(tmp_path: Path):
    """Two all-to-alls a MoE layer in backward, as eager; the log says what each graph saves."""
    run = Run(
        world=2,
        ep=2,
        layers=2,
        parallelize="submodule",
        ac=Config(),
        compiled=True,
        compile_backend="aot_eager",
        steps=3,
        profiled_step=3,
    )
    result = train(run, tmp_path, timeout_s=300)
    assert np.isfinite(result.losses + result.grad_norms).all()
    assert result.losses[-1] < result.losses[0]
    # Attention, feed-forward; of MoE the norm, router, routed experts, their scores, shared ones.
    assert {rank.graphs for rank in result.ranks} == {7}
    assert {rank.operations["aten::topk"] for rank in result.ranks} == {1}
    exchanges = {rank.operations["gloo:all_to_all"] for rank in result.ranks}
    assert exchanges == {3 + 2}
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert log.count(" saves for backward:") == 7
    assert "float8 e4m3" in log
    graphs = json.loads((tmp_path / "activation_checkpoint" / "graphs_rank0.json").read_text())
    rows = (row for graph in graphs for row in graph if row["source"] == "input")
    tokens, outputs = (row for row in rows if row["treatment"] == "float8 e4m3")
    # In the experts' order, and as they come back: 256 values of a byte, and two scales.
    assert (tokens["tensors"], tokens["nbytes"], tokens["nbytes_a_token"]) == (1, 0, 256 + 2)
    assert (outputs["tensors"], outputs["nbytes"] % (256 + 2)) == (1, 0)
