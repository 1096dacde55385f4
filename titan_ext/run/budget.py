# SPDX-License-Identifier: BSD-3-Clause
"""``activation_checkpoint.budget`` in a run: its table is solved for before the run starts.

Rank 0 starts ``titan_ext dry-run --activations`` (``plan.budget``), in a process of its own: a dry
run has a fake process group and fake tensors, which a trainer must not keep. The other ranks get
its table: if one rank saved what another sends again, both would wait forever. ``budget/`` in the
run's folder has the table.
"""

import os
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools import utils as titan_utils
from torchtitan.tools.logging import logger

from titan_ext.activation_checkpoint.op_rules import FIT, KEY, Budget, has_budget
from titan_ext.base import no_accelerator
from titan_ext.base.agreement import this_job
from titan_ext.base.nodes import ranks_per_node
from titan_ext.base.run_check import ONE_PROCESS_MODES, RunCheck, world_size
from titan_ext.run.record import dry_run_elsewhere
from titan_ext.toml.convert import dump, identity

FOLDER = "budget"
"""In the run's folder."""
_CONFIG, _MACHINE, _SOLVED = "config.toml", "machine.toml", "budget.toml"
_SHARE = 0.9
"""Share of ``comm.init_timeout_seconds``, for which the other ranks wait."""


def solve_elsewhere(
    config: Any, ranks: int, folder: Path, options: Sequence[str], timeout_s: float | None = None
) -> tuple[dict[str, Any], str]:
    """Solve for the budget of ``config`` as rank 0 of ``ranks``, in a process of its own.

    ``config`` is from a TOML file or a config function, and stays as it is. Files go to ``folder``;
    ``options`` are more of ``titan_ext dry-run``. Returns the section [activation_checkpoint] and a
    report. Raises ValueError if the budget cannot be met, or not in time.
    """
    policy = config.activation_checkpoint
    if not identity(config)["extends"]:
        raise ValueError(
            f"{KEY}.budget is {policy.budget!r}, and this config was made in Python: a dry run of "
            "it cannot start. Expected a TOML file, or the name of a config function."
        )
    folder.mkdir(parents=True, exist_ok=True)
    budget = Budget.parse(policy.budget)
    file = folder / _CONFIG
    file.write_text(dump(config))
    amount = FIT if budget.nbytes is None else _size(budget.nbytes)
    options = ["--ranks", str(ranks), "--activations", amount, "--out", str(folder), *options]
    try:
        done = dry_run_elsewhere(file, options, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{KEY}.budget is {policy.budget!r}, and solving for it takes longer than "
            f"{timeout_s:.0f} s. Expected more comm.init_timeout_seconds, for which the other "
            f"ranks wait, or the {KEY}.op_policies that titan_ext dry-run --activations finds."
        ) from None
    if done.returncode:
        reason = done.stderr.strip().removeprefix(f"{file}: ")
        raise ValueError(f"{KEY}.budget is {policy.budget!r}: {reason}")
    section = tomllib.loads((folder / _SOLVED).read_text())[KEY]
    return section, done.stdout.partition("\n\n")[0].strip()


def _size(nbytes: int) -> str:
    """``nbytes`` as the command line takes it."""
    return f"{nbytes / 2**10}KiB"


class ActivationBudget(RunCheck):
    """Turns ``budget`` into the ``op_policies`` of all ranks, before the model is built."""

    _section: dict[str, Any] | None = None

    def before_start(self, config: Any) -> None:
        """Raise ValueError for a budget that cannot be met."""
        if not has_budget(config):
            return
        if os.environ.get("RANK", "0") == "0":
            self._section = _solve(config)

    def before_build(self, config: Any) -> None:
        """Give all ranks the table of rank 0."""
        if not has_budget(config):
            return
        if config.comm.mode not in ONE_PROCESS_MODES:
            self._section = this_job().broadcast("solved budget", lambda: self._section)
        assert self._section is not None
        use(config, self._section)


def use(config: Any, section: dict[str, Any]) -> None:
    """Let ``config`` have the solved section [activation_checkpoint] in place of its budget."""
    policy = config.activation_checkpoint
    if section["policy"] == "none":
        config.activation_checkpoint = None
        return
    solved = {"budget": "", "offload_limit": ""} | section
    keys = ("budget", "preset", "op_policies", "solved_with", "offload_limit")
    config.activation_checkpoint = replace(
        policy, **{key: solved[key] for key in keys if key in solved}
    )


def solve_in_dry_run(config: Any, ranks: int, memory: Sequence[str], options: Sequence[str]) -> str:
    """Do in a dry run what a run does: give ``config`` the table for its budget; a report.

    ``memory`` is the command's ``["--memory", "80GiB"]``, if given; ``options`` are more of its.
    Raises ValueError for a budget that cannot be met.
    """
    budget = Budget.parse(config.activation_checkpoint.budget)
    if budget.memory is not None:
        memory = ["--memory", _size(budget.memory)]
    elif budget.nbytes is None and not memory:
        raise ValueError(f'{KEY}.budget is "{FIT}": expected --memory, which says what is left.')
    if budget.nbytes is None:
        options = [*memory, *options]
    with tempfile.TemporaryDirectory() as folder:
        section, report = solve_elsewhere(config, ranks, Path(folder), options)
    use(config, section)
    return report


def _device_memory() -> int:
    if no_accelerator.needed():
        raise ValueError(
            f'{KEY}.budget is "{FIT}", and this machine has no device whose memory that could be. '
            f'Expected a size, such as "20GiB", or "{FIT} 80GiB".'
        )
    device = titan_utils.get_local_device()
    return torch.get_device_module(device).get_device_properties(device).total_memory


def _solve(config: Any) -> dict[str, Any]:
    from titan_ext.base.machines import MACHINES, machine_toml  # of planning: here alone

    budget = Budget.parse(config.activation_checkpoint.budget)
    memory = budget.memory or (None if budget.nbytes else _device_memory())
    ranks, folder = world_size(config) or 1, Path(config.dump_folder) / FOLDER
    text = config.activation_checkpoint.budget
    logger.info(f"{KEY}.budget {text}: a dry run of rank 0 of {ranks} looks for the best policies.")
    # The nodes of this run, and no card's name: what a converter may use is asked of this one.
    here = ranks_per_node()
    machine = replace(MACHINES["h100"], ranks_per_node=here, nvlink_domain=here)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MACHINE).write_text("\n".join(machine_toml(machine)) + "\n")
    options = ["--machine", str(folder / _MACHINE)]
    options += [] if memory is None else ["--memory", _size(memory)]
    options += ["--on-cpu"] if no_accelerator.needed() else []
    section, report = solve_elsewhere(
        config, ranks, folder, options, _SHARE * config.comm.init_timeout_seconds
    )
    logger.info(f"{report}\n{folder / _SOLVED} has the table; all ranks use it.")
    return section
