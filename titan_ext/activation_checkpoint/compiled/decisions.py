"""Verdicts in compiled code.

``compiled_checkpoint`` makes the checkpoint that goes around a block, or a part of one, before it
is compiled; ``partition`` stores in float8 what its verdicts ask for.

torch.compile does not run the checkpoint: it traces it, asks the policy about each operation, and
recomputes what is not saved. So one set of verdicts serves for eager and compiled code, with three
answers for four verdicts: a dropped output is one that backward does not read, and what backward
does not read is neither saved nor computed again.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch.nn as nn
from torch.fx import traceback as fx_traceback
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titan_ext.activation_checkpoint.compiled.codec import Saved
from titan_ext.activation_checkpoint.compiled.partition import annotation
from titan_ext.activation_checkpoint.compiled.sites import TracedSites
from titan_ext.activation_checkpoint.presets import BlockPlan
from titan_ext.activation_checkpoint.ruling import Ruling
from titan_ext.activation_checkpoint.verdicts import Rule, Site, Verdict
from titan_ext.fp8 import Codec

__all__ = [
    "CompiledPolicy",
    "Decide",
    "Decisions",
    "compiled_checkpoint",
    "none_decisions",
    "plan_decisions",
    "rule_decisions",
]

Decide = Callable[[Site, Any, Any, tuple[Any, ...], dict[str, Any], Any], Verdict]
"""The verdict on a call: its site, torch's context, the operation, its arguments and result."""

_ANSWERS = {
    Verdict.EXACT: CheckpointPolicy.MUST_SAVE,
    Verdict.FLOAT8: CheckpointPolicy.PREFER_SAVE,
    Verdict.RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE,
    Verdict.DROP: CheckpointPolicy.PREFER_RECOMPUTE,
}


@dataclass(frozen=True)
class Decisions:
    """What becomes of the operations of a block.

    Attributes:
        begin: Called at the start of a traced forward; the result is asked about each operation.
        key: Equal for two blocks only if they decide alike. They may share compiled code then.
        inputs: Exact or float8, for what enters.
        recompute: False if the compiler shall choose what it saves, as without a checkpoint; the
            verdicts then only say what of it is float8.
    """

    begin: Callable[[], Decide]
    key: str
    inputs: Verdict = Verdict.EXACT
    recompute: bool = True


@runtime_checkable
class CompiledPolicy(Protocol):
    """An activation checkpointing policy that goes inside compiled code."""

    def prepare(self, model: nn.Module) -> None:
        """Called once for a model, before its blocks."""
        ...

    def compiled_codec(self) -> Codec:
        """How float8 tensors are stored; one for the process."""
        ...

    def take_graph(self, saved: list[Saved]) -> None:
        """Called for each compiled graph with what it saves for backward."""
        ...

    def compiled_decisions(self, block: nn.Module, name: str) -> Decisions | None:
        """For the block called ``name`` in the model; None leaves it without a checkpoint."""
        ...


def rule_decisions(rules: Sequence[Rule], *, inputs: Verdict = Verdict.EXACT) -> Decisions:
    """The first rule that matches decides; what none matches is recomputed."""

    def begin() -> Decide:
        seen: Counter[Rule] = Counter()

        def decide(site: Site, ctx: Any, func: Any, args: Any, kwargs: Any, out: Any) -> Verdict:
            for rule in rules:
                if rule.matches(site):
                    seen[rule] += 1
                    if rule.occurrence in (0, seen[rule]):
                        return rule.verdict
            return Verdict.RECOMPUTE

        return decide

    return Decisions(begin, repr(tuple(rules)), inputs)


def plan_decisions(plan: BlockPlan, used_rules: set[Rule], *, key: str) -> Decisions:
    """What ``plan`` says, as it says it to an eager forward."""
    inputs = Ruling(plan, used_rules).on_input()

    def begin() -> Decide:
        return Ruling(plan, used_rules).on

    return Decisions(begin, key, inputs)


def none_decisions(is_exact: Callable[[str], str | None], *, key: str) -> Decisions:
    """Nothing is recomputed that the compiler would save.

    Args:
        is_exact: Why what a module saves stays exact, if it does.
    """

    def decide(site: Site, *_: Any) -> Verdict:
        return Verdict.EXACT if is_exact(site.module) else Verdict.FLOAT8

    inputs = Verdict.EXACT if is_exact("") else Verdict.FLOAT8
    return Decisions(lambda: decide, key, inputs, recompute=False)


def compiled_checkpoint(
    modules: Mapping[str, nn.Module], main: str, decisions: Decisions
) -> Callable[..., Any]:
    """A checkpoint for compiled code, to be called with a function and its arguments.

    Args:
        modules: What the function runs, by name in the block: the block itself is "".
        main: Which of them is called first and calls the others.
        decisions: Of the block.
    """
    # Compiled code is shared between blocks. Dynamo (2.15) does not look at a checkpoint's policy
    # to tell whether it may be; it does look at constants that the traced function uses.
    notes = annotation(decisions.inputs, decisions.key, recompute=decisions.recompute)

    def context_fn() -> Any:
        return create_selective_checkpoint_contexts(_policy(modules, main, decisions))

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with fx_traceback.annotate(notes):
            return checkpoint(
                function,
                *args,
                use_reentrant=False,
                context_fn=context_fn,
                early_stop=False,
                **kwargs,
            )

    return call


def _policy(
    modules: Mapping[str, nn.Module], main: str, decisions: Decisions
) -> Callable[..., CheckpointPolicy]:
    sites = TracedSites(modules, main)
    decide = decisions.begin()

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        site = sites.site(func, args, ctx.op_output)
        return _ANSWERS[decide(site, ctx, func, args, kwargs, ctx.op_output)]

    return policy
