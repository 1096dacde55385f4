# SPDX-License-Identifier: BSD-3-Clause
"""From a config's name to the TOML files and the config function that it stands for.

``--config``, the commands and ``extends`` of a file take the same names. This module reads files
and Titan's sources and imports no torch, so that a wrong name or a missing file is told at once.
"""

import functools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import util
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from torchtitan.experiments import _supported_experiments
from torchtitan.models import _supported_models

from titan_ext.base.messages import did_you_mean
from titan_ext.toml.files import KeyLocation, TomlConfigError, TomlFile, read

REFUSED_MODELS = {
    "flux": "it is no decoder (so its units are unknown) and has a training loop of its own"
}
"""Titan's models that titan_ext does not serve, by their ``--module`` name, and why."""
TITAN_MODULES = _supported_models | _supported_experiments
"""Short names that Titan's ``--module`` takes."""
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


class Chain(NamedTuple):
    """A config function, and the files that change its config in turn."""

    function: str
    """``MODULE.FUNCTION``; MODULE is what Titan's ``--module`` takes."""
    files: list[TomlFile]


@functools.cache
def shipped_configs() -> dict[str, Path]:
    """The files of ``train_configs/`` by name: of the installed package, or of the checkout."""
    here = Path(__file__).parents[1]
    folders = (folder / "train_configs" for folder in (here, here.parent))
    folder = next((folder for folder in folders if folder.is_dir()), here)
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


@functools.cache
def titan_configs() -> dict[str, str]:
    """Titan's config functions, name -> model, read from its sources: some import extras (fla)."""
    spec = util.find_spec("torchtitan")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    found: dict[str, str] = {}
    folder = Path(spec.submodule_search_locations[0])
    for source in sorted(folder.glob("models/*/config_registry.py")):
        names = re.findall(r"^def ([a-z]\w*)\(\) -> \S*Trainer\.Config:", source.read_text(), re.M)
        found |= dict.fromkeys(names, source.parent.name)
    return found


def listing() -> Iterator[str]:
    """Lines for a reader: the shipped files, and Titan's models with their config functions."""
    yield "shipped TOML files:"
    for name, path in shipped_configs().items():
        comment = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
        sentence = " ".join(line.strip("# ") for line in comment).partition(". ")[0]
        yield f"  {name + '.toml':30} {sentence}"
    yield "config functions of TorchTitan, by model:"
    for model in dict.fromkeys(titan_configs().values()):
        if model not in REFUSED_MODELS:
            names = [name for name, of in titan_configs().items() if of == model]
            yield f"  {model}\n    " + "\n    ".join(names)


def find(name: str, folder: Path = Path()) -> Path | str:
    """The TOML file that ``name`` means, or its config function as "MODULE.FUNCTION".

    A name that ends in ``.toml`` is a file, relative to ``folder``; one that is not there may be
    shipped. A bare name is a function of Titan's.

    Raises:
        ValueError: if it is none of these; the message begins with the name.
    """
    path = folder / Path(name).expanduser()
    shipped = {file.name: file for file in shipped_configs().values()}
    beside = [file.name for file in path.parent.glob("*.toml") if file.is_file()]
    if path.suffix == ".toml":
        if path.is_file() or (path := shipped.get(name, path)).is_file():
            return path
        problem = "is a folder" if path.is_dir() else "no such file"
        raise ValueError(f"{path}: {problem}{did_you_mean(path.name, [*shipped, *beside])}")
    function = f"{titan_configs()[name]}.{name}" if name in titan_configs() else name
    module, *rest = re.split("[.:]+", function, maxsplit=1)
    if module in REFUSED_MODELS:
        raise ValueError(f"{name}: titan_ext does not serve {module}: {REFUSED_MODELS[module]}.")
    if name in titan_configs():
        return function
    is_function = _FUNCTION.fullmatch(name) and not path.exists()
    if is_function and (module in {*TITAN_MODULES, *sys.modules} or util.find_spec(module)):
        return function
    modules = [*TITAN_MODULES, *(file.stem for file in folder.glob("*.py"))]
    same = [f"{known}.{rest[0]}" for known in modules if rest and not path.exists()]
    known = [*shipped, *(str(Path(name).parent / file) for file in beside)]
    raise ValueError(
        f"{name}: neither a TOML file, nor a config function of one of TorchTitan's language "
        "models, nor one of yours as MODULE.FUNCTION"
        f"{did_you_mean(name, [*known, *titan_configs(), *same])}"
    )


def read_chain(name: str | Path) -> Chain:
    """Read the TOML files that ``name`` and what it extends stand for.

    Raises:
        ValueError: for a name that is nothing; of kind TomlConfigError for a file that is no TOML,
            and for an ``extends`` that is missing, wrong or circular.
    """
    files: list[TomlFile] = []
    seen: list[Path] = []
    found = find(str(name))
    while isinstance(found, Path):
        if found.resolve() in seen:
            circle = [file.name for file in files[seen.index(found.resolve()) :]]
            problem = f"circular: {' -> '.join([*circle, circle[0]])}."
            raise TomlConfigError(files[-1].name, "extends", problem)
        seen.append(found.resolve())
        files.append(read(found))
        try:
            found = find(files[-1].extends, found.parent)
        except ValueError as error:
            raise KeyLocation(files[-1].name, "extends").error(str(error)) from None
    return Chain(found, files[::-1])


def written_for(files: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The last of ``files`` that says in a comment for how many ranks it is, and its number."""
    for file in reversed(files):
        if said := re.search(r"^# world size: (\d+)$", Path(file).read_text(), re.MULTILINE):
            yield file, int(said[1])
            return


def extends_in(folder: Path, config: str) -> str:
    """The ``extends`` of a file in ``folder`` that starts from ``config``."""
    found = find(config)
    if not isinstance(found, Path):
        return found
    is_shipped = found == shipped_configs().get(found.stem) and not (folder / found.name).exists()
    return found.name if is_shipped else os.path.relpath(found, folder)
