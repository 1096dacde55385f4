# SPDX-License-Identifier: BSD-3-Clause
"""From a config's name and flags to a trainer's config, with the origin of every value.

``load(name)`` returns the config; ``resolve(name)`` also says where each value came from;
``titan_ext show NAME [Titan flags]`` prints that.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from titan_ext.base import no_accelerator
from titan_ext.base.messages import Mistakes, checks_later
from titan_ext.base.stdlib_corpus import STDLIB_CORPUS, default_tokenizer_path
from titan_ext.config_registry.model import choose_model, load_base
from titan_ext.config_registry.terminal import hide_noise
from titan_ext.parallelize.limits import wrong_degrees
from titan_ext.run.trainer import Trainer
from titan_ext.toml.convert import Given, build, changed, leaves, lines_of
from titan_ext.toml.files import MODEL, KeyLocation, TomlConfigError, read_chain, to_toml

_GRAPHS = "training.disable_cuda_graphs"
_COMMAND_LINE = "command line"
"""The origin of what a flag sets, in place of a file."""


@dataclass(frozen=True)
class Resolved:
    """A config and the origins of its values."""

    config: Trainer.Config
    files: tuple[str, ...]
    """The TOML files, in the order in which they apply."""
    world_size: int
    """For how many ranks they are; 0 if they do not say."""
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
        for key, value, keys in lines_of(
            self.config, self.model, lambda keys: self.base in map(self.origins.get, keys)
        ):
            found = dict.fromkeys(self.origins[key] for key in keys)
            if any(map(wanted, found)):
                yield key, to_toml(value), ", ".join(found)

    def given(self) -> Iterator[tuple[str, str, str]]:
        """``lines`` of what the command line gave."""
        return self.lines(lambda origin: origin == _COMMAND_LINE)


def load(name: str | Path) -> Trainer.Config:
    """The trainer config of that name; raises as ``resolve`` does."""
    return resolve(name).config


def resolve(name: str | Path, flags: Sequence[str] = (), ranks: int | None = None) -> Resolved:
    """The trainer config that a name and flags describe, with the origin of every value.

    ``name`` is as ``--config`` takes it (``toml.files.find``): a TOML file or a config function.
    ``flags`` are Titan's, which win over the file. ``ranks`` are those of a job that a command
    plans: its degrees have to fit them.

    Raises ValueError with one message that names the file and each wrong key, and SystemExit for a
    wrong flag, which tyro has explained on stderr.
    """
    hide_noise()
    function, files = chain = read_chain(name)
    at = KeyLocation(files[0].name if files else str(name))
    base = load_base(function, at.below("extends") if files else at)
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
        unflagged = config = build(base.cls, values, at)
        if flags:
            ConfigManager()  # registers Titan's rules, such as A,B,C for a list of strings
            config = tyro.cli(
                type(config), prog="titan", args=flags, default=config, registry=custom_registry
            )
    before, flagged = leaves(unflagged, model), leaves(config, model)
    try:
        # They are on by default: only who asks for them is refused, others are told.
        asked = before[_GRAPHS] or KeyLocation("", _GRAPHS, at.origins).origin()
        if asked and not no_accelerator.adapts():
            config.check_layout_of_graphs()
        config = replace(config)
    except ValueError as error:
        where = f"{at.file} with flags" if flags else at.file
        raise TomlConfigError(where, "", str(error)) from error
    if ranks is not None:
        Mistakes(wrong_degrees(config, ranks)).raise_all()
    if (spec := config.model_spec) is not None:
        spec.extends, spec.choices = base.name, model
    names = tuple(file.name for file in files)
    resolved = Resolved(config, names, chain.world_size, base.name, model, {})
    for key, value in resolved.values.items():
        origin = KeyLocation("", key, at.origins).origin() or base.name
        if flagged.get(key, value) != value:
            origin = "titan_ext, as the log says"  # no accelerator, or no CUDA graphs
        elif before.get(key, MISSING) != value:
            origin = _COMMAND_LINE
        resolved.origins[key] = origin
    return resolved
