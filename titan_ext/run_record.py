# SPDX-License-Identifier: BSD-3-Clause
"""What a run leaves in its folder: its config, where that comes from, the memory that it saved.

Rank 0 writes ``config.toml``, which starts the same run again, and ``run.json``, with one entry for
each start. At the end the log and that entry say what titan_ext saved, beside what stock TorchTitan
would have needed. Both come from FSDP's plan and from what was counted, without a second run.
Nothing here can fail a run.
"""

import contextlib
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

import titan_ext
from titan_ext.activation_checkpoint import FP8AC, memory_report_of
from titan_ext.activation_checkpoint.policy import heeds_save_all_to_all
from titan_ext.compile import compiles_model
from titan_ext.dispatch import saves_all_to_all, stock_saves_all_to_all
from titan_ext.fsdp.memory.log import predictable_units, step_order
from titan_ext.fsdp.memory.predict import StepOrder, predict
from titan_ext.fsdp.plan import GroupPlan, UnitPlan, plan_of
from titan_ext.fsdp.prefetch import PrefetchLimit, plan_prefetch
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.fsdp.units import BLOCK_KINDS, UnitKind, splits_blocks
from titan_ext.guards import RunCheck
from titan_ext.names import format_bytes
from titan_ext.toml_config.values import dump

RECORD = "run.json"
CONFIG = "config.toml"
_PACKAGES = ("titan_ext", "torchtitan", "torch", "torchao", "triton")
# All-to-alls of a MoE layer and step: counts, dispatch and combine in forward, two in backward. A
# recompute that exchanges tokens again adds three, or two where the counts are saved.
_EXCHANGES = 5


class RunRecord(RunCheck):
    """Writes the record of this start; at the end of training, its ending and the gains."""

    def __init__(self) -> None:
        self._entry: dict[str, Any] = {}

    def after_build(self, trainer: Any) -> None:
        if dist.get_rank() != 0:
            return
        with _never_fails():
            self._entry = origin()
            self._write(trainer)
            (Path(trainer.config.dump_folder) / CONFIG).write_text(dump(trainer.config))

    @contextlib.contextmanager
    def around_run(self, trainer: Any) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._end(trainer, f"{type(error).__name__}: {error}"[:500])
            raise
        steps = trainer.config.training.steps
        self._end(trainer, "finished" if trainer.step >= steps else "stopped")

    def _end(self, trainer: Any, ending: str) -> None:
        if not self._entry:
            return
        with _never_fails():
            self._entry |= {"ended": _now(), "ending": ending, "step": trainer.step}
            self._write(trainer)
            lines = gains(trainer) + [line for check in trainer.checks for line in check.summary()]
            self._entry["gained"] = lines
            self._write(trainer)
            if lines:
                logger.info("\n  ".join(["What titan_ext changed, on this rank:", *lines]))

    def _write(self, trainer: Any) -> None:
        path = Path(trainer.config.dump_folder) / RECORD
        starts = json.loads(path.read_text())["starts"] if path.exists() else []
        others = [start for start in starts if start["id"] != self._entry["id"]]
        path.write_text(json.dumps({"starts": [*others, self._entry]}, indent=1) + "\n")


def origin() -> dict[str, Any]:
    """Command line, commit, versions and machine of this process."""
    return {
        "id": f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}",
        "started": _now(),
        "command": shlex.join([*sys.orig_argv]),
        "folder": str(Path.cwd()),
        "commit": {
            name: commit
            for name, at in (("titan_ext", Path(titan_ext.__file__).parent), (".", Path.cwd()))
            if (commit := _commit(at))
        },
        "versions": {"python": platform.python_version()} | versions(),
        "host": socket.gethostname(),
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
    }


def versions() -> dict[str, str]:
    """Of the packages that a run depends on, by name."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _commit(folder: Path) -> str:
    """The commit checked out in ``folder``, with "-dirty" if files differ; "" outside of git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def gains(trainer: Any) -> list[str]:
    """Lines on what titan_ext changed for this rank; none for what is not known."""
    lines = []
    with contextlib.suppress(ValueError):  # nothing predicts this layout
        lines += _parameters(trainer)
    return [*lines, *_exchanges(trainer), *_activations(trainer)]


def _parameters(trainer: Any) -> list[str]:
    """What FSDP holds and how often it communicates, beside the same with whole blocks.

    Raises ValueError if that cannot be predicted.
    """
    units = predictable_units(map(plan_of, trainer.model_parts))
    order = step_order(trainer)
    peak, counts = _peak_and_collectives(units, order)
    if not splits_blocks(units):
        return [f"parameters unsharded at once: at most {peak} (predicted)"]
    limits = FSDPSettings.from_config(trainer.config.parallelism).prefetch_limits
    stock = replace(order, copies_out_directly=False, frees_buffers=False)
    whole_peak, whole_counts = _peak_and_collectives(with_whole_blocks(units, *limits), stock)
    return [
        f"parameters unsharded at once: at most {peak}; with whole blocks {whole_peak} (predicted)",
        f"FSDP collectives a step: {counts}; with whole blocks {whole_counts} (predicted)",
    ]


def _peak_and_collectives(units: Sequence[UnitPlan], order: StepOrder) -> tuple[str, str]:
    timeline = predict(units, order)
    alone = {
        f"{unit.name}/experts" if index else unit.name
        for unit in units
        for index, group in enumerate(unit.groups)
        if group.shard_world == 1
    }
    gathers = sum(count for name, count in timeline.unshards().items() if name not in alone)
    events = Counter(event.unit for event in timeline.events if event.action == "reduce")
    reduces = 0
    for unit in units:  # one event for each group with gradients, also where nothing is sent
        worlds = [g.shard_world for g in unit.groups if any(p.requires_grad for p in g.params)]
        reduces += events[unit.name] * sum(world > 1 for world in worlds) // max(len(worlds), 1)
    peak = format_bytes(timeline.peak("unsharded"))
    return peak, f"{gathers} all-gathers, {reduces} reduce-scatters"


def with_whole_blocks(
    units: Sequence[UnitPlan], forward: PrefetchLimit, backward: PrefetchLimit
) -> list[UnitPlan]:
    """The plan in which each block is one unit: that of stock TorchTitan."""
    merged = []
    for name, parts_of_block in groupby(units, key=attrgetter("block")):
        parts = list(parts_of_block)
        if parts[0].kind not in BLOCK_KINDS:
            merged += parts
            continue
        params: dict[tuple[Any, int], list[Any]] = {}
        for group in (group for part in parts for group in part.groups):
            params.setdefault((group.kind, group.shard_world), []).extend(group.params)
        merged.append(
            replace(
                parts[0],
                name=name,
                kind=UnitKind.BLOCK,
                module_names=(name,),
                groups=tuple(
                    GroupPlan(kind=kind, shard_world=world, params=tuple(found))
                    for (kind, world), found in params.items()
                ),
            )
        )
    towers = [unit for unit in merged if unit.kind is UnitKind.VISION]
    return [*towers, *plan_prefetch(merged[len(towers) :], forward, backward)]


def _exchanges(trainer: Any) -> list[str]:
    """All-to-alls of a MoE layer, where policy and backend are known to repeat them or not."""
    policy = trainer.config.activation_checkpoint
    if trainer.parallel_dims.ep == 1 or trainer.parallel_dims.pp_enabled:
        return []
    parallelism, compiled = trainer.config.parallelism, compiles_model(trainer.config.compile)
    saves = saves_all_to_all(parallelism, trainer.parallel_dims.ep, compiled=compiled)
    is_ours = isinstance(policy, FP8AC.Config)
    early = is_ours and policy.score_before_last_gemm  # scores travel, and their gradients
    ours = _EXCHANGES + (2 if early else 0)
    if (is_ours and policy.mode == "no_recompute") or (heeds_save_all_to_all(policy) and saves):
        again = 0
    elif heeds_save_all_to_all(policy):
        again = 1 if early and policy.preset != "stock" else 2 if is_ours else 3
    else:
        return []
    stock = _EXCHANGES + (0 if stock_saves_all_to_all(parallelism, compiled=compiled) else 3)
    return [
        f"all-to-alls a MoE layer and step: {ours + again}; stock selective {stock} (predicted)"
    ]


def _activations(trainer: Any) -> list[str]:
    rows = memory_report_of(trainer.model_parts).rows()
    if not rows:
        return []
    kept, exact, host = (
        sum(getattr(row, f) for row in rows) for f in ("nbytes", "original_nbytes", "host_nbytes")
    )
    on_host = f" on the device, {format_bytes(host)} on the host" if host else ""
    return [
        f"activations kept for backward: {format_bytes(kept)}{on_host} a forward; not compressed: "
        f"{format_bytes(exact)} ({kept / exact:.2f})"
    ]


@contextlib.contextmanager
def _never_fails() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.warning(f"the record of the run is not complete: {type(error).__name__}: {error}")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
