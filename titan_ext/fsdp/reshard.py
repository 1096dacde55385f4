"""When a unit's parameters are freed after its forward, to be gathered again for its backward.

Kept parameters save an all-gather and cost their bytes from forward to backward. An int lies in
between: after forward the parameters are sharded over a smaller world of that many neighbouring
ranks, so that a rank keeps a larger shard and backward gathers within that world (on one machine,
say). It is not a limit on anything else, concurrent all-gathers included.
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal

from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy

from titan_ext.fsdp.units import Unit, UnitKind

__all__ = [
    "Reshard",
    "check_reshard",
    "check_reshard_groups",
    "read_reshard",
    "reshard_after_forward",
]

Reshard = Literal["default", "always", "never"] | int

_KEY = "parallelism.fsdp_reshard_after_forward"
_GROUPS_KEY = "parallelism.fsdp_reshard_groups"
_NAMES = ("default", "always", "never")


def read_reshard(word: str) -> str | int:
    """A setting as the command line has it: a number of ranks, or a name."""
    return int(word) if word.isdecimal() else word


def check_reshard(key: str, value: object) -> None:
    """Refuse what is no reshard setting.

    Raises:
        ValueError: naming ``key``.
    """
    if value in _NAMES and isinstance(value, str):
        return
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return
    raise ValueError(
        f"{key} is {value!r}; expected one of {', '.join(_NAMES)}, or the number of ranks (at "
        f"least 1) over which to reshard{_did_you_mean(value, _NAMES)}"
    )


def check_reshard_groups(groups: Mapping[str, Reshard], units: Sequence[Unit]) -> None:
    """Refuse names in ``parallelism.fsdp_reshard_groups`` that no unit of a model answers to.

    Args:
        groups: The table.
        units: Those of the whole model, not of a pipeline stage.

    Raises:
        ValueError: for such a name.
    """
    for name, value in groups.items():
        check_reshard(f"{_GROUPS_KEY}.{name}", value)
        if not any(_answers_to(unit, name) for unit in units):
            kinds = list(dict.fromkeys(_kind_name(unit) for unit in units))
            known = [*kinds, *(unit.name for unit in units)]
            raise ValueError(
                f"{_GROUPS_KEY}: no unit of this model is called {name!r}; expected a kind of "
                f"unit ({', '.join(kinds)}) or a pattern for names such as "
                f"{units[len(units) // 2].name}{_did_you_mean(name, known)}"
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

    "default" frees after forward unless pipeline parallelism would gather again for every
    microbatch, and keeps a unit outside the blocks that is small beside them. The head is needed
    first in backward: what is said of all units does not free it, except "always".

    Args:
        unit: Which unit.
        policy: ``parallelism.fsdp_reshard_after_forward``.
        groups: ``parallelism.fsdp_reshard_groups``. Of several patterns that match, the last wins.
        pp_enabled: Whether the model is a chunk of a pipeline.
        is_rounding_error: Whether its bytes are nothing beside the largest unit's.
        has_dtensors: Whether another kind of parallelism has split its parameters already: torch
            cannot reshard those to a smaller world.
        group_worlds: Ranks that the unit's groups are sharded over; an int must divide each.

    Returns:
        FSDP2's ``reshard_after_forward``.

    Raises:
        ValueError: for an unknown policy, or an int that does not fit.
    """
    key, value = _setting(unit, policy, groups)
    check_reshard(key, value)
    is_head = unit.kind in (UnitKind.HEAD, UnitKind.TIED)
    if is_head and key == _KEY:
        return value == "always"
    if isinstance(value, int):
        _check_world(key, value, unit, has_dtensors, group_worlds)
        return value
    if value == "default" and (is_head or (is_rounding_error and _is_outside_blocks(unit))):
        return False
    return get_fsdp_reshard_after_forward_policy(value, pp_enabled)


def _setting(unit: Unit, policy: Reshard, groups: Mapping[str, Reshard]) -> tuple[str, Reshard]:
    kind = _kind_name(unit)
    patterns = [name for name in groups if name != kind and _answers_to(unit, name)]
    for name in [*reversed(patterns), *([kind] if kind in groups else [])]:
        return f"{_GROUPS_KEY}.{name}", groups[name]
    return _KEY, policy


def _answers_to(unit: Unit, name: str) -> bool:
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
            f"{key} is {value}, a number of ranks, which torch does not offer for {unit.name}: "
            "tensor or expert parallelism has split its parameters (FSDP2 reshards only plain "
            f'tensors to a smaller world). Give it "always" or "never" in {_GROUPS_KEY}.'
        )
    for world in group_worlds:
        if world % value:
            fitting = [n for n in range(1, world + 1) if world % n == 0]
            raise ValueError(
                f"{key} is {value}, the number of ranks over which to reshard, but {unit.name} is "
                f"sharded over {world}; expected one of {', '.join(map(str, fitting))}."
            )


def _did_you_mean(value: object, known: Iterable[str]) -> str:
    close = get_close_matches(str(value), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."
