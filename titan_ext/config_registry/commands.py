# SPDX-License-Identifier: BSD-3-Clause
"""The command line tool: ``titan_ext show | dry-run | tune | peft | check``.

Commands are dataclasses that tyro parses. What it does not know are Titan's flags, which tyro
parses again over the config. Nothing here imports torch before a command needs it.
"""

import functools
import gc
import json
import operator
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from titan_ext.base.machines import machine_of
from titan_ext.base.messages import Mistakes, did_you_mean, size_of
from titan_ext.config_registry.terminal import coloured, quiet, working
from titan_ext.config_registry.tune import Tune
from titan_ext.toml.files import check_new_file, nearest, to_toml
from titan_ext.toml.find import extends_in, listing, read_chain, written_for

if TYPE_CHECKING:
    from titan_ext.config_registry.resolve import Resolved
    from titan_ext.plan.memory import DeviceMemory
    from titan_ext.run.budget import BudgetPlan

_DESCRIPTION = (
    "titan_ext: train mixture-of-experts models with TorchTitan in less memory. "
    "CONFIG is the path of a TOML file, the name of a shipped one (moe_debug.toml), a function "
    "of TorchTitan's models (deepseek_v3_16b), or one of yours (my_runs.my_16b). titan_ext show "
    "lists them. Titan's flags (--training.steps 50) go after it and win over the file."
)
_Config = Annotated[str, tyro.conf.arg(metavar="CONFIG")]
_OPTIONS = (("memory",), ("imbalance", "machine", "stock"))
"""Options that dry-run hands to processes of its own: the budget, and the model of a step."""
_MOST_RANKS = 2**20
_DOES_NOT_FIT = 3
"""Exit code of dry-run where a step needs more than --memory."""


@dataclass
class Show:
    """Print every value that a run would have and where it comes from, as a TOML file.

    Without CONFIG: the shipped files, and TorchTitan's models with their config functions.
    """

    config: tyro.conf.Positional[_Config] = ""
    """The config to show."""
    changed: bool = False
    """Only what differs from the config function at the end of the chain."""
    out: Path | None = None
    """A TOML file to write in place of that. With --changed it extends CONFIG, with Titan's flags
    as its first keys."""

    def run(self, flags: list[str]) -> None:
        if not self.config:
            if self.changed or self.out:
                raise ValueError("--changed and --out need CONFIG; titan_ext show lists them.")
            print(*listing(), sep="\n")
            return
        if self.out is not None:
            check_new_file(self.out)
        from titan_ext.config_registry.resolve import resolve

        resolved = resolve(self.config, flags)
        if self.out is None:
            print(*self._lines(resolved), sep="\n")
            return
        base = extends_in(self.out.parent, self.config)
        values = {"dump_folder": to_toml(f"./outputs/{self.out.stem}")}
        values |= {key: value for key, value, _ in resolved.given()}
        short = [f"extends = {to_toml(base)}", *(f"{k} = {value}" for k, value in values.items())]
        self.out.write_text("\n".join(short if self.changed else self._lines(resolved)) + "\n")
        extended = base if self.changed else resolved.base
        print(f"{self.out} extends {extended}; titan_ext show {self.out} prints all its values.")

    def _lines(self, resolved: "Resolved") -> list[str]:
        return [
            f"# {' <- '.join([resolved.base, *resolved.files])}",
            f"extends = {to_toml(resolved.base)}",
            *(
                f"{key} = {value}  # from {origin}"
                for key, value, origin in resolved.lines(
                    lambda origin: not self.changed or origin != resolved.base
                )
            ),
        ]


@dataclass
class DryRun:
    """Try the start and one step of a large job on this machine, at its real size.

    The model is parallelized as on the cluster and one step runs on tensors without data. Nothing
    is allocated, loaded or downloaded, no GPU is used, and nothing is written without --out.
    """

    config: tyro.conf.Positional[_Config]
    """The config to try."""
    ranks: int
    """Number of the job's GPUs."""
    rank: int = 0
    """The rank to simulate. Each stage of a pipeline is a block of consecutive ranks."""
    all_stages: bool = False
    """One rank of every pipeline stage, one after another."""
    memory: str = ""
    """Memory of each GPU, such as 80GiB: plan the bytes of a step, and whether they fit."""
    stock: bool = False
    """Plan the same job with stock TorchTitan: without titan_ext and its keys."""
    machine: str = ""
    """Time a step on this: h100, h100hbm2e, h200, b200, b300, gb200, gb300, mi300x, mi355x, or a
    TOML file with rates of your card and the GPUs of a node (docs/plan.md)."""
    activations: str = ""
    """Bytes that the blocks may hold for backward, such as 20GiB, or "fit" for all that --memory
    leaves: find the best activation checkpointing for that."""
    on_cpu: bool = False
    """With --activations: for a run on CPUs, with their kernels."""
    imbalance: float = 1.0
    """Tokens of the rank's experts, as a multiple of their balanced share."""
    out: Path | None = None
    """Folder to write into. With --memory: plan_rank0.json and a picture of it; a run whose
    dump_folder it is compares itself with its plan. With --activations: budget.toml."""
    against: tuple[_Config, ...] = ()
    """Other configs to plan, listed best first; with --memory. They get none of Titan's flags."""
    verbose: bool = False
    """Print the log of the start as well, with FSDP's plan."""

    def run(self, flags: list[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._run(flags, Path(folder))

    def _run(self, flags: list[str], folder: Path) -> None:
        memory = size_of("--memory", self.memory)
        machine = machine_of(self.machine or "h100")  # for its nodes
        of_machine = machine.capability if self.machine else None
        fits, no_plan = self.activations == "fit", not (self.memory or self.activations)
        activations = None if fits else size_of("--activations", self.activations)
        ranks = f"--ranks is {self.ranks} and --rank is {self.rank}; expected 1 to {_MOST_RANKS:,}"
        for is_wrong, problem in (
            (
                fits and not memory,
                "--activations fit needs --memory: what it leaves is the budget.",
            ),
            (
                self.activations and self.all_stages,
                "--activations plans one rank: expected --rank, not --all-stages.",
            ),
            (self.out and no_plan, "--out needs --memory: without it there is no plan."),
            (self.against and not memory, "--against needs --memory: without it there is no plan."),
            (self.on_cpu and not self.activations, "--on-cpu needs --activations."),
            (self.all_stages and self.rank, "--all-stages tries one of each: expected no --rank."),
            (not 0 <= self.rank < self.ranks <= _MOST_RANKS, f"{ranks} ranks, and a rank below."),
        ):
            if is_wrong:
                raise ValueError(problem)
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported
        gc.disable()  # imports alone make it walk millions of objects, and we end soon
        from titan_ext.activation_checkpoint.solved import has_budget
        from titan_ext.base import no_accelerator
        from titan_ext.config_registry.resolve import resolve
        from titan_ext.parallelize.limits import wrong_degrees
        from titan_ext.plan.dry_run import dry_run
        from titan_ext.plan.elsewhere import compare
        from titan_ext.plan.memory import DeviceMemory
        from titan_ext.plan.report import to_json, write
        from titan_ext.plan.stand_ins import as_rank, as_stock
        from titan_ext.run.budget import solve_in_dry_run
        from titan_ext.toml.values import dump, identity

        budget = None if memory is None else DeviceMemory(memory=memory)
        nodes = machine.ranks_per_node, machine.nvlink_domain
        with as_rank(self.ranks, self.rank, *nodes):
            with no_accelerator.as_with_an_accelerator(of_machine):
                resolved = resolve(self.config, flags)
                config = resolved.config
            Mistakes(wrong_degrees(config, self.ranks)).raise_all()
            for file, ranks in written_for(resolved.files):
                if ranks != self.ranks:
                    print(f"{'note':12}{file} is written for {ranks} ranks; this is {self.ranks}")
            experts = config.parallelism.expert_parallel_degree
            if self.imbalance != 1 and not 0 <= self.imbalance <= experts:
                raise ValueError(
                    f"--imbalance is {self.imbalance:g}; expected 0 to {experts}, the "
                    "expert-parallel degree, at which the rank's experts get all tokens."
                )
            if self.activations:
                self._plan_activations(resolved, activations, budget)
                return
            if self.stock:
                as_stock(config)
            if has_budget(config):
                print(solve_in_dry_run(config, self.ranks, *map(self._words, _OPTIONS)))
            asked, source = identity(config), dump(config)  # a dry run changes its config
            if self.all_stages:
                plans = self._plan_all_stages(config, source, folder)
            else:
                run = dry_run(
                    config,
                    self.ranks,
                    self.rank,
                    budget=budget,
                    machine=self.machine,
                    imbalance=self.imbalance,
                )
                print(coloured(run.report()), flush=True)
                plans = [] if run.memory is None else [to_json(run, asked)]
                if self.out is not None:
                    write(plans[0], self.out)
        if not plans:
            return
        fullest = min(plans, key=lambda plan: plan["spare"])
        if self.all_stages:
            print(f"-- the fullest of {len(plans)} stages: {fullest['verdict']}", flush=True)
        if self.against:
            options = self._words(("ranks", *chain(*_OPTIONS)))
            others = {other: extends_in(folder, other) for other in self.against}
            for line in compare(folder, fullest, options, others):
                print(line, flush=True)
        elif not (fullest["fits"] or self.all_stages):
            print("            titan_ext tune, with the same options, finds what fits and is fast")
        if not fullest["fits"]:
            raise SystemExit(_DOES_NOT_FIT)

    def _plan_activations(
        self, resolved: "Resolved", activations: int | None, memory: "DeviceMemory | None"
    ) -> None:
        from titan_ext.plan.dry_run import plan_activations

        changed = [f"{key} = {value}" for key, value, _ in resolved.given()]
        plan = plan_activations(
            resolved.config,
            self.ranks,
            self.rank,
            budget=activations,
            memory=memory,
            imbalance=self.imbalance,
            machine=self.machine or "h100",
            as_on_a_gpu=not self.on_cpu,
        )
        print(plan.report())
        if self.out is not None:
            self._write_budget(plan, changed)
        fit = f"fit {self.memory}" if self.activations == "fit" else self.activations
        print(f'\nin a run: [activation_checkpoint] policy = "fp8", budget = "{fit}"')

    def _write_budget(self, plan: "BudgetPlan", changed: list[str]) -> None:
        assert self.out is not None
        file = self.out / "budget.toml"
        lines = [f"extends = {json.dumps(extends_in(self.out, self.config))}"]
        lines += [line for line in changed if not line.startswith("activation_checkpoint")]
        file.write_text("\n".join([*lines, "", *plan.toml_lines()]) + "\n")
        print(f"\n{file} extends {self.config} with this; the same file serves all ranks.")

    def _words(self, options: Iterable[str]) -> list[str]:
        """Options of this command as a command line has them."""
        given = [(f"--{name.replace('_', '-')}", getattr(self, name)) for name in options]
        return [*chain(*([at, str(value)][: 2 - (value is True)] for at, value in given if value))]

    def _plan_all_stages(self, config: Any, source: str, folder: Path) -> list[dict[str, Any]]:
        """In processes of their own: Titan allows one layout in a process."""
        from titan_ext.run.record import dry_run_elsewhere, file_name

        plans, out, file = [], self.out or folder, folder / "config.toml"
        groups: dict[int, int] = {}
        file.write_text(source)
        options = self._words(("ranks", *chain(*_OPTIONS), "verbose"))
        options += ["--out", str(out)] if self.memory else []
        stages = config.parallelism.pipeline_parallel_degree
        for rank in range(0, self.ranks, max(self.ranks // stages, 1)):
            print(f"-- rank {rank}", flush=True)
            of_rank = [*options, "--rank", str(rank)]
            done = dry_run_elsewhere(file, of_rank)
            sys.stderr.write(done.stderr)
            print(coloured(done.stdout), end="", flush=True)
            if done.returncode not in (0, _DOES_NOT_FIT):
                raise SystemExit(done.returncode)
            if (found := re.search(r"^groups +(\d+)", done.stdout, re.M)) is not None:
                groups[rank] = int(found[1])
            if self.memory:
                plans.append(json.loads((out / file_name(rank)).read_text()))
        if len(set(groups.values())) > 1:
            counts = ", ".join(f"rank {rank} {count}" for rank, count in groups.items())
            raise ValueError(
                "the stages make different numbers of process groups, which all ranks make "
                f"together: {counts}. The job would hang at its start; please report this config."
            )
        return plans


@dataclass
class Peft:
    """Export the LoRA adapters of a run for the peft library."""

    config: tyro.conf.Positional[_Config]
    """The --config of the run; its Titan flags, and --checkpoint.load_step, may follow."""
    output: Path | None = None
    """Folder to write; by default peft/step-N in the run's."""
    base_model: str = ""
    """Name of the base model; by default what the run started from."""

    def run(self, flags: list[str]) -> None:
        from titan_ext.components.lora import export_adapters
        from titan_ext.config_registry.resolve import resolve

        config = resolve(self.config, flags).config
        print(export_adapters(config, self.output, self.base_model))


@dataclass
class Check:
    """Check machines before a long job: links, versions, layout.

    Under torchrun, on all ranks: torchrun --nproc_per_node=8 -m titan_ext check CONFIG.
    """

    config: tyro.conf.Positional[_Config] = ""
    """The config whose layout to check; none by default."""
    machine: str = ""
    """The machine whose links to expect: h100, h200, b200, ... or a TOML file of rates."""
    mib: int = 16
    """MiB that two ranks send each other at a time."""

    def run(self, flags: list[str]) -> None:
        from titan_ext.base.op_cost import NVLINK_DOMAIN
        from titan_ext.config_registry.resolve import resolve
        from titan_ext.run import preflight

        machine = machine_of(self.machine or "h100")
        if self.mib < 1:
            raise ValueError(f"--mib is {self.mib}; expected 1 or more.")
        if "RANK" not in os.environ:
            raise ValueError(
                "titan_ext check runs on every rank of a job: torchrun --nproc_per_node=8 -m "
                "titan_ext check CONFIG."
            )
        # A rack's domain is larger than its nodes; any other is a node, which torchrun counts.
        is_rack = machine.nvlink_domain > machine.ranks_per_node
        os.environ[NVLINK_DOMAIN] = str(machine.nvlink_domain if is_rack else 0)
        config = resolve(self.config, flags).config if self.config else None
        lines = preflight.check(config, machine=self.machine, mib=self.mib)
        if lines:
            print(*lines, sep="\n")


_COMMANDS = {
    "show": Show,
    "dry-run": DryRun,
    "tune": Tune,
    "peft": Peft,
    "check": Check,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0, or 1 and one message for a mistake of the user's."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        _import_as_python_m()
        name = arguments[0] if arguments else ""
        if name not in _COMMANDS and name[:1] not in ("", "-"):
            raise ValueError(f"{name}: no such command{nearest(name, _COMMANDS)}")
        command, flags = _parse(arguments)
        with quiet(getattr(command, "verbose", False)), working(name, command):
            command.run(flags)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough: titan_ext show | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"{error.filename or 'writing'}: {error.strerror or error}.", file=sys.stderr)
        return 1
    except (ValueError, AssertionError, ImportError, NotImplementedError) as error:
        if not str(error):
            raise
        print(error, file=sys.stderr)
        return 1
    return 0


def _import_as_python_m() -> None:
    """Find modules in the current folder, where a user's config functions are.

    The installed script has its own folder on Python's path in place of it.
    """
    here = str(Path.cwd())
    if not sys.flags.safe_path and here not in sys.path:
        sys.path.insert(0, here)


def _parse(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The command, and Titan's flags. Raises ValueError for what is neither, and missing files."""
    named = (Annotated[cls, tyro.conf.subcommand(name)] for name, cls in _COMMANDS.items())
    command, flags = tyro.cli(
        functools.reduce(operator.or_, named),
        prog="titan_ext",
        description=_DESCRIPTION,
        args=arguments,
        return_unknown_args=True,
    )
    # tyro 1.0 reads a positional that is left out as "[]" where words follow that it does not know.
    if flags and command.config in ("", "[]"):
        raise ValueError(
            f"unknown: {' '.join(flags)}; expected CONFIG before Titan's flags: titan_ext "
            f"{arguments[0]} --help."
        )
    options = [f"--{field.name.replace('_', '-')}" for field in fields(command)]
    for flag in (flag for flag in flags if flag.startswith("-") and "." not in flag):
        if (meant := did_you_mean(flag, options)) != ".":
            raise ValueError(f"{flag}: no option of titan_ext {arguments[0]}{meant}")
    for config in (command.config, *getattr(command, "against", ())):
        if config:
            read_chain(config)
    return command, flags
