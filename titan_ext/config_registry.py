# SPDX-License-Identifier: BSD-3-Clause
"""Titan's entry point: ``--module titan_ext --config NAME`` calls ``NAME()`` here.

NAME is a TOML file (``my_run.toml``; a shipped one also by its name, ``moe_debug``), any config
function of Titan's own models (``deepseek_v3_16b``), or one of the user's as ``module.function``.
``find_config`` tells which; ``__getattr__`` finds them.

This module imports torch and Titan only when someone asks for a config. Titan mistakes an
ImportError in this module for a missing module; inside a config function it shows the error.
"""

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import util
from itertools import takewhile
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
from titan_ext.toml_config.files import read_chain

if TYPE_CHECKING:
    from titan_ext.toml_config.resolve import Resolved
    from titan_ext.trainer import Trainer

_FILE = "config_registry"
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


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


def listing() -> Iterator[str]:
    """Lines for a reader: the shipped files, and Titan's models with their config functions."""
    yield "shipped TOML files:"
    for name, path in shipped_configs().items():
        comment = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
        sentence = " ".join(line.strip("# ") for line in comment).partition(". ")[0]
        yield f"  {name:20} {sentence}"
    yield "config functions of TorchTitan, by model:"
    by_model: dict[str, list[str]] = {}
    for name, module in titan_configs().items():
        by_model.setdefault(model_of(module), []).append(name)
    for model, names in by_model.items():
        yield f"  {model}\n    " + "\n    ".join(names)


def model_of(module: str) -> str:
    """The name of a Titan model, of the module of its config functions."""
    return module.split(".")[2]


def find_config(name: str) -> Path | str:
    """The TOML file that ``name`` means, or what a file that extends a function has as ``extends``.

    A shipped file is found by its name. Where Titan has a config function of that name, the
    function comes first, and ``NAME.toml`` is the file. ``module.function`` is taken as it is.
    Raises ValueError if it is none of these.
    """
    if name.endswith(".toml"):
        return toml_file(name)
    if name in titan_configs():
        return f"{model_of(titan_configs()[name])}.{name}"
    if name in shipped_configs():
        return shipped_configs()[name]
    if name in _all_titan_configs():
        model = model_of(_all_titan_configs()[name])
        raise ValueError(
            f"--config {name}: titan_ext does not serve {model}: {REFUSED_MODELS[model]}."
        )
    if _FUNCTION.fullmatch(name) and not Path(name).exists():
        return name
    raise ValueError(
        f"--config {name}: expected the path of a .toml file, the name of a shipped one, a config "
        "function of one of TorchTitan's language models, or one of yours as MODULE.FUNCTION"
        f"{did_you_mean(name, [*shipped_configs(), *titan_configs()])}"
    )


def check_config(name: str) -> None:
    """Raise ValueError for a config that is not there, or is no TOML; torch is not imported."""
    if isinstance(found := find_config(name), Path):
        read_chain(found)


def resolve_config(name: str, flags: Sequence[str]) -> "Resolved":
    """The config ``name`` (``find_config``) with flags on top, and where its values come from."""
    check_config(name)
    from titan_ext.toml_config.resolve import resolve

    found = find_config(name)
    if isinstance(found, Path):
        here = found.is_absolute() and found.is_relative_to(Path.cwd())
        return resolve(found.relative_to(Path.cwd()) if here else found, flags)
    return resolve(name, flags, function=found)


def extends_in(folder: Path, config: str) -> str:
    """What a file in ``folder`` says to extend ``config``."""
    found = find_config(config)
    if not isinstance(found, Path):
        return found
    return found.name if toml_file(found.name, folder) == found else os.path.relpath(found, folder)


def _config(name: str) -> "Trainer.Config":
    """The config ``name``, checked with the flags that stand beside it on the command line."""
    from titan_ext.limits import world_size, wrong_degrees

    log_on_one_node()
    handler = "titan_ext.guards.start.register_handler"
    os.environ.setdefault("TITAN_STRUCT_LOGGER_HANDLERS", handler)
    config = resolve_config(name, _flags_beside(name)).config
    Mistakes(wrong_degrees(config, world_size(config))).raise_all()
    return config


def check_command(words: Sequence[str]) -> None:
    """``check_config`` of the config in a command line, if it is one for titan_ext."""
    known, _ = _module_and_config(words)
    if known.module == "titan_ext" and known.config:
        check_config(known.config)


def _flags_beside(config: str) -> list[str]:
    """The flags of this program's command line, if it has ``--config`` with this name."""
    known, flags = _module_and_config(sys.argv[1:])
    return flags if known.config == config else []


def _module_and_config(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--module", nargs="?")  # Titan refuses one without its value
    parser.add_argument("--config", nargs="?")
    return parser.parse_known_args(words)


def __getattr__(name: str) -> Callable[[], Any]:
    if name.startswith("_"):
        raise AttributeError(name)
    end_with_messages(name)
    check_config(name)  # now, when Titan asks for the function
    return functools.partial(_config, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *titan_configs(), *shipped_configs()])
