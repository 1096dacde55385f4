# SPDX-License-Identifier: BSD-3-Clause
"""Activation checkpointing by budget, for a job of any size: ``dry-run --activations 20GiB``.

A dry run without checkpointing traces one block of each kind as the job will run it: sharded, on
fake tensors, with the kernels of a GPU. The solver then chooses a policy for every operation. The
result is a TOML file with an ordinary ``op_policies`` table, for all ranks alike.
"""

import contextlib
import copy
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.block_graph import CHOICES, BlockGraph, trace
from titan_ext.activation_checkpoint.op_rules import OpPolicy, is_exempt
from titan_ext.activation_checkpoint.presets import PRESET_NAMES
from titan_ext.activation_checkpoint.solved import KEY, has_budget, releases
from titan_ext.activation_checkpoint.solver import (
    BlockKind,
    BudgetTooSmallError,
    Host,
    Solution,
    solve,
    table_of,
)
from titan_ext.base.machines import machine_of
from titan_ext.base.messages import and_more, format_bytes, parse_bytes
from titan_ext.components.early_scores import with_early_scores
from titan_ext.parallelize.recipe import recipe_of
from titan_ext.plan.dry_run import DryRun, dry_run
from titan_ext.plan.live import MemoryKind
from titan_ext.plan.memory import DeviceMemory, MemoryPlan
from titan_ext.toml.files import to_toml

_BUDGETS = 8
"""For the curve of a picture."""


def settings_of(config: Any) -> FP8AC.Config:
    """The policy of a config as a base for a table: its codec, exemptions and such.

    Raises ValueError if it has a table already.
    """
    if not isinstance(config, FP8AC.Config):
        return FP8AC.Config(preset="stock")
    if config.op_policies:
        raise ValueError(
            f"--activations solves for {KEY}.op_policies, and this config has a table already; "
            "expected a config without one."
        )
    return replace(
        config, mode="selective", preset="stock", budget="", offload_limit="", solved_with={}
    )


def without_checkpointing(config: Any) -> Any:
    """``config`` without a policy, whose model has the routed experts that the policy asks for."""
    config = copy.copy(with_early_scores(config))
    config.activation_checkpoint = None
    return config


@dataclass(frozen=True)
class _Block:
    """The first block of a kind."""

    name: str
    module: nn.Module
    graph: BlockGraph
    blocks: int
    waiting: int


class TracedBlocks:
    """The blocks of one rank, by kind, as a dry run without checkpointing has them.

    Args:
        run: The dry run.
        settings: ``settings_of`` its config.
        machine: As ``machine_of`` takes it.
        offload_limit: For what may wait on the host ("64GiB"); "" if nothing may.
        stands_for: How many blocks of the job's model one of the run's stands for, by its index,
            where that model was shortened (``plan.shorten``).
    """

    def __init__(
        self,
        run: DryRun,
        settings: FP8AC.Config,
        machine: str = "h100",
        offload_limit: str = "",
        stands_for: Callable[[int], int] = lambda index: 1,
    ) -> None:
        self._stands_for = stands_for
        self._settings, self._rates, self._machine = settings, machine_of(machine), machine
        self.offload_limit = offload_limit
        self.blocks = list(self._trace(run))
        if not self.blocks:
            raise ValueError(f"rank {run.rank} has no blocks whose activations could be planned.")
        self.kinds = [BlockKind(block.graph, block.waiting) for block in self.blocks]
        self._elsewhere = self._kinds_elsewhere(run) if run.stages else ()
        recipe = recipe_of(run.model_parts[0])  # stock's own passes have none
        self._exchanges = recipe.exchanges if recipe else None

    def _trace(self, run: DryRun) -> Iterator[_Block]:
        first: dict[Any, tuple[str, nn.Module]] = {}
        kinds: dict[nn.Module, Any] = {}
        counts: Counter[Any] = Counter()
        times: dict[nn.Module, int] = {}
        for part in run.model_parts:
            for name, block in part.get_submodule("layers").named_children():
                kind = kinds[block] = _kind(block, f"layers.{name}", self._settings.exempt)
                first.setdefault(kind, (f"layers.{name}", block))
                times[block] = self._stands_for(int(name))
                counts[kind] += times[block]
        waiting: Counter[Any] = Counter()
        most: Counter[Any] = Counter()
        traced = {}
        with contextlib.ExitStack() as stack:
            for block, kind in kinds.items():
                stack.callback(
                    block.register_forward_hook(_counting(kind, times[block], waiting, most)).remove
                )
            for kind, (name, block) in first.items():
                traced[kind] = stack.enter_context(
                    trace(
                        block,
                        self._rates,
                        exempt=tuple(self._settings.exempt),
                        name=name,
                    )
                )
            run.forward_backward()
        for kind, (name, block) in first.items():
            (graph,) = traced[kind]
            yield _Block(name, block, graph, counts[kind], most[kind])

    def _kinds_elsewhere(self, run: DryRun) -> Sequence[str]:
        """The first block of each kind that only other pipeline stages have."""
        with torch.device("meta"):
            layers = run.model_config.build().get_submodule("layers")
        here = {
            name
            for part in run.model_parts
            for name, _ in part.get_submodule("layers").named_children()
        }
        first: dict[Any, str] = {}
        known = set()
        for name, block in layers.named_children():
            kind = _kind(block, f"layers.{name}", self._settings.exempt)
            first.setdefault(kind, f"layers.{name}")
            if name in here:
                known.add(kind)
        return [name for kind, name in first.items() if kind not in known]

    @property
    def none_nbytes(self) -> int:
        """What the blocks hold without checkpointing."""
        return sum(kind.count * kind.graph.none_nbytes for kind in self.kinds)

    def price(self, **keys: Any) -> Solution:
        """What a policy of ours holds and recomputes; ``keys`` are its config's."""
        chosen = [
            block.graph.chosen_by(self._plan(block, FP8AC.Config(**keys))) for block in self.blocks
        ]
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
        """The solution as ``op_policies``."""
        plans = [self._plan(block, self._settings) for block in self.blocks]
        return table_of(self.kinds, solution.chosen, plans)

    def _plan(self, block: _Block, config: FP8AC.Config) -> Any:
        return config.policies_of(block.module, block.name, self._exchanges)

    def words(self) -> str:
        """What was traced."""
        kinds = ", ".join(
            f"{block.blocks} like {block.name}"
            + (f" ({block.waiting} forwards wait at once)" if block.waiting > block.blocks else "")
            for block in self.blocks
        )
        lines = [f"{kinds}; milliseconds at {self._machine} rates"]
        if self._elsewhere:
            lines.append(
                f"other stages have blocks like {and_more(self._elsewhere)}, and none is here: "
                "nothing was solved for those."
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class BudgetPlan:
    """A solved budget; ``table`` is empty where no checkpointing is needed."""

    budget: int
    traced: TracedBlocks
    settings: FP8AC.Config
    solution: Solution | None
    table: dict[str, str]
    had_budget: bool = False
    """Whether the config that it is for has the key ``budget``."""

    def report(self) -> str:
        """The verdict, a line a policy, and the table."""
        rows = [(name, nbytes, ms) for name, (nbytes, ms) in self._policies.items()]
        rows.sort(key=lambda row: -row[1])
        lines = [
            f"activations of this rank's blocks, budget {format_bytes(self.budget)}: "
            f"{self._verdict()}",
            self.traced.words(),
            f"{'':24}{'held':>10}{'ms recomputed, codec included':>32}",
            *(f"{name:24}{format_bytes(nbytes):>10}{ms:>32.1f}" for name, nbytes, ms in rows),
        ]
        if self.table:
            lines += ["", *self._section()]
        return "\n".join(lines)

    @functools.cached_property
    def _policies(self) -> dict[str, tuple[int, float]]:
        """Bytes held and milliseconds recomputed, by what the report calls them."""
        found = {"no checkpointing": (self.traced.none_nbytes, 0.0)}
        for preset in PRESET_NAMES:
            name = "stock selective" if preset == "stock" else f'fp8, preset "{preset}"'
            price = self.traced.price(preset=preset)
            found[name] = price.nbytes, price.ms
        if self.solution is not None:
            found["this budget"] = self.solution.nbytes, self.solution.ms
        return found

    def write_frontier(self, folder: Path) -> None:
        """Write ``budget.json`` and ``budget.png``: policies, and the best for other budgets."""
        from matplotlib.figure import Figure

        policies = self._policies
        least, most = min(nbytes for nbytes, _ in policies.values()), self.traced.none_nbytes
        solved = [policies["no checkpointing"]]
        for k in range(_BUDGETS):
            with contextlib.suppress(BudgetTooSmallError):
                found = self.traced.solve(int(least * (most / least) ** (k / _BUDGETS)))
                solved.append((found.nbytes, found.ms))
        # The solver counts a launch for every rule, too: a point may be worse than one below it.
        best = [(n, ms) for n, ms in sorted(solved) if ms == min(t for m, t in solved if m <= n)]
        figures = {"budget": self.budget, "policies": policies, "best": best}
        (folder / "budget.json").write_text(json.dumps(figures, indent=1) + "\n")
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        scale = 2**30 if most >= 2**30 else 2**20
        axes.plot(
            *zip(*((n / scale, ms) for n, ms in best), strict=True), label="best for a budget"
        )
        for name, (nbytes, ms) in policies.items():
            axes.plot(nbytes / scale, ms, "s", label=name)
        axes.axvline(self.budget / scale, color="black", linestyle=":", label="the budget")
        axes.set(
            xlabel=f"{'GiB' if scale == 2**30 else 'MiB'} held by this rank's blocks",
            ylabel="ms recomputed, codec included (modelled)",
            title=self.traced.words().partition(";")[0],
        )
        axes.legend()
        figure.savefig(folder / "budget.png", dpi=100)

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
        if self.solution is None:
            return [f"[{KEY}]", 'policy = "none"']
        base, limit = FP8AC.Config(), self.traced.offload_limit
        used = limit if self.solution.host_nbytes else ""
        changed = [
            f"{f.name} = {to_toml(value)}"
            for f in fields(FP8AC.Config)
            if f.name not in ("op_policies", "solved_with", "_owner")
            and (value := getattr(self.settings, f.name)) != getattr(base, f.name)
        ]
        return [
            f"[{KEY}]",
            'policy = "fp8"',
            *changed,
            *(['budget = ""'] if self.had_budget else []),
            *([f"offload_limit = {to_toml(used)}"] if limit else []),
            *_table("op_policies", self.table),
        ]


def _table(key: str, entries: Mapping[str, str]) -> list[str]:
    lines = [f"{to_toml(name)} = {to_toml(value)}" for name, value in entries.items()]
    return ["", f"[{KEY}.{key}]", *lines] if entries else []


def plan_activations(
    config: Any,
    ranks: int,
    rank: int = 0,
    *,
    budget: int | None,
    memory: DeviceMemory | None = None,
    imbalance: float = 1.0,
    machine: str = "h100",
    as_on_a_gpu: bool = True,
) -> BudgetPlan:
    """Solve for the blocks of one rank of a job, in a dry run without checkpointing.

    ``budget`` is what they may hold, None for what is left of ``memory``. The other arguments are
    those of ``dry_run``. Raises ValueError if it cannot be met, or the config has a table already.
    """
    settings = settings_of(config.activation_checkpoint)
    had_budget = has_budget(config)
    offload_limit = getattr(config.activation_checkpoint, "offload_limit", "")
    config = without_checkpointing(config)
    planned = memory if budget is None else None
    run = dry_run(config, ranks, rank, budget=planned, imbalance=imbalance, as_on_a_gpu=as_on_a_gpu)
    traced = TracedBlocks(run, settings, machine, offload_limit if had_budget else "")
    if budget is None:
        assert run.memory is not None, "without a budget there is a memory to fill"
        one_block = max(kind.graph.none_nbytes for kind in traced.kinds)
        budget = budget_in(run.memory, traced.none_nbytes, one_block)
    solution = None if traced.none_nbytes <= budget else traced.solve(budget)
    table = {} if solution is None else traced.table(solution)
    return BudgetPlan(budget, traced, settings, solution, table, had_budget)


def budget_in(memory: MemoryPlan, everything: int, one: int) -> int:
    """The bytes that blocks may hold, so that every moment of the step fits in ``memory``.

    A block that runs has its activations as without checkpointing, beside what it holds. Those that
    wait hold their share of the budget.

    Args:
        memory: The plan without checkpointing.
        everything: Bytes that all blocks hold in it.
        one: Bytes that the largest block holds.

    Raises:
        ValueError: if a moment may not fit with nothing held.
    """
    budget = everything
    for moment in memory.moments:
        held = min(moment.by_kind.get(MemoryKind.EXACT, 0), everything)
        runs = "of layers." in moment.moment
        room = memory.room(moment) + held - (min(one, held) if runs else 0)
        if room < 0:
            raise ValueError(
                f"without activations a step needs {format_bytes(-room)} more than surely fit: no "
                "policy makes it fit. A budget of a size is tried all the same."
            )
        if memory.room(moment) < 0:
            budget = min(budget, room * everything // held)
    return budget


def _kind(block: nn.Module, name: str, exempt: Sequence[str]) -> Any:
    """Equal for blocks that run alike."""
    return tuple(
        (
            inner,
            type(module),
            tuple((key, p.shape, p.dtype) for key, p in module.named_parameters(recurse=False)),
            tuple(key for key, value in vars(module).items() if value is True),  # such as use_rope
            is_exempt(exempt, name, inner),
        )
        for inner, module in block.named_modules()
    )


def _counting(kind: Any, times: int, waiting: Counter[Any], most: Counter[Any]) -> Any:
    """A forward hook that counts the forwards of a kind that wait for their backward."""

    def end(gradient: torch.Tensor) -> None:
        waiting[kind] -= times

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        waiting[kind] += times
        most[kind] = max(most[kind], waiting[kind])
        out.register_hook(end)

    return hook
