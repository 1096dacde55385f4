"""Mistakes in the policy's configuration, each with one message, before anything runs."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn

from titan_ext.activation_checkpoint.presets import GEMMS, PRESETS
from titan_ext.activation_checkpoint.verdicts import (
    INPUT,
    Rule,
    Verdict,
    nearest,
    unknown_modules,
)

__all__ = ["KEY", "check_compiled", "check_config", "check_names", "check_rules"]

KEY = "activation_checkpoint"

_CHILDREN = ("attention", "attn", "moe", "feed_forward")


def _check_choice(key: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of ``choices``.

    Raises:
        ValueError: naming the key and the nearest choice.
    """
    if value not in choices:
        raise ValueError(
            f"{KEY}.{key} is {value!r}; expected one of {', '.join(choices)}"
            f"{nearest(str(value), choices)}."
        )


def check_config(config: Any) -> None:
    """Refuse values of ``FP8AC.Config`` that a key cannot have, alone or beside another.

    Raises:
        ValueError: naming the key.
    """
    _check_choice("mode", config.mode, ("selective", "full", "none"))
    _check_choice("preset", config.preset, PRESETS)
    _check_choice("attention", config.attention, ("auto", "exact", "float8", "recompute"))
    _check_choice("fp32", config.fp32, ("exact", "float8"))
    for key in ("exempt_first", "exempt_last"):
        value = getattr(config, key)
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{KEY}.{key} is {value!r}; expected 0 or more layers.")
    if config.mode != "selective" and config.preset != "memory":
        raise ValueError(
            f'{KEY}.preset is {config.preset!r}; it has no meaning with mode "{config.mode}".'
        )
    if config.mode == "full" and config.attention != "auto":
        raise ValueError(
            f'{KEY}.attention is {config.attention!r}; it has no meaning with mode "full", '
            "which recomputes attention."
        )
    if config.mode == "none" and config.attention == "recompute":
        raise ValueError(
            f'{KEY}.attention is "recompute", but mode "none" recomputes nothing; '
            'expected "exact" or "float8".'
        )
    if config.debug and config.mode != "none":
        raise ValueError(
            f"{KEY}.debug is on; torch has no debug mode for selective checkpoints. "
            'Expected false, or policy "full".'
        )


def check_compiled(config: Any) -> None:
    """Refuse values of ``FP8AC.Config`` that compiled code cannot do.

    Raises:
        ValueError: naming the key.
    """
    if config.fp32 != "exact":
        raise ValueError(
            f'{KEY}.fp32 is {config.fp32!r}; expected "exact" under torch.compile, which '
            "stores only bf16 and fp16 in float8."
        )
    if config.stochastic or config.block == "tensor":
        raise ValueError(
            f"{KEY}.stochastic = true and {KEY}.block = 'tensor' do not run under "
            "torch.compile: expected stochastic = false and a block of 64, 128, 256 or "
            "'row', or compile.enable = false."
        )


def check_rules(rules: Sequence[Rule], mode: str) -> None:
    """Refuse verdicts that cannot be carried out.

    Raises:
        ValueError: for an operation that torch lacks, inputs that are not kept, or what mode "none"
            does not decide.
    """
    for rule in rules:
        namespace, _, name = rule.op.partition(".")
        if namespace == "aten" and name.isidentifier() and not hasattr(torch.ops.aten, name):
            raise ValueError(
                f"{KEY}.verdicts: torch has no operation {rule.op!r}{nearest(rule.op, GEMMS)}."
            )
        stored = rule.verdict in (Verdict.EXACT, Verdict.FLOAT8)
        if rule.module == INPUT and not stored:
            raise ValueError(
                f'{KEY}.verdicts."{INPUT}" is {rule.verdict.value!r}; the inputs of a block '
                "cannot be had again: expected exact or float8."
            )
        if mode == "none" and (not stored or rule.op != "*"):
            raise ValueError(
                f'{KEY}.verdicts: with mode "none" autograd decides what is saved; expected '
                f"modules with exact or float8, got {rule.module}:{rule.op} = "
                f"{rule.verdict.value!r}."
            )


def check_names(
    rules: Sequence[Rule], exempt: Sequence[str], model: nn.Module, total_layers: int
) -> None:
    """Refuse names of modules that the blocks of a model do not have.

    Args:
        model: The decoder, or the chunk that a pipeline stage holds: what its blocks lack as a
            whole (a dense stage has no ``moe``) may be in another stage.
        total_layers: Of the whole model.

    Raises:
        ValueError: with the nearest name.
    """
    blocks = list(model.get_submodule("layers").children())
    inside = {name for block in blocks for name, _ in block.named_modules()} - {""}
    if not inside:
        return
    elsewhere = {name for name in _CHILDREN if name not in inside}
    for name in unknown_modules(rules, inside):
        if name.split(".")[0] not in elsewhere:
            raise ValueError(
                f"{KEY}.verdicts: no module of a block is called {name!r}{nearest(name, inside)}."
            )
    layers = [f"layers.{index}" for index in range(total_layers)]
    names = {*layers, *(f"{layer}.{name}" for layer in layers for name in inside)}
    for name in unknown_modules([Rule(Verdict.EXACT, glob) for glob in exempt], names):
        if not elsewhere.intersection(name.split(".")):
            raise ValueError(
                f"{KEY}.exempt: no module of the model is called {name!r}{nearest(name, names)}."
            )
