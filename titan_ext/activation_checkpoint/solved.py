# SPDX-License-Identifier: BSD-3-Clause
"""Checks that a table solved for a budget still means the operations that it was solved for.

A solved table names operations by their number ("aten.mul:*:2"). Another release of torch, of
Titan or of a model may run others, and the same number then means another one. So a table carries
how often each pattern matches in each kind of block, and the first forward is compared with that.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch.nn as nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.tools.logging import logger

from titan_ext.activation_checkpoint.op_policies import ROOT, OpLocation, parse_rules
from titan_ext.base import no_accelerator
from titan_ext.base.messages import BYTES, parse_bytes

__all__ = ["FIT", "KEY", "Budget", "check_operations", "has_budget", "solved_for"]

KEY = "activation_checkpoint"
FIT = "fit"


class Budget(NamedTuple):
    """Bytes for activations; None is what a step leaves of ``memory``, or of the device's."""

    nbytes: int | None
    memory: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Of "20GiB", "fit" or "fit 80GiB"; raises ValueError."""
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
    """Whether a trainer's config has a budget to solve for."""
    return bool(getattr(config.activation_checkpoint, "budget", ""))


def solved_for(
    table: Mapping[str, str], blocks: Mapping[str, Iterable[OpLocation]]
) -> dict[str, str]:
    """How often the patterns of ``table`` that name an operation match, numbers left out.

    Args:
        table: Solved ``op_policies``.
        blocks: The operations of the first block of each kind, in order, by its name.

    Returns:
        By block: "moe:aten.add 3, moe.routed_experts:aten.index 7".
    """
    patterns = dict.fromkeys(filter(None, map(_counted, table)))
    found = {}
    for name, locations in blocks.items():
        counts = _count(patterns, name, locations)
        found[name] = ", ".join(f"{p} {counts[p]}" for p in patterns if counts[p])
    return found if patterns else {}


def _counted(pattern: str) -> str:
    """A pattern without its number; "" if it names no operation."""
    module, op, operand = (*pattern.split(":"), "*", "*")[:3]
    return "" if op == "*" else f"{module}:{op}" + (f":{operand}" if operand != "*" else "")


def _count(patterns: Iterable[str], block: str, locations: Iterable[OpLocation]) -> Counter[str]:
    """How many operations of ``block`` each pattern matches."""
    patterns = list(patterns)
    rules = dict(zip(patterns, parse_rules(dict.fromkeys(patterns, "save")), strict=True))
    return Counter(
        pattern
        for location in locations
        for pattern, rule in rules.items()
        if rule.matches(location, block)
    )


def check_operations(
    table: Mapping[str, str],
    solved_for: Mapping[str, str],
    block: str,
    module: nn.Module,
    locations: Iterable[OpLocation],
) -> None:
    """Raise ValueError if a first forward ran others than ``table`` was solved for.

    Kinds with other modules than the block's do not count: a block like none of them is in another
    pipeline stage only, and is not compared. On a GPU the error is a warning: a dry run has
    stand-ins for its kernels, and nobody has compared.

    Args:
        table: The policy's ``op_policies``; ``solved_for`` is its key of that name.
        block: Its name in the model.
        module: The block.
        locations: The operations that it ran.
    """
    solved = {kind: _counts(text) for kind, text in solved_for.items()}
    still_there = set(map(_counted, table))
    patterns = [p for p in dict.fromkeys(p for c in solved.values() for p in c) if p in still_there]
    ran = _count(patterns, block, locations)
    names = {ROOT, *(canonical_fqn(name) for name, _ in module.named_modules())}
    found = [
        [
            f"{pattern} runs {ran[pattern]} times in {block}, and {expected[pattern]} times in "
            f"{kind}, for which the table was solved"
            for pattern in patterns
            if ran[pattern] != expected[pattern]
        ]
        for kind, expected in solved.items()
        if {pattern.split(":")[0] for pattern in expected} <= names
    ]
    if not found or not all(found):
        return
    message = (
        f"{KEY}.op_policies was solved for other operations: {min(found, key=len)[0]}. Solve again "
        f"(titan_ext dry-run --activations), or leave {KEY}.solved_for out: then nothing is "
        "compared."
    )
    if no_accelerator.needed():
        raise ValueError(message)
    logger.warning(message)


def _counts(text: str) -> Counter[str]:
    """A value of ``solved_for``; what is none of it counts nothing."""
    pairs = (entry.rpartition(" ") for entry in text.split(", "))
    return Counter({pattern: int(number) for pattern, _, number in pairs if number.isdecimal()})
