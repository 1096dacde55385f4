# SPDX-License-Identifier: BSD-3-Clause
"""Titan's entry point: ``--module titan_ext --config NAME`` calls ``NAME()`` here.

NAME is a TOML file (``my_run.toml``, or a shipped one, ``moe_debug.toml``), any config function of
Titan's own models (``deepseek_v3_16b``), or one of the user's as ``module.function``
(``toml.files.find``). ``config_registry.resolve`` makes its config.

This module imports torch and Titan's models only when someone asks for a config. Titan mistakes an
ImportError in this module for a missing module; inside a config function it shows the error.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from titan_ext.base.messages import Mistakes, end_with_messages
from titan_ext.config_registry.terminal import log_on_one_node
from titan_ext.toml.files import WORLD_SIZE, read_chain, titan_configs

if TYPE_CHECKING:
    from titan_ext.run.trainer import Trainer


def _config(name: str) -> "Trainer.Config":
    """The config ``name``, checked with the flags that stand beside it on the command line."""
    from torchtitan.tools.logging import logger

    from titan_ext.base.run_check import world_size
    from titan_ext.config_registry.resolve import resolve
    from titan_ext.parallelize.limits import wrong_degrees

    log_on_one_node()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--module", "--config"):
        parser.add_argument(option, nargs="?")  # Titan refuses one without its value
    known, flags = parser.parse_known_args(sys.argv[1:])
    # Elsewhere, as in a notebook, the arguments may be another program's.
    resolved = resolve(name, flags if known.config == name else [])
    config, said = resolved.config, resolved.world_size
    ranks = world_size(config)
    Mistakes(f"{name}: {wrong}" for wrong in wrong_degrees(config, ranks)).raise_all()
    if said and ranks not in (None, said):
        logger.warning(f"{name} is for {said} ranks ({WORLD_SIZE}); this run has {ranks}.")
    return config


def __getattr__(name: str) -> Callable[[], Any]:
    if name.startswith("_"):
        raise AttributeError(name)
    end_with_messages(name)
    read_chain(name)  # a wrong name or file is told before torch is imported
    return functools.partial(_config, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *titan_configs()])
