"""TOML files and the chain of what they extend, down to the Python function at its end."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from titan_ext.toml_config.errors import TomlConfigError, nearest

__all__ = ["Layer", "read_chain"]

EXAMPLE = 'extends = "deepseek_v3.deepseek_v3_16b"'


@dataclass(frozen=True)
class Layer:
    """One file of a chain."""

    file: str
    """The file as messages name it: as given, or relative to the file that extends it."""
    table: dict[str, Any]
    """What the file holds, without ``extends``."""
    extends: str


def read_chain(path: str | Path) -> list[Layer]:
    """Read a TOML file and the TOML files that it extends.

    Returns:
        The layers in the order in which they apply: the first extends a Python config function,
        the last is ``path``.

    Raises:
        TomlConfigError: for a file that is missing or no TOML, and a missing or circular extends.
    """
    layers: list[Layer] = []
    seen: dict[Path, str] = {}
    current, asked_by = Path(path).expanduser(), ""
    while True:
        resolved = current.resolve()
        if resolved in seen:
            names = [*seen.values()]
            circle = " -> ".join([*names[names.index(seen[resolved]) :], seen[resolved]])
            raise TomlConfigError(asked_by, "extends", f"circular: {circle}.")
        seen[resolved] = str(current)
        layer = _read_layer(current, asked_by)
        layers.append(layer)
        if not layer.extends.endswith(".toml"):
            return layers[::-1]
        asked_by = layer.file
        current = current.parent / Path(layer.extends).expanduser()


def _read_layer(path: Path, asked_by: str) -> Layer:
    table = _read_table(path, asked_by)
    if "extends" not in table:
        raise TomlConfigError(str(path), "extends", _missing_extends(table))
    extends = table.pop("extends")
    if not isinstance(extends, str) or not extends:
        raise TomlConfigError(
            str(path), "extends", f"expected one name or one path, as in {EXAMPLE}."
        )
    return Layer(file=str(path), table=table, extends=extends)


def _read_table(path: Path, asked_by: str) -> dict[str, Any]:
    if path.suffix != ".toml":
        raise TomlConfigError(str(path), "", "expected a file whose name ends in .toml.")
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "no such file"
        near = nearest(path.name, _siblings(path)) if path.parent.is_dir() else "."
        hint = near if "did you mean" in near else "."
        if asked_by:
            raise TomlConfigError(asked_by, "extends", f"{path}: {problem}{hint}")
        raise TomlConfigError(str(path), "", f"{problem}{hint}")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise TomlConfigError(str(path), "", f"line {line}: not UTF-8 text.") from error
    except OSError as error:
        raise TomlConfigError(str(path), "", f"cannot be read: {error.strerror}.") from error
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise TomlConfigError(str(path), "", _syntax_error(str(error), text)) from error


def _siblings(path: Path) -> list[str]:
    return [sibling.name for sibling in path.parent.glob("*.toml")]


def _syntax_error(message: str, text: str) -> str:
    """tomli's message with line and column first, also where tomli says "at end of document"."""
    match = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    if match:
        line, column = int(match[1]), int(match[2])
    else:
        lines = text.split("\n")
        line, column = len(lines), len(lines[-1]) + 1
    problem = re.sub(r" \(at [^()]*\)$", "", message)
    return f"line {line}, column {column}: not valid TOML: {problem}."


def _missing_extends(table: dict[str, Any]) -> str:
    model = table.get("model")
    if isinstance(model, dict) and isinstance(model.get("name"), str):
        # A file of TorchTitan 0.1 or 0.2 named its model here.
        name, flavor = model["name"], str(model.get("flavor", "debugmodel"))
        function = f"{name}_{re.sub('[^a-z0-9]+', '_', flavor.lower())}"
        return (
            "missing; this looks like a file for TorchTitan 0.1 or 0.2. In place of [model] name, "
            f'say first which config function it changes, as in extends = "{name}.{function}".'
        )
    for name, section in table.items():
        if isinstance(section, dict) and isinstance(section.get("extends"), str):
            return f"stands in [{name}]; it has to come before the first section."
    return f"missing; say first what this file changes, as in {EXAMPLE}."
