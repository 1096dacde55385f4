# SPDX-License-Identifier: BSD-3-Clause
"""Measures the pace of a run, and warns of what lasts: a late rank, uneven experts, a lasting drop.

In logged steps every rank measures how long it waits for token counts, how long tokens travel, and
how many its experts get. Counts are a few bytes, so a rank that waits for them waits for its
neighbours, and the rank that others wait for waits least itself.

Where tokens are exchanged the host reads the counts anyway, and the stream waits for the tokens. So
a measurement waits for nothing that the step would not wait for. What a rank has measured goes to
the job's store, from a thread: no collective, and no step waits. Rank 0 reads it two logged steps
later, warns, and logs it among Titan's metrics. In a pipeline Titan logs on a rank of the last
stage, which gets them by the store.

Titan's standard dispatcher without a compiler has counts that the host reads. Elsewhere only the
pace is measured.
"""

import contextlib
import json
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.metrics import LoggerContainer
from torchtitan.tools.logging import logger

from titan_ext.activation_checkpoint.compile import compiles_model
from titan_ext.base.agreement import this_job
from titan_ext.base.run_check import ONE_PROCESS_MODES, RunCheck
from titan_ext.components.dispatch import FunctionalAllToAllTokenDispatcher

_NOTABLE = 0.1
"""Least share of a step that is called late."""
_LASTING, _RECENT = 3, 5
"""So many of the last logged steps make a warning."""
_UNEVEN = 2.0
_KEPT, _ENOUGH = 100, 20
"""Logged steps whose median is the usual pace, and how many it takes to have one."""
_DROP = 0.9
"""Share of the usual tokens a second."""
_LASTING_DROP = 5
_METRICS = "metrics"
"""Key of the newest step's metrics, in the store."""


@dataclass(frozen=True)
class RankStep:
    """The measurements of a rank in a logged step.

    Attributes:
        group: The first of the ranks with which it exchanges tokens.
        wait_ms: That it waited for token counts, in all layers of a step.
        travel_ms: From when its tokens were sent until its experts had theirs, in all layers.
        step_ms: The step, by its host's clock.
        tokens: That its experts got, by layer, in the last microbatch; 0 for a layer without
            experts or of another stage.
    """

    rank: int
    group: int
    wait_ms: float
    travel_ms: float
    step_ms: float
    tokens: tuple[int, ...] = ()

    def to_line(self) -> str:
        """As a line of the job's store."""
        us = (round(1e3 * ms) for ms in (self.wait_ms, self.travel_ms, self.step_ms))
        return " ".join(map(str, (self.rank, self.group, *us, *self.tokens))) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "RankStep":
        """The inverse of ``to_line``."""
        rank, group, wait, travel, step, *tokens = map(int, line.split())
        return cls(rank, group, wait / 1e3, travel / 1e3, step / 1e3, tuple(tokens))


@dataclass
class Findings:
    """The latest rank and the fullest layer of one logged step, and by how much.

    ``late_ms`` is by how much the others of its group waited longer than the rank. ``imbalance`` is
    by layer: tokens of the fullest rank over the mean of its group, and that rank.
    """

    wait_ms: float = 0.0
    travel_ms: float = 0.0
    late_rank: int = -1
    late_ms: float = 0.0
    imbalance: dict[int, tuple[float, int]] = field(default_factory=dict)
    is_late: bool = False
    is_uneven: bool = False

    @classmethod
    def of(cls, rows: Iterable[RankStep]) -> "Findings":
        """From what the ranks measured in one step; groups of one rank tell nothing."""
        groups: dict[int, list[RankStep]] = defaultdict(list)
        for row in rows:
            groups[row.group].append(row)
        found = cls()
        every = [row for group in groups.values() for row in group]
        if not every:
            return found
        found.wait_ms = statistics.fmean(row.wait_ms for row in every)
        found.travel_ms = statistics.fmean(row.travel_ms for row in every)
        step_ms = statistics.median(row.step_ms for row in every)
        uneven = 0.0
        for group in groups.values():
            if len(group) < 2:
                continue
            least = min(group, key=lambda row: row.wait_ms)
            others = statistics.median(row.wait_ms for row in group if row is not least)
            if others - least.wait_ms > found.late_ms:
                found.late_rank, found.late_ms = least.rank, others - least.wait_ms
            # Of two ranks one can have twice the mean at most.
            most = min(_UNEVEN, (1 + len(group)) / 2)
            for layer, tokens in enumerate(zip(*(row.tokens for row in group), strict=False)):
                if (fullest := max(tokens)) == 0:
                    continue
                times = fullest * len(tokens) / sum(tokens)
                if times > found.imbalance.get(layer, (0.0, 0))[0]:
                    found.imbalance[layer] = times, group[tokens.index(fullest)].rank
                uneven = max(uneven, times / most)
        found.is_late = found.late_ms > _NOTABLE * step_ms
        found.is_uneven = uneven >= 1
        return found

    @property
    def fullest(self) -> tuple[int, float, int]:
        """Layer, times the mean, and rank of the layer that is least balanced."""
        layer = max(self.imbalance, key=lambda x: self.imbalance[x][0], default=-1)
        return (layer, *self.imbalance.get(layer, (1.0, -1)))

    def metrics(self) -> dict[str, float]:
        """As Titan logs them."""
        found = {
            "titan_ext/waits for token counts(ms)": self.wait_ms,
            "titan_ext/tokens travel to experts(ms)": self.travel_ms,
        }
        if self.late_rank >= 0:
            found["titan_ext/latest rank"] = float(self.late_rank)
            found["titan_ext/latest rank, others wait(ms)"] = self.late_ms
        for layer, (times, _) in sorted(self.imbalance.items()):
            found[f"titan_ext/tokens of the fullest rank over the mean, layer {layer}"] = times
        return found

    def faults(self) -> dict[tuple[str, object], str]:
        """The faults, by what they are about; a lasting one is warned of."""
        found: dict[tuple[str, object], str] = {}
        if self.is_late:
            found["late", self.late_rank] = (
                f"rank {self.late_rank} is late: the others wait {self.late_ms:.1f} ms a step for "
                "it before they exchange tokens"
            )
        if self.is_uneven:
            layer, times, rank = self.fullest
            found["uneven", ()] = (
                f"experts are uneven: those of rank {rank} got {times:.2f} times the mean tokens "
                f"in layer {layer}"
            )
        return found


class PaceMonitor:
    """Follows the logged steps of a run, and says once what lasts.

    ``warnings`` keeps the warnings for the end of the run; ``latest`` the newest findings.
    """

    trained_after = 100
    """Steps before which experts may be uneven: a router begins with random weights, and a bias
    that changes by 1e-3 a step balances it (torchtitan/components/optimizer.py). A guess."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.latest: Findings | None = None
        self._recent: deque[set[tuple[str, object]]] = deque(maxlen=_RECENT)
        self._known: set[tuple[str, object]] = set()
        self._usual: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._slow: list[tuple[int, float]] = []

    def take(self, step: int, rows: Sequence[RankStep]) -> list[str]:
        """Add what the ranks measured in ``step``; return new warnings."""
        self.latest = findings = Findings.of(rows)
        faults = findings.faults()
        if step <= self.trained_after:
            faults.pop(("uneven", ()), None)
        self._recent.append(set(faults))
        lasting = {key for key in faults if sum(key in of for of in self._recent) >= _LASTING}
        new = [f"step {step}: {faults[key]}" for key in faults if key in lasting - self._known]
        self._known |= lasting
        self.warnings += new
        return new

    def pace(self, step: int, step_ms: float) -> list[str]:
        """Hold the mean step since the last logged one against the usual; return a new warning.

        Slow steps do not become the usual pace until they have been warned of.
        """
        wait_ms = self.latest.wait_ms if self.latest else 0.0
        is_slow, usual_ms, usual_wait_ms = False, 0.0, 0.0
        if len(self._usual) >= _ENOUGH:
            usual_ms, usual_wait_ms = map(statistics.median, zip(*self._usual, strict=True))
            is_slow = step_ms * _DROP > usual_ms
        if not is_slow:
            self._slow.clear()
            self._usual.append((step_ms, wait_ms))
            return []
        self._slow.append((step, step_ms))
        if len(self._slow) < _LASTING_DROP:
            return []
        now_ms, (since, _) = statistics.median(ms for _, ms in self._slow), self._slow[0]
        self._slow.clear()
        self._usual.clear()
        text = (
            f"step {step}: tokens/s are {1 - usual_ms / now_ms:.0%} below the median of the last "
            f"{_KEPT} logged steps, since step {since}: a step takes {now_ms:.1f} ms in place of "
            f"{usual_ms:.1f}. {self._moved(wait_ms - usual_wait_ms, now_ms - usual_ms)}"
        )
        self.warnings.append(text)
        return [text]

    def _moved(self, more_wait_ms: float, more_ms: float) -> str:
        """The part of the step that has become longer, in words."""
        if self.latest is None:
            return "Which part moved is not known: nothing measures waits here."
        faults = "; ".join(["", *self.latest.faults().values()])
        if more_wait_ms > more_ms / 4:
            return f"Ranks wait {more_wait_ms:.1f} ms longer for each other{faults}."
        return f"Ranks wait for each other as before, so the work takes longer{faults}."


class Meter:
    """The stopwatch of one layer's dispatcher, while it has one (``dispatcher.meter``)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = device.type != "cpu"
        self._ms = {"wait": 0.0, "travel": 0.0}
        self._events: list[tuple[str, torch.Event, torch.Event]] = []
        self.tokens = 0
        """Tokens that came in the last microbatch."""

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
        self._last: tuple[int, float] | None = None
        self._dispatchers: dict[int, FunctionalAllToAllTokenDispatcher] = {}
        self._layers = 0
        self._group = 0
        self._store: Any = None
        self._steps: list[int] = []
        """Logged steps of which the ranks have told or are telling."""
        self._told: Future[Any] | None = None
        self._logs = False
        self._metrics: dict[str, float] = {}

    def after_build(self, trainer: Any) -> None:
        config = trainer.config
        if config.comm.mode in ONE_PROCESS_MODES or not dist.is_initialized():
            return
        if compiles_model(config.compile) or dist.get_world_size() == 1:
            return
        for part in trainer.model_parts:
            for name, module in part.named_modules():
                dispatcher = getattr(module, "token_dispatcher", None)
                if isinstance(dispatcher, FunctionalAllToAllTokenDispatcher) and dispatcher.ep_mesh:
                    layer = next(int(x) for x in canonical_fqn(name).split(".") if x.isdigit())
                    self._dispatchers[layer] = dispatcher
                    self._group = min(dist.get_process_group_ranks(dispatcher.ep_mesh.get_group()))
        # All ranks take part, also those of a stage without experts.
        self._layers = len(getattr(trainer.model_config, "layers", ()))
        # Titan gives others a logger that does nothing.
        self._logs = isinstance(trainer.metrics_processor.logger, LoggerContainer)
        if trainer.parallel_dims.ep_enabled:
            self._store = this_job().subject("pace")
            self._thread = ThreadPoolExecutor(1, "pace")

    @contextlib.contextmanager
    def around_step(self, trainer: Any) -> Iterator[None]:
        repeats = self._last is not None and self._last[0] == trainer.step
        is_logged = trainer.metrics_processor.should_log(trainer.step) and not repeats
        meters: dict[int, Meter] = {}
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
        last, self._last = self._last, (trainer.step, now_s)
        if self._store is not None:
            self._tell(trainer.step, 1e3 * (now_s - since_s), meters)
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        # A trainer may go back to a checkpoint.
        if is_first and last is not None and last[0] < trainer.step:
            step_ms = 1e3 * (now_s - last[1]) / (trainer.step - last[0])
            for warning in self.monitor.pace(trainer.step, step_ms):
                logger.warning(warning)
        if self._metrics:
            trainer.metrics_processor.logger.log(self._metrics, trainer.step)

    @contextlib.contextmanager
    def around_run(self, trainer: Any) -> Iterator[None]:
        try:
            yield
        finally:
            if self._store is not None:
                if dist.get_rank() == 0:
                    self._thread.submit(self._read_steps, 0)
                self._thread.shutdown()

    def _tell(self, step: int, step_ms: float, meters: dict[int, Meter]) -> None:
        """Give the store what this rank has measured; on rank 0 read what it has of all."""
        tokens = [0] * self._layers
        for layer, meter in meters.items():
            tokens[layer] = meter.tokens
        # Titan has just read the loss, so the device has done the step.
        times = [meter.ms() for meter in meters.values()]
        wait_ms, travel_ms = (sum(ms[what] for ms in times) for what in ("wait", "travel"))
        row = RankStep(dist.get_rank(), self._group, wait_ms, travel_ms, step_ms, tuple(tokens))
        if self._told is not None and not self._told.done():
            return  # the store is slow, and steps are not
        self._told = self._thread.submit(self._exchange, step, row)

    def _exchange(self, step: int, row: RankStep) -> None:
        """In the thread. Rank 0 reads the step before last, of which all ranks have told by now."""
        self._store.append(f"step {step}", row.to_line())
        if row.rank != 0:
            if self._logs and self._store.check([_METRICS]):
                self._metrics = json.loads(self._store.get(_METRICS))
            return
        if step not in self._steps:  # else it is done again, and all ranks say so
            self._steps.append(step)
        self._read_steps(2)

    def _read_steps(self, but: int) -> None:
        """Read the steps that rank 0 has told of, but for the last so many, and warn."""
        while len(self._steps) > but:
            step = self._steps.pop(0)
            lines = self._store.get(f"step {step}").decode().splitlines()
            self._store.delete_key(f"step {step}")
            newest = {row.rank: row for row in map(RankStep.from_line, lines)}
            for warning in self.monitor.take(step, list(newest.values())):
                logger.warning(warning)
            assert self.monitor.latest is not None
            self._metrics = self.monitor.latest.metrics()
            self._store.set(_METRICS, json.dumps(self._metrics))

    def receipts(self) -> dict[str, Any]:
        """The newest findings, and every warning."""
        if (latest := self.monitor.latest) is None:
            return {"warnings": self.monitor.warnings} if self.monitor.warnings else {}
        by_layer = {str(layer): times for layer, (times, _) in latest.imbalance.items()}
        pace = {"waits_ms": latest.wait_ms, "travel_ms": latest.travel_ms}
        pace |= {"latest_rank": latest.late_rank}
        return {
            "pace": pace | {"late_ms": latest.late_ms, "imbalance": by_layer},
            "warnings": self.monitor.warnings,
        }

    def summary(self) -> list[str]:
        """The warnings, and the latest rank and fullest experts of the newest step."""
        lines = [f"warned: {text}" for text in self.monitor.warnings]
        if (latest := self.monitor.latest) is not None:
            layer, times, rank = latest.fullest
            who = f"; rank {latest.late_rank} latest, by {latest.late_ms:.1f}"
            full = f"; fullest experts {times:.2f} times the mean, rank {rank} in layer {layer}"
            lines.append(
                f"ranks wait {latest.wait_ms:.1f} ms a step for token counts, and tokens travel to "
                f"experts for {latest.travel_ms:.1f}"
                f"{who if latest.late_rank >= 0 else ''}{full if rank >= 0 else ''}"
            )
        return lines
