"""What activation checkpointing stored, dropped and will recompute, counted as it happened."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from titan_ext.activation_checkpoint.verdicts import Verdict
from titan_ext.fp8.ledger import Row
from titan_ext.fp8.local import local_tensor

__all__ = ["BlockReceipt", "OpRow", "RunReceipt", "count_flops"]


@dataclass(frozen=True)
class OpRow:
    """Operations of one forward, by verdict.

    Attributes:
        name: Module, operation and parameter ("moe.routed_experts:aten._grouped_mm:w2_EDF"); the
            operations without a FLOP formula are one row, "other".
        verdict: What became of their outputs.
        calls: How often they ran.
        flops: Of all calls.
    """

    name: str
    verdict: Verdict
    calls: int
    flops: int


@dataclass(frozen=True)
class BlockReceipt:
    """One forward of one block.

    Attributes:
        block: Its name in the model.
        stored: What is held until backward, by tensor class and treatment; storages are counted.
        ops: What ran, and what runs again in the recompute.
        packs: How many times a tensor was given to the store.
    """

    block: str
    stored: tuple[Row, ...]
    ops: tuple[OpRow, ...]
    packs: int

    @property
    def nbytes(self) -> int:
        """Bytes held until backward."""
        return sum(row.nbytes for row in self.stored)

    @property
    def float8_nbytes(self) -> int:
        """Those of them in float8, with scales."""
        return sum(row.nbytes for row in self.stored if row.treatment.startswith("float8"))

    @property
    def float8_tensors(self) -> int:
        return sum(row.entries for row in self.stored if row.treatment.startswith("float8"))

    @property
    def flops(self) -> int:
        """Of the forward."""
        return sum(row.flops for row in self.ops)

    @property
    def recomputed_flops(self) -> int:
        return sum(row.flops for row in self.ops if row.verdict is Verdict.RECOMPUTE)

    @property
    def recomputed_ops(self) -> int:
        return sum(row.calls for row in self.ops if row.verdict is Verdict.RECOMPUTE)


class RunReceipt:
    """The receipts of the first forward of each block of a model, or of a pipeline stage's."""

    def __init__(self, blocks: Sequence[BlockReceipt]) -> None:
        self.blocks = tuple(blocks)

    def rows(self) -> list[Row]:
        """Tensor classes over all blocks."""
        sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        for row in (row for block in self.blocks for row in block.stored):
            total = sums[row.name, row.treatment]
            for i, value in enumerate((row.entries, row.nbytes, row.original_nbytes)):
                total[i] += value
        return [Row(*key, *total) for key, total in sorted(sums.items())]

    def metrics(self) -> dict[str, float]:
        """Totals by the names under which they are logged."""
        mib = 2**20
        by_kind: dict[str, int] = defaultdict(int)
        for row in self.rows():
            by_kind[row.treatment.split(":")[0].split(" ")[0]] += row.nbytes
        flops = sum(block.flops for block in self.blocks)
        again = sum(block.recomputed_flops for block in self.blocks)
        return {
            "activation_checkpoint/stored(MiB)": sum(b.nbytes for b in self.blocks) / mib,
            "activation_checkpoint/float8(MiB)": by_kind["float8"] / mib,
            "activation_checkpoint/exact(MiB)": by_kind["exact"] / mib,
            "activation_checkpoint/recomputed_ops": sum(b.recomputed_ops for b in self.blocks),
            "activation_checkpoint/recomputed(GFLOP)": again / 1e9,
            "activation_checkpoint/recomputed(%)": 100 * again / flops if flops else 0.0,
        }

    def __str__(self) -> str:
        lines = [f"{'tensors':>8} {'MiB':>10} {'bf16 MiB':>10}  treatment, class"]
        for row in self.rows():
            size, original = row.nbytes / 2**20, row.original_nbytes / 2**20
            lines.append(
                f"{row.entries:8} {size:10.3f} {original:10.3f}  {row.treatment}, {row.name}"
            )
        lines += [
            f"{name.partition('/')[2]}: {value:.4g}" for name, value in self.metrics().items()
        ]
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """As JSON: totals, and the rows of each block."""
        path.parent.mkdir(parents=True, exist_ok=True)
        blocks = [{**asdict(block), "nbytes": block.nbytes} for block in self.blocks]
        path.write_text(json.dumps({"totals": self.metrics(), "blocks": blocks}, indent=1) + "\n")


def count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of one call on this rank, by torch's formulas; 0 for what has none."""
    packet = getattr(func, "overloadpacket", func)
    if packet is torch.ops.aten._grouped_mm:
        a, b = local_tensor(args[0]), local_tensor(args[1])
        return 2 * a.shape[0] * a.shape[1] * b.shape[-1]  # torch has no formula for it
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    local = tree_map_only(torch.Tensor, local_tensor, (args, kwargs or {}, out))
    return int(formula(*local[0], **local[1], out_val=local[2]))


def op_rows(calls: Iterable[tuple[str, Verdict, int]]) -> tuple[OpRow, ...]:
    """One row for each name and verdict; names of operations without FLOPs are not told apart."""
    sums: dict[tuple[str, Verdict], list[int]] = defaultdict(lambda: [0, 0])
    for name, verdict, flops in calls:
        total = sums[name if flops else "other", verdict]
        total[0] += 1
        total[1] += flops
    return tuple(OpRow(*key, *total) for key, total in sums.items())
