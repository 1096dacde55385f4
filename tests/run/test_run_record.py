"""What a run leaves about itself in its folder, and says at its end."""

import contextlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torchtitan.config import TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from tests.helpers.training import Run, Runs, observed, titan_config
from titan_ext import config_registry
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.components.exchange_policy import ExchangePolicy
from titan_ext.config_registry.resolve import Resolved, load, resolve
from titan_ext.fp8 import MemoryRow
from titan_ext.parallelize.keys import ParallelismConfig
from titan_ext.run import record as run_record
from titan_ext.run.planned import as_json
from titan_ext.run.record import (
    RunRecord,
    _activations,
    _exchanges,
    origin,
)
from titan_ext.toml.values import dump

FILES = sorted((Path(__file__).parents[2] / "train_configs").glob("*.toml"))
RUN = observed(Run(world=2, ep=2, parallelize="submodule"))


def _dumped_and_loaded(resolved: Resolved, folder: Path) -> dict[str, Any]:
    (folder / "config.toml").write_text(dump(resolved.config))
    loaded = resolve(folder / "config.toml").values
    assert as_json(loaded) == as_json(resolved.values)  # a tuple is a list in TOML
    return loaded


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dumped_config_loads_as_the_same(path: Path, tmp_path: Path):
    resolved = resolve(path)
    resolved.config.training.steps = 7  # as a flag does it
    assert _dumped_and_loaded(resolved, tmp_path)["training.steps"] == 7


def test_a_dumped_config_has_the_converters_of_its_model(tmp_path: Path):
    (tmp_path / "lora.toml").write_text(
        'extends = "qwen3.qwen3_debugmodel"\n[[model.converters]]\n'
        'component = "torchtitan.components.lora.LoRAConverter"\n'
        'rank = 4\nalpha = 8.0\ntarget_modules = ["wqkv"]\n'
    )
    loaded = _dumped_and_loaded(resolve(tmp_path / "lora.toml"), tmp_path)
    assert loaded["model.converters.0.rank"] == 4


def test_a_dumped_config_function_loads_as_the_same(tmp_path: Path):
    resolved = config_registry.resolve_config("qwen3_debugmodel", ["--training.steps", "7"])
    assert _dumped_and_loaded(resolved, tmp_path)["training.steps"] == 7


def test_a_config_made_in_python_says_what_is_missing(tmp_path: Path):
    assert dump(titan_config("llama3")).startswith("# made in Python: to load this, say in extends")


def test_the_folder_explains_the_run(runs: Runs):
    runs.get(RUN)
    folder = runs.folder(RUN)
    (start,) = json.loads((folder / "run.json").read_text())["starts"]
    assert start["versions"].keys() >= {"python", "torch", "torchtitan", "titan_ext"}
    assert start["command"]
    assert start["ranks"] == 2
    assert start["ending"] == "finished"
    assert start["step"] == RUN.steps
    assert f"training.steps = {RUN.steps}\n" in (folder / "config.toml").read_text()
    units, exchanges = (
        next(line for line in start["gained"] if words in line)
        for words in ("as one unit: at most", "all-to-alls")
    )
    largest, whole = map(float, re.findall(r"([\d.]+) MiB", units))
    assert 0 < largest < whole
    # As counted in fsdp/test_collective_counts.py.
    assert exchanges == (
        "all-to-alls a MoE layer and step: 8, as stock selective; 5 where they cross nodes, or "
        'with parallelism.save_all_to_all = "always" (predicted)'
    )
    log = (folder / "logs" / "rank_0.log").read_text()
    assert all(line in log for line in start["gained"])
    assert not (folder / "logs" / "rank_1.log").read_text().count("This run, on this rank")


def test_the_origin_names_commit_and_command():
    found = origin()
    if (Path(__file__).parents[2] / ".git").exists():  # not in an archive of the sources
        assert len(found["commit"]["titan_ext"].removesuffix("-dirty")) == 40
    assert sys.executable in found["command"] or "pytest" in found["command"]


def test_each_start_has_its_entry_and_no_failure_is_one_of_the_run(
    tmp_path: Path,
    one_rank: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    config = load(FILES[0])
    config.dump_folder = str(tmp_path)
    trainer: Any = SimpleNamespace(config=config, step=3, checks=[])

    def broken(_: Any) -> list[str]:
        raise KeyError("a unit")

    monkeypatch.setattr(run_record, "gains", broken)
    for ending in ("stopped", "RuntimeError: disk"):
        record = RunRecord()
        record.after_build(trainer)
        with contextlib.suppress(RuntimeError), record.around_run(trainer):
            if ending != "stopped":
                raise RuntimeError("disk")
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [start["ending"] for start in starts] == ["stopped", "RuntimeError: disk"]
    assert "the record of the run is not complete: KeyError: 'a unit'" in caplog.text


def test_half_a_record_is_set_aside_and_the_next_is_written_whole(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "run.json").write_text('{"starts": [{"id": "a", "ran')
    trainer: Any = SimpleNamespace(config=SimpleNamespace(dump_folder=str(tmp_path)))
    record = RunRecord()
    record._entry = {"id": "b"}
    record._write(trainer)
    assert json.loads((tmp_path / "run.json").read_text()) == {"starts": [{"id": "b"}]}
    assert (tmp_path / "run.json.broken").exists()
    monkeypatch.setattr(Path, "replace", lambda *_: None)  # killed before
    record._entry = {"id": "c"}
    record._write(trainer)
    assert json.loads((tmp_path / "run.json").read_text()) == {"starts": [{"id": "b"}]}


def test_activations(monkeypatch: pytest.MonkeyPatch):
    rows = [MemoryRow("wq", "float8 e4m3", 1, 2**20, 2**21), MemoryRow("x", "exact", 1, 100, 100)]
    report = SimpleNamespace(rows=lambda: rows)
    monkeypatch.setattr(run_record, "memory_report_of", lambda _: report)
    assert _activations(SimpleNamespace(model_parts=[])) == [
        "activations kept for backward: 1.0 MiB a forward; not compressed: 2.0 MiB (0.50)"
    ]


class _OwnSelectiveAC(SelectiveAC):
    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass


@pytest.mark.parametrize(
    ("policy", "saves", "exchanges"),
    [
        (SelectiveAC.Config(), "never", 8),
        (SelectiveAC.Config(), "always", 5),
        (FP8AC.Config(), "never", 7),
        (FP8AC.Config(), "always", 5),
        (FP8AC.Config(mode="no_recompute"), "never", 5),
        (FP8AC.Config(score_before_last_gemm=True), "never", 8),  # two of them of scores
        (FP8AC.Config(score_before_last_gemm=True), "always", 7),
        (FP8AC.Config(preset="stock", score_before_last_gemm=True), "never", 9),
        # Not for save_all_to_all to decide.
        (FP8AC.Config(mode="full"), "always", None),
        (FullAC.Config(), "always", None),
        (_OwnSelectiveAC.Config(), "always", None),
        (None, "always", None),
    ],
)
def test_all_to_alls_of_a_layer(
    policy: Any, saves: Any, exchanges: int | None, monkeypatch: pytest.MonkeyPatch
):
    def said_of(ep: int = 2, **keys: Any) -> list[str]:
        parallelism = ParallelismConfig(save_all_to_all=saves, **keys)
        config = SimpleNamespace(activation_checkpoint=policy, parallelism=parallelism)
        dims: Any = SimpleNamespace(ep=ep, ep_enabled=True, tp_enabled=False, pp_enabled=False)
        model = nn.Module()
        training = TrainingConfig(local_batch_size=2)
        ExchangePolicy.decide(parallelism, training, dims, compiled=False).leave_with(model)
        parts = [model]
        return _exchanges(SimpleNamespace(config=config, parallel_dims=dims, model_parts=parts))

    found = said_of()
    beside = ", as stock selective" if exchanges == 8 else "; 8 with stock selective"
    said = f"all-to-alls a MoE layer and step: {exchanges}{beside} (predicted)"
    assert found == ([said] if exchanges else [])
    if exchanges == 5:  # scores and their gradients
        once = said_of(exchange_rows="rank", expert_parallel_degree=2)[0]
        assert "and step: 7" in once
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert "and step: 13" in said_of(4, exchange_rows="node", expert_parallel_degree=4)[0]
    if exchanges:  # twice as many, of half the bytes
        assert f"and step: {2 * exchanges}" in said_of(overlap_exchanges="halves")[0]
