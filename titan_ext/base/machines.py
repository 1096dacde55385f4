# SPDX-License-Identifier: BSD-3-Clause
"""The machine that ``--machine`` names: one of ``op_cost.MACHINES``, or a TOML file of yours.

``benchmarks/rates.py`` writes such a file from kernels that it times on a card. ``--measured``
writes one with what kernels and links of a run took. Its keys are the attributes of ``Machine``:

    extends = "h100"  # what is not here; MFU is of its peak
    gemm = 7.1e14
    slower = {"grouped GEMM" = 1.4, exchanges = 2.0}
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from titan_ext.base.messages import Mistakes, did_you_mean
from titan_ext.base.op_cost import KINDS, MACHINES, RANKS_PER_NODE, Machine

_SUFFIX = ".toml"
_EXTENDS, _SLOWER = "extends", "slower"
_BY_NAME = "name", "capability"
_USUAL = {f.name: f.default for f in fields(Machine) if f.name not in (*_BY_NAME, _SLOWER)}
_NEEDED = [name for name, usual in _USUAL.items() if usual is MISSING]


def machine_of(name: str) -> Machine:
    """The machine of that name, or of the TOML file of that name.

    Raises:
        ValueError: if nobody knows it, and for all that is wrong in a file.
    """
    if name in MACHINES:
        return replace(MACHINES[name], name=name)
    file = Path(name)
    if file.suffix != _SUFFIX:
        raise ValueError(
            f"--machine is {name!r}; expected one of {', '.join(MACHINES)}, or a TOML file with "
            f"rates{did_you_mean(name, MACHINES)}"
        )
    if not file.is_file():
        beside = [str(path) for path in file.parent.glob(f"*{_SUFFIX}")]
        raise ValueError(
            f"--machine {name}: there is no such file; expected one that benchmarks/rates.py "
            f"writes, or one of {', '.join(MACHINES)}{did_you_mean(name, beside)}"
        )
    try:
        given = tomllib.loads(file.read_text())
    except ValueError as error:
        raise ValueError(
            f"{file}: expected a TOML file with rates of a machine: {error}."
        ) from None
    mistakes = Mistakes(f"{file}: {problem}" for problem in _mistakes(given))
    mistakes.raise_all()
    base = given.pop(_EXTENDS, "")
    return replace(machine_of(base), **given) if base else Machine(**given)


def _mistakes(given: Mapping[str, Any]) -> Iterator[str]:
    for key, value in given.items():
        if key == _EXTENDS:
            if value not in MACHINES:
                nearest = did_you_mean(value, MACHINES)
                yield f"{key} is {value!r}; expected one of {', '.join(MACHINES)}{nearest}"
        elif key == _SLOWER:
            yield from _wrong_factors(value)
        elif key not in _USUAL:
            nearest = did_you_mean(key, [_EXTENDS, *_USUAL, _SLOWER])
            yield f"{key}: no such key of a machine{nearest}"
        elif isinstance(_USUAL[key], int) and not (type(value) is int and value > 0):
            yield f"{key} is {value!r}; expected how many ranks it joins: {_USUAL[key]}."
        elif not _is_positive(value):
            usual = f"{getattr(MACHINES['h100'], key):.3g}"
            yield f"{key} is {value!r}; expected a positive number, as {usual} of an h100."
    missing = [] if _EXTENDS in given else [key for key in _NEEDED if key not in given]
    if missing:
        yield f'no {", ".join(missing)}; expected all rates, or {_EXTENDS} = "h100" for the others.'


def _wrong_factors(table: Any) -> Iterator[str]:
    if not isinstance(table, dict):
        yield f"{_SLOWER} is {table!r}; expected a table of factors, such as {{GEMM = 1.3}}."
        return
    for kind, value in table.items():
        if kind not in KINDS:
            nearest = did_you_mean(kind, KINDS)
            yield f"{_SLOWER}: no kind {kind!r}; expected some of {', '.join(KINDS)}{nearest}"
        elif not _is_positive(value):
            yield f"{_SLOWER}.{kind} is {value!r}; expected a positive factor, such as 1.3."


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def machine_toml(machine: Machine) -> Iterator[str]:
    """The lines of a file with that machine: what differs from the one that it extends."""
    base = MACHINES.get(machine.name)
    if base is not None:
        yield f'{_EXTENDS} = "{machine.name}"'
    for key, usual in _USUAL.items():
        value = getattr(machine, key)
        if value != (usual if base is None else getattr(base, key)):
            yield f"{key} = {value if isinstance(value, int) else f'{value:.4g}'}"
    if machine.slower:
        factors = ", ".join(f'"{kind}" = {by:.4f}' for kind, by in machine.slower.items())
        yield f"{_SLOWER} = {{{factors}}}"


def nodes_of(machine: str, ranks_per_node: int, nvlink_domain: int) -> tuple[int, int]:
    """Both numbers, where 0 is for what such a machine usually has; without one, 8 and a node.

    Raises:
        ValueError: as ``machine_of``.
    """
    usual = machine_of(machine) if machine else None
    if ranks_per_node or usual is None:
        return ranks_per_node or RANKS_PER_NODE, nvlink_domain
    return usual.ranks_per_node, nvlink_domain or usual.nvlink_domain
