# SPDX-License-Identifier: BSD-3-Clause
"""Titan's entry point: ``--module titan_ext --config NAME`` calls ``NAME()`` here.

NAME is a TOML file (``train_configs/moe_debug.toml``) or any config function of Titan's own models
(``deepseek_v3_16b``). Neither is written out below: ``__getattr__`` finds them.

This module imports torch and Titan only when someone asks for a config. Titan mistakes an
ImportError in this module for a missing module; inside a config function it shows the error.
"""

import functools
import os
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_ext.mistakes import Mistakes, checks_later, end_with_messages
from titan_ext.names import did_you_mean, log_on_one_node, warn_once

if TYPE_CHECKING:
    from titan_ext.trainer import Trainer

_FILE = "config_registry"
_NOT_DECODERS = ("flux",)  # specs.REFUSED_MODELS says why


@functools.cache
def _all_titan_configs() -> dict[str, str]:
    """Titan's config functions, name -> module, read from its sources: some import extras (fla)."""
    spec = util.find_spec("torchtitan")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    found: dict[str, str] = {}
    for source in sorted(Path(spec.submodule_search_locations[0]).glob(f"models/*/{_FILE}.py")):
        names = re.findall(r"^def ([a-z]\w*)\(\) -> \S*Trainer\.Config:", source.read_text(), re.M)
        found |= dict.fromkeys(names, f"torchtitan.models.{source.parent.name}.{_FILE}")
    return found


@functools.cache
def titan_configs() -> dict[str, str]:
    """Titan's config functions that we extend: name -> module."""
    found = _all_titan_configs()
    return {name: found[name] for name in found if _model(found[name]) not in _NOT_DECODERS}


def _model(module: str) -> str:
    return module.split(".")[2]


def _config(name: str) -> "Trainer.Config":
    """The config ``name``, checked with the flags that stand beside it on the command line."""
    from titan_ext import flags
    from titan_ext.limits import world_size, wrong_degrees
    from titan_ext.toml_config import resolve
    from titan_ext.toml_config.dump import remember_base
    from titan_ext.trainer import extend_config

    _prepare_log()
    given = flags.of_this_command(name)
    if name.endswith(".toml"):
        config = resolve(name, given).config
    else:
        warn_once()
        with checks_later():
            config = extend_config(getattr(import_module(titan_configs()[name]), name)())
        config = replace(flags.with_flags(config, given) if given else config)
        remember_base(config, f"{_model(titan_configs()[name])}.{name}", {})
    Mistakes(wrong_degrees(config, world_size(config))).raise_all()
    return config


def _prepare_log() -> None:
    log_on_one_node()
    handler = "titan_ext.guards.folder.register_handler"
    os.environ.setdefault("TITAN_STRUCT_LOGGER_HANDLERS", handler)


def __getattr__(name: str) -> Callable[[], Any]:
    if name.startswith("_"):
        raise AttributeError(name)
    end_with_messages(name)
    if name.endswith(".toml") or name in titan_configs():
        return functools.partial(_config, name)
    if name in _all_titan_configs():
        from titan_ext.specs import REFUSED_MODELS

        model = _model(_all_titan_configs()[name])
        raise ValueError(
            f"--config {name}: titan_ext does not serve {model}: {REFUSED_MODELS[model]}."
        )
    raise ValueError(
        f"--config {name}: expected the path of a .toml file, or a config function of one of "
        f"TorchTitan's language models{did_you_mean(name, titan_configs())}"
    )


def __dir__() -> list[str]:
    return sorted([*globals(), *titan_configs()])
