"""A config that is being changed: the class to build and the values to build it with.

Titan's config classes check themselves when they are built. Were a file's keys set one by one on a
built config, no check would run; were each file of a chain built, a file that is only meant to be
extended would have to be complete. So every section that a file touches is taken apart, and all is
built once, at the end.
"""

import typing
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from titan_ext.toml_config.errors import Place

__all__ = ["ABSENT", "Draft", "build", "field_types", "take_apart"]

ABSENT: Any = object()
"""A required key that nothing has set."""


class Draft:
    """Values for ``cls``; a key that is not among them has the default of its class."""

    def __init__(self, cls: type, values: dict[str, Any], place: Place) -> None:
        self.cls = cls
        self.values = values
        self.place = place
        """Where a file touched it last: that file is named if the class refuses the values."""

    @property
    def fields(self) -> dict[str, Field]:
        return {f.name: f for f in fields(self.cls) if f.init and not f.name.startswith("_")}

    def get(self, name: str) -> Any:
        """The value of a key as it stands, or ``ABSENT``."""
        if name not in self.values:
            field = next(f for f in fields(self.cls) if f.name == name)
            if field.default is not MISSING:
                return field.default
            if field.default_factory is MISSING:
                return ABSENT
            self.values[name] = field.default_factory()
        return self.values[name]


def field_types(cls: type) -> dict[str, Any]:
    """The declared type of every field of a config class, with what ``Annotated`` says.

    Raises:
        NameError: if the class postpones its annotations and their names cannot be found.
    """
    return typing.get_type_hints(cls, include_extras=True)


def take_apart(value: Any, place: Place) -> Draft:
    """The draft of a config that is built; its parts stay built until they are touched."""
    if isinstance(value, Draft):
        value.place = place
        return value
    assert is_dataclass(value)
    assert not isinstance(value, type)
    values = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
    return Draft(type(value), values, place)


def build(value: Any) -> Any:
    """Build every draft in ``value``, innermost first, so that all their checks run.

    Raises:
        TomlConfigError: if a required key is missing, or a class refuses its values.
    """
    if isinstance(value, list):
        return [build(item) for item in value]
    if isinstance(value, tuple):
        return tuple(build(item) for item in value)
    if isinstance(value, dict):
        return {key: build(item) for key, item in value.items()}
    if not isinstance(value, Draft):
        return value
    missing = [name for name in value.fields if value.get(name) is ABSENT]
    if missing:
        raise value.place.error(
            f"missing {', '.join(missing)}: {value.cls.__qualname__} has no default for it."
        )
    values = {name: build(item) for name, item in value.values.items()}
    try:
        return value.cls(**values)
    except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
        raise value.place.error(str(error) or type(error).__name__) from error
