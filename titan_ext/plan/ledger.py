# SPDX-License-Identifier: BSD-3-Clause
"""Where the time of a step went, in the parts of a plan and beside it: ``titan_ext ledger FOLDER``.

It reads what Titan leaves in a run's folder: the profiler's traces of its ranks, which
``plan.trace`` cuts into parts, the structured log, which says how long the step took by another
clock, and ``plan_rank0.json``, if there is one. Of several ranks it says whom the others waited
for, whose experts got most tokens, and which ranks have a slow link between them.
"""

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_ext.base.machines import KINDS
from titan_ext.base.messages import ranks_in_words
from titan_ext.plan.time import Part
from titan_ext.plan.trace import Trace, read_trace
from titan_ext.run.pace import slow_link
from titan_ext.run.planned import file_name

LEDGER = "ledger.json"
_FOLDER = re.compile(r"iteration_(\d+)")
_FILE = re.compile(r"rank(\d+)_trace\.json(\.gz)?")
_FOR_OTHERS = (Part.EXCHANGES, Part.GATHERS, Part.REDUCTIONS, Part.COLLECTIVES)
"""Parts in which a rank waits for other ranks."""
_MOST_RANKS = 64
_NOTABLE = 0.1
"""Of a step: smaller things are not called late or slow."""
_UNEVEN = 1.2
_BARS = 8


@dataclass
class Ledger:
    """One step of a run.

    Attributes:
        folder: Of the run.
        step: As Titan counts.
        traces: By rank; each has one step or, with ``profiler_active``, several, which are
            averaged.
        left_out: How many ranks have traces that were not read.
        planned: Milliseconds of each part by a plan of ``rank``; None without one.
        machine: For which the plan was made.
        logged_ms: The step by Titan's structured log, without the profiler's own time; None
            without the log.
    """

    folder: Path
    step: int
    rank: int
    traces: dict[int, Trace]
    left_out: int = 0
    planned: dict[Part, float] | None = None
    machine: str = ""
    logged_ms: float | None = None
    ms: dict[int, dict[Part, float]] = field(init=False)
    """Of each part, by rank."""

    def __post_init__(self) -> None:
        self.ms = {rank: _mean([s.by_part() for s in t.steps]) for rank, t in self.traces.items()}

    @classmethod
    def read(cls, folder: Path, *, rank: int = 0, step: int | None = None) -> "Ledger":
        """Read the newest profiled step of a run, or ``step``.

        Raises ValueError for a folder without traces, and for a rank or step that has none.
        """
        found: dict[int, dict[int, Path]] = {}
        for path in sorted(folder.glob("**/iteration_*/**/rank*_trace.json*")):
            names = [match for part in path.parts if (match := _FOLDER.fullmatch(part))]
            if names and (match := _FILE.fullmatch(path.name)):
                found.setdefault(int(names[-1][1]), {})[int(match[1])] = path
        if not found:
            raise ValueError(
                f"{folder}: expected traces of Titan's profiler, such as profiling/traces/"
                "iteration_10/rank0_trace.json.gz; run it with --profiler.enable_profiling."
            )
        step = max(found) if step is None else step
        if step not in found:
            raise ValueError(f"{folder}: step {step} has no trace; expected one of {[*found]}.")
        files = found[step]
        if rank not in files:
            raise ValueError(f"{folder}: rank {rank} has no trace of step {step}.")
        every = -(-len(files) // _MOST_RANKS)
        ranks = dict.fromkeys([rank, *sorted(files)[::every]])
        planned, machine = _plan_of(folder / file_name(rank))
        return cls(
            folder=folder,
            step=step,
            rank=rank,
            traces={r: read_trace(files[r]) for r in ranks},
            left_out=len(files) - len(ranks),
            planned=planned,
            machine=machine,
            logged_ms=_logged_ms(folder, rank, step),
        )

    @property
    def step_ms(self) -> float:
        """Of the rank, by its trace."""
        return sum(self.ms[self.rank].values())

    def differences(self) -> list[tuple[Part, float, float]]:
        """Each part with its milliseconds and those planned, the largest difference first."""
        mine, planned = self.ms[self.rank], self.planned or {}
        rows = [(p, mine.get(p, 0.0), planned.get(p, 0.0)) for p in Part]
        rows = [row for row in rows if row[1] or row[2]]
        return sorted(rows, key=lambda row: -abs(row[1] - row[2]))

    def late(self) -> tuple[int, float, str] | None:
        """The rank that the others wait for, by how many ms, and what takes it longer.

        It waits least itself. None if no rank waits for another for a notable part of the step.
        """
        waits = self._waits()
        if len(waits) < 2:
            return None
        rank = min(waits, key=waits.__getitem__)
        others = [r for r in waits if r != rank]
        by_ms = statistics.median(waits[r] for r in others) - waits[rank]
        if by_ms < _NOTABLE * self.step_ms:
            return None

        def more(ms: Mapping[int, Mapping[Any, float]], key: Any) -> float:
            return ms[rank].get(key, 0.0) - statistics.median(ms[r].get(key, 0.0) for r in others)

        part = max((p for p in Part if p not in _FOR_OTHERS), key=lambda p: more(self.ms, p))
        of_part = {
            r: _mean([{u: ms.get(part, 0.0) for u, ms in s.by_unit().items()} for s in trace.steps])
            for r, trace in self.traces.items()
        }
        unit = max(of_part[rank], key=lambda u: more(of_part, u), default="")
        where = f", most in {unit} ({more(of_part, unit):+.1f})" if unit else ""
        return rank, by_ms, f"{part}: {more(self.ms, part):+.1f} ms against the others{where}"

    def _waits(self) -> dict[int, float]:
        return {r: sum(ms.get(p, 0.0) for p in _FOR_OTHERS) for r, ms in self.ms.items()}

    def imbalance(self) -> dict[str, tuple[float, int]]:
        """Of each unit with routed experts: tokens of the fullest rank over the mean, and who."""
        rows = {rank: trace.steps[-1].rows for rank, trace in self.traces.items()}
        found = {}
        for unit in dict.fromkeys(unit for of_rank in rows.values() for unit in of_rank):
            its = {rank: of_rank[unit] for rank, of_rank in rows.items() if unit in of_rank}
            if len(its) > 1 and (mean := statistics.fmean(its.values())):
                fullest = max(its, key=its.__getitem__)
                found[unit] = its[fullest] / mean, fullest
        return found

    def slow_link(self) -> tuple[tuple[int, ...], float, float] | None:
        """Ranks that exchange tokens with each other more slowly than others (``run.pace``)."""
        took: dict[tuple[int, ...], float] = {}
        for trace in self.traces.values():
            ranks = tuple(trace.groups.get("mesh_ep", ()))
            if ranks in took or not self.traces.keys() >= set(ranks) or not ranks:
                continue
            if ms := self._sent_ms(Part.EXCHANGES, ranks):
                took[ranks] = ms
        return slow_link(took, self.step_ms)

    def _sent_ms(self, part: Part, ranks: Sequence[int]) -> float:
        """How long messages take between ``ranks`` once the last of them has come."""
        each = [self.traces[rank].steps[-1].messages.get(part, []) for rank in ranks]
        return sum(map(min, zip(*each, strict=True))) if len({*map(len, each)}) == 1 else 0.0

    def kinds(self) -> dict[str, float]:
        """Milliseconds of the rank's kernels and messages by ``op_cost.KINDS``; of no CPU."""
        trace = self.traces[self.rank]
        if not trace.on_device:
            return {}
        found = _mean([step.kernels for step in trace.steps])
        for part in _FOR_OTHERS:
            near = trace.groups.get("mesh_ep", ()) if part is Part.EXCHANGES else self.traces
            ranks = [*near] if self.traces.keys() >= {*near, self.rank} and near else [self.rank]
            found[part.name.lower()] = self._sent_ms(part, ranks) or self._sent_ms(
                part, [self.rank]
            )
        return {kind: found[kind] for kind in KINDS if found.get(kind)}

    def verdicts(self) -> Iterator[str]:
        """What is worth a sentence, the difference from the plan first."""
        uneven = self.imbalance()
        unit, (times, who) = max(uneven.items(), key=lambda x: x[1][0], default=("", (1.0, 0)))
        fullest = f"rank {who}'s experts got {times:.2f} times the mean tokens in {unit}"
        is_uneven = times >= _UNEVEN
        part, took, planned = self.differences()[0]
        if self.planned is not None:
            why = f": {fullest}" if part is Part.EXCHANGES and is_uneven else ""
            is_uneven = is_uneven and not why
            yield f"largest difference: {part}, {took:.1f} ms, planned {planned:.1f}{why}"
        else:
            yield f"most of it: {part}, {took:.1f} ms; a plan in the folder would stand beside it"
        if late := self.late():
            rank, by_ms, why = late
            yield f"late: rank {rank} keeps the others waiting {by_ms:.1f} ms ({why})"
        if is_uneven:
            yield f"uneven: {fullest}"
        if slow := self.slow_link():
            ranks, took, usual = slow
            yield (
                f"slow link: between {ranks_in_words(ranks)} tokens travel for {took:.1f} ms "
                f"when the last of them has come, elsewhere for {usual:.1f}"
            )

    def report(self, *, by_unit: bool = False) -> str:
        """The step in lines."""
        of = f"rank {self.rank} of {len(self.traces)} read"
        left = f" ({self.left_out} left out)" if self.left_out else ""
        log = ""
        if self.logged_ms is not None:
            log = f"; {self.logged_ms:.1f} by Titan's log ({self.step_ms / self.logged_ms:.1%})"
        lines = [f"step {self.step}, {of}{left}: {self.step_ms:.1f} ms, the sum of its parts{log}"]
        planned = self.planned is not None
        head = f"planned for {self.machine}, " if planned else ""
        lines += [f"      ms  {head}part"]
        for part, took, then in self.differences():
            beside = f"{then:10.1f} " if planned else " "
            lines.append(f"{took:10.1f} {beside}{part}")
        lines += self.verdicts()
        return "\n".join([*lines, *(self._units() if by_unit else ())])

    def _units(self) -> Iterator[str]:
        units = self.traces[self.rank].steps[-1].by_unit()
        parts = [p for p in Part if any(p in of_unit for of_unit in units.values())]
        yield "by unit, ms: " + "; ".join(f"{p.name.lower()} {p}" for p in parts)
        for unit, of_unit in units.items():
            cells = ", ".join(
                f"{p.name.lower()} {of_unit[p]:.1f}" for p in parts if of_unit.get(p, 0.0) >= 0.05
            )
            yield f"{sum(of_unit.values()):10.1f}  {unit or 'outside of units'}: {cells}"

    def to_json(self) -> dict[str, Any]:
        """Every figure, in ms."""
        late, slow = self.late(), self.slow_link()
        return {
            "folder": str(self.folder),
            "step": self.step,
            "rank": self.rank,
            "step_ms": self.step_ms,
            "logged_ms": self.logged_ms,
            "ms": _named(self.ms[self.rank]),
            "planned": None if self.planned is None else _named(self.planned),
            "machine": self.machine,
            "kinds": self.kinds(),
            "ranks": {rank: _named(ms) for rank, ms in self.ms.items()},
            "units": {
                unit: _named(ms) for unit, ms in self.traces[self.rank].steps[-1].by_unit().items()
            },
            "late": None if late is None else {"rank": late[0], "ms": late[1], "why": late[2]},
            "imbalance": {
                unit: {"times": times, "rank": rank}
                for unit, (times, rank) in self.imbalance().items()
            },
            "slow_link": None
            if slow is None
            else {"ranks": slow[0], "ms": slow[1], "usual_ms": slow[2]},
            "verdicts": [*self.verdicts()],
        }

    def write(self, folder: Path) -> None:
        """Write ``ledger.json`` and ``ledger.png``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LEDGER).write_text(json.dumps(self.to_json(), indent=1) + "\n")
        self._draw().savefig(folder / "ledger.png", dpi=100)

    def _draw(self) -> Any:
        """A matplotlib figure: a bar for the plan and for each of a few ranks."""
        from matplotlib import colormaps
        from matplotlib.figure import Figure

        waits = self._waits()
        ranks = [self.rank, *(r for r in sorted(waits, key=waits.__getitem__) if r != self.rank)]
        bars = {f"rank {rank}": self.ms[rank] for rank in ranks[:_BARS]}
        if self.planned is not None:
            bars = {f"planned, {self.machine}": self.planned} | bars
        figure = Figure(figsize=(11, 1.8 + 0.45 * len(bars)), layout="constrained")
        axes = figure.subplots()
        left, colours = [0.0] * len(bars), colormaps["tab20"]
        for index, part in enumerate(Part):
            widths = [ms.get(part, 0.0) for ms in bars.values()]
            if any(widths):
                axes.barh(
                    range(len(bars)), widths, left=left, color=colours(index), label=str(part)
                )
                left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(next(self.verdicts()), loc="left", fontsize="medium")
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8)
        return figure


def _mean(steps: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    keys = dict.fromkeys(key for step in steps for key in step)
    return {key: sum(step.get(key, 0.0) for step in steps) / len(steps) for key in keys}


def _named(ms: Mapping[Part, float]) -> dict[str, float]:
    return {part.name.lower(): ms[part] for part in Part if part in ms}


def _plan_of(file: Path) -> tuple[dict[Part, float] | None, str]:
    """What a plan's file says of the time of a step; nothing if there is none."""
    if not file.exists():
        return None, ""
    time = json.loads(file.read_text()).get("time")
    if not time:
        return None, ""
    named = {part.name.lower(): part for part in Part}
    return {named[n]: ms for n, ms in time["ms"].items() if n in named and ms}, time["machine"]


def _logged_ms(folder: Path, rank: int, step: int) -> float | None:
    """How long a step took by Titan's structured log, without what its profiler took to write."""
    spans = dict.fromkeys(("step_end", "kineto_profiler_step_call_end"), 0.0)
    for file in sorted(folder.glob(f"structured_logs/*rank_{rank}.*.jsonl")):
        for line in file.read_text().splitlines():
            if '_end"' in line and f'"step": {step},' in line:
                entry = json.loads(line)
                if entry["log_type_name"] in spans and entry.get("value"):
                    spans[entry["log_type_name"]] = entry["value"]
    whole, profiler = spans.values()
    return whole - profiler if whole else None
