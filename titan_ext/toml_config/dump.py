# SPDX-License-Identifier: BSD-3-Clause
"""Writes a config as a TOML file that loads as the same config.

A config does not tell which Python config function it came from, nor the choices of its model:
whoever calls the function says so here (``remember_base``), and ``dump`` looks it up by the model.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from titan_ext.toml_config.files import to_toml

_BASES: dict[int, tuple[Any, str, dict[str, Any]]] = {}
"""By the identity of a model's config: that config, to keep the identity; base; its choices."""


def remember_base(config: Any, base: str, model: dict[str, Any]) -> None:
    """Note that ``config`` extends the function ``base``, with ``model`` as its [model] section."""
    if config.model_spec is not None:
        _BASES[id(config.model_spec.model)] = config.model_spec.model, base, model


def dump(config: Any) -> str:
    """A TOML file with every value of a trainer's config.

    A config that was made in Python gets a comment in place of ``extends``.
    """
    _, base, model = _BASES.get(id(getattr(config.model_spec, "model", None)), (None, "", {}))
    first = "# made in Python: to load this, say in extends = ... which config function it changes"
    lines = [f"extends = {to_toml(base)}" if base else first]
    lines += [f"model.{key} = {to_toml(value)}" for key, value in model.items()]
    lines += [f"{key} = {to_toml(value)}" for key, value in _whole(config)]
    return "\n".join(lines) + "\n"


def _whole(config: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values; a dict or a list of sections is one: its items need not be in the base."""
    from titan_ext.toml_config import leaves

    dicts: dict[str, Any] = {}
    lists: dict[str, dict[str, Any]] = {}
    for key, value in leaves(config).items():
        name, container = container_of(config, key)
        if container is None:
            yield key, value
        elif isinstance(container, dict):
            dicts[name] = container
        else:
            lists.setdefault(name, {})[key.removeprefix(f"{name}.")] = value
    yield from dicts.items()
    for name, items in lists.items():
        yield name, list_of_tables(items)


def list_of_tables(leaves: Mapping[str, Any]) -> list[Any]:
    """A list of sections, from its leaves by key ("0.lr"). Their own dicts are tables again."""
    items: dict[str, Any] = {}
    for key, value in leaves.items():
        *path, last = key.split(".")
        table = items
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return list(items.values())


def container_of(config: Any, key: str) -> tuple[str, Any]:
    """The outermost list or dict that a key lies in, after its own key; None if there is none."""
    parts, found = key.split("."), config
    for count, part in enumerate(parts[:-1], 1):
        found = getattr(found, part, None)
        if isinstance(found, dict | list):
            return ".".join(parts[:count]), found
    return key, None
