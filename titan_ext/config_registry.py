"""The door that Titan knocks on: ``--module titan_ext --config NAME`` calls ``NAME()`` here.

NAME is a TOML file (``train_configs/moe_debug.toml``) or any config function of Titan's own models
(``deepseek_v3_16b``). Neither is written out below: ``__getattr__`` finds them.

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

__all__ = ["titan_configs"]

_NOT_DECODERS = ("flux",)  # specs.REFUSED_MODELS says why


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
    nearest = difflib.get_close_matches(name, titan_configs(), n=3)
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
    raise ValueError(
        f"--config {name}: expected the path of a .toml file, or a config function of one of "
        f"TorchTitan's language models{hint}"
    )


def __dir__() -> list[str]:
    return sorted([*globals(), *titan_configs()])
