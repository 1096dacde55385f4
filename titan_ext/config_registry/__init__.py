# SPDX-License-Identifier: BSD-3-Clause
"""Titan's entry point: ``--module titan_ext --config NAME`` calls ``NAME()`` here.

NAME is a TOML file (``my_run.toml``, or a shipped one, ``moe_debug.toml``), any config function of
Titan's own models (``deepseek_v3_16b``), or one of the user's as ``module.function``.
``toml.find`` tells which; ``__getattr__`` finds them.

This module imports torch and Titan only when someone asks for a config. Titan mistakes an
ImportError in this module for a missing module; inside a config function it shows the error.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_ext.base.messages import Mistakes, end_with_messages, log_on_one_node
from titan_ext.toml.find import check_config, find_config, module_and_config, titan_configs

if TYPE_CHECKING:
    from titan_ext.config_registry.resolve import Resolved
    from titan_ext.run.trainer import Trainer


def resolve_config(name: str, flags: Sequence[str], *, flags_follow: bool = False) -> "Resolved":
    """The config ``name`` (``find_config``) with flags on top, and where its values come from.

    With ``flags_follow`` the caller puts others on top, which may mend what is wrong without them.
    """
    check_config(name)
    from titan_ext.config_registry.resolve import resolve

    found = find_config(name)
    if isinstance(found, Path):
        here = found.is_absolute() and found.is_relative_to(Path.cwd())
        path = found.relative_to(Path.cwd()) if here else found
        return resolve(path, flags, flags_follow=flags_follow)
    return resolve(name, flags, function=found, flags_follow=flags_follow)


def _config(name: str) -> "Trainer.Config":
    """The config ``name``, checked with the flags that stand beside it on the command line.

    Where it does not stand there, as for ``ConfigManager().parse_args(list)`` of a notebook, Titan
    has the flags, and checks what it makes of both.
    """
    from titan_ext.base.run_check import world_size
    from titan_ext.parallelize.limits import wrong_degrees

    log_on_one_node()
    handler = "titan_ext.run.start.register_handler"
    os.environ.setdefault("TITAN_STRUCT_LOGGER_HANDLERS", handler)
    known, flags = module_and_config(sys.argv[1:])
    if known.config != name:
        return resolve_config(name, (), flags_follow=True).config
    config = resolve_config(name, flags).config
    Mistakes(wrong_degrees(config, world_size(config))).raise_all()
    return config


def __getattr__(name: str) -> Callable[[], Any]:
    if name.startswith("_"):
        raise AttributeError(name)
    end_with_messages(name)
    check_config(name)  # now, when Titan asks for the function
    return functools.partial(_config, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *titan_configs()])
