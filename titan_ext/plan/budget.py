# SPDX-License-Identifier: BSD-3-Clause
"""Activation checkpointing for a budget of bytes, solved in a dry run.

``titan_ext dry-run --activations 20GiB`` traces a block of each kind as the job will run it:
without checkpointing, sharded, on fake tensors, with the kernels of a GPU. The solver chooses a
policy for every operation. The result is a TOML file with an ordinary ``op_policies`` table.
"""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.op_rules import KEY, OpPolicy, is_exempt, releases
from titan_ext.activation_checkpoint.presets import PRESET_NAMES
from titan_ext.base.machines import machine_of
from titan_ext.base.messages import and_more, format_bytes, parse_bytes
from titan_ext.components.early_scores import with_early_scores
from titan_ext.components.exchange_policy import without_halves
from titan_ext.parallelize.recipe import recipe_of
from titan_ext.plan.block_graph import CHOICES, BlockGraph, trace
from titan_ext.plan.solver import BlockKind, Host, Solution, solve, table_of
from titan_ext.toml.files import to_toml


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
    """Blocks of one kind, of which the first one is traced."""

    name: str
    first: nn.Module
    graphs: Sequence[BlockGraph]
    blocks: int = 0
    """Their number in the job's model."""
    waiting: int = 0
    """Forwards that wait for their backward; ``most``: at once."""
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
                        block, self._rates, exempt=tuple(self.settings.exempt), name=name
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
    held: int = 0
    """What blocks hold that are compiled in pieces, with what passes between these; 0: others."""

    def report(self) -> str:
        """The verdict, a line for each policy, and the table."""
        rows = [("no checkpointing", self.traced.none_nbytes, 0.0)]
        for preset in PRESET_NAMES:
            name = "stock selective" if preset == "stock" else f'fp8, preset "{preset}"'
            price = self.traced.price(preset)
            rows.append((name, price.nbytes, price.ms))
        if self.solution is not None:
            rows.append(("this budget", self.held or self.solution.nbytes, self.solution.ms))
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
        if self.held:
            lines.append("in compiled pieces presets hold more: what passes between these")
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
