# SPDX-License-Identifier: BSD-3-Clause
"""Activation checkpointing for a budget of bytes: in a dry run, and in a run before it starts.

``titan_ext dry-run --activations 20GiB`` traces a block of each kind as the job will run it:
without checkpointing, sharded, on fake tensors, with the kernels of a GPU. The solver chooses a
policy for every operation. The result is a TOML file with an ordinary ``op_policies`` table.

For ``activation_checkpoint.budget`` a run starts that command on rank 0, in a process of its own: a
dry run has a fake process group and fake tensors, which a trainer must not keep. The other ranks
get its table: if one rank saved what another sends again, both would wait forever. ``budget/`` in
the run's folder has the table.
"""

import contextlib
import copy
import os
import subprocess
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torchtitan.tools import utils as titan_utils
from torchtitan.tools.logging import logger

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.block_graph import CHOICES, BlockGraph, trace
from titan_ext.activation_checkpoint.op_rules import (
    FIT,
    KEY,
    Budget,
    OpPolicy,
    has_budget,
    is_exempt,
    releases,
)
from titan_ext.activation_checkpoint.presets import PRESET_NAMES
from titan_ext.activation_checkpoint.solver import BlockKind, Host, Solution, solve, table_of
from titan_ext.base import no_accelerator
from titan_ext.base.agreement import this_job
from titan_ext.base.machines import MACHINES, machine_of, machine_toml
from titan_ext.base.messages import and_more, format_bytes, parse_bytes
from titan_ext.base.op_cost import ranks_per_node
from titan_ext.base.run_check import ONE_PROCESS_MODES, RunCheck, world_size
from titan_ext.components.early_scores import with_early_scores
from titan_ext.components.exchange_policy import without_halves
from titan_ext.parallelize.recipe import recipe_of
from titan_ext.run.record import dry_run_elsewhere
from titan_ext.toml.convert import dump, identity
from titan_ext.toml.files import to_toml

FOLDER = "budget"
"""In the run's folder."""
_CONFIG, _MACHINE, _SOLVED = "config.toml", "machine.toml", "budget.toml"
_SHARE = 0.9
"""Share of ``comm.init_timeout_seconds``, for which the other ranks wait."""


# -- solving, in a dry run


def without_checkpointing(config: Any) -> Any:
    """``config`` without a policy, whose model has the routed experts that the policy asks for."""
    config = copy.copy(with_early_scores(config))
    config.activation_checkpoint = None
    # Rules count operations in each half, and a half has those of the whole. Traced as halves, the
    # second one's would have numbers that no rule meets.
    config.parallelism = without_halves(config.parallelism)
    return config


def settings_of(policy: Any) -> FP8AC.Config:
    """The policy of a config as a base for a table, with its codec and exemptions.

    Raises ValueError if it has a table already.
    """
    if not isinstance(policy, FP8AC.Config):
        return FP8AC.Config(preset="stock")
    if policy.op_policies:
        raise ValueError(
            f"--activations solves for {KEY}.op_policies, and this config has a table already; "
            "expected a config without one."
        )
    return replace(
        policy, mode="selective", preset="stock", budget="", offload_limit="", solved_with={}
    )


@dataclass(eq=False)
class _Blocks:
    """Blocks of one kind, of which the first one is traced.

    Attributes:
        blocks: Their number in the job's model.
        waiting: Forwards that wait for their backward; ``most``: at once.
    """

    name: str
    first: nn.Module
    graphs: Sequence[BlockGraph]
    blocks: int = 0
    waiting: int = 0
    most: int = 0

    def add_forward(self, times: int, _module: nn.Module, _args: Any, out: torch.Tensor) -> None:
        """Forward hook of a block that stands for ``times`` blocks."""
        self.waiting += times
        self.most = max(self.most, self.waiting)
        # Its gradient comes as the block's backward begins, and then it waits no longer.
        out.register_hook(partial(self._end_forward, times))

    def _end_forward(self, times: int, _gradient: torch.Tensor) -> None:
        self.waiting -= times


class TracedBlocks:
    """The blocks of one rank, by kind, as a dry run without checkpointing has them.

    Args:
        run: The ``plan.dry_run.DryRun``.
        asked: The policy of its config, before that was taken away.
        machine: As ``machine_of`` takes it.
        offload_limit: For what may wait on the host ("64GiB"); "" if nothing may.
        stands_for: How many blocks of the job's model one of the run's stands for, by its index,
            where that model was shortened (``plan.shorten``).
    """

    def __init__(
        self,
        run: Any,
        asked: Any,
        machine: str = "h100",
        offload_limit: str = "",
        stands_for: Callable[[int], int] = lambda index: 1,
    ) -> None:
        self._rates, self._machine, self.offload_limit = machine_of(machine), machine, offload_limit
        self.asked, self.settings = asked, settings_of(asked)
        self.blocks = self._trace(run, stands_for)
        if not self.blocks:
            raise ValueError(f"rank {run.rank} has no blocks whose activations could be planned.")
        self.kinds = [BlockKind(blocks.graphs[0], blocks.most) for blocks in self.blocks]
        self._elsewhere = self._kinds_elsewhere(run) if run.stages else ()
        recipe = recipe_of(run.model_parts[0])  # stock's own passes have none
        self._exchanges = recipe.exchanges if recipe else None

    def _trace(self, run: Any, stands_for: Callable[[int], int]) -> Sequence[_Blocks]:
        found: dict[Any, _Blocks] = {}
        with contextlib.ExitStack() as stack:
            for name, block in (x for part in run.model_parts for x in _layers(part)):
                if (kind := self._kind(block, name)) not in found:
                    graphs = trace(
                        block,
                        self._rates,
                        exempt=tuple(self.settings.exempt),
                        name=name,
                    )
                    found[kind] = _Blocks(name, block, stack.enter_context(graphs))
                times = stands_for(int(name.rpartition(".")[2]))
                found[kind].blocks += times
                counts = partial(found[kind].add_forward, times)
                stack.callback(block.register_forward_hook(counts).remove)
            run.forward_backward()
        return list(found.values())

    def _kinds_elsewhere(self, run: Any) -> Sequence[str]:
        """The first block of each kind that only other pipeline stages have."""
        with torch.device("meta"):
            model = run.model_config.build()
        here = {name for part in run.model_parts for name, _ in _layers(part)}
        kinds = {name: self._kind(block, name) for name, block in _layers(model)}
        known = {kinds[name] for name in here}
        first = {kind: name for name, kind in reversed(kinds.items())}
        return [name for name, kind in kinds.items() if kind not in known and first[kind] == name]

    def _kind(self, block: nn.Module, name: str) -> Any:
        """Equal for blocks that run alike."""
        return tuple(
            (
                inner,
                type(module),
                tuple((key, p.shape, p.dtype) for key, p in module.named_parameters(recurse=False)),
                tuple(key for key, value in vars(module).items() if value is True),  # as use_rope
                is_exempt(self.settings.exempt, name, inner),
            )
            for inner, module in block.named_modules()
        )

    @property
    def none_nbytes(self) -> int:
        """Bytes that the blocks hold without checkpointing."""
        return sum(kind.count * kind.graph.none_nbytes for kind in self.kinds)

    @property
    def most_of_a_block(self) -> int:
        """Bytes that the largest block holds without checkpointing."""
        return max(kind.graph.none_nbytes for kind in self.kinds)

    def price(self, preset: Any) -> Solution:
        """Bytes that a preset holds, and what it recomputes."""
        plans = self._plans(FP8AC.Config(preset=preset))
        chosen = [kind.graph.chosen_by(x) for kind, x in zip(self.kinds, plans, strict=True)]
        return Solution.of(self.kinds, chosen)

    def solve(self, budget: int) -> Solution:
        """The best policies; raises BudgetTooSmallError."""
        limit = self.offload_limit
        return solve(
            self.kinds,
            budget,
            rule_ms=self._rates.launch * 1e3,
            host=Host(parse_bytes(limit), self._rates.host) if limit else None,
        )

    def table(self, solution: Solution) -> dict[str, str]:
        """``op_policies`` that choose as ``solution`` does."""
        return table_of(self.kinds, solution.chosen, self._plans(self.settings))

    def _plans(self, config: FP8AC.Config) -> Sequence[Any]:
        return [
            config.policies_of(blocks.first, blocks.name, self._exchanges) for blocks in self.blocks
        ]

    def words(self) -> str:
        """Line for people about the blocks that were traced, and about those that were not."""
        kinds = ", ".join(
            f"{kind.blocks} like {kind.name}"
            + (f" ({kind.most} forwards wait at once)" if kind.most > kind.blocks else "")
            for kind in self.blocks
        )
        lines = [f"{kinds}; milliseconds at {Path(self._machine).stem} rates"]
        if self._elsewhere:
            lines.append(
                f"other stages have blocks like {and_more(self._elsewhere)}, and none is here: "
                "nothing was solved for those."
            )
        return "\n".join(lines)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    layers = model.get_submodule("layers").named_children()
    return ((f"layers.{name}", block) for name, block in layers)


@dataclass(frozen=True)
class BudgetPlan:
    """A solved budget; ``solution`` is None where no checkpointing is needed."""

    budget: int
    traced: TracedBlocks
    solution: Solution | None

    def report(self) -> str:
        """The verdict, a line for each policy, and the table."""
        rows = [("no checkpointing", self.traced.none_nbytes, 0.0)]
        for preset in PRESET_NAMES:
            name = "stock selective" if preset == "stock" else f'fp8, preset "{preset}"'
            price = self.traced.price(preset)
            rows.append((name, price.nbytes, price.ms))
        if self.solution is not None:
            rows.append(("this budget", self.solution.nbytes, self.solution.ms))
        lines = [
            f"activations of this rank's blocks, budget {format_bytes(self.budget)}: "
            f"{self._verdict()}",
            self.traced.words(),
            f"{'':24}{'held':>10}{'ms recomputed, codec included':>32}",
            *(
                f"{name:24}{format_bytes(nbytes):>10}{ms:>32.1f}"
                for name, nbytes, ms in sorted(rows, key=lambda row: -row[1])
            ),
        ]
        if self.solution is not None:
            lines += ["", *self._section()]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.solution is None:
            return "met without recompute, by no checkpointing at all."
        kept = Counter(policy for chosen in self.solution.chosen for policy in chosen)
        counts = ", ".join(
            f"{kept[policy]} {policy.value.replace('_', ' in ')}"
            for policy in OpPolicy
            if policy in CHOICES or kept[policy]
        )
        host = self.solution.host_nbytes
        waits = f" {format_bytes(host)} wait on the host." if host else ""
        return f"met. Operations by policy: {counts}.{waits}"

    def toml_lines(self) -> list[str]:
        """The section ``[activation_checkpoint]`` of a TOML file, with ``solved_with``."""
        return [*self._section(), *_table("solved_with", releases())]

    def _section(self) -> list[str]:
        """The keys whose values differ from the default, or from those of the config."""
        if self.solution is None:
            return [f"[{KEY}]", 'policy = "none"']
        usual, asked = FP8AC.Config(), self.traced.asked
        asked = asked if isinstance(asked, FP8AC.Config) else usual
        names = (f.name for f in fields(usual) if f.name not in (*_TABLES, "_owner"))
        values = {name: getattr(self.traced.settings, name) for name in names}
        values["offload_limit"] = self.traced.offload_limit if self.solution.host_nbytes else ""
        changed = {
            name: value
            for name, value in values.items()
            if not value == getattr(usual, name) == getattr(asked, name)
        }
        return [
            f"[{KEY}]",
            'policy = "fp8"',
            *(f"{name} = {to_toml(value)}" for name, value in changed.items()),
            *_table("op_policies", self.traced.table(self.solution)),
        ]


_TABLES = ("op_policies", "solved_with")


def _table(key: str, entries: Mapping[str, str]) -> list[str]:
    lines = [f"{to_toml(name)} = {to_toml(value)}" for name, value in entries.items()]
    return ["", f"[{KEY}.{key}]", *lines] if entries else []


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


# -- the key, in a run


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
