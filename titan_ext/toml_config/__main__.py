"""``python -m titan_ext.toml_config PATH [Titan flags]``: each value, and where it came from."""

import sys
from collections.abc import Iterator
from typing import Any

import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from titan_ext.toml_config.errors import TomlConfigError
from titan_ext.toml_config.origins import to_toml
from titan_ext.toml_config.resolve import Resolved, resolve

__all__ = ["apply_flags", "report"]

COMMAND_LINE = "command line"
USAGE = "usage: python -m titan_ext.toml_config PATH [Titan flags]"


def apply_flags(resolved: Resolved, flags: list[str]) -> Resolved:
    """The config with Titan's command-line flags on top, parsed as ``torchtitan.train`` does.

    Raises:
        SystemExit: from tyro, for a flag that Titan does not have.
    """
    before = resolved.values
    ConfigManager()  # registers Titan's rules, such as A,B,C for a list of strings
    config: Any = tyro.cli(
        type(resolved.config), args=flags, default=resolved.config, registry=custom_registry
    )
    changed = Resolved(
        config=config,
        files=resolved.files,
        base=resolved.base,
        model=resolved.model,
        origins={},
    )
    named = set(_keys_of(flags))
    for key, value in changed.values.items():
        same = key in before and before[key] == value and key not in named
        changed.origins[key] = resolved.origins[key] if same else COMMAND_LINE
    return changed


def report(resolved: Resolved) -> Iterator[str]:
    """One line for each value: ``key = value  # from origin``."""
    yield f"# {' <- '.join([resolved.base, *resolved.files])}"
    for key, value in resolved.values.items():
        yield f"{key} = {to_toml(value)}  # from {resolved.origins[key]}"


def _keys_of(flags: list[str]) -> Iterator[str]:
    for flag in flags:
        if flag.startswith("--"):
            section, _, key = flag[2:].split("=")[0].replace("-", "_").rpartition(".")
            prefix = f"{section}." if section else ""
            yield prefix + key
            if key.startswith("no_"):
                yield prefix + key.removeprefix("no_")


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        resolved = resolve(arguments[0])
    except TomlConfigError as error:
        print(error, file=sys.stderr)
        return 1
    for line in report(apply_flags(resolved, arguments[1:])):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
