# SPDX-License-Identifier: BSD-3-Clause
"""The commands around a run: ``titan_ext report | target | peft | check``.

``commands.py`` parses them. Nothing here imports torch before a command needs it.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from titan_ext.config_registry import resolve_config


@dataclass
class Report:
    """Draw the loss of a run into its folder and print a line about it."""

    folder: tyro.conf.Positional[Path]
    """dump_folder of the run."""

    def run(self, flags: list[str]) -> None:
        from titan_ext.base.run_folder import report

        print(report(self.folder))


@dataclass
class Target:
    """Print the step at which the next run in a folder ends; make train asks."""

    folder: tyro.conf.Positional[Path]
    """dump_folder of the run."""
    steps: int
    """Steps of a run."""

    def run(self, flags: list[str]) -> None:
        from titan_ext.base.run_folder import next_target

        if self.steps < 1:
            raise ValueError(f"--steps is {self.steps}; expected 1 or more.")
        print(next_target(self.folder, self.steps))


@dataclass
class Peft:
    """Export the LoRA adapters of a run for the peft library."""

    config: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="CONFIG")]]
    """What the run has as --config; its Titan flags, and --checkpoint.load_step, may follow."""
    output: Path | None = None
    """Folder to write; by default peft/step-N in the run's."""
    base_model: str = ""
    """Name of the base model; by default what the run started from."""

    def run(self, flags: list[str]) -> None:
        from titan_ext.components.lora import export_adapters

        config = resolve_config(self.config, flags).config
        print(export_adapters(config, self.output, self.base_model))


@dataclass
class Check:
    """Check machines before a long job: links, versions, layout.

    Under torchrun, on all ranks: torchrun --nproc_per_node=8 -m titan_ext check CONFIG.
    """

    config: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="CONFIG")]] = ""
    """Whose layout to judge; none by default."""
    machine: str = ""
    """Whose links to expect: h100, h200, b200, ... or a TOML file of rates."""
    mib: int = 16
    """What two ranks send each other at a time."""
    nvlink_domain: int = 0
    """Neighbouring GPUs that NVLink joins: 72 on GB200 and GB300; 0 for a node's."""

    def run(self, flags: list[str]) -> None:
        from titan_ext.base.machines import machine_of
        from titan_ext.base.op_cost import NVLINK_DOMAIN
        from titan_ext.run import preflight

        if self.machine:
            machine_of(self.machine)
        if self.mib < 1 or self.nvlink_domain < 0:
            raise ValueError(
                f"--mib is {self.mib} and --nvlink-domain {self.nvlink_domain}; expected 1 or "
                "more, and 0 or more."
            )
        if "RANK" not in os.environ:
            raise ValueError(
                "titan_ext check runs on every rank of a job: torchrun --nproc_per_node=8 -m "
                "titan_ext check CONFIG."
            )
        os.environ[NVLINK_DOMAIN] = str(self.nvlink_domain)
        config = resolve_config(self.config, flags).config if self.config else None
        lines = preflight.check(config, machine=self.machine, mib=self.mib)
        if lines:
            print(*lines, sep="\n")
