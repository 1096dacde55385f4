# SPDX-License-Identifier: BSD-3-Clause
"""``python -m titan_ext.toml_config PATH [Titan flags]``: prints each value and its origin."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from titan_ext.toml_config import Resolved, TomlConfigError, resolve
from titan_ext.toml_config.files import to_toml

COMMAND_LINE = "command line"


def apply_flags(resolved: Resolved, flags: list[str]) -> Resolved:
    """The config with Titan's command-line flags on top, parsed as ``torchtitan.train`` does.

    Raises:
        SystemExit: from tyro, for a flag that Titan does not have.
    """
    before, named = resolved.values, set(_keys_of(flags))
    ConfigManager()  # registers Titan's rules, such as A,B,C for a list of strings
    config: Any = tyro.cli(
        type(resolved.config), args=flags, default=resolved.config, registry=custom_registry
    )
    changed = dataclasses.replace(resolved, config=config, origins={})
    for key, value in changed.values.items():
        same = key in before and before[key] == value and key not in named
        changed.origins[key] = resolved.origins[key] if same else COMMAND_LINE
    return changed


def _keys_of(flags: list[str]) -> Iterator[str]:
    for flag in flags:
        if flag.startswith("--"):
            section, dot, key = flag[2:].split("=")[0].replace("-", "_").rpartition(".")
            yield from (section + dot + key, section + dot + key.removeprefix("no_"))


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m titan_ext.toml_config PATH [Titan flags]", file=sys.stderr)
        return 2
    try:
        resolved = apply_flags(resolve(arguments[0]), arguments[1:])
    except TomlConfigError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"# {' <- '.join([resolved.base, *resolved.files])}")
    for key, value in resolved.values.items():
        print(f"{key} = {to_toml(value)}  # from {resolved.origins[key]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
