"""What a run has measured of FSDP's memory, in its folder: JSON lines and a picture of one step.

``python -m titan_ext.fsdp.memory.timeline FOLDER`` draws the pictures again and prints
one line a rank.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_ext.fsdp.memory.accounting import CLASSES, Timeline

__all__ = ["FOLDER", "MemoryFile", "draw", "summary"]

FOLDER = "fsdp_memory"
_MIB = 2**20
_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink")
_LABELS = {
    "gathered": "gathered parameters",
    "all_gather": "all-gather buffers",
    "reduce_scatter": "reduce-scatter buffers",
}


class MemoryFile:
    """``fsdp_memory/rankN.jsonl`` of a run: one line a step, the events of one step among them."""

    def __init__(self, run_folder: Path, rank: int) -> None:
        self.path = run_folder / FOLDER / f"rank{rank}.jsonl"

    def append(
        self,
        step: int,
        timeline: Timeline,
        predicted: Mapping[str, int] | None,
        with_events: bool = False,
    ) -> None:
        """Append a line.

        Args:
            step: The step of training.
            timeline: What was measured in it.
            predicted: ``Timeline.peaks`` of what was predicted.
            with_events: Whether to keep every event, for the picture.
        """
        line: dict[str, Any] = {
            "step": step,
            "peak_nbytes": timeline.peaks(),
            "predicted_peak_nbytes": predicted,
            "unshards": timeline.unshards(),
            "reshards": timeline.reshards(),
            "left_over": list(timeline.left_over()),
        }
        if with_events:
            line["events"] = timeline.to_json()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def summary(peaks: Mapping[str, int], predicted: Mapping[str, int] | None) -> str:
    """One line: peaks in MiB by class, and what was predicted where that is another number."""

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

    figure = Figure(figsize=(11, 7), layout="constrained")
    by_class, by_kind = figure.subplots(2, 1, sharex=True)
    totals = [event.bytes_of() for event in timeline.events]
    at = range(len(totals))
    bands = {label: [getattr(t, name) / _MIB for t in totals] for name, label in _LABELS.items()}
    by_class.stackplot(at, *bands.values(), labels=list(bands), step="post", colors=_COLOURS)
    logical = [t.logical / _MIB for t in totals]
    by_class.step(at, logical, where="post", color="black", lw=1, label="logical")
    kinds = list(timeline.events[0].live) if timeline.events else []
    of_kind = {k: [e.live[k].unsharded / _MIB for e in timeline.events] for k in kinds}
    if kinds:
        by_kind.stackplot(at, *of_kind.values(), labels=kinds, step="post", colors=_COLOURS)
    by_class.set(ylabel="MiB", title=title)
    by_kind.set(ylabel="MiB, with all-gather buffers", xlabel="event (unshard, run, reshard, ...)")
    starts = [i for i, event in enumerate(timeline.events) if event.action == "backward"]
    for axes in (by_class, by_kind):
        axes.grid(alpha=0.3)
        axes.margins(x=0)
        if starts:
            axes.axvline(starts[0], color="grey", ls=":", label="backward begins")
        axes.legend(loc="upper right", fontsize="small")
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
