# SPDX-License-Identifier: BSD-3-Clause
"""The key ``budget``, and the releases that a table solved for one belongs to.

A solved table names operations by their number ("aten.mul:*:2"). Another release of torch or of
Titan may run others, and the same number then means another one. So a table carries the releases
that it was solved with, and no other run takes it.
"""

from collections.abc import Mapping
from importlib import metadata
from typing import Any, NamedTuple

from titan_ext.base.messages import BYTES, parse_bytes

KEY = "activation_checkpoint"
FIT = "fit"
_PACKAGES = ("torch", "torchtitan")


class Budget(NamedTuple):
    """Bytes for activations; None is what a step leaves of ``memory``, or of the device's."""

    nbytes: int | None
    memory: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """The budget that "20GiB", "fit" or "fit 80GiB" means; raises ValueError for others."""
        word, _, size = text.partition(" ")
        if text == FIT:
            return cls(None)
        nbytes = parse_bytes(size if word == FIT else text)
        if nbytes is None:
            raise ValueError(
                f'{KEY}.budget is {text!r}; expected a size such as "20GiB" (units '
                f'{", ".join(BYTES)}), "fit" for what the device\'s memory leaves, or "fit 80GiB".'
            )
        return cls(None, nbytes) if word == FIT else cls(nbytes)


def has_budget(config: Any) -> bool:
    """True if a trainer's config has a budget to solve for."""
    return bool(getattr(config.activation_checkpoint, "budget", ""))


def releases() -> dict[str, str]:
    """The releases that decide which operations a block runs: {"torch": "2.15", ...}."""
    return {name: ".".join(metadata.version(name).split(".")[:2]) for name in _PACKAGES}


def check_releases(solved_with: Mapping[str, str]) -> None:
    """Raise ValueError if a table was solved with other releases than run here."""
    here = releases() if solved_with else {}
    for name, solved in solved_with.items():
        if name in here and solved != here[name]:
            raise ValueError(
                f"{KEY}.op_policies was solved with {name} {solved}, and this is {here[name]}: "
                "the numbers of its operations may mean others. Expected a table that is solved "
                f"again (titan_ext dry-run --activations), or no {KEY}.solved_with: then nothing "
                "is compared."
            )
