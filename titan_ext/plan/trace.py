# SPDX-License-Identifier: BSD-3-Clause
"""Reads a profiler's trace of a step into the parts of a plan, so that both can be compared.

Titan's profiler writes a trace of each rank (``--profiler.enable_profiling``). On an accelerator
the compute stream's kernels are the parts, each by what the host did when it launched it; between
them the stream waits. On a CPU the thread that trains is the stream. A wait counts for a collective
only while nothing else can explain it: on an accelerator from when the host had launched the next
kernel, or while the host itself waits for the device.

HolisticTraceAnalysis, the library for such traces, tells computation from communication and idle
time, but no forward from a recompute, reads no traces of gloo, and installs JupyterLab. The format
is JSON, which Python reads.
"""

import gzip
import itertools
import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titan_ext.base.op_cost import kernel_class
from titan_ext.plan.time import Part

_STEP = re.compile(r"ProfilerStep#\d+")
_FSDP = re.compile(r"FSDP::(\w+?)(?: for| \(|$)")
_WRAPPERS = re.compile(r"\b_(checkpoint_wrapped_module|orig_mod)\.")
_COMMUNICATES = re.compile(r"^(gloo:|.*(nccl|rccl|xccl|oneccl|deep_ep))", re.IGNORECASE)
_EXCHANGES = re.compile(r"all_?to_?all|sendrecv|deep_ep", re.IGNORECASE)
_SYNCS = re.compile(r"(cuda|hip|xpu)?.*(Synchronize|Memcpy)", re.IGNORECASE)
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver", "xpu_runtime", "hip_runtime")
_HEADS = ("lm_head", "output")
_RECOMPUTE = "recompute"
_BACKWARD = "autograd::engine::evaluate_function"


class _Context(NamedTuple):
    """What a thread is in: a part of the step, a unit of FSDP, and whether it runs or waits."""

    part: Part
    unit: str
    does: str  # "runs", "waits" for FSDP, "waits for a tensor", or "" between operations
    names: tuple[str, ...] = ()  # of all that is open


class _Event(NamedTuple):
    """Something in a trace, in ms."""

    name: str
    start: float
    end: float
    args: dict[str, Any]


class Span(NamedTuple):
    """What the compute stream did from ``start`` to ``end``, in ms of the trace."""

    part: Part
    unit: str
    start: float
    end: float


@dataclass
class TracedStep:
    """One step of one rank.

    Attributes:
        spans: Of the compute stream, in order and without gaps: their sum is the step's time.
        rows: Tokens that the experts of this rank computed in forward, by unit.
        kernels: Milliseconds of an accelerator's kernels on all streams, by ``kernel_class``.
        messages: How long each collective took, in their order, by what waits for it, in ms.
    """

    spans: list[Span] = field(default_factory=list)
    rows: Counter[str] = field(default_factory=Counter)
    kernels: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    messages: dict[Part, list[float]] = field(default_factory=lambda: defaultdict(list))

    def by_part(self) -> dict[Part, float]:
        """Milliseconds of each part."""
        found: dict[Part, float] = defaultdict(float)
        for span in self.spans:
            found[span.part] += span.end - span.start
        return dict(found)

    def by_unit(self) -> dict[str, dict[Part, float]]:
        """Milliseconds of each part, by unit of FSDP in the order of the step; "" for the rest."""
        found: dict[str, dict[Part, float]] = {}
        for span in self.spans:
            parts = found.setdefault(span.unit, defaultdict(float))
            parts[span.part] += span.end - span.start
        return found


@dataclass
class Trace:
    """What a file has: the steps of a rank, and its process groups by their use."""

    steps: list[TracedStep]
    groups: dict[str, list[int]]
    on_device: bool


def read_trace(file: Path) -> Trace:
    """Read a trace of ``torch.profiler``, plain or with gzip.

    Raises ValueError for a file that is no such trace, or has no whole step.
    """
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt") as text:
            data = json.load(text)
        events = [e for e in data["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file}: expected a trace of torch.profiler ({type(error).__name__}: {error})."
        ) from error
    threads: dict[Any, list[_Event]] = defaultdict(list)
    device, runtime, steps = [], [], []
    for e in events:
        event = _Event(e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3, e.get("args", {}))
        kind = e.get("cat", "")
        if kind in _ON_DEVICE:
            device.append(event)
        elif kind in _RUNTIME:
            runtime.append((e["tid"], event))
        elif kind in ("cpu_op", "user_annotation"):
            threads[e["tid"]].append(event)
            if _STEP.fullmatch(event.name):
                steps.append((e["tid"], event))
    if not steps:
        raise ValueError(f"{file}: expected a step (ProfilerStep#N); was the run too short?")
    info = data.get("distributedInfo") or {}
    groups = {
        group["pg_desc"]: group["ranks"]
        for group in info.get("pg_config") or ()
        if isinstance(group, dict) and group.get("pg_size", 0) > 1
    }
    read = [
        _on_device(step, device, runtime, threads) if device else _on_cpu(step, tid, threads)
        for tid, step in steps
    ]
    return Trace(read, groups, bool(device))


# -- what a thread is in


@dataclass
class _Phases:
    """When the phases of a step begin and end that no event of its own thread tells."""

    loss: list[tuple[float, float]]
    backward_end: float
    optimizer_end: float

    @classmethod
    def of(cls, step: _Event, threads: dict[Any, list[_Event]]) -> "_Phases":
        heads, others, backward_end, optimizer_end = [], [], step.start, step.start
        for event in (e for thread in threads.values() for e in thread):
            if not step.start <= event.start < step.end:
                continue
            if event.name.startswith(_BACKWARD):
                backward_end = max(backward_end, event.end)
            elif event.name.startswith("Optimizer.step#"):
                optimizer_end = max(optimizer_end, event.end)
            elif event.name.startswith(("FSDP::pre_forward", "FSDP::pre_backward")):
                is_head = any(name.endswith(_HEADS) for name in _unit(event.name).split(", "))
                if is_head and "pre_forward" in event.name:
                    heads.append(event.start)
                elif not is_head and "pre_backward" in event.name:
                    others.append(event.start)
        loss: list[tuple[float, float]] = []
        others.sort()
        for start in sorted(heads):
            if not loss or start >= loss[-1][1]:
                at = bisect_left(others, start)
                loss.append((start, others[at] if at < len(others) else step.end))
        return cls(loss, backward_end, optimizer_end)

    def part(self, at: float, usual: Part) -> Part:
        """What an operation of ``usual`` belongs to that begins then."""
        if any(start <= at < end for start, end in self.loss):
            return Part.LOSS
        if self.backward_end <= at < self.optimizer_end:
            return Part.OPTIMIZER
        return Part.OTHER if at >= self.optimizer_end > self.backward_end else usual


def _unit(name: str) -> str:
    """The unit that FSDP's annotation names, without the wrappers of its modules."""
    words = name.partition("(")[2].partition(")")[0] or name.partition(" for ")[2]
    return _WRAPPERS.sub("", words)


def _is_recomputed(event: _Event) -> bool:
    """Whether autograd records it: in backward only what checkpointing runs again."""
    return "Sequence number" in event.args and event.args.get("Fwd thread id") == 0


def _with_recomputes(events: Sequence[_Event]) -> list[_Event]:
    """The events of a thread, in order, with one more around what runs again in each node."""
    events = sorted(events, key=lambda e: (e.start, -e.end))
    stack: list[tuple[int, bool]] = []  # each with whether it is in backward and not run again
    ranges: dict[int, tuple[float, float]] = {}
    for index, event in enumerate(events):
        while stack and events[stack[-1][0]].end <= event.start:
            stack.pop()
        parent, in_backward = stack[-1] if stack else (-1, False)
        # FSDP gathers a unit before the first of its operations runs again.
        gathers = event.name.startswith("FSDP::pre_forward")
        if in_backward and (gathers or _is_recomputed(event)):
            start, _ = ranges.get(parent, (event.start, 0.0))
            ranges[parent] = start, event.end
            in_backward = False
        stack.append((index, in_backward or event.name.startswith(_BACKWARD)))
    again = [_Event(_RECOMPUTE, start, end, {}) for start, end in ranges.values()]
    # At one time the longer first; at equal lengths what was added, which is around the other.
    return sorted([*again, *events], key=lambda e: (e.start, -e.end))


def _enter(event: _Event, outer: _Context, phases: _Phases) -> _Context:
    name, (part, unit, does, _) = event.name, outer
    if name == _RECOMPUTE:
        return _Context(phases.part(event.start, Part.RECOMPUTE), unit, "runs")
    if does == "waits for a tensor" or name.startswith("ProfilerStep"):
        return outer
    if name.startswith(_BACKWARD):
        return _Context(phases.part(event.start, Part.BACKWARD), unit, "runs")
    if match := _FSDP.match(name):
        reduces = match[1].startswith(("post_backward", "root_post"))
        return _Context(Part.REDUCTIONS if reduces else Part.GATHERS, _unit(name) or unit, "waits")
    if name.startswith("enumerate(DataLoader)"):
        return _Context(Part.OTHER, unit, "")
    if name.startswith("_c10d_functional::wait_tensor"):
        return _Context(part, unit, "waits for a tensor")
    if name.startswith("fsdp::") or does == "waits":
        if name.startswith(("c10d::", "nccl:", "gloo:", "record_param_comms", "FSDP::")):
            return outer
        return _Context(Part.COPIES, unit, "runs")
    if name.startswith("titan_ext::float8_"):
        return _Context(Part.CODEC, unit, "runs")
    if name.startswith("Optimizer."):
        return _Context(Part.OPTIMIZER, unit, "runs")
    if part in (Part.CODEC, Part.COPIES):
        return outer
    return _Context(part if does else phases.part(event.start, Part.FORWARD), unit, "runs")


def _contexts(
    events: Sequence[_Event], step: _Event, phases: _Phases
) -> Iterator[tuple[float, float, _Context]]:
    """What a thread is in over a step, in order and without gaps."""
    now, unit = step.start, ""
    # Of each open event its end, its context, and the unit to go back to.
    stack = [(step.end, _Context(Part.HOST, "", ""), "")]
    inside = [e for e in events if e.end > step.start and e.start < step.end]
    for event in (*_with_recomputes(inside), _Event("", step.end, step.end, {})):
        start = max(event.start, step.start)
        while now < start or (stack and stack[-1][0] <= start):
            end, context, before = stack[-1]
            if (until := min(end, start)) > now:
                # The unit whose forward or backward began last, for what names none.
                yield now, until, context._replace(unit=context.unit or unit)
                now = until
            if end <= start:
                unit = before or unit
                stack.pop()
        if not stack:
            return
        end, outer, _ = stack[-1]
        before = unit if event.name == _RECOMPUTE else ""  # which runs other units' forward
        if event.name.startswith(("FSDP::pre_forward", "FSDP::pre_backward")):
            unit = _unit(event.name) or unit
        inner = _enter(event, outer, phases)._replace(names=(*outer.names, event.name))
        stack.append((min(event.end, end), inner, before))


# -- a rank without an accelerator


def _on_cpu(step: _Event, tid: Any, threads: dict[Any, list[_Event]]) -> TracedStep:
    phases = _Phases.of(step, threads)
    collectives = sorted(
        (e for thread in threads.values() for e in thread if _COMMUNICATES.match(e.name)),
        key=lambda e: e.end,
    )
    ends = [event.end for event in collectives]
    found = TracedStep()
    for start, end, (part, unit, does, _) in _contexts(threads[tid], step, phases):
        if does == "waits for a tensor":
            # It ends with the collective that it waits for.
            at = bisect_right(ends, end) - 1
            its = collectives[at].name if at >= 0 and ends[at] > start else ""
            part = Part.EXCHANGES if _EXCHANGES.search(its) else Part.COLLECTIVES if its else part
        elif not does and part is not Part.OTHER:
            is_other = phases.part(start, Part.HOST) is Part.OTHER
            part = Part.OTHER if is_other else Part.HOST
        found.spans.append(Span(part, unit, start, end))
    sent = sorted((e.start, e.end) for e in collectives if _EXCHANGES.search(e.name))
    found.messages[Part.EXCHANGES] = [b - a for a, b in sent if step.start <= a < step.end]
    _count_rows(found, threads[tid])
    return found


def _count_rows(found: TracedStep, events: Sequence[_Event]) -> None:
    """Rows of the first grouped GEMM of each unit's forward."""
    forward = [s for s in found.spans if s.part is Part.FORWARD]
    starts = [span.start for span in forward]
    for event in sorted(events, key=lambda e: e.start):
        dims = event.args.get("Input Dims")
        if event.name != "aten::_grouped_mm" or not dims or not dims[0]:
            continue
        at = bisect_right(starts, event.start) - 1
        if at >= 0 and forward[at].end > event.start:
            found.rows.setdefault(forward[at].unit, int(dims[0][0]))


# -- a rank with an accelerator


class _Kernel(NamedTuple):
    start: float
    end: float
    launched: float
    stream: Any
    part: Part
    unit: str
    is_sent: bool
    kind: str


def _on_device(
    step: _Event,
    device: Sequence[_Event],
    runtime: Sequence[tuple[Any, _Event]],
    threads: dict[Any, list[_Event]],
) -> TracedStep:
    phases = _Phases.of(step, threads)
    launches = {
        event.args.get("correlation"): (tid, event)
        for tid, event in runtime
        if step.start <= event.start < step.end
    }
    tids = {tid for tid, _ in launches.values()}
    contexts = {tid: list(_contexts(threads[tid], step, phases)) for tid in tids}
    starts = {tid: [start for start, *_ in contexts[tid]] for tid in tids}
    kernels = []
    for event in device:
        if (launch := launches.get(event.args.get("correlation"))) is None:
            continue
        tid, by = launch
        at = bisect_right(starts[tid], by.start) - 1
        _, _, context = contexts[tid][max(at, 0)]
        kernels.append(_kernel(event, by, context, phases))
    kernels.sort()
    busy: Counter[Any] = Counter()
    found = TracedStep()
    for kernel in kernels:
        ms = kernel.end - kernel.start
        if kernel.is_sent:
            found.messages[kernel.part].append(ms)
        else:
            found.kernels[kernel.kind] += ms
            busy[kernel.stream] += int(ms * 1e6)
    if busy:
        ((compute, _),) = busy.most_common(1)
        syncs = [e for _, e in runtime if _SYNCS.match(e.name)]
        found.spans = list(_stream(kernels, compute, sorted(syncs, key=lambda e: e.start)))
    missing = step.end - step.start - sum(span.end - span.start for span in found.spans)
    if missing > 0:  # the host was the slower one: the device waited for it at either end
        at = found.spans[-1].end if found.spans else step.start
        found.spans.append(Span(Part.HOST, "", at, at + missing))
    for tid in tids:
        host = TracedStep([Span(c.part, c.unit, a, b) for a, b, c in contexts[tid]])
        _count_rows(host, threads[tid])
        found.rows.update({unit: rows for unit, rows in host.rows.items() if rows})
    return found


def _kernel(event: _Event, launch: _Event, context: _Context, phases: _Phases) -> _Kernel:
    part, is_sent = context.part, bool(_COMMUNICATES.match(event.name))
    if is_sent and context.does != "waits":
        part = Part.EXCHANGES if _EXCHANGES.search(event.name) else Part.COLLECTIVES
        if "pp" in event.args.get("Process Group Description", "").split("_"):
            part = Part.BUBBLE
    elif context.does == "waits" and not is_sent:
        part = Part.COPIES
    elif not context.does:
        part = phases.part(launch.start, Part.FORWARD)
    stream = event.args.get("stream")
    kind = kernel_class(event.name, *context.names)
    return _Kernel(event.start, event.end, launch.end, stream, part, context.unit, is_sent, kind)


def _stream(kernels: Sequence[_Kernel], compute: Any, syncs: Sequence[_Event]) -> Iterator[Span]:
    """What the compute stream does from its first kernel to its last."""
    others = [k for k in kernels if k.stream != compute]
    starts = [kernel.start for kernel in others]
    longest = max((k.end - k.start for k in others), default=0.0)
    began = [event.start for event in syncs]
    longest_sync = max((e.end - e.start for e in syncs), default=0.0)
    now = None
    for kernel in kernels:
        if kernel.stream != compute:
            continue
        if now is not None and kernel.start > now:
            at, end = bisect_left(starts, now - longest), bisect_left(starts, kernel.start)
            beside = [k for k in others[at:end] if k.end > now]
            at, end = bisect_left(began, now - longest_sync), bisect_left(began, kernel.start)
            yield from _gap(now, kernel, beside, [e for e in syncs[at:end] if e.end > now])
        if now is None or kernel.end > now:
            start = kernel.start if now is None else max(kernel.start, now)
            yield Span(kernel.part, kernel.unit, start, kernel.end)
            now = kernel.end


def _gap(
    start: float, following: _Kernel, beside: Sequence[_Kernel], syncs: Sequence[_Event]
) -> Iterator[Span]:
    """Why the compute stream waits from ``start`` until it runs the ``following`` kernel."""
    end = following.start
    edges = {start, end, min(max(following.launched, start), end)}
    edges |= {t for k in beside for t in k[:2]} | {t for e in syncs for t in (e.start, e.end)}
    times = sorted(t for t in edges if start <= t <= end)
    for now, then in itertools.pairwise(times):
        running = [k for k in beside if k.start <= now and k.end >= then]
        host_waits = any(e.start <= now and e.end >= then for e in syncs)
        part = Part.HOST
        if running and (now >= following.launched or host_waits):
            # Of those that end before it goes on the last one held it up.
            its = max(running, key=lambda k: (k.is_sent, k.end <= end, k.end))
            part = its.part if its.is_sent else Part.COPIES
        yield Span(part, following.unit, now, then)
