"""Which units are gathered while another one computes.

FSDP2 prefetches by itself in backward, and in forward as far as the host runs ahead of the device.
The device-to-host copy of the expert-parallel split lists stops the host in every MoE layer, so the
lists are given explicitly: a number of units ahead, or as many as fit into a number of bytes.

A recompute needs only what its own block has gathered. FSDP2 does not know that a forward is one,
and would gather the units ahead again, which have been freed already. And selective checkpointing
would see operations of FSDP in the recompute that it may not have seen in the forward, if a
pipeline had kept the unit from the microbatch before. So a unit inside a block looks, before each
forward, whether backward is running; then it gets its parameters by itself and nothing ahead.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import _CachedTorchDispatchMode

from titan_ext.fsdp.units import Unit, UnitKind

__all__ = ["NOTHING_AHEAD", "Prefetch", "Reach", "parse_reach", "plan_prefetch", "set_prefetch"]

_INSIDE_BLOCKS = (UnitKind.ATTENTION, UnitKind.MOE, UnitKind.FEED_FORWARD)
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Reach:
    """How far ahead to gather: a number of units, or of bytes of gathered parameters."""

    units: int | None = None
    nbytes: int | None = None


NOTHING_AHEAD = Reach(units=0)


@dataclass(frozen=True)
class Prefetch:
    """The units to gather while one runs, nearest first, by name."""

    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()


def parse_reach(key: str, value: object) -> Reach:
    """Read ``parallelism.fsdp_prefetch``: 0, 1, 2, ... units, or a size such as "512MiB".

    Raises:
        ValueError: for anything else, naming ``key``.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Reach(units=value)
    if isinstance(value, str):
        if value.isascii() and value.isdecimal():
            return Reach(units=int(value))
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B)", value)
        if match:
            return Reach(nbytes=int(float(match[1]) * _UNITS[match[2]]))
    raise ValueError(
        f"{key} is {value!r}; expected a number of units (0, 1, 2, ...) or of bytes "
        f'("512MiB"; units {", ".join(_UNITS)}).'
    )


def plan_prefetch(
    units: Sequence[Unit], nbytes: Mapping[str, int], forward: Reach, backward: Reach
) -> dict[str, Prefetch]:
    """The units to gather ahead of each unit.

    Args:
        units: In forward order.
        nbytes: Bytes of each unit's gathered parameters, by name.
        forward: How far ahead in forward.
        backward: How far ahead in backward, where the order is the reverse.
    """
    order = [unit.name for unit in units]
    if units and units[0].kind is UnitKind.TIED:
        order.append(order[0])  # embeddings run first, norm and head last
    plans = {unit.name: Prefetch() for unit in units}
    for index, name in enumerate(order):
        ahead = _within(order[index + 1 :], nbytes, forward)
        behind = _within(order[:index][::-1], nbytes, backward)
        # The tied unit has two places: what follows its first, what precedes its last.
        plans[name] = Prefetch(plans[name].forward or ahead, behind or plans[name].backward)
    for unit in units:
        if unit.kind is UnitKind.HEAD and unit.module_names == ("lm_head",):
            # Alone (its norm is kept elsewhere), it ends a backward with every chunk of the loss:
            # what it gathered ahead would be freed, and gathered again for the next one.
            plans[unit.name] = Prefetch(plans[unit.name].forward)
    return plans


def set_prefetch(units: Sequence[Unit], plans: Mapping[str, Prefetch]) -> None:
    """Give FSDP2 the lists of ``plans``, which are by unit. ``units`` have been sharded."""
    modules = {unit.name: _fsdp_module(unit) for unit in units}
    for unit in units:
        module, plan = modules[unit.name], plans[unit.name]
        ahead = [modules[name] for name in plan.forward]
        module.set_modules_to_forward_prefetch(ahead)
        # An empty list would mean FSDP2's own choice. The unit itself has been gathered already.
        behind = [modules[name] for name in plan.backward] or [module]
        module.set_modules_to_backward_prefetch(behind)
        if unit.kind in _INSIDE_BLOCKS:
            for part in unit.modules:
                part.register_forward_pre_hook(_BeforeForward(module, ahead), prepend=True)


class _BeforeForward:
    """Before FSDP2's own hook: prefetch in a forward; in a recompute only gather the unit."""

    def __init__(self, module: FSDPModule, ahead: list[FSDPModule]) -> None:
        self._module = module
        self._ahead = ahead

    @torch._dynamo.disable
    def __call__(self, part: nn.Module, args: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        self._module.set_modules_to_forward_prefetch([] if in_backward else self._ahead)
        if in_backward:
            with _out_of_sight_of_checkpointing():
                self._module.unshard()


def _out_of_sight_of_checkpointing() -> contextlib.AbstractContextManager[Any]:
    """Without the mode in which selective checkpointing recomputes; others stay."""
    if isinstance(_get_current_dispatch_mode(), _CachedTorchDispatchMode):
        return _pop_mode_temporarily()
    return contextlib.nullcontext()


def _within(names: Sequence[str], nbytes: Mapping[str, int], reach: Reach) -> tuple[str, ...]:
    if reach.units is not None:
        return tuple(names[: reach.units])
    assert reach.nbytes is not None
    chosen: list[str] = []
    left = reach.nbytes
    for name in names:
        left -= nbytes[name]
        if left < 0:
            break
        chosen.append(name)
    return tuple(chosen)


def _fsdp_module(unit: Unit) -> FSDPModule:
    # The modules of a unit share one FSDP state: any of them stands for it.
    module = unit.modules[0]
    assert isinstance(module, FSDPModule), f"unit {unit.name} has not been sharded"
    return module
