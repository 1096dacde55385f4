# SPDX-License-Identifier: BSD-3-Clause
"""``titan_ext dry-run``: the options of the command, and what it plans in other processes.

The step itself is ``plan.dry_run``. Nothing here imports torch before the command needs it.
"""

import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from titan_ext.base.machines import MEMORY, machine_of
from titan_ext.base.messages import Mistakes, size_of
from titan_ext.config_registry.terminal import phase, start_without_a_gpu
from titan_ext.toml.files import extends_in, ranks_of, to_toml

if TYPE_CHECKING:
    from titan_ext.config_registry.resolve import Resolved

_MODEL = "imbalance", "machine", "stock"
"""Options that say of what a step is planned; other processes get them, too."""
_MOST_RANKS = 2**20
_DOES_NOT_FIT = 3
"""Exit code where a step needs more than --memory."""


@dataclass
class DryRun:
    """Try the start and one step of a large job on this machine, at its real size.

    The model is parallelized as on the cluster and one step runs on tensors without data. Nothing
    is allocated, loaded or downloaded, no GPU is used, and nothing is written without --out.
    """

    config: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="CONFIG")]]
    """The config to try."""
    ranks: int = 0
    """Number of the job's GPUs; by default the file's world_size."""
    rank: int = 0
    """The rank to simulate. Each stage of a pipeline is a block of consecutive ranks."""
    all_stages: bool = False
    """Plan one rank of every pipeline stage, one after another."""
    memory: str = ""
    """Memory of each GPU, such as 80GiB: plan the bytes of a step, and whether they fit. With
    --machine the default is what torch finds on such a GPU."""
    stock: bool = False
    """Plan the same job with stock TorchTitan: without titan_ext and its keys."""
    machine: str = ""
    """Time a step on this: h100, h100hbm2e, h200, b200, b300, gb200, gb300, mi300x, mi355x, or a
    TOML file with rates of your card and the GPUs of a node (docs/plan.md)."""
    activations: str = ""
    """Bytes that the blocks may hold for backward, such as 20GiB, or "fit" for all that --memory
    leaves: find the best activation checkpointing for that."""
    on_cpu: bool = False
    """With --activations: solve for a run on CPUs, with their kernels."""
    imbalance: float = 1.0
    """Tokens of the rank's experts, as a multiple of their balanced share."""
    out: Path | None = None
    """Folder for what is found. With --memory: plan_rank0.json and a picture of it. A run with this
    dump_folder compares itself with the plan. With --activations: budget.toml."""
    verbose: bool = False
    """Print the log of the start as well, with FSDP's plan."""

    def run(self, flags: list[str]) -> None:
        self.memory = self.memory or MEMORY.get(self.machine, "")
        memory = size_of("--memory", self.memory)
        machine = machine_of(self.machine or "h100")  # for its nodes
        self.ranks = ranks_of(self.config, self.ranks)
        Mistakes(self._wrong()).raise_all()
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
        start_without_a_gpu()
        from titan_ext.activation_checkpoint.op_rules import has_budget
        from titan_ext.base import no_accelerator
        from titan_ext.config_registry.resolve import resolve
        from titan_ext.plan.dry_run import dry_run
        from titan_ext.plan.report import to_json, write
        from titan_ext.plan.stand_ins import as_rank, as_stock
        from titan_ext.run.budget import solve_in_dry_run
        from titan_ext.toml.convert import dump, identity

        with as_rank(self.ranks, self.rank, machine.ranks_per_node, machine.nvlink_domain):
            capability = machine.capability if self.machine else None
            with no_accelerator.as_with_an_accelerator(capability):
                resolved = resolve(self.config, flags, self.ranks)
            config = resolved.config
            if resolved.world_size not in (0, self.ranks):
                said = f"{self.config} is for {resolved.world_size} ranks; this is {self.ranks}"
                print(f"{'note':12}{said}")
            experts = config.parallelism.expert_parallel_degree
            if self.imbalance != 1 and not 0 <= self.imbalance <= experts:
                raise ValueError(
                    f"--imbalance is {self.imbalance:g}; expected 0 to {experts}, the "
                    "expert-parallel degree, at which the rank's experts get all tokens."
                )
            if self.activations:
                self._plan_activations(resolved, memory)
                return
            if self.stock:
                as_stock(config)
            if has_budget(config):
                phase(f"solving for the budget of {self.config}")
                options = self._words("memory"), self._words(*_MODEL)
                print(solve_in_dry_run(config, self.ranks, *options))
            if self.all_stages:
                with tempfile.TemporaryDirectory() as folder:
                    (Path(folder) / "config.toml").write_text(dump(config))
                    plans = self._plan_all_stages(config, Path(folder))
            else:
                asked = identity(config)  # a dry run changes its config
                run = dry_run(
                    config,
                    self.ranks,
                    self.rank,
                    memory=memory,
                    machine=self.machine,
                    imbalance=self.imbalance,
                    say=phase,
                )
                print(run.report(), flush=True)
                plans = [] if run.memory is None else [to_json(run, asked)]
                if self.out is not None:
                    write(plans[0], self.out)
        if not plans:
            return
        fullest = min(plans, key=lambda plan: plan["spare"])
        if self.all_stages:
            print(f"-- the fullest of {len(plans)} stages: {fullest['verdict']}", flush=True)
        if not (fullest["fits"] or self.all_stages):
            print("            titan_ext tune, with the same options, finds what fits and is fast")
        else:
            stock = ["--stock"] if self.stock else []
            line = ["titan_ext", "verify", self.config, "--ranks", str(self.ranks), *stock, *flags]
            print(f"{'numbers':12}not tried; {shlex.join(line)}")
        if not fullest["fits"]:
            raise SystemExit(_DOES_NOT_FIT)

    def _wrong(self) -> Iterator[str]:
        """A message for options that do not go together."""
        if self.activations != "fit":
            size_of("--activations", self.activations)
        elif not self.memory:
            yield "--activations fit needs --memory: what it leaves is the budget."
        if self.activations and self.all_stages:
            yield "--activations plans one rank: expected --rank, not --all-stages."
        if self.out and not (self.memory or self.activations):
            yield "--out needs --memory: without it there is no plan."
        if self.on_cpu and not self.activations:
            yield "--on-cpu needs --activations."
        if self.all_stages and self.rank:
            yield "--all-stages tries one of each: expected no --rank."
        if not 0 <= self.rank < self.ranks <= _MOST_RANKS:
            yield (
                f"--ranks is {self.ranks} and --rank is {self.rank}; expected 1 to "
                f"{_MOST_RANKS:,} ranks, and a rank below."
            )

    def _plan_activations(self, resolved: "Resolved", memory: int | None) -> None:
        from titan_ext.plan.dry_run import plan_activations

        phase("solving for the budget")
        changed = [f"{key} = {value}" for key, value, _ in resolved.given()]
        fits = self.activations == "fit"
        plan = plan_activations(
            resolved.config,
            self.ranks,
            self.rank,
            budget=None if fits else size_of("--activations", self.activations),
            memory=memory,
            imbalance=self.imbalance,
            machine=self.machine or "h100",
            as_on_a_gpu=not self.on_cpu,
        )
        print(plan.report())
        if self.out is not None:
            file = self.out / "budget.toml"
            lines = [f"extends = {to_toml(extends_in(self.out, self.config))}"]
            lines += [line for line in changed if not line.startswith("activation_checkpoint")]
            file.write_text("\n".join([*lines, "", *plan.toml_lines()]) + "\n")
            print(f"\n{file} extends {self.config} with this; the same file serves all ranks.")
        amount = f"fit {self.memory}" if fits else self.activations
        print(f'\nin a run: [activation_checkpoint] policy = "fp8", budget = "{amount}"')

    # -- in processes of their own: Titan allows one layout in a process

    def _words(self, *options: str) -> list[str]:
        """Options of this command as a command line has them."""
        words = []
        for name in options:
            if value := getattr(self, name):
                words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return words

    def _plan_all_stages(self, config: Any, folder: Path) -> list[dict[str, Any]]:
        from titan_ext.run.record import dry_run_elsewhere, file_name

        plans: list[dict[str, Any]] = []
        groups: dict[int, int] = {}
        stages, out = config.parallelism.pipeline_parallel_degree, self.out or folder
        words = self._words("ranks", "memory", *_MODEL, "verbose")
        words += ["--out", str(out)] if self.memory else []
        for rank in range(0, self.ranks, max(self.ranks // stages, 1)):
            print(f"-- rank {rank}", flush=True)
            done = dry_run_elsewhere(folder / "config.toml", [*words, "--rank", str(rank)])
            sys.stderr.write(done.stderr)
            print(done.stdout, end="", flush=True)
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
