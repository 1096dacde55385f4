"""From a TOML file to a trainer config of ours, with the origin of every value."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_ext.data.stdlib_corpus import STDLIB_CORPUS, default_tokenizer_path
from titan_ext.toml_config.base import load_base
from titan_ext.toml_config.draft import Draft, build, take_apart
from titan_ext.toml_config.errors import Place
from titan_ext.toml_config.fill import fill
from titan_ext.toml_config.model import MODEL, ModelChoices
from titan_ext.toml_config.origins import leaves, origin_of
from titan_ext.toml_config.read import read_chain
from titan_ext.trainer import Trainer

__all__ = ["Resolved", "load", "resolve"]

MACHINE = "titan_ext, for this machine"
"""The origin of a value that titan_ext changed because there is no accelerator."""


@dataclass(frozen=True)
class Resolved:
    """A config, and where its values came from."""

    config: Trainer.Config
    files: tuple[str, ...]
    """The TOML files, in the order in which they apply."""
    base: str
    """The Python config function that they start from."""
    model: dict[str, Any]
    """What was passed to the model registry; empty if the base has none."""
    origins: dict[str, str]
    """Every leaf's dotted key to its origin: the base, a file, or the command line."""

    @property
    def values(self) -> dict[str, Any]:
        """Every leaf's value by its dotted key: the model's choices, then the config's."""
        return (
            leaves(self.model, MODEL) | leaves(self.config) if self.model else leaves(self.config)
        )


def load(path: str | Path) -> Trainer.Config:
    """The trainer config that a TOML file describes.

    Raises:
        TomlConfigError: (a ValueError) with one message that names the file and the key.
    """
    return resolve(path).config


def resolve(path: str | Path) -> Resolved:
    """The trainer config that a TOML file describes, with the origin of every value.

    Raises:
        TomlConfigError: (a ValueError) with one message that names the file and the key.
    """
    layers = read_chain(path)
    recorded: dict[str, str] = {}
    base = load_base(layers[0].extends, Place(file=layers[0].file, key="extends"))
    draft = take_apart(base.config, Place(file=layers[0].file, origins=recorded))
    choices = ModelChoices(base)
    for layer in layers:
        place = Place(file=layer.file, origins=recorded)
        table = dict(layer.table)
        model = table.pop(MODEL, None)
        fill(draft, table, place)
        if model is not None:
            choices.fill(model, place.at(MODEL))
    _find_tokenizer(draft)
    choices.apply(draft)
    sections = {name: build(value) for name, value in draft.values.items()}
    wanted = leaves({name: value for name, value in sections.items() if name != "model_spec"})
    config = build(Draft(draft.cls, sections, draft.place))
    resolved = Resolved(
        config=config,
        files=tuple(layer.file for layer in layers),
        base=base.name,
        model=choices.arguments,
        origins={},
    )
    for key, value in resolved.values.items():
        origin = origin_of(key, recorded, base.name)
        adapted = key in wanted and wanted[key] != value
        adapted |= origin == base.name and key in base.leaves and base.leaves[key] != value
        resolved.origins[key] = MACHINE if adapted else origin
    return resolved


def _find_tokenizer(draft: Draft) -> None:
    """``hf_assets_path = "python_stdlib"``: the tokenizer that belongs to that corpus.

    Its folder depends on the machine's Python version, so a shipped file cannot spell it out.
    """
    if draft.get("hf_assets_path") == STDLIB_CORPUS:
        draft.values["hf_assets_path"] = str(default_tokenizer_path())
