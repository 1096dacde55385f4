# SPDX-License-Identifier: BSD-3-Clause
"""FSDP's memory in a run: measured, written to the run's folder and drawn.

With ``parallelism.fsdp_track_memory`` every rank measures each step (``tracker``). The first eight
of each pipeline stage write a line to ``fsdp_memory/`` in the run's folder. At the first steady
step the log shows the peak; Titan's metrics get the peaks of every logged step.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

from titan_ext.base.agreement import leaves_files
from titan_ext.base.run_check import RunCheck
from titan_ext.fsdp.plan import plan_of
from titan_ext.fsdp.tracker import MemoryTracker, Timeline

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
    _path: Path | None = None
    _steps = 0

    def after_build(self, trainer: Any) -> None:
        if not trainer.config.parallelism.fsdp_track_memory:
            return
        units = [
            (part, plan.decoder_units) for part in trainer.model_parts if (plan := plan_of(part))
        ]
        self._tracker = MemoryTracker(units)
        if leaves_files(trainer.parallel_dims):
            self._path = Path(trainer.config.dump_folder) / FOLDER / f"rank{dist.get_rank()}.jsonl"

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
        if self._steps == 1 and self._path:  # it ended before the first steady one
            logger.info(f"FSDP memory of the only step: {self._draw(self._path, trainer.step)}")

    def _draw(self, path: Path, step: int) -> Path:
        picture = path.with_suffix(".png")
        draw(self.timeline, picture, f"FSDP on {picture.stem}, step {step}")
        return picture

    def _write(self, trainer: Any, timeline: Timeline) -> None:
        """Write the step's events. The first steady step goes to the log and is drawn."""
        self.timeline = timeline
        self._steps += 1
        is_first_steady = self._steps == 2  # the first step gathers as no later one does
        peaks = timeline.peaks()
        left_over = timeline.left_over()
        line: dict[str, Any] = {
            "step": trainer.step,
            "peak_nbytes": peaks,
            "unshards": timeline.unshards(),
            "reshards": timeline.reshards(),
            "left_over": list(left_over),
        }
        if is_first_steady:
            line["events"] = [asdict(event) for event in timeline.events]
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if left_over:
            logger.warning(f"FSDP: not freed at the end of the step: {', '.join(left_over)}")
        if is_first_steady:
            drawn = f"; {self._draw(self._path, trainer.step)}" if self._path else ""
            logger.info(f"{summary(peaks)}{drawn}")
        metrics = trainer.metrics_processor
        if metrics.should_log(trainer.step):
            gib = {f"fsdp_memory/{name}(GiB)": peaks[name] / 2**30 for name in _METRICS}
            metrics.logger.log(gib, trainer.step)


def summary(peaks: Mapping[str, int]) -> str:
    """One line: peaks in MiB by class."""
    mib = {name: f"{nbytes / _MIB:.2f}" for name, nbytes in peaks.items()}
    return (
        f"FSDP peak: {mib['unsharded']} MiB of parameters unsharded = {mib['gathered']} gathered, "
        f"{mib['all_gather']} in all-gather buffers (each at its own peak); logical "
        f"{mib['logical']}, of blocks {mib['blocks_logical']}; {mib['reduce_scatter']} in "
        "reduce-scatter buffers"
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
