# SPDX-License-Identifier: BSD-3-Clause
"""Bytes that activation checkpointing keeps for backward, counted while it runs.

It counts eager code by block, in each block's first forward. A compiled graph serves every block of
its kind, so it counts compiled code by graph. A graph may not know how many tokens a rank's experts
get; those bytes are per token.
"""

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.tools.logging import logger

from titan_ext.activation_checkpoint.op_policies import BlockPolicies
from titan_ext.activation_checkpoint.op_rules import KEY, OpPolicy
from titan_ext.activation_checkpoint.partition import Saved
from titan_ext.fp8 import Codec, MemoryRow, MemoryRows, memory_rows

_COULD_NOT = tuple(f"exact: {why}" for why in ("float", "expanded", "would not shrink"))
"""First words of ``MemoryRow.treatment`` where float8 was asked for and not possible."""


@dataclass(frozen=True)
class OpRow:
    """Operations of one forward, by policy; ``flops`` are those of all ``calls``.

    ``name`` is that of an ``OpLocation``, or "other" for all operations without a FLOP formula.
    """

    name: str
    policy: OpPolicy
    calls: int
    flops: int


@dataclass(frozen=True)
class BlockMemoryReport:
    """One forward of one block."""

    block: str
    stored: MemoryRows
    """What is held until backward, by tensor class and treatment, in bytes of storages."""
    ops: tuple[OpRow, ...]
    """What ran, and what runs again in the recompute."""
    packs: int
    """How many times a tensor was given to the store."""

    @classmethod
    def of(
        cls, block: str, entries: Iterable[Any], calls: Iterable[tuple[Any, OpPolicy, int]] = ()
    ) -> "BlockMemoryReport":
        """Make a report from stored tensors, and the place, policy and FLOPs of operations."""
        packed = list(entries)
        named = (((str(at) if n else "other", policy), (1, n)) for at, policy, n in calls)
        ops = tuple(OpRow(*key, *total) for key, total in _sums(named).items())
        return cls(block, memory_rows(packed), ops, len(packed))

    @property
    def nbytes(self) -> int:
        """Bytes held on the device until backward."""
        return self.stored.nbytes

    @property
    def flops(self) -> int:
        """The floating-point operations of the forward."""
        return sum(row.flops for row in self.ops)

    @property
    def recomputed_flops(self) -> int:
        return sum(row.flops for row in self.ops if row.policy is OpPolicy.RECOMPUTE)

    @property
    def recomputed_ops(self) -> int:
        return sum(row.calls for row in self.ops if row.policy is OpPolicy.RECOMPUTE)


class MemoryReport:
    """The reports of the first forward of each block of a model, or of a pipeline stage's."""

    def __init__(self, blocks: Iterable[BlockMemoryReport] = ()) -> None:
        self.blocks = list(blocks)

    def rows(self) -> MemoryRows:
        """Tensor classes over all blocks."""
        sums = _sums(
            (
                (row.name, row.treatment),
                (row.entries, row.nbytes, row.original_nbytes, row.host_nbytes),
            )
            for block in self.blocks
            for row in block.stored
        )
        return MemoryRows(MemoryRow(*key, *total) for key, total in sorted(sums.items()))

    def metrics(self) -> dict[str, float]:
        """Totals by metric name."""
        mib = 2**20
        by_kind: dict[str, int] = defaultdict(int)
        rows = self.rows()
        for row in rows:
            by_kind[row.treatment.split(":")[0].split(" ")[0]] += row.nbytes
        flops = sum(block.flops for block in self.blocks)
        again = sum(block.recomputed_flops for block in self.blocks)
        totals = {
            "stored(MiB)": rows.nbytes / mib,
            "float8(MiB)": by_kind["float8"] / mib,
            "exact(MiB)": by_kind["exact"] / mib,
            "host(MiB)": rows.host_nbytes / mib,
            "recomputed_ops": sum(b.recomputed_ops for b in self.blocks),
            "recomputed(GFLOP)": again / 1e9,
            "recomputed(%)": 100 * again / flops if flops else 0.0,
        }
        return {f"{KEY}/{name}": value for name, value in totals.items()}

    def __str__(self) -> str:
        totals = [f"{name.partition('/')[2]}: {n:.4g}" for name, n in self.metrics().items()]
        return "\n".join([str(self.rows()), *totals])


@dataclass(frozen=True)
class GraphRow:
    """Tensors of one class that a compiled graph saves for its backward."""

    source: str
    """The operation that made them ("aten.mm"), or "input"."""
    treatment: str
    """Either "float8 e4m3", or "exact" and why."""
    tensors: int
    nbytes: int
    """Of those whose size is fixed."""
    nbytes_a_token: int
    """Of the others, for each token."""


def _sums(items: Iterable[tuple[Any, Sequence[int]]]) -> dict[Any, list[int]]:
    """The numbers of each key, summed by position."""
    sums: dict[Any, list[int]] = {}
    for key, numbers in items:
        sums[key] = [a + b for a, b in zip(sums.get(key, [0] * len(numbers)), numbers, strict=True)]
    return sums


class PolicyReport(MemoryReport):
    """The report of one policy: logged and written to the run's folder when it is complete.

    ``dump_folder`` is "" for none.
    """

    def __init__(self, codec: Codec, dump_folder: str) -> None:
        super().__init__()
        self._codec = codec
        self._folder = Path(dump_folder) / KEY if dump_folder else None
        self.names: list[str] = []  # of the blocks that will be in it
        self.policies: list[BlockPolicies] = []  # of all blocks, compiled ones too
        self.is_compiled = False
        """Whether there are compiled blocks, whose ``graphs`` it has instead."""
        self.graphs: list[list[GraphRow]] = []

    def add(self, report: BlockMemoryReport) -> bool:
        """Add the report of a block. If it is the last, log all of them and return True."""
        self.blocks.append(report)
        if len(self.blocks) < len(self.names):
            return False
        self.blocks.sort(key=lambda block: self.names.index(block.block))
        logger.info(f"Kept for backward ({len(self.blocks)} blocks, one forward):\n{self}")
        first = self.names[0].replace(".", "_")
        blocks = [{**asdict(block), "nbytes": block.nbytes} for block in self.blocks]
        self._write(f"rank{_rank()}_{first}.json", {"totals": self.metrics(), "blocks": blocks})
        return True

    def add_graph(self, saved: Sequence[Saved]) -> None:
        """Add what a compiled graph saves; parameters, which are exact inputs, are left out."""
        found = []
        for tensor in saved:
            is_float8 = tensor.treatment.startswith("float8")
            if tensor.source == "input" and not is_float8:
                continue
            shape = torch.Size(size if isinstance(size, int) else 1 for size in tensor.shape)
            nbytes = shape.numel() * tensor.dtype.itemsize
            if is_float8:
                nbytes = self._codec.nbytes(shape)
            is_fixed = all(isinstance(size, int) for size in tensor.shape)
            sizes = (1, nbytes, 0) if is_fixed else (1, 0, nbytes)
            found.append(((tensor.source, tensor.treatment), sizes))
        rows = [GraphRow(*key, *total) for key, total in sorted(_sums(found).items())]
        self.graphs.append(rows)
        lines = [
            f"{row.tensors:4} {row.nbytes:12,} B {row.nbytes_a_token:8,} B a token  "
            f"{row.source}: {row.treatment}"
            for row in rows
        ]
        logger.info("\n".join([f"Compiled graph {len(self.graphs)} saves for backward:", *lines]))
        graphs = [[asdict(row) for row in rows] for rows in self.graphs]
        self._write(f"graphs_rank{_rank()}.json", graphs)

    def check_graphs(self) -> None:
        """``check`` after a step, for compiled blocks, if there are any."""
        if self.is_compiled:
            self.check(itertools.chain.from_iterable(self.graphs))

    def check(self, rows: Iterable[MemoryRow | GraphRow]) -> None:
        """Raise RuntimeError if float8 was asked for, and nothing in ``rows`` could be stored so.

        Where a preset keeps nothing in float8 (grouped-query attention and routed experts, with
        "memory"), or all is small, as in a small copy of a job, the log says that all is exact.
        """
        kept = sorted({row.treatment for row in rows})
        wants_float8 = any(policies.rounds for policies in self.policies)
        if wants_float8 and not any(kind.startswith("float8") for kind in kept):
            if kept and not any(kind.startswith(_COULD_NOT) for kind in kept):
                logger.info(f"{KEY}: of these blocks the policy keeps nothing in float8.")
                return
            raise RuntimeError(
                f"{KEY}: the policy stores in float8, but nothing was stored in it. Kept: "
                f"{', '.join(kept) or 'nothing'}. fp32 activations stay "
                "exact. Expected training.mixed_precision_param = 'bfloat16', or policy "
                "'selective', 'full' or 'none'."
            )

    def _write(self, name: str, content: Any) -> None:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / name).write_text(json.dumps(content, indent=1) + "\n")


def memory_report_of(model_parts: Iterable[nn.Module]) -> MemoryReport:
    """A report of what the first forward of each wrapped block stored, as far as it ran."""
    return MemoryReport(block for report in _reports(model_parts) for block in report.blocks)


def kept_tensors(model_parts: Iterable[nn.Module]) -> Counter[str]:
    """Number of tensors that blocks keep for backward, or compiled graphs, by treatment."""
    kept: Counter[str] = Counter()
    for report in _reports(model_parts):
        for row in report.rows():
            kept[row.treatment] += row.entries
        for row in itertools.chain.from_iterable(report.graphs):
            kept[row.treatment] += row.tensors
    return kept


def _reports(model_parts: Iterable[nn.Module]) -> list[PolicyReport]:
    found = (part.__dict__.get("_memory_report") for part in model_parts)
    return [report for report in found if report is not None]


def log_memory_report(trainer: Any) -> None:
    """Add what our policies keep to the metrics of Titan's ``trainer``, and check graphs."""
    reports = _reports(trainer.model_parts)
    for report in reports:
        report.check_graphs()
    if reports:
        metrics = memory_report_of(trainer.model_parts).metrics()
        trainer.metrics_processor.logger.log(metrics, trainer.step)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
