# SPDX-License-Identifier: BSD-3-Clause
"""Values of a config by dotted key, and as a TOML file that makes the same config again.

It knows no trainer, so that a run can write down its own config.
"""

import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from typing_extensions import is_protocol

from titan_ext.toml.convert import COMPONENT, POLICY, named_choices, plain
from titan_ext.toml.files import MODEL, to_toml


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
