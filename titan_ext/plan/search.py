# SPDX-License-Identifier: BSD-3-Clause
"""The search of ``titan_ext tune``: which keys make a step of a job fastest in a memory.

**What is searched.** A candidate is a set of changes (``plan.moves``) and a checkpointing. The
latter is not searched with the others: an integer program (``activation_checkpoint.solver``) gives
the best policies for some budgets, once for all candidates whose blocks run alike. The largest
budget for which the step leaves room is taken.

**How.** A local search that follows the largest part of the step. A round tries every move that
acts on enough: a move saves at most the parts that it shortens, and what the bytes that it frees
are worth to the recompute. Then the round adds up the moves that helped, the best first, and the
search goes on from the best of all. Rounds of degrees and batches take turns with rounds of all
other keys, whose worth depends on them. Those also start from the second best choice of degrees,
with what only that allows. A move that did not help is not tried again before a degree or the batch
has changed. Two rounds that gain less than ``_GAIN`` are the last. Then come budgets between two
that were tried, and every change that saves nothing is taken back. The winner, the runner-up and
the user's config are planned as whole models.

**Prices.** Two shortened models (``plan.shorten``), each in a fork (``plan.forks``). The second is
planned only if the price of the first is new.

benchmarks/tune_check.py holds it against all configs of a small grid.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from titan_ext.activation_checkpoint.solved import KEY
from titan_ext.plan.candidates import Job, Level, block_keys
from titan_ext.plan.forks import FailedError, Forks, Steps
from titan_ext.plan.memory import MemoryKind, MemoryPlan
from titan_ext.plan.moves import (
    EP,
    GLOBAL,
    LOCAL,
    OFFLOAD_LIMIT,
    REPLICATE,
    Choices,
    Effect,
    Move,
    keys_of,
    moves_from,
    with_move,
)
from titan_ext.plan.shorten import NotAlikeError
from titan_ext.plan.time import StepTime

_GAIN = 0.003
"""Of a step: what a change has to save."""
_WORTH = 0.01
"""Of a step: what a move has to act on to be tried."""
_CLOSE = 0.1
"""Of a step: by how much other degrees may be slower whose other keys are tried, too."""
_ADDED_UP = 4
"""Moves of a round that are tried together, at most."""
_ROUNDS = 8
_TRIES = 3
"""Levels of a candidate that are priced, at most, once one of them fits."""
_NEIGHBOURHOOD = (LOCAL, EP, REPLICATE)
_SEEN = 0.01
"""Of what blocks hold at most: moments with less do not limit it."""
_HELD = (MemoryKind.EXACT, MemoryKind.FLOAT8, MemoryKind.ALL_TO_ALL)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A candidate and its price.

    Attributes:
        choices: Its changes, by the moves that made them.
        keys: The same by key, without what the user has.
        level: Its checkpointing; None for the user's own.
        memory, time: Its price; None if it does not start.
        reason: Why it does not.
        is_whole: Whether the whole model was planned.
    """

    choices: Choices
    keys: Mapping[str, Any]
    level: Level | None = None
    memory: MemoryPlan | None = None
    time: StepTime | None = None
    reason: str = ""
    is_whole: bool = False

    @property
    def fits(self) -> bool:
        """Whether it does even if the plan of its memory is off by its band."""
        return self.memory is not None and self.memory.surely_spare >= 0

    @property
    def us_per_token(self) -> float:
        """Microseconds of a GPU."""
        return self.time.step_ms * 1e3 / self.time.tokens if self.time else float("inf")

    @property
    def order(self) -> tuple[bool, float]:
        """The fastest that fits comes first; what does not by what it lacks."""
        if self.memory is None or self.fits:
            return self.memory is None, self.us_per_token
        return True, -self.memory.surely_spare * 1e9

    def saves(self, other: "Tried") -> float:
        """Of the time of a token with ``other``, the share that it saves."""
        return 1 - self.us_per_token / other.us_per_token


@dataclass(eq=False)
class Search:
    """Tunes ``job`` when ``run`` is called.

    Attributes:
        job: What to tune.
        forks: Of ``job.ask``.
        most: What changes may do to results.
        say: Is told what the search does next.
        tried: All candidates that were priced.
        own: The user's config.
        winner: What was found, planned as a whole model; None until then.
        without: The best without one of its moves, and (None) with the user's checkpointing.
        compared: The best with which those compare: prices of shortened models.
    """

    job: Job
    forks: Forks
    most: Effect
    say: Callable[[str], None] = lambda text: None
    tried: list[Tried] = field(default_factory=list)
    own: Tried | None = None
    winner: Tried | None = None
    without: dict[Move | None, Tried] = field(default_factory=dict)
    compared: Tried | None = None
    _levels: dict[Any, Sequence[Level] | FailedError] = field(default_factory=dict)
    _lost: set[Any] = field(default_factory=set)
    _priced: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def best(self) -> Tried:
        """Of what was priced so far."""
        found = self.winner or min(self.tried, key=lambda one: one.order, default=None)
        assert found is not None, "the user's config comes first"
        return found

    def run(self) -> None:
        """Search, and confirm what was found. Raises ValueError if the user's config is wrong."""
        self.say("your config")
        (own,) = self.forks.run([self._price({}, None)])
        if own.memory is None:
            raise ValueError(own.reason)
        self.own = own
        self.say("its best checkpointing")
        self.forks.run([self.evaluate({}, own)])
        without_gain = 0
        for number in range(_ROUNDS):
            before, is_coarse = self.best, number % 2 == 0
            self.say(f"round {number + 1}: {'degrees and batches' if is_coarse else 'other keys'}")
            self._round(before, is_coarse)
            if not is_coarse and (other := self._elsewhere(before)):
                self._round(other, is_coarse, but=before)
            is_better = before.fits != self.best.fits or self.best.saves(before) >= _GAIN
            without_gain = 0 if is_better else without_gain + 1
            if without_gain == 2:
                break
        self._refine()
        self._confirm(self._take_back())

    # -- prices

    def _price(self, choices: Choices, level: Level | None, *, is_whole: bool = False) -> Steps:
        """Of a candidate with a level, or with the user's checkpointing."""
        keys = keys_of(choices, self.job.values)
        one = Tried(choices=choices, keys=keys, level=level)
        asked = self.all_keys(one)
        is_whole = is_whole or self.job.depths is None
        try:
            if is_whole:
                (priced,) = yield [("price", asked, 0)]
            else:
                priced = yield from self._shortened(asked)
        except NotAlikeError:
            return (yield from self._price(choices, level, is_whole=True))
        if isinstance(priced, FailedError):
            one = replace(one, reason=str(priced))
        else:
            one = replace(one, memory=priced[0], time=priced[1], is_whole=is_whole)
        self.tried.append(one)
        return one

    def _shortened(self, asked: Mapping[str, Any]) -> Steps:
        """The longer model is planned only if no candidate had the same price of the short one.

        Keys often say what was so already: "always" what is the default, "block" what is auto.
        """
        assert self.job.depths is not None
        (short,) = yield [("price", asked, self.job.depths.short)]
        if isinstance(short, FailedError):
            return short
        for price, whole in self._priced:
            if price == short:
                return whole
        (longer,) = yield [("price", asked, self.job.depths.longer)]
        if isinstance(longer, FailedError):
            return longer
        whole = self.job.priced(short, longer)
        self._priced.append((short, whole))
        return whole

    def all_keys(self, one: Tried) -> dict[str, Any]:
        """What a candidate changes, its checkpointing as a table."""
        keys = self._with_level(one, "keys")
        if one.level is not None and not any("offload" in x for x in one.level.table.values()):
            keys.pop(OFFLOAD_LIMIT, None)  # a config that offloads nothing must not have it
        return keys

    def keys_for_a_file(self, one: Tried) -> dict[str, Any]:
        """What a candidate changes, its checkpointing as a budget that the run solves."""
        return self._with_level(one, "budget_keys")

    def _with_level(self, one: Tried, name: str) -> dict[str, Any]:
        keys, level = dict(one.keys), one.level
        is_float8 = level is not None or self.job.values.get(f"{KEY}.policy") == "fp8"
        if not is_float8 or (level and level.is_none):  # others have none of its keys
            keys = {k: v for k, v in keys.items() if not k.startswith(f"{KEY}.")}
        elif level and self.job.exact:
            keys[f"{KEY}.exempt"] = ["*"]
        return keys | getattr(level, name)({**self.job.values, **keys}) if level else keys

    def evaluate(self, choices: Choices, near: Tried) -> Steps:
        """A candidate with the best level that fits; ``near`` says about how much room there is."""
        keys, one = keys_of(choices, self.job.values), None
        for key in dict.fromkeys([block_keys(keys), frozenset(keys.items())]):
            if key not in self._levels:
                (found,) = yield [("levels", keys)]
                self._levels[key] = found
            levels = self._levels[key]
            if isinstance(levels, FailedError):
                return (yield from self._price(choices, near.level))
            for is_preset in (False, True):
                some = [level for level in levels if bool(level.preset) is is_preset]
                if not some:
                    continue
                one = yield from self._try_levels(choices, some, _room(near))
                if one.memory is not None:
                    return one
        assert one is not None, "there is a key"
        return one

    def _try_levels(self, choices: Choices, levels: Sequence[Level], room: int) -> Steps:
        tried: list[Tried] = []
        levels = sorted(levels, key=lambda level: level.nbytes)
        while len(tried) < _TRIES or not any(one.fits for one in tried):
            level = max((x for x in levels if x.nbytes <= room), default=levels[0])
            if any(one.level is level for one in tried) or _gains_nothing(level, tried):
                break
            tried.append((yield from self._price(choices, level)))
            if tried[-1].memory is None or self._is_behind(tried[-1]):
                break
            room = _room(tried[-1])
        return min(tried, key=lambda one: one.order)

    def _is_behind(self, one: Tried) -> bool:
        """Whether a candidate that fits would not be the best if it recomputed nothing at all."""
        if not (one.fits and self.best.fits and one.level and one.time):
            return False
        saved = one.level.ms / one.time.step_ms
        return one.us_per_token * (1 - saved) > self.best.us_per_token

    # -- the search

    def _elsewhere(self, best: Tried) -> Tried | None:
        """The best of other degrees or another batch, if it is close."""
        here = _place(self.job.values, best)
        others = [
            one
            for one in self.tried
            if one.fits == best.fits
            and one.saves(best) > -_CLOSE
            and _place(self.job.values, one) != here
        ]
        return min(others, key=lambda one: one.order, default=None)

    def _round(self, base: Tried, is_coarse: bool, but: Tried | None = None) -> None:
        """Try moves from ``base`` one by one, without those from ``but``; then what helped."""
        others = {move for move, _ in self._moves_from(but)} if but else set()
        moves = [
            (move, change)
            for move, change in self._worth_trying(base)
            if change.keys().isdisjoint(_NEIGHBOURHOOD) is not is_coarse and move not in others
        ]
        found = self.forks.run(
            self.evaluate(with_move(base.choices, move, change), base) for move, change in moves
        )
        helped = []
        for (move, change), one in zip(moves, found, strict=True):
            if one.order < base.order and (not base.fits or one.saves(base) >= _GAIN / 3):
                helped.append((one.order, move, change))
            elif base.fits:
                self._lost.add(_mark({**self.job.values, **base.keys}, change))
        helped.sort(key=lambda one: one[0])
        together: list[Choices] = []
        choices, used = base.choices, list[Move]()
        for _, move, change in helped:
            if move not in used and len(used) < _ADDED_UP:
                used.append(move)
                choices = with_move(choices, move, change)
                together.append(choices)
        self.forks.run(self.evaluate(choices, base) for choices in together[1:])

    def _worth_trying(self, base: Tried) -> Iterator[tuple[Move, Mapping[str, Any]]]:
        """Moves that act on parts which take a while, and were not tried nearby."""
        assert base.time is not None
        assert base.memory is not None
        ms, step_ms = base.time.ms, base.time.step_ms
        freed = self._ms_of_a_byte(base)
        seen = {_signature(one.keys) for one in self.tried}
        now = {**self.job.values, **base.keys}
        for move, change in self._moves_from(base):
            direct = sum(ms.get(part, 0.0) for part in move.parts)
            nbytes = sum(base.memory.peak.by_kind.get(kind, 0) for kind in move.frees)
            if base.fits and direct + freed * nbytes < _WORTH * step_ms:
                continue
            keys = keys_of(with_move(base.choices, move, change), self.job.values)
            if _signature(keys) not in seen and _mark(now, change) not in self._lost:
                yield move, change

    def _moves_from(self, base: Tried) -> Iterator[tuple[Move, Mapping[str, Any]]]:
        return moves_from({**self.job.values, **base.keys}, self.job.facts, self.most)

    def _ms_of_a_byte(self, base: Tried) -> float:
        """What a byte more for activations would save of the recompute, by the next level."""
        levels = self._levels.get(block_keys(base.keys))
        if base.level is None or not isinstance(levels, Sequence):
            return 0.0
        larger = [x for x in levels if x.nbytes > base.level.nbytes and not x.preset]
        if not larger:
            return 0.0
        more = min(larger, key=lambda level: level.nbytes)
        return (base.level.ms - more.ms) / (more.nbytes - base.level.nbytes)

    def _refine(self) -> None:
        """Try budgets between the best one's and the next."""
        best = self.best
        levels = self._levels.get(block_keys(best.keys))
        if best.level is None or not best.fits or not isinstance(levels, Sequence):
            return
        larger = [x for x in levels if x.nbytes > best.level.nbytes and not x.preset]
        if best.level.preset or not larger or _gains_nothing(larger[0], [best]):
            return
        self.say("budgets between")
        self.forks.run([self._between(best, best.level, larger[0].nbytes)])

    def _between(self, best: Tried, level: Level, high: int) -> Steps:
        (found,) = yield [("levels", dict(best.keys), level.nbytes, high)]
        if not isinstance(found, FailedError) and found:
            key = block_keys(best.keys)
            known = self._levels[key]
            assert isinstance(known, Sequence)
            self._levels[key] = [*known, *found]
            yield from self._try_levels(best.choices, [level, *found], _room(best))

    def _take_back(self) -> Tried:
        """The best without the changes that save nothing."""
        best = self.compared = self.best
        self.say("each change taken back")
        choices: list[Choices] = [
            {move: keys for move, keys in best.choices.items() if move is not other}
            for other in best.choices
        ]
        steps = [self._known(without, best) for without in choices]
        if best.level is not None:
            steps.append(self._price(best.choices, None))
        self.without = dict(zip([*best.choices, None], self.forks.run(steps), strict=False))
        needless = [
            move
            for move, one in self.without.items()
            if move is not None and one.fits == best.fits and best.saves(one) < _GAIN / 3
        ]
        kept = {move: keys for move, keys in best.choices.items() if move not in needless}
        if not needless:
            return best
        (one,) = self.forks.run([self._known(kept, best)])
        return one if one.fits == best.fits and best.saves(one) < _GAIN else best

    def _known(self, choices: Choices, near: Tried) -> Steps:
        """The best of those changes that was tried, or that is found with levels of their own."""
        keys = keys_of(choices, self.job.values)
        tried = [x for x in self.tried if x.keys == keys and bool(x.level) is bool(near.level)]
        if tried:
            return min(tried, key=lambda one: one.order)
        if near.level is None:
            return (yield from self._price(choices, None))
        return (yield from self.evaluate(choices, near))

    def _confirm(self, best: Tried) -> None:
        """Plan the best two, and the user's, as whole models."""
        assert self.own is not None
        others = [x for x in self.tried if (x.keys, x.level) != (best.keys, best.level)]
        second = min(others, key=lambda one: one.order, default=self.own)
        self.say("whole models")
        found = self.forks.run(
            self._price(one.choices, one.level, is_whole=True) for one in (best, second, self.own)
        )
        *_, self.own = found
        for _ in range(_TRIES):
            mine = [one for one in found if one.keys == best.keys and one.level is not None]
            if not best.fits or best.level is None or any(one.fits for one in mine):
                break
            levels = self._levels.get(block_keys(best.keys))
            assert isinstance(levels, Sequence)
            less = [x for x in levels if x.nbytes < best.level.nbytes and not x.preset]
            if not less:
                break
            best = replace(best, level=max(less, key=lambda level: level.nbytes))
            if all(one.level is not best.level for one in mine):
                found += self.forks.run([self._price(best.choices, best.level, is_whole=True)])
        self.winner = min(found, key=lambda one: one.order)


def _gains_nothing(level: Level, tried: Sequence[Tried]) -> bool:
    """Whether a level saves too little of the best step that was tried, which fits."""
    best = min(tried, key=lambda one: one.order, default=None)
    if best is None or not best.fits or best.level is None or best.time is None:
        return False
    return best.level.ms - level.ms < _GAIN * best.time.step_ms


def _room(one: Tried) -> int:
    """Bytes that the blocks of a candidate could hold, by the room at each moment of its step."""
    assert one.memory is not None
    held = [
        (sum(moment.by_kind.get(kind, 0) for kind in _HELD), one.memory.room(moment))
        for moment in one.memory.moments
    ]
    most = one.level.nbytes if one.level else max(nbytes for nbytes, _ in held)
    times = [1 + room / nbytes for nbytes, room in held if nbytes > _SEEN * most]
    return int(most * min(times, default=1.0))


def _signature(keys: Mapping[str, Any]) -> Any:
    return frozenset((key, value) for key, value in keys.items() if key != GLOBAL)


def _mark(now: Mapping[str, Any], change: Mapping[str, Any]) -> Any:
    return tuple(now[key] for key in _NEIGHBOURHOOD), _signature(change)


def _place(values: Mapping[str, Any], one: Tried) -> Any:
    """Its degrees and batch."""
    return tuple(one.keys.get(key, values[key]) for key in _NEIGHBOURHOOD)
