"""The door that Titan knocks on: ``--module titan_ext --config NAME`` calls ``NAME()`` here.

NAME is a config of ours below, a TOML file (``train_configs/moe_debug.toml``), or any config
function of Titan's own models (``deepseek_v3_16b``): the latter two are found by ``__getattr__``.

Nothing of torch or Titan is imported before a config is asked for. Titan takes an ImportError in
this module for a module that does not exist; inside a config function it comes through.
"""

import ast
import difflib
import functools
from collections.abc import Callable
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_ext.trainer import Trainer

__all__ = ["moe_debug", "titan_configs"]

_NOT_DECODERS = ("flux",)  # specs.REFUSED_MODELS says why


def moe_debug() -> "Trainer.Config":
    """The DeepSeek-V3 debug model on Python's standard library: ``make train``.

    Sized for 4 processes on a small machine with no GPU: EP 2 x FSDP, 30 steps in minutes. It
    saves a checkpoint every 10 steps and resumes from the latest one.
    """
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import TrainingConfig
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    from titan_ext.data.stdlib_corpus import STDLIB_CORPUS, default_tokenizer_path
    from titan_ext.trainer import extend_config

    config = extend_config(deepseek_v3_debugmodel())
    config.hf_assets_path = str(default_tokenizer_path())
    config.dump_folder = "./outputs/moe_debug"
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset=STDLIB_CORPUS)
    config.training = TrainingConfig(
        local_batch_size=4, seq_len=256, steps=30, disable_cuda_graphs=True
    )
    config.parallelism.expert_parallel_degree = 2
    config.optimizer = default_adamw(lr=8e-4)
    # No decay: a second run goes on for 30 more steps, so there is no last step to decay to.
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=5, decay_ratio=0.0)
    config.metrics = MetricsProcessor.Config(log_freq=1, enable_tensorboard=True)
    config.checkpoint = CheckpointManager.Config(
        enable=True, interval=10, last_save_model_only=False, keep_latest_k=2
    )
    config.debug.seed = 42
    return config


@functools.cache
def titan_configs() -> dict[str, str]:
    """Titan's config functions that we extend: name -> module, read without importing any.

    Importing a model's package can need an extra (qwen3_5: fla), so the names are taken from the
    sources.
    """
    return {
        name: module
        for name, module in _all_titan_configs().items()
        if module.split(".")[2] not in _NOT_DECODERS
    }


@functools.cache
def _all_titan_configs() -> dict[str, str]:
    spec = util.find_spec("torchtitan")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    models = Path(spec.submodule_search_locations[0]) / "models"
    found = {}
    for source in sorted(models.glob("*/config_registry.py")):
        for node in ast.parse(source.read_text()).body:
            if isinstance(node, ast.FunctionDef) and _is_config_function(node):
                found[node.name] = f"torchtitan.models.{source.parent.name}.config_registry"
    return found


def _is_config_function(node: ast.FunctionDef) -> bool:
    returns = ast.unparse(node.returns) if node.returns else ""
    takes_nothing = not (node.args.args or node.args.posonlyargs or node.args.kwonlyargs)
    return not node.name.startswith("_") and takes_nothing and returns.endswith("Trainer.Config")


def _extended_titan_config(name: str) -> "Trainer.Config":
    from titan_ext.trainer import extend_config

    return extend_config(getattr(import_module(titan_configs()[name]), name)())


def _load_toml(path: str) -> "Trainer.Config":
    from titan_ext.toml_config import load

    return load(path)


def __getattr__(name: str) -> Callable[[], Any]:
    if name.endswith(".toml"):
        return functools.partial(_load_toml, name)
    if name in titan_configs():
        return functools.partial(_extended_titan_config, name)
    if name.startswith("_"):
        raise AttributeError(name)
    if name in _all_titan_configs():
        from titan_ext.specs import REFUSED_MODELS

        model = _all_titan_configs()[name].split(".")[2]
        raise ValueError(
            f"--config {name}: titan_ext does not serve {model}: {REFUSED_MODELS[model]}."
        )
    known = [*titan_configs(), "moe_debug"]
    nearest = difflib.get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
    raise ValueError(
        f"--config {name}: expected a path to a .toml file, or one of the config functions "
        f"of titan_ext and TorchTitan's models{hint}"
    )


def __dir__() -> list[str]:
    return sorted([*globals(), *titan_configs()])
