# SPDX-License-Identifier: BSD-3-Clause
"""A plan of a step as a file and a picture, in bytes and in time.

``titan_ext dry-run CONFIG --ranks N --memory 80GiB --out FOLDER`` writes ``plan_rank0.json``, with
every figure, and ``plan_rank0.png``. A run that finds the plan of its rank in its ``dump_folder``
compares its second step with it (``run.record``). A plan never fails a run.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_ext.base.nodes import nvlink_domain, ranks_per_node
from titan_ext.base.titan.batch import LOCAL_BATCH, SEQUENCE
from titan_ext.plan.live import MemoryKind, Peak
from titan_ext.plan.memory import BANDS, JobClass, MemoryPlan
from titan_ext.plan.time import StepTime
from titan_ext.run.record import as_json, file_name, versions

_GIB = 2**30
_COLOURS = {
    MemoryKind.PARAMETERS: "#1f4e79",
    MemoryKind.GRADIENTS: "#4f81bd",
    MemoryKind.STATES: "#9dc3e6",
    MemoryKind.EXACT: "#ed7d31",
    MemoryKind.FLOAT8: "#ffc000",
    MemoryKind.OFFLOADED: "#ffe699",
    MemoryKind.UNSHARDED: "#548235",
    MemoryKind.REDUCE: "#a9d18e",
    MemoryKind.ALL_TO_ALL: "#7030a0",
    MemoryKind.LOSS: "#c00000",
    MemoryKind.TEMPORARY: "#a6a6a6",
}
_LABELS_AT_MOST = 14
_SEEN = 0.002
"""Share of the peak: a kind that is never more is not drawn."""
_LIMIT_IN_SIGHT = 4
"""Times the peak: a limit above that is named, not drawn."""


_OF_MEMORY = "allowance", "spare", "communicators", "host_peak", "unsharded"


def to_json(run: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Every figure of a plan, in bytes, and in ms if the step was timed.

    ``run`` is the ``plan.dry_run.DryRun`` that planned its memory; ``config`` has every value that
    it was asked to run with, by dotted key.
    """
    plan: MemoryPlan = run.memory
    return {
        "verdict": plan.verdict(run.name()),
        "fits": plan.fits,
        "uncertain": plan.is_uncertain,
        "class": str(plan.job),
        "reserved": sum(plan.reserved.values()),
        "reserved_aside": sum(n for stream, n in plan.reserved.items() if stream),
        "memory": plan.memory,
        **{key: getattr(plan, key) for key in _OF_MEMORY},
        **{key: getattr(run, key) for key in ("ranks", "rank", "imbalance")},
        "ranks_per_node": ranks_per_node(),
        "nvlink_domain": nvlink_domain(),
        "name": run.name(),
        "peak": _phase(plan.peak),
        "moments": [_phase(phase) for phase in plan.phases],
        "on_host": sorted(_key(kind) for kind in plan.on_host),
        "time": _time(run.time) if run.time else None,
        "config": as_json(config),
        "versions": versions(),
    }


def _phase(peak: Peak) -> dict[str, Any]:
    by_kind = {_key(kind): peak.by_kind.get(kind, 0) for kind in MemoryKind}
    return {"moment": peak.phase, "sum": peak.nbytes, **by_kind}


def _time(time: StepTime) -> dict[str, Any]:
    keys = ("machine", "expected_tokens_per_second", "expected_ms")
    keys += ("tokens_per_second", "step_ms", "mfu", "launched", "host_is_ahead_ms")
    parts = {
        name: {category.name.lower(): ms for category, ms in found.items()}
        for name, found in {"expected": time.expected, "ms": time.ms}.items()
    }
    return {key: getattr(time, key) for key in keys} | parts | {"kernels": {**time.kernels}}


def write(plan: Mapping[str, Any], folder: Path) -> None:
    """Write ``to_json``'s plan and its picture."""
    file = folder / file_name(plan["rank"])
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(plan, indent=1) + "\n")
    draw(plan).savefig(file.with_suffix(".png"), dpi=100)


def draw(plan: Mapping[str, Any]) -> Any:
    """A matplotlib figure: live bytes by kind over the phases of a step, with the limit."""
    from matplotlib.figure import Figure

    phases, peak = plan["moments"], plan["peak"]
    figure = Figure(figsize=(11.5, 5.5), layout="constrained")
    axes = figure.subplots()
    at, bottom = range(len(phases)), [0.0] * len(phases)
    for kind in MemoryKind:
        heights = [phase[_key(kind)] / _GIB for phase in phases]
        top_of_kind = max(heights) * _GIB
        if _key(kind) in plan["on_host"] or top_of_kind < _SEEN * peak["sum"]:
            continue
        axes.bar(at, heights, width=1, bottom=bottom, color=_COLOURS[kind], label=str(kind))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    top, limit = peak["sum"] / _GIB, plan["memory"] / _GIB
    if limit <= _LIMIT_IN_SIGHT * top:
        usable = limit - max(plan["allowance"], 0) / _GIB
        label = f"allocator's reserve, CUDA context: {limit - usable:.2f} GiB"
        axes.axhspan(usable, limit, facecolor="none", edgecolor="grey", hatch="//", label=label)
        axes.axhline(limit, color="black", lw=2, label=f"memory: {limit:.2f} GiB")
    highest = next(i for i, phase in enumerate(phases) if phase["sum"] == peak["sum"])
    error = BANDS[JobClass(plan["class"])] * plan["reserved"] / _GIB
    axes.errorbar(highest, top, error, color="black", capsize=3, label=f"error: {error:.2f} GiB")
    is_left = highest < len(phases) / 2
    axes.annotate(
        f"peak: {top:.2f} GiB, {peak['moment']}",
        (highest, top),
        (30 if is_left else -30, 18),
        textcoords="offset points",
        ha="left" if is_left else "right",
        arrowprops={"arrowstyle": "->"},
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    every = -(-len(phases) // _LABELS_AT_MOST)
    ticks = [i for i in at if i % every == 0 and abs(i - highest) >= every] + [highest]
    names = [phases[i]["moment"] for i in ticks]
    axes.set_xticks(ticks, names, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_xlim(-0.5, len(phases) - 0.5)
    axes.set_ylim(0, max(1.2 * top, 1.05 * limit if limit <= _LIMIT_IN_SIGHT * top else 0))
    axes.set_ylabel("GiB, at the peak of each phase")
    config = plan["config"]
    name = config.get("extends", "").rpartition(".")[2] or "a model"
    job = (
        f"One step of {name} on {plan['ranks']} ranks, EP "
        f"{config['parallelism.expert_parallel_degree']}, {config[LOCAL_BATCH]} x "
        f"{config[SEQUENCE]} tokens a rank, checkpointing "
        f"{config['activation_checkpoint.policy']}: planned"
    )
    axes.set_title(f"{job}\n{plan['verdict']}", loc="left", fontsize="medium")
    axes.grid(axis="y", alpha=0.3)
    # The legend in the order in which the kinds lie on each other.
    axes.legend(reverse=True, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return figure


def _key(kind: MemoryKind) -> str:
    return kind.name.lower()
