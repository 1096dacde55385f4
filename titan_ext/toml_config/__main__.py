# SPDX-License-Identifier: BSD-3-Clause
"""``python -m titan_ext.toml_config PATH [Titan flags]``: prints each value and its origin."""

import sys

from titan_ext.toml_config import TomlConfigError, resolve
from titan_ext.toml_config.files import to_toml


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m titan_ext.toml_config PATH [Titan flags]", file=sys.stderr)
        return 2
    try:
        resolved = resolve(arguments[0], arguments[1:])
    except TomlConfigError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"# {' <- '.join([resolved.base, *resolved.files])}")
    for key, value in resolved.values.items():
        print(f"{key} = {to_toml(value)}  # from {resolved.origins[key]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
