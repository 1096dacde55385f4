"""Single values of a TOML file, checked against the type that a config class declares.

Stricter than Python: true is no integer, "3" is no number. An integer is accepted for a float.
"""

import datetime
import enum
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from titan_ext.toml_config.components import import_dotted
from titan_ext.toml_config.errors import Place, nearest

__all__ = ["NONE", "as_any", "as_scalar", "describe_type", "plain"]

NONE = "None"
"""How a file says None, which TOML lacks; Titan's command line says it the same way."""

_NAMES = {bool: "true or false", int: "an integer", float: "a float", str: "a string"}


def plain(annotation: Any) -> Any:
    """An annotation without ``Annotated``."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def describe_type(annotation: Any) -> str:
    """A type in the words of a message."""
    annotation = plain(annotation)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe_type(arg) for arg in args))
    if annotation in (None, type(None)):
        return f'"{NONE}"'
    if origin is Literal:
        return "one of " + ", ".join(_shown(choice) for choice in args)
    if origin in (list, set, frozenset):
        return f"a list of {_plural(args[0])}" if args else "a list"
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return f"a list of {_plural(args[0])}"
        return f"a list of {len(args)}: {', '.join(describe_type(arg) for arg in args)}"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "one of " + ", ".join(f'"{member.name}"' for member in annotation)
    if _is_callable_type(annotation):
        return "the dotted path of a function"
    if annotation is Path:
        return "a path"
    return _NAMES.get(annotation, "a table")


def as_scalar(annotation: Any, value: Any, place: Place) -> Any:
    """``value`` as ``annotation``: bool, int, float, str, Path, Literal, Enum or a callable.

    Raises:
        TomlConfigError: for another type, or a type that a file cannot express.
    """
    annotation = plain(annotation)
    if annotation is bool and isinstance(value, bool):
        return value
    if annotation is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if annotation is str and isinstance(value, str):
        return value
    if annotation is Path and isinstance(value, str):
        return Path(value)
    if get_origin(annotation) is Literal:
        return _as_literal(annotation, value, place)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _as_enum(annotation, value, place)
    if _is_callable_type(annotation) and isinstance(value, str):
        function = import_dotted(value, place)
        if not callable(function):
            raise place.error(f"{value} is no function, but {type(function).__name__}.")
        return function
    if annotation in _NAMES or annotation is Path or _is_callable_type(annotation):
        raise place.expected(describe_type(annotation), value)
    raise place.error(
        f"its type, {inspect.formatannotation(annotation)}, cannot be written in a TOML file; "
        "set it in a Python config function and extend that."
    )


def as_any(value: Any, current: Any, place: Place) -> Any:
    """A value that no type is declared for: it keeps the kind of the value that it replaces.

    So that ``lr = "1e-4"`` is an error here, and not in the optimizer.
    """
    if isinstance(value, datetime.date | datetime.time):
        raise place.expected("a value that Python's json module knows", value)
    if isinstance(current, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(current, bool | int | float | str) and value != NONE:
        kind = float if isinstance(current, float) else type(current)
        return as_scalar(kind, value, place)
    return None if value == NONE else value


def _as_literal(annotation: Any, value: Any, place: Place) -> Any:
    choices = get_args(annotation)
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    hint = nearest(value, map(str, choices)) if isinstance(value, str) else "."
    hint = hint if "did you mean" in hint else "."
    raise place.expected(describe_type(annotation), value, hint)


def _as_enum(annotation: type[enum.Enum], value: Any, place: Place) -> Any:
    if isinstance(value, str) and value in annotation.__members__:
        return annotation[value]
    raise place.expected(describe_type(annotation), value)


def _is_callable_type(annotation: Any) -> bool:
    return annotation is Callable or get_origin(annotation) is Callable


def _shown(choice: Any) -> str:
    return f'"{choice}"' if isinstance(choice, str) else str(choice)


def _plural(annotation: Any) -> str:
    names = {bool: "true or false", int: "integers", float: "floats", str: "strings"}
    annotation = plain(annotation)
    if annotation in names:
        return names[annotation]
    described = describe_type(annotation)
    return "tables" if described == "a table" else f"({described})"
