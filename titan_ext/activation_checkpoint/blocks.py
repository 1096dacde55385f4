# SPDX-License-Identifier: BSD-3-Clause
"""One block under checkpointing, in eager mode: ask for each operation's policy, store outputs.

The checkpoint and its selective contexts are torch's own. We add two things. The policy that they
ask reads our rules. Saved-tensor hooks around the call receive the inputs of the block and every
output that the policy saves. They store them in the form that the policy names. All state belongs
to one call: a pipeline runs several forwards before the first backward.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    _RECOMPUTE,
    CheckpointFunction,
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    _VersionWrapper,
    checkpoint,
)
from torchtitan.tools.logging import logger

from titan_ext.activation_checkpoint.discards import Discarded, DiscardTracker
from titan_ext.activation_checkpoint.locator import OpLocator
from titan_ext.activation_checkpoint.memory_report import BlockMemoryReport
from titan_ext.activation_checkpoint.op_effects import (
    TO_COPY,
    count_flops,
    draws,
    is_copy_to_host,
    is_exchange,
    is_mutable,
    must_write,
    op_name,
)
from titan_ext.activation_checkpoint.op_policies import BlockPolicies, Resolver
from titan_ext.activation_checkpoint.op_rules import INPUT, ROOT, OpLocation, OpPolicy, Rule
from titan_ext.base.tensors import has_values, is_plain, may_wrap, storage_ids
from titan_ext.fp8 import SavedTensorStore
from titan_ext.fp8.offload import HostGroup, Offload
from titan_ext.fp8.saved_tensors import StoredEntry

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_INPUT = OpLocation("", INPUT)
_REGION = "inductor_compiled_code"


@dataclass(eq=False, kw_only=True)
class EagerBlock:
    """State that all forwards of one block share."""

    policies: BlockPolicies
    store: SavedTensorStore
    locator: OpLocator
    offload: Offload | None
    """Takes what a policy keeps on the host; None if none does."""
    on_report: Callable[[BlockMemoryReport], None]
    """Called with the report of the first forward."""
    is_reported: bool = False
    inside: str = ""
    """The module of the block that runs a part of it; "" for the block."""
    is_compiled: bool = False
    """Whether a plan runs it in place of compiled code."""

    def __deepcopy__(self, memo: Any) -> NoReturn:
        # The hooks that name operations belong to this block's modules, and would to the copy's.
        raise ValueError(
            f"activation_checkpoint: {self.policies.name} cannot be copied: its policy has hooks "
            "on its modules. Expected copy.deepcopy of the model before policy fp8 is applied, or "
            "a new model that loads the state dict of this one."
        )

    def host_group(self) -> HostGroup | None:
        """Takes what one forward, which begins, keeps on the host."""
        return self.offload.begin(self.policies.name) if self.offload is not None else None

    def report(
        self, entries: list[Any], calls: Sequence[tuple[OpLocation, OpPolicy, int]] = ()
    ) -> None:
        """End of the first forward; see ``BlockMemoryReport.of``.

        It is not yet one where the block has left itself out, as stochastic depth does.
        """
        report = BlockMemoryReport.of(self.policies.name, entries, calls)
        entries.clear()
        self.is_reported = bool(report.flops if calls else report.packs)
        if self.is_reported:
            self.on_report(report)


@dataclass(eq=False, kw_only=True)
class BlockCheckpoint(EagerBlock):
    """A ``checkpoint_fn`` for torch's ``CheckpointWrapper``."""

    options: dict[str, Any]
    """For ``torch.utils.checkpoint.checkpoint``."""
    used_rules: set[Rule]
    """Collects the user's rules that decided an operation."""
    arrives: str = ""
    """As in ``compile.CompiledPart``; "" for a whole block."""
    refused_discards: set[OpLocation] = field(default_factory=set)
    """Where a preset must not discard, because something reads the output."""

    def __call__(self, module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return module(*args, **kwargs)
        call = _Call(self, counting=not self.is_reported)

        def run(*args: Any, **kwargs: Any) -> Any:
            call.outer = id(_innermost_pack())  # itself would be a cycle
            return module(*args, **kwargs)

        # Around the call: hooks that ``context_fn`` enters bypass checkpointing, in silence.
        with torch.autograd.graph.saved_tensors_hooks(call.pack, restore):
            out = checkpoint(
                run,
                *args,
                use_reentrant=False,
                early_stop=False,  # with it, full checkpointing under EP leaks (PR 1580 of Titan)
                # Else hooks see the inputs only, none of the outputs that the policy saves.
                respect_saved_tensors_hooks=True,
                context_fn=call.contexts,
                **self.options,
                **kwargs,
            )
        call.finish(module, out)
        return out


class _Call:
    """One forward of one block."""

    outer = 0
    """The id of what packs saved tensors as the block begins: of its checkpoint."""

    def __init__(self, owner: BlockCheckpoint, *, counting: bool) -> None:
        self._owner = owner
        self._policies = owner.policies
        self._locator = owner.locator
        self._resolver = Resolver(owner.policies, owner.used_rules, owner.refused_discards)
        self._host = owner.host_group()
        self._discards = DiscardTracker()
        self._counting = counting
        self._entries: list[Any] = []
        self._ops: list[tuple[OpLocation, OpPolicy, int]] = []
        self._op_of: dict[int, int] = {}  # the index in it of what an entry is of
        # Of the last operation, whose outputs ``pack`` gets.
        self._location = _INPUT
        self._policy = self._resolver.resolve_input(owner.arrives)
        self._arriving: dict[int, _Arriving] = {}
        self._kept_draw: OpLocation | None = None
        """What has drawn random numbers, and does not in the recompute."""
        names_operands = counting or owner.policies.names_operands
        self._locator.begin(with_operands=names_operands, inside=owner.inside)

    def contexts(self) -> tuple[Any, Any]:
        """Torch's, for the forward and the recompute; they share what is saved."""
        # As create_selective_checkpoint_contexts makes it, but ours to change (``_run_again``).
        self._saved: dict[Any, dict[int, Any]] = defaultdict(dict)
        # These very classes: torch's checkpoint passes ``respect_saved_tensors_hooks`` to no other
        # (torch/utils/checkpoint.py). And regions that Inductor compiled, such as FlexAttention on
        # a GPU, know no subclass of them (torch/_higher_order_ops/wrap.py).
        return (
            _CachingTorchDispatchMode(self.decide, self._saved),
            _CachedTorchDispatchMode(None, self._saved),
        )

    def decide(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Policy of one operation. Torch asks in the forward only, after each operation."""
        out, module = ctx.op_output, self._locator.module
        if func is TO_COPY:
            self._locator.see_cast(args[0], out)
        fixed, is_all = self._policies.fixed(func, module)
        if (
            (fixed is not None and is_all)
            and not (self._counting or self._arriving or self._discards.discarded)
            and "device" not in kwargs
            and isinstance(out, torch.Tensor)
            and out.is_floating_point()
        ):
            # Most operations end here: this runs for each of them, on the host.
            self._policy = OpPolicy.RECOMPUTE
            return fixed
        # It has waited for what arrives: to store that now waits for nothing.
        if self._arriving and (func is _WAIT or AsyncCollectiveTensor in map(type, args)):
            self._store_arrived(args)
        policy = OpPolicy.RECOMPUTE
        is_choice = self._policies.keeps_choice(func, args, kwargs, out)
        if fixed is None or is_choice or (func is TO_COPY and is_copy_to_host(args, kwargs)):
            self._location = self._locator.locate(func, args)
            policy = self._resolver.resolve(self._location, ctx, func, args, kwargs, out)
            if is_choice and policy.keeps:
                refuse_inner_checkpoint(self.outer, str(self._location), self._policies.name)
            if is_mutable(func) and must_write(func, out, discarded=policy is OpPolicy.DISCARD):
                if is_choice and policy.keeps:
                    self._refuse_choice_in_place()
                policy = OpPolicy.RECOMPUTE
        self._policy = policy
        recompute = policy is OpPolicy.RECOMPUTE
        if not recompute and draws(func, args, kwargs):
            self._kept_draw = self._location
        elif recompute and self._kept_draw is not None and draws(func, args, kwargs):
            self._refuse_draw(op_name(func), self._kept_draw)
        if self._discards.discarded or is_mutable(func):
            self._discards.see(func, module, args, kwargs, out, recomputed=recompute)
        if self._counting:
            flops = count_flops(func, args, kwargs, out)
            self._ops.append((self._locator.locate(func, args), policy, flops))
        if not recompute:
            return CheckpointPolicy.MUST_SAVE
        return fixed or CheckpointPolicy.PREFER_RECOMPUTE

    def pack(self, x: torch.Tensor) -> Any:
        """Store one tensor: torch passes every input of the block and every saved output."""
        policy, location = self._policy, self._location
        if location.op == _REGION and (given := _Given.of(x, self._locator)) is not None:
            return given
        if policy is OpPolicy.DISCARD and has_values(x) and may_wrap(x):
            entry: Any = self._discards.add(x, location, len(self._locator.left))
        elif (
            not (policy.is_float8 or policy.on_host or self._counting)
            and location is not _INPUT  # which carries its graph
            and may_wrap(x)
        ):
            entry = x  # as stock checkpointing does
        elif is_exchange(location.op) and not self._counting and may_wrap(x):
            entry = _Arriving(x, policy, location)  # to store it now would wait for it
            self._arriving |= dict.fromkeys(storage_ids(x), entry)
        else:
            entry = self._store(x, policy, location)
        is_stored = isinstance(entry, StoredEntry)  # else it is not yet, or kept as it is
        is_copy = entry.whole.treatment.startswith("float8") if is_stored else policy.is_float8
        if location is not _INPUT and policy is not OpPolicy.DISCARD and not is_copy:
            self._discards.keep(entry, x, location)
        if self._counting:
            self._op_of[id(entry)] = len(self._ops) - 1
            self._entries.append(entry)
        return entry

    def _store(self, x: torch.Tensor, policy: OpPolicy, location: OpLocation) -> StoredEntry:
        reason = None if policy.is_float8 else _reason(location)
        name = INPUT if location is _INPUT else str(location)
        host = self._host if policy.on_host else None
        return self._owner.store.pack(x, name=name, exact=reason, host=host)

    def _store_arrived(self, tensors: Iterable[torch.Tensor]) -> None:
        """Store those of ``tensors`` that an exchange has brought."""
        for storage in storage_ids(tensors):
            if (entry := self._arriving.pop(storage, None)) is not None:
                entry.held = self._store(entry.held, entry.policy, entry.location)

    def finish(self, module: Callable[..., Any], out: Any) -> None:
        """End of the forward: free discarded values, unless something reads them."""
        self._store_arrived([entry.held for entry in self._arriving.values()])
        whole = [module] if isinstance(module, nn.Module) else []  # or a part of it
        again = self._discards.finish([*self._locator.left, *whole], out)
        for entry in self._discards.discarded:
            if entry.reader:
                self._refuse_discard(entry.location, entry.reader)
        self._discards = DiscardTracker()
        if again:
            self._run_again(again)
        if self._counting:
            self._owner.report(self._entries, self._ops)

    def _run_again(self, packed: list[Any]) -> None:
        """Let the recompute run the operations whose outputs were ``packed``."""
        ids = {id(x) for x in packed}
        for calls in self._saved.values():
            for index, saved in calls.items():
                leaves = tree_leaves(saved)
                if any(isinstance(x, _VersionWrapper) and id(x.val) in ids for x in leaves):
                    # Torch asks in the forward only: this is what the answer would have left.
                    calls[index] = _RECOMPUTE
        if self._counting:
            self._entries = [
                x for x in self._entries if id(x) not in ids or isinstance(x, Discarded)
            ]
            for index in {self._op_of[i] for i in ids}:
                location, _, flops = self._ops[index]
                self._ops[index] = location, OpPolicy.RECOMPUTE, flops

    def _refuse_choice_in_place(self) -> None:
        raise ValueError(
            f"activation_checkpoint: {self._location} of {self._policies.name} writes integers, "
            "booleans or steps of floats in place. What is written in place runs again, and from "
            "values in float8 it would choose others. Expected the operation out of place, or "
            f'op_policies."{self._location.module or ROOT}:{self._location.op}" = "recompute" if '
            "that does not matter."
        )

    def _refuse_draw(self, op: str, kept: OpLocation) -> None:
        raise ValueError(
            f"activation_checkpoint: {op} in {self._locator.module or ROOT} of "
            f"{self._policies.name} draws random numbers after {kept}, which is kept. A recompute "
            'that leaves one out draws others. Expected mode = "no_recompute", or op_policies.'
            f'"{kept.module or ROOT}:{kept.op}" = "recompute".'
        )

    def _refuse_discard(self, location: OpLocation, reader: str) -> None:
        name, rules = self._policies.name, self._policies.recipe.user_rules
        discards = (r.matches(location, name) for r in rules if r.policy is OpPolicy.DISCARD)
        if not self._owner.is_compiled and any(discards):  # a compiler recomputes what is read
            raise ValueError(
                f"activation_checkpoint.op_policies: {location} of {name} cannot be discarded: "
                f"{reader} reads it. Expected save, save_float8 or recompute."
            )
        self._owner.refused_discards.add(location)
        logger.info(f"{name}: {location} is not discarded: {reader} reads it.")


@dataclass(eq=False, slots=True)
class _Arriving:
    """A tensor that an exchange brings, in ``held`` until it has come; then its entry."""

    held: Any
    policy: OpPolicy
    location: OpLocation

    def restore(self) -> torch.Tensor:
        return restore(self.held)


@dataclass(frozen=True, slots=True)
class _Given:
    """An argument of the running module that a compiled region returns, for its backward.

    Inductor's forward returns what its backward needs, inputs too. Kept, q and k of FlexAttention
    would be as many bytes as its output and more, in every layer. The recompute has them again.
    """

    locator: OpLocator
    index: int
    dims: list[int]

    @classmethod
    def of(cls, x: torch.Tensor, locator: OpLocator) -> "_Given | None":
        """For ``x`` if it is an argument, or that with its dims in another order; else None."""
        for index, arg in enumerate(locator.given() if is_plain(x) else ()):
            if arg is not None and (dims := _order(x, arg)) is not None:
                return cls(locator, index, dims)
        return None

    def restore(self) -> torch.Tensor:
        # By dims, not by strides: what was kept in another form may come back with others.
        argument = self.locator.given()[self.index]
        assert argument is not None, "the recompute gives the module what the forward gave it"
        return argument.detach().permute(self.dims)


def _order(x: torch.Tensor, arg: torch.Tensor) -> list[int] | None:
    """The dims of ``arg`` in the order in which ``x``, the same memory, has them; else None."""
    places = x.dtype, x.storage_offset(), storage_ids([x])
    if places != (arg.dtype, arg.storage_offset(), storage_ids([arg])):
        return None
    left = list(zip(arg.shape, arg.stride(), range(arg.dim()), strict=True))
    dims = []
    for size, stride in zip(x.shape, x.stride(), strict=True):
        found = next((dim for dim in left if dim[:2] == (size, stride)), None)
        if found is None:
            return None
        left.remove(found)
        dims.append(found[2])
    return None if left else dims


def restore(entry: Any) -> torch.Tensor:
    if isinstance(entry, torch.Tensor):
        return entry
    with torch.no_grad():
        return entry.restore()


def _innermost_pack() -> Any:
    """The function that packs what autograd saves here; None without one."""
    pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(True) or (None, None)
    return pack


def refuse_inner_checkpoint(outer: int, choice: str, block: str) -> None:
    """Raise ValueError if a checkpoint is open inside of that with the id ``outer``.

    It would choose again.
    """
    pack = _innermost_pack()
    # torch/utils/checkpoint.py, class _checkpoint_hook: it takes what would come to us.
    is_checkpoint = getattr(pack, "__qualname__", "").startswith("_checkpoint_hook.")
    if (is_checkpoint and id(pack) != outer) or _in_reentrant_checkpoint():
        raise ValueError(
            f"activation_checkpoint: {choice} of {block} chooses inside of a checkpoint of the "
            "block's own, which chooses again in backward, from values in float8. Expected the "
            "block without a checkpoint of its own, or in activation_checkpoint.exempt."
        )


def _in_reentrant_checkpoint() -> bool:
    """True inside of a checkpoint with ``use_reentrant=True``, which packs its inputs alone."""
    frame = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


def _reason(location: OpLocation) -> str:
    if location.op == "aten.topk":
        return "routing"
    return "attention" if "attention" in location.module.split(".") else "by policy"
