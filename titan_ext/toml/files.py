# SPDX-License-Identifier: BSD-3-Clause
"""TOML files: from a config's name to what it stands for, and the one error class for all of them.

``--config``, the commands and ``extends`` of a file take the same names. Nothing here imports torch
by itself, so that a wrong name or a missing file is told at once.
"""

import contextlib
import datetime
import functools
import importlib
import json
import os
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import util
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torchtitan import models
from torchtitan.experiments import _supported_experiments

from titan_ext.base.messages import and_more, did_you_mean, in_one

MODEL = "model"
"""The section with the arguments of a model registry."""
WORLD_SIZE = "world_size"
"""The key beside ``extends``: for how many ranks a file is."""
NONE = "None"
"""None in a file, as TOML lacks it; Titan's command line writes it the same way."""
EXAMPLE = 'extends = "deepseek_v3.deepseek_v3_16b"'
_MOST_NAMES_SHOWN = 12
TITAN_MODULES = models._supported_models | _supported_experiments
"""Short names that Titan's ``--module`` takes."""
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


class TomlConfigError(ValueError):
    """A TOML file that cannot become a config; the message is for its author.

    ``file`` is as the user named it, or relative to the file that extends it. ``key`` is dotted;
    empty where the file as a whole is at fault.
    """

    def __init__(self, file: str, key: str, problem: str) -> None:
        self.file = file
        super().__init__(f"{file}: {key}: {problem}" if key else f"{file}: {problem}")

    @classmethod
    def of_all(cls, errors: "list[TomlConfigError]") -> "TomlConfigError":
        """One error for all mistakes of a file and of those that it extends."""
        if len(errors) == 1:
            return errors[0]
        file = errors[0].file
        shared = all(error.file == file for error in errors)
        lines = [str(error).removeprefix(f"{file}: " if shared else "") for error in errors]
        return cls(file, "", in_one(lines))


@dataclass(frozen=True)
class KeyLocation:
    """A dotted key of a file; also records which file set which key."""

    file: str
    key: str = ""
    origins: dict[str, str] = field(default_factory=dict)
    errors: list[TomlConfigError] = field(default_factory=list)
    """The mistakes found so far, in all files."""

    def below(self, name: str) -> "KeyLocation":
        """The location of a key below this one."""
        key = f"{self.key}.{name}" if self.key else name
        return KeyLocation(self.file, key, self.origins, self.errors)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error and go on: the user sees all at once."""
        try:
            yield
        except TomlConfigError as error:
            if error not in self.errors:
                self.errors.append(error)

    def error(self, problem: str) -> TomlConfigError:
        return TomlConfigError(self.file, self.key, problem)

    def record(self) -> None:
        """Record that the file set this key and all keys below it."""
        for key in [key for key in self.origins if key.startswith(f"{self.key}.")]:
            del self.origins[key]
        self.origins[self.key] = self.file

    def origin(self) -> str:
        """The file that set this key or a table around it; "" if the base function did."""
        key = self.key
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return self.origins.get(key, "")


class TomlFile(NamedTuple):
    name: str
    """The name in messages: as given, or relative to the file that extends it."""
    table: dict[str, Any]
    """Its content, without ``extends`` and ``world_size``."""
    extends: str
    """A name, as ``--config`` takes it."""
    world_size: int = 0
    """For how many ranks it is; 0 if it does not say."""


def nearest(name: str, valid: Collection[str]) -> str:
    """The end of a message about an unknown ``name``: the nearest valid one, or all of them."""
    hint = did_you_mean(name, valid)
    if hint != "." or not valid:
        return hint
    return f"; expected one of {and_more(sorted(valid), _MOST_NAMES_SHOWN)}."


def to_toml(value: Any) -> str:
    """Format a value as in a TOML file, as far as possible."""
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool | str):
        return json.dumps(value)
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{', '.join(to_toml(item) for item in value)}]"
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(str(k))} = {to_toml(v)}" for k, v in value.items())
        return f"{{{inside}}}"
    if hasattr(value, "__qualname__"):
        return json.dumps(f"{value.__module__}.{value.__qualname__}")
    bare = isinstance(value, int | float | datetime.date | datetime.time)
    return str(value) if bare else json.dumps(str(value))


def read(path: Path) -> TomlFile:
    """Read one file. Raises TomlConfigError if it is no TOML, or extends nothing."""
    at = KeyLocation(str(path))
    try:
        table = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise at.error(f"cannot be read: {error.strerror}.") from error
    except ValueError as error:  # of text that is no UTF-8, too
        raise at.error(f"not valid TOML: {error}.") from error
    extends = table.pop("extends", None)
    if extends is None:
        raise at.below("extends").error(
            f"missing; say first, before any section, what this file changes, as in {EXAMPLE}."
        )
    if not isinstance(extends, str) or not extends:
        raise at.below("extends").error(f"expected one name or one path, as in {EXAMPLE}.")
    ranks = table.pop(WORLD_SIZE, None)
    if ranks is not None and (type(ranks) is not int or ranks < 1):
        raise at.below(WORLD_SIZE).error(f"is {to_toml(ranks)}; expected a number of ranks.")
    return TomlFile(at.file, table, extends, ranks or 0)


def check_new_file(path: Path) -> None:
    """Raise ValueError if ``path`` is no name of a TOML file, or one is there."""
    if path.suffix != ".toml":
        raise ValueError(f"{path}: expected a file whose name ends in .toml.")
    if path.exists():
        raise ValueError(f"{path} exists; choose another name, or edit it.")


class Chain(NamedTuple):
    """A config function, and the files that change its config in turn."""

    function: str
    """``MODULE.FUNCTION``; MODULE is what Titan's ``--module`` takes."""
    files: list[TomlFile]

    @property
    def world_size(self) -> int:
        """For how many ranks the last file that says so is; 0 if none does."""
        return next((file.world_size for file in reversed(self.files) if file.world_size), 0)


@functools.cache
def shipped_configs() -> dict[str, Path]:
    """The files of ``train_configs/`` by name: of the installed package, or of the checkout."""
    here = Path(__file__).parents[1]
    folders = (folder / "train_configs" for folder in (here, here.parent))
    folder = next((folder for folder in folders if folder.is_dir()), here)
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


@functools.cache
def titan_configs() -> dict[str, str]:
    """Titan's config functions, name -> model, read from its sources: some import extras (fla).

    Without those of Flux, which is no decoder and has a trainer of its own.
    """
    found: dict[str, str] = {}
    for source in sorted(Path(models.__file__).parent.glob("*/config_registry.py")):
        names = re.findall(r"^def ([a-z]\w*)\(\) -> Trainer\.Config:", source.read_text(), re.M)
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
        names = [name for name, of in titan_configs().items() if of == model]
        yield f"  {model}\n    " + "\n    ".join(names)


def find(name: str, folder: Path = Path()) -> Path | str:
    """The TOML file that ``name`` means, or its config function as "MODULE.FUNCTION".

    A name that ends in ``.toml`` is a file, relative to ``folder``; one that is not there may be
    shipped. A bare name is a function of Titan's. Raises ValueError if it is none of these; the
    message begins with the name.
    """
    path = folder / Path(name).expanduser()
    shipped = {file.name: file for file in shipped_configs().values()}
    beside = [file.name for file in path.parent.glob("*.toml") if file.is_file()]
    if path.suffix == ".toml":
        if path.is_file() or (path := shipped.get(name, path)).is_file():
            return path
        problem = "is a folder" if path.is_dir() else "no such file"
        raise ValueError(f"{path}: {problem}{did_you_mean(path.name, [*shipped, *beside])}")
    if name in titan_configs():
        return f"{titan_configs()[name]}.{name}"
    module, *rest = re.split("[.:]+", name, maxsplit=1)
    is_function = _FUNCTION.fullmatch(name) and not path.exists()
    if is_function and (module in {*TITAN_MODULES, *sys.modules} or util.find_spec(module)):
        return name
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

    Raises ValueError for a name that is nothing; of kind TomlConfigError for a file that is no
    TOML, and for an ``extends`` that is missing, wrong or circular.
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


def ranks_of(name: str, ranks: int = 0) -> int:
    """``ranks`` of a command, or those that its config is for.

    Raises ValueError if neither is given.
    """
    if not (found := ranks or read_chain(name).world_size):
        raise ValueError(
            f"{name}: no file says for how many ranks it is; expected --ranks, or a line such as "
            f"{WORLD_SIZE} = 64 beside extends."
        )
    return found


def extends_in(folder: Path, config: str) -> str:
    """The ``extends`` of a file in ``folder`` that starts from ``config``."""
    found = find(config)
    if not isinstance(found, Path):
        return found
    is_shipped = found == shipped_configs().get(found.stem) and not (folder / found.name).exists()
    return found.name if is_shipped else os.path.relpath(found, folder)


def import_first(what: str, names: Iterable[str], at: KeyLocation) -> ModuleType | None:
    """The first of the modules ``names`` that exists, ``what`` in messages; None if none does.

    Raises TomlConfigError if importing it fails. Titan mistakes an ImportError in a config registry
    for a missing registry, so none may escape.
    """
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise at.error(f"{what} cannot be imported: {error}.") from error
        except Exception as error:
            raise at.error(f"{what} cannot be imported: {error!r}.") from error
    return None


def import_dotted(path: Any, at: KeyLocation) -> Any:
    """The object that ``package.module.name`` names."""
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    if not all(part.isidentifier() for part in [*module.split("."), name]):
        raise at.error(f'expected a dotted path, as in "package.module.Name", got {path!r}.')
    found = import_first(path, [module], at)
    if found is None:
        raise at.error(f"no module named {module}; is it on PYTHONPATH?")
    return named_in(found, name, at)


def named_in(module: ModuleType, name: str, at: KeyLocation) -> Any:
    if not hasattr(module, name):
        known = [known for known in dir(module) if known[0] != "_"]
        raise at.error(f"{module.__name__} has no {name}{did_you_mean(name, known)}")
    return getattr(module, name)
