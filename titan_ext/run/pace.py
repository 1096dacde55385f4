# SPDX-License-Identifier: BSD-3-Clause
"""Measures the pace of a run, and warns of what lasts: a late rank, uneven experts, a lasting drop.

In logged steps every rank measures how long it waits for token counts, how long tokens travel, and
how many its experts get. Counts are a few bytes, so a rank that waits for them waits for its
neighbours, and the rank that others wait for waits least itself.

Where tokens are exchanged the host reads the counts anyway, and the stream waits for the tokens. So
a measurement waits for nothing that the step would not wait for. What a rank has measured goes to
the job's store, from a thread: no collective, and no step waits. Rank 0 reads it two logged steps
later and warns. Titan's metrics have the times of the rank that logs them.

Titan's standard dispatcher has counts that the host reads. HybridEP's stay on the device, with what
it drops, until a step is logged. With others only the pace is measured. How full the buffers were
that HybridEP and MinimalAsyncEP have goes to the run's record, for a dry run to say what is enough.
"""

import contextlib
import json
import math
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_ext.base.agreement import this_job
from titan_ext.base.run_check import ONE_PROCESS_MODES, RunCheck
from titan_ext.components.dispatch import (
    CountedHybridEPTokenDispatcher,
    FunctionalAllToAllTokenDispatcher,
)

# Assumed, and tried on synthetic steps: 500 quiet ones give no warning (tests/run/test_pace.py).
# A twentieth called ranks late on noise.
_NOTABLE = 0.1
"""Least share of a step that is called late."""
# Three in a row missed a slow link, since noise broke them.
_LASTING, _RECENT = 3, 5
"""So many of the last logged steps make a warning."""
_UNEVEN = 2.0
"""Times the mean tokens of a group."""
_KEPT, _ENOUGH = 100, 20
"""Logged steps whose median is the usual pace, and how many it takes to have one."""
_DROP = 0.9
"""Share of the usual tokens a second."""
_LASTING_DROP = 5
_EXPERTS, _DROPS = "experts", "drops"


class RankStep(NamedTuple):
    """The measurements of a rank in a logged step, as JSON in the job's store."""

    step: int
    rank: int
    group: int
    """First of the ranks with which it exchanges tokens; itself where it has no experts."""
    wait_ms: float
    """Wait for token counts, in all layers of the step."""
    step_ms: float
    """The step, by its host's clock."""
    tokens: dict[str, int]
    """Tokens that its experts got in the last microbatch, by layer; with HybridEP, in the fullest
    since the step before."""
    worst: int = 0
    """Tokens that they would get in the worst routing."""
    dropped: float = 0.0
    """Percent of the tokens that came since the step before, and were dropped."""


def faults_of(rows: Iterable[RankStep]) -> dict[str, str]:
    """Faults of a logged step in words, by what they are about.

    There are none where no two ranks exchange tokens.
    """
    by_group: dict[int, list[RankStep]] = defaultdict(list)
    for row in rows:
        by_group[row.group].append(row)
    groups = [group for group in by_group.values() if len(group) > 1]
    if not groups:
        return {}
    faults = {}
    late_ms, late = max(map(_latest, groups))
    if late_ms > _NOTABLE * statistics.median(row.step_ms for group in groups for row in group):
        faults[f"rank {late}"] = (
            f"rank {late} is late: the others wait {late_ms:.1f} ms a step for it before they "
            "exchange tokens"
        )
    times, layer, full = max(found for group in groups for found in _fullest_of_layers(group))
    if times >= min(_UNEVEN, (1 + len(groups[0])) / 2):  # of two ranks, twice is the most
        faults[_EXPERTS] = (
            f"experts are uneven: those of rank {full} got {times:.2f} times the mean tokens in "
            f"layer {layer}"
        )
    return faults


def _latest(group: list[RankStep]) -> tuple[float, int]:
    """Milliseconds that the others wait longer than the rank that waits least, and that rank."""
    late = min(group, key=lambda row: row.wait_ms)
    others_ms = statistics.median(row.wait_ms for row in group if row is not late)
    return others_ms - late.wait_ms, late.rank


def _fullest_of_layers(group: list[RankStep]) -> Iterator[tuple[float, str, int]]:
    """For each layer: tokens of the fullest rank over the group's mean, the layer, that rank."""
    for layer in group[0].tokens:
        tokens, rank = max((row.tokens[layer], row.rank) for row in group)
        mean = statistics.fmean(row.tokens[layer] for row in group)
        yield tokens / mean if mean else 1.0, layer, rank


class PaceMonitor:
    """Follows the logged steps of a run, and warns once of what lasts."""

    trained_after = 100
    """Steps before which experts may be uneven: a router begins with random weights, and a bias
    that changes by 1e-3 a step balances it (torchtitan/components/optimizer.py). A guess."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._recent: deque[set[str]] = deque(maxlen=_RECENT)
        self._known: set[str] = set()
        self._usual_ms: deque[float] = deque(maxlen=_KEPT)
        self._slow: list[tuple[int, float]] = []

    def _warn(self, warning: str) -> None:
        self.warnings.append(warning)
        logger.warning(warning)

    def take(self, step: int, faults: Mapping[str, str]) -> None:
        found = {about for about in faults if about != _EXPERTS or step > self.trained_after}
        self._recent.append(found)
        for about in found - self._known:
            if sum(about in earlier for earlier in self._recent) >= _LASTING:
                self._known.add(about)
                self._warn(f"step {step}: {faults[about]}")

    def take_drops(self, rows: Sequence[RankStep]) -> None:
        """Warn of the first logged step in which a rank dropped tokens."""
        worst = max(rows, key=lambda row: row.dropped)
        if worst.dropped and _DROPS not in self._known:
            self._known.add(_DROPS)
            needed = max((max(row.tokens.values()) + 1) / row.worst for row in rows if row.worst)
            self._warn(
                f"step {worst.step}: HybridEP dropped {worst.dropped:.2g}% of the tokens that came "
                f"to rank {worst.rank} since the last logged step: its buffer was full. Nothing "
                f"would have been dropped with non_blocking_capacity_factor {needed:.3f} or more"
            )

    def pace(self, step: int, step_ms: float) -> None:
        """Hold the mean step since the last logged one against the usual.

        Slow steps do not become the usual pace until they have been warned of.
        """
        usual_ms = statistics.median(self._usual_ms) if len(self._usual_ms) >= _ENOUGH else 0.0
        if not usual_ms or step_ms * _DROP <= usual_ms:
            self._slow.clear()
            self._usual_ms.append(step_ms)
            return
        self._slow.append((step, step_ms))
        if len(self._slow) < _LASTING_DROP:
            return
        now_ms, (since, _) = statistics.median(ms for _, ms in self._slow), self._slow[0]
        self._slow.clear()
        self._usual_ms.clear()
        self._warn(
            f"step {step}: tokens/s are {1 - usual_ms / now_ms:.0%} below the median of the last "
            f"{_KEPT} logged steps, since step {since}: a step takes {now_ms:.1f} ms in place of "
            f"{usual_ms:.1f}"
        )


class Routing:
    """How full buffers for the worst routing were, in shares of it, over all ranks and layers."""

    def __init__(self) -> None:
        self.most = 0.0
        self.passes: Counter[int] = Counter()
        """Passes by the smallest factor that drops nothing, in thousandths."""

    def take(self, rows: Iterable[RankStep]) -> None:
        for row in rows:
            for tokens in row.tokens.values() if row.worst else ():
                # deep_ep leaves the last row of its buffer empty (components.dispatch).
                share = min((tokens + 1) / row.worst, 1.0)
                self.most = max(self.most, share)
                self.passes[math.ceil(1000 * share)] += 1

    @staticmethod
    def verdict(records: Iterable[Mapping[str, Any]], factors: Iterable[float]) -> Iterator[str]:
        """Sentences about the ``factors`` of a job, from records of runs of it."""
        found = list(records)
        passes = sum((Counter(each["passes"]) for each in found), Counter[str]())
        if not passes:
            return
        of = f"of {passes.total():,} passes of a rank through a layer"
        least = math.ceil(1000 * max(each["most"] for each in found)) / 1000
        yield f"non_blocking_capacity_factor = {least:g} would have dropped nothing {of}"
        for factor in factors:
            over = sum(n for least, n in passes.items() if int(least) > 1000 * factor)
            yield f"{factor:g}, as configured, would have dropped in {over:,} {of}"


class Meter:
    """The stopwatch of one layer's dispatcher, while it has one (``dispatcher.meter``)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = device.type != "cpu"
        self._ms = {"wait": 0.0, "travel": 0.0}
        self._events: list[tuple[str, torch.Event, torch.Event]] = []
        self.tokens = self.worst = 0
        """Tokens that came in the last microbatch, and that come in the worst routing."""

    @contextlib.contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Around a wait of the current stream, or of a CPU: "wait" for counts, or "travel"."""
        if not self._on_device:
            since_s = time.perf_counter()
            yield
            self._ms[what] += 1e3 * (time.perf_counter() - since_s)
            return
        start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((what, start, end))

    def ms(self) -> dict[str, float]:
        """The measured times, once the device has done the step; later events do not count."""
        for what, start, end in self._events:
            if end.query():
                self._ms[what] += start.elapsed_time(end)
        self._events.clear()
        return self._ms


class PaceCheck(RunCheck):
    """Warns of a late rank, uneven experts, and a pace that drops for long."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.monitor = PaceMonitor()
        self._clock = clock  # seconds
        # Steps of this start: a loop of one's own may do one again, or go back to a checkpoint.
        self._count = 0
        self._last: tuple[int, float] | None = None
        self._dispatchers: dict[str, FunctionalAllToAllTokenDispatcher] = {}
        self._counted: dict[str, CountedHybridEPTokenDispatcher] = {}
        self._routing, self._ep, self._group = Routing(), 1, 0
        self._store: Any = None  # where waits are measured
        self._told: Future[Any] | None = None
        self._unread: deque[str] = deque()  # keys of which rank 0 has told, oldest first

    def after_build(self, trainer: Trainer) -> None:
        config = trainer.config
        if config.comm.mode in ONE_PROCESS_MODES or not trainer.parallel_dims.ep_enabled:
            return
        self._group, self._ep = dist.get_rank(), trainer.parallel_dims.ep
        of_kind: dict[type, Any] = {
            FunctionalAllToAllTokenDispatcher: self._dispatchers,
            CountedHybridEPTokenDispatcher: self._counted,
        }
        for part in trainer.model_parts:
            for name, module in part.named_modules():
                dispatcher: Any = getattr(module, "token_dispatcher", None)
                found = next((of_kind[k] for k in of_kind if isinstance(dispatcher, k)), None)
                if found is not None and dispatcher.ep_mesh:
                    layer = next(x for x in canonical_fqn(name).split(".") if x.isdigit())
                    found[layer] = dispatcher
                    self._group = min(dist.get_process_group_ranks(dispatcher.ep_mesh.get_group()))
        # All ranks take part, also those of a stage without experts.
        self._store = this_job().subject("pace")
        self._thread = ThreadPoolExecutor(1, "pace")

    @contextlib.contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        self._count += 1
        is_logged = trainer.metrics_processor.should_log(trainer.step)
        meters: dict[str, Meter] = {}
        if is_logged and self._store is not None:
            for layer, dispatcher in self._dispatchers.items():
                meters[layer] = dispatcher.meter = Meter(trainer.device)
        since_s = self._clock()
        try:
            yield
        finally:
            for layer in meters:
                self._dispatchers[layer].meter = None
        if not is_logged:
            return
        now_s = self._clock()
        # Without those in compiled code, which measures nothing.
        meters = {layer: meter for layer, meter in meters.items() if meter.worst or meter.tokens}
        last, self._last = self._last, (self._count, now_s)
        if self._store is not None:
            self._tell(trainer, 1e3 * (now_s - since_s), meters)
        if dist.get_rank() == 0 and last is not None:
            self.monitor.pace(trainer.step, 1e3 * (now_s - last[1]) / (self._count - last[0]))

    @contextlib.contextmanager
    def around_run(self, trainer: Trainer) -> Iterator[None]:
        try:
            yield
        finally:
            if self._store is not None:
                self._thread.submit(self._read, 0)
                self._thread.shutdown()

    def _tell(self, trainer: Trainer, step_ms: float, meters: dict[str, Meter]) -> None:
        """Log and give the store what this rank has measured; on rank 0 read that of all."""
        # Titan has just read the loss, so the device has done the step.
        times = [meter.ms() for meter in meters.values()]
        wait_ms, travel_ms = (sum(ms[what] for ms in times) for what in ("wait", "travel"))
        tokens = {layer: meter.tokens for layer, meter in meters.items()}
        worst = max((meter.worst for meter in meters.values()), default=0)
        metrics, dropped = {}, 0.0
        if meters:
            metrics = {
                "titan_ext/waits for token counts(ms)": wait_ms,
                "titan_ext/tokens travel to experts(ms)": travel_ms,
            }
        if self._counted:
            rows = torch.stack([each.rows for each in self._counted.values()]).cpu()
            for each in self._counted.values():
                each.rows.zero_()
                worst = max(worst, each.worst)
            came, lost, _ = rows.sum(0).tolist()
            tokens |= zip(self._counted, (rows[:, 2] - 1).tolist(), strict=True)
            dropped = 100 * lost / max(came, 1)
            metrics["titan_ext/tokens dropped(%)"] = dropped
        if metrics:  # most ranks have a logger that does nothing
            trainer.metrics_processor.logger.log(metrics, trainer.step)
        row = RankStep(
            trainer.step, dist.get_rank(), self._group, wait_ms, step_ms, tokens, worst, dropped
        )
        if self._told is None or self._told.done():  # else the store is slow, and steps are not
            self._told = self._thread.submit(self._exchange, f"step {self._count}", row)

    def _exchange(self, key: str, row: RankStep) -> None:
        """In the thread. Rank 0 reads the step before last, of which all ranks have told by now."""
        self._store.append(key, f"{json.dumps(row)}\n")
        if row.rank == 0:
            self._unread.append(key)
            self._read(2)

    def _read(self, but: int) -> None:
        """Read the steps that rank 0 has told of, but for the last so many."""
        while len(self._unread) > but:
            key = self._unread.popleft()
            lines = self._store.get(key).decode().splitlines()
            self._store.delete_key(key)
            rows = [RankStep(*json.loads(line)) for line in lines]
            self.monitor.take(rows[0].step, faults_of(rows))
            self.monitor.take_drops(rows)
            self._routing.take(rows)

    def receipts(self) -> dict[str, Any]:
        """What a dry run says of capacity; rank 0 has that of all ranks."""
        routing = self._routing
        if not routing.passes:
            return {}
        found = {"ep": self._ep, "most": routing.most, "passes": dict(routing.passes)}
        return {"routing": found}
