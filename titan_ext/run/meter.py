# SPDX-License-Identifier: BSD-3-Clause
"""Measures in logged steps how long a rank waits for token counts, and how many tokens it gets.

Where tokens are exchanged the host reads the counts anyway, and the stream waits for the tokens. So
a measurement waits for nothing that the step would not wait for. What a rank has measured goes to
the job's store, from a thread: no collective, and no step waits. Rank 0 reads it two logged steps
later, judges it (``run.pace``), warns, and logs it among Titan's metrics. In a pipeline Titan logs
on a rank of the last stage, which gets them by the store.

Titan's standard dispatcher without a compiler has counts that the host reads. Elsewhere only the
pace is judged.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
from titan_ext.run.pace import Judge, RankStep

_METRICS = "metrics"
"""Of the newest step that was judged, in the store."""


class Meter:
    """What one layer's dispatcher measures while it is told to (``dispatcher.meter``)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = device.type != "cpu"
        self._ms = {"wait": 0.0, "travel": 0.0}
        self._events: list[tuple[str, torch.Event, torch.Event]] = []
        self.tokens = 0
        """That came in the last microbatch."""

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
        """What was measured, when the device has done the step; later events do not count."""
        for what, start, end in self._events:
            if end.query():
                self._ms[what] += start.elapsed_time(end)
        self._events.clear()
        return self._ms


class PaceCheck(RunCheck):
    """Warns of a late rank, uneven experts, a slow link, and a pace that drops for long."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.judge = Judge()
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
            for warning in self.judge.pace(trainer.step, step_ms):
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
                    self._thread.submit(self._judge_all, 0)
                self._thread.shutdown()

    def _tell(self, step: int, step_ms: float, meters: dict[int, Meter]) -> None:
        """Give the store what this rank has measured; on rank 0 judge what it has of all."""
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
        self._store.append(f"step {step}", row.word())
        if row.rank != 0:
            if self._logs and self._store.check([_METRICS]):
                self._metrics = json.loads(self._store.get(_METRICS))
            return
        if step not in self._steps:  # else it is done again, and all ranks say so
            self._steps.append(step)
        self._judge_all(2)

    def _judge_all(self, but: int) -> None:
        """Judge the steps that rank 0 has told of, but for the last so many."""
        while len(self._steps) > but:
            step = self._steps.pop(0)
            lines = self._store.get(f"step {step}").decode().splitlines()
            self._store.delete_key(f"step {step}")
            newest = {row.rank: row for row in map(RankStep.read, lines)}
            for warning in self.judge.take(step, list(newest.values())):
                logger.warning(warning)
            assert self.judge.latest is not None
            self._metrics = self.judge.latest.metrics()
            self._store.set(_METRICS, json.dumps(self._metrics))

    def receipts(self) -> dict[str, Any]:
        """The newest findings, and every warning."""
        if (latest := self.judge.latest) is None:
            return {"warnings": self.judge.said} if self.judge.said else {}
        by_layer = {str(layer): times for layer, (times, _) in latest.imbalance.items()}
        pace = {"waits_ms": latest.wait_ms, "travel_ms": latest.travel_ms}
        pace |= {"latest_rank": latest.late_rank}
        return {
            "pace": pace | {"late_ms": latest.late_ms, "imbalance": by_layer},
            "warnings": self.judge.said,
        }

    def summary(self) -> list[str]:
        """What was warned of, and the latest rank and fullest experts of the newest step."""
        lines = [f"warned: {words}" for words in self.judge.said]
        if (latest := self.judge.latest) is not None:
            layer, times, rank = latest.fullest
            who = f"; rank {latest.late_rank} latest, by {latest.late_ms:.1f}"
            full = f"; fullest experts {times:.2f} times the mean, rank {rank} in layer {layer}"
            lines.append(
                f"ranks wait {latest.wait_ms:.1f} ms a step for token counts, and tokens travel to "
                f"experts for {latest.travel_ms:.1f}"
                f"{who if latest.late_rank >= 0 else ''}{full if rank >= 0 else ''}"
            )
        return lines
