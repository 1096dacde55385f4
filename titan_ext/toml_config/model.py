"""The ``[model]`` section: what Titan passes to a model package's ``model_registry``.

Titan's configs hold the finished spec, so a changed choice means a new spec from the same registry,
with the other choices as the base function made them.
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Any

from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec

from titan_ext.specs import extend_model_spec
from titan_ext.toml_config.base import Base
from titan_ext.toml_config.draft import ABSENT, Draft, build, take_apart
from titan_ext.toml_config.errors import Place, nearest
from titan_ext.toml_config.fill import convert
from titan_ext.toml_config.legacy import LEGACY, legacy_advice

__all__ = ["MODEL", "ModelChoices"]

MODEL = "model"
_COMPILED = "model_compile_enabled"
_VOCABULARY = "global_vocab_size"
# For a suggestion only, once Titan has refused a name.
_KNOWN = {
    "attn_backend": ("flex", "flex_flash", "varlen"),
    "moe_comm_backend": ("standard", "deepep", "hybridep", "minimal_async_ep"),
}


class ModelChoices:
    """The arguments of a model registry, as the base made them and the files changed them."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self.arguments = dict(base.arguments)
        self.place: Place | None = None
        """``[model]`` of the last file that has one."""

    def fill(self, table: Any, place: Place) -> None:
        """Take a file's ``[model]``.

        Raises:
            TomlConfigError: for a key that the registry does not take, or a wrong value.
        """
        if not isinstance(table, dict):
            raise place.expected("a table [model]", table)
        registry = self.base.registry
        if registry is None:
            raise place.error(
                f"{self.base.name} does not make its model with a model_registry function, so "
                "there are no choices to change."
            )
        self.place = place
        parameters = inspect.signature(registry).parameters
        hints = typing.get_type_hints(registry, include_extras=True)
        for name, value in table.items():
            below = place.at(name)
            self._refuse_unknown(name, value, parameters, registry, below)
            current = self.arguments.get(name, ABSENT)
            self.arguments[name] = convert(hints.get(name, Any), value, current, below)
            if name == "flavor":
                self._check_flavor(value, below)

    def apply(self, draft: Draft) -> None:
        """Make the spec again if a choice has changed, and fit the loss to its vocabulary.

        Args:
            draft: The whole config, when all files have been filled in.

        Raises:
            TomlConfigError: if the registry refuses the choices, or titan_ext the model.
        """
        changed = self._follow_compile(draft)
        old = draft.get("model_spec")
        spec = old
        if self.place is not None or changed:
            assert self.base.registry is not None
            spec = self._make_spec(self.base.registry, self.place or draft.place.at(MODEL))
            draft.values["model_spec"] = spec
        if spec is not None and isinstance(spec.model, Decoder.Config):
            old_size, size = old.model.vocab_size, spec.model.vocab_size
            draft.values["loss"] = _fit_vocabulary(
                draft.get("loss"), old_size, size, draft.place.at("loss")
            )

    def _refuse_unknown(
        self, name: str, value: Any, parameters: Any, registry: Callable, place: Place
    ) -> None:
        old_style = name == "converters" and isinstance(value, list) and _all_strings(value)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if (name in parameters or takes_any) and not old_style:
            return
        old = (place.key, LEGACY[place.key]) if old_style else legacy_advice(place.key, value)
        if old:
            raise place.error(f"a key of TorchTitan 0.1 or 0.2; today: {old[1]}.")
        hint = nearest(name, parameters, prefix="model.")
        raise place.error(f"{registry.__module__}.{registry.__name__} does not take it{hint}")

    def _check_flavor(self, flavor: str, place: Place) -> None:
        registry = self.base.registry
        assert registry is not None
        tables = [registry.__globals__.get(name) for name in registry.__code__.co_names]
        base_flavor = self.base.arguments.get("flavor")
        for table in tables:
            if isinstance(table, dict) and base_flavor in table and flavor not in table:
                raise place.error(f'no flavor is called "{flavor}"{nearest(flavor, table)}')

    def _follow_compile(self, draft: Draft) -> bool:
        """Tell each converter whether the model is compiled, unless the file tells it.

        Titan's config functions pass it on by hand; left as it was, a file that turns compile on
        or off would leave converters that believe the opposite.
        """
        converters = self.arguments.get("converters")
        if not converters:
            return False
        section = draft.get("compile")
        read = section.get if isinstance(section, Draft) else lambda name: getattr(section, name)
        compiled = read("enable") and "model" in read("components")
        changed = False
        for index, converter in enumerate(converters):
            if isinstance(converter, Draft):
                if _COMPILED in converter.fields:
                    converter.values.setdefault(_COMPILED, compiled)
            elif getattr(converter, _COMPILED, compiled) != compiled:
                converters = [*converters]
                converters[index] = dataclasses.replace(converter, **{_COMPILED: compiled})
                changed = True
        self.arguments["converters"] = converters
        return changed

    def _make_spec(self, registry: Callable[..., ModelSpec], place: Place) -> ModelSpec:
        self.arguments = build(self.arguments)
        try:
            return extend_model_spec(registry(**self.arguments))
        except Exception as error:  # a registry checks with ValueError, KeyError, assert, ...
            refusal = f"{registry.__module__}.{registry.__name__} refuses it: {error}"
            for name, known in _KNOWN.items():
                given = self.arguments.get(name)
                if given is not None and given not in known:
                    hint = nearest(given, known)
                    raise place.at(name).error(f'"{given}" is unknown{hint}') from error
            raise place.error(refusal) from error


def _all_strings(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(item, str) for item in value)


def _fit_vocabulary(loss: Any, old: int, new: int, place: Place, is_new: bool = False) -> Draft:
    """A loss that carries the vocabulary size gets the new model's, unless a file set another.

    Config functions compute it from their spec: where the old size stands, the new one belongs. A
    loss that a file has chosen (``is_new``) has none yet.
    """
    draft = loss if isinstance(loss, Draft) else take_apart(loss, place)
    for name in draft.fields:
        below, by_default = place.at(name), is_new or name not in draft.values
        current = draft.get(name)
        if name == _VOCABULARY:
            wanted = by_default if current is None else current == old != new
            if wanted and below.key not in place.origins:
                draft.values[name] = new
                below.record(f"vocabulary of the model, see {place.file}")
        elif dataclasses.is_dataclass(current) or isinstance(current, Draft):
            draft.values[name] = _fit_vocabulary(current, old, new, below, by_default)
    return draft
