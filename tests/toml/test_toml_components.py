"""Policies, components and model choices in a TOML file."""

import cProfile
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import tyro
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.deepseek_v3.mtp import MTPLoss

from tests.helpers.toml_files import DATA, DEBUG, QWEN, Loader, filled, model_text, resolve_text
from titan_ext.components.lora import lora_settings
from titan_ext.config_registry.resolve import load, resolve
from titan_ext.parallelize.passes import parallelize
from titan_ext.run.trainer import extend_config
from titan_ext.toml.convert import dump


def test_a_policys_own_keys(config: Loader):
    keys = "[activation_checkpoint]\npreserve_rng_state = false\n"
    kept = config(DEBUG + keys).activation_checkpoint
    assert kept == SelectiveAC.Config(preserve_rng_state=False)
    middle = DEBUG + keys
    more = 'extends = "middle.toml"\n[activation_checkpoint]\ndebug = true\n'
    wanted = SelectiveAC.Config(preserve_rng_state=False, debug=True)
    assert config(more, middle=middle).activation_checkpoint == wanted
    same = more.replace("debug", 'policy = "selective"\ndebug')
    assert config(same, middle=middle).activation_checkpoint == wanted
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

    section = filled(Section, {"activation_checkpoint": {"policy": "new_one", "bits": 4}})
    assert section.activation_checkpoint == NewAC.Config(bits=4)


def test_the_same_component_keeps_its_values(config: Loader):
    """Another one starts anew: test_three_files_in_turn."""
    middle = DEBUG + '[dataloader]\ndataset = "c4"\nnum_workers = 3\n'
    same = f'[dataloader]\ncomponent = "{DATA}.HuggingFaceTextDataLoader"\n'
    ours = config('extends = "middle.toml"\n' + same, middle=middle).dataloader
    assert (getattr(ours, "dataset", None), getattr(ours, "num_workers", None)) == ("c4", 3)


def test_a_flavor_is_built_by_the_models_own_registry_and_the_loss_follows(config: Loader):
    ours = config(DEBUG + '[model]\nflavor = "16B"\n')
    wanted = extend_config(deepseek_v3_debugmodel())
    spec = model_registry("16B")
    assert ours.model_spec.flavor == "16B"
    assert ours.model_spec.parallelize_fn is parallelize
    wanted.model_spec = spec
    wanted = dataclasses.replace(wanted)
    assert len(model_text(ours)) > 10000
    text = model_text(ours).replace("FunctionalA", "A").replace(", 'sends_scores': False", "")
    assert text == model_text(wanted)
    assert isinstance(ours.loss, ChunkedLossWrapper.Config)
    assert isinstance(ours.loss.loss_fn, CrossEntropyLoss.Config)
    assert ours.loss.loss_fn.global_vocab_size == 102400


def test_a_vocabulary_size_in_the_file_stays(config: Loader):
    """Even that of the base; and a loss that the file chooses gets one."""
    ours = config(DEBUG + '[model]\nflavor = "16B"\n[loss.loss_fn]\nglobal_vocab_size = 2048\n')
    component = '[loss]\ncomponent = "torchtitan.components.loss.ChunkedLossWrapper"\n'
    for loss in (ours.loss, config(DEBUG + component).loss):
        assert isinstance(loss, ChunkedLossWrapper.Config)
        assert loss.loss_fn == CrossEntropyLoss.Config(global_vocab_size=2048)


def test_a_loss_without_a_vocabulary_in_the_base_keeps_none(config: Loader, folder: Path):
    (folder / "my_loss.py").write_text(
        "from torchtitan.components.loss import CrossEntropyLoss\n"
        "from torchtitan.models.qwen3.config_registry import qwen3_moe_debug\n"
        "def plain():\n"
        "    config = qwen3_moe_debug()\n"
        "    config.loss = CrossEntropyLoss.Config()\n"
        "    return config\n"
    )
    assert config('extends = "my_loss.plain"\n').loss == CrossEntropyLoss.Config()


def test_multi_token_prediction(config: Loader):
    ours = config(
        DEBUG
        + "[model]\nnum_mtp_layers = 1\n"
        + '[loss]\ncomponent = "torchtitan.models.deepseek_v3.mtp.MTPLoss"\nmtp_scale = 0.1\n'
    )
    assert len(getattr(ours.model_spec.model, "mtp_layers", [])) == 1
    assert ours.loss == MTPLoss.Config(mtp_scale=0.1, global_vocab_size=2048)


@pytest.mark.usefixtures("accelerator")  # without one, attention is exchanged
def test_choices_of_the_base_function_stay_when_another_is_changed(config: Loader, folder: Path):
    (folder / "my_adapters.py").write_text(
        "from torchtitan.components.lora import LoRAConverter\n"
        "from torchtitan.models.qwen3.config_registry import model_registry, qwen3_moe_debug\n"
        "def adapters():\n"
        "    config = qwen3_moe_debug()\n"
        "    model_registry('0.6B')  # made and thrown away\n"
        "    config.model_spec = model_registry('debugmodel_moe', attn_backend='varlen',\n"
        "        converters=[LoRAConverter.Config(rank=3)])\n"
        "    model_registry('1.7B')  # and so is this one\n"
        "    return config\n"
    )
    base = 'extends = "my_adapters.adapters"\n'
    ours = config(base + '[model]\nflavor = "30B-A3B"\n')
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


CONVERTER = """
from dataclasses import dataclass
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.qwen3.config_registry import model_registry, qwen3_moe_debug

class Converter(QuantizationConverter):
    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        pass

    def __init__(self, config):
        self.config = config

    def convert(self, model_config):
        model_config.dim = 1 if self.config.model_compile_enabled else 2  # for the test to see
        return model_config

def converted():
    config = qwen3_moe_debug()
    config.model_spec = model_registry("debugmodel_moe", converters=[Converter.Config()])
    return config
"""


def test_a_converter_follows_compile(folder: Path):
    (folder / "my_converter.py").write_text(CONVERTER)
    compiled = "[compile]\nenable = true\n"
    ours = '[[model.converters]]\ncomponent = "my_converter.Converter"\n'
    base = 'extends = "my_converter.converted"\n'
    told = "model_compile_enabled = false\n"
    for text, dim in [
        (QWEN + ours, 2),
        (QWEN + ours + compiled, 1),
        (QWEN + ours + told + compiled, 2),
        (base, 2),
        (base + compiled, 1),
        (base + "[compile]\nenable = true\ncomponents = ['loss']\n", 2),
    ]:
        spec = resolve_text(folder, text).config.model_spec
        assert spec.model.dim == dim, text


def test_a_registry_with_keyword_arguments(folder: Path):
    (folder / "my_registry.py").write_text(
        "from torchtitan.models import qwen3\n"
        "from torchtitan.models.qwen3.config_registry import qwen3_moe_debug\n"
        "def model_registry(flavor, **choices):\n"
        "    return qwen3.model_registry(flavor, **choices)\n"
        "def mine():\n"
        "    config = qwen3_moe_debug()\n"
        "    config.model_spec = model_registry('debugmodel_moe', attn_backend='varlen')\n"
        "    return config\n"
    )
    resolved = resolve_text(folder, 'extends = "my_registry.mine"\n[model]\nflavor = "0.6B"\n')
    assert resolved.model == {"flavor": "0.6B", "attn_backend": "varlen"}
    assert resolved.config.model_spec.flavor == "0.6B"


def test_calls_of_the_registry_are_seen_however_they_are_spelled(folder: Path):
    """By another name, inside of another function, while a profiler looks on."""
    (folder / "my_helper.py").write_text(
        "from torchtitan.models.qwen3 import model_registry as make\n"
        "def spec():\n"
        "    return make('0.6B', 'varlen')\n"
    )
    (folder / "my_spelling.py").write_text(
        "import my_helper\n"
        "from torchtitan.models.qwen3.config_registry import qwen3_moe_debug\n"
        "def mine():\n"
        "    config = qwen3_moe_debug()\n"
        "    config.model_spec = my_helper.spec()\n"
        "    return config\n"
    )
    resolved = resolve_text(folder, 'extends = "my_spelling.mine"\n[model]\nflavor = "1.7B"\n')
    assert resolved.model["attn_backend"] == "varlen"
    assert resolved.config.model_spec.flavor == "1.7B"
    assert cProfile.Profile().runcall(resolve, "run.toml").model == resolved.model
    import torchtitan.models.qwen3 as stock

    assert stock.model_registry.__module__ == "torchtitan.models.qwen3"
    assert not hasattr(stock.model_registry, "__wrapped__")  # Titan's own is as it was


_FUNCTIONS = {
    "deepseek_v3": "deepseek_v3_debugmodel",
    "kimi_k2_7": "kimi_k2_5_debugmodel",
    "muse_glimmer": "muse_glimmer_debugmodel",
}
_CHANGED = """
from torchtitan.models.{model} import config_registry, model_registry  # noqa: F401
def stock():
    return config_registry.{function}()
def changed():
    config = config_registry.{function}()
    model = config.model_spec.model
    model.layers = model.layers[:2]
    model.layers[1].attention_norm.eps = 0.25
    model.norm.eps = 0.5
    return config
"""
_LORA = """
[[model.converters]]
component = "torchtitan.components.lora.LoRAConverter"
target_modules = ["wo"]
[[optimizer.param_groups]]
pattern = ".*"
optimizer_name = "AdamW"
"""


@pytest.mark.parametrize("model", _FUNCTIONS)
def test_what_a_function_made_stays(model: str, folder: Path, config: Loader):
    text = _CHANGED.format(model=model, function=_FUNCTIONS[model])
    (folder / f"mine_{model}.py").write_text(text)
    for name in ("stock", "changed"):
        of_function = config(f'extends = "mine_{model}.{name}"\n')
        (folder / "whole.toml").write_text(dump(of_function))  # names every key, [model] too
        assert model_text(load("whole.toml")) == model_text(of_function)
    adapted: Any = config(f'extends = "mine_{model}.stock"\n' + _LORA).model_spec
    assert lora_settings(adapted.model) == {(8, 16.0)}
