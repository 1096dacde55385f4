# SPDX-License-Identifier: BSD-3-Clause
"""TOML files, what they extend, and their one error class, which names file and key."""

import contextlib
import datetime
import importlib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import tomli

from titan_ext.base.messages import and_more, did_you_mean, in_one

MODEL = "model"
"""The section with the arguments of a model registry."""
NONE = "None"
"""None in a file, as TOML lacks it; Titan's command line writes it the same way."""
EXAMPLE = 'extends = "deepseek_v3.deepseek_v3_16b"'
_MOST_NAMES_SHOWN = 12
_PACKAGES = {
    "PIL": "pillow",
    "deep_ep": "deep_ep (see github.com/deepseek-ai/DeepEP)",
    "fla": "flash-linear-attention",
    "torchft": "torchft-nightly",
}
"""Module -> package, where the names differ."""


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

    def record(self, origin: str = "") -> None:
        """Record that ``origin``, by default the file, set this key and all keys below it."""
        for key in [key for key in self.origins if key.startswith(f"{self.key}.")]:
            del self.origins[key]
        self.origins[self.key] = origin or self.file

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
    """Its content, without ``extends``."""
    extends: str
    """A name, as ``--config`` takes it."""


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
        table = tomli.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise at.error(f"line {line}: not UTF-8 text.") from error
    except OSError as error:
        raise at.error(f"cannot be read: {error.strerror}.") from error
    except tomli.TOMLDecodeError as error:
        problem = f"line {error.lineno}, column {error.colno}: not valid TOML: {error.msg}."
        raise at.error(problem) from error
    extends = table.pop("extends", None)
    if extends is None:
        raise at.below("extends").error(_missing_extends(table))
    if not isinstance(extends, str) or not extends:
        raise at.below("extends").error(f"expected one name or one path, as in {EXAMPLE}.")
    return TomlFile(at.file, table, extends)


def _missing_extends(table: dict[str, Any]) -> str:
    model = table.get("model")
    if isinstance(model, dict) and isinstance(model.get("name"), str):
        flavor = re.sub("[^a-z0-9]+", "_", str(model.get("flavor", "debugmodel")).lower())
        return (
            "missing; this looks like a file for TorchTitan 0.1 or 0.2. In place of [model] name, "
            "say first which config function it changes, as in extends = "
            f'"{model["name"]}.{model["name"]}_{flavor}".'
        )
    for name, section in table.items():
        if isinstance(section, dict) and isinstance(section.get("extends"), str):
            return f"stands in [{name}]; it has to come before the first section."
    return f"missing; say first what this file changes, as in {EXAMPLE}."


def check_new_file(path: Path) -> None:
    """Raise ValueError if no TOML file can be written to ``path``, or one is there."""
    if path.suffix != ".toml":
        raise ValueError(f"{path}: expected a file whose name ends in .toml.")
    if path.exists():
        raise ValueError(f"{path} exists; choose another name, or edit it.")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}.")


def import_first(what: str, names: Iterable[str], at: KeyLocation) -> ModuleType | None:
    """The first of the modules ``names`` that exists, ``what`` in messages; None if none does.

    Raises TomlConfigError if importing it fails, naming what is missing and what to install. Titan
    mistakes an ImportError in a config registry for a missing registry, so none may escape.
    """
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise at.error(import_problem(what, error)) from error
        except Exception as error:
            raise at.error(import_problem(what, error)) from error
    return None


def import_problem(module: str, error: Exception) -> str:
    """The reason why ``module`` cannot be imported, and what to install."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing = error.name.split(".")[0]
        package = _PACKAGES.get(missing, missing)
        return f"{module} needs the module {error.name}: pip install {package}."
    return f"{module} cannot be imported: {type(error).__name__}: {error}."


def import_dotted(path: Any, at: KeyLocation) -> Any:
    """The object that ``package.module.Name`` names."""
    parts = path.split(".") if isinstance(path, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise at.error(f'expected a dotted path, as in "package.module.Name", got {path!r}.')
    count = len(parts)
    found: Any = None
    while found is None and (count := count - 1):
        found = import_first(path, [".".join(parts[:count])], at)
    if found is None:
        raise at.error(f"no module named {parts[0]}; is it on PYTHONPATH?")
    for name in parts[count:]:
        if not hasattr(found, name):
            hint = did_you_mean(name, [known for known in dir(found) if known[0] != "_"])
            raise at.error(f"{getattr(found, '__name__', found)} has no {name}{hint}")
        found = getattr(found, name)
    return found
