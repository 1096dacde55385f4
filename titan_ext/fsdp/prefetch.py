# SPDX-License-Identifier: BSD-3-Clause
"""Prefetch: the units that are gathered while another one computes.

FSDP2 prefetches by itself in backward, and in forward as far as the host runs ahead of the device.
The device-to-host copy of the expert-parallel split lists stops the host in every MoE layer. So
titan_ext gives FSDP2 explicit lists: a number of units ahead, or as many as fit into a number of
bytes, in both directions. What "auto" is, ``fsdp.auto`` says.

A recompute needs only the units of its own block. FSDP2 mistakes it for another forward and would
gather the units ahead again. So units have forward lists while the model runs only, and before each
forward a unit inside a block checks whether backward is running. If so, it gathers its own
parameters. A pipeline may also have kept a unit gathered since the previous microbatch. So FSDP2's
operations differ between forward and recompute, and selective checkpointing must not see them
(``hide_fsdp``).

FSDP2 keeps the all-gather buffer of a unit in forward until it copies out the next unit. So that
gather may overlap with the copy. But whole blocks are large and copies are short. So a block that
was gathered ahead copies out before FSDP2's own hook, and its buffer is freed at once.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.common.decoder import Decoder

from titan_ext.base.messages import BYTES, parse_bytes
from titan_ext.base.tensors import in_backward, out_of_sight_of_checkpointing
from titan_ext.fsdp.plan import UnitPlan
from titan_ext.fsdp.units import SUBMODULE_KINDS, Unit, UnitKind, param_groups, splits_blocks


@dataclass(frozen=True)
class PrefetchLimit:
    """The distance of prefetch: a number of units, or of bytes of gathered parameters.

    ``from_attention`` is the number of units from an attention unit, where it differs.
    """

    units: int | None = None
    nbytes: int | None = None
    from_attention: int | None = None

    def of(self, unit: Unit) -> "PrefetchLimit":
        """The limit while ``unit`` runs."""
        if self.from_attention is None or unit.kind is not UnitKind.ATTENTION:
            return self
        return PrefetchLimit(units=self.from_attention)


def parse_prefetch_limit(key: str, value: object) -> PrefetchLimit | None:
    """Read ``parallelism.fsdp_prefetch``: 0, 1, 2, ... units, a size such as "512MiB", or "auto".

    None for "auto" (``fsdp.auto``). Raises ValueError for anything else.
    """
    if value == "auto":
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return PrefetchLimit(units=value)
    if isinstance(value, str):
        if value.isascii() and value.isdecimal():
            return PrefetchLimit(units=int(value))
        if (nbytes := parse_bytes(value)) is not None:
            return PrefetchLimit(nbytes=nbytes)
    raise ValueError(
        f'{key} is {value!r}; expected "auto", a number of units (0, 1, 2, ...) or of bytes '
        f'("512MiB"; units {", ".join(BYTES)}).'
    )


def plan_prefetch(
    units: Sequence[UnitPlan], forward: PrefetchLimit, backward: PrefetchLimit
) -> list[UnitPlan]:
    """``units``, which are in forward order, with those to gather ahead of each."""
    order, back = list(units), _backward_order(units)
    if units and units[0].kind is UnitKind.TIED:
        order.append(units[0])  # embeddings run first, norm and head last
        back.insert(0, units[0])
    ahead, behind = _ahead(order, forward), _ahead(back, backward)
    freeing = _freeing(units, ahead)
    return [
        replace(
            unit,
            forward_prefetch=ahead[unit.name],
            backward_prefetch=behind.get(unit.name, ()),
            frees_buffer=unit.name in freeing,
        )
        for unit in units
    ]


def set_prefetch(model: Decoder, units: Sequence[UnitPlan]) -> None:
    """Let FSDP2 prefetch as ``units`` say, which are sharded already."""
    modules = {unit.name: unit.fsdp_module(model) for unit in units}
    ahead = {modules[u.name]: [modules[name] for name in u.forward_prefetch] for u in units}
    lists = _ForwardLists(ahead)
    # Prepended after fully_shard, and so ahead of FSDP2's hooks, which read the lists.
    model.register_forward_pre_hook(lists.begin, prepend=True)
    model.register_forward_hook(lists.end, always_call=True)
    for unit in units:
        module = modules[unit.name]
        # An empty list would mean FSDP2's own choice. The unit itself has been gathered already.
        behind = [modules[name] for name in unit.backward_prefetch] or [module]
        module.set_modules_to_backward_prefetch(behind)
        if unit.kind in SUBMODULE_KINDS or unit.frees_buffer:
            hook = functools.partial(_before_forward, module, unit.frees_buffer)
            for member in unit.modules(model):
                member.register_forward_pre_hook(hook, prepend=True)


class _ForwardLists:
    """Hooks of a model: its units have forward prefetch lists while it runs, and at no other time.

    What is gathered ahead and does not run waits for its next forward, whatever becomes of the
    weights (``FSDPParamGroup.unshard``; ``reshard`` leaves it, too). So a part of the model that
    runs alone gathers nothing ahead. What a forward with an early exit has left is given up when
    the next one begins, and not before: a loss in chunks runs the head after the model.

    FSDP2 reshards in backward what its policy keeps gathered. So the first forward with gradients
    after one without begins with all units sharded. ``ahead`` are the units to gather while a unit
    runs.
    """

    def __init__(self, ahead: Mapping[FSDPModule, list[FSDPModule]]) -> None:
        self._ahead = ahead
        self._left: dict[FSDPModule, list[weakref.ref[torch.Tensor]]] = {}
        self._had_gradients = True

    @torch._dynamo.disable
    def begin(self, model: nn.Module, args: Any) -> None:
        # Private: nothing public tells that the end of the last backward is still to come. A
        # forward would leave FSDP2's hooks out, and the gradients on the gathered weights.
        state = model._get_fsdp_state()._state_ctx if isinstance(model, FSDPModule) else None
        if state and state.post_backward_final_callback_queued and not in_backward():
            raise RuntimeError(
                "the last backward ended in an exception, and FSDP2 is still in it. Call "
                "reset_iter_state() on the model on every rank, and begin the step again: its "
                "gradients are lost. docs/your_model.md says what torch 2.14 needs, too."
            )
        for module, left in self._left.items():
            # A schedule of a pipeline may gather a unit before its forward, too: that is new.
            if any(x is ref() for x in _arriving(module) for ref in left):
                module.unshard()
                module.reshard()
        if torch.is_grad_enabled() and not self._had_gradients:
            for part in model.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
        for module, units in self._ahead.items():
            module.set_modules_to_forward_prefetch(units)

    @torch._dynamo.disable
    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        self._had_gradients = torch.is_grad_enabled()
        for module in self._ahead:
            module.set_modules_to_forward_prefetch([])
        self._left = {
            module: [weakref.ref(x) for x in buffers]
            for module in self._ahead
            if (buffers := _arriving(module))
        }


def _arriving(module: FSDPModule) -> list[torch.Tensor]:
    """The buffers of a unit's all-gathers that no forward has waited for."""
    # Private: nothing public tells a unit that is being gathered from one that is not.
    results = (group._all_gather_result for group in param_groups([module]))
    return [result.all_gather_output for result in results if result is not None]


def _out_of_sight(hook: Callable[..., Any], *given: Any) -> Any:
    """Run a hook of FSDP's without the mode of selective checkpointing."""
    with out_of_sight_of_checkpointing():
        return hook(*given)


def hide_fsdp(modules: Iterable[nn.Module]) -> None:
    """Let FSDP's hooks on ``modules`` run unseen by checkpoints of the blocks that these are in.

    A hook gathers parameters in the forward, and mostly not in the recompute. In a group of one
    rank it casts its shard by an operation that a block has, too. Counted, that took another's
    place in the recompute: gradients were not finite. On a GPU a cast got the counts of tokens,
    since Titan's selective policy saves copies to the host.
    """
    for module in modules:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp."):
                    hooks[key] = functools.partial(_out_of_sight, hook)


@torch._dynamo.disable
def _before_forward(module: FSDPModule, frees_buffer: bool, *_: Any) -> None:
    """Runs before FSDP2's hook, in a recompute or for a unit that frees its buffer: gathers it."""
    if frees_buffer or in_backward():
        with out_of_sight_of_checkpointing():
            module.unshard()


def _backward_order(units: Sequence[UnitPlan]) -> list[UnitPlan]:
    """The order in which FSDP2 needs ``units`` in backward: of nested units the outer one first."""
    order: list[UnitPlan] = []
    for unit in reversed(units):
        if unit.kind is UnitKind.EMBEDDING:
            continue  # FSDP2 does not gather it (fsdp.shard)
        inside = [u for u in order if u.name.startswith(f"{unit.name}.")]
        order.insert(order.index(inside[0]) if inside else len(order), unit)
    return order


def _ahead(order: Sequence[UnitPlan], limit: PrefetchLimit) -> dict[str, tuple[str, ...]]:
    """The units that follow each unit in ``order``, as far as ``limit`` goes."""
    found: dict[str, tuple[str, ...]] = {}
    for index, unit in enumerate(order):
        # The tied unit has two places: what follows its first counts.
        found[unit.name] = found.get(unit.name) or _within(order[index + 1 :], limit.of(unit))
    return found


def _freeing(units: Sequence[UnitPlan], ahead: Mapping[str, tuple[str, ...]]) -> set[str]:
    """The units whose buffers are freed at once: with whole blocks, all that are gathered ahead.

    And the first one: nothing overlaps with its gather. Another one that is not gathered ahead
    may be gathered while the host runs ahead, and is left to FSDP2.
    """
    gathered = {name for names in ahead.values() for name in names}
    has_blocks = any(unit.kind is UnitKind.BLOCK and unit.name in gathered for unit in units)
    return {units[0].name, *gathered} if has_blocks and not splits_blocks(units) else set()


def _within(units: Sequence[UnitPlan], limit: PrefetchLimit) -> tuple[str, ...]:
    if limit.units is not None:
        return tuple(unit.name for unit in units[: limit.units])
    assert limit.nbytes is not None
    totals = accumulate(unit.gathered_nbytes for unit in units)
    return tuple(u.name for u, nbytes in zip(units, totals, strict=True) if nbytes <= limit.nbytes)
