"""Checkpoints: resumed to the bit, loaded in other layouts, saved asynchronously, exported.

The table of layouts is in tests/matrix/checkpoints.py (``make matrix``); a pair of it is here.
"""

import contextlib
import enum
import io
import json
import pickle
import re
import resource
import threading
import unittest.mock
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import CheckpointManager as TitanCheckpointManager
from torchtitan.components.optimizer import OptimizersContainer, default_adamw

from tests.helpers.checkpointing import (
    Leg,
    differing,
    flip_a_bit,
    read_checkpoint,
    run_leg,
    slow_writes,
)
from tests.helpers.training import Run, make_config, titan_config
from titan_ext.base.run_folder import whole_checkpoint_steps
from titan_ext.base.titan.data import data_facts, other_data
from titan_ext.components.hf_export import INDEX, HuggingFaceExport
from titan_ext.parallelize.limits import wrong_values
from titan_ext.plan.shorten import cut
from titan_ext.run.checkpoints import (
    CheckpointManager,
    Checkpoints,
    _facts,
    _first_wrong,
    _warn_of_overridden_settings,
    check_resume,
    checkpoint_to_load,
    verify_checksums,
)
from titan_ext.run.checks import Schedule
from titan_ext.run.trainer import extend_config
from titan_ext.run.weights import check_weights

RUN = Run(parallelize="submodule", world=2, ep=2, layers=2, seq_len=32, steps=4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Leg]]:
    """A run on text that nothing interrupts, saved at step 2 and at the end."""
    folder = tmp_path_factory.mktemp("whole")
    return folder / "checkpoint", run_leg(RUN, folder, interval=2)


def test_every_tensor_is_the_saved_one_in_another_layout(whole, tmp_path: Path):
    """Of two ranks, EP 2 and a unit for each sub-module on one rank, and whole blocks."""
    step = whole[0] / "step-2"
    (leg,) = run_leg(
        replace(RUN, parallelize="block", world=1, ep=1),
        tmp_path,
        look=True,
        save_at_once=True,
        initial_load_path=str(step),
        initial_load_model_only=False,
        exclude_from_loading=["dataloader"],
    )
    assert len(leg.loaded) > 100
    assert differing(leg.loaded, read_checkpoint(step)) == []


def test_a_resumed_run_is_the_uninterrupted_one(whole, tmp_path: Path):
    checkpoints, uninterrupted = whole
    resumed = run_leg(
        RUN,
        tmp_path,
        initial_load_path=str(checkpoints / "step-2"),
        initial_load_model_only=False,
    )
    assert _facts(checkpoints / "step-2")["load_step"] == "-1"
    for leg, wanted in zip(resumed, uninterrupted, strict=True):
        assert sorted(leg.losses) == [3, 4]
        assert leg.losses == {step: wanted.losses[step] for step in (3, 4)}
        assert leg.grad_norms == {step: wanted.grad_norms[step] for step in (3, 4)}
        assert leg.samples == wanted.samples[2:]
        assert leg.learning_rates == wanted.learning_rates
        assert leg.state_hash == wanted.state_hash


@pytest.mark.slow
def test_an_asynchronous_save_is_the_synchronous_one(whole, tmp_path: Path):
    checkpoints, synchronous = whole
    legs = run_leg(
        RUN, tmp_path, until=3, interval=2, async_mode="async_with_pinned_mem", around=slow_writes
    )
    assert legs[0].losses[3] == synchronous[0].losses[3]
    saved = read_checkpoint(tmp_path / "checkpoint" / "step-2")
    assert differing(saved, read_checkpoint(checkpoints / "step-2")) == []


def _config(folder: Path, run: Run = RUN, **checkpoint: Any) -> Any:
    config: Any = make_config(run, folder)
    config.checkpoint = CheckpointManager.Config(enable=True, **checkpoint)
    return config


def _trainer(config: Any, ranks: int) -> Any:
    """What ``check_resume`` asks of a trainer, of any number of data-parallel ranks."""
    dataloader = object.__new__(config.dataloader._owner)
    dataloader.dp_world_size = ranks
    return SimpleNamespace(
        config=config, dataloader=dataloader, model_config=config.model_spec.model
    )


def test_other_data_and_another_number_of_data_ranks(tmp_path: Path, one_rank: None):
    config = _config(tmp_path)
    saved = _trainer(config, ranks=2)
    states = {**dict.fromkeys(("optimizer", "lr_scheduler"), 1), "dataloader.dp_rank_0": 1}
    facts = {"data": json.dumps(data_facts(config.dataloader, saved.dataloader))}
    path = tmp_path / "checkpoint" / "step-4"
    dcp.save({"w": torch.ones(1), "train_state": facts, **states}, checkpoint_id=path)
    check_resume(saved)
    elsewhere = _config(tmp_path)
    elsewhere.dataloader = replace(config.dataloader, dataset_path=str(tmp_path))
    for trainer, words in (
        (_trainer(config, ranks=4), r"made with 2 data-parallel rank\(s\), and this run has 4"),
        (_trainer(config, ranks=1), r"made with 2 data-parallel rank\(s\), and this run has 1"),
        (
            _trainer(elsewhere, ranks=2),
            r"the data python_stdlib \(.*\), and this run has .*stdlib /",
        ),
    ):
        with pytest.raises(ValueError, match=f"{words}.*exclude_from_loading dataloader"):
            check_resume(trainer)
        trainer.config.checkpoint.exclude_from_loading = ["dataloader"]
        check_resume(trainer)
        trainer.config.checkpoint.exclude_from_loading = []


def test_a_branch_is_begun_alone_and_a_restart_goes_on_from_its_newest(
    tmp_path: Path, one_rank: None
):
    checkpoints = tmp_path / "checkpoint"

    def save(step: int, load_step: int) -> None:
        state = {"data": json.dumps({"load_step": str(load_step)})}
        dcp.save({"w": 1, "train_state": state}, checkpoint_id=checkpoints / f"step-{step}")

    def start(load_step: int) -> str:
        config = _config(tmp_path, load_step=load_step)
        Checkpoints().before_start(config)
        found = checkpoint_to_load(config)
        with unittest.mock.patch.object(TitanCheckpointManager, "_load", lambda _, step: step):
            loaded = _manager(tmp_path).load(load_step)
        assert found
        assert loaded in (-1, int(found[0].name.removeprefix("step-")))
        return found[0].name

    for step in (2, 4):
        save(step, -1)
    (checkpoints / "step-6").mkdir()
    (checkpoints / "step-6" / INDEX).touch()
    said = r"load_step is 2, .* has step-4, step-6: .* load step-6\. .*_path .*-2 --.*model-only in"
    with pytest.raises(ValueError, match=said):
        start(2)
    for step in (4, 6):
        (checkpoints / f"step-{step}").rename(tmp_path / f"{step}")
    assert start(2) == "step-2"
    save(3, load_step=2)
    save(5, load_step=2)
    assert start(2) == start(-1) == start(5) == "step-5"
    with pytest.raises(ValueError, match="load_step is 3"):
        start(3)
    save(6, -1)
    with pytest.raises(ValueError, match="has step-3, step-5, step-6: later starts"):
        start(2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data": "elsewhere"}, ""),  # the same size: it has moved
        ({"data": "elsewhere", "size": ""}, "this run has elsewhere (of unknown size)"),
        ({"size": "4 documents of 9 bytes"}, "a (3 documents of 9 bytes), and this run has a (4 d"),
        ({"workers": "2"}, "dataloader.num_workers = 0, and this run has 2"),
    ],
)
def test_data_are_the_same_by_their_size(change: dict[str, str], says: str):
    saved = {"data": "a", "size": "3 documents of 9 bytes", "workers": "0", "ranks": "2"}
    assert other_data(saved, saved) == ""
    difference = other_data(saved, {**saved, **change})
    assert says in difference
    assert bool(says) == bool(difference)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_first_step_takes_the_rate_of_a_changed_schedule(as_tensor: bool):
    rate: Any = torch.tensor(0.5) if as_tensor else 0.5
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scheduler.last_epoch, scheduler._last_lr = 3, [0.125]  # as Titan restores it
    trainer: Any = SimpleNamespace(lr_schedulers=[scheduler])
    check = Schedule()
    for _ in range(2):  # only the first
        with check.around_step(trainer):
            assert optimizer.param_groups[0]["lr"] == 0.125


def test_another_model(whole):
    """In torch's format; test_weights.py has the other one."""
    checkpoints, _ = whole
    said = check_weights(_config(checkpoints.parent, load_step=2))
    assert re.match(r"(\d+) of \1 fit \(float32\), in .*step-2$", said)
    with pytest.raises(ValueError, match=r"fit the model: without layers\.2\..* and \d+ more"):
        check_weights(_config(checkpoints.parent, replace(RUN, layers=3)))
    fewer = _config(checkpoints.parent, replace(RUN, layers=1))
    with pytest.raises(ValueError, match=r"with layers\.1\.att.*in checkpoint\.ignore_weights\)"):
        check_weights(fewer)
    fewer.checkpoint.ignore_weights = ["layers.1"]
    assert re.search(r" fit .*; \d+ more ignored", check_weights(fewer))
    shortened = _config(checkpoints.parent)  # as tune plans it, beside the run's own checkpoint
    cut(shortened, 1)
    assert check_weights(shortened) == ""


def test_the_model_only_is_nothing_to_resume_from(tmp_path: Path, one_rank: None):
    checkpoints = tmp_path / "checkpoint"
    for step, states in ((2, {"train_state": 1, "optimizer": 1}), (4, {})):
        dcp.save({"w": torch.ones(1), **states}, checkpoint_id=checkpoints / f"step-{step}")
    with pytest.raises(ValueError, match=r"step-4 has the model only: .* away, .*_path .*-4"):
        check_resume(_trainer(_config(tmp_path), ranks=1))
    with pytest.raises(ValueError, match=r"step-2 has no dataloader, lr_scheduler"):
        check_resume(_trainer(_config(tmp_path, load_step=2), ranks=1))
    (checkpoints / "step-6").mkdir()
    (checkpoints / "step-6" / "model.safetensors.index.json").touch()
    with pytest.raises(ValueError, match=r"step-6 has an export .* away, .*_load_in_hf"):
        checkpoint_to_load(_config(tmp_path))
    run_folder = _config(tmp_path / "new", initial_load_path=str(checkpoints))
    with pytest.raises(ValueError, match=r"\.metadata: cannot be read \(.*No such file"):
        verify_checksums(run_folder)


def _manager(folder: Path, async_mode: str = "disabled", size: int = 1) -> CheckpointManager:
    """One that keeps two checkpoints of a model of one matrix."""
    mode = cast(Any, async_mode)
    return CheckpointManager.Config(
        enable=True, interval=1, keep_latest_k=2, async_mode=mode
    ).build(
        dataloader=None,
        model_parts=[torch.nn.Linear(size, size, bias=False)],
        optimizers=None,
        lr_schedulers=None,
        states={},
        sd_adapter=None,
        base_folder=str(folder),
    )


def _cut_off(folder: Path, *steps: int) -> None:
    """As saves leave them that were killed before they were over."""
    for step in steps:
        (folder / "checkpoint" / f"step-{step}").mkdir(parents=True)
        (folder / "checkpoint" / f"step-{step}" / "__0_0.distcp").touch()


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_whole_checkpoints_are_kept_not_folders(async_mode: str, tmp_path: Path, one_rank: None):
    may_end, finish = threading.Event(), FileSystemWriter.finish
    checkpoints, manager = tmp_path / "checkpoint", _manager(tmp_path, async_mode)
    _cut_off(tmp_path, 2, 7, 9)
    for step in (1, 3):
        manager.save(step)
    manager.maybe_wait_for_saving()

    def late(*args: Any, **results: Any) -> None:
        assert async_mode == "disabled" or may_end.wait(60)
        finish(*args, **results)

    with unittest.mock.patch.object(FileSystemWriter, "finish", late):
        manager.save(5)
        manager.close()  # when all is deleted
        under_way = async_mode != "disabled"
        kept = [1, 3] if under_way else [3, 5]
        assert whole_checkpoint_steps(checkpoints) == kept
        may_end.set()
        manager.maybe_wait_for_saving()
    assert whole_checkpoint_steps(checkpoints)[-2:] == [3, 5]
    left = set(whole_checkpoint_steps(checkpoints, marker=""))
    assert {7, 9} <= left
    assert (2 in left) == under_way


def test_what_lies_above_the_saved_step_is_of_another_start(tmp_path: Path, one_rank: None):
    """A run that resumes from an earlier step (``load_step``) keeps what it saves."""
    checkpoints = tmp_path / "checkpoint"
    for step in (3, 8, 9):
        dcp.save({"w": torch.ones(1)}, checkpoint_id=checkpoints / f"step-{step}")
    manager = _manager(tmp_path)
    for step in (4, 5):
        manager.save(step)
    manager.close()
    assert whole_checkpoint_steps(checkpoints) == [4, 5, 8, 9]


def test_a_checkpoint_that_is_overwritten_is_not_whole(tmp_path: Path, one_rank: None):
    manager = _manager(tmp_path)
    manager.save(3)
    with (
        unittest.mock.patch.object(FileSystemWriter, "finish", side_effect=InterruptedError),
        pytest.raises(CheckpointException),
    ):
        manager.save(3)
    assert whole_checkpoint_steps(tmp_path / "checkpoint") == []
    manager.close()


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_full_disk_is_one_error_and_loses_no_checkpoint(
    async_mode: str, tmp_path: Path, one_rank: None
):
    """Files of this process may have 64 KiB, and the model takes 256."""
    manager = _manager(tmp_path, async_mode, size=256)
    manager.save(2)
    manager.maybe_wait_for_saving()
    trainer: Any = SimpleNamespace(config=_config(tmp_path), checkpointer=manager, step=4)
    error = r"a checkpoint could not be saved, on rank 0: .*refused a write: a full disk"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with (
            unittest.mock.patch("titan_ext.run.checkpoints.check_resume"),
            pytest.raises(RuntimeError, match=error),
            Checkpoints().around_run(trainer),
        ):
            manager.save(4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert whole_checkpoint_steps(tmp_path / "checkpoint") == [2]


def test_saves_that_were_cut_off_are_said(
    tmp_path: Path, one_rank: None, caplog: pytest.LogCaptureFixture
):
    states = {"train_state": 1, "optimizer": 1, "lr_scheduler": 1, "dataloader.dp_rank_0": 1}
    trainer = _trainer(_config(tmp_path), ranks=1)
    trainer.model_config = SimpleNamespace(build=lambda: torch.nn.Linear(1, 1, bias=False))
    weights = {"weight": torch.ones(1, 1), **states}
    _cut_off(tmp_path, 2, 7, 9)
    with pytest.raises(ValueError, match=r"only step-2, step-7, step-9 in .*/checkpoint: no \.met"):
        check_resume(trainer)
    dcp.save(weights, checkpoint_id=tmp_path / "checkpoint" / "step-5")
    check_resume(trainer)
    assert "passed over step-7, step-9 in" in caplog.text
    assert "Training resumes from step-5." in caplog.text
    caplog.clear()
    dcp.save(weights, checkpoint_id=tmp_path / "checkpoint" / "step-11")
    check_resume(trainer)
    assert "passed over" not in caplog.text


def test_a_flipped_bit_of_an_archive_is_found_or_refused_by_torch(tmp_path: Path):
    """Contents have checksums. Torch reads the rest, and refuses it or finds the same in it."""
    kept, path = io.BytesIO(), tmp_path / "shard"
    torch.save(torch.arange(10.0), kept)
    good = kept.getvalue()
    found = 0
    for place in range(0, len(good), 7):
        broken = bytearray(good)
        broken[place] ^= 1
        path.write_bytes(broken)
        if _first_wrong(path, [(0, len(good), "w")]):
            found += 1
            continue
        with contextlib.suppress(RuntimeError, ValueError, pickle.UnpicklingError):
            assert torch.load(io.BytesIO(broken)).equal(torch.arange(10.0)), place
    assert found > 40 // 7, "at least the numbers"


def test_checksums_are_compared_up_to_a_size(
    tmp_path: Path, one_rank: None, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    dcp.save({"w": torch.arange(1 << 18, dtype=torch.float32)}, checkpoint_id=tmp_path / "other")
    flip_a_bit(tmp_path / "other" / "__0_0.distcp")  # 1 MiB
    config = _config(tmp_path / "run", initial_load_path=str(tmp_path / "other"))
    assert (
        cast(Any, extend_config(titan_config("qwen3")).checkpoint).verify_checksums_up_to_gib == 64
    )
    for limit in (0.0, 1 / 1025):
        config.checkpoint.verify_checksums_up_to_gib = limit
        caplog.clear()
        verify_checksums(config)
        assert re.search(
            rf"other \(1\.0 MiB\) are not compared .*_gib is {limit:g}\.$", caplog.text
        )
    for limit in (1 / 1000, float("inf")):
        config.checkpoint.verify_checksums_up_to_gib = limit
        with pytest.raises(ValueError, match=r"other is corrupt"):
            verify_checksums(config)
    (wrong,) = wrong_values(
        SimpleNamespace(checkpoint=CheckpointManager.Config(verify_checksums_up_to_gib=-1))
    )
    assert wrong == "checkpoint.verify_checksums_up_to_gib is -1; expected 0 or more."


def test_settings_that_a_checkpoint_overrides_are_said(caplog: pytest.LogCaptureFixture):
    model = torch.nn.Linear(2, 2)
    saved = OptimizersContainer(default_adamw(1e-3), model_parts=[model])
    optimizers = OptimizersContainer(default_adamw(2e-3, weight_decay=0.2), model_parts=[model])
    Checkpoints().after_build(cast(Any, SimpleNamespace(optimizers=optimizers)))
    optimizers.load_state_dict(optimizers.state_dict())
    assert caplog.text == ""
    optimizers.load_state_dict(saved.state_dict())
    assert "weight_decay of weight and 1 more is 0.1 from the checkpoint, not 0.2 as" in caplog.text
    assert len(caplog.records) == 1


def test_equal_settings_are_equal_however_they_are_written(caplog: pytest.LogCaptureFixture):
    """A file has lists for tuples, and words for enums and paths; a checkpoint what was built."""
    word = enum.Enum("word", {"MATCH": "match"})
    configured = {"betas": [0.9, 0.95], "eps": 1, "weight_decay": 0.5, "adjust": "match", "at": "a"}
    saved = {
        "betas": (0.9, 0.95),
        "eps": 1.0,
        "weight_decay": 0.5,
        "adjust": word.MATCH,
        "at": Path("a"),
    }
    for key in (*saved, ""):
        groups = [{"params": [], "lr": 1.0, **values} for values in (configured, saved)]
        optimizer: Any = SimpleNamespace(param_groups=groups[:1])
        if key:
            groups[1][key] = (0.9, 0.99) if key == "betas" else 7
        _warn_of_overridden_settings(optimizer, {"param_groups": groups[1:]})
        said = [re.findall(r"optimizer: (\w+) of", record.message) for record in caplog.records]
        assert said == ([[key]] if key else [])
        caplog.clear()


def test_an_export_that_would_leave_weights_out(tmp_path: Path):
    """TorchTitan 0.3's adapter has older names of the experts: stock exports without them."""
    run = Run(model="gpt_oss", parallelize="block")
    name = "inner_experts.mlp1_weight_EGD"
    with pytest.raises(ValueError, match=rf"last_save_in_hf is on.* has no name for .*{name}"):
        HuggingFaceExport().before_start(_config(tmp_path, run, last_save_in_hf=True))


def test_buffers_that_an_export_leaves_out_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = Run(model="qwen3_moe", layers=1, parallelize="block")
    HuggingFaceExport().before_start(_config(tmp_path, run))
    assert "expert_bias_E" not in caplog.text
    HuggingFaceExport().before_start(_config(tmp_path, run, last_save_in_hf=True))
    assert "has no name for layers.0.moe.expert_bias_E; they are left out" in caplog.text


def test_adapters_begin_on_weights_from_elsewhere(tmp_path: Path):
    """They are not exported with them: stock ends DeepSeek-V3 with a KeyError, both ways."""
    run = Run(lora=8, parallelize="block")
    with pytest.raises(ValueError, match=r"last_save_in_hf is on.*titan_ext peft CONFIG` exports"):
        HuggingFaceExport().before_start(_config(tmp_path, run, last_save_in_hf=True))
    weights = {"initial_load_in_hf": True, "initial_load_path": str(tmp_path)}
    HuggingFaceExport().before_start(_config(tmp_path, run, **weights))
