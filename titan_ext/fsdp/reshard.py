# SPDX-License-Identifier: BSD-3-Clause
"""When FSDP frees a unit's parameters after its forward, to gather them again for its backward.

Parameters that stay gathered save an all-gather and cost their bytes from forward to backward. An
int is in between: after forward FSDP shards the parameters over a smaller world of that many
neighbouring ranks. Each rank then holds a larger shard, and backward gathers within that world (on
one machine, say). It does not limit the number of concurrent all-gathers.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy

from titan_ext.fsdp.units import Unit, UnitKind
from titan_ext.names import did_you_mean

Reshard = Literal["default", "always", "never"] | int

_KEY = "parallelism.fsdp_reshard_after_forward"
_GROUPS_KEY = "parallelism.fsdp_reshard_groups"
_NAMES = ("default", "always", "never")


def read_reshard(word: str) -> str | int:
    """Parse a setting of the command line: a number of ranks, or a name."""
    return int(word) if word.isdecimal() else word


def check_reshard(key: str, value: object) -> None:
    """Raise ValueError, naming ``key``, for an invalid reshard setting."""
    if value in _NAMES and isinstance(value, str):
        return
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return
    raise ValueError(
        f"{key} is {value!r}; expected one of {', '.join(_NAMES)}, or the number of ranks (at "
        f"least 1) over which to reshard{did_you_mean(value, _NAMES)}"
    )


def check_reshard_groups(groups: Mapping[str, Reshard], units: Sequence[Unit]) -> None:
    """Raise ValueError for a name in ``parallelism.fsdp_reshard_groups`` that matches no unit."""
    for name in groups:
        if not any(_matches(unit, name) for unit in units):
            kinds = list(dict.fromkeys(_kind_name(unit) for unit in units))
            known = [*kinds, *(unit.name for unit in units)]
            raise ValueError(
                f"{_GROUPS_KEY}: no unit of this model is called {name!r}; expected a kind of "
                f"unit ({', '.join(kinds)}) or a pattern for names such as "
                f"{units[len(units) // 2].name}{did_you_mean(name, known)}"
            )


def reshard_after_forward(
    unit: Unit,
    policy: Reshard,
    groups: Mapping[str, Reshard],
    *,
    pp_enabled: bool,
    is_rounding_error: bool = False,
    has_dtensors: bool = False,
    group_worlds: Iterable[int] = (),
) -> bool | int:
    """Decide for one unit: the pattern that matches its name, else its kind, else ``policy``.

    "default" frees a unit after forward, except in a pipeline, which would gather it again for
    every microbatch, and except small units outside the blocks. The head runs first in backward, so
    of the policies for all units only "always" frees it. An int frees the embedding: no backward
    would gather its larger shard, and FSDP2 would hold that until the next forward.

    Args:
        unit: Which unit.
        policy: ``parallelism.fsdp_reshard_after_forward``, checked.
        groups: ``parallelism.fsdp_reshard_groups``, checked; of several patterns the last wins.
        pp_enabled: Whether the model is a chunk of a pipeline.
        is_rounding_error: Whether its bytes are negligible beside the largest unit's.
        has_dtensors: Whether another kind of parallelism has split its parameters already: torch
            cannot reshard those to a smaller world.
        group_worlds: Ranks that the unit's groups are sharded over; an int must divide each.

    Returns:
        FSDP2's ``reshard_after_forward``; raises ValueError for an int that does not fit.
    """
    key, value = _setting(unit, policy, groups)
    is_head = unit.kind in (UnitKind.HEAD, UnitKind.TIED)
    if is_head and key == _KEY:
        return value == "always"
    if isinstance(value, int):
        _check_world(key, value, unit, has_dtensors, group_worlds)
        return value if unit.gathers_in_backward else True
    if value == "default" and (is_head or (is_rounding_error and _is_outside_blocks(unit))):
        return False
    return get_fsdp_reshard_after_forward_policy(value, pp_enabled)


def _setting(unit: Unit, policy: Reshard, groups: Mapping[str, Reshard]) -> tuple[str, Reshard]:
    kind = _kind_name(unit)
    patterns = [name for name in groups if name != kind and _matches(unit, name)]
    for name in [*reversed(patterns), *([kind] if kind in groups else [])]:
        return f"{_GROUPS_KEY}.{name}", groups[name]
    return _KEY, policy


def _matches(unit: Unit, name: str) -> bool:
    return name == _kind_name(unit) or fnmatchcase(unit.name, name)


def _kind_name(unit: Unit) -> str:
    # Tied weights are the head's: they are needed first in backward.
    return (UnitKind.HEAD if unit.kind is UnitKind.TIED else unit.kind).value


def _is_outside_blocks(unit: Unit) -> bool:
    return "." not in unit.name


def _check_world(
    key: str, value: int, unit: Unit, has_dtensors: bool, group_worlds: Iterable[int]
) -> None:
    if has_dtensors:
        raise ValueError(
            f"{key} is {value}, a number of ranks. FSDP2 reshards only plain tensors to a smaller "
            f"world, but tensor or expert parallelism has split the parameters of {unit.name}. "
            f'Give it "always" or "never" in {_GROUPS_KEY}.'
        )
    for world in group_worlds:
        check_divides(key, value, world, f"{unit.name} is")


def check_divides(key: str, ranks: int, world: int, what_is: str) -> None:
    """Raise ValueError, naming ``key``, unless ``ranks`` divides ``world``."""
    if world % ranks:
        fitting = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise ValueError(
            f"{key} is {ranks}, the number of ranks over which to reshard, but {what_is} sharded "
            f"over {world}; expected one of {fitting}."
        )


def say_reshard(reshard: bool | int) -> str:
    """What happens after forward, for the table of a plan."""
    if isinstance(reshard, bool):
        return "resharded" if reshard else "kept"
    return f"resharded to {reshard} ranks"
