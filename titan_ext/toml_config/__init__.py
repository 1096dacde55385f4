# SPDX-License-Identifier: BSD-3-Clause
"""Configs in TOML: a file says which Titan config it extends and what it changes.

Titan 0.1 and 0.2 had TOML; 0.3 is configured in Python. Here a file starts from one of Titan's
config functions (or from another file) and holds only what is different, under Titan's own key
names. titan_ext checks every key and value. docs/toml.md shows how to write one.

``load(path)`` returns the config; ``resolve(path)`` also says where each value came from;
``titan_ext show PATH [Titan flags]`` prints that.
"""

import contextlib
import io
import re
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from titan_ext.names import checks_later, warn_once
from titan_ext.stdlib_corpus import STDLIB_CORPUS, default_tokenizer_path
from titan_ext.toml_config.convert import (
    COMPONENT,
    POLICY,
    Given,
    build,
    changed,
    named_choices,
    plain,
)
from titan_ext.toml_config.files import KeyLocation, TomlConfigError, TomlFile, read_chain, to_toml
from titan_ext.toml_config.model import MODEL, choose_model, load_base
from titan_ext.trainer import Trainer

__all__ = ["Resolved", "TomlConfigError", "dump", "identity", "leaves", "load", "resolve"]

COMMAND_LINE = "command line"
MACHINE = "titan_ext, for this machine"
"""The origin of a value that titan_ext changed because there is no accelerator."""

_FRAME = re.compile(r"[\u2500-\u257f]+")  # box drawing


@dataclass(frozen=True)
class Resolved:
    """A config and the origins of its values."""

    config: Trainer.Config
    files: tuple[str, ...]
    """The TOML files, in the order in which they apply."""
    base: str
    """The Python config function that they start from."""
    model: dict[str, Any]
    """The arguments of the model registry; empty if the base has none."""
    origins: dict[str, str]
    """Every leaf's dotted key -> its origin: the base, a file, or the command line."""

    @property
    def values(self) -> dict[str, Any]:
        """Every leaf's value by its dotted key: the model's choices, then the config's."""
        return leaves(self.config, self.model)

    def lines(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, str, str]]:
        """Key, value and origins, as in a TOML file, of the lines with an origin that is wanted."""

        def origins(keys: Iterable[str]) -> dict[str, None]:
            return dict.fromkeys(self.origins[key] for key in keys)

        def base_has(keys: Iterable[str]) -> bool:
            return self.base in origins(keys)

        for key, value, keys in _lines(self.config, self.model, base_has):
            found = origins(keys)
            if any(map(wanted, found)):
                yield key, to_toml(value), ", ".join(found)

    def given(self) -> Iterator[tuple[str, str, str]]:
        """``lines`` of what the command line gave."""
        return self.lines(lambda origin: origin == COMMAND_LINE)


def load(path: str | Path) -> Trainer.Config:
    """The trainer config that a TOML file describes; raises as ``resolve`` does."""
    return resolve(path).config


def resolve(path: str | Path, flags: Sequence[str] = (), *, function: str = "") -> Resolved:
    """The trainer config that a TOML file and flags describe, with the origin of every value.

    Args:
        path: The file; with ``function``, a name for messages.
        flags: Titan's command-line flags, which win over the file.
        function: A config function ("MODULE.FUNCTION") in place of a file.

    Raises:
        TomlConfigError: (a ValueError) with one message that names the file and each wrong key.
    """
    warn_once()
    files = [TomlFile(str(path), {}, function)] if function else read_chain(path)
    at = KeyLocation(files[0].name)
    base = load_base(files[0].extends, at if function else at.below("extends"))
    tables, models = [], []
    for file in files:
        at = KeyLocation(file.name, origins=at.origins, errors=at.errors)
        if MODEL in file.table:
            models.append(Given(at.below(MODEL), file.table.pop(MODEL)))
        tables.append(Given(at, file.table))
    with checks_later():
        values = changed(base.cls, base.values, tables)
    if values["hf_assets_path"] == STDLIB_CORPUS:
        # The folder depends on the Python version, so a file that is shared cannot name it.
        values["hf_assets_path"] = str(default_tokenizer_path())
    model: dict[str, Any] = {}
    with at.noting():
        model = choose_model(base, models, values, at)
    with checks_later():
        config = build(base.cls, values, at)
    before = leaves(config, model)
    try:
        config = _with_flags(config, flags) if flags else config
        wanted = leaves(config)
        config = replace(config)
    except ValueError as error:
        raise at.error(str(error)) from error
    if config.model_spec is not None:
        _BASES[id(config.model_spec.model)] = config.model_spec.model, base.name, model
    names = () if function else tuple(file.name for file in files)
    resolved = Resolved(config, names, base.name, model, {})
    named = set(_keys_of(flags))
    for key, value in resolved.values.items():
        origin = KeyLocation("", key, at.origins).origin() or base.name
        if wanted.get(key, value) != value:
            origin = MACHINE
        elif key in named or before.get(key, value) != value or key not in before:
            origin = COMMAND_LINE
        resolved.origins[key] = origin
    return resolved


def _with_flags(config: Any, flags: Sequence[str]) -> Any:
    """A new config with Titan's flags on top, not checked yet; ValueError in tyro's words.

    Titan's ConfigManager does the same right after. There a wrong flag prints a box and exits on
    every rank, and torchrun cannot tell why.
    """
    ConfigManager()  # registers Titan's rules, such as A,B,C for a list of strings
    said = io.StringIO()
    try:
        with checks_later(), contextlib.redirect_stderr(said):
            return tyro.cli(type(config), args=flags, default=config, registry=custom_registry)
    except SystemExit as end:
        if not end.code:  # --help
            raise
    lines = (_FRAME.sub("", line).strip() for line in said.getvalue().splitlines())
    raise ValueError("\n  ".join(line for line in lines if line))


def _keys_of(flags: Sequence[str]) -> Iterator[str]:
    """The dotted keys that flags name."""
    for flag in flags:
        if flag.startswith("--"):
            section, dot, key = flag[2:].split("=")[0].replace("-", "_").rpartition(".")
            yield from (section + dot + key, section + dot + key.removeprefix("no_"))


_BASES: dict[int, tuple[Any, str, dict[str, Any]]] = {}
"""By the identity of a model's config: that config, to keep the identity; base; its choices.

A config does not tell which config function it came from, nor the choices of its model.
"""


def dump(config: Any) -> str:
    """A TOML file with every value of a trainer's config.

    A config that was made in Python gets a comment in place of ``extends``.
    """
    base, model = _base_of(config)
    first = "# made in Python: to load this, say in extends = ... which config function it changes"
    lines = [f"extends = {to_toml(base)}" if base else first]
    lines += [f"{key} = {to_toml(value)}" for key, value, _ in _lines(config, model)]
    return "\n".join(lines) + "\n"


def identity(config: Any) -> dict[str, Any]:
    """``extends``, empty for a config made in Python, and every value by its dotted key."""
    base, model = _base_of(config)
    return {"extends": base, **leaves(config, model)}


def _base_of(config: Any) -> tuple[str, dict[str, Any]]:
    return _BASES.get(id(getattr(config.model_spec, "model", None)), (None, "", {}))[1:]


def _lines(
    config: Any,
    model: dict[str, Any],
    base_has: Callable[[Iterable[str]], bool] = lambda leaves: False,
) -> Iterator[tuple[str, Any, Collection[str]]]:
    """Key, value and dotted keys of the lines that set every value of a config and of [model].

    A dict is one value, for its names may need quotes. So is a list of sections, unless
    ``base_has`` its leaves: a file cannot change items that its base lacks.
    """

    def lines(tree: Any, key: str) -> Iterator[tuple[str, Any, Collection[str]]]:
        below = dict(_flat(tree, key))
        if isinstance(tree, _Section):
            for name, value in tree.items():
                yield from lines(value, _join(key, name))
        elif isinstance(tree, list) and base_has(below):
            yield from ((key, value, [key]) for key, value in below.items())
        else:
            yield key, tree, below

    return lines(_tree_of(config, model), "")


def leaves(config: Any, model: dict[str, Any] | None = None) -> dict[str, Any]:
    """Every value of a config, after those of [model], by dotted key in the order of the fields.

    The key is the one that a TOML file and Titan's command line have. A section whose class or
    policy is a choice has ``component`` or ``policy`` first. The model spec is left out.
    """
    return dict(_flat(_tree_of(config, model or {}), ""))


class _Section(dict[str, Any]):
    """A section of a file; any other dict is a value."""


def _tree_of(config: Any, model: dict[str, Any]) -> _Section:
    choices = {MODEL: _Section(_tree(model))} if model else {}
    return _Section({**choices, **_tree(config, type(config))})


def _tree(value: Any, hint: Any = None) -> Any:
    """A config, or a value in it, as a file has it."""
    section = _Section()
    if choices := named_choices(hint):
        section[POLICY] = "".join(name for name, cls in choices.items() if cls is type(value))
    elif (owner := getattr(value, "_owner", None)) and type(value) is not plain(hint):
        section[COMPONENT] = f"{owner.__module__}.{owner.__qualname__}"
    if is_dataclass(value) and not isinstance(value, type):
        hints = typing.get_type_hints(type(value), include_extras=True)
        names = [f.name for f in fields(value) if f.name[0] != "_" and f.name != "model_spec"]
        section |= {name: _tree(getattr(value, name), hints[name]) for name in names}
    elif isinstance(value, dict):
        return {name: _tree(below) for name, below in value.items()}
    elif isinstance(value, list) and all(is_dataclass(item) for item in value):
        item = typing.get_args(plain(hint))[0] if hint else None
        return [_tree(each, item) for each in value]
    return section or value


def _flat(tree: Any, key: str) -> Iterator[tuple[str, Any]]:
    below: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        below = tree.items()
    elif isinstance(tree, list) and any(isinstance(item, _Section) for item in tree):
        below = enumerate(tree)
    if not below:
        yield key, tree
    for name, value in below:
        yield from _flat(value, _join(key, name))


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
