# SPDX-License-Identifier: BSD-3-Clause
"""What ``tune`` asks of a config in a fork: what a step of it takes, and budgets of its blocks.

``Job`` is the user's job. A candidate of it is a set of changed keys, and a level: the solved
activation checkpointing for a number of bytes.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.presets import PRESET_NAMES
from titan_ext.activation_checkpoint.solved import KEY
from titan_ext.activation_checkpoint.solver import BudgetTooSmallError
from titan_ext.base.messages import Mistakes
from titan_ext.parallelize.limits import wrong_degrees
from titan_ext.plan.dry_run import dry_run
from titan_ext.plan.memory import DeviceMemory, MemoryPlan
from titan_ext.plan.moves import EP, LOCAL, OFFLOAD_LIMIT, SCORES, Facts
from titan_ext.plan.shorten import Depths, cut, whole_memory, whole_time
from titan_ext.plan.time import StepTime
from titan_ext.run.budget import TracedBlocks, settings_of, without_checkpointing

_LEVELS = 14
"""Budgets from the least to no checkpointing."""
_BETWEEN = 6
"""Budgets between two of them."""
_OF_BLOCKS = (EP, LOCAL, SCORES, OFFLOAD_LIMIT)
_NOT_OF_BLOCKS = ("parallelism.fsdp_", "parallelism.data_parallel_")


class Level(NamedTuple):
    """A solved checkpointing.

    Attributes:
        nbytes: What the blocks of a rank hold.
        ms: What a step recomputes, by the solver.
        table: ``op_policies`` with preset "stock".
        preset: Another preset without a table, for blocks that refuse tables.
    """

    nbytes: int
    ms: float
    table: Mapping[str, str]
    preset: str = ""

    @property
    def is_none(self) -> bool:
        """Whether it is no checkpointing."""
        return not (self.table or self.preset)

    def keys(self, now: Mapping[str, Any]) -> dict[str, Any]:
        """As keys of a config that has ``now``."""
        if self.is_none:
            return {f"{KEY}.policy": "none"}
        if self.preset:
            return policy_keys(now, self.preset)
        return policy_keys(now) | {f"{KEY}.op_policies": self.table}

    def budget_keys(self, now: Mapping[str, Any]) -> dict[str, Any]:
        """The same with a budget, for which the run solves: keys for a person's file."""
        keys = self.keys(now)
        if not self.table:
            return keys
        budget = f"{-(-self.nbytes // 2**20)}MiB"
        return policy_keys(now, FP8AC.Config().preset) | {f"{KEY}.budget": budget}


def policy_keys(now: Mapping[str, Any], preset: str = "stock") -> dict[str, Any]:
    """Policy "fp8" with a preset, without what ``now`` has in the way."""
    usual = {"mode": "selective", "budget": "", "op_policies": {}, "solved_for": {}}
    keys = {f"{KEY}.{name}": value for name, value in usual.items()}
    keys |= {f"{KEY}.preset": preset}
    in_the_way = {key: value for key, value in keys.items() if now.get(key, value) != value}
    is_default = preset == FP8AC.Config().preset
    always = {} if is_default else {f"{KEY}.preset": preset}
    return {f"{KEY}.policy": "fp8", **in_the_way, **always}


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` of a config, and what policy "fp8" would have where another one is chosen."""
    usual = FP8AC.Config()
    names = (f.name for f in fields(usual) if not f.name.startswith("_"))
    return {f"{KEY}.{name}": getattr(usual, name) for name in names} | dict(values)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job to tune.

    Attributes:
        make: The config of the job with some keys changed; raises ValueError.
        values: Of the config as the user has it, by dotted key, with ``with_defaults``.
        facts: Of the job, for moves.
        memory: Of each GPU.
        machine: As ``base.machines.machine_of`` takes it.
        rank: The one to plan.
        imbalance: Tokens that the rank's experts get, for one if routing were balanced.
        exact: Whether nothing may be stored in float8.
        depths: Of the shortened models; None to plan whole ones.
    """

    make: Callable[[Mapping[str, Any]], Any]
    values: Mapping[str, Any]
    facts: Facts
    memory: DeviceMemory
    machine: str
    rank: int = 0
    imbalance: float = 1.0
    exact: bool = False
    depths: Depths | None = None

    def ask(self, what: str, *arguments: Any) -> Any:
        """``price`` or ``levels``, by name: one call of this in a fork."""
        return getattr(self, what)(*arguments)

    @staticmethod
    def alike(what: str, keys: Mapping[str, Any], *_: Any) -> Any:
        """What calls of ``ask`` have in common that one process makes: their degrees."""
        return frozenset(item for item in keys.items() if item[0].endswith("_degree"))

    def price(self, keys: Mapping[str, Any], layers: int) -> tuple[MemoryPlan, StepTime]:
        """What a step holds and takes; of the first ``layers`` only, or of all if it is 0."""
        config = self._config(keys, layers)
        run = dry_run(
            config,
            self.facts.ranks,
            self.rank,
            budget=self.memory,
            machine=self.machine,
            imbalance=self.imbalance,
        )
        assert run.memory is not None
        assert run.time is not None
        return run.memory, run.time

    def levels(self, keys: Mapping[str, Any], low: int = 0, high: int = 0) -> list[Level]:
        """Solved checkpointings for budgets up to none, or between ``low`` and ``high`` bytes."""
        depths = self.depths
        now = {**self.values, **keys}
        base = policy_keys(now) | ({f"{KEY}.exempt": ["*"]} if self.exact else {})
        asked = {key: value for key, value in {**keys, **base}.items() if key != OFFLOAD_LIMIT}
        config = self._config(asked, depths.short if depths else 0)
        settings = settings_of(config.activation_checkpoint)
        config = without_checkpointing(config)
        run = dry_run(config, self.facts.ranks, self.rank, imbalance=self.imbalance, step=False)
        limit = now[OFFLOAD_LIMIT]
        stands_for = depths.stands_for if depths else lambda index: 1
        traced = TracedBlocks(run, settings, self.machine, limit, stands_for)
        presets = ("stock",) if self.exact else PRESET_NAMES
        found = [*_levels(traced, low, high), *(() if high else _presets(traced, presets))]
        return [level._replace(ms=level.ms * self.facts.passes(now)) for level in found]

    def priced(
        self, short: tuple[MemoryPlan, StepTime], longer: tuple[MemoryPlan, StepTime]
    ) -> tuple[MemoryPlan, StepTime]:
        """The whole model, from the prices of the two of ``depths``; raises NotAlikeError."""
        assert self.depths is not None
        return (
            whole_memory(short[0], longer[0], self.depths),
            whole_time(short[1], longer[1], self.depths),
        )

    def _config(self, keys: Mapping[str, Any], layers: int) -> Any:
        config = self.make(keys)
        Mistakes(wrong_degrees(config, self.facts.ranks)).raise_all()
        if layers:
            cut(config, layers)
        return config


def block_keys(keys: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    """Those of ``keys`` on which the levels of a candidate depend."""
    return frozenset(
        (key, value)
        for key, value in keys.items()
        if key in _OF_BLOCKS or not key.startswith(_NOT_OF_BLOCKS)
    )


def _levels(traced: TracedBlocks, low: int, high: int) -> Iterator[Level]:
    everything = traced.none_nbytes
    least = low
    if not low:
        try:
            least = traced.solve(0).nbytes
        except BudgetTooSmallError as error:
            least = error.least
    if high:
        budgets = [low + (high - low) * i // (_BETWEEN + 1) for i in range(1, _BETWEEN + 1)]
    else:
        ratio = everything / max(least, 1)
        budgets = [int(least * ratio ** (i / _LEVELS)) + 1 for i in range(_LEVELS)]
    last = -1
    for budget in budgets:
        with contextlib.suppress(BudgetTooSmallError):
            found = traced.solve(budget)
            if found.nbytes > last:
                yield Level(last := found.nbytes, found.ms, traced.table(found))
    if not high:
        yield Level(everything, 0.0, {})


def _presets(traced: TracedBlocks, names: Sequence[str]) -> Iterator[Level]:
    for name in names:
        price = traced.price(name)
        yield Level(price.nbytes, price.ms, {}, name)
