# SPDX-License-Identifier: BSD-3-Clause
"""Judges the pace of a run: a late rank, experts with too many tokens, a slow link, a lasting drop.

Every rank says of each logged step how long it waited for token counts, how long tokens travelled,
and how many its experts got (``run.meter``). Counts are a few bytes, so a rank that waits for them
waits for its neighbours, and the rank that others wait for waits least itself. Nothing here
communicates.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from titan_ext.base.messages import ranks_in_words

_NOTABLE = 0.1
"""Of a step: less is called neither late nor slow."""
_LASTING, _RECENT = 3, 5
"""So many of the last logged steps make a warning."""
_SLOW_LINK, _NOTABLE_LINK = 3.0, 0.005
"""Times what counts and tokens take elsewhere, and of a step: a link carries more than those."""
_UNEVEN = 2.0
_KEPT, _ENOUGH = 100, 20
"""Logged steps whose median is the usual pace, and how many it takes to have one."""
_DROP = 0.9
"""Of the usual tokens a second."""
_LASTING_DROP = 5


@dataclass(frozen=True)
class RankStep:
    """What a rank says of a logged step.

    Attributes:
        group: The first of the ranks with which it exchanges tokens.
        wait_ms: That it waited for token counts, in all layers of a step.
        travel_ms: From when its tokens were sent until its experts had theirs, in all layers.
        step_ms: The step, by its host's clock.
        tokens: That its experts got, by layer, in the last microbatch; 0 for a layer without
            experts or of another stage.
    """

    rank: int
    group: int
    wait_ms: float
    travel_ms: float
    step_ms: float
    tokens: tuple[int, ...] = ()

    def word(self) -> str:
        """As a line of the job's store."""
        us = (round(1e3 * ms) for ms in (self.wait_ms, self.travel_ms, self.step_ms))
        return " ".join(map(str, (self.rank, self.group, *us, *self.tokens))) + "\n"

    @classmethod
    def read(cls, word: str) -> "RankStep":
        """The inverse of ``word``."""
        rank, group, wait, travel, step, *tokens = map(int, word.split())
        return cls(rank, group, wait / 1e3, travel / 1e3, step / 1e3, tuple(tokens))


@dataclass
class Findings:
    """Of one logged step: the latest rank, the slowest link, the fullest layer, by how much.

    ``late_ms`` is by how much the others of its group waited longer than the rank. ``imbalance`` is
    by layer: tokens of the fullest rank over the mean of its group, and that rank.
    """

    wait_ms: float = 0.0
    travel_ms: float = 0.0
    late_rank: int = -1
    late_ms: float = 0.0
    slow_link: tuple[tuple[int, ...], float, float] | None = None
    imbalance: dict[int, tuple[float, int]] = field(default_factory=dict)
    is_late: bool = False
    is_uneven: bool = False

    @classmethod
    def of(cls, rows: Iterable[RankStep]) -> "Findings":
        """From what the ranks said of one step; groups of one rank tell nothing."""
        groups: dict[int, list[RankStep]] = defaultdict(list)
        for row in rows:
            groups[row.group].append(row)
        found = cls()
        every = [row for group in groups.values() for row in group]
        if not every:
            return found
        found.wait_ms = statistics.fmean(row.wait_ms for row in every)
        found.travel_ms = statistics.fmean(row.travel_ms for row in every)
        step_ms = statistics.median(row.step_ms for row in every)
        on_links: dict[tuple[int, ...], float] = {}
        uneven = 0.0
        for group in groups.values():
            if len(group) < 2:
                continue
            least = min(group, key=lambda row: row.wait_ms)
            others = statistics.median(row.wait_ms for row in group if row is not least)
            if others - least.wait_ms > found.late_ms:
                found.late_rank, found.late_ms = least.rank, others - least.wait_ms
            # The last to come waits for nobody, and tokens travel when all have come.
            alone_ms = least.wait_ms + min(row.travel_ms for row in group)
            on_links[tuple(sorted(row.rank for row in group))] = alone_ms
            # Of two ranks one can have twice the mean at most.
            most = min(_UNEVEN, (1 + len(group)) / 2)
            for layer, tokens in enumerate(zip(*(row.tokens for row in group), strict=False)):
                if (fullest := max(tokens)) == 0:
                    continue
                times = fullest * len(tokens) / sum(tokens)
                if times > found.imbalance.get(layer, (0.0, 0))[0]:
                    found.imbalance[layer] = times, group[tokens.index(fullest)].rank
                uneven = max(uneven, times / most)
        found.slow_link = slow_link(on_links, step_ms)
        found.is_late = found.late_ms > _NOTABLE * step_ms
        found.is_uneven = uneven >= 1
        return found

    @property
    def fullest(self) -> tuple[int, float, int]:
        """Layer, times the mean, and rank of the layer that is least balanced."""
        layer = max(self.imbalance, key=lambda x: self.imbalance[x][0], default=-1)
        return (layer, *self.imbalance.get(layer, (1.0, -1)))

    def metrics(self) -> dict[str, float]:
        """As Titan logs them."""
        found = {
            "titan_ext/waits for token counts(ms)": self.wait_ms,
            "titan_ext/tokens travel to experts(ms)": self.travel_ms,
        }
        if self.late_rank >= 0:
            found["titan_ext/latest rank"] = float(self.late_rank)
            found["titan_ext/latest rank, others wait(ms)"] = self.late_ms
        for layer, (times, _) in sorted(self.imbalance.items()):
            found[f"titan_ext/tokens of the fullest rank over the mean, layer {layer}"] = times
        return found

    def words(self) -> dict[tuple[str, object], str]:
        """What is wrong, by what it is about; a lasting one is warned of."""
        found: dict[tuple[str, object], str] = {}
        if self.slow_link is not None:
            ranks, slow_ms, usual_ms = self.slow_link
            found["link", ranks] = (
                f"the link between {ranks_in_words(ranks)} is slow: counts and tokens travel for "
                f"{slow_ms:.1f} ms a step, elsewhere for {usual_ms:.1f}"
            )
        if self.is_late:
            found["late", self.late_rank] = (
                f"rank {self.late_rank} is late: the others wait {self.late_ms:.1f} ms a step for "
                "it before they exchange tokens"
            )
        if self.is_uneven:
            layer, times, rank = self.fullest
            found["uneven", ()] = (
                f"experts are uneven: those of rank {rank} got {times:.2f} times the mean tokens "
                f"in layer {layer}"
            )
        return found


def slow_link(
    took: Mapping[tuple[int, ...], float], step_ms: float
) -> tuple[tuple[int, ...], float, float] | None:
    """The ranks whose messages take much longer than those of others, and both times in ms.

    ``took`` is how long messages take among ranks once the last of them has come. None if no link
    costs a notable part of the step.
    """
    if len(took) < 2:
        return None
    slowest = max(took, key=took.__getitem__)
    usual = statistics.median(ms for ranks, ms in took.items() if ranks != slowest)
    excess = took[slowest] - usual
    if took[slowest] <= _SLOW_LINK * usual or excess <= _NOTABLE_LINK * step_ms:
        return None
    return slowest, took[slowest], usual


class Judge:
    """Follows the logged steps of a run, and says once what lasts.

    ``said`` keeps the warnings for the end of the run; ``latest`` the newest findings.
    """

    def __init__(self) -> None:
        self.said: list[str] = []
        self.latest: Findings | None = None
        self._recent: deque[set[tuple[str, object]]] = deque(maxlen=_RECENT)
        self._known: set[tuple[str, object]] = set()
        self._usual: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._slow: list[tuple[int, float]] = []

    def take(self, step: int, rows: Sequence[RankStep]) -> list[str]:
        """Judge what the ranks said of ``step``; return new warnings."""
        self.latest = findings = Findings.of(rows)
        words = findings.words()
        self._recent.append(set(words))
        lasting = {key for key in words if sum(key in of for of in self._recent) >= _LASTING}
        new = [f"step {step}: {words[key]}" for key in words if key in lasting - self._known]
        self._known |= lasting
        self.said += new
        return new

    def pace(self, step: int, step_ms: float) -> list[str]:
        """Hold the mean step since the last logged one against the usual; return a new warning.

        Slow steps do not become the usual pace until they have been warned of.
        """
        wait_ms = self.latest.wait_ms if self.latest else 0.0
        is_slow, usual_ms, usual_wait_ms = False, 0.0, 0.0
        if len(self._usual) >= _ENOUGH:
            usual_ms, usual_wait_ms = map(statistics.median, zip(*self._usual, strict=True))
            is_slow = step_ms * _DROP > usual_ms
        if not is_slow:
            self._slow.clear()
            self._usual.append((step_ms, wait_ms))
            return []
        self._slow.append((step, step_ms))
        if len(self._slow) < _LASTING_DROP:
            return []
        now_ms, (since, _) = statistics.median(ms for _, ms in self._slow), self._slow[0]
        self._slow.clear()
        self._usual.clear()
        text = (
            f"step {step}: tokens/s are {1 - usual_ms / now_ms:.0%} below the median of the last "
            f"{_KEPT} logged steps, since step {since}: a step takes {now_ms:.1f} ms in place of "
            f"{usual_ms:.1f}. {self._moved(wait_ms - usual_wait_ms, now_ms - usual_ms)}"
        )
        self.said.append(text)
        return [text]

    def _moved(self, more_wait_ms: float, more_ms: float) -> str:
        """Which part of the step has become longer."""
        if self.latest is None:
            return "Which part moved is not known: nothing measures waits here."
        words = "; ".join(["", *self.latest.words().values()])
        if more_wait_ms > more_ms / 4:
            return f"Ranks wait {more_wait_ms:.1f} ms longer for each other{words}."
        return f"Ranks wait for each other as before, so the work takes longer{words}."
