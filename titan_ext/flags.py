# SPDX-License-Identifier: BSD-3-Clause
"""Titan's command-line flags, on top of a config, with an error that can be passed on.

Titan's ConfigManager does the same right after; there a wrong flag prints a box and exits, on every
rank, and torchrun cannot tell why.
"""

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from titan_ext.mistakes import checks_later

_FRAME = re.compile(r"[\u2500-\u257f]+")  # box drawing


def of_this_command(config: str) -> list[str]:
    """The flags of this program's command line, if it has ``--config`` with this name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--module")
    parser.add_argument("--config")
    known, flags = parser.parse_known_args(sys.argv[1:])
    return flags if known.config == config else []


def with_flags(config: Any, flags: Sequence[str]) -> Any:
    """A new config, parsed as ``torchtitan.train`` does; it is not checked yet.

    Raises:
        ValueError: in tyro's words, for a flag or a value that Titan does not have.
    """
    ConfigManager()  # registers Titan's rules, such as A,B,C for a list of strings
    said = io.StringIO()
    try:
        with checks_later(), contextlib.redirect_stderr(said):
            return tyro.cli(type(config), args=flags, default=config, registry=custom_registry)
    except SystemExit as end:
        if not end.code:  # --help
            raise
    lines = (_FRAME.sub("", line).strip() for line in said.getvalue().splitlines())
    raise ValueError("\n  ".join(line for line in lines if line))


def keys_of_flags(flags: Sequence[str]) -> Iterator[str]:
    """The dotted keys that flags name."""
    for flag in flags:
        if flag.startswith("--"):
            section, dot, key = flag[2:].split("=")[0].replace("-", "_").rpartition(".")
            yield from (section + dot + key, section + dot + key.removeprefix("no_"))
