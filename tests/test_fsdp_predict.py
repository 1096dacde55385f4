"""The predictor by itself: rules that can be worked out by hand, from shapes alone."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import titan_ext
from titan_ext.fsdp.memory.log import predictable_units
from titan_ext.fsdp.memory.predict import Pipeline, StepOrder, predict
from titan_ext.fsdp.plan import FSDPPlan, GroupPlan, ParamPlan, ReplicatedPlan, UnitPlan
from titan_ext.fsdp.units import UnitKind

_ROWS = {"layers.0.attention": 10, "layers.0.moe": 30, "layers.1.attention": 10, "layers.1.moe": 30}
_ROW = 100  # bytes: 50 values in bf16
ORDER = StepOrder(loss_chunks=0)


def _plan(world: int = 2, ahead: int = 1, reshard: bool | int = True) -> list[UnitPlan]:
    names = list(_ROWS)
    units = []
    for index, (name, rows) in enumerate(_ROWS.items()):
        param = ParamPlan(
            name="weight",
            shape=(rows, 50),
            shard_dim=0,
            dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
        )
        units.append(
            UnitPlan(
                name=name,
                kind=UnitKind(name.split(".")[2]),
                groups=(GroupPlan(kind="dense", shard_world=world, params=(param,)),),
                reshard_after_forward=reshard,
                forward_prefetch=tuple(names[index + 1 : index + 1 + ahead]),
                backward_prefetch=tuple(names[:index][::-1][:ahead]),
            )
        )
    return units


@pytest.mark.parametrize(
    ("ahead", "peak_rows"),
    [
        (0, 40),  # nothing ahead, but a block that is computed again needs its attention, too
        (1, 40),  # any two neighbours
        (2, 70),  # moe, attention, moe
        (9, 80),
    ],
)
def test_logical_peak(ahead: int, peak_rows: int):
    assert predict(_plan(ahead=ahead), ORDER).peak("logical") == peak_rows * _ROW


def test_without_recompute_and_prefetch_one_unit_at_a_time():
    timeline = predict(_plan(ahead=0), replace(ORDER, recomputes=False))
    assert timeline.peak("logical") == timeline.peak("gathered") == 30 * _ROW
    # Forward keeps the last flat buffer until the next copy-out: moe's, while attention's arrives.
    assert timeline.peak("all_gather") == 40 * _ROW
    assert timeline.peak("reduce_scatter") == 30 * _ROW * 2  # fp32; one at a time
    assert timeline.peak("gradients") == 80 * _ROW * 2 // 2  # sharded over 2 ranks


def test_kept_parameters_are_gathered_once():
    timeline = predict(_plan(reshard=False), ORDER)
    assert timeline.peak("gathered") == 80 * _ROW
    assert set(timeline.unshards().values()) == {1}
    assert set(predict(_plan(), ORDER).unshards().values()) == {2}


def test_a_smaller_world_keeps_its_share():
    timeline = predict(_plan(world=4, reshard=2), ORDER)
    at_rest = next(e for e in timeline.events if e.action == "after forward" and e.unit == "")
    padded_rows = 2 * (12 + 32)
    assert at_rest.bytes_of().gathered == padded_rows * _ROW // 2
    assert at_rest.bytes_of().logical == 0
    assert set(timeline.unshards().values()) == {2}


def test_padding_counts():
    # 10 and 30 rows over 4 ranks are 12 and 32.
    timeline = predict(_plan(world=4, reshard=False), ORDER)
    assert timeline.peak("gathered") == 2 * (12 + 32) * _ROW


def test_one_rank_gathers_nothing_and_copies_all():
    timeline = predict(_plan(world=1), ORDER)
    assert timeline.peak("all_gather") == 0
    assert timeline.peak("gathered") == 40 * _ROW


def test_gradients_of_another_dtype_are_cast_and_gone():
    timeline = predict(_plan(), replace(ORDER, grad_dtype=torch.bfloat16))
    assert timeline.events[-1].bytes_of().gradients == 0
    assert timeline.peak("gradients") == 30 * _ROW * 2 // 2


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_pipeline_gathers_again_only_if_it_reshards(microbatches: int):
    order = replace(ORDER, pipeline=Pipeline(stage=0, stages=2, microbatches=microbatches))
    kept = predict(_plan(reshard=False), order)
    assert set(kept.unshards().values()) == {1}
    freed = predict(_plan(), order)
    assert min(freed.unshards().values()) > microbatches


@pytest.mark.parametrize(("stage", "expected"), [(0, "FFBFBFBB"), (1, "FBFBFBFB"), (3, "FBFBFBFB")])
def test_1f1b(stage: int, expected: str):
    pipeline = Pipeline(stage=stage, stages=max(2, stage + 1), microbatches=4)
    assert "".join(pipeline.forwards_and_backwards()) == expected
    gpipe = replace(pipeline, schedule="GPipe")
    assert "".join(gpipe.forwards_and_backwards()) == "FFFFBBBB"


def test_what_is_not_known_is_refused():
    pipeline = Pipeline(stage=0, stages=2, microbatches=4, schedule="ZBVZeroBubble")
    with pytest.raises(ValueError, match="1F1B and GPipe"):
        predict(_plan(), replace(ORDER, pipeline=pipeline))
    with pytest.raises(ValueError, match="multi-token"):
        predict([replace(_plan()[0], name="mtp_layers.0.attention")], ORDER)
    head = replace(_plan()[0], name="lm_head", kind=UnitKind.HEAD, module_names=("lm_head",))
    with pytest.raises(ValueError, match="a head without its norm is not predicted in a pipeline"):
        predict([head], replace(ORDER, pipeline=replace(pipeline, schedule="1F1B")))
    tied = replace(head, kind=UnitKind.TIED, module_names=("tok_embeddings", "lm_head"))
    with pytest.raises(ValueError, match="tied embeddings without a norm"):
        predict([tied], ORDER)


def test_of_replicated_parameters_only_the_last_norm_is_predicted():
    def plan(name: str) -> FSDPPlan:
        replicated = ReplicatedPlan(kind="dense", module_names=(name,), params=())
        return FSDPPlan(units=tuple(_plan()), replicated=(replicated,))

    assert predictable_units([plan("norm")]) == _plan()
    with pytest.raises(ValueError, match="some parameters are replicated"):
        predictable_units([plan("layers.0.attention_norm")])


@pytest.mark.parametrize("module", ["accounting", "simulate", "predict"])
def test_the_predictor_sees_nothing_of_fsdp(module: str):
    source = Path(titan_ext.__file__).parent / "fsdp" / "memory" / f"{module}.py"
    imported = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert not [name for name in imported if name.startswith(("torch.", "torchtitan"))]
    ours = {name for name in imported if name.startswith("titan_ext")}
    allowed = ("memory.accounting", "memory.simulate", "plan", "units")
    assert ours <= {f"titan_ext.fsdp.{name}" for name in allowed}
