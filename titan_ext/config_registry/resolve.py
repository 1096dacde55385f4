# SPDX-License-Identifier: BSD-3-Clause
"""From a TOML file and flags to a trainer's config, with the origin of every value.

``load(path)`` returns the config; ``resolve(path)`` also says where each value came from;
``titan_ext show PATH [Titan flags]`` prints that.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titan_ext.base.messages import COMMAND_LINE, checks_later, warn_once
from titan_ext.base.stdlib_corpus import STDLIB_CORPUS, default_tokenizer_path
from titan_ext.config_registry.model import choose_model, load_base
from titan_ext.run.trainer import Trainer
from titan_ext.toml.convert import Given, build, changed
from titan_ext.toml.files import MODEL, KeyLocation, TomlConfigError, TomlFile, read_chain, to_toml
from titan_ext.toml.flags import keys_of, with_flags
from titan_ext.toml.values import leaves, lines_of


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

        for key, value, keys in lines_of(self.config, self.model, base_has):
            found = origins(keys)
            if any(map(wanted, found)):
                yield key, to_toml(value), ", ".join(found)

    def given(self) -> Iterator[tuple[str, str, str]]:
        """``lines`` of what the command line gave."""
        return self.lines(lambda origin: origin == COMMAND_LINE)


def load(path: str | Path) -> Trainer.Config:
    """The trainer config that a TOML file describes; raises as ``resolve`` does."""
    return resolve(path).config


def resolve(
    path: str | Path, flags: Sequence[str] = (), *, function: str = "", flags_follow: bool = False
) -> Resolved:
    """The trainer config that a TOML file and flags describe, with the origin of every value.

    Args:
        path: The file; with ``function``, a name for messages.
        flags: Titan's command-line flags, which win over the file.
        function: A config function ("MODULE.FUNCTION") in place of a file.
        flags_follow: Return a config that fails its checks, too: the caller changes it further.

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
    unflagged = config
    config = with_flags(config, flags) if flags else config
    wanted = leaves(config)
    try:
        config = replace(config)
    except ValueError as error:
        if not flags_follow:
            raise TomlConfigError(_to_blame(unflagged, at.file), "", str(error)) from error
    if (spec := config.model_spec) is not None:
        spec.extends, spec.choices = base.name, model
    names = () if function else tuple(file.name for file in files)
    resolved = Resolved(config, names, base.name, model, {})
    named = set(keys_of(flags))
    for key, value in resolved.values.items():
        origin = KeyLocation("", key, at.origins).origin() or base.name
        if wanted.get(key, value) != value:
            origin = "titan_ext, as the log says"  # no accelerator, or no CUDA graphs
        elif key in named or before.get(key, value) != value or key not in before:
            origin = COMMAND_LINE
        resolved.origins[key] = origin
    return resolved


def _to_blame(unflagged: Any, file: str) -> str:
    """Where the mistake of a config with flags is: in the flags, if ``file`` alone is fine."""
    try:
        replace(unflagged)
    except ValueError:
        return file
    return COMMAND_LINE
