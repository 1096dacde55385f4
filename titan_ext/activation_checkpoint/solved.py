# SPDX-License-Identifier: BSD-3-Clause
"""What goes with a table that was solved for a budget: the budget, and the operations it meant.

A solved table names operations by their number ("aten.mul:*:2"). Another release of torch, of
Titan or of a model may run others, and the same number then means another one. So a table carries
how often each pattern matches in each kind of block, and a first forward is held against that.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.nn as nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.tools.logging import logger

from titan_ext import no_accelerator
from titan_ext.activation_checkpoint.op_policies import BlockPlan
from titan_ext.activation_checkpoint.rules import ROOT, OpLocation, Rule, parse_rules
from titan_ext.names import BYTES, parse_bytes

if TYPE_CHECKING:
    from titan_ext.activation_checkpoint.policy import FP8AC

__all__ = ["FIT", "KEY", "Budget", "WatchedPlan", "check_budget", "check_operations"]
__all__ += ["has_budget", "refuse_budget", "solved_for", "watched"]

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


def check_budget(config: "FP8AC.Config") -> None:
    """Raise ValueError for a budget that cannot be."""
    if not config.budget:
        return
    Budget.parse(config.budget)
    for other, value, free in (
        ("mode", config.mode, "selective"),
        ("op_policies", config.op_policies, {}),
        ("preset", config.preset, "memory"),
    ):
        if value != free:
            raise ValueError(
                f"{KEY}.budget is {config.budget!r}, for which the run finds {KEY}.op_policies; "
                f"{KEY}.{other} is {value!r}. Expected one of the two."
            )


def refuse_budget(config: "FP8AC.Config") -> None:
    """Raise ValueError for a budget that nobody has solved for."""
    if config.budget:
        raise ValueError(
            f"{KEY}.budget is {config.budget!r}; only a run of titan_ext's trainer solves for one. "
            f"Expected the {KEY}.op_policies that titan_ext dry-run --activations finds for it."
        )


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
    rules = _rules(patterns)
    found = {}
    for name, locations in blocks.items():
        counts = Counter(
            pattern
            for location in locations
            for pattern, rule in rules.items()
            if rule.matches(location, name)
        )
        found[name] = ", ".join(f"{p} {counts[p]}" for p in rules if counts[p])
    return found if patterns else {}


def _counted(pattern: str) -> str:
    """A pattern without its number; "" if it names no operation."""
    module, op, operand = (*pattern.split(":"), "*", "*")[:3]
    return "" if op == "*" else f"{module}:{op}" + (f":{operand}" if operand != "*" else "")


def _rules(patterns: Iterable[str]) -> dict[str, Rule]:
    patterns = list(patterns)
    return dict(zip(patterns, parse_rules(dict.fromkeys(patterns, "save")), strict=True))


def _counts(text: str) -> Counter[str]:
    """A value of ``solved_for``; what is none of it counts nothing."""
    pairs = (entry.rpartition(" ") for entry in text.split(", "))
    return Counter({pattern: int(number) for pattern, _, number in pairs if number.isdecimal()})


@dataclass(eq=False)
class _Watch:
    """Counts the operations of one forward by the patterns of a table."""

    modules: frozenset[str]
    rules: dict[str, Rule]
    counts: Counter[str] = field(default_factory=Counter)
    is_over: bool = False


@dataclass(frozen=True)
class WatchedPlan(BlockPlan):
    """A plan that counts what its first forward runs of what the patterns of a table name."""

    watch: _Watch = field(default_factory=lambda: _Watch(frozenset(), {}))

    def candidates(self, location: OpLocation) -> Any:
        if not self.watch.is_over:
            self.watch.counts.update(
                pattern
                for pattern, rule in self.watch.rules.items()
                if rule.matches(location, self.name)
            )
        return super().candidates(location)

    def difference(self, solved: Mapping[str, str]) -> str:
        """What the block ran otherwise than the blocks solved for, in words; "" if nothing.

        To be asked after one forward, which ends the watch. Kinds with other modules do not count:
        a block like none of them is in another pipeline stage only, and is not compared.
        """
        self.watch.is_over = True
        found: list[list[str]] = []
        counts = self.watch.counts
        for kind, text in solved.items():
            expected = _counts(text)
            named = {pattern.split(":")[0] for pattern in expected}
            if named <= self.watch.modules:
                found.append(
                    [
                        f"{pattern} runs {counts[pattern]} times in {self.name}, and "
                        f"{expected[pattern]} times in {kind}, for which the table was solved"
                        for pattern in self.watch.rules
                        if counts[pattern] != expected[pattern]
                    ]
                )
        return min(found, key=len)[0] if found and all(found) else ""


def watched(plan: BlockPlan, block: nn.Module, config: "FP8AC.Config") -> WatchedPlan:
    """``plan`` of ``block``, watched for the patterns of its table that ``solved_for`` counts."""
    still_there = set(map(_counted, config.op_policies))
    counted = dict.fromkeys(p for text in config.solved_for.values() for p in _counts(text))
    names = frozenset({ROOT, *(canonical_fqn(name) for name, _ in block.named_modules())})
    values = {f.name: getattr(plan, f.name) for f in fields(plan)}
    rules = _rules(pattern for pattern in counted if pattern in still_there)
    return WatchedPlan(**values, watch=_Watch(names, rules))


def check_operations(plan: WatchedPlan, config: "FP8AC.Config") -> None:
    """Raise ValueError if the first forward ran others than the table was solved for.

    On a GPU that is a warning: a dry run has stand-ins for its kernels, and nobody has compared.
    """
    if not (difference := plan.difference(config.solved_for)):
        return
    message = (
        f"{KEY}.op_policies was solved for other operations: {difference}. Solve again (titan_ext "
        f"dry-run --activations), or leave {KEY}.solved_for out: then nothing is compared."
    )
    if no_accelerator.needed():
        raise ValueError(message)
    logger.warning(message)
