"""The leaves of a config by dotted key, and where each of their values came from.

Kept beside the config: a config holds values only, the same whoever set them.
"""

import json
import typing
from dataclasses import fields, is_dataclass
from typing import Any

from titan_ext.toml_config.draft import field_types
from titan_ext.toml_config.policies import POLICY, named_choices, policy_of
from titan_ext.toml_config.scalars import plain

__all__ = ["leaves", "origin_of", "to_toml"]


def leaves(config: Any, prefix: str = "", declared: Any = None) -> dict[str, Any]:
    """Every value of a config by its dotted key, in the order of the fields.

    The key is the one that a TOML file and Titan's command line have. A section whose class or
    policy is a choice has ``component`` or ``policy`` first. The model spec is left out.
    """
    found: dict[str, Any] = {}
    if is_dataclass(config) and not isinstance(config, type):
        found |= _choice(config, prefix, declared)
        hints = field_types(type(config))
        for f in fields(config):
            if f.name.startswith("_") or (not prefix and f.name == "model_spec"):
                continue
            found |= leaves(getattr(config, f.name), _join(prefix, f.name), hints[f.name])
        return found
    if config is None and declared is not None and named_choices(declared):
        return {f"{prefix}.{POLICY}": "none"}
    if isinstance(config, dict) and config:
        for name, value in config.items():
            found |= leaves(value, _join(prefix, str(name)))
        return found
    if isinstance(config, list) and config and all(is_dataclass(item) for item in config):
        items = typing.get_args(plain(declared))
        for index, value in enumerate(config):
            found |= leaves(value, _join(prefix, str(index)), items[0] if items else None)
        return found
    return {prefix: config}


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _choice(config: Any, prefix: str, declared: Any) -> dict[str, Any]:
    choices = named_choices(declared)
    if choices:
        return {f"{prefix}.{POLICY}": policy_of(choices, config)}
    owner = getattr(type(config), "_owner", None)
    if owner is None or not prefix or type(config) is plain(declared):
        return {}
    return {f"{prefix}.component": f"{owner.__module__}.{owner.__qualname__}"}


def origin_of(key: str, origins: dict[str, str], default: str) -> str:
    """Who set ``key``: the record for it, else for what it is part of, else ``default``."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return default


def to_toml(value: Any) -> str:
    """A leaf as a TOML file would have it, as far as TOML can."""
    if value is None:
        return '"None"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{', '.join(to_toml(item) for item in value)}]"
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(str(k))} = {to_toml(v)}" for k, v in value.items())
        return f"{{{inside}}}"
    if hasattr(value, "__qualname__"):
        return json.dumps(f"{value.__module__}.{value.__qualname__}")
    return json.dumps(str(value))
