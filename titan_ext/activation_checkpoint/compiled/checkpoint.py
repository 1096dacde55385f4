# SPDX-License-Identifier: BSD-3-Clause
"""Policies in compiled code: the checkpoint that goes around a block, or a part of one.

torch.compile does not run the checkpoint: it traces it, asks the policy about each operation, and
recomputes what is not saved. ``partition`` then stores in float8 what the policy asks. So eager and
compiled code share the policies, except that "discard" means "recompute" here. The compiler sees
the whole backward and recomputes only what backward reads.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn as nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import traceback as fx_traceback
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torchtitan.components.checkpointer.utils import canonical_fqn

from titan_ext.activation_checkpoint.compiled.partition import Saved, add_state, annotation
from titan_ext.activation_checkpoint.op_policies import BlockPlan, Resolver
from titan_ext.activation_checkpoint.rules import OpLocation, OpPolicy, Rule, join, op_name
from titan_ext.fp8 import Codec
from titan_ext.fp8.local import parts_in, plain_tensors

Decide = Callable[[OpLocation, Any, Any, tuple[Any, ...], dict[str, Any], Any], OpPolicy]
"""Policy of a call, from its location, torch's context, the operation, arguments and result."""

_ANSWERS = {
    OpPolicy.SAVE: CheckpointPolicy.MUST_SAVE,
    OpPolicy.SAVE_FLOAT8: CheckpointPolicy.PREFER_SAVE,
    OpPolicy.RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE,
    OpPolicy.DISCARD: CheckpointPolicy.PREFER_RECOMPUTE,
}


@dataclass(frozen=True)
class Decisions:
    """The policies for the operations of a block.

    Attributes:
        begin: Called at the start of a traced forward; the result is asked about each operation.
        key: Equal for two blocks only if they decide alike; they may then share compiled code.
        inputs: Exact or float8, for what enters.
        recompute: False lets the compiler choose what it saves, as without a checkpoint; the
            policies then only choose which of that is float8.
    """

    begin: Callable[[], Decide]
    key: str
    inputs: OpPolicy = OpPolicy.SAVE
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


def plan_decisions(plan: BlockPlan, used_rules: set[Rule], *, key: str) -> Decisions:
    """The decisions of ``plan``, as in an eager forward."""
    inputs = Resolver(plan, used_rules).resolve_input()

    def begin() -> Decide:
        return Resolver(plan, used_rules).resolve

    return Decisions(begin, key, inputs)


def none_decisions(is_exact: Callable[[str], str | None], *, key: str) -> Decisions:
    """Those of mode "no_recompute"; ``is_exact`` says why what a module saves stays exact."""

    def decide(location: OpLocation, *_: Any) -> OpPolicy:
        return OpPolicy.SAVE if is_exact(location.module) else OpPolicy.SAVE_FLOAT8

    inputs = OpPolicy.SAVE if is_exact("") else OpPolicy.SAVE_FLOAT8
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
    locator = TracedOpLocator(modules, main)
    decide = decisions.begin()

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        location = locator.locate(func, args, ctx.op_output)
        return _ANSWERS[decide(location, ctx, func, args, kwargs, ctx.op_output)]

    return policy


class TracedOpLocator:
    """Names the operations of a block, or of a part of one, while it is traced.

    ``modules`` are traced, by name in the block ("" is the block itself). Operations that are in
    none of them belong to ``root``.
    """

    def __init__(self, modules: Mapping[str, nn.Module], root: str) -> None:
        self._root = root
        self._modules = {
            str(id(module)): join(top, canonical_fqn(name))
            for top, part in modules.items()
            for name, module in part.named_modules()
        }
        self._operands = {
            storage: join(top, canonical_fqn(name))
            for top, part in modules.items()
            for name, param in part.named_parameters()
            for storage in _stand_ins(param)
        }
        buffers = [s for part in modules.values() for b in part.buffers() for s in _stand_ins(b)]
        add_state(_fake_mode(), [*self._operands, *buffers])

    def locate(self, func: Any, args: tuple[Any, ...], out: Any) -> OpLocation:
        """The location of a call of ``func``."""
        operand = self._operand(args)
        if operand and func is torch.ops.aten._to_copy.default:
            # The parameter in another dtype is still the parameter.
            self._operands |= dict.fromkeys(_storages(out), operand)
        module = self._module()
        return OpLocation(module, op_name(func), operand.removeprefix(module).lstrip("."))

    def _module(self) -> str:
        # Dynamo writes the ids of the modules that it is in, from the outermost, on every node.
        stack = fx_traceback.get_current_meta().get("nn_module_stack", {})
        return next(
            (self._modules[key] for key in reversed(stack) if key in self._modules), self._root
        )

    def _operand(self, args: tuple[Any, ...]) -> str:
        found = (self._operands.get(storage) for storage in _storages(args))
        return next((name for name in found if name), "")


def _stand_ins(param: torch.Tensor) -> Iterator[int]:
    for part in plain_tensors(param):
        # The tracer has met the parameter before: this is the same fake tensor, not a new one.
        yield _fake_mode().from_tensor(part).untyped_storage()._cdata


def _fake_mode() -> FakeTensorMode:
    mode = detect_fake_mode()
    assert mode is not None, "a traced location is asked for outside of torch.compile"
    return mode


def _storages(values: Any) -> Iterator[int]:
    for part in parts_in(values):
        if isinstance(part, FunctionalTensor):
            part = torch._from_functional_tensor(part.elem)
        yield part.untyped_storage()._cdata
