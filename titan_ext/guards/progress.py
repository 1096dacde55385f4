# SPDX-License-Identifier: BSD-3-Clause
"""How far a run is: parameters that train, steps done, time left."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchtitan.tools.logging import logger

from titan_ext.guards import RunCheck
from titan_ext.names import duration

_EVERY_S = 30.0
"""Between two lines at least: steps can be shorter than it takes to read one."""


class Progress(RunCheck):
    """Logs what trains, and at logged steps how long the rest takes.

    The pace is that of all steps but the first of this start, saves and validation included.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock  # seconds
        self._first: tuple[int, float] | None = None  # the first step that was done, and when
        self._said_s = float("-inf")

    def after_build(self, trainer: Any) -> None:
        with torch.device("meta"):  # whole: the trainer has a shard, or a stage
            params = list(trainer.model_config.build().parameters())
        trainable = sum(param.numel() for param in params if param.requires_grad)
        total = sum(param.numel() for param in params)
        logger.info(f"Trainable: {trainable:,} of {total:,} parameters")

    @contextmanager
    def around_step(self, trainer: Any) -> Iterator[None]:
        yield
        step, now_s = trainer.step, self._clock()
        if self._first is None:
            self._first = step, now_s
            return
        steps = trainer.config.training.steps
        is_due = trainer.metrics_processor.should_log(step) and now_s - self._said_s >= _EVERY_S
        if is_due and step < steps:
            self._said_s = now_s
            first, since_s = self._first
            pace_s = (now_s - since_s) / (step - first)
            logger.info(
                f"Step {step} of {steps}, {pace_s:.3g} s a step: about "
                f"{duration(pace_s * (steps - step))} left"
            )
