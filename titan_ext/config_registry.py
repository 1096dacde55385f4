# SPDX-License-Identifier: BSD-3-Clause
"""Titan's entry point: ``--module titan_ext --config NAME`` calls ``NAME()`` here.

NAME is a TOML file (``my_run.toml``; a shipped one also by its name, ``moe_debug``) or any config
function of Titan's own models (``deepseek_v3_16b``). ``find_config`` tells which; ``__getattr__``
finds them.

This module imports torch and Titan only when someone asks for a config. Titan mistakes an
ImportError in this module for a missing module; inside a config function it shows the error.
"""

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_ext.names import (
    REFUSED_MODELS,
    Mistakes,
    did_you_mean,
    end_with_messages,
    log_on_one_node,
    shipped_configs,
    toml_file,
)

if TYPE_CHECKING:
    from titan_ext.toml_config.resolve import Resolved
    from titan_ext.trainer import Trainer

_FILE = "config_registry"


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
    return {name: found[name] for name in found if model_of(found[name]) not in REFUSED_MODELS}


def model_of(module: str) -> str:
    """The name of a Titan model, of the module of its config functions."""
    return module.split(".")[2]


def find_config(name: str) -> Path | str:
    """The TOML file that ``name`` means, or ``name`` itself if it is one of ``titan_configs``.

    A shipped file is found by its name. Where Titan has a config function of that name, the
    function comes first, and ``NAME.toml`` is the file. Raises ValueError if it is neither.
    """
    if name.endswith(".toml"):
        return toml_file(name)
    if name in titan_configs():
        return name
    if name in shipped_configs():
        return shipped_configs()[name]
    if name in _all_titan_configs():
        model = model_of(_all_titan_configs()[name])
        raise ValueError(
            f"--config {name}: titan_ext does not serve {model}: {REFUSED_MODELS[model]}."
        )
    raise ValueError(
        f"--config {name}: expected the path of a .toml file, the name of a shipped one, or a "
        "config function of one of TorchTitan's language models"
        f"{did_you_mean(name, [*shipped_configs(), *titan_configs()])}"
    )


def resolve_config(name: str, flags: Sequence[str]) -> "Resolved":
    """The config ``name`` (``find_config``) with flags on top, and where its values come from."""
    from titan_ext.toml_config.resolve import resolve

    found = find_config(name)
    if isinstance(found, Path):
        here = found.is_absolute() and found.is_relative_to(Path.cwd())
        return resolve(found.relative_to(Path.cwd()) if here else found, flags)
    return resolve(name, flags, function=extends_name(found))


def extends_name(function: str) -> str:
    """What a TOML file that extends a config function of Titan's has as ``extends``."""
    return f"{model_of(titan_configs()[function])}.{function}"


def _config(name: str) -> "Trainer.Config":
    """The config ``name``, checked with the flags that stand beside it on the command line."""
    from titan_ext.limits import world_size, wrong_degrees

    log_on_one_node()
    handler = "titan_ext.guards.start.register_handler"
    os.environ.setdefault("TITAN_STRUCT_LOGGER_HANDLERS", handler)
    config = resolve_config(name, _flags_beside(name)).config
    Mistakes(wrong_degrees(config, world_size(config))).raise_all()
    return config


def _flags_beside(config: str) -> list[str]:
    """The flags of this program's command line, if it has ``--config`` with this name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--module")
    parser.add_argument("--config")
    known, flags = parser.parse_known_args(sys.argv[1:])
    return flags if known.config == config else []


def __getattr__(name: str) -> Callable[[], Any]:
    if name.startswith("_"):
        raise AttributeError(name)
    end_with_messages(name)
    find_config(name)  # now, when Titan asks for the function
    return functools.partial(_config, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *titan_configs(), *shipped_configs()])
