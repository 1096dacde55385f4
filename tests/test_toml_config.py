"""What a TOML file can say, and what config comes of it."""

import dataclasses
import enum
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import tyro
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import Configurable
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import (
    ChatDataLoader,
    HuggingFaceTextDataLoader,
    InterleavedHuggingFaceTextDataLoader,
)
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.deepseek_v3.mtp import MTPLoss

from titan_ext import no_accelerator
from titan_ext.config_registry import moe_debug
from titan_ext.parallelize import parallelize
from titan_ext.toml_config import TomlConfigError, load, resolve
from titan_ext.toml_config.__main__ import apply_flags, main
from titan_ext.toml_config.draft import Draft, build
from titan_ext.toml_config.errors import Place
from titan_ext.toml_config.fill import fill
from titan_ext.toml_config.origins import leaves, to_toml
from titan_ext.toml_config.renames import say_renamed
from titan_ext.trainer import Trainer, extend_config

DEBUG = 'extends = "deepseek_v3.deepseek_v3_debugmodel"\n'
QWEN = 'extends = "qwen3.qwen3_moe_debug"\n'
DATA = "torchtitan.hf_datasets.text_datasets"

Loader = Callable[..., Trainer.Config]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, as working folder and on Python's path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def config(folder: Path) -> Loader:
    """Loads a text as run.toml, beside other files."""

    def load_text(text: str, **files: str) -> Trainer.Config:
        (folder / "run.toml").write_text(text)
        for name, other in files.items():
            (folder / f"{name}.toml").write_text(other)
        return load("run.toml")

    return load_text


def _model_text(config: Trainer.Config) -> str:
    """The whole model config; functions in it by name, not by address."""
    assert config.model_spec is not None
    return re.sub(r" at 0x[0-9a-f]+", "", str(config.model_spec.model.to_dict()))


# What it extends


def test_a_file_that_changes_nothing_is_the_base(config: Loader):
    ours, base = config(DEBUG), extend_config(deepseek_v3_debugmodel())
    assert type(ours) is Trainer.Config
    assert leaves(ours) == leaves(base)
    assert _model_text(ours) == _model_text(base)
    assert ours.model_spec is not None
    assert ours.model_spec.parallelize_fn is parallelize


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3.deepseek_v3_debugmodel",
        "torchtitan.models.deepseek_v3.deepseek_v3_debugmodel",
        "torchtitan.models.deepseek_v3.config_registry.deepseek_v3_debugmodel",
    ],
)
def test_a_base_by_every_name_that_titan_takes(config: Loader, name: str):
    assert leaves(config(f'extends = "{name}"\n')) == leaves(config(DEBUG))


def test_a_config_that_is_ours_already_is_used_as_it_is(config: Loader):
    assert leaves(config('extends = "titan_ext.moe_debug"\n')) == leaves(moe_debug())


def test_a_function_in_a_module_of_the_user(config: Loader, folder: Path):
    (folder / "my_runs.py").write_text(
        "from torchtitan.models.qwen3.config_registry import qwen3_moe_debug\n"
        "def short():\n"
        "    config = qwen3_moe_debug()\n"
        "    config.training.steps = 3\n"
        "    return config\n"
    )
    assert config('extends = "my_runs.short"\n').training.steps == 3


def test_a_chain_applies_from_its_base_up(folder: Path):
    (folder / "base").mkdir()
    (folder / "base" / "root.toml").write_text(
        DEBUG + "[training]\nsteps = 1\nseq_len = 512\nlocal_batch_size = 2\n"
    )
    (folder / "base" / "middle.toml").write_text(
        'extends = "root.toml"\n[training]\nsteps = 2\nseq_len = 1024\n'
    )
    (folder / "run.toml").write_text('extends = "base/middle.toml"\n[training]\nsteps = 3\n')
    training = load("run.toml").training
    assert (training.steps, training.seq_len, training.local_batch_size) == (3, 1024, 2)


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
        middle=DEBUG + '[activation_checkpoint]\npolicy = "memory_budget"\n',
    )
    assert isinstance(ours.activation_checkpoint, MemoryBudgetAC.Config)
    with pytest.raises(TomlConfigError, match=r"^middle.toml: Memory budget .* compiled"):
        load("middle.toml")


# Values


def test_values_of_every_kind(config: Loader):
    ours = config(
        DEBUG
        + """
dump_folder = "out"

[training]
max_norm = 2
dtype = "bfloat16"

[lr_scheduler]
decay_ratio = 1
total_steps = 50

[parallelism]
fsdp_wrap = "block"
module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["norm", "lm_head"]]
context_parallel_load_balancer = "None"

[override]
imports = ["my_package.plain", ["my_package.tuned", { block_size = 256 }]]

[validator]
enable = true
[validator.dataloader]
dataset = "c4_test"
"""
    )
    assert ours.dump_folder == "out"
    assert ours.training.max_norm == 2
    assert type(ours.training.max_norm) is int  # float | int
    assert ours.training.dtype == "bfloat16"
    assert type(ours.lr_scheduler.decay_ratio) is float
    assert ours.lr_scheduler.total_steps == 50
    assert ours.parallelism.fsdp_wrap == "block"
    assert ours.parallelism.module_fqns_per_model_part == [
        ["tok_embeddings", "layers.0"],
        ["norm", "lm_head"],
    ]
    assert ours.parallelism.context_parallel_load_balancer is None
    assert ours.override.imports == [
        "my_package.plain",
        ("my_package.tuned", {"block_size": 256}),
    ]
    assert ours.validator.enable
    dataloader = ours.validator.dataloader
    assert isinstance(dataloader, HuggingFaceTextDataLoader.Config)
    assert dataloader.dataset == "c4_test"
    assert not dataloader.infinite  # the other keys keep the value of what is extended


def test_a_list_replaces_and_a_numbered_item_changes(config: Loader):
    ours = config(
        'extends = "middle.toml"\n[optimizer.param_groups.1.optimizer_kwargs]\nlr = 1\n',
        middle=DEBUG
        + """
[[optimizer.param_groups]]
pattern = "norm"
optimizer_name = "AdamW"
optimizer_kwargs = { lr = 1e-3, weight_decay = 0.0 }
[[optimizer.param_groups]]
pattern = ".*"
optimizer_name = "Adam"
[optimizer.param_groups.optimizer_kwargs]
lr = 2e-3
betas = [0.9, 0.99]
""",
    )
    first, second = ours.optimizer.param_groups
    assert (first.pattern, first.optimizer_kwargs["lr"]) == ("norm", 1e-3)
    assert second.optimizer_name == "Adam"
    assert second.optimizer_kwargs == {"lr": 1.0, "betas": [0.9, 0.99]}


def test_one_key_of_the_optimizer_as_on_titans_command_line(config: Loader):
    ours = config(
        DEBUG + "[optimizer.param_groups.0.optimizer_kwargs]\nlr = 3e-4\nbetas = [0.8, 0.9]\n"
    )
    assert ours.optimizer == default_adamw(lr=3e-4, betas=(0.8, 0.9))


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


class Color(enum.Enum):
    RED = "the red one"
    BLUE = "the blue one"


@dataclass(kw_only=True, slots=True)
class Paint(Configurable.Config):
    color: Color = Color.RED
    where: Path | None = None
    layers: tuple[int, ...] = ()
    mix: dict[str, float] = field(default_factory=dict)


def _filled(cls: type, table: dict[str, Any]) -> Any:
    draft = Draft(cls, {}, Place(file="paint.toml"))
    fill(draft, table, Place(file="paint.toml"))
    return build(draft)


def test_enums_paths_tuples_and_dicts():
    paint = _filled(
        Paint, {"color": "BLUE", "where": "a/b", "layers": [1, 2], "mix": {"red": 1, "blue": 0.5}}
    )
    assert paint == Paint(
        color=Color.BLUE, where=Path("a/b"), layers=(1, 2), mix={"red": 1.0, "blue": 0.5}
    )
    with pytest.raises(
        TomlConfigError, match=r'^paint\.toml: color: expected one of "RED", "BLUE", got .* "GREEN"'
    ):
        _filled(Paint, {"color": "GREEN"})


# Policies and components


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("selective", SelectiveAC.Config),
        ("full", FullAC.Config),
        ("memory_budget", MemoryBudgetAC.Config),
        ("memory-budget", MemoryBudgetAC.Config),
        ("none", type(None)),
    ],
)
def test_every_policy_of_titan(config: Loader, name: str, policy: type):
    ours = config(DEBUG + f'[activation_checkpoint]\npolicy = "{name}"\n[compile]\nenable = true\n')
    assert type(ours.activation_checkpoint) is policy


def test_a_policys_own_keys(config: Loader):
    keys = "[activation_checkpoint]\npreserve_rng_state = false\n"
    kept = config(DEBUG + keys).activation_checkpoint
    assert kept == SelectiveAC.Config(preserve_rng_state=False)
    changed = config(
        'extends = "middle.toml"\n[activation_checkpoint]\npolicy = "full"\ndebug = true\n',
        middle=DEBUG + keys,
    ).activation_checkpoint
    assert changed == FullAC.Config(debug=True)  # another policy starts from its own defaults


def test_a_policy_that_is_added_later_is_found():
    class NewAC(FullAC):
        @dataclass(kw_only=True, slots=True)
        class Config(FullAC.Config):
            bits: int = 8

    @dataclass(kw_only=True, slots=True)
    class Section:
        activation_checkpoint: (
            Annotated[SelectiveAC.Config, tyro.conf.subcommand("selective")]
            | Annotated[NewAC.Config, tyro.conf.subcommand("new-one")]
        ) = field(default_factory=SelectiveAC.Config)

    filled = _filled(Section, {"activation_checkpoint": {"policy": "new_one", "bits": 4}})
    assert filled.activation_checkpoint == NewAC.Config(bits=4)


def test_another_data_loader(config: Loader):
    ours = config(
        DEBUG
        + f'[dataloader]\ncomponent = "{DATA}.InterleavedHuggingFaceTextDataLoader"\nseed = 7\n'
        + '[[dataloader.sources]]\ndataset = "c4"\nweight = 3\n'
        + '[[dataloader.sources]]\ndataset = "c4_test"\n'
    )
    dataloader = ours.dataloader
    assert isinstance(dataloader, InterleavedHuggingFaceTextDataLoader.Config)
    assert [(source.dataset, source.weight) for source in dataloader.sources] == [
        ("c4", 3.0),
        ("c4_test", 1),
    ]
    assert dataloader.seed == 7


def test_the_same_component_keeps_its_values_and_another_starts_anew(config: Loader):
    middle = DEBUG + '[dataloader]\ndataset = "c4"\nnum_workers = 3\n'
    same = f'[dataloader]\ncomponent = "{DATA}.HuggingFaceTextDataLoader"\n'
    ours = config('extends = "middle.toml"\n' + same, middle=middle).dataloader
    assert (getattr(ours, "dataset", None), getattr(ours, "num_workers", None)) == ("c4", 3)
    other = f'[dataloader]\ncomponent = "{DATA}.InterleavedHuggingFaceTextDataLoader"\n'
    ours = config('extends = "middle.toml"\n' + other, middle=middle).dataloader
    assert getattr(ours, "num_workers", None) == 0


# The model


def test_a_flavor_is_built_by_the_models_own_registry_and_the_loss_follows(config: Loader):
    ours = config(DEBUG + '[model]\nflavor = "16B"\n')
    wanted = extend_config(deepseek_v3_debugmodel())
    spec = model_registry("16B")
    assert ours.model_spec is not None
    assert ours.model_spec.flavor == "16B"
    assert ours.model_spec.parallelize_fn is parallelize
    wanted.model_spec = spec
    wanted = dataclasses.replace(wanted)
    assert len(_model_text(ours)) > 10000
    assert re.sub("FunctionalA", "A", _model_text(ours)) == _model_text(wanted)
    assert isinstance(ours.loss, ChunkedLossWrapper.Config)
    assert isinstance(ours.loss.loss_fn, CrossEntropyLoss.Config)
    assert ours.loss.loss_fn.global_vocab_size == 102400


def test_a_vocabulary_size_in_the_file_stays(config: Loader):
    ours = config(DEBUG + '[model]\nflavor = "16B"\n[loss.loss_fn]\nglobal_vocab_size = 77\n')
    assert isinstance(ours.loss, ChunkedLossWrapper.Config)
    assert ours.loss.loss_fn == CrossEntropyLoss.Config(global_vocab_size=77)


def test_multi_token_prediction(config: Loader):
    ours = config(
        DEBUG
        + "[model]\nnum_mtp_layers = 1\n"
        + '[loss]\ncomponent = "torchtitan.models.deepseek_v3.mtp.MTPLoss"\nmtp_scale = 0.1\n'
    )
    assert ours.model_spec is not None
    assert len(getattr(ours.model_spec.model, "mtp_layers", [])) == 1
    assert ours.loss == MTPLoss.Config(mtp_scale=0.1, global_vocab_size=2048)


def test_choices_of_the_base_function_stay_when_another_is_changed(config: Loader, folder: Path):
    (folder / "my_adapters.py").write_text(
        "from torchtitan.components.lora import LoRAConverter\n"
        "from torchtitan.models.qwen3.config_registry import model_registry, qwen3_moe_debug\n"
        "def adapters():\n"
        "    config = qwen3_moe_debug()\n"
        "    model_registry('0.6B')  # made and thrown away\n"
        "    config.model_spec = model_registry('debugmodel_moe', attn_backend='varlen',\n"
        "        converters=[LoRAConverter.Config(rank=3)])\n"
        "    return config\n"
    )
    base = 'extends = "my_adapters.adapters"\n'
    ours = config(base + '[model]\nflavor = "30B-A3B"\n')
    assert ours.model_spec is not None
    assert ours.model_spec.flavor == "30B-A3B"
    text = repr(ours.model_spec.model)
    assert "VarlenAttention" in text
    assert "LoRALinear" in text
    assert "FlexAttention" not in text
    resolved = resolve("run.toml")
    assert resolved.model["attn_backend"] == "varlen"
    assert resolved.origins["model.flavor"] == "run.toml"
    assert resolved.origins["model.attn_backend"] == "my_adapters.adapters"
    assert resolved.values["model.converters.0.rank"] == 3


def test_lora_in_a_file(config: Loader):
    ours = config(
        QWEN
        + '[[model.converters]]\ncomponent = "torchtitan.components.lora.LoRAConverter"\n'
        + 'rank = 4\nalpha = 8\ntarget_modules = ["wo"]\n'
    )
    assert ours.model_spec is not None
    adapters = [fqn for fqn, *_ in ours.model_spec.model.traverse(_linear(), recurse=True)]
    assert adapters
    assert all(fqn.endswith("wo") for fqn in adapters)


def _linear() -> type:
    from torchtitan.components.lora import _get_lora_cls
    from torchtitan.models.common.linear import Linear

    return _get_lora_cls(Linear).Config


FLOAT8 = """
[[model.converters]]
component = "torchtitan.components.quantization.Float8LinearConverter"
emulate = true
filter_fqns = ["lm_head", "router.gate"]
"""


def test_quantization_in_a_file(config: Loader):
    ours = config(DEBUG + FLOAT8)
    assert "Float8Linear" in repr(ours.model_spec)


def test_a_converter_follows_compile(config: Loader, folder: Path):
    compiled = "[compile]\nenable = true\n"
    plain = resolve_text(folder, DEBUG + FLOAT8)
    assert plain.model["converters"][0].model_compile_enabled is False
    # Emulation and compile exclude each other: Titan's converter sees that compile is on.
    with pytest.raises(TomlConfigError, match=r"^run.toml: model: .*float8 is only supported"):
        config(DEBUG + compiled + FLOAT8)


def resolve_text(folder: Path, text: str) -> Any:
    (folder / "run.toml").write_text(text)
    return resolve("run.toml")


# Names of TorchTitan's main branch


def test_a_name_of_titans_main_branch_is_read_and_said_once(
    config: Loader, caplog: pytest.LogCaptureFixture
):
    say_renamed.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert config(DEBUG + "[training]\nmax_context_length = 640\n").training.seq_len == 640
    said = [record.message for record in caplog.records if "max_context_length" in record.message]
    assert said == [
        "run.toml: training.max_context_length is TorchTitan main's name; "
        "read as training.seq_len, its name in 0.3."
    ]


# Where values come from


def test_every_value_has_an_origin(folder: Path):
    (folder / "middle.toml").write_text(
        DEBUG + '[training]\nsteps = 2\nseq_len = 512\n[activation_checkpoint]\npolicy = "full"\n'
    )
    (folder / "run.toml").write_text('extends = "middle.toml"\n[training]\nsteps = 3\n')
    resolved = resolve("run.toml")
    assert resolved.files == ("middle.toml", "run.toml")
    assert resolved.origins.keys() == resolved.values.keys()
    origins = resolved.origins
    assert origins["training.steps"] == "run.toml"
    assert origins["training.seq_len"] == "middle.toml"
    assert origins["training.local_batch_size"] == "deepseek_v3.deepseek_v3_debugmodel"
    assert origins["activation_checkpoint.policy"] == "middle.toml"
    assert origins["activation_checkpoint.debug"] == 'default of the policy "full", see middle.toml'
    if no_accelerator.needed():
        assert origins["training.disable_cuda_graphs"] == "titan_ext, for this machine"


def test_a_list_that_is_replaced_takes_the_origins_of_its_items_along(folder: Path):
    (folder / "middle.toml").write_text(
        DEBUG + "[optimizer.param_groups.0.optimizer_kwargs]\nlr = 1e-4\n"
    )
    (folder / "run.toml").write_text(
        'extends = "middle.toml"\n[[optimizer.param_groups]]\n'
        'pattern = ".*"\noptimizer_name = "Adam"\noptimizer_kwargs = { lr = 1e-3 }\n'
    )
    middle, run = resolve("middle.toml").origins, resolve("run.toml").origins
    key = "optimizer.param_groups.0.optimizer_kwargs"
    assert middle[f"{key}.lr"] == "middle.toml"
    assert middle[f"{key}.eps"] == "deepseek_v3.deepseek_v3_debugmodel"
    assert run[f"{key}.lr"] == "run.toml"


def test_the_command_line_wins_and_is_named(folder: Path):
    (folder / "run.toml").write_text(DEBUG + "[training]\nsteps = 3\nseq_len = 512\n")
    flags = ["--training.steps", "5", "--training.seq-len=512", "activation_checkpoint:full"]
    resolved = apply_flags(resolve("run.toml"), flags)
    assert type(resolved.config) is Trainer.Config
    assert resolved.config.training.steps == 5
    assert isinstance(resolved.config.activation_checkpoint, FullAC.Config)
    assert resolved.origins["training.steps"] == "command line"
    assert resolved.origins["training.seq_len"] == "command line"  # given, if to the same value
    assert resolved.origins["activation_checkpoint.policy"] == "command line"
    assert resolved.origins["training.gc_freq"] == "deepseek_v3.deepseek_v3_debugmodel"


def test_the_command_prints_one_value_a_line(folder: Path, capsys: pytest.CaptureFixture):
    (folder / "run.toml").write_text(DEBUG + "[training]\nsteps = 3\n")
    assert main(["run.toml", "--debug.seed", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# deepseek_v3.deepseek_v3_debugmodel <- run.toml"
    assert "training.steps = 3  # from run.toml" in lines
    assert "debug.seed = 7  # from command line" in lines
    assert 'model.flavor = "debugmodel"  # from deepseek_v3.deepseek_v3_debugmodel' in lines
    assert f'dataloader.component = "{DATA}.HuggingFaceTextDataLoader"  # from ' in "\n".join(lines)


def test_the_command_says_what_is_wrong_with_a_file(folder: Path, capsys: pytest.CaptureFixture):
    (folder / "run.toml").write_text(DEBUG + "steps = 3\n")
    assert main(["run.toml"]) == 1
    assert capsys.readouterr().err.startswith("run.toml: steps: no such key")
    assert main([]) == 2


@pytest.mark.parametrize("base", ["deepseek_v3.deepseek_v3_16b", "qwen3.qwen3_30b_a3b"])
def test_what_the_command_prints_is_a_toml_file_for_the_same_config(config: Loader, base: str):
    extends = f'extends = "{base}"\n'
    wanted = leaves(config(extends))
    written = "".join(f"{key} = {to_toml(value)}\n" for key, value in wanted.items())
    assert leaves(config(extends + written)) == wanted
