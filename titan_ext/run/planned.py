# SPDX-License-Identifier: BSD-3-Clause
"""A run and its plan: a dry run in a process of its own, and a step held against what it said."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torchtitan.tools.logging import logger

from titan_ext.base.messages import and_more, format_bytes, matches
from titan_ext.base.op_cost import ranks_per_node
from titan_ext.base.run_check import RunCheck, world_size
from titan_ext.base.tensors import storages_of
from titan_ext.toml.values import identity

_GIB = 2**30
_HELD = {
    "parameters": "parameters and buffers",
    "gradients": "gradients",
    "states": "optimizer states",
}
"""Categories that last between steps, as a plan's file names them, and in words."""
_OF_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_",
    "WORLD_SIZE",
    "MASTER_",
    "TORCHELASTIC_",
)
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
    "optimizer.param_groups.*.optimizer_kwargs",  # and what those make is compared in bytes
)


def dry_run_elsewhere(
    file: Path, options: Sequence[str], *, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """``titan_ext dry-run FILE`` with ``options`` in a process of its own.

    Titan allows one layout in a process, and a run must not keep a dry run's fake groups. After
    ``timeout_s`` it raises ``subprocess.TimeoutExpired``. Its output is in the result.
    """
    return subprocess.run(
        [sys.executable, "-m", "titan_ext", "dry-run", str(file), *options],
        env={key: value for key, value in os.environ.items() if not key.startswith(_OF_TORCHRUN)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def file_name(rank: int) -> str:
    """The name of the file with the plan of a rank."""
    return f"plan_rank{rank}.json"


def as_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` as a JSON file gives it back."""
    return json.loads(json.dumps(config, default=str))


class PlanCheck(RunCheck):
    """Holds the second step of a run against the plan of its rank, where its folder has one.

    Parameters, gradients and optimizer states are added up from the tensors that the trainer
    holds. The peak is what the device's allocator had given out at most, and "reserved" what it had
    taken from the device for that; a CPU's tells nothing.
    """

    _plan: Mapping[str, Any] | None = None
    _measured: Mapping[str, int] = MappingProxyType({})
    _steps = 0
    _said = ""
    _pairs: Mapping[str, Mapping[str, int]] = MappingProxyType({})

    def summary(self) -> list[str]:
        return [self._said] if self._said else []

    def receipts(self) -> dict[str, Any]:
        return {"plan": self._pairs} if self._pairs else {}

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
        self._measured = {
            name: getattr(device, f"max_memory_{what}")(trainer.device)
            for name, what in (("peak", "allocated"), ("reserved", "reserved"))
            if hasattr(device, f"max_memory_{what}")
        }

    def _compare(self, plan: Mapping[str, Any], trainer: Any) -> None:
        planned = plan["moments"][-1]
        pairs = {
            words: (planned[kind], nbytes)
            for (kind, words), nbytes in zip(_HELD.items(), _held_nbytes(trainer), strict=True)
        }
        peaks = {"peak": plan["peak"]["sum"], "reserved": plan.get("reserved", 0)}
        pairs = {name: (peaks[name], nbytes) for name, nbytes in self._measured.items()} | pairs
        said = [f"{name} {_compared(*pair)}" for name, pair in pairs.items()]
        if not self._measured:
            each = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in peaks.items())
            said = [f"{each} planned, not measured on this device", *said]
        self._said = f"Plan of rank {plan['rank']} and step {trainer.step}: {'; '.join(said)}"
        logger.info(self._said)
        self._pairs = {
            name: {"planned": planned, "measured": measured}
            for name, (planned, measured) in pairs.items()
        }
        metrics = {
            f"plan/{name}, {what}(GiB)": nbytes / _GIB
            for name, pair in self._pairs.items()
            for what, nbytes in pair.items()
        }
        trainer.metrics_processor.logger.log(metrics, trainer.step)


def _held_nbytes(trainer: Any) -> list[int]:
    """Bytes of this rank's storages, in the order of ``_HELD``; shared ones count once."""
    parts = trainer.model_parts
    params = [param for part in parts for param in part.parameters()]
    buffers = [buffer for part in parts for buffer in part.buffers()]
    of_params = [state for opt in trainer.optimizers for state in opt.state.values()]
    states = [x for state in of_params for x in state.values()]
    nbytes, seen = [], set()
    for tensors in ([*params, *buffers], [param.grad for param in params], states):
        found = {}
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                found |= dict(storages_of(tensor))
        nbytes.append(sum(size for key, size in found.items() if key not in seen))
        seen |= found.keys()
    return nbytes


def _compared(planned: int, measured: int) -> str:
    if planned == measured:
        return f"{format_bytes(planned)} as planned"
    off_by = f" ({measured / planned - 1:+.1%})" if planned else ""
    return f"{format_bytes(planned)} planned, {format_bytes(measured)} measured{off_by}"


def differences(plan: Mapping[str, Any], config: Any) -> list[str]:
    """Facts of a plan that are not so in this run, in words."""
    nodes = {"ranks": world_size(config), "ranks_per_node": ranks_per_node()}
    here = nodes | as_json(identity(config))
    there = {key: plan[key] for key in nodes} | plan["config"]
    return [
        f"{key} is {there.get(key, 'absent')} there and {here.get(key, 'absent')} here"
        for key in dict.fromkeys([*there, *here])
        if there.get(key) != here.get(key)
        and (key in nodes or key.split(".")[0] in _COMPARED)
        and not any(matches(key, pattern) for pattern in _NOT_COMPARED)
    ]
