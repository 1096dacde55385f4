# SPDX-License-Identifier: BSD-3-Clause
"""Turns tables of files into configs, checks every key and every value's type; and the way back.

pydantic checks the values. This module chooses each section's class and what a table changes.
Titan's config classes check themselves when they are built, so each is built once, from all files
together. ``dump`` writes a file that makes the same config again. Nothing here knows a trainer, so
that a run can write down its own config.
"""

import itertools
import json
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from inspect import formatannotation
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from torchtitan.config import Configurable
from typing_extensions import is_protocol
from tyro.conf import subcommand

from titan_ext.base.messages import did_you_mean
from titan_ext.toml.files import (
    MODEL,
    NONE,
    WORLD_SIZE,
    KeyLocation,
    TomlConfigError,
    import_dotted,
    nearest,
    to_toml,
)

COMPONENT = "component"
POLICY = "policy"
_STRICT = ConfigDict(strict=True)
_Subcommand: Any = type(subcommand("name"))


class Given(NamedTuple):
    """A file's value for a key."""

    at: KeyLocation
    value: Any


def values_of(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config) if f.init}


def build(cls: type, values: dict[str, Any], at: KeyLocation) -> Any:
    """A config of ``values``; if the class refuses them, the error names ``at``.

    For the whole config it raises all mistakes found so far.
    """
    if at.errors and not at.key:
        raise TomlConfigError.of_all(at.errors)
    try:
        return cls(**values)
    except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
        raise at.error(str(error) or type(error).__name__) from error


def changed(cls: type, values: dict[str, Any], tables: list[Given]) -> dict[str, Any]:
    """``values`` of a config class, changed by the tables of files in turn.

    Notes an error for each unknown key and each wrong value.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {f.name: f for f in fields(cls) if f.init and f.name[0] != "_"}
    found.pop("model_spec", None)  # made by extends and [model]
    given: dict[str, list[Given]] = {}
    for at, table in tables:
        for name, value in table.items():
            with at.noting():
                if name not in found:
                    owner = cls.__qualname__.removesuffix(".Config")
                    what = "section" if isinstance(value, dict) else f"key of {owner}"
                    valid = [*found, *([] if at.key else [MODEL, WORLD_SIZE])]
                    raise at.below(name).error(f"no such {what}{nearest(name, valid)}")
                given.setdefault(name, []).append(Given(at.below(name), value))
    values = dict(values)
    for key, changes in given.items():
        default, factory = found[key].default, found[key].default_factory
        if key not in values:
            values[key] = default if factory is MISSING else factory()
        with changes[-1].at.noting():
            values[key] = convert(hints[key], changes, values[key])
    return values


def convert(hint: Any, given: list[Given], current: Any) -> Any:
    """A key's value of type ``hint`` from all files: tables change it, all else replaces it.

    ``given`` are the files' values in order, ``current`` the value before, or ``MISSING``. Raises
    TomlConfigError if it does not fit.
    """
    at, value = given[-1]
    later = itertools.takewhile(lambda each: isinstance(each.value, dict), reversed(given))
    tables = list(later)[::-1]
    if tables and len(tables) < len(given):
        current = convert(hint, given[: -len(tables)], current)
    options, choices = options_of(hint), named_choices(hint)
    if choices and tables:
        return _section(POLICY, choices, tables, current)
    if choices:
        raise at.error(f"expected a table [{at.key}] with {POLICY} = ..., got {to_toml(value)}.")
    if value == NONE and type(None) in options:
        at.record()
        return None
    for option in options:
        kind, args = get_origin(option) or option, get_args(option)
        item = plain(args[kind is dict]) if args else Any
        if is_dataclass(kind) and tables:
            choice = COMPONENT if issubclass(kind, Configurable.Config) else ""
            return _section(choice, kind, tables, current)
        if is_dataclass(kind):
            raise at.error(f"expected a table [{at.key}], got {to_toml(value)}.")
        if kind in (dict, list, tuple) and tables:
            return _items(kind, item, tables, current)
        if kind is list and is_dataclass(item):
            at.record()
            converted = []
            for index, table in enumerate(_checked(list[dict], value, at)):
                with at.noting():
                    given = [Given(at.below(str(index)), table)]
                    converted.append(convert(item, given, MISSING))
            return converted
    at.record()
    return _checked(hint, value, at, current)


def _section(choice: str, declared: Any, tables: list[Given], current: Any) -> Any:
    """A section of the class that was chosen last; drops keys given for another class.

    The key ``choice``, if not "", chooses one of the classes ``declared``: policies by name, or
    a component's subclasses.
    """
    cls, kept = type(current), []
    for at, table in tables:
        if (picked := _class_for(declared, choice, table, at, cls)) is not cls:
            cls, current, kept = picked, MISSING, []
            at.record()
        if choice in table:
            at.below(choice).record()
        kept.append(Given(at, {key: table[key] for key in table if key != choice}))
    if cls is type(None):
        for at, table in kept:
            for key in table:
                raise at.below(key).error(f'has no meaning: {at.key}.{choice} is "none".')
        return None
    at, values = tables[-1].at, {} if current is MISSING else values_of(current)
    before = len(at.errors)
    values = changed(cls, values, kept)
    if len(at.errors) > before:  # it would be refused for what is missing now
        raise at.errors[-1]
    return build(cls, values, at)


def _class_for(declared: Any, choice: str, table: dict, at: KeyLocation, current: type) -> type:
    """The class that a table chooses; by default that of the value before."""
    name, at = table.get(choice), at.below(choice)
    if choice == POLICY:
        if name is not None and str(name).replace("-", "_") not in declared:
            raise at.error(f"no policy is called {to_toml(name)}{nearest(str(name), declared)}")
        return current if name is None else declared[name.replace("-", "_")]
    if not choice or choice not in table:
        return current if issubclass(current, declared) else declared
    found = import_dotted(name, at)
    config = getattr(found, "Config", found)
    if not (isinstance(config, type) and is_dataclass(config) and issubclass(config, declared)):
        wanted = declared.__qualname__.removesuffix(".Config")
        raise at.error(f"expected a kind of {wanted}, but {name} is not one.")
    return config


def _items(kind: Any, item: Any, tables: list[Given], current: Any) -> Any:
    """A dict or a list with some of its items changed; ``[section.list.0]`` is the first item.

    An empty table clears a dict: without it no file could take back what the one that it extends
    has.
    """
    at = tables[-1].at
    if kind is dict:
        items = dict(current) if isinstance(current, dict) else {}
        if any(not table.value for table in tables):
            last = max(i for i, table in enumerate(tables) if not table.value)
            items, tables = {}, tables[last + 1 :]
    else:
        items = {str(i): each for i, each in enumerate(current or ())}
    if not items:
        at.record()
    given = [(name, Given(of.at.below(name), of.value[name])) for of in tables for name in of.value]
    for name in dict.fromkeys(name for name, _ in given):
        with at.noting():
            if name not in items and kind is not dict:
                problem = f"no such item: {at.key} has {len(items)}, counted from 0."
                raise at.below(name).error(problem)
            changes = [change for key, change in given if key == name]
            items[name] = convert(item, changes, items.get(name, MISSING))
    return items if kind is dict else kind(items.values())


def plain(hint: Any) -> Any:
    """Strip ``Annotated`` from a type."""
    return plain(get_args(hint)[0]) if get_origin(hint) is Annotated else hint


def options_of(hint: Any) -> list[Any]:
    """The members of a union, or the one type."""
    hint = plain(hint)
    is_union = get_origin(hint) in (Union, types.UnionType)
    return [plain(option) for option in get_args(hint)] if is_union else [hint]


def named_choices(hint: Any) -> dict[str, type]:
    """The members of a union by the names that tyro's command line has for them, ``_`` for ``-``.

    Empty for other types. Titan declares activation_checkpoint so; new policies in the union are
    known here too.
    """
    members = get_args(hint)
    marked = [
        (mark.name.replace("-", "_"), plain(member))
        for member in members
        for mark in getattr(member, "__metadata__", ())
        if isinstance(mark, _Subcommand) and mark.name
    ]
    return dict(marked) if len(marked) == len(members) else {}


def _checked(hint: Any, value: Any, at: KeyLocation, current: Any = MISSING) -> Any:
    """Let pydantic check a value without config classes: true is not an integer, nor is "3"."""
    if plain(hint) in (Any, object):
        return _like(current, value, at)
    for option in options_of(hint):
        if isinstance(value, str) and Callable in (option, get_origin(option)):
            found = import_dotted(value, at)
            if not callable(found):
                raise at.error(f"{value} is not a function, but {type(found).__name__}.")
            return found
    try:
        # JSON, because pydantic then takes a list for a tuple and a string for a path.
        return TypeAdapter(hint, config=_STRICT).validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        raise _refusal(hint, value, error, at) from error
    except PydanticUserError as error:
        raise at.error(
            f"its type, {formatannotation(hint)}, cannot be written in a TOML file; set it in a "
            "Python config function and extend that."
        ) from error


def _like(current: Any, value: Any, at: KeyLocation) -> Any:
    """Check a value without a declared type: it must be of the kind that it replaces.

    So ``lr = "1e-4"`` is an error here, not in the optimizer.
    """
    if value == NONE:
        return None
    if isinstance(current, bool | int | float | str):
        return _checked(type(current), value, at)
    checked = _checked(list | dict | str | float | int | bool, value, at)
    return tuple(checked) if isinstance(current, tuple) and isinstance(checked, list) else checked


def _refusal(hint: Any, value: Any, error: ValidationError, at: KeyLocation) -> Exception:
    """Turn pydantic's errors, one for each member of a union, into one of ours."""
    problems, choices = error.errors(include_url=False), []
    for index in problems[0]["loc"]:
        if not isinstance(value, list) or not isinstance(index, int) or index >= len(value):
            break
        at, value = at.below(str(index)), value[index]
    expected = [problem["msg"].removeprefix("Input should be ") for problem in problems]
    for option in options_of(hint):
        if option is type(None):
            expected.append(f'"{NONE}"')
        if get_origin(option) is typing.Literal:
            choices += [str(choice) for choice in get_args(option)]
    end = did_you_mean(value, choices) if isinstance(value, str) else "."
    return at.error(f"expected {' or '.join(expected)}, got {to_toml(value)}{end}")


def dump(config: Any) -> str:
    """A TOML file with every value of a trainer's config.

    A config that was made in Python gets a comment in place of ``extends``.
    """
    base, model = _base_of(config)
    first = "# made in Python: to load this, say in extends = ... which config function it changes"
    lines = [f"extends = {to_toml(base)}" if base else first]
    lines += [f"{key} = {to_toml(value)}" for key, value, _ in lines_of(config, model)]
    return "\n".join(lines) + "\n"


def identity(config: Any) -> dict[str, Any]:
    """``extends``, empty for a config made in Python, and every value by its dotted key."""
    base, model = _base_of(config)
    return {"extends": base, **leaves(config, model)}


def _base_of(config: Any) -> tuple[str, dict[str, Any]]:
    spec = config.model_spec
    return getattr(spec, "extends", ""), getattr(spec, "choices", {})


def lines_of(
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
        # Of any class with the right methods, such as a data set of main's: no file can name it.
        names = [name for name in names if not is_protocol(plain(hints[name]))]
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
