# SPDX-License-Identifier: BSD-3-Clause
"""FSDP's memory in a run: measured, predicted, written to the run's folder and drawn.

With ``parallelism.fsdp_track_memory`` every rank measures each step (``tracker``) and writes a line
to ``fsdp_memory/`` in the run's folder. At the first steady step the log shows the peak and the
prediction; Titan's metrics get the peaks of every logged step.

``python -m titan_ext.fsdp.memory.log FOLDER`` draws the pictures of a run again and prints one line
a rank.
"""

import argparse
import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_ext.fsdp.memory.accounting import CLASSES, Timeline
from titan_ext.fsdp.memory.predict import Pipeline, StepOrder, predict
from titan_ext.fsdp.memory.tracker import MemoryTracker
from titan_ext.fsdp.plan import FSDPPlan, UnitPlan, plan_of
from titan_ext.guards import RunCheck

FOLDER = "fsdp_memory"
_MIB = 2**20
# One colour, one meaning, in both halves of the picture and whatever units a model has.
_CLASS_COLOURS = ("tab:blue", "tab:orange", "tab:green")
_KIND_COLOURS = {
    "embedding": "gold",
    "attention": "tab:purple",
    "moe": "tab:red",
    "experts": "salmon",
    "feed_forward": "tab:pink",
    "block": "tab:brown",
    "norm": "tab:gray",
    "head": "tab:olive",
    "vision": "tab:cyan",
    "tied_embedding_and_head": "khaki",
}
_LABELS = {
    "gathered": "gathered parameters",
    "all_gather": "all-gather buffers",
    "reduce_scatter": "reduce-scatter buffers",
}
_METRICS = ("gathered", "all_gather", "reduce_scatter", "logical", "unsharded")


class MemoryLog(RunCheck):
    """Measures, writes and reports on one rank, with ``parallelism.fsdp_track_memory``."""

    _tracker: MemoryTracker | None = None
    _steps = 0

    def after_build(self, trainer: Any) -> None:
        if not trainer.config.parallelism.fsdp_track_memory:
            return
        parts = [(part, plan_of(part)) for part in trainer.model_parts]
        self._tracker = MemoryTracker([(part, plan.decoder_units) for part, plan in parts])
        self._path = Path(trainer.config.dump_folder) / FOLDER / f"rank{dist.get_rank()}.jsonl"
        self.predicted: Timeline | None = None
        try:
            self.predicted = predict(
                predictable_units(plan for _, plan in parts), step_order(trainer)
            )
        except ValueError as error:
            logger.warning(f"FSDP memory is measured, not predicted: {error}")

    @contextlib.contextmanager
    def around_step(self, trainer: Any) -> Iterator[None]:
        if self._tracker is None:
            yield
            return
        self._tracker.begin_step()
        yield
        self._write(trainer, self._tracker.end_step())

    @contextlib.contextmanager
    def around_run(self, trainer: Any) -> Iterator[None]:
        yield
        if self._steps == 1:  # it ended before the first steady one
            logger.info(f"FSDP memory of the only step: {self._draw(trainer.step)}")

    def _draw(self, step: int) -> Path:
        picture = self._path.with_suffix(".png")
        draw(self.timeline, picture, f"FSDP on {picture.stem}, step {step}")
        return picture

    def _write(self, trainer: Any, timeline: Timeline) -> None:
        """Write the step's events. The first steady step goes to the log and is drawn."""
        self.timeline = timeline
        self._steps += 1
        is_first_steady = self._steps == 2  # the first step gathers as no later one does
        peaks = timeline.peaks()
        predicted = self.predicted.peaks() if self.predicted is not None else None
        left_over = timeline.left_over()
        line: dict[str, Any] = {
            "step": trainer.step,
            "peak_nbytes": peaks,
            "predicted_peak_nbytes": predicted,
            "unshards": timeline.unshards(),
            "reshards": timeline.reshards(),
            "left_over": list(left_over),
        }
        if is_first_steady:
            line["events"] = timeline.to_json()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if left_over:
            logger.warning(f"FSDP: not freed at the end of the step: {', '.join(left_over)}")
        if is_first_steady:
            logger.info(f"{summary(peaks, predicted)}; {self._draw(trainer.step)}")
        metrics = trainer.metrics_processor
        if metrics.should_log(trainer.step):
            gib = {f"fsdp_memory/{name}(GiB)": peaks[name] / 2**30 for name in _METRICS}
            metrics.logger.log(gib, trainer.step)


def step_order(trainer: Trainer) -> StepOrder:
    """The order of the trainer's steps, for ``predict``.

    Raises ValueError for a pipeline with several stages a rank.
    """
    config, loss, plan = trainer.config, trainer.loss_fn, plan_of(trainer.model_parts[0])
    pipeline = None
    if trainer.parallel_dims.pp_enabled:
        if len(trainer.model_parts) > 1:
            raise ValueError("no prediction for several pipeline stages a rank.")
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
        reduce_scatter_buffers=plan.reduce_scatter_buffers,
        copies_out_directly=plan.copies_out_directly,
    )


def predictable_units(plans: Iterable[FSDPPlan]) -> list[UnitPlan]:
    """The units of all ``plans``; ValueError if FSDP manages parameters outside of them.

    The last norm may be replicated; elsewhere a replicated parameter changes the order of a step.
    """
    plans = list(plans)
    replicated = {
        name for plan in plans for group in plan.replicated for name in group.module_names
    }
    if replicated - {"norm"} or any(plan.unmanaged for plan in plans):
        raise ValueError("some parameters are replicated, or were added after FSDP.")
    return [unit for plan in plans for unit in plan.units]


def summary(peaks: Mapping[str, int], predicted: Mapping[str, int] | None) -> str:
    """One line: peaks in MiB by class, with predictions where they differ."""

    def say(name: str) -> str:
        text = f"{peaks[name] / _MIB:.2f}"
        if predicted is not None and predicted[name] != peaks[name]:
            text += f" (predicted {predicted[name] / _MIB:.2f})"
        return text

    agrees = predicted is not None and all(predicted[name] == peaks[name] for name in CLASSES)
    ending = "; as predicted" if agrees else "; not predicted" if predicted is None else ""
    return (
        f"FSDP peak: {say('unsharded')} MiB of parameters unsharded = {say('gathered')} gathered, "
        f"{say('all_gather')} in all-gather buffers (each at its own peak); logical "
        f"{say('logical')}, of blocks {say('blocks_logical')}; {say('reduce_scatter')} in "
        f"reduce-scatter buffers{ending}"
    )


def draw(timeline: Timeline, picture: Path, title: str) -> None:
    """Write a PNG of the live bytes by class, and of unsharded ones by kind, over the events."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    by_class, by_kind = figure.subplots(2, 1, sharex=True)
    totals = [event.bytes_of() for event in timeline.events]
    at = range(len(totals))
    bands = {label: [getattr(t, name) / _MIB for t in totals] for name, label in _LABELS.items()}
    by_class.stackplot(at, *bands.values(), labels=list(bands), step="post", colors=_CLASS_COLOURS)
    logical = [t.logical / _MIB for t in totals]
    label = "parameters of gathered units,\nwithout copies in buffers"
    by_class.step(at, logical, where="post", color="black", lw=1, label=label)
    kinds = list(timeline.events[0].live) if timeline.events else []
    of_kind = {k: [e.live[k].unsharded / _MIB for e in timeline.events] for k in kinds}
    if kinds:
        colours = [_KIND_COLOURS[str(kind)] for kind in kinds]
        by_kind.stackplot(at, *of_kind.values(), labels=kinds, step="post", colors=colours)
    by_class.set(ylabel="MiB on this rank", title=title)
    by_kind.set(
        ylabel="MiB of parameters,\nwith all-gather buffers",
        xlabel="position in the step (one for each gather, run and free of a unit)",
    )
    peak = max((t.unsharded / _MIB for t in totals), default=0.0)
    # A chunked loss reduces the head's gradients before the model's backward begins.
    starts = [i for i, event in enumerate(timeline.events) if event.action == "backward"]
    starts += [i + 1 for i, event in enumerate(timeline.events) if event.action == "reduced"]
    for axes in (by_class, by_kind):
        axes.grid(alpha=0.3)
        axes.margins(x=0)
        axes.axhline(
            peak, color="black", ls="--", lw=1, label=f"peak of parameters: {peak:.2f} MiB"
        )
        if starts:
            axes.axvline(min(starts), color="grey", ls=":", label="backward begins")
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize="small", frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="of a run with parallelism.fsdp_track_memory")
    folder = parser.parse_args().folder
    files = sorted((folder / FOLDER).glob("rank*.jsonl"))
    if not files:
        parser.error(f"{folder}: nothing in {FOLDER}/; was parallelism.fsdp_track_memory on?")
    for path in files:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        last = lines[-1]
        print(path.stem, summary(last["peak_nbytes"], last["predicted_peak_nbytes"]))
        drawn = next((line for line in reversed(lines) if "events" in line), None)
        if drawn is not None:
            title = f"{folder.name}, {path.stem}, step {drawn['step']}"
            draw(Timeline.from_json(drawn["events"]), path.with_suffix(".png"), title)


if __name__ == "__main__":
    main()
