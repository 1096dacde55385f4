# SPDX-License-Identifier: BSD-3-Clause
"""A plan of a whole model from two plans of a shortened one: blocks of a kind are alike.

``tune`` plans dozens of configs, and a plan of 61 layers takes 25 CPU seconds. Layers repeat with
a period (1, or 2 where attention alternates) after a few first ones (dense ones). So two short
models that differ by one or more periods give what a period adds: milliseconds, and bytes at every
phase. Compared with whole models in tests/plan/test_plan_search.py and benchmarks/LOG.md.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

from titan_ext.plan.memory import MemoryPlan, Peak

_LAYER = re.compile(r"\blayers\.(\d+)")
# Planned: two periods of 16B gave a peak of 46.4 GiB for 38.38 of the whole model, three gave
# 38.38.
_PERIODS, _MORE = 3, 2
"""Periods of the short model, and how many more the longer one has: with fewer than three, not all
of FSDP's buffers of neighbours live at once."""


class NotAlikeError(ValueError):
    """Steps of two depths differ by more than their layers explain."""


class Depths(NamedTuple):
    """Two depths of a model, and what is needed to go from them to its own."""

    whole: int
    """Layers of the model."""
    short: int
    longer: int
    """Of the two that are planned."""
    head: int
    """So many of the first layers are followed by those that the short one lacks."""
    period: int
    """Layers repeat after so many."""

    @classmethod
    def of(cls, config: Any) -> "Depths | None":
        """Depths for a trainer's config; None where a model cannot be shortened.

        Nor is a pipeline's: its stages are short, and cut by the names of their layers.
        """
        layers = getattr(config.model_spec.model, "layers", None)
        if config.parallelism.pipeline_parallel_degree > 1 or not isinstance(layers, list):
            return None
        kinds = [kind_of(layer) for layer in layers]
        whole = len(kinds)
        for period in range(1, whole // 4 + 1):
            first = next(
                (i + 1 for i in reversed(range(whole - period)) if kinds[i] != kinds[i + period]), 0
            )
            more = _MORE * period
            short = first + _PERIODS * period + (whole - first) % period
            if short + 2 * more <= whole:
                return cls(whole, short, short + more, first + period, period)
        return None

    @property
    def times(self) -> float:
        """Number of times that the short model lacks what the longer one has more."""
        return (self.whole - self.short) / (self.longer - self.short)

    def stands_for(self, layer: int) -> int:
        """Number of layers of the model for which one of the short model stands."""
        is_repeated = self.head - self.period <= layer < self.head
        return 1 + (self.whole - self.short) // self.period if is_repeated else 1


def cut(config: Any, layers: int) -> None:
    """Leave the first ``layers`` of a trainer's config, in place, and no weights to load.

    A checkpoint on the disk is the whole model's: held against the short one, it would not fit.
    """
    config.model_spec.model.layers = config.model_spec.model.layers[:layers]
    config.checkpoint = replace(config.checkpoint, enable=False)


def kind_of(value: Any) -> Any:
    """Equal for layers that run alike: initialisers, which scale with depth, do not count."""
    if is_dataclass(value) and not isinstance(value, type):
        names = (f.name for f in fields(value) if f.name != "param_init")
        return type(value), tuple(kind_of(getattr(value, name)) for name in names)
    if isinstance(value, list | tuple):
        return tuple(map(kind_of, value))
    return repr(value) if isinstance(value, dict) else value


def whole_memory(short: MemoryPlan, longer: MemoryPlan, depths: Depths) -> MemoryPlan:
    """The memory of a step of the whole model, from those of the two short ones.

    Phases of its middle layers are left out: bytes change evenly there, so the ends have the peak.
    Raises NotAlikeError.
    """
    added = depths.longer - depths.short
    kept = [
        phase
        for phase in longer.phases
        if not depths.head <= _layer(phase.phase) < depths.head + added
    ]
    names = [_renamed(phase.phase, depths.head, added) for phase in short.phases]
    if [phase.phase for phase in kept] != names:
        raise NotAlikeError("other phases than the layers explain")
    missing = depths.whole - depths.short

    def whole(one: Peak, other: Peak) -> Peak:
        return Peak(
            whole_of(one.nbytes, other.nbytes, depths),
            _renamed(one.phase, depths.head, missing),
            whole_of(one.by_kind, other.by_kind, depths),
        )

    phases = [whole(one, other) for one, other in zip(short.phases, kept, strict=True)]
    peak = Peak.of(phases)
    if _renamed(short.peak.phase, depths.head, added) == longer.peak.phase:
        exact = whole(short.peak, longer.peak)
        peak = exact if exact.phase == peak.phase else peak
    return replace(whole_of(short, longer, depths), peak=peak, phases=phases)


def _layer(phase: str) -> int:
    """-1 for a phase that is no layer's."""
    found = _LAYER.search(phase)
    return int(found[1]) if found else -1


def _renamed(phase: str, head: int, added: int) -> str:
    """A phase of a short model, where ``added`` layers follow the first ``head``."""
    layer = _layer(phase)
    return phase if layer < head else _LAYER.sub(f"layers.{layer + added}", phase)


def whole_of(short: Any, longer: Any, depths: Depths) -> Any:
    """Of a step of the whole model, from those of the two short ones: on a line, number by number.

    What is no number is as in the short one.
    """
    if isinstance(short, bool) or short == longer:
        return short
    if isinstance(short, int) and isinstance(longer, int):
        return round(short + depths.times * (longer - short))
    if isinstance(short, int | float) and isinstance(longer, int | float):
        return short + depths.times * (longer - short)
    if isinstance(short, Mapping):
        keys = dict.fromkeys([*short, *longer])
        return {key: whole_of(short.get(key, 0), longer.get(key, 0), depths) for key in keys}
    if is_dataclass(short) and not isinstance(short, type):
        pairs = {f.name: (getattr(short, f.name), getattr(longer, f.name)) for f in fields(short)}
        return replace(short, **{name: whole_of(*pair, depths) for name, pair in pairs.items()})
    return short
