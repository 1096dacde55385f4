"""What a run leaves about itself in its folder."""

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, Runs, observed, titan_config
from titan_ext.config_registry.resolve import Resolved, load, resolve
from titan_ext.run.checkpoints import CheckpointManager
from titan_ext.run.record import Receipts, RunRecord, as_json, compiled, what_is_next
from titan_ext.toml.convert import dump

FILES = [
    Path(__file__).parents[2] / "train_configs" / f"{name}.toml"
    for name in ("deepseek_v3_671b_tuned", "gpt_oss_20b")
]
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


def test_a_config_made_in_python_says_what_is_missing():
    assert dump(titan_config("llama3")).startswith("# made in Python: to load this, say in extends")


def test_the_folder_explains_the_run(runs: Runs):
    runs.get(RUN)
    folder = runs.folder(RUN)
    (start,) = json.loads((folder / "run.json").read_text())["starts"]
    assert start["versions"].keys() >= {"python", "torch", "torchtitan", "titan_ext"}
    assert "pytest" in start["command"] or sys.executable in start["command"]
    if (Path(__file__).parents[2] / ".git").exists():  # not in an archive of the sources
        assert len(start["commit"]["titan_ext"].removesuffix("-dirty")) == 40
    assert start["ranks"] == 2
    assert start["ending"] == "finished"
    assert start["step"] == RUN.steps
    assert start["receipts"]["dispatcher"] == {"FunctionalAllToAllTokenDispatcher": 2}
    assert start["receipts"]["attention"]
    assert start["receipts"]["communication"]["backend"] == "gloo"
    # Two MoE layers of two ranks: in each logged step the last pass, unless its rank was still
    # telling the step before.
    routing = start["receipts"]["routing"]
    assert routing["ep"] == 2
    assert 0.5 < routing["most"] <= 1
    assert sum(routing["passes"].values()) in range(2 * 2, 2 * 2 * RUN.steps + 1, 2)
    assert f"training.steps = {RUN.steps}\n" in (folder / "config.toml").read_text()


def _compile() -> list[dict[str, Any]]:
    """Receipts without a compiler, after one graph, after more, and over the limit."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 3
    function = torch.compile(lambda x, n: x * n, backend="eager", dynamic=False)
    found = [compiled()]
    for times in ((1,), (2, 3), (4, 5, 6)):
        for n in times:
            function(torch.ones(2), float(n))
        found.append(compiled())
    return found


def test_graphs_and_the_limit_are_counted(tmp_path: Path):
    (found,) = run_ranks(_compile, 1, log_folder=tmp_path)
    *within, over = found
    assert within == [{}, *({"graphs": n, "recompile_limit_count": 0} for n in (1, 3))]
    assert (over["graphs"], over["recompile_limit_count"] > 0) == (3, True)


def test_each_start_has_its_entry_and_no_failure_is_one_of_the_run(
    tmp_path: Path,
    one_rank: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    config = load(FILES[0])
    config.dump_folder = str(tmp_path)
    receipts = Receipts()
    trainer: Any = SimpleNamespace(config=config, step=3, checks=[receipts])

    def broken() -> dict[str, Any]:
        raise KeyError("a unit")

    monkeypatch.setattr(receipts, "receipts", broken)
    for ending in ("stopped", "RuntimeError: disk"):
        record = RunRecord()
        record.after_build(trainer)
        with contextlib.suppress(RuntimeError), record.around_run(trainer):
            if ending != "stopped":
                raise RuntimeError("disk")
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [start["ending"] for start in starts] == ["stopped", "RuntimeError: disk"]
    assert "the record of the run is not complete: KeyError: 'a unit'" in caplog.text


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        ({}, "No checkpoint was saved; checkpoint.enable = true saves them."),
        ({"enable": True, "load_only": True}, "No checkpoint was saved; "),
        (
            {"enable": True, "last_save_model_only": False},
            "To train on from out/checkpoint/step-5, start the same command with more training.",
        ),
        (
            {"enable": True, "last_save_in_hf": True},
            "weights alone: a run in another dump_folder starts from them with --checkpoint."
            "initial_load_path out/checkpoint/step-5 --checkpoint.initial_load_in_hf.",
        ),
    ],
)
def test_the_end_of_a_run_says_what_is_next(checkpoint: dict[str, Any], said: str):
    config = SimpleNamespace(dump_folder="out", checkpoint=CheckpointManager.Config(**checkpoint))
    trainer = SimpleNamespace(
        config=config, step=5, checkpointer=SimpleNamespace(folder="out/checkpoint")
    )
    sentence = what_is_next(trainer)
    assert sentence.startswith("Finished at step 5; out/run.json says what ran. ")
    assert said in sentence


def test_a_record_is_written_whole_and_more_steps_are_not_advised_where_the_data_ended(
    tmp_path: Path,
    one_rank: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level("INFO")
    config = load(FILES[0])
    config.dump_folder = str(tmp_path)
    for step in (config.training.steps - 1, config.training.steps):
        record = RunRecord()
        trainer: Any = SimpleNamespace(config=config, step=step, checks=[], data_ended=True)
        trainer.checkpointer = SimpleNamespace(folder="checkpoint")
        record.after_build(trainer)
        with record.around_run(trainer):
            pass
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [start["ending"] for start in starts] == ["finished", "finished"]
    assert caplog.text.count("Finished at step") == 1
    monkeypatch.setattr(Path, "replace", lambda *_: None)  # killed before
    RunRecord().after_build(trainer)
    assert json.loads((tmp_path / "run.json").read_text())["starts"] == starts
