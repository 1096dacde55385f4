"""A table of a file into a config: every key known, every value of the declared type.

tyro does not check what a config already holds, so what is not checked here is not checked at all.
"""

import copy
import types
import typing
from dataclasses import is_dataclass
from typing import Any, Union, get_args, get_origin

from torchtitan.config import Configurable

from titan_ext.toml_config.components import component_config
from titan_ext.toml_config.draft import ABSENT, Draft, field_types, take_apart
from titan_ext.toml_config.errors import Place, nearest
from titan_ext.toml_config.legacy import legacy_advice
from titan_ext.toml_config.policies import choose_policy, named_choices
from titan_ext.toml_config.renames import OTHER_UNIT_ON_MAIN, RENAMED_ON_MAIN, say_renamed
from titan_ext.toml_config.scalars import NONE, as_any, as_scalar, describe_type, plain

__all__ = ["convert", "fill"]

COMPONENT = "component"


def fill(draft: Draft, table: dict[str, Any], place: Place) -> None:
    """Put the keys of ``table`` into ``draft``.

    Raises:
        TomlConfigError: for an unknown key or a wrong value.
    """
    draft.place = place
    try:
        hints = field_types(draft.cls)
    except NameError as error:
        raise place.error(f"the types of {draft.cls.__qualname__} are unknown: {error}.") from error
    for name, value in table.items():
        today = _todays_name(draft, table, name, value, place)
        below = place.at(name)
        current = draft.get(today)
        draft.values[today] = convert(hints[today], value, current, place.at(today), below)


def convert(
    annotation: Any, value: Any, current: Any, place: Place, shown: Place | None = None
) -> Any:
    """``value`` of a file as ``annotation``; a table changes ``current``, all else replaces it.

    Args:
        annotation: The declared type.
        value: From tomli.
        current: What the config holds now, or ``ABSENT``.
        place: The key.
        shown: The key as the file has it, for messages, where that is an alias.

    Returns:
        The value; a ``Draft`` for a config class.

    Raises:
        TomlConfigError: if it does not fit.
    """
    shown = shown or place
    annotation = plain(annotation)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _as_union(annotation, value, current, place, shown)
    if isinstance(annotation, type) and is_dataclass(annotation):
        return _as_config(annotation, value, current, place)
    if annotation is dict or origin is dict:
        return _as_dict(args[1] if args else Any, value, current, place)
    if annotation in (list, set, tuple) or origin in (list, set, frozenset, tuple):
        return _as_list(annotation, value, current, place)
    if annotation in (Any, object):
        result = as_any(value, current, shown)
    else:
        result = as_scalar(annotation, value, shown)
    place.record()
    return result


def _todays_name(draft: Draft, table: dict[str, Any], name: str, value: Any, place: Place) -> str:
    """The field that a key of a file means: itself, or what an alias stands for."""
    below = place.at(name)
    if name in draft.fields and below.key != "model_spec":
        return name
    if below.key in RENAMED_ON_MAIN:
        today = RENAMED_ON_MAIN[below.key]
        short = today.rpartition(".")[2]
        if short in table:
            raise below.error(f"is another name of {today}, and both are given.")
        say_renamed(place.file, below.key, today)
        return short
    if below.key in OTHER_UNIT_ON_MAIN:
        raise below.error(f"TorchTitan main's name, which {OTHER_UNIT_ON_MAIN[below.key]}.")
    if below.key == "model_spec":
        raise below.error("is made by extends and [model]; a file cannot set it.")
    old = legacy_advice(below.key, value)
    if old:
        key, advice = old
        found = Place(file=place.file, key=key)
        raise found.error(f"a key of TorchTitan 0.1 or 0.2; today: {advice}.")
    if not place.key:
        what = "no such section" if isinstance(value, dict) else "no such key"
        valid = [*(known for known in draft.fields if known != "model_spec"), "model"]
        raise below.error(what + nearest(name, valid))
    if name == COMPONENT:
        raise below.error(f"[{place.key}] has one class only; there is nothing to choose.")
    hint = nearest(name, draft.fields, prefix=f"{place.key}.")
    owner = draft.cls.__qualname__.removesuffix(".Config")
    raise below.error(f"no such key of {owner}{hint}")


def _as_union(annotation: Any, value: Any, current: Any, place: Place, shown: Place) -> Any:
    choices = named_choices(annotation)
    if choices:
        return choose_policy(choices, value, current, place, fill)
    members = [plain(arg) for arg in get_args(annotation)]
    if type(None) in members and value == NONE:
        place.record()
        return None
    members = [member for member in members if member is not type(None)]
    fitting = [member for member in members if _fits(member, value)]
    if isinstance(value, int) and not isinstance(value, bool) and not fitting:
        fitting = [member for member in members if member is float]
    if not fitting:
        if len(members) == 1 and not isinstance(value, dict | list):
            hint_of = members[0]
            if typing.get_origin(hint_of) is typing.Literal:
                return as_scalar(hint_of, value, shown)
        raise shown.expected(describe_type(annotation), value)
    return convert(fitting[0], value, current, place, shown)


def _fits(member: Any, value: Any) -> bool:
    """Whether a value is of the kind of a union's member; what is inside it is checked later."""
    origin = get_origin(member)
    if member in (Any, object):
        return True
    if isinstance(value, dict):
        return member is dict or origin is dict or is_dataclass(member)
    if isinstance(value, list):
        return (origin or member) in (list, tuple, set, frozenset)
    if origin is typing.Literal:
        return any(type(choice) is type(value) and choice == value for choice in get_args(member))
    if member in (bool, int, float, str):
        return type(value) is member
    return isinstance(value, str) and not is_dataclass(member) and origin not in (list, tuple, dict)


def _as_config(declared: type, value: Any, current: Any, place: Place) -> Draft:
    if not isinstance(value, dict):
        raise place.expected(f"a table [{place.key}]", value)
    table = dict(value)
    path = table.pop(COMPONENT, None) if issubclass(declared, Configurable.Config) else None
    present = current.cls if isinstance(current, Draft) else type(current)
    if not issubclass(present, declared):
        present = None
    chosen = present or declared
    if path is not None:
        if not isinstance(path, str):
            raise place.at(COMPONENT).expected("the dotted path of a class", path)
        chosen = component_config(path, declared, place.at(COMPONENT))
    if chosen is present:
        draft = take_apart(current, place)
    else:
        draft = Draft(chosen, {}, place)
        place.record(f"default of {chosen.__qualname__.removesuffix('.Config')}, see {place.file}")
    if path is not None:
        place.at(COMPONENT).record()
    fill(draft, table, place)
    return draft


def _as_dict(item: Any, value: Any, current: Any, place: Place) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise place.expected(f"a table [{place.key}]", value)
    result = dict(current) if isinstance(current, dict) else {}
    if not result:
        place.record()
    for name, below in value.items():
        result[name] = convert(item, below, result.get(name, ABSENT), place.at(name))
    return result


def _as_list(annotation: Any, value: Any, current: Any, place: Place) -> Any:
    origin, args = get_origin(annotation) or annotation, get_args(annotation)
    if isinstance(value, dict) and value and all(name.isdigit() for name in value):
        return _edit_items(annotation, value, current, place)
    if not isinstance(value, list):
        raise place.expected(describe_type(annotation), value)
    place.record()
    types_of_items = [args[0] if args else Any] * len(value)
    if origin is tuple and args and args[-1] is not Ellipsis:
        if len(args) != len(value):
            raise place.error(f"expected {describe_type(annotation)}, got {len(value)}.")
        types_of_items = list(args)
    items = [
        convert(of, item, ABSENT, place.at(str(index)))
        for index, (of, item) in enumerate(zip(types_of_items, value, strict=True))
    ]
    place.record()
    return items if origin is list else origin(items)


def _edit_items(annotation: Any, value: dict[str, Any], current: Any, place: Place) -> Any:
    """``[section.list.0]``: change an item where it is, as Titan's command line does."""
    origin, args = get_origin(annotation) or annotation, get_args(annotation)
    items = list(copy.copy(current)) if current is not ABSENT and current is not None else []
    for name, below in value.items():
        if int(name) >= len(items):
            raise place.at(name).error(
                f"no such item: {place.key} has {len(items)}, counted from 0."
            )
        item = args[0] if args else Any
        items[int(name)] = convert(item, below, items[int(name)], place.at(name))
    return items if origin is list else origin(items)
