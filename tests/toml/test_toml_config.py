"""What a TOML file can extend, and the values that it can set."""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from torchtitan.config import Configurable
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC
from torchtitan.hf_datasets.text_datasets import (
    ChatDataLoader,
    InterleavedHuggingFaceTextDataLoader,
)
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

from tests.helpers.toml_files import DATA, DEBUG, Loader, filled, model_text
from titan_ext.config_registry.resolve import load
from titan_ext.parallelize.passes import parallelize
from titan_ext.run.trainer import Trainer, extend_config
from titan_ext.toml.convert import leaves
from titan_ext.toml.files import TomlConfigError


def test_a_file_that_changes_nothing_is_the_base(config: Loader):
    """By every name that Titan takes."""
    base = extend_config(deepseek_v3_debugmodel())
    titans = "torchtitan.models.deepseek_v3"
    for place in ("", "deepseek_v3.", f"{titans}.", f"{titans}.config_registry."):
        ours = config(f'extends = "{place}deepseek_v3_debugmodel"\n')
        assert type(ours) is Trainer.Config
        assert leaves(ours) == leaves(base)
    assert model_text(ours) == model_text(base)
    assert ours.model_spec is not None
    assert ours.model_spec.parallelize_fn is parallelize


def test_two_files_may_extend_the_same_one_and_share_nothing(config: Loader, folder: Path):
    first = config(DEBUG)
    first.optimizer.param_groups.clear()
    first.training.steps = 12345
    second = config(DEBUG)
    assert second.optimizer.param_groups
    assert second.training.steps == 10


def test_a_file_in_the_middle_need_not_be_valid_by_itself(config: Loader):
    # Memory-budget checkpointing needs compile, which only the file on top turns on.
    ours = config(
        'extends = "middle.toml"\n[compile]\nenable = true\n',
        middle=DEBUG + '[activation_checkpoint]\npolicy = "memory-budget"\n',
    )
    assert isinstance(ours.activation_checkpoint, MemoryBudgetAC.Config)
    with pytest.raises(TomlConfigError, match=r"^middle.toml: Memory budget .* compiled"):
        load("middle.toml")


def test_three_files_in_turn(config: Loader):
    base = (
        DEBUG
        + """
[training]
seq_len = 512
[activation_checkpoint]
policy = "full"
debug = true
[dataloader]
num_workers = 3
[[optimizer.param_groups]]
pattern = "norm"
optimizer_name = "Adam"
optimizer_kwargs = { lr = 1e-3 }
[[optimizer.param_groups]]
pattern = ".*"
optimizer_name = "AdamW"
"""
    )
    middle = f"""
extends = "base.toml"
[training]
seq_len = 640
[activation_checkpoint]
policy = "none"
[dataloader]
component = "{DATA}.InterleavedHuggingFaceTextDataLoader"
seed = 7
[[dataloader.sources]]
dataset = "c4"
weight = 3
[optimizer.param_groups.0.optimizer_kwargs]
betas = [0.8, 0.9]
"""
    top = """
extends = "middle.toml"
[dataloader.sources.0]
weight = 2
[optimizer.param_groups.0.optimizer_kwargs]
lr = 2e-3
"""
    ours = config(top, middle=middle, base=base)
    assert ours.training.seq_len == 640
    assert ours.activation_checkpoint is None
    dataloader = ours.dataloader
    assert isinstance(dataloader, InterleavedHuggingFaceTextDataLoader.Config)
    assert (dataloader.seed, dataloader.num_workers) == (7, 0)
    assert [(source.dataset, source.weight) for source in dataloader.sources] == [("c4", 2.0)]
    first, second = ours.optimizer.param_groups
    assert first.optimizer_kwargs == {"lr": 2e-3, "betas": [0.8, 0.9]}
    assert second.optimizer_name == "AdamW"
    more = 'extends = "middle.toml"\n[training]\nseq_len = 384\n[activation_checkpoint]\n'
    with pytest.raises(
        TomlConfigError, match=r'debug: has no meaning: activation_checkpoint.policy is "none"'
    ):
        config(more + "debug = true\n")
    ours = config(more + 'policy = "full"\n')
    assert ours.training.seq_len == 384
    assert ours.activation_checkpoint == FullAC.Config()  # the first file's keys went with "none"


_KINDS: dict[str, tuple[str, Any]] = {
    "dump_folder": ('"out"', "out"),
    "training.max_norm": ("2", 2),  # float | int
    "training.dtype": ('"bfloat16"', "bfloat16"),
    "lr_scheduler.decay_ratio": ("1", 1.0),
    "lr_scheduler.total_steps": ("50", 50),
    "parallelism.fsdp_wrap": ('"block"', "block"),
    "parallelism.module_fqns_per_model_part": ('[["norm", "lm_head"]]', [["norm", "lm_head"]]),
    "parallelism.context_parallel_load_balancer": ('"None"', None),
    "override.imports": (
        '["my_package.plain", ["my_package.tuned", { block_size = 256 }]]',
        ["my_package.plain", ("my_package.tuned", {"block_size": 256})],
    ),
    "validator.enable": ("true", True),
    "validator.dataloader.dataset": ('"c4_test"', "c4_test"),
}


def test_values_of_every_kind(config: Loader):
    ours = config(DEBUG + "\n".join(f"{key} = {text}" for key, (text, _) in _KINDS.items()))
    for key, (_, value) in _KINDS.items():
        found = functools.reduce(getattr, key.split("."), ours)
        assert (found, type(found)) == (value, type(value)), key
    # The other keys keep the value of what is extended.
    assert not ours.validator.dataloader.infinite


def test_a_function_by_its_path(config: Loader):
    ours = config(
        DEBUG
        + f'[dataloader]\ncomponent = "{DATA}.ChatDataLoader"\n'
        + 'dataset_path = "my/chats"\nsample_processor = "os.path.basename"\n'
        + 'load_dataset_kwargs = { split = "train" }\n'
    )
    dataloader = ours.dataloader
    assert isinstance(dataloader, ChatDataLoader.Config)
    assert dataloader.sample_processor("a/b") == "b"
    assert dataloader.load_dataset_kwargs == {"split": "train"}


@dataclass(kw_only=True, slots=True)
class Paint(Configurable.Config):
    where: Path | None = None
    layers: tuple[int, ...] = ()
    mix: dict[str, float] = field(default_factory=dict)


def test_paths_tuples_and_dicts():
    paint = filled(Paint, {"where": "a/b", "layers": [1, 2], "mix": {"red": 1, "blue": 0.5}})
    assert paint == Paint(where=Path("a/b"), layers=(1, 2), mix={"red": 1.0, "blue": 0.5})
    with pytest.raises(TomlConfigError, match=r"layers.1: expected a valid integer, got 0\.5"):
        filled(Paint, {"layers": [1, 0.5]})
    with pytest.raises(TomlConfigError, match=r"mix.red: expected a valid number, got \"1\""):
        filled(Paint, {"mix": {"red": "1"}})


def test_an_empty_table_clears_what_the_file_before_has(config: Loader):
    ours = config(
        'extends = "middle.toml"\n[activation_checkpoint]\nop_policies = {}\n',
        middle=DEBUG
        + '[activation_checkpoint]\npolicy = "fp8"\nop_policies = { "*:aten.mm" = "save" }\n',
    )
    assert cast(Any, ours.activation_checkpoint).op_policies == {}
    before = cast(Any, load("middle.toml").activation_checkpoint)
    assert before.op_policies == {"*:aten.mm": "save"}
    both = config(
        'extends = "middle.toml"\n[activation_checkpoint.op_policies]\n"*:aten.bmm" = "save"\n'
    )
    assert set(cast(Any, both.activation_checkpoint).op_policies) == {"*:aten.mm", "*:aten.bmm"}
