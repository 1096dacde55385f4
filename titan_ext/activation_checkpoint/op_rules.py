# SPDX-License-Identifier: BSD-3-Clause
"""The rules of a table ``op_policies``: policies, patterns for operations, and their errors.

A table that is solved for a ``budget`` names operations by their number ("aten.mul:*:2"). Another
release of torch or of Titan may run others, and the same number then means another one. So it
carries the releases that it was solved with, and no other run takes it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from importlib import metadata
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from titan_ext.base.messages import BYTES, check_choice, did_you_mean, parse_bytes
from titan_ext.components.exchange import ADDED
from titan_ext.fsdp.names import matches

KEY = "activation_checkpoint"
FIT = "fit"
_PACKAGES = ("torch", "torchtitan")
GROUPED_GEMMS = ("aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_grouped_mm_v2")
# ``aten.linear`` stays whole on some backends (PrivateUse1), says Titan's SelectiveAC.
GEMMS = ("aten.mm", "aten.addmm", "aten.linear", "aten._scaled_mm", *GROUPED_GEMMS)
CHILDREN = ("attention", "attn", "moe", "feed_forward")
INPUT = "input"
"""Stands for the floating-point inputs of the block, instead of an operation's name."""

ROOT = "(block)"
"""Stands for the block without the modules inside it, instead of a module's name."""


class OpPolicy(StrEnum):
    """The policy for the outputs of an operation."""

    SAVE = "save"
    """The outputs."""
    SAVE_FLOAT8 = "save_float8"
    """The outputs in float8, where the codec can hold them (docs/float8.md)."""
    OFFLOAD = "offload"
    OFFLOAD_FLOAT8 = "offload_float8"
    """``SAVE`` and ``SAVE_FLOAT8``, on the host."""
    RECOMPUTE = "recompute"
    """Nothing; the operation runs again in backward."""
    DISCARD = "discard"
    """Nothing, and the operation does not run again. Backward must not read its outputs; titan_ext
    checks that."""

    @property
    def keeps(self) -> bool:
        return self not in (OpPolicy.RECOMPUTE, OpPolicy.DISCARD)

    @property
    def is_float8(self) -> bool:
        return self in (OpPolicy.SAVE_FLOAT8, OpPolicy.OFFLOAD_FLOAT8)

    @property
    def on_host(self) -> bool:
        return self in (OpPolicy.OFFLOAD, OpPolicy.OFFLOAD_FLOAT8)

    @property
    def exact(self) -> "OpPolicy":
        """The same without float8."""
        return OpPolicy(self.removesuffix("_float8"))


class OpLocation(NamedTuple):
    """The location of an operation."""

    module: str
    """The innermost that runs it, named within the block ("" for the block)."""
    op: str
    """Namespace and name without overload ("aten.mm"), or ``INPUT``."""
    operand: str = ""
    """The parameter that it works on, named within ``module`` ("w2_EDF"), or ""."""

    def __str__(self) -> str:
        return ":".join(part for part in (self.module or ROOT, self.op, self.operand) if part)


@dataclass(frozen=True)
class Rule:
    """A policy for the outputs of operations that match."""

    policy: OpPolicy
    module: str = "*"
    """Glob for the name of a module, within the block or in the model: it and all modules inside
    it. "(moe)" is the module without them, "(block)" the block."""
    op: str = "*"
    """Glob for the operation; "*" for whatever is expensive (GEMMs, attention, exchanges)."""
    operand: str = "*"
    """Glob for the parameter."""
    occurrence: int = 0
    """Which of the matching operations in one forward is meant, from 1; 0 for all."""

    def matches(self, location: OpLocation, block: str = "", *, expensive: bool = True) -> bool:
        """True if ``location`` in the block called ``block`` matches, its occurrence apart."""
        if self.module == INPUT or location.op == INPUT:
            return self.module in (INPUT, "*") and location.op == INPUT and self.op == "*"
        if self.op == "*" and not expensive:
            return False
        return (
            self.matches_module(location.module, block)
            and fnmatchcase(location.op, self.op)
            and fnmatchcase(location.operand, self.operand)
        )

    def matches_module(self, module: str, block: str = "") -> bool:
        """True if a module matches, by its name in the block or by its name in the model."""
        if self.module == ROOT:
            return not module
        if self.module.startswith("("):
            pattern = self.module[1:-1]
            return fnmatchcase(module, pattern) or fnmatchcase(join(block, module), pattern)
        return matches(module, self.module) or matches(join(block, module), self.module)


def parse_rules(rules: Mapping[str, str]) -> tuple[Rule, ...]:
    """Parse the rules of a table ``op_policies``, in its order.

    For example ``{"moe.routed_experts:aten._grouped_mm:w2*": "recompute", "input": "save"}``.
    Raises ValueError for a malformed pattern, or a policy, operation or input that there cannot be.
    """
    return tuple(_parse(pattern, policy) for pattern, policy in rules.items())


def _parse(pattern: str, policy: str) -> Rule:
    key = f"{KEY}.op_policies"
    check_choice(f"{key}.{pattern!r}", policy, [p.value for p in OpPolicy])
    parts = pattern.split(":")
    if not all(parts) or len(parts) > 4:
        raise ValueError(
            f"{key}: {pattern!r} is not a pattern; expected module[:op[:operand[:occurrence]]], "
            'for example "moe.shared_experts.w1" or "*:aten.mm".'
        )
    if len(parts) == 4 and not (parts[3].isdecimal() and int(parts[3])):
        raise ValueError(f"{key}: the occurrence in {pattern!r} must be a number from 1 on.")
    module, op, operand, occurrence = (*parts, *("*", "*", "*", "0")[len(parts) :])
    namespace, _, name = op.partition(".")
    if namespace == "aten" and name.isidentifier():
        packet = getattr(torch.ops.aten, name, None)
        if not hasattr(packet, "overloads"):  # torch.ops.aten has names of its own
            raise ValueError(f"{key}: torch has no operation {op!r}{did_you_mean(op, GEMMS)}")
        is_view = any(getattr(packet, overload).is_view for overload in packet.overloads())
        if is_view and OpPolicy(policy) is not OpPolicy.RECOMPUTE:
            raise ValueError(
                f"{key}.{pattern!r} is {policy!r}; {op} makes views, which have no values of "
                "their own: expected the operation that makes the values, or recompute."
            )
    if module == INPUT and not OpPolicy(policy).keeps:
        raise ValueError(
            f'{key}."{INPUT}" is {policy!r}; a block cannot recompute its inputs: expected save, '
            "save_float8, offload or offload_float8."
        )
    return Rule(OpPolicy(policy), module, op, operand, int(occurrence))


def check_modules(rules: Iterable[Rule], exempt: Sequence[str], model: nn.Module) -> None:
    """Raise ValueError for names of modules that the blocks of a model do not have.

    ``model`` is the decoder, or the chunk of a pipeline stage. Modules that its blocks lack (a
    dense stage has no ``moe``) may be in another stage.
    """
    layers = model.get_submodule("layers")
    modules = {name: m for block in layers.children() for name, m in block.named_modules() if name}
    if not modules:
        return
    routed = [name for name, module in modules.items() if hasattr(module, "token_dispatcher")]
    inside = {*modules, *(join(name, added) for name in routed for added in ADDED)}
    # A pipeline stage has some of the blocks; a rule may name a block of another stage.
    whole = getattr(getattr(model, "config", None), "layers", None) or list(layers.children())
    blocks = [f"layers.{index}" for index in range(len(whole))]
    in_model = {*blocks, *(f"{block}.{name}" for block in blocks for name in inside)}
    elsewhere = {name for name in CHILDREN if name not in inside}

    def check(key: str, patterns: Iterable[str], known: set[str], where: str) -> None:
        for pattern in patterns:
            is_elsewhere = elsewhere.intersection(pattern.split("."))
            if not (is_elsewhere or any(matches(name, pattern) for name in inside | in_model)):
                raise ValueError(
                    f"{KEY}.{key}: no module of {where} is called {pattern!r}"
                    f"{did_you_mean(pattern, known)}"
                )

    named = [r.module.strip("()") for r in rules if r.module not in (INPUT, ROOT)]
    check("op_policies", named, inside, "a block")
    check("exempt", exempt, in_model, "the model")


def join(block: str, module: str) -> str:
    """The name in the model of a module of ``block``; either may be ""."""
    return ".".join(part for part in (block, module) if part)


def is_exempt(exempt: Sequence[str], block: str, module: str) -> bool:
    """True if ``module`` of ``block`` matches one of ``exempt``, by its name in it or the model."""
    return any(matches(name, p) for name in (module, join(block, module)) for p in exempt)


class Budget(NamedTuple):
    """Bytes for activations; None is what a step leaves of ``memory``, or of the device's."""

    nbytes: int | None
    memory: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """The budget that "20GiB", "fit" or "fit 80GiB" means; raises ValueError for others."""
        keyword, _, size = text.partition(" ")
        if text == FIT:
            return cls(None)
        nbytes = parse_bytes(size if keyword == FIT else text)
        if nbytes is None:
            raise ValueError(
                f'{KEY}.budget is {text!r}; expected a size such as "20GiB" (units '
                f'{", ".join(BYTES)}), "fit" for what the device\'s memory leaves, or "fit 80GiB".'
            )
        return cls(None, nbytes) if keyword == FIT else cls(nbytes)


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
                "its operations may have other numbers. Expected a table that is solved again "
                f"(titan_ext dry-run --activations), or a table without {KEY}.solved_with, which "
                "is not compared."
            )
