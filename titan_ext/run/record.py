# SPDX-License-Identifier: BSD-3-Clause
"""What a run leaves in its folder: its config, its record, and its second step beside the plan.

Rank 0 writes ``config.toml``, which starts the same run again, and ``run.json``, with one entry for
each start: where it comes from, how it ended, and receipts of what really ran. A config says which
attention, which dispatcher and which compiler were wanted. Kernels fall back, a compiler gives up
at its recompile limit, and a communication library chooses for itself. So the modules are asked.

A plan is the file of a dry run, in a process of its own. Nothing here can fail a run.
"""

import contextlib
import functools
import json
import operator
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

import titan_ext
from titan_ext.base.messages import and_more, format_bytes, without_phases
from titan_ext.base.nodes import ranks_per_node
from titan_ext.base.run_check import RunCheck, world_size
from titan_ext.base.run_folder import RECORD
from titan_ext.base.tensors import optimizer_states, storages_of
from titan_ext.fsdp.names import matches
from titan_ext.toml.convert import dump, identity

CONFIG = "config.toml"
_PACKAGES = ("titan_ext", "torchtitan", "torch", "torchao", "triton")
_COMPARED_STEP = 2
"""The step of this start that is held against the plan: the first one makes optimizer states."""
_LIMIT = "recompile limit"
_PEAKS = {"allocated": "peak", "reserved": "reserved"}
"""Peaks of torch's device modules, and as a comparison names them."""
_HELD = {
    "parameters": "parameters and buffers",
    "gradients": "gradients",
    "states": "optimizer states",
}
"""Categories that last between steps, as a plan's file names them, and in words."""
# A child with these variables would take itself for a rank of this job.
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


class RunRecord(RunCheck):
    """Writes the record of this start; at the end of training, its ending and the receipts."""

    def __init__(self) -> None:
        self._entry: dict[str, Any] = {}

    def after_build(self, trainer: Trainer) -> None:
        if dist.get_rank() != 0:
            return
        with _never_fails():
            self._entry = origin()
            self._write(trainer)
            (Path(trainer.config.dump_folder) / CONFIG).write_text(dump(trainer.config))

    @contextlib.contextmanager
    def around_run(self, trainer: Trainer) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._end(trainer, f"{type(error).__name__}: {error}"[:500])
            raise
        is_done = trainer.step >= trainer.config.training.steps
        is_done |= getattr(trainer, "data_ended", False)
        self._end(trainer, "finished" if is_done else "stopped")

    def _end(self, trainer: Any, ending: str) -> None:
        if not self._entry:
            return
        with _never_fails():
            self._entry |= {"ended": _now(), "ending": ending, "step": trainer.step}
            self._write(trainer)
            receipts = [check.receipts() for check in trainer.checks]
            self._entry["receipts"] = functools.reduce(operator.or_, receipts, {})
            self._write(trainer)
            if trainer.step >= trainer.config.training.steps and ending == "finished":
                logger.info(what_is_next(trainer))

    def _write(self, trainer: Trainer) -> None:
        path = Path(trainer.config.dump_folder) / RECORD
        starts = json.loads(path.read_text())["starts"] if path.exists() else []
        others = [start for start in starts if start["id"] != self._entry["id"]]
        # A kill in the middle leaves the file as it was.
        partial = path.with_name(f"{RECORD}.part")
        partial.write_text(json.dumps({"starts": [*others, self._entry]}, indent=1) + "\n")
        partial.replace(path)


def what_is_next(trainer: Any) -> str:
    """For the end of a finished run: where its results are, and how training goes on."""
    checkpoint = trainer.config.checkpoint
    record = Path(trainer.config.dump_folder) / RECORD
    done = f"Finished at step {trainer.step}; {record} says what ran."
    if not checkpoint.enable or checkpoint.load_only:
        return f"{done} No checkpoint was saved; checkpoint.enable = true saves them."
    saved = f"{trainer.checkpointer.folder}/step-{trainer.step}"
    if not checkpoint.last_save_model_only:
        return f"{done} To train on from {saved}, start the same command with more training.steps."
    safetensors = " --checkpoint.initial_load_in_hf" if checkpoint.last_save_in_hf else ""
    return (
        f"{done} {saved} has the weights alone: a run in another dump_folder starts from them with "
        f"--checkpoint.initial_load_path {saved}{safetensors}."
    )


class Receipts(RunCheck):
    """Collects what really ran, and holds the second step against the plan of its rank, if any.

    Parameters, gradients and optimizer states are added up from the tensors that the trainer
    holds. The peak is what the device's allocator had given out at most, and "reserved" what it had
    taken from the device for that; a CPU's tells nothing.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._facts: dict[str, Any] = {}
        self._measured: dict[str, int] = {}
        self._plan: Mapping[str, Any] | None = None

    def before_build(self, config: Trainer.Config) -> None:
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

    def after_build(self, trainer: Trainer) -> None:
        self._facts = {
            "attention": _types(trainer, "inner_attention"),
            "dispatcher": _types(trainer, "token_dispatcher"),
            "communication": communication(),
        }

        def note(*_: Any) -> None:  # before Titan's metrics begin a new peak
            if self._steps == _COMPARED_STEP:
                self._measured = _peaks(trainer.device)

        if self._plan is not None:
            # Not at the end of around_step: Titan has logged by then, and reset the peak.
            trainer.optimizers.register_step_post_hook(note)

    @contextlib.contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        self._steps += 1
        if self._steps != _COMPARED_STEP or self._plan is None:
            yield
            return
        trainer.metrics_processor.device_memory_monitor.reset_peak_stats()
        yield
        self._compare(self._plan, trainer)

    def _compare(self, plan: Mapping[str, Any], trainer: Trainer) -> None:
        peaks = {"allocated": plan["peak"]["sum"], "reserved": plan.get("reserved", 0)}
        last = plan["moments"][-1]
        pairs = {_PEAKS[name]: (peaks[name], nbytes) for name, nbytes in self._measured.items()} | {
            words: (last[kind], nbytes)
            for (kind, words), nbytes in zip(_HELD.items(), _held_nbytes(trainer), strict=True)
        }
        said = [f"{name} {_compared(*pair)}" for name, pair in pairs.items()]
        if not self._measured:
            each = ", ".join(f"{_PEAKS[name]} {format_bytes(n)}" for name, n in peaks.items())
            said = [f"{each} planned, not measured on this device", *said]
        logger.info(f"Plan of rank {plan['rank']} and step {trainer.step}: {'; '.join(said)}")
        self._facts["plan"] = {
            name: {"planned": planned, "measured": nbytes}
            for name, (planned, nbytes) in pairs.items()
        }

    def receipts(self) -> dict[str, Any]:
        """By subject; what is not known is left out."""
        facts = {**self._facts, "compiled": compiled()}
        return {subject: fact for subject, fact in facts.items() if fact}


def _peaks(device: torch.device) -> dict[str, int]:
    """Bytes at most since the last reset, by name in torch's statistics; {} of a CPU."""
    module = torch.get_device_module(device)
    return {
        name: getattr(module, f"max_memory_{name}")(device)
        for name in _PEAKS
        if hasattr(module, f"max_memory_{name}")
    }


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
    """The versions of the packages that a run depends on, by name."""
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


def _types(trainer: Trainer, name: str) -> dict[str, int]:
    """The classes of the submodules or attributes of that name, and how many there are."""
    return Counter(
        type(value).__name__
        for part in trainer.model_parts
        for module in part.modules()
        if (value := getattr(module, name, None)) is not None
    )


def compiled() -> dict[str, Any]:
    """Graphs that Dynamo made, and how often it gave up at its recompile limit; {} without it."""
    graphs = counters["stats"]["unique_graphs"]
    if not graphs:
        return {}
    hit = sum(n for c in counters.values() for key, n in c.items() if _LIMIT in str(key).lower())
    return {"graphs": graphs, "recompile_limit_count": hit}


def communication() -> dict[str, Any]:
    """The backend, its version, and what the environment forces upon it."""
    if not dist.is_initialized():
        return {}
    found: dict[str, Any] = {"backend": dist.get_backend()}
    if "nccl" in found["backend"] and torch.cuda.is_available():
        found["version"] = ".".join(map(str, torch.cuda.nccl.version()))
    chosen = {k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "RCCL_"))}
    return found | ({"environment": chosen} if chosen else {})


def dry_run_elsewhere(
    file: Path, options: Sequence[str], *, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """``titan_ext dry-run FILE`` with ``options`` in a process of its own.

    Titan allows one layout in a process, and a run must not keep a dry run's fake groups. After
    ``timeout_s`` it raises ``subprocess.TimeoutExpired``. Its output is in the result.
    """
    done = subprocess.run(
        [sys.executable, "-m", "titan_ext", "dry-run", str(file), *options],
        env={key: value for key, value in os.environ.items() if not key.startswith(_OF_TORCHRUN)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    done.stderr = without_phases(done.stderr)
    return done


def file_name(rank: int) -> str:
    """The name of the file with the plan of a rank."""
    return f"plan_rank{rank}.json"


def as_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` as a JSON file gives it back; an enum is its value."""
    return json.loads(json.dumps(config, default=lambda value: str(getattr(value, "value", value))))


def _held_nbytes(trainer: Trainer) -> list[int]:
    """Bytes of this rank's storages, in the order of ``_HELD``; shared ones count once."""
    parts = trainer.model_parts
    params = [param for part in parts for param in part.parameters()]
    buffers = [buffer for part in parts for buffer in part.buffers()]
    grads = [param.grad for param in params if param.grad is not None]
    nbytes, seen = [], set()
    for tensors in ([*params, *buffers], grads, optimizer_states(trainer.optimizers)):
        found = {key: size for tensor in tensors for key, size in storages_of(tensor)}
        nbytes.append(sum(size for key, size in found.items() if key not in seen))
        seen |= found.keys()
    return nbytes


def _compared(planned: int, measured: int) -> str:
    if planned == measured:
        return f"{format_bytes(planned)} as planned"
    off_by = f" ({measured / planned - 1:+.1%})" if planned else ""
    return f"{format_bytes(planned)} planned, {format_bytes(measured)} measured{off_by}"


def differences(plan: Mapping[str, Any], config: Trainer.Config) -> list[str]:
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


@contextlib.contextmanager
def _never_fails() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.warning(f"the record of the run is not complete: {type(error).__name__}: {error}")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
