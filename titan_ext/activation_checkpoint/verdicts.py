"""What becomes of the result of one operation between forward and backward, as data.

A block is checkpointed; for each of its operations a list of rules is read from the top and the
first that matches decides. Nothing here knows of autograd, of torch.compile or of TorchTitan: the
same rules are applied to the operations of an eager forward and to the nodes of a traced graph.
"""

import difflib
import fnmatch
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["INPUT", "Rule", "Site", "Verdict", "nearest", "parse_rules"]

INPUT = "input"
"""The name under which the floating-point inputs of a block are ruled on, in place of an op's."""


class Verdict(StrEnum):
    """What is kept of the outputs of an operation.

    EXACT: the outputs. FLOAT8: the outputs in float8, as far as they can be (see docs/fp8_ac.md).
    RECOMPUTE: nothing; the operation runs again. DROP: nothing, and it does not run again: backward
    does not read its outputs, which is checked.
    """

    EXACT = "exact"
    FLOAT8 = "float8"
    RECOMPUTE = "recompute"
    DROP = "drop"


@dataclass(frozen=True)
class Site:
    """Where an operation stands.

    Attributes:
        module: The innermost module that runs it, named within the block ("" for the block).
        op: Namespace and name without overload ("aten.mm"), or ``INPUT``.
        operand: The parameter that it works on, named within ``module`` ("w2_EDF"), or "".
    """

    module: str
    op: str
    operand: str = ""

    def __str__(self) -> str:
        return ":".join(part for part in (self.module or "(block)", self.op, self.operand) if part)


@dataclass(frozen=True)
class Rule:
    """A verdict for the operations that match.

    Attributes:
        verdict: What becomes of them.
        module: Glob for the name of a module within the block: it and all modules inside it.
        op: Glob for the operation; "*" for whatever is expensive (GEMMs, attention, exchanges).
        operand: Glob for the parameter.
        occurrence: Of the operations that match in one forward, only this one, from 1; 0 for all.
    """

    verdict: Verdict
    module: str = "*"
    op: str = "*"
    operand: str = "*"
    occurrence: int = 0

    def matches(self, site: Site, *, expensive: bool = True) -> bool:
        """Whether the rule speaks of ``site``, its occurrence apart."""
        if self.module == INPUT or site.op == INPUT:
            return self.module in (INPUT, "*") and site.op == INPUT and self.op == "*"
        if self.op == "*" and not expensive:
            return False
        return (
            _module_matches(self.module, site.module)
            and fnmatch.fnmatchcase(site.op, self.op)
            and fnmatch.fnmatchcase(site.operand, self.operand)
        )


def parse_rules(rules: Mapping[str, str], key: str = "verdicts") -> tuple[Rule, ...]:
    """Rules as a TOML table writes them, in its order.

    Args:
        rules: ``"module[:op[:operand[:occurrence]]]"`` to a verdict, for example
            ``{"moe.routed_experts:aten._grouped_mm:w2*": "recompute", "input": "exact"}``.
        key: What to call the table in messages.

    Raises:
        ValueError: for a malformed pattern or an unknown verdict.
    """
    return tuple(_parse(pattern, verdict, key) for pattern, verdict in rules.items())


def _parse(pattern: str, verdict: str, key: str) -> Rule:
    names = [v.value for v in Verdict]
    if verdict not in names:
        raise ValueError(
            f"{key}.{pattern!r} is {verdict!r}; expected one of {', '.join(names)}"
            f"{nearest(str(verdict), names)}."
        )
    parts = pattern.split(":")
    if not all(parts) or len(parts) > 4:
        raise ValueError(
            f"{key}: {pattern!r} is no pattern; expected module[:op[:operand[:occurrence]]], "
            'for example "moe.shared_experts.w1" or "*:aten.mm".'
        )
    occurrence = parts[3] if len(parts) == 4 else "0"
    if not occurrence.isdecimal():
        raise ValueError(f"{key}: the occurrence in {pattern!r} is no number from 1 on.")
    module, op, operand = (*parts[:3], *["*"] * (3 - len(parts[:3])))
    return Rule(Verdict(verdict), module, op, operand, int(occurrence))


def nearest(name: str, valid: Iterable[str]) -> str:
    """End of a message: the valid name that ``name`` is most like, if there is one."""
    close = difflib.get_close_matches(name, list(valid), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown_modules(rules: Sequence[Rule], modules: Iterable[str]) -> list[str]:
    """The module patterns that name none of ``modules``."""
    names = list(modules)
    return [
        rule.module
        for rule in rules
        if rule.module != INPUT and not any(_module_matches(rule.module, name) for name in names)
    ]


@functools.cache
def _module_matches(pattern: str, module: str) -> bool:
    parts = module.split(".")
    prefixes = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return any(fnmatch.fnmatchcase(name, pattern) for name in prefixes)
