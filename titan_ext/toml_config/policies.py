"""Fields that are a choice by name, as ``activation_checkpoint``: the names are Titan's own.

Titan declares such a field as a union whose members carry the names of tyro's subcommands. Reading
them from there means that a policy added to the union is known here too.
"""

from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

from tyro.conf import subcommand

from titan_ext.toml_config.draft import Draft, take_apart
from titan_ext.toml_config.errors import Place, nearest

__all__ = ["POLICY", "choose_policy", "named_choices", "policy_of"]

POLICY = "policy"
_Subcommand = type(subcommand("name"))


def named_choices(annotation: Any) -> dict[str, type]:
    """The members of a union by their subcommand name, with ``_`` for ``-``; else nothing."""
    choices: dict[str, type] = {}
    for member in get_args(annotation):
        if get_origin(member) is not Annotated:
            return {}
        cls, *marks = get_args(member)
        names = [getattr(mark, "name", None) for mark in marks if isinstance(mark, _Subcommand)]
        if not names or names[0] is None:
            return {}
        choices[names[0].replace("-", "_")] = cls
    return choices


def policy_of(choices: dict[str, type], value: Any) -> str | None:
    """The name of what a field holds."""
    cls = value.cls if isinstance(value, Draft) else type(value)
    return next((name for name, choice in choices.items() if choice is cls), None)


def choose_policy(
    choices: dict[str, type],
    value: Any,
    current: Any,
    place: Place,
    fill: Callable[[Draft, dict[str, Any], Place], None],
) -> Draft | None:
    """The policy that a table names, or else the present one, with the keys beside the name.

    Raises:
        TomlConfigError: for an unknown policy or key.
    """
    if not isinstance(value, dict):
        raise place.expected(f"a table [{place.key}] with {POLICY} = ...", value)
    table = dict(value)
    present = policy_of(choices, current)
    name = table.pop(POLICY, None)
    if name is not None and not isinstance(name, str):
        raise place.at(POLICY).expected("a string", name)
    if name is not None and name.replace("-", "_") not in choices:
        raise place.at(POLICY).error(f'no policy is called "{name}"{nearest(name, choices)}')
    chosen = name.replace("-", "_") if name is not None else present
    if chosen is not None and choices[chosen] is type(None):
        return _no_policy(table, choices, name, place)
    if chosen == present and current is not None:
        draft = take_apart(current, place)
    else:
        assert chosen is not None, f"{place.key} holds a policy that its type does not name"
        draft = Draft(choices[chosen], {}, place)
        place.record(f'default of the policy "{chosen}", see {place.file}')
    if name is not None:
        place.at(POLICY).record()
    fill(draft, table, place)
    return draft


def _no_policy(
    table: dict[str, Any], choices: dict[str, type], name: str | None, place: Place
) -> None:
    if table and name is None:
        fill_in = ", ".join(f'"{choice}"' for choice in choices if choice != "none")
        raise place.at(next(iter(table))).error(
            f"{place.key} is off in what this file extends; say which {POLICY} first: {fill_in}."
        )
    if table:
        raise place.at(next(iter(table))).error(f'has no meaning with {POLICY} = "{name}".')
    place.record()
    place.at(POLICY).record()
