# SPDX-License-Identifier: BSD-3-Clause
"""From a config's name and flags to a trainer's config, with the origin of every value.

``load(name)`` returns the config; ``resolve(name)`` also says where each value came from;
``titan_ext show NAME [Titan flags]`` prints that.
"""

import contextlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from titan_ext.base.messages import COMMAND_LINE, checks_later
from titan_ext.base.stdlib_corpus import STDLIB_CORPUS, default_tokenizer_path
from titan_ext.config_registry.model import choose_model, load_base
from titan_ext.config_registry.terminal import warn_once
from titan_ext.run.trainer import Trainer
from titan_ext.toml.convert import Given, build, changed, leaves, lines_of
from titan_ext.toml.files import MODEL, KeyLocation, TomlConfigError, read_chain, to_toml


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


def load(name: str | Path) -> Trainer.Config:
    """The trainer config of that name; raises as ``resolve`` does."""
    return resolve(name).config


def resolve(name: str | Path, flags: Sequence[str] = (), *, flags_follow: bool = False) -> Resolved:
    """The trainer config that a name and flags describe, with the origin of every value.

    Args:
        name: As ``--config`` takes it (``toml.files.find``): a TOML file or a config function.
        flags: Titan's command-line flags, which win over the file.
        flags_follow: Return a config that fails its checks, too: the caller changes it further.

    Raises:
        ValueError: with one message that names the file and each wrong key.
    """
    warn_once()
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
            config = _with_flags(config, flags)
    before, wanted = leaves(unflagged, model), leaves(config)
    try:
        config = replace(config)
    except ValueError as error:
        if not flags_follow:
            raise TomlConfigError(_to_blame(unflagged, at.file), "", str(error)) from error
    if (spec := config.model_spec) is not None:
        spec.extends, spec.choices = base.name, model
    names = tuple(file.name for file in files)
    resolved = Resolved(config, names, chain.world_size, base.name, model, {})
    named = {key for flag in flags for key in _keys_of(flag)}
    for key, value in resolved.values.items():
        origin = KeyLocation("", key, at.origins).origin() or base.name
        if wanted.get(key, value) != value:
            origin = "titan_ext, as the log says"  # no accelerator, or no CUDA graphs
        elif key in named or before.get(key, value) != value or key not in before:
            origin = COMMAND_LINE
        resolved.origins[key] = origin
    return resolved


def _to_blame(unflagged: Any, file: str) -> str:
    """The origin of a mistake in a config with flags: the flags, if ``file`` alone is fine."""
    try:
        replace(unflagged)
    except ValueError:
        return file
    return COMMAND_LINE


def _with_flags(config: Any, flags: Sequence[str]) -> Any:
    """A new config with flags on top, parsed as Titan's ConfigManager does right after.

    There a wrong flag prints a box and exits on every rank, and torchrun cannot tell why.

    Raises:
        TomlConfigError: for a wrong flag; in place of a file it names the command line.
    """
    ConfigManager()  # registers Titan's rules, such as A,B,C for a list of strings
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                type(config), prog="titan", args=flags, default=config, registry=custom_registry
            )
    except SystemExit as end:
        if not end.code:  # --help
            raise
    raise TomlConfigError(COMMAND_LINE, "", _unboxed(said.getvalue()))


def _unboxed(box: str) -> str:
    """A message of tyro's in one line, with the flags, and policies before them, that it suggests.

    tyro writes a title, and a rule between paragraphs; where the stream takes it, all in a box.
    """
    lines = [line.strip(" \u2500\u2502\u2570\u256f") for line in box.strip().splitlines()[1:]]
    text = "\n".join("" if set(line) == {"-"} else line for line in lines)
    message, *hints = re.split("\n\n+", text.strip())
    said = " ".join(message.split())
    flags = re.findall(r"^(--[^\s,]+)", "\n".join(hints), re.MULTILINE)
    policies = re.findall(r"^in titan (\S+:\S+ )?--help$", "\n".join(hints), re.MULTILINE)
    if policies:
        meant = [policy + flag for policy, flag in zip(policies, flags, strict=False)]
        said += f"; did you mean {' or '.join(meant)}?"
    elif ":" in said.partition(": ")[2]:  # a policy, which tyro calls a subcommand
        said += f"; {' '.join(hints[0].split())}"
    return said


def _keys_of(flag: str) -> tuple[str, ...]:
    """The dotted key of a flag, as it stands and without the ``no-`` of ``--compile.no-enable``."""
    if not flag.startswith("--"):
        return ()
    section, dot, key = flag[2:].split("=")[0].replace("-", "_").rpartition(".")
    return section + dot + key, section + dot + key.removeprefix("no_")
