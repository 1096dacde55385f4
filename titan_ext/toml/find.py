# SPDX-License-Identifier: BSD-3-Clause
"""Which config a name means: a TOML file, a config function of Titan's, or one of the user's.

It reads files and Titan's sources and imports no torch, so that a wrong name or a missing file is
told at once.
"""

import argparse
import functools
import os
import re
from collections.abc import Iterator, Sequence
from importlib import util
from itertools import takewhile
from pathlib import Path

from titan_ext.base.messages import (
    REFUSED_MODELS,
    did_you_mean,
    misspelt_file,
    shipped_configs,
    toml_file,
)
from titan_ext.toml.files import read_chain

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
        yield f"  {name + '.toml':30} {sentence}"
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

    A bare name is a function of Titan's, a name that ends in ``.toml`` a file; one that is not
    there may be shipped. ``module.function`` is taken as it is. Raises ValueError if it is none of
    these.
    """
    if name.endswith(".toml"):
        return toml_file(name)
    if name in titan_configs():
        return f"{model_of(titan_configs()[name])}.{name}"
    if name in shipped_configs():
        raise ValueError(
            f"--config {name}: TorchTitan has no config function of that name; did you mean the "
            f"shipped file {name}.toml?"
        )
    if name in _all_titan_configs():
        model = model_of(_all_titan_configs()[name])
        raise ValueError(
            f"--config {name}: titan_ext does not serve {model}: {REFUSED_MODELS[model]}."
        )
    if problem := misspelt_file(name):
        raise ValueError(f"--config {name}: {problem}")
    if _FUNCTION.fullmatch(name) and not Path(name).exists():
        return name
    raise ValueError(
        f"--config {name}: expected a .toml file, yours or a shipped one, a config function of one "
        "of TorchTitan's language models, or one of yours as MODULE.FUNCTION"
        f"{did_you_mean(name, [*(f'{n}.toml' for n in shipped_configs()), *titan_configs()])}"
    )


def check_config(name: str) -> None:
    """Raise ValueError for a config that is not there, or is no TOML; torch is not imported."""
    if isinstance(found := find_config(name), Path):
        read_chain(found)


def written_for(files: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The last of ``files`` that says in a comment for how many ranks it is, and its number."""
    for file in reversed(files):
        if said := re.search(r"^# world size: (\d+)$", Path(file).read_text(), re.MULTILINE):
            yield file, int(said[1])
            return


def extends_in(folder: Path, config: str) -> str:
    """What a file in ``folder`` says to extend ``config``."""
    found = find_config(config)
    if not isinstance(found, Path):
        return found
    return found.name if toml_file(found.name, folder) == found else os.path.relpath(found, folder)


def module_and_config(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """``--module`` and ``--config`` of a command line, and its other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--module", nargs="?")  # Titan refuses one without its value
    parser.add_argument("--config", nargs="?")
    return parser.parse_known_args(words)
