# SPDX-License-Identifier: BSD-3-Clause
"""Time of one step on one rank of a machine, by what the step really runs.

``plan.live`` sees each operation of a dry run's step. With the stream on which FSDP2 puts it, it
goes to a queue, one for each stream and communicator. An operation starts when its queue is
free and what it reads is there, and takes what ``op_cost`` says. All collectives of a rank share
two links, within its node and to others (``streams``). So it times every policy, layout and
schedule that trains, and no formula repeats what they do. The host enqueues at the machine's pace
(``Machine.enqueue``). Nothing here knows of neighbours that are late, or of other stages
(``schedules``).

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
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools.utils import get_peak_flops

from titan_ext.base.issuer import COLLECTIVES, collective_kind
from titan_ext.base.machines import Machine, machine_of
from titan_ext.base.tensors import has_values, in_backward, tensors_in
from titan_ext.plan.live import LiveBytes, MemoryKind, fsdp_kind
from titan_ext.plan.op_cost import (
    group_ms,
    groups_of,
    kernel_class,
    kernels_of,
    moves_nothing,
    op_cost,
)
from titan_ext.plan.pools import component_of
from titan_ext.plan.stand_ins import Buffer
from titan_ext.plan.streams import Streams, Work


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
SLOWER = {"GEMM": 1.06, "grouped GEMM": 1.04, "elementwise": 1.4, "copies": 1.43}
"""How many times longer than the ideal eager kernels of one H100 took, by kind: Qwen3-30B with 48
layers (benchmarks/gpu_receipts.md). Compiled, all of 16B's were within 7 %."""
KERNELS, COMPILED_KERNELS = {True: 1.07, False: 1.41}, {True: 1.11, False: 1.30}
"""Factors by which kernels take longer than that, of jobs with experts and without, eager, and than
the ideal, compiled: geometric means of published rows (benchmarks/published.md) and of one H100."""
SPREAD = 0.26
"""How far nine of ten rows are off that a random half of ten rows did not know."""
# What the host takes to give things out, in eager operations of a block (``Machine.enqueue``).
# Published, of hosts with 80 to 95 us an operation: a kernel of Inductor's 7 to 9 us, a call of
# compiled code 42 to 44 (tritonbench #1017), a CUDA graph 15 and 0.58 a node.
_LAUNCH, _COMPILED, _CALL, _GRAPH, _NODE = 0.035, 0.1, 0.5, 0.18, 0.007
# A call of a unit's hook of FSDP2, of which a step with a recompute has six: twice the units took
# the host of one H100 34 to 36 ms more (benchmarks/gpu_receipts.md).
_HOOK = 4.0
POLICIES = {"stock": 1.03, "full": 1.06, "selective": 1.18, "no_recompute": 1.26}
"""What an eager operation of a block costs the host under policy ``fp8``, by its mode or its preset
"stock", of one under TorchTitan's selective policy: each is answered for, and what is kept passes a
hook. Measured on a CPU (``python -m benchmarks.host_and_memory``). One H100 has 1.13 to 1.25 for
presets and 1.32 for "no_recompute". It has 0.93 and 1.06 for TorchTitan's "full" and "none", which
count as 1: a CPU, without launches, has 0.74 and 0.69."""


class How(NamedTuple):
    """How a step runs: its kernels, and what its host gives out."""

    compiled: tuple[str, ...] = ()
    """Some of ``pools.COMPONENTS``, in this order."""
    graphs: bool = False
    ideal: bool = False
    """Each kernel at the rates of the machine, and a host that takes no time."""
    policy: float = 1.0
    """What an eager operation of a block costs the host, by ``POLICIES``."""


EAGER, IDEAL = How(), How(ideal=True)
_REMEDIES = {
    "compiled": "compile.enable = true",
    "graphs": "training.disable_cuda_graphs = false",
}
NO_BUFFER = Buffer()
_HOST = "host"
_LATE = 0.05
"""Share of a step for which the card waits for its host before other ways are timed."""


@dataclass(eq=False, slots=True)
class _Buffer:
    """A storage that more than one queue uses."""

    made_on: Any
    ref: weakref.ref
    ready: dict[Any, Work] = field(default_factory=dict)
    """Work that has to end before it can be read, by queue; ``used``: before it can be freed."""
    why: Category = Category.GATHERS
    used: dict[Any, Work] = field(default_factory=dict)


@dataclass(eq=False)
class Pass:
    """One forward and backward (all microbatches of a pipeline), or what follows the last one."""

    ms: dict[How, dict[Category, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    """Of the compute stream, by how the step runs and what the stream does."""
    kernels: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Milliseconds of kernels on all streams, and of messages, by ``op_cost.KINDS``."""
    launched: int = 0
    """Kernels, without messages."""


@dataclass(eq=False, slots=True)
class _Label:
    """What work belongs to, and its ideal ms, eager and compiled; of the host in operations.

    ``phase`` is that of ``LiveBytes``, ``kernel`` one of ``KINDS``, "" for none.
    """

    now: Pass
    category: Category
    phase: str
    kernel: str
    eager: float
    compiled: float
    component: str = ""
    """The one of ``pools.COMPONENTS`` that it is of."""


class StepClock:
    """Times a steady step: enter it beside ``live``, and run the step.

    Streams depend on each other through storages. Who reads one waits until it is written. When one
    is freed, the stream that made it waits until the others have done with it, as FSDP2 does before
    it lets go of a buffer. ``passes`` and ``streams``, with all work, are there when the step is
    over.

    Args:
        live: Tells of the operations, and at which phase of the step they are.
        others: Other ways to run it, which are timed where the host is late.
        buffer: The one that tokens arrive in, where it is never full.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        live: LiveBytes,
        machine: Machine,
        how: How = EAGER,
        others: Iterable[How] = (),
        buffer: Buffer = NO_BUFFER,
    ) -> None:
        self.passes: list[Pass] = []
        """Passes, in the order in which they ran."""
        self._parts, self._live, self._machine = parts, live, machine
        self.how, self.others, self._buffer_of_tokens = how, others, buffer
        self.host_is_ahead_ms = 0.0
        """From the end of what the host does to that of the step."""
        # Without an accelerator FSDP2 takes its streams from torch.cpu. They run nothing, and tell
        # which one is current (torch/cpu/__init__.py).
        self.compute = torch.cpu.current_stream()
        self.streams = Streams()
        self._buffers: dict[int, _Buffer] = {}
        self._depth = 0
        self._has_experts = False
        self._phase, self._called = "", ("", "")
        self._handles: list[Any] = []
        self._fused: list[tuple[Work, Work, list[tuple[int, int]], list[tuple[int, int]]]] = []
        """Kernels that a compiler fuses and what gives them out, with the bytes of each storage
        that they read and that they write."""

    def __enter__(self) -> "StepClock":
        def passes(deeper: int, module: nn.Module, *_: Any) -> None:
            self._depth += deeper
            self._hook(isinstance(module, FSDPModule))

        enter, leave = (functools.partial(passes, deeper) for deeper in (1, -1))

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
            for how in (IDEAL, self.how):
                self._time(how)
            self.host_is_ahead_ms = self._end(self.compute) - self._end(_HOST)
            took = [sum(one.ms[self.how].values()) for one in self.passes]
            late = [one.ms[self.how][Category.HOST] for one in self.passes]
            for how in self.others if sum(late) > _LATE * sum(took) else ():
                self._time(how)

    def _end(self, queue: Any) -> float:
        return self.streams.queues[queue][-1].end or 0.0 if queue in self.streams.queues else 0.0

    def _fuse(self) -> None:
        """Fused work reads and writes only what is in memory, and is no kernel of its own."""
        never = self._live.never_made() if self._fused else set()
        for work, given, read, made in self._fused:
            there = {storage: n for storage, n in (*read, *made) if storage not in never}
            slower = self._machine.slower.get(work.label.kernel, 1.0)
            ms = sum(there.values()) / self._machine.memory * 1e3 * slower
            work.label.compiled = min(work.label.eager, ms)
            if all(storage in never for storage, _ in made):
                given.label.compiled = 0.0
                work.label.now.launched -= work.label.component in self.how.compiled

    def _time(self, how: How) -> None:
        """When all work begins and ends if the step runs like this, added up by category."""
        enqueue_ms = 0.0 if how.ideal else self._machine.enqueue * 1e3
        components = self.how.compiled if how.ideal else how.compiled
        is_first = True
        for queue, items in self.streams.queues.items():
            for work in items:
                label = work.label
                compiled = label.component in components
                ms = label.compiled if compiled else label.eager
                if queue == _HOST:
                    if how.graphs and label.phase not in ("clip", "optimizer"):
                        ms, is_first = (_GRAPH if is_first else _NODE), False
                    work.ms = ms * enqueue_ms
                elif label.kernel and not work.link:
                    usual = KERNELS[self._has_experts] * SLOWER.get(label.kernel, 1.0)
                    slower = COMPILED_KERNELS[self._has_experts] if compiled else usual
                    work.ms = ms if how.ideal or self._machine.is_measured else ms * slower
        self.streams.run()
        for work in self.streams.queues.get(self.compute, ()):
            ms = work.label.now.ms[how]
            ms[work.label.category] += work.ms
            for why, waited in self.streams.waits(work):
                ms[why] += waited
        if how.ideal:
            for work in itertools.chain(*self.streams.queues.values()):
                if work.label.kernel:
                    work.label.now.kernels[work.label.kernel] += work.ms + work.on_link_ms

    def _see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        phase = self._live.phase
        if phase != self._phase:
            if phase in ("start", "clip") or not self.passes:
                self.passes.append(Pass())
            self._phase = phase
        self._call()
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

    def _add(
        self, queue: Any, category: Category, ms: float, kernel: str = "", **on_link: Any
    ) -> Work:
        component = component_of(self._live.region())
        label = _Label(self.passes[-1], category, self._phase, kernel, ms, ms, component)
        return self.streams.add(queue, Work(ms, label=label, **on_link))

    def _launch(self, queue: Any, kernels: int = 1) -> Work:
        """The host gives out what comes next in ``queue``."""
        one = 1.0 if self._phase in ("loss", "clip", "optimizer") else self.how.policy
        work = self._add(_HOST, Category.HOST, one + _LAUNCH * (kernels - 1))
        work.label.compiled = _COMPILED
        self.streams.wait(queue, [work], Category.HOST)
        return work

    def _call(self) -> None:
        """The host calls the compiled code of a block, of a piece of one or of the loss."""
        region = self._live.region()
        at = self._phase, region
        if region and at != self._called:
            self._add(_HOST, Category.HOST, 0.0).label.compiled = _CALL
        self._called = at

    def _hook(self, calls: int) -> None:
        """The host runs hooks of an FSDP unit, eager or compiled."""
        if calls and self.passes:
            self._add(_HOST, Category.HOST, calls * _HOOK)

    def _run(self, func: Any, stream: Any, args: Any, kwargs: Any, out: Any) -> None:
        name, kernels, used = func._schema.name, kernels_of(func, args), tensors_in((args, kwargs))
        given = self._launch(stream, kernels)
        self._wait_for(stream, used)
        self._hook(2 * name.startswith("fsdp::chunk_cat"))  # those of backward
        self.passes[-1].launched += kernels
        cost = op_cost(func, args, kwargs, out, self._machine)
        ms, kind, category = cost.ms, kernel_class(name), self._category(name)
        self._has_experts |= kind == "grouped GEMM"
        if kind in ("grouped GEMM", "exchanges"):
            ms *= self._buffer_of_tokens.share
        if kind == "exchanges":  # of kernels that write into the buffers of other ranks
            nbytes = max(x.nbytes for x in (*used, *tensors_in(out)))
            nbytes, ranks = int(nbytes * self._buffer_of_tokens.share), self._buffer_of_tokens.ranks
            on_link_ms, _ = group_ms(self._machine, nbytes, ranks, is_exchange=True)
            ms, category = max(ms, on_link_ms), Category.EXCHANGES
        end = self._add(stream, category, ms, kind)
        if stream is self.compute and self._live.region():
            read, made = self._live.fused(func, used), self._live.fused(func, tensors_in(out))
            if read is not None and made is not None and not cost.flops:
                self._fused.append((end, given, read, made))
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
        self._launch(lane)
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
        self._launch(communicator)
        self.streams.wait(communicator, self.streams.last(stream))
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
            # The host reads the counts when all is done that came before, and gives out nothing
            # meanwhile.
            self.streams.wait(_HOST, [end, *self.streams.last(stream)])

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

    def _wait_for(self, queue: Any, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if (buffer := self._known(tensor)) is not None:
                self.streams.wait(queue, buffer.ready.values(), buffer.why)

    def _use(self, queue: Any, tensors: Sequence[torch.Tensor], end: Work) -> None:
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
    """One step of a rank."""

    machine: str
    ms: Mapping[Category, float]
    """Of the compute stream, by what it does; their sum is the step's."""
    tokens: float
    """Of a step, for each GPU."""
    flops_per_token: int | None
    """By Titan's formula; None where Titan reports no MFU either."""
    is_measured: bool = False
    """Whether these are rates of kernels in a run, and not a card's best."""
    kernels: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds of kernels on all streams, and of messages that are alone on their link, by
    ``op_cost.KINDS``."""
    expected: Mapping[Category, float] = field(default_factory=dict)
    """``ms`` of a step whose kernels are as far from ideal as those of runs, and which waits for
    its host."""
    instead: Mapping[How, float] = field(default_factory=dict)
    """Milliseconds of a step that runs otherwise."""
    host_is_ahead_ms: float = 0.0
    """From the end of what the host does to that of the step."""
    launched: float = 0.0
    """Kernels, without messages."""

    @classmethod
    def of(
        cls, passes: Sequence[Pass], how: How, *, accumulation: int, idle: float, **others: Any
    ) -> "StepTime":
        """From the passes of a step with two accumulation steps, or one if there is no more;
        ``idle`` is a pipeline rank's time over that in which it is busy."""
        *forward_backward, last = passes
        repeated = [*forward_backward[:1], *forward_backward[1:] * (accumulation - 1), last]

        def total(how: How) -> dict[Category, float]:
            times = [one.ms[how] for one in repeated]
            ms = {x: math.fsum(time.get(x, 0.0) for time in times) for x in Category}
            ms[Category.BUBBLE] = idle * (sum(ms.values()) - sum(last.ms[how].values()))
            return ms

        kinds = dict.fromkeys(kind for one in repeated for kind in one.kernels)
        return cls(
            ms=total(IDEAL),
            expected=total(how),
            instead={x: sum(total(x).values()) for x in last.ms if x not in (IDEAL, how)},
            kernels={k: math.fsum(one.kernels.get(k, 0.0) for one in repeated) for k in kinds},
            launched=sum(one.launched for one in repeated),
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
        ideal, expected = (
            sum(ms for at, ms in of.items() if at not in WAITS) for of in (self.ms, self.expected)
        )
        return expected / ideal

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

    @property
    def host(self) -> str:
        """Who waits for whom, and what would change that most."""
        step, ms = self.expected_ms / 1e3, self.expected.get(Category.HOST, 0.0)
        host = step - self.host_is_ahead_ms / 1e3
        said = f"{host:.2f} of {step:.2f} s, {self.launched:,} kernels: "
        said += f"the card waits for it {ms / self.expected_ms:.0%} of the time"
        ways = {
            " and ".join(_REMEDIES[key] for key in _REMEDIES if getattr(how, key)): ms
            for how, ms in self.instead.items()
        }
        best = sorted(ways.items(), key=lambda way: way[1])
        better = [f"{w} is planned {ms / self.expected_ms:.2f} of it" for w, ms in best]
        return "; ".join([said, *better])

    def table(self) -> Iterator[str]:
        """A line for each category, in ms as expected, their sum, and the ideal."""
        for category in Category:
            if (ms := f"{self.expected.get(category, 0.0):.1f}") != "0.0":
                yield f"{ms:>8}  {category}"
        yield f"{self.expected_ms:>8.1f}  sum"
        mfu = f", MFU {self.mfu:.1%} of {self.peak / 1e12:.0f} TFLOP/s" if self.mfu else ""
        rates = "at measured rates" if self.is_measured else "ideal, at the rates of single kernels"
        yield f"{self.step_ms:>8.1f}  {rates}: {self.tokens_per_second:,.0f} tokens/s a GPU{mfu}"
