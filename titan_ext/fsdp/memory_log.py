"""Tracking FSDP's memory in a run of the trainer: who measures, who predicts, who is told.

With ``parallelism.fsdp_track_memory`` every rank measures each step (``fsdp.tracker``) and writes a
line to the run's folder; the log says once, at the first steady step, what the peak was and what
was predicted (``fsdp.predict``); Titan's metrics get the peaks of every logged step.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.logging import logger

from titan_ext.configs import ParallelismConfig
from titan_ext.fsdp.accounting import Timeline
from titan_ext.fsdp.plan import FSDPPlan, plan_of
from titan_ext.fsdp.predict import Pipeline, StepOrder, predict
from titan_ext.fsdp.replicated import find_kept, units_without
from titan_ext.fsdp.timeline import MemoryFile, draw, summary
from titan_ext.fsdp.tracker import MemoryTracker
from titan_ext.fsdp.units import Unit, Wrap, plan_units, resolve_wrap

if TYPE_CHECKING:
    from titan_ext.trainer import Trainer

__all__ = ["MemoryLog", "step_order"]

_METRICS = ("gathered", "all_gather", "reduce_scatter", "logical", "unsharded")


class MemoryLog:
    """Measures, writes and reports for one rank of a run.

    Args:
        trainer: With its model sharded.
    """

    def __init__(self, trainer: "Trainer") -> None:
        parallelism = cast(ParallelismConfig, trainer.config.parallelism)
        wrap = resolve_wrap(parallelism.fsdp_wrap, parallelism.expert_parallel_degree)
        self._trainer = trainer
        self._tracker = MemoryTracker(
            [
                (part, _sharded_units(cast(Decoder, part), wrap, parallelism))
                for part in trainer.model_parts
            ]
        )
        self._file = MemoryFile(Path(trainer.config.dump_folder), dist.get_rank())
        self._steps = 0
        self.timeline = Timeline()
        self.predicted = _predict([plan_of(part) for part in trainer.model_parts], trainer)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        self._tracker.begin_step()
        yield
        self._end_step()

    def _end_step(self) -> None:
        """Write what the step has held. The first steady step is drawn, and said in the log."""
        trainer, self.timeline = self._trainer, self._tracker.end_step()
        self._steps += 1
        is_first_steady = self._steps == 2  # the first step gathers as no later one does
        peaks = self.timeline.peaks()
        predicted = self.predicted.peaks() if self.predicted is not None else None
        self._file.append(trainer.step, self.timeline, predicted, with_events=is_first_steady)
        if left_over := self.timeline.left_over():
            logger.warning(f"FSDP: not freed at the end of the step: {', '.join(left_over)}")
        if is_first_steady:
            picture = self._file.path.with_suffix(".png")
            draw(self.timeline, picture, f"FSDP on {picture.stem}, step {trainer.step}")
            logger.info(f"{summary(peaks, predicted)}; {picture}")
        metrics = trainer.metrics_processor
        if metrics.should_log(trainer.step):
            metrics.logger.log(
                {f"fsdp_memory/{name}(GiB)": peaks[name] / 2**30 for name in _METRICS},
                trainer.step,
            )

    def close(self) -> None:
        self._tracker.close()


def step_order(trainer: "Trainer") -> StepOrder:
    """The order of the trainer's steps, for ``predict``.

    Raises:
        ValueError: for a pipeline with several stages a rank.
    """
    config = trainer.config
    loss = trainer.loss_fn
    pipeline = None
    if trainer.parallel_dims.pp_enabled:
        if len(trainer.model_parts) > 1:
            raise ValueError("what FSDP holds is not predicted with several stages a rank.")
        mesh = trainer.parallel_dims.get_mesh("pp")
        pipeline = Pipeline(
            stage=mesh.get_local_rank(),
            stages=mesh.size(),
            microbatches=trainer.num_pipeline_parallel_microbatches,
            schedule=config.parallelism.pipeline_parallel_schedule,
        )
    return StepOrder(
        recomputes=config.activation_checkpoint is not None,
        loss_chunks=loss.num_chunks if isinstance(loss, ChunkedLossWrapper) else 0,
        accumulation=trainer.gradient_accumulation_steps,
        pipeline=pipeline,
        grad_dtype=TORCH_DTYPE_MAP[config.training.dtype],
    )


def _sharded_units(model: Decoder, wrap: Wrap, parallelism: ParallelismConfig) -> list[Unit]:
    kept = find_kept(model, parallelism.fsdp_keep_replicated, is_chunk=True)
    return units_without(plan_units(model, wrap), kept.values())


def _predict(plans: Sequence[FSDPPlan], trainer: "Trainer") -> Timeline | None:
    try:
        if any(plan.replicated or plan.late for plan in plans):
            raise ValueError("parameters are kept replicated, or were added late.")
        return predict([unit for plan in plans for unit in plan.units], step_order(trainer))
    except ValueError as error:
        logger.warning(f"FSDP memory is measured, not predicted: {error}")
        return None
