# SPDX-License-Identifier: BSD-3-Clause
"""The search of ``titan_ext tune``: which keys make a step of a job fastest in a memory.

It is a coordinate descent. A coordinate is a move (``plan.moves``): a key or two, and the values
that they may take. The search goes through the moves in turn. It plans each change of one beside
the best candidate so far, and goes on from the fastest that fits if that saves ``_GAIN`` of a step.
It ends when no move has helped since the last change. Moves of a few keys come before those of
degrees and batches, so that other degrees are held against these ones at their best.


Checkpointing is no coordinate: each candidate has the best one for itself. The solver finds it for
the room that a step leaves, as the plan of the best candidate has it, and then its own plan. In the
end each change is taken back once, and what saves nothing goes. The winner and the user's config
are then planned as whole models, all others as two shortened ones (``plan.shorten``). A candidate
is planned in a fork (``plan.forks``). One whose first plan, of the shorter model, cannot win is
planned no further.

benchmarks/tune_check.py holds the search against all configs of a small grid.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.op_rules import KEY
from titan_ext.base.facts import Effect
from titan_ext.base.messages import Mistakes, duration
from titan_ext.parallelize.keys import COMPILE, effect_of
from titan_ext.parallelize.limits import wrong_degrees
from titan_ext.plan.budget import TracedBlocks, without_checkpointing
from titan_ext.plan.dry_run import dry_run
from titan_ext.plan.forks import Forks
from titan_ext.plan.memory import MemoryPlan
from titan_ext.plan.moves import (
    GLOBAL,
    MOVES,
    OFFLOAD_LIMIT,
    Choices,
    Facts,
    Keys,
    Move,
    keys_of,
    with_move,
)
from titan_ext.plan.shorten import Depths, NotAlikeError, cut, whole_memory, whole_of
from titan_ext.plan.solver import BudgetTooSmallError, Solution
from titan_ext.plan.time import Category, StepTime

_GAIN = 0.003
"""Share of a step that a change has to save."""
_WORTH = 0.01
"""Share of a step that a move has to act on to be tried."""
_TRIES, _IN_A_RACE = 6, 2
"""Budgets of a candidate that are planned, at most, and of one that is held against the best."""
_LESS = 0.98
"""The budget after one that was too large, at most, over that: rooms are estimates."""
_MORE = 1.3
"""The budget that says what more bytes are worth, over the one that fits."""
_SEEN = 0.01
"""Share of what blocks hold at most: where they hold less in a step, they do not limit it."""


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """A solved activation checkpointing."""

    nbytes: int
    """Bytes that the blocks of a rank hold."""
    ms: float
    """Recompute of a step, by the solver."""
    table: Mapping[str, str]
    """``op_policies`` with preset "stock"; empty for no checkpointing."""
    ms_of_a_byte: float = 0.0
    """Recompute that a byte more would save."""

    def keys(self, now: Keys, *, with_budget: bool = False) -> dict[str, Any]:
        """Keys of a config that has ``now``; ``with_budget`` for a person's file: a run solves."""
        if not self.table:
            return {f"{KEY}.policy": "none"}
        if with_budget:
            budget = f"{-(-self.nbytes // 2**20)}MiB"
            return policy_keys(now, FP8AC.Config().preset) | {f"{KEY}.budget": budget}
        return policy_keys(now) | {f"{KEY}.op_policies": self.table}


def policy_keys(now: Keys, preset: str = "stock") -> dict[str, Any]:
    """Policy "fp8" with a preset, without what ``now`` has in the way."""
    wanted = {"mode": "selective", "budget": "", "op_policies": {}, "solved_with": {}}
    keys = {f"{KEY}.{name}": value for name, value in {**wanted, "preset": preset}.items()}
    in_the_way = {key: value for key, value in keys.items() if now.get(key, value) != value}
    return {f"{KEY}.policy": "fp8", **in_the_way}


def with_defaults(values: Keys) -> dict[str, Any]:
    """``values`` of a config, and what policy "fp8" would have where another one is chosen."""
    usual = FP8AC.Config()
    names = (f.name for f in fields(usual) if not f.name.startswith("_"))
    return {f"{KEY}.{name}": getattr(usual, name) for name in names} | dict(values)


class Sketch(NamedTuple):
    """The first plan of a candidate, of its short model: enough to see that it cannot win."""

    us: float
    """Of a token, as expected; ``recompute_us`` of it to run again what was not kept."""
    recompute_us: float
    spare: int

    @classmethod
    def of(cls, memory: MemoryPlan, time: StepTime) -> "Sketch":
        us = time.expected_ms * 1e3 / time.tokens
        share = time.expected.get(Category.RECOMPUTE, 0.0) / time.expected_ms
        return cls(us, us * share, memory.spare)

    def is_lost(self, best: "Sketch") -> bool:
        """True if it saves nothing, and no memory either, or not if all of that were kept."""
        is_slower = self.us >= best.us
        return is_slower and (self.spare <= best.spare or self.us - self.recompute_us >= best.us)


class LostError(Exception):
    """A candidate cannot beat the best so far."""


class Plan(NamedTuple):
    """A step of a candidate; ``checkpointing`` None is the user's own."""

    memory: MemoryPlan
    time: StepTime
    checkpointing: Checkpointing | None = None
    is_whole: bool = False
    """True if the whole model was planned."""
    sketch: Sketch | None = None

    @property
    def fits(self) -> bool:
        """True if it does even where the plan of its memory is off by its band."""
        return self.memory.surely_spare >= 0

    @property
    def us_per_token(self) -> float:
        """Microseconds of a GPU, as expected: the figure that is printed decides."""
        return self.time.expected_ms * 1e3 / self.time.tokens

    @property
    def order(self) -> tuple[bool, float]:
        """The fastest that fits comes first; what does not fit by what it lacks."""
        return not self.fits, self.us_per_token if self.fits else -self.memory.surely_spare

    @property
    def room(self) -> int:
        """Bytes that the blocks could hold, by the room at each phase of the step."""
        held = [(phase.held, self.memory.room(phase)) for phase in self.memory.phases]
        solved = self.checkpointing
        most = solved.nbytes if solved else max(nbytes for nbytes, _ in held)
        times = [1 + room / nbytes for nbytes, room in held if nbytes > _SEEN * most]
        return int(most * min(times, default=1.0))


def with_best_checkpointing(
    room: int,
    solve: Callable[[int], Checkpointing],
    plan: Callable[[Checkpointing], Plan],
    at_most: float = math.inf,
) -> Plan:
    """The plan of a candidate with the largest budget that fits, or with the least possible.

    Args:
        room: A first guess of what the blocks may hold.
        solve: The best checkpointing for a budget, or the smallest if none is as small.
        at_most: Microseconds of a token, of the best candidate: no larger budget is planned that
            would take more, nor a third one where one fits.
    """
    tries = _TRIES if at_most == math.inf else _IN_A_RACE
    now, tried, too_large = solve(room), list[Plan](), math.inf
    while len(tried) < _TRIES:
        found = plan(now)
        tried.append(found)
        best = min(tried, key=lambda one: one.order)
        if not found.fits:
            if now.nbytes > room:
                break  # the least possible
            too_large = min(too_large, now.nbytes)
        room = int(min(found.room, _LESS * too_large))
        before, now = best.checkpointing, solve(room)
        if best.fits and before is not None:
            saved = (before.ms - now.ms) * best.time.slowdown / best.time.expected_ms
            is_lost = best.us_per_token * (1 - saved) > at_most
            if saved < _GAIN or is_lost or len(tried) >= tries:
                break
    return min(tried, key=lambda one: one.order)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job to tune."""

    make: Callable[[Keys], Any]
    """The config of the job with some keys changed; raises ValueError."""
    values: Keys
    """Values of the config as the user has it, by dotted key, with ``with_defaults``."""
    facts: Facts
    memory: int
    """Bytes of each GPU."""
    machine: str
    """As ``base.machines.machine_of`` takes it."""
    rank: int = 0
    """The one to plan."""
    imbalance: float = 1.0
    """Tokens that the rank's experts get, for one if routing were balanced."""
    exact: bool = False
    """Whether no result may change: nothing is stored in float8, and no move changes one."""
    depths: Depths | None = None
    """Depths of the shortened models; None to plan whole ones."""

    def plan(
        self,
        keys: Keys,
        room: int | None,
        at_most: float = math.inf,
        is_whole: bool = False,
        best: Sketch | None = None,
    ) -> Plan | str:
        """Plan a candidate with the best checkpointing, or the user's own where ``room`` is None.

        Raises ValueError if it does not start. Other arguments are ``with_best_checkpointing``'s,
        and what it is held against: where it cannot win, the reason comes in place of a plan.
        """
        depths = self.depths

        def seen(step: tuple[MemoryPlan, StepTime]) -> Sketch:
            sketch = Sketch.of(*step)
            if best is not None and sketch.is_lost(best):
                raise LostError("saves nothing, by the plan of a shorter model")
            return sketch

        def plan(checkpointing: Checkpointing | None) -> Plan:
            step = self.step(self.all_keys(keys, checkpointing))
            return Plan(*step, checkpointing, True, seen(step) if depths is None else None)

        def shortened(checkpointing: Checkpointing | None) -> Plan:
            assert depths is not None
            asked = self.all_keys(keys, checkpointing)
            short = self.step(asked, depths.short)
            sketch, longer = seen(short), self.step(asked, depths.longer)
            try:
                memory = whole_memory(short[0], longer[0], depths)
            except NotAlikeError:
                return plan(checkpointing)
            time = whole_of(short[1], longer[1], depths)
            return Plan(memory, time, checkpointing, sketch=sketch)

        of_step = shortened if depths is not None and not is_whole else plan
        try:
            now = {**self.values, **keys}
            # The solver does not know what passes between compiled pieces.
            if room is None or (now.get(COMPILE) and "model" in now["compile.components"]):
                return of_step(None)
            solve = self.solver(keys)
            if is_whole and depths is not None:  # most of the way, at less cost
                found = with_best_checkpointing(room, solve, shortened).checkpointing
                assert found is not None
                room = found.nbytes
            return with_best_checkpointing(room, solve, of_step, at_most)
        except LostError as lost:
            return str(lost)

    def step(self, keys: Keys, layers: int = 0) -> tuple[MemoryPlan, StepTime]:
        """Memory and time of a step, of the first ``layers`` alone if there are any."""
        run = dry_run(
            self._config(keys, layers),
            self.facts.ranks,
            self.rank,
            memory=self.memory,
            machine=self.machine,
            imbalance=self.imbalance,
        )
        assert run.memory is not None
        assert run.time is not None
        return run.memory, run.time

    def solver(self, keys: Keys) -> Callable[[int], Checkpointing]:
        """A function that solves for a budget; the least possible one where none is as small."""
        now = {**self.values, **keys}
        with_policy = {**keys, **policy_keys(now), **self._exempt}
        with_policy.pop(OFFLOAD_LIMIT, None)  # a config that offloads nothing must not have it
        config = self._config(with_policy, self.depths.short if self.depths else 0)
        asked, bare = config.activation_checkpoint, without_checkpointing(config)
        run = dry_run(bare, self.facts.ranks, self.rank, imbalance=self.imbalance, step=False)
        stands_for = self.depths.stands_for if self.depths else lambda index: 1
        traced = TracedBlocks(run, asked, self.machine, now[OFFLOAD_LIMIT], stands_for)
        none = Checkpointing(nbytes=traced.none_nbytes, ms=0.0, table={})

        def best(budget: int) -> Solution | Checkpointing:
            if budget >= none.nbytes:
                return none
            try:
                return traced.solve(budget)
            except BudgetTooSmallError as error:
                return traced.solve(int(1.01 * error.least))  # the solver has tolerances

        def solve(budget: int) -> Checkpointing:
            if isinstance(found := best(budget), Checkpointing):
                return none
            more, passes = best(int(_MORE * found.nbytes)), self.facts.passes(now)
            gained = (found.ms - more.ms) / max(more.nbytes - found.nbytes, 1)
            return Checkpointing(
                nbytes=found.nbytes,
                ms=found.ms * passes,
                table=traced.table(found),
                ms_of_a_byte=gained * passes,
            )

        return solve

    def all_keys(
        self, keys: Keys, solved: Checkpointing | None, *, with_budget: bool = False
    ) -> dict[str, Any]:
        """Keys of a candidate, its checkpointing as a table, or as a budget that a run solves."""
        is_float8 = bool(solved.table) if solved else self.values.get(f"{KEY}.policy") == "fp8"
        keys = {k: v for k, v in keys.items() if is_float8 or not k.startswith(f"{KEY}.")}
        if solved is None:
            return keys
        keys |= self._exempt if is_float8 else {}
        if not with_budget and not any("offload" in policy for policy in solved.table.values()):
            keys.pop(OFFLOAD_LIMIT, None)
        return keys | solved.keys({**self.values, **keys}, with_budget=with_budget)

    @property
    def _exempt(self) -> dict[str, Any]:
        return {f"{KEY}.exempt": ["*"]} if self.exact else {}

    def _config(self, keys: Keys, layers: int) -> Any:
        config = self.make(keys)
        Mistakes(wrong_degrees(config, self.facts.ranks)).raise_all()
        if layers:
            cut(config, layers)
        return config


def degrees(keys: Keys, *_: Any) -> Any:
    """The degrees of a candidate, which all calls that one fork makes have in common."""
    return frozenset(item for item in keys.items() if item[0].endswith("_degree"))


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A candidate."""

    choices: Choices
    """Its changes, by the moves that made them."""
    keys: Keys
    """The same by key, without what the user has."""
    plan: Plan | None = None
    """None if it does not start, or cannot win; ``reason`` says why."""
    reason: str = ""
    is_lost: bool = False
    """Whether it cannot win."""

    @property
    def planned(self) -> Plan:
        """The plan of a candidate that starts."""
        assert self.plan is not None
        return self.plan

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits

    @property
    def order(self) -> tuple[bool, float]:
        """The best candidate comes first, one that does not start last."""
        return self.plan.order if self.plan else (True, math.inf)

    @property
    def us_per_token(self) -> float:
        """Microseconds of a GPU."""
        return self.plan.us_per_token if self.plan else math.inf

    @property
    def checkpointing(self) -> Checkpointing | None:
        return self.plan.checkpointing if self.plan else None

    def saves(self, other: "Tried") -> float:
        """Share of the time of a token with ``other`` that this one saves."""
        return 1 - self.us_per_token / other.us_per_token

    def beats(self, other: "Tried") -> bool:
        """True if it is better by as much as the search cares for."""
        return self.order < other.order and not (other.fits and self.saves(other) < _GAIN)


@dataclass(eq=False)
class Search:
    """Tunes ``job`` when ``run`` is called."""

    job: Job
    forks: Forks
    """Forks of ``job.plan``."""
    say: Callable[[str], None] = lambda text: None
    """Is told what the search does next."""
    own: Tried = field(init=False)
    """The user's config."""
    winner: Tried | None = None
    """What was found, planned as a whole model; None until then."""
    without: dict[Move | None, Tried] = field(default_factory=dict)
    """The best without one of its moves, and (None) with the user's checkpointing."""
    compared: Tried = field(init=False)
    """The best with which those compare: plans of shortened models."""
    _best: Tried | None = None
    _tried: dict[Any, Tried] = field(default_factory=dict)
    _ahead: int = len(MOVES)
    _times: tuple[float, float] = 0.0, 0.0
    """When the search began, and when it has had its last plan."""

    def run(self) -> None:
        """Search, and confirm what was found. Raises ValueError if the user's config is wrong."""
        self._times = (time.monotonic(),) * 2
        self.say("your config")
        (self.own,) = self.evaluate([{}], None)
        if self.own.plan is None:
            raise ValueError(self.own.reason)
        self._best = self.own
        self.say("its best checkpointing")
        self._go_on_from(self.evaluate([{}], self.own.plan.room))
        self._descend()
        self._take_back()
        self._confirm()

    def evaluate(
        self,
        every: Sequence[Choices],
        room: int | None,
        *,
        is_whole: bool = False,
        to_win: bool = False,
    ) -> list[Tried]:
        """Plan candidates, each with the best checkpointing that fits; of shortened models.

        ``room`` is about what they may hold; None is for the user's own checkpointing. With
        ``to_win`` one that cannot beat the best needs no plan.
        """
        is_race = room is not None and self._best is not None and self._best.fits and not is_whole
        at_most = self.best.us_per_token if is_race else math.inf
        sketch = self.best.planned.sketch if is_race and to_win else None
        is_whole = is_whole or self.job.depths is None
        asked = [keys_of(choices, self.job.values) for choices in every]
        jobs = [(_job(keys), room is None, is_whole) for keys in asked]
        new = [
            at
            for at, job in enumerate(jobs)
            if (seen := self._tried.get(job)) is None or (seen.is_lost and not to_win)
        ]
        calls = [(asked[at], room, at_most, is_whole, sketch) for at in new]
        for place, plan in self.forks.run(calls):
            self._times = self._times[0], time.monotonic()
            at, reason = new[place], "" if isinstance(plan, Plan) else str(plan)
            self._tried[jobs[at]] = Tried(
                choices=every[at],
                keys=asked[at],
                plan=None if reason else plan,
                reason=reason,
                is_lost=isinstance(plan, str),
            )
        return [self._tried[job] for job in jobs]

    @property
    def tried(self) -> Sequence[Tried]:
        """All candidates that were planned, in this order."""
        return list(self._tried.values())

    def work(self) -> tuple[int, int]:
        """Plans that have ended, and about how many are left if no further change helps."""
        return self.forks.called, self.forks.planned - self.forks.called + self._ahead

    def progress(self) -> str:
        """``work`` in words, with the time that is left by that, and the best so far."""
        (done, left), (begin, last) = self.work(), self._times
        said = [f"{done} plans of about {done + left}"]
        if done:
            left_s = (last - begin) * (done + left) / done - (time.monotonic() - begin)
            said.append(f"about {duration(max(left_s, 1.0))} left")
        if self.tried and (plan := self.best.plan) is not None:
            speed = f"expect {plan.time.expected_tokens_per_second:,.0f} tokens/s a GPU"
            said.append(f"best: {speed}{'' if plan.fits else ', does not fit'}")
        return ", ".join(said)

    @property
    def best(self) -> Tried:
        """The winner, or the best so far."""
        return self.winner or self._best or self.tried[0]

    @property
    def changed(self) -> dict[str, Any]:
        """Keys of a person's file with the best, whose budget a run solves."""
        return self.job.all_keys(self.best.keys, self.best.checkpointing, with_budget=True)

    def _go_on_from(self, found: Iterable[Tried]) -> bool:
        """Take the best of ``found`` if it beats the best so far; whether it does."""
        one = min(found, key=lambda one: one.order, default=self.best)
        if is_better := one.beats(self.best):
            self._best = one
        return is_better

    def _descend(self) -> None:
        since = 0
        for at in itertools.cycle(range(len(MOVES))):
            base, move = self.best, MOVES[at]
            every = self._changed(move, base)
            to_come = [*MOVES, *MOVES][at + 1 : at + len(MOVES) - since]
            self._ahead = sum(len(self._new(self._changed(other, base))) for other in to_come)
            self._ahead += len(base.choices) + self._whole_plans
            if self._new(every):
                self.say(move.words)
            found = self.evaluate(every, _held(base), to_win=True)
            since = 0 if self._go_on_from(found) else since + 1
            if since == len(MOVES):
                return

    @property
    def _whole_plans(self) -> int:
        """For how many plans the two of whole models in the end count."""
        depths = self.job.depths
        return 2 * (1 + depths.whole // (depths.short + depths.longer)) if depths else 2

    def _new(self, every: Iterable[Choices]) -> list[Choices]:
        """Those that nobody has planned, with a checkpointing of their own."""
        tried = {job for job, is_own, _ in self._tried if not is_own}
        return [one for one in every if _job(keys_of(one, self.job.values)) not in tried]

    def _changed(self, move: Move, base: Tried) -> list[Choices]:
        """``base`` with each change of a move, if it acts on categories that take a while."""
        (memory, time), solved = base.planned[:2], base.checkpointing
        nbytes = sum(memory.peak.by_kind.get(kind, 0) for kind in move.frees)
        acts_on = sum(time.expected.get(category, 0.0) for category in move.shortens)
        acts_on += nbytes * (solved.ms_of_a_byte * time.slowdown if solved else 0.0)
        if base.fits and acts_on < _WORTH * time.expected_ms:
            return []
        now = {**self.job.values, **base.keys}
        changes = move.changes(now, self.job.facts)
        if self.job.exact:
            changes = (change for change in changes if effect_of(change, now) is Effect.NONE)
        return [self._with(base, move, change) for change in changes]

    def _with(self, base: Tried, move: Move, change: Keys) -> Choices:
        """The choices of ``base`` and a change, without those that mean nothing beside it."""
        now = {**self.job.values, **change}
        kept = {m: keys for m, keys in base.choices.items() if any(m.changes(now, self.job.facts))}
        return with_move(kept, move, change)

    def _take_back(self) -> None:
        """Leave out the changes that save nothing."""
        best = self.compared = self.best
        self._ahead = self._whole_plans
        self.say("each change taken back")
        every = [_but(best.choices, move) for move in best.choices]
        without = dict(zip(best.choices, self.evaluate(every, _held(best)), strict=True))
        needless = [
            move for move, one in without.items() if one.fits == best.fits and not best.beats(one)
        ]
        if needless:
            (one,) = self.evaluate([_but(best.choices, *needless)], _held(best))
            if one.fits == best.fits and not best.beats(one):
                self._best = one
        self.without = {**without}
        if best.checkpointing is not None:
            (self.without[None],) = self.evaluate([best.choices], None)

    def _confirm(self) -> None:
        """Plan the best and the user's config as whole models."""
        self._ahead = self._whole_plans - 1
        self.say("whole models")
        found = self.evaluate([self.best.choices], _held(self.best), is_whole=True)
        self._ahead = self._whole_plans // 2 - 1
        (self.own,) = self.evaluate([{}], None, is_whole=True)
        self._ahead = 0
        if self.own.plan is None:  # a shortened model reads no checkpoint, and needs less memory
            raise ValueError(self.own.reason)
        self.winner = min([*found, self.own], key=lambda one: one.order)


def _held(best: Tried) -> int | None:
    """The room of others, by the best; the user's own checkpointing stays where no table starts."""
    return best.checkpointing.nbytes if best.checkpointing else None


def _but(choices: Choices, *others: Move) -> Choices:
    return {move: keys for move, keys in choices.items() if move not in others}


def _job(keys: Keys) -> Any:
    """Equal for the same job: a batch of a rank says that of a step."""
    return frozenset(item for item in keys.items() if item[0] != GLOBAL)
