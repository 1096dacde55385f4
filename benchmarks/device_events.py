"""What a device did during some calls: kernels, copies from and to the host, idle time.

torch's profiler says it; these are sums over its intervals, and a picture of them. On a
CPU each operation counts as a kernel, and each ``copy_`` as a copy from the host.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from titan_ext.plan.op_cost import kernel_class

Interval = tuple[float, float]


@dataclass(frozen=True)
class Busy:
    """One kernel, or one copy between the device and the host; in microseconds."""

    begin: float
    end: float
    stream: int
    is_copy: bool


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union, in order."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def idle_share(busy: Sequence[Busy]) -> float:
    """Of the time from the first kernel to the last: none runs."""
    kernels = merged((b.begin, b.end) for b in busy if not b.is_copy)
    return 1 - length(kernels) / (kernels[-1][1] - kernels[0][0])


def copies_beside_kernels(busy: Sequence[Busy]) -> float | None:
    """The share of the copies' time in which a kernel runs; None without copies."""
    copies = merged((b.begin, b.end) for b in busy if b.is_copy)
    kernels = merged((b.begin, b.end) for b in busy if not b.is_copy)
    both = length(copies) + length(kernels) - length(merged([*copies, *kernels]))
    return both / length(copies) if copies else None


def events_of(function: Callable[[], object], cuda: bool) -> Sequence[Any]:
    """What torch's profiler sees of one call."""
    activities = [ProfilerActivity.CUDA] if cuda else []
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, *activities]) as profiler:
        function()
        if cuda:
            torch.cuda.synchronize()
    return profiler.events() or []


def device_busy(function: Callable[[], object], cuda: bool) -> list[Busy]:
    """Everything that the device does in one call."""
    return busy_in(events_of(function, cuda), cuda)


def busy_in(events: Iterable[Any], cuda: bool) -> list[Busy]:
    found = []
    for event in events:
        if cuda:
            wanted = event.device_type == DeviceType.CUDA and not event.is_user_annotation
            is_copy = "DtoH" in event.name or "HtoD" in event.name
        else:
            wanted, is_copy = not event.cpu_children, event.name == "aten::copy_"
        if wanted:
            span = event.time_range
            found.append(Busy(span.start, span.end, event.device_resource_id, is_copy))
    return found


def kernel_ms(
    events: Iterable[Any], cuda: bool, launched: dict[str, int] | None = None
) -> dict[str, float]:
    """Milliseconds of kernels by ``kernel_class``; "of no operation" is what nothing launched.

    ``launched`` gets their number. "collectives" are the copies of a fake process group.

    The operations around the one that launched a kernel count, too: the codec's is one of Triton's.
    """
    found: dict[str, float] = defaultdict(float)
    everything = 0.0
    for event in events:
        if event.device_type == DeviceType.CUDA:
            everything += 0.0 if event.is_user_annotation else event.time_range.elapsed_us()
            continue
        took = [(k.name, k.duration) for k in event.kernels]
        if not cuda:
            took = [("", event.self_cpu_time_total)]
        around, outer = [], event
        while took and outer is not None:
            around.append(outer.name)
            outer = outer.cpu_parent
        for name, us in took:
            kind = kernel_class(name, *around)
            found[kind] += us / 1e3
            if launched is not None:
                launched[kind] = launched.get(kind, 0) + 1
    if cuda and (left := everything / 1e3 - sum(found.values())) > 0:
        found["of no operation"] = left
    return dict(found)


def draw(timelines: Mapping[str, Sequence[Busy]], path: Path) -> None:
    """A row for each stream of each policy; copies in orange."""
    from matplotlib.figure import Figure

    rows = [(arm, s) for arm, busy in timelines.items() for s in sorted({b.stream for b in busy})]
    figure = Figure(figsize=(13, 1 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for row, (arm, stream) in enumerate(rows):
        start = min(b.begin for b in timelines[arm])
        for is_copy, colour in ((False, "tab:blue"), (True, "tab:orange")):
            spans = merged(
                ((b.begin - start) / 1e3, (b.end - start) / 1e3)
                for b in timelines[arm]
                if b.stream == stream and b.is_copy == is_copy
            )
            bars = [(begin, end - begin) for begin, end in spans]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour)
    axes.set_yticks(range(len(rows)), [f"{arm}, stream {stream}" for arm, stream in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms of one step; blue: kernels, orange: copies between device and host")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
