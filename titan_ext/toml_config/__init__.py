# SPDX-License-Identifier: BSD-3-Clause
"""Configs in TOML: a file says which Titan config it extends and what it changes.

Titan 0.1 and 0.2 had TOML; 0.3 is configured in Python. Here a file starts from one of Titan's
config functions (or from another file) and holds only what is different, under Titan's own key
names. titan_ext checks every key and value. docs/toml.md shows how to write one.

``load(path)`` returns the config; ``resolve(path)`` also says where each value came from;
``titan_ext show PATH [Titan flags]`` prints that.
"""

import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from titan_ext.data.stdlib_corpus import STDLIB_CORPUS, default_tokenizer_path
from titan_ext.flags import keys_of_flags, with_flags
from titan_ext.mistakes import checks_later
from titan_ext.names import warn_once
from titan_ext.toml_config.convert import POLICY, Given, build, changed, named_choices, plain
from titan_ext.toml_config.dump import dump, remember_base
from titan_ext.toml_config.files import KeyLocation, TomlConfigError, read_chain
from titan_ext.toml_config.model import MODEL, choose_model, load_base
from titan_ext.trainer import Trainer

__all__ = ["Resolved", "TomlConfigError", "dump", "leaves", "load", "resolve"]

COMMAND_LINE = "command line"
MACHINE = "titan_ext, for this machine"
"""The origin of a value that titan_ext changed because there is no accelerator."""


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
        return leaves({MODEL: self.model} if self.model else {}) | leaves(self.config)


def load(path: str | Path) -> Trainer.Config:
    """The trainer config that a TOML file describes.

    Raises:
        TomlConfigError: (a ValueError) with one message that names the file and the key.
    """
    return resolve(path).config


def resolve(path: str | Path, flags: Sequence[str] = ()) -> Resolved:
    """The trainer config that a TOML file and flags describe, with the origin of every value.

    Args:
        path: The file.
        flags: Titan's command-line flags, which win over the file.

    Raises:
        TomlConfigError: (a ValueError) with one message that names the file and each wrong key.
    """
    warn_once()
    files = read_chain(path)
    at = KeyLocation(files[0].name)
    base = load_base(files[0].extends, at.below("extends"))
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
    before = leaves({MODEL: model}) | leaves(config)
    try:
        config = with_flags(config, flags) if flags else config
        wanted = leaves(config)
        config = replace(config)
    except ValueError as error:
        raise at.error(str(error)) from error
    remember_base(config, base.name, model)
    resolved = Resolved(config, tuple(file.name for file in files), base.name, model, {})
    named = set(keys_of_flags(flags))
    for key, value in resolved.values.items():
        origin = KeyLocation("", key, at.origins).origin() or base.name
        if wanted.get(key, value) != value:
            origin = MACHINE
        elif key in named or before.get(key, value) != value or key not in before:
            origin = COMMAND_LINE
        resolved.origins[key] = origin
    return resolved


def leaves(config: Any, prefix: str = "", hint: Any = None) -> dict[str, Any]:
    """Every value of a config by its dotted key, in the order of the fields.

    The key is the one that a TOML file and Titan's command line have. A section whose class or
    policy is a choice has ``component`` or ``policy`` first. The model spec is left out.
    """
    return dict(_leaves(config, prefix, hint))


def _leaves(config: Any, prefix: str, hint: Any) -> Iterator[tuple[str, Any]]:
    start = f"{prefix}." if prefix else ""
    parts: Iterable[tuple[Any, Any, Any]] = ()
    if choices := named_choices(hint):
        names = [name for name, cls in choices.items() if cls is type(config)]
        yield f"{start}{POLICY}", "".join(names)
    elif prefix and (owner := getattr(config, "_owner", None)) and type(config) is not plain(hint):
        yield f"{start}component", f"{owner.__module__}.{owner.__qualname__}"
    if is_dataclass(config) and not isinstance(config, type):
        hints = typing.get_type_hints(type(config), include_extras=True)
        names = [f.name for f in fields(config) if f.name[0] != "_" and f.name != "model_spec"]
        parts = ((name, getattr(config, name), hints[name]) for name in names)
    elif isinstance(config, dict) and config:
        parts = ((name, value, None) for name, value in config.items())
    elif isinstance(config, list) and config and all(is_dataclass(item) for item in config):
        item = typing.get_args(plain(hint))[0] if hint else None
        parts = ((index, value, item) for index, value in enumerate(config))
    elif not choices:
        yield prefix, config
    for name, value, below in parts:
        yield from _leaves(value, f"{start}{name}", below)
