"""A picture of one MoE block's streams, stock and with halves: when tokens travel, what computes.

    python -m benchmarks.block_streams      # writes docs/images/block_streams.png (2 minutes)

DeepSeek-V3 16B on 8 GPUs, planned at an H100's rates, not measured (docs/plan.md). Each plan runs
in a process of its own, which Titan allows one layout.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.exchanges import ARMS

_JOB = ("deepseek_v3_16b", 8, ["--parallelism.expert_parallel_degree", "8"])
_BLOCK = "layers.12"
_ARMS = ("stock", "titan_ext", "halves")
_PHASES = ("forward", "backward")
_COLOURS = {
    "FORWARD": "#1f4e79",
    "RECOMPUTE": "#9dc3e6",
    "BACKWARD": "#2e75b6",
    "EXCHANGES": "#c00000",
    "GATHERS": "#ed7d31",
    "REDUCTIONS": "#f4b183",
}
_WORDS = {"EXCHANGES": "tokens travel", "GATHERS": "all-gather", "REDUCTIONS": "reduce-scatter"}


def spans_of(arm: str) -> list[dict[str, Any]]:
    """What each queue did in forward and backward of the block, in a process that ends."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.block_streams", "--arm", arm],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def print_spans(arm: str) -> None:
    from titan_ext.base import no_accelerator
    from titan_ext.config_registry.resolve import resolve
    from titan_ext.plan.dry_run import dry_run
    from titan_ext.plan.stand_ins import as_rank, as_stock

    name, ranks, flags = _JOB
    with as_rank(ranks, 0):
        flags = [*flags, *(word for word in ARMS[arm].split() if arm != "stock")]
        with no_accelerator.as_with_an_accelerator():
            config = resolve(name, flags).config
        if arm == "stock":
            as_stock(config)
        run = dry_run(config, ranks, machine="h100")
    phases = (f"forward of {_BLOCK}", f"backward of {_BLOCK}")
    assert run.clock is not None
    found = [
        {
            "queue": "compute" if queue is run.clock.compute else str(queue),
            "part": work.label.category.name,
            "moment": work.label.phase,
            "at": (work.start, work.end),
        }
        for queue, works in run.clock.streams.queues.items()
        for work in works
        if work.label.phase in phases and work.label.category.name in _COLOURS
    ]
    print(json.dumps(found))


def draw(spans: dict[str, list[dict[str, Any]]]) -> Figure:
    """Two columns, forward and backward; for each arm a line of computation and one of links."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    # A millisecond is as wide in both.
    longest = {
        phase: max(
            stop - start for start, stop in (_ends(found, phase) for found in spans.values())
        )
        for phase in _PHASES
    }
    columns = figure.subplots(1, 2, sharey=True, width_ratios=[*longest.values()])
    lines = [(arm, lane) for arm in spans for lane in ("computes", "sends")]
    for axes, phase in zip(columns, _PHASES, strict=True):
        for arm, found in spans.items():
            of_phase = [s for s in found if s["moment"].startswith(phase)]
            begin, end = _ends(found, phase)
            for span in of_phase:
                lane = "computes" if span["queue"] == "compute" else "sends"
                start, stop = (min(max(at, begin), end) - begin for at in span["at"])
                y, part = lines.index((arm, lane)), span["part"]
                if lane == "sends" and part not in _WORDS:
                    part = "REDUCTIONS"  # copies on the stream of reduce-scatters
                axes.barh(y, stop - start, left=start, color=_COLOURS[part], height=0.8)
        axes.set_xlim(0, 1.02 * longest[phase])
        axes.set_xlabel(f"ms, {phase}" + (" with recompute" if phase == "backward" else ""))
        axes.spines[["top", "right"]].set_visible(False)
    columns[0].set_yticks(range(len(lines)), [f"{arm} {lane}" for arm, lane in lines])
    columns[0].invert_yaxis()
    job = "One MoE block of DeepSeek-V3 16B on 8 H100, EP 8, 4 x 4096 tokens a GPU: planned"
    figure.suptitle(job, x=0.01, ha="left", fontsize="medium")
    patches = [
        Patch(color=colour, label=_WORDS.get(part, part.lower()))
        for part, colour in _COLOURS.items()
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=6, frameon=False)
    return figure


def _ends(found: list[dict[str, Any]], phase: str) -> tuple[float, float]:
    """When the computation of a phase begins and ends."""
    computed = [x for x in found if x["moment"].startswith(phase) and x["queue"] == "compute"]
    return min(x["at"][0] for x in computed), max(x["at"][1] for x in computed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--arm", choices=_ARMS, help="print its spans as JSON, and end")
    args = parser.parse_args()
    if args.arm:
        print_spans(args.arm)
        return
    path = Path(__file__).parents[1] / "docs" / "images" / "block_streams.png"
    draw({arm: spans_of(arm) for arm in _ARMS}).savefig(path, dpi=110)
    print(path)


if __name__ == "__main__":
    main()
