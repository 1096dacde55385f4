# SPDX-License-Identifier: BSD-3-Clause
"""A plan of a step as a file and a picture, and a run held against it, in bytes and in time.

``titan_ext dry-run CONFIG --ranks N --memory 80GiB --out FOLDER`` writes ``plan_rank0.json``, with
every figure, and ``plan_rank0.png``. A run that finds the plan of its rank in its ``dump_folder``
compares its second step with it (``PlanCheck``). A plan never fails a run.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools.logging import logger

from titan_ext.guards import RunCheck
from titan_ext.limits import world_size
from titan_ext.memory_plan import LASTING, LiveBytes, MemoryKind, MemoryPlan, Peak
from titan_ext.names import and_more, format_bytes, matches
from titan_ext.op_cost import nvlink_domain, ranks_per_node
from titan_ext.run_record import versions
from titan_ext.step_time import StepTime
from titan_ext.toml_config.values import identity

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
_LABELS_AT_MOST = 30
_SEEN = 0.002
"""Of the peak: a kind that is never more is not drawn."""
_LIMIT_IN_SIGHT = 4
"""Times the peak: a limit above that is named, not drawn."""

_COMPARED = (
    "extends",
    "model",
    "training",
    "parallelism",
    "activation_checkpoint",
    "compile",
    "optimizer",
    "loss",
)
"""Sections of a config that decide what a step holds."""
_NOT_COMPARED = (
    "training.steps",
    "training.max_norm",
    "training.gc_*",
    "training.disable_cuda_graphs",  # a run without accelerator changes it
    "parallelism.fsdp_track_memory",
    "optimizer.param_groups.*.optimizer_kwargs",  # and what those make is compared in bytes
)


def file_name(rank: int) -> str:
    """Of the plan of a rank."""
    return f"plan_rank{rank}.json"


def to_json(run: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Every figure of a plan, in bytes, and in ms if the step was timed.

    Args:
        run: The ``dry_run.DryRun`` that planned its memory.
        config: Every value that it was asked to run with, by dotted key.
    """
    plan: MemoryPlan = run.memory
    return {
        "verdict": plan.verdict(run.name()),
        "fits": plan.spare >= 0,
        "memory": plan.budget.memory,
        "allowance": plan.allowance,
        "spare": plan.spare,
        "communicators": plan.communicators,
        "host_peak": plan.host_peak,
        "unsharded": plan.unsharded,
        "ranks": run.ranks,
        "rank": run.rank,
        "ranks_per_node": ranks_per_node(),
        "nvlink_domain": nvlink_domain(),
        "name": run.name(),
        "imbalance": run.imbalance,
        "peak": _moment(plan.peak),
        "moments": [_moment(moment) for moment in plan.moments],
        "on_host": sorted(_key(kind) for kind in plan.on_host),
        "time": None if run.time is None else _time(run.time),
        "config": plain(config),
        "versions": versions(),
    }


def _moment(peak: Peak) -> dict[str, Any]:
    by_kind = {_key(kind): peak.by_kind.get(kind, 0) for kind in MemoryKind}
    return {"moment": peak.moment, "sum": peak.nbytes, **by_kind}


def _time(time: StepTime) -> dict[str, Any]:
    keys = ("machine", "slower", "step_ms", "tokens_per_second", "mfu")
    by_part = {part.name.lower(): ms for part, ms in time.ms.items()}
    return {key: getattr(time, key) for key in keys} | {"ms": by_part}


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """As a JSON file gives it back."""
    return json.loads(json.dumps(config, default=str))


def write(plan: Mapping[str, Any], folder: Path) -> None:
    """Write ``to_json``'s plan and its picture."""
    file = folder / file_name(plan["rank"])
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(plan, indent=1) + "\n")
    draw(plan).savefig(file.with_suffix(".png"), dpi=100)


def draw(plan: Mapping[str, Any]) -> Any:
    """A matplotlib figure: live bytes by kind over the moments of a step, with the limit."""
    from matplotlib.figure import Figure

    moments, peak = plan["moments"], plan["peak"]
    figure = Figure(figsize=(11.5, 5.5), layout="constrained")
    axes = figure.subplots()
    at, bottom = range(len(moments)), [0.0] * len(moments)
    for kind in MemoryKind:
        heights = [moment[_key(kind)] / _GIB for moment in moments]
        top_of_kind = max(heights) * _GIB
        if _key(kind) in plan["on_host"] or top_of_kind < _SEEN * peak["sum"]:
            continue
        axes.bar(at, heights, width=1, bottom=bottom, color=_COLOURS[kind], label=str(kind))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    top, limit = peak["sum"] / _GIB, plan["memory"] / _GIB
    if limit <= _LIMIT_IN_SIGHT * top:
        usable = limit - plan["allowance"] / _GIB
        label = f"allowance: {limit - usable:.2f} GiB"
        axes.axhspan(usable, limit, facecolor="none", edgecolor="grey", hatch="//", label=label)
        axes.axhline(limit, color="black", lw=2, label=f"memory: {limit:.2f} GiB")
    highest = next(i for i, moment in enumerate(moments) if moment["sum"] == peak["sum"])
    is_left = highest < len(moments) / 2
    axes.annotate(
        f"peak: {top:.2f} GiB, {peak['moment']}",
        (highest, top),
        (30 if is_left else -30, 18),
        textcoords="offset points",
        ha="left" if is_left else "right",
        arrowprops={"arrowstyle": "->"},
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    every = -(-len(moments) // _LABELS_AT_MOST)
    ticks = [i for i in at if i % every == 0 and abs(i - highest) >= every] + [highest]
    names = [moments[i]["moment"] for i in ticks]
    axes.set_xticks(ticks, names, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_xlim(-0.5, len(moments) - 0.5)
    axes.set_ylim(0, max(1.2 * top, 1.05 * limit if limit <= _LIMIT_IN_SIGHT * top else 0))
    axes.set_ylabel("GiB, at the peak of each moment")
    axes.set_title(plan["verdict"], loc="left", fontsize="medium")
    axes.grid(axis="y", alpha=0.3)
    # The legend in the order in which the kinds lie on each other.
    axes.legend(reverse=True, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return figure


class PlanCheck(RunCheck):
    """Holds the second step of a run against the plan of its rank, where its folder has one.

    Parameters, gradients and optimizer states are added up from the tensors that the trainer
    holds. The peak is what the device's allocator had given out at most; a CPU's tells nothing.
    """

    _plan: Mapping[str, Any] | None = None
    _measured: int | None = None
    _steps = 0
    _said = ""

    def summary(self) -> list[str]:
        return [self._said] if self._said else []

    def before_build(self, config: Any) -> None:
        file = Path(config.dump_folder) / file_name(int(os.environ.get("RANK", "0")))
        if not file.exists():
            return
        plan = {}
        try:
            plan = json.loads(file.read_text())
            differ = differences(plan, config)
        except (OSError, ValueError, KeyError) as error:
            differ = [f"it cannot be read ({type(error).__name__}: {error})"]
        if differ:
            logger.warning(
                f"{file} is not a plan of this run, and is not compared: {and_more(differ)}."
            )
        else:
            self._plan = plan

    @contextlib.contextmanager
    def around_step(self, trainer: Any) -> Iterator[None]:
        self._steps += 1
        if self._plan is None or self._steps != 2:  # the first makes the optimizer's states
            yield
            return
        trainer.metrics_processor.device_memory_monitor.reset_peak_stats()
        # Before the end of the step, where Titan's metrics begin a new peak.
        hook = trainer.optimizers.register_step_post_hook(lambda *_: self._note_peak(trainer))
        yield
        hook.remove()
        self._compare(self._plan, trainer)

    def _note_peak(self, trainer: Any) -> None:
        device = torch.get_device_module(trainer.device)
        if hasattr(device, "max_memory_allocated"):
            self._measured = device.max_memory_allocated(trainer.device)

    def _compare(self, plan: Mapping[str, Any], trainer: Any) -> None:
        held = LiveBytes(trainer.model_parts, trainer.optimizers).peak.by_kind
        pairs = {
            str(kind): (plan["moments"][-1][_key(kind)], held.get(kind, 0)) for kind in LASTING
        }
        peak = plan["peak"]["sum"]
        if self._measured is not None:
            pairs = {"peak": (peak, self._measured), **pairs}
        said = [f"{name} {_compared(*pair)}" for name, pair in pairs.items()]
        if self._measured is None:
            said = [f"peak {format_bytes(peak)} planned, not measured on this device", *said]
        self._said = f"Plan of rank {plan['rank']} and step {trainer.step}: {'; '.join(said)}"
        logger.info(self._said)
        metrics = {}
        for name, pair in pairs.items():
            for what, nbytes in zip(("planned", "measured"), pair, strict=True):
                metrics[f"plan/{name}, {what}(GiB)"] = nbytes / _GIB
        trainer.metrics_processor.logger.log(metrics, trainer.step)


def _key(kind: MemoryKind) -> str:
    return kind.name.lower()


def _compared(planned: int, measured: int) -> str:
    if planned == measured:
        return f"{format_bytes(planned)} as planned"
    off_by = f" ({measured / planned - 1:+.1%})" if planned else ""
    return f"{format_bytes(planned)} planned, {format_bytes(measured)} measured{off_by}"


def differences(plan: Mapping[str, Any], config: Any) -> list[str]:
    """What of a plan is not so in this run, in words."""
    nodes = {"ranks": world_size(config), "ranks_per_node": ranks_per_node()}
    here = nodes | plain(identity(config))
    there = {key: plan[key] for key in nodes} | plan["config"]
    return [
        f"{key} is {there.get(key, 'absent')} there and {here.get(key, 'absent')} here"
        for key in dict.fromkeys([*there, *here])
        if there.get(key) != here.get(key)
        and (key in nodes or key.split(".")[0] in _COMPARED)
        and not any(matches(key, pattern) for pattern in _NOT_COMPARED)
    ]
