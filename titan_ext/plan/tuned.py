# SPDX-License-Identifier: BSD-3-Clause
"""Output of ``titan_ext tune``: a table before and after, a file, figures and words.

Nothing here searches or plans. ``plan.search.Search`` has all candidates and their prices.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from titan_ext.base.facts import Effect
from titan_ext.base.messages import format_bytes
from titan_ext.parallelize.keys import effect_of
from titan_ext.plan.search import Plan, Search, Tried
from titan_ext.plan.time import Category
from titan_ext.toml.files import WORLD_SIZE, to_toml

_GIB = 2**30


def report(search: Search) -> Iterator[str]:
    """The user's config and the winner side by side, and the winner's changes."""
    own, best = plans = search.own.planned, search.best.planned
    rows = [
        ("", ["yours", "tuned"]),
        (
            f"expect tokens/s a GPU{best.time.band}",
            [f"{plan.time.expected_tokens_per_second:,.0f}" for plan in plans],
        ),
        (
            "ideal, at the rates of single kernels",
            [f"{x.time.tokens_per_second:,.0f}" for x in plans],
        ),
        ("ms a step", [f"{plan.time.expected_ms:,.1f}" for plan in plans]),
        ("GiB counted at the peak", [f"{plan.memory.peak.nbytes / _GIB:.2f}" for plan in plans]),
        ("GiB to spare", [f"{plan.memory.spare / _GIB:.2f}" for plan in plans]),
    ]
    for category in Category:
        both = [plan.time.expected.get(category, 0.0) for plan in plans]
        if max(both) >= 0.05:
            rows.append((f"  {category}", [f"{ms:,.1f}" for ms in both]))
    for name, values in rows:
        yield f"{name:<48.48}" + "".join(f"{value:>12}" for value in values)
    if not best.fits:
        lacks = format_bytes(-best.memory.surely_spare)
        yield f"no config that was tried is sure to fit; the smallest is over by {lacks}."
    elif not own.fits:
        yield f"yours {_why_not(own)}: its times are of a step that would run out of memory."
    found = [
        f"{', '.join(f'{key} = {to_toml(value)}' for key, value in keys.items())}\n    {words}"
        for keys, words in changes(search)
    ]
    yield from ("", *(found or ["yours is the fastest that was found."]))


def changes(search: Search) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The winner's changes: keys of a file, and what they save and do."""
    best, solved = search.best, search.best.checkpointing
    keys = search.changed
    for move in best.choices:
        mine = {key: keys.pop(key) for key in best.choices[move] if key in keys}
        if mine:
            effect = effect_of(mine, search.job.values)
            yield mine, f"{_saves(search, move)}: {move.words}; {effect}"
    if keys and solved is not None:
        held = format_bytes(solved.nbytes)
        recomputed_ms = solved.ms * best.planned.time.slowdown
        words = f"{held} of activations are kept, and {recomputed_ms:.0f} ms recomputed"
        words = words if solved.table else "no checkpointing: there is room for everything"
        exact = search.job.exact or not solved.table
        effect = Effect.NONE if exact else "what is kept in float8 is rounded"
        yield keys, f"{_saves(search, None)}: {words}; {effect}"


def _saves(search: Search, move: Any) -> str:
    without = search.without.get(move)
    if without is None or without.plan is None:
        return "required by another change" if without is not None else "comes with another change"
    best = search.compared
    if not without.fits:
        freed = format_bytes(max(best.planned.memory.spare - without.planned.memory.spare, 0))
        return f"frees {freed}" + (", without which it may not fit" if search.best.fits else "")
    ms = (without.us_per_token - best.us_per_token) * without.plan.time.tokens / 1e3
    return f"saves {ms:,.0f} ms" if ms >= 1 else f"saves {ms:.1f} ms"


def file_lines(search: Search, extends: str, given: Mapping[str, str], about: str) -> list[str]:
    """A TOML file with the winner's changes, and the flags that were ``given`` to the command."""
    best, own = (
        f"{plan.time.verdict()}; {plan.memory.peak.nbytes / _GIB:.1f} GiB"
        for plan in (search.best.planned, search.own.planned)
    )
    verdict = "" if search.own.fits else f", which {_why_not(search.own.planned)}"
    lines = [
        f"# {about}",
        f"# {best[:1].upper()}{best[1:]}: planned, not measured.",
        f"# Without the changes: {own}{verdict}.",
        f"extends = {to_toml(extends)}",
        f"{WORLD_SIZE} = {search.job.facts.ranks}",
    ]
    found = list(changes(search))
    changed = {key for keys, _ in found for key in keys}
    lines += [f"{key} = {value}" for key, value in given.items() if key not in changed]
    for keys, words in found:
        lines += ["", f"# {words}", *(f"{key} = {to_toml(value)}" for key, value in keys.items())]
    return lines


def to_json(search: Search) -> dict[str, Any]:
    """Every candidate, in the order in which it was tried."""
    return {
        "machine": search.job.machine,
        "ranks": search.job.facts.ranks,
        "memory": search.job.memory,
        "exact": search.job.exact,
        "own": _candidate(search.own),
        "best": _candidate(search.best),
        "changes": search.changed,
        "tried": [_candidate(one) for one in search.tried],
    }


def _candidate(one: Tried) -> dict[str, Any]:
    held = {"activations": one.checkpointing.nbytes} if one.checkpointing else {}
    if one.plan is None:
        return {"keys": dict(one.keys), "reason": one.reason}
    memory, time = one.plan.memory, one.plan.time
    return {
        "keys": dict(one.keys),
        **held,
        "is_whole": one.plan.is_whole,
        "fits": one.fits,
        "spare": memory.spare,
        "peak": memory.peak.nbytes,
        "expected_tokens_per_second": time.expected_tokens_per_second,
        "expected_ms": time.expected_ms,
        "tokens_per_second": time.tokens_per_second,
        "step_ms": time.step_ms,
        "ms": {category.name.lower(): ms for category, ms in time.ms.items()},
    }


def _why_not(plan: Plan) -> str:
    """Verdict on a plan that is not sure to fit."""
    return "may not fit" if plan.memory.spare >= 0 else "does not fit"
