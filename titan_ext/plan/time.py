# SPDX-License-Identifier: BSD-3-Clause
"""Time of one step on one rank of a machine, by what the step really runs.

``plan.live`` sees each operation of a dry run's step. With the stream on which FSDP2 puts it, it
goes to a queue, one for each stream and communicator. An operation starts when its queue is
free and what it reads is there, and takes what ``op_cost`` says. All collectives of a rank share
two links, within its node and to others (``streams``). So it times every policy, layout and
schedule that trains, and no formula repeats what they do. Kernels are ideal: nothing here knows of
gaps between them, of a slow host, or of neighbours that are late. One rank is all that a dry run
sees: every stage of a pipeline is taken to be as long as its own, and sending to take no time.

``titan_ext dry-run --machine h100`` prints ``StepTime.table``.
"""

import functools
import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.tools.utils import get_peak_flops

from titan_ext.base.machines import Machine, machine_of
from titan_ext.base.op_cost import (
    COLLECTIVES,
    SYNC_MS,
    collective_kind,
    group_ms,
    groups_of,
    kernel_class,
    moves_nothing,
    op_cost,
)
from titan_ext.base.tensors import has_values, in_backward, tensors_in
from titan_ext.plan.live import LiveBytes, MemoryKind, fsdp_kind
from titan_ext.plan.streams import Item, Streams, Work


class Category(StrEnum):
    """Use of the time of the compute stream."""

    FORWARD = "forward"
    LOSS = "loss and output layer, forward and backward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    CODEC = "float8 codec"
    COPIES = "FSDP's copies into and out of buffers"
    OPTIMIZER = "clipping and optimizer"
    EXCHANGES = "waits for exchanges of tokens"
    HOST = "waits for the host"
    GATHERS = "waits for FSDP's all-gathers"
    REDUCTIONS = "waits for FSDP's reductions"
    COLLECTIVES = "waits for other collectives"
    OFFLOAD = "waits for offloaded activations"
    BUBBLE = "waits for other stages"


WAITS = (
    Category.EXCHANGES,
    Category.HOST,
    Category.GATHERS,
    Category.REDUCTIONS,
    Category.COLLECTIVES,
    Category.OFFLOAD,
)
"""Categories in which the compute stream of this rank waits for its links or its host."""
# An eager step of one H100 took 1.50 times its planned kernels, since its host was late: kernels
# alone took 1.18 of the plan (benchmarks/gpu_receipts.md and LOG.md).
KERNELS, COMPILED_KERNELS, SPREAD = 1.62, 1.17, 0.32
"""Factors by which kernels take longer than the ideal in published runs, eager and compiled, and
how far nine of ten others are from that: fitted on a random half of the rows of 2026-11-25. With
those of benchmarks/published.md a half gives 1.62, 1.40 and 0.30."""


@dataclass(eq=False, slots=True)
class _Buffer:
    """A storage that more than one queue uses."""

    made_on: Any
    ref: weakref.ref
    ready: dict[Any, Item] = field(default_factory=dict)
    """Items that have to end before it can be read, by queue; ``used``: before it can be freed."""
    why: Category = Category.GATHERS
    used: dict[Any, Item] = field(default_factory=dict)


@dataclass(eq=False)
class Pass:
    """One forward and backward (all microbatches of a pipeline), or what follows the last one."""

    ms: dict[Category, float] = field(default_factory=lambda: defaultdict(float))
    kernels: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Milliseconds of kernels on all streams, and of messages, by ``op_cost.KINDS``."""


class _Label(NamedTuple):
    """What work belongs to; ``phase`` is that of ``LiveBytes``, ``kernel`` one of ``KINDS``."""

    now: Pass
    category: Category
    phase: str
    kernel: str


class StepClock:
    """Times a steady step: enter it beside ``live``, and run the step.

    Streams depend on each other through storages. Who reads one waits until it is written. When one
    is freed, the stream that made it waits until the others have done with it, as FSDP2 does before
    it lets go of a buffer. ``passes`` and ``streams``, with all work, are there when the step is
    over.

    Args:
        parts: The models of this rank.
        live: Tells of the operations, and at which phase of the step they are.
        machine: Whose rates.
    """

    def __init__(self, parts: Sequence[nn.Module], live: LiveBytes, machine: Machine) -> None:
        self.passes: list[Pass] = []
        """Passes, in the order in which they ran."""
        self._parts, self._live, self._machine = parts, live, machine
        # Without an accelerator FSDP2 takes its streams from torch.cpu. They run nothing, and tell
        # which one is current (torch/cpu/__init__.py).
        self.compute = torch.cpu.current_stream()
        self.streams = Streams()
        self._host: tuple[Item, ...] = ()
        """Items for which the host has waited last."""
        self._buffers: dict[int, _Buffer] = {}
        self._depth = 0
        self._phase = ""
        self._handles: list[Any] = []
        self._fused: list[tuple[Work, list[tuple[int, int]]]] = []
        """Work that a compiler fuses, with the bytes of each of its storages."""

    def __enter__(self) -> "StepClock":
        def enter(*_: Any) -> None:
            self._depth += 1

        def leave(*_: Any) -> None:
            self._depth -= 1

        for module in (module for part in self._parts for module in part.modules()):
            self._handles += [
                # Before FSDP's pre-hook, prepended as this is, so that what it runs in a recompute
                # counts as one; always_call, since a forward may raise.
                module.register_forward_pre_hook(enter, prepend=True),
                module.register_forward_hook(leave, always_call=True),
            ]
        self._live.then = self._see
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self._live.then = lambda *operation: None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._buffers.clear()
        if exc_type is None:
            if self.passes:  # the step ends when this is waited for
                self._add(self.compute, Category.OPTIMIZER, 0.0)
            self._fuse()
            self.streams.run()
            self._add_up()

    def _fuse(self) -> None:
        """Fused work reads and writes only what is in memory, and is no kernel of its own."""
        if not self._fused:
            return
        never = self._live.never_made()
        for work, parts in self._fused:
            nbytes = sum(n for storage, n in parts if storage not in never)
            slower = self._machine.slower.get(work.label.kernel, 1.0)
            work.ms = min(work.ms, nbytes / self._machine.memory * 1e3 * slower)

    def _add_up(self) -> None:
        for work in itertools.chain(*self.streams.queues.values()):
            if work.label.kernel:
                work.label.now.kernels[work.label.kernel] += work.ms + work.on_link_ms
        for work in self.streams.queues.get(self.compute, ()):
            ms = work.label.now.ms
            ms[work.label.category] += work.ms
            for why, waited in self.streams.waits(work):
                ms[why] += waited

    def _see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        phase = self._live.phases[-1].phase
        if phase != self._phase:
            if phase in ("start", "clip") or not self.passes:
                self.passes.append(Pass())
            self._phase = phase
        name, stream = func._schema.name, torch.cpu.current_stream()
        # Asked first, since the name of a wait has c10d in it, too.
        if name.endswith("wait_tensor"):
            self._wait_for(stream, tensors_in(args))
        elif "c10d" in name:
            self._communicate(name, stream, args, out)
        elif func is torch.ops.aten.copy_.default and self._crosses(*args[:2]):
            self._offload(*args[:2])
        elif not moves_nothing(func):
            self._run(func, stream, args, kwargs, out)
        elif stream is not self.compute and "empty" in name:
            for tensor in tensors_in(out):
                self._buffer(tensor, made_on=stream)

    # -- what runs

    def _add(
        self, queue: Any, category: Category, ms: float, kernel: str = "", **on_link: Any
    ) -> Item:
        label = _Label(self.passes[-1], category, self._phase, kernel)
        return self.streams.add(queue, Work(ms, label=label, **on_link))

    def _run(self, func: Any, stream: Any, args: Any, kwargs: Any, out: Any) -> None:
        used = tensors_in((args, kwargs))
        self._wait_for(stream, used)
        cost = op_cost(func, args, kwargs, out, self._machine)
        name = func._schema.name
        end = self._add(stream, self._category(name), cost.ms, kernel_class(name))
        if stream is self.compute:
            parts = self._live.fused(func, (*used, *tensors_in(out)))
            if parts is not None and not cost.flops:
                self._fused.append((self.streams.queues[stream][end.index], parts))
        self._use(stream, used, end)
        if stream is not self.compute or name.startswith("fsdp::"):
            for tensor in (*tensors_in(out), *tensors_in(kwargs.get("out"))):
                self._buffer(tensor, made_on=stream).ready[stream] = end

    def _crosses(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """True for a copy to or from the host."""
        return len({self._live.kind_of(x) is MemoryKind.OFFLOADED for x in (target, source)}) == 2

    def _offload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy to or from the host runs beside the computation."""
        to_host = self._live.kind_of(target) is MemoryKind.OFFLOADED
        lane = "to the host" if to_host else "from the host"
        # As fp8/offload.py does: its stream waits for the one that computes.
        self.streams.wait(lane, self.streams.last(self.compute))
        end = self._add(lane, Category.OFFLOAD, target.nbytes / self._machine.host * 1e3)
        buffer = self._buffer(source if to_host else target, made_on=self.compute)
        buffer.why, buffer.used[lane] = Category.OFFLOAD, end  # it is not free before
        if not to_host:
            buffer.ready[lane] = end

    def _communicate(self, name: str, stream: Any, args: Any, out: Any) -> None:
        """A collective of c10d runs on its stream, a functional one beside it."""
        kind, group = collective_kind(name), next(groups_of(args), None)
        if kind not in COLLECTIVES or group is None:
            return  # of one rank, or between the stages of a pipeline
        sent, is_functional = tensors_in(args), "functional" in name
        is_exchange = kind == "all_to_all"
        why = Category.EXCHANGES if is_exchange else Category.COLLECTIVES
        if not is_exchange and (of_fsdp := fsdp_kind()) is not None:  # not tensor parallelism's
            why = Category.REDUCTIONS if of_fsdp is MemoryKind.REDUCE else Category.GATHERS
        self._wait_for(stream, sent)
        # Stock exchanges lists.
        nbytes = max(sum(x.nbytes for x in tensors_in(sides)) for sides in (*args[:2], out))
        # An all-reduce sends twice what a reduce-scatter sends: it gathers the sums as well.
        ranks, times = dist.get_process_group_ranks(group), 2 if kind == "all_reduce" else 1
        cost = functools.partial(group_ms, self._machine, ranks=ranks, is_exchange=is_exchange)
        (ms, link), (latency_ms, _) = cost(nbytes), cost(0)
        times *= self._machine.slower.get(why.name.lower(), 1.0)
        communicator = f"communicator {group.group_name}"
        # A collective starts behind what its stream has been given, as NCCL's do.
        self.streams.wait(communicator, (*self._host, *self.streams.last(stream)))
        if not is_functional and not all(self._known(x) for x in sent):
            # It made what is sent.
            self.streams.wait(communicator, self.streams.last(self.compute))
        end = self._add(
            communicator,
            why,
            times * latency_ms,
            why.name.lower(),
            link=link,
            on_link_ms=times * (ms - latency_ms),
        )
        for tensor in tensors_in(out) if is_functional else sent:
            buffer = self._buffer(tensor, made_on=self.compute)
            buffer.ready, buffer.why = {communicator: end}, why
        if not is_functional:
            self.streams.wait(stream, [end], why)
            self._use(communicator, sent, end)
        if why is Category.EXCHANGES and not has_values(sent[0]):
            # The host reads the counts, and gives out nothing before.
            self.streams.wait("host", [end])
            # SYNC_MS is assumed (base/op_cost.py).
            self._host = (self._add("host", Category.HOST, SYNC_MS),)
            self.streams.wait(stream, self._host, Category.HOST)

    def _category(self, name: str) -> Category:
        if name.startswith("titan_ext::float8_"):
            return Category.CODEC
        if name.startswith("fsdp::"):
            return Category.COPIES
        if self._phase in ("clip", "optimizer"):
            return Category.OPTIMIZER
        if self._phase == "loss":
            return Category.LOSS
        if not in_backward():
            return Category.FORWARD
        # Backward runs without gradients, but for the recompute.
        return Category.RECOMPUTE if self._depth or torch.is_grad_enabled() else Category.BACKWARD

    # -- what queues share

    def _wait_for(self, queue: Any, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if (buffer := self._known(tensor)) is not None:
                self.streams.wait(queue, buffer.ready.values(), buffer.why)

    def _use(self, queue: Any, tensors: Sequence[torch.Tensor], end: Item) -> None:
        for tensor in tensors:
            if (buffer := self._known(tensor)) is not None:
                buffer.used[queue] = end
                if queue is not self.compute:
                    buffer.ready[queue] = end

    def _known(self, tensor: torch.Tensor) -> _Buffer | None:
        return self._buffers.get(tensor.untyped_storage()._cdata)

    def _buffer(self, tensor: torch.Tensor, made_on: Any) -> _Buffer:
        if (buffer := self._known(tensor)) is None:
            untyped = tensor.untyped_storage()
            key = untyped._cdata
            # A reference would keep the storage, and its end is what the clock waits for.
            ref = weakref.ref(untyped, functools.partial(self._freed, key))
            buffer = self._buffers[key] = _Buffer(made_on, ref)
        return buffer

    def _freed(self, key: int, _: object) -> None:
        if (buffer := self._buffers.pop(key, None)) is not None:
            used = [end for queue, end in buffer.used.items() if queue is not buffer.made_on]
            self.streams.wait(buffer.made_on, used, buffer.why)


@dataclass(frozen=True)
class StepTime:
    """One step of a rank.

    Attributes:
        machine: Name of the machine.
        ms: Of the compute stream, by what it does; their sum is the step's.
        tokens: Of a step, for each GPU.
        flops_per_token: By Titan's formula; None where Titan reports no MFU either.
        is_measured: Whether these are rates of kernels in a run, and not a card's best.
        is_compiled: Whether the job compiles its blocks.
        kernels: Milliseconds of kernels on all streams, and of messages that are alone on their
            link, by ``op_cost.KINDS``.
    """

    machine: str
    ms: Mapping[Category, float]
    tokens: float
    flops_per_token: int | None
    is_measured: bool = False
    is_compiled: bool = False
    kernels: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, passes: Sequence[Pass], *, accumulation: int, idle: float, **others: Any
    ) -> "StepTime":
        """From the passes of a step with two accumulation steps, or one if there is no more;
        ``idle`` is a pipeline rank's time over that in which it is busy."""
        *forward_backward, last = passes
        repeated = [*forward_backward[:1], *forward_backward[1:] * (accumulation - 1), last]
        ms = {
            category: math.fsum(one.ms.get(category, 0.0) for one in repeated)
            for category in Category
        }
        ms[Category.BUBBLE] = idle * (sum(ms.values()) - sum(last.ms.values()))
        kinds = dict.fromkeys(kind for one in repeated for kind in one.kernels)
        return cls(
            ms=ms,
            kernels={k: math.fsum(one.kernels.get(k, 0.0) for one in repeated) for k in kinds},
            **others,
        )

    @property
    def step_ms(self) -> float:
        return sum(self.ms.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of each GPU, as Titan counts them."""
        return self.tokens / self.step_ms * 1e3

    @property
    def slowdown(self) -> float:
        """How many times longer than the ideal its kernels are expected to take."""
        usual = COMPILED_KERNELS if self.is_compiled else KERNELS
        return 1.0 if self.is_measured else usual

    @property
    def expected(self) -> Mapping[Category, float]:
        """``ms`` of a step whose kernels are as far from ideal as those of published runs."""
        # Waits get no factor: published rows do not tell how far links are from their rates.
        return {at: ms if at in WAITS else self.slowdown * ms for at, ms in self.ms.items()}

    @property
    def expected_ms(self) -> float:
        return sum(self.expected.values())

    @property
    def expected_tokens_per_second(self) -> float:
        return self.tokens / self.expected_ms * 1e3

    @property
    def mfu(self) -> float | None:
        """Share of the peak that Titan takes for this machine, up to 1."""
        if self.flops_per_token is None:
            return None
        return self.flops_per_token * self.tokens_per_second / self.peak

    @property
    def peak(self) -> float:
        # Titan looks for names such as "H100" in this text (torchtitan/tools/utils.py).
        return get_peak_flops(machine_of(self.machine).name.upper())

    @property
    def band(self) -> str:
        """How far nine of ten published runs are from it; no run tells that of measured rates."""
        return "" if self.is_measured else f" (+-{SPREAD:.0%})"

    def verdict(self) -> str:
        expected = f"expect {self.expected_tokens_per_second:,.0f} tokens/s a GPU{self.band}"
        return f"{expected}, {self.expected_ms:,.1f} ms a step on {Path(self.machine).stem}"

    def table(self) -> Iterator[str]:
        """A line for each category, in ms as expected, their sum, and the ideal."""
        for category in Category:
            if (ms := f"{self.expected.get(category, 0.0):.1f}") != "0.0":
                yield f"{ms:>8}  {category}"
        yield f"{self.expected_ms:>8.1f}  sum"
        mfu = f", MFU {self.mfu:.1%} of {self.peak / 1e12:.0f} TFLOP/s" if self.mfu else ""
        rates = "at measured rates" if self.is_measured else "ideal, at the rates of single kernels"
        yield f"{self.step_ms:>8.1f}  {rates}: {self.tokens_per_second:,.0f} tokens/s a GPU{mfu}"
