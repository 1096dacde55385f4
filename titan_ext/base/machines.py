# SPDX-License-Identifier: BSD-3-Clause
"""The machine that ``--machine`` names: one of ``MACHINES``, or a TOML file of yours.

``benchmarks/rates.py`` writes such a file from kernels that it times on a card. Its keys are the
attributes of ``Machine``:

    extends = "h100"  # what is not here; MFU is of its peak
    gemm = 7.1e14
    slower = {"grouped GEMM" = 1.4, exchanges = 2.0}
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from titan_ext.base.messages import Mistakes, did_you_mean
from titan_ext.base.nodes import RANKS_PER_NODE

KINDS = (
    *("codec", "grouped GEMM", "attention", "GEMM", "copies", "elementwise"),
    *("exchanges", "gathers", "reductions", "collectives"),
)
"""Kinds that have factors of their own: kernels by ``kernel_class``, messages by use."""
MEMORY = {"h100": "79GiB", "h200": "139GiB", "b200": "178GiB", "mi300x": "191GiB"}
"""Memory that torch finds on one, about: what a plan has where nobody says how much there is."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """An accelerator and its links, by rates that are reached, not by their data sheets."""

    gemm: float
    """Of single large bf16 matrix products, FLOP/s."""
    grouped: float
    """Of grouped ones (``torch._grouped_mm``) with very many rows an expert, FLOP/s."""
    attention: float
    """Of fused attention, FLOP/s, of what a causal mask leaves."""
    fp32: float
    """Of fp32 matrix products, FLOP/s."""
    memory: float
    """Of its memory, bytes/s."""
    in_node: float
    """Of a rank's fast link (NVLink) to the others of its node, bytes/s each way."""
    in_node_all_to_all: float
    """Of that link when all exchange tokens with all, bytes/s."""
    # network, collective and host are assumed, and timed on no GPU; so is launch, which
    # benchmarks/rates.py fits, but no log has its figure. half_rate_rows is fitted to torchao PR
    # 2490's two figures. float8 is from FBGEMM's; it was 1.89 on one H100 (gpu_receipts.md).
    network: float = 45e9
    """Of a rank's share of the network, bytes/s each way."""
    half_rate_rows: float = 160.0
    """Rows of an expert at which a grouped product has half of that: tiles of 128 rows are partly
    empty, and weights are read for few rows. torchao PR 2490 has 0.53 and 0.55 of an H100's peak at
    512 rows an expert, of 0.71 with very many."""
    float8: float = 1.9
    """How many times a bf16 product's rate one of float8 has: 1.88 to 2.09 on an H100 (rowwise,
    8,192 rows and more, FBGEMM PR 2546)."""
    launch: float = 3e-6
    """Of the shortest kernel, seconds."""
    collective: float = 15e-6
    """Of the shortest collective, seconds."""
    host: float = 50e9
    """Of its link to pinned memory of the host, bytes/s each way."""
    enqueue: float = 80e-6  # fitted: 75 to 95 on the host of one H100 (benchmarks/gpu_receipts.md)
    """Of its host, to give out an eager operation of a block, with its views, its nodes of autograd
    and its Python, seconds. All that the host does is counted by it."""
    ranks_per_node: int = RANKS_PER_NODE
    """GPUs of a node; of the smallest, if they differ."""
    nvlink_domain: int = RANKS_PER_NODE
    """Neighbouring GPUs that NVLink joins. A file that says only how many a node has means
    those."""
    slower: Mapping[str, float] = field(default_factory=dict)
    """How many times longer than by these rates a kind of kernels or messages takes, by ``KINDS``,
    where a run was measured."""
    name: str = ""
    """In ``MACHINES``, of what a file extends; by it Titan knows the peak."""
    capability: tuple[str, int, int] | None = None
    """What Titan's converters ask for: "sm" of NVIDIA or "gfx" of AMD, and its two numbers; None if
    unknown."""

    @property
    def is_measured(self) -> bool:
        """Whether these are rates of kernels in a run, and not a card's best."""
        return bool(self.slower) or not self.name


# Rates of single kernels on an H100 SXM are those that are published as reached: of its 989 TFLOP/s
# cuBLAS reaches 0.80, fused attention 0.45, and torch._grouped_mm 0.71 with 128,000 rows an expert
# (298.7 ms for 2.1e14 FLOPs on an H200, pytorch PR 156203). Others are scaled from its data sheet
# by theirs: reasoned, not measured. In GB200's and GB300's racks a node is a tray of 4, and NVLink
# joins 72. torch's grouped kernels for Blackwell are CUTLASS's of the same PR; a profile of
# gpt-oss 120B at 2,048 rows an expert shows 0.36 of the peak, 0.39 without what few rows cost.
# An H100's fp32, memory and in_node rates are assumed. One card was fitted afterwards: memory
# 3.03e12, GEMM 6.3e14, grouped 7.5e14, attention 5.7e14, fp32 4.9e13. By these, GEMMs and grouped
# ones that were held out are off by more, 0.15 and 0.27 in place of 0.12 and 0.13, all other
# kinds by less (benchmarks/gpu_receipts.md).
_H100 = Machine(
    gemm=798e12,
    grouped=704e12,
    attention=450e12,
    fp32=60e12,
    memory=3.0e12,
    in_node=360e9,
    in_node_all_to_all=300e9,
    capability=("sm", 9, 0),
)
# HGX B200: 2.25 PFLOP/s, 8 TB/s, 900 GB/s NVLink each way, 400 Gb/s network.
_B200 = Machine(
    gemm=1800e12,
    grouped=880e12,
    attention=1000e12,
    fp32=70e12,
    memory=7.0e12,
    in_node=720e9,
    in_node_all_to_all=600e9,
    capability=("sm", 10, 0),
)
# GB200 NVL72: 2.5 PFLOP/s, 80 TFLOP/s in fp32, 8 TB/s, 450 GB/s a CPU to its two GPUs each way.
_GB200 = replace(
    _B200,
    gemm=2000e12,
    grouped=980e12,
    attention=1110e12,
    fp32=75e12,
    host=180e9,
    ranks_per_node=4,
    nvlink_domain=72,
)
# MI300X: 1.3 PFLOP/s, 5.3 TB/s, seven links of 64 GB/s each way. Its peak is out of reach of its
# power; MI355X: 2.5 PFLOP/s, 8 TB/s, seven links of 76.8 GB/s.
# Both are assumed: no run of ours, and none in benchmarks/published.toml, is on an AMD card.
_MI300X = Machine(
    gemm=700e12,
    grouped=490e12,
    attention=400e12,
    fp32=100e12,
    memory=4.3e12,
    in_node=340e9,
    in_node_all_to_all=280e9,
    capability=("gfx", 9, 4),
)
MACHINES = {
    "h100": _H100,
    # 96 GB of HBM2e at 2.4 TB/s and 500 W, on which TorchTitan's own figures were measured
    # (benchmarks/llama3_h100_202412_torchtitan.md). Clocks go with the cube root of the power.
    "h100hbm2e": replace(
        _H100, gemm=713e12, grouped=629e12, attention=402e12, fp32=54e12, memory=2.15e12
    ),
    "h200": replace(_H100, memory=4.3e12),
    "b200": _B200,
    "b300": replace(_B200, network=90e9),  # ConnectX-8: 800 Gb/s
    "gb200": _GB200,
    "gb300": replace(_GB200, network=90e9),
    "mi300x": _MI300X,
    "mi355x": replace(
        _MI300X,
        gemm=1350e12,
        grouped=950e12,
        attention=770e12,
        fp32=120e12,
        memory=6.5e12,
        in_node=410e9,
        in_node_all_to_all=340e9,
        capability=("gfx", 9, 5),
    ),
}

_SUFFIX = ".toml"
_EXTENDS, _SLOWER = "extends", "slower"
_BY_NAME = "name", "capability"
_USUAL = {f.name: f.default for f in fields(Machine) if f.name not in (*_BY_NAME, _SLOWER)}
_NEEDED = [name for name, usual in _USUAL.items() if usual is MISSING]


def machine_of(name: str) -> Machine:
    """The machine of that name, or of the TOML file of that name.

    Raises ValueError if nobody knows it, and for all that is wrong in a file.
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
    if "ranks_per_node" in given:  # NVLink joins a node, unless the file says more
        given.setdefault("nvlink_domain", given["ranks_per_node"])
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
    usual = _USUAL if base is None else vars(base)
    if machine.ranks_per_node != usual["ranks_per_node"]:
        usual = {**usual, "nvlink_domain": machine.ranks_per_node}  # as ``machine_of`` reads it
    for key in _USUAL:
        value = getattr(machine, key)
        if value != usual[key]:
            yield f"{key} = {value if isinstance(value, int) else f'{value:.4g}'}"
    if machine.slower:
        factors = ", ".join(f'"{kind}" = {by:.4f}' for kind, by in machine.slower.items())
        yield f"{_SLOWER} = {{{factors}}}"
