# SPDX-License-Identifier: BSD-3-Clause
"""Verdict on a step's memory: what lives, what torch's allocator reserves, and whether that fits.

``plan.live`` counts storages, ``plan.pools`` what the allocator reserves for them. CUDA's context
and NCCL come on top, by rules of thumb. Published jobs are off by a few percent, so a verdict near
the limit is "uncertain" (docs/plan.md).
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from titan_ext.base.messages import format_bytes
from titan_ext.plan.live import LASTING, LiveBytes, MemoryKind, Peak

# No run of ours has read them off a device (docs/plan.md, "The memory of a step").
CONTEXT, COMMUNICATOR = 600 * 2**20, 600 * 2**20
"""Bytes of CUDA's context, with cuBLAS's workspaces, and of NCCL for each process group that
communicates: guesses."""


class JobClass(StrEnum):
    """Jobs whose plans are off alike."""

    EAGER = "eager"
    EXCHANGING = "eager, with expert parallelism"
    LOSS = "loss compiled"
    BLOCKS = "blocks compiled"

    @classmethod
    def of(cls, compiled: Collection[str], expert_parallel_degree: int) -> "JobClass":
        """The class of a job that compiles these of Titan's ``compile.components``."""
        if "model" in compiled:
            return cls.BLOCKS
        if "loss" in compiled:
            return cls.LOSS
        return cls.EXCHANGING if expert_parallel_degree > 1 else cls.EAGER


# By benchmarks/published.py: what each job says of the others of its class, left out in turn. One
# H100's reserved bytes were off by 0.2% (benchmarks/gpu_receipts.md).
BANDS = {
    JobClass.EAGER: 0.08,
    JobClass.EXCHANGING: 0.12,
    JobClass.LOSS: 0.12,
    JobClass.BLOCKS: 0.12,
}
"""Share of what is reserved by which published jobs were off (docs/plan.md)."""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a rank needs in a steady step, beside what it has."""

    memory: int
    """Bytes of the device."""
    peak: Peak
    phases: Sequence[Peak]
    communicators: int
    on_host: frozenset[MemoryKind]
    host_peak: int = 0
    unsharded: int = 0
    ranks_per_node: int = 1
    reserved: Mapping[int, int] = field(default_factory=dict)
    """Bytes of torch's allocator in the pool of each stream; 0 is the one that computes."""
    job: JobClass = JobClass.EAGER
    unplanned: Sequence[str] = ()
    """Dispatchers that are planned as Titan's all-to-all, which keeps other tensors."""
    symmetric: int = 0
    """Bytes of symmetric memory, which is not the allocator's."""

    @classmethod
    def of(cls, live: LiveBytes, memory: int, **facts: Any) -> "MemoryPlan":
        phases = live.phases
        return cls(
            memory,
            Peak.of(phases),
            phases,
            communicators=len(live.groups),
            on_host=live.on_host,
            host_peak=live.most[MemoryKind.OFFLOADED],
            unsharded=live.most[MemoryKind.UNSHARDED],
            reserved=live.reserved,
            **facts,
        )

    @property
    def allowance(self) -> int:
        """Bytes beside what lives."""
        return self._allowance(self.peak)

    def _allowance(self, phase: Peak) -> int:
        # Assumed: at other phases the pools leave over the same share as at the peak.
        return self._fixed + int(self._unused * _moving(phase))

    @property
    def _fixed(self) -> int:
        return CONTEXT + COMMUNICATOR * self.communicators + self.symmetric

    @property
    def _unused(self) -> float:
        """Share of what comes and goes that is reserved and does not live at the peak."""
        more = sum(self.reserved.values()) - self.peak.nbytes if self.reserved else 0
        return more / max(_moving(self.peak), 1)

    @property
    def band(self) -> int:
        """Bytes by which published jobs were off their plans, nine of ten of them."""
        return int(BANDS[self.job] * (self.peak.nbytes + self.allowance - self._fixed))

    @property
    def fits(self) -> bool:
        """False where it needs more than there is; a job that is not planned may need less."""
        return self.spare >= 0 or bool(self.unplanned)

    @property
    def is_uncertain(self) -> bool:
        return abs(self.spare) < self.band

    @property
    def surely_spare(self) -> int:
        """Bytes that are left if the plan is too small by its band."""
        return self.spare - self.band

    @property
    def spare(self) -> int:
        """Bytes that are left; negative if it does not fit."""
        return self._spare(self.peak)

    def _spare(self, phase: Peak) -> int:
        return self.memory - phase.nbytes - self._allowance(phase)

    def room(self, phase: Peak) -> int:
        """Bytes that could be made at ``phase``; negative if it has more than surely fit.

        The band of a step that fills the memory stays free: at the peak this is negative just where
        ``surely_spare`` is, and says how much larger the step may grow.
        """
        share = BANDS[self.job]
        band = (self.memory - self._fixed) * share / (1 + share)
        return int((self._spare(phase) - band) / (1 + max(self._unused, 0.0)))

    def held_by_blocks(self, one: int) -> int:
        """The most bytes that wait for backward as the forward of a block is over.

        Not those of the block that runs then; ``one`` is as ``left_for_blocks`` takes it. What
        comes behind the blocks (multi-token prediction, the loss) does not count.
        """
        return max(
            after.held - one * ("of layers." in after.phase)
            for before, after in itertools.pairwise(self.phases)
            if before.phase.startswith("forward of layers.")
        )

    def left_for_blocks(self, everything: int, one: int) -> int:
        """The bytes that blocks may hold, so that every phase of the step surely fits.

        This is the plan without checkpointing. A block that runs has its activations as there,
        beside what it holds. Those that wait hold their share of the budget. ``everything`` are the
        bytes that all blocks hold here, ``one`` those of the largest block.

        Raises ValueError if a phase may not fit with nothing held.
        """
        budget = everything
        for phase in self.phases:
            held = min(phase.by_kind.get(MemoryKind.EXACT, 0), everything)
            runs = "of layers." in phase.phase
            room = self.room(phase)
            if (left := room + held - (min(one, held) if runs else 0)) < 0:
                raise ValueError(
                    f"without activations a step needs {format_bytes(-left)} more than is sure to "
                    "fit: no policy makes it fit. A budget of a size is tried all the same."
                )
            if room < 0:
                budget = min(budget, left * everything // held)
        return budget

    def verdict(self, rank: str) -> str:
        fits = "fits" if self.spare >= 0 else "does not fit"
        if self.is_uncertain:
            fits = f"uncertain, {'it may fit' if self.spare >= 0 else 'it may not fit'}"
        gib = f"{_gib(abs(self.spare))} GiB"
        margin = f"{gib} to spare" if self.spare >= 0 else f"over by {gib}"
        if self.unplanned:
            others = f"{' and '.join(self.unplanned)} keeps other tensors than Titan's all-to-all"
            fits, margin = "not planned", f"{others}, which would have {margin}"
        return f"{fits} in {_gib(self.memory)} GiB, {margin}; peak of {rank}: {self.peak.phase}"

    def table(self) -> Iterator[str]:
        """Lines of a report, one for each kind of storage at the peak, in GiB."""
        for kind in MemoryKind:
            on_host = " (on the host, not in the sum)" if kind in self.on_host else ""
            if (nbytes := _gib(self.peak.by_kind.get(kind, 0))) != "0.00":
                yield f"{nbytes:>8}  {kind}{on_host}"
        compiled = self.job in (JobClass.LOSS, JobClass.BLOCKS)
        fused = ", without what is fused" if compiled else ""
        yield f"{_gib(self.peak.nbytes):>8}  sum: allocated{fused}"
        others = sum(n for stream, n in self.reserved.items() if stream)
        off_by = f"+-{BANDS[self.job]:.0%}"
        yield (
            f"{_gib(sum(self.reserved.values())):>8}  reserved ({off_by}), of it {_gib(others)} in "
            "pools of other streams"
        )
        yield (
            f"{_gib(self._fixed):>8}  assumed: {_gib(CONTEXT)} context and cuBLAS, "
            f"{_gib(COMMUNICATOR)} for each of {self.communicators} communicators"
            + (f"; {_gib(self.symmetric)} buffers of symmetric memory" if self.symmetric else "")
        )
        if self.host_peak:
            ranks = self.ranks_per_node
            yield (
                f"{_gib(self.host_peak):>8}  host: {MemoryKind.OFFLOADED} of this rank at most; "
                f"{_gib(self.host_peak * ranks)} a node of {ranks} such ranks"
            )


def _moving(phase: Peak) -> int:
    return sum(n for kind, n in phase.by_kind.items() if kind not in LASTING)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"
