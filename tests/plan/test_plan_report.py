"""A plan as JSON and picture, and a run that compares itself with it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

from tests.helpers.cluster import run_ranks
from tests.helpers.toml_files import DEBUG, Loader
from tests.helpers.training import Run, make_config, train
from titan_ext.plan.dry_run import dry_run
from titan_ext.plan.live import MemoryKind, Peak
from titan_ext.plan.memory import MemoryPlan
from titan_ext.plan.report import draw, to_json, write
from titan_ext.plan.stand_ins import as_rank
from titan_ext.plan.time import Category, StepTime
from titan_ext.run.record import Receipts, file_name
from titan_ext.toml.convert import identity

RUN = Run(world=1, parallelize="block", layers=2, steps=2)
PHASES = (
    Peak(30, "forward of layers.0", {MemoryKind.PARAMETERS: 20, MemoryKind.EXACT: 10}),
    Peak(
        50,
        "backward of layers.0",
        {MemoryKind.PARAMETERS: 20, MemoryKind.GRADIENTS: 20, MemoryKind.REDUCE: 10},
    ),
    Peak(40, "optimizer", {MemoryKind.PARAMETERS: 20, MemoryKind.GRADIENTS: 20}),
)


@pytest.fixture(autouse=True)
def _small_context(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titan_ext.plan.memory.CONTEXT", 10)


def _plan(
    memory: int,
    config: dict[str, Any] | None = None,
    ranks: int = 4,
    time: StepTime | None = None,
) -> dict[str, Any]:
    plan = MemoryPlan(memory, PHASES[1], PHASES, communicators=0, on_host=frozenset())
    run = SimpleNamespace(
        memory=plan, time=time, ranks=ranks, rank=0, imbalance=1.0, name=lambda: "rank 0"
    )
    return to_json(run, config or {})


def test_a_plan_as_json_has_every_figure():
    plan = _plan(memory=55, config={"parallelism.expert_parallel_degree": 2})
    assert plan["verdict"].startswith("does not fit in ")
    assert (plan["fits"], plan["spare"], plan["allowance"]) == (False, -5, 10)
    assert plan["config"] == {"parallelism.expert_parallel_degree": 2}
    kinds = {kind.name.lower() for kind in MemoryKind}
    for phase, planned in zip(plan["moments"], PHASES, strict=True):
        assert phase["moment"] == planned.phase
        assert phase["sum"] == sum(phase[kind] for kind in kinds) == planned.nbytes
    assert json.loads(json.dumps(plan)) == plan


def test_a_timed_plan_has_its_milliseconds():
    ms = {Category.FORWARD: 10.0, Category.GATHERS: 2.5}
    time = StepTime("h100", ms, tokens=25, flops_per_token=None, expected=ms)
    assert _plan(memory=55)["time"] is None
    found = _plan(memory=55, time=time)["time"]
    assert found["ms"] == {"forward": 10.0, "gathers": 2.5}
    assert (found["step_ms"], found["tokens_per_second"], found["mfu"]) == (12.5, 2000.0, None)


@pytest.mark.parametrize(("memory", "drawn"), [(60, True), (201, False)])
def test_a_picture_has_the_peak_and_a_limit_that_is_near(memory: int, drawn: bool):
    config = {"parallelism.expert_parallel_degree": 2, "training.local_batch_size": 3}
    config |= {"training.seq_len": 256, "activation_checkpoint.policy": "fp8"}
    (axes,) = draw(_plan(memory, config)).axes
    labels = axes.get_legend_handles_labels()[1]
    *bars_of_kinds, error = axes.containers
    tops = [
        max(bar.get_y() + bar.get_height() for bar in bars) * 2**30
        for bars in zip(*bars_of_kinds, strict=True)
    ]
    assert tops == pytest.approx([phase.nbytes for phase in PHASES])
    assert any(label.startswith("memory: ") for label in labels) == drawn
    assert error.has_yerr
    assert "on 4 ranks, EP 2, 3 x 256 tokens a rank, checkpointing fp8" in axes.get_title("left")


def _write_plan(run: Run, folder: Path) -> None:
    with as_rank(run.world, 0):
        config: Any = make_config(run, folder)
        asked = identity(config)
        write(to_json(dry_run(config, run.world, memory=0), asked), folder)


def test_a_run_compares_its_second_step_with_its_plan(tmp_path: Path):
    run_ranks(_write_plan, 1, RUN, tmp_path, log_folder=tmp_path / "planned")
    plan = json.loads((tmp_path / file_name(0)).read_text())
    assert (tmp_path / file_name(0)).with_suffix(".png").read_bytes()[1:4] == b"PNG"
    train(RUN, tmp_path)
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    (line,) = [line for line in log.splitlines() if "Plan of rank 0" in line]
    assert "and step 2: peak " in line
    assert "planned, not measured on this device" in line
    assert line.count(" as planned") == 3
    (start,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    of_states = start["receipts"]["plan"]["optimizer states"]
    assert of_states["planned"] == of_states["measured"] == plan["moments"][-1]["states"]


class _Optimizers(list):
    def register_step_post_hook(self, hook: Any) -> Any:
        return self[0].register_step_post_hook(hook)


def test_the_peak_is_the_devices_before_titan_begins_a_new_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Of the second step alone, without what came after the optimizer."""
    caplog.set_level("INFO")
    peak = [1000]
    device = SimpleNamespace(
        max_memory_allocated=lambda _: peak[-1], max_memory_reserved=lambda _: 2 * peak[-1]
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    trainer: Any = SimpleNamespace(
        device=torch.device("cuda"),
        model_parts=[model],
        optimizers=_Optimizers([optimizer]),
        metrics_processor=SimpleNamespace(
            device_memory_monitor=SimpleNamespace(reset_peak_stats=lambda: peak.append(0)),
        ),
    )
    check = Receipts()
    check._plan = _plan(memory=100) | {"reserved": 100}
    check.after_build(trainer)
    for trainer.step in (1, 2, 3):
        with check.around_step(trainer):
            model.weight.grad = torch.zeros(2, 3)
            peak[-1] = max(peak[-1], 60)
            optimizer.step()
            peak[-1] = 7  # Titan logs
    assert peak == [7, 7], "begun once"
    (message,) = caplog.messages
    assert message == (
        "Plan of rank 0 and step 2: peak 50 B planned, 60 B measured (+20.0%); reserved 100 B "
        "planned, 120 B measured (+20.0%); parameters and buffers 20 B planned, 24 B measured "
        "(+20.0%); gradients 20 B planned, 24 B measured (+20.0%); optimizer states 0 B as planned"
    )
    found = check.receipts()["plan"]
    assert found["reserved"] == {"planned": 100, "measured": 120}
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("[training]\nsteps = 7\ndisable_cuda_graphs = false", ""),
        ("[training]\nseq_len = 512", "training.seq_len is 2048 there and 512 here"),
        ("[activation_checkpoint]\npolicy = 'full'", "policy is selective there and full here"),
        ("ranks", "ranks is 4 there and 8 here"),
        ("broken", "it cannot be read (JSONDecodeError"),
        ("absent", ""),
    ],
)
def test_a_plan_of_another_run_is_one_warning(
    config: Loader,
    folder: Path,
    change: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setenv("WORLD_SIZE", "8" if change == "ranks" else "4")
    monkeypatch.setenv("RANK", "0")
    plan = _plan(memory=100, config=identity(config(DEBUG)))
    if change != "absent":
        write(plan, folder)
    if change == "broken":
        (folder / file_name(0)).write_text("{")
    run = config(DEBUG + change if "\n" in change else DEBUG)
    run.dump_folder = str(folder)
    check = Receipts()
    check.before_build(run)
    assert (check._plan is not None) == (not said and change != "absent")
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == bool(said)
    assert said in "".join(warnings)
