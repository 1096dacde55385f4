# SPDX-License-Identifier: BSD-3-Clause
"""Idle time of the stages of a pipeline, by the order of what each rank does.

A dry run sees one rank. Every stage is taken to be as long as that one, and sending to take no
time.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleGPipe,
)

from titan_ext.plan.streams import Streams, Work


class Action(NamedTuple):
    """A forward (F), backward (B), or one half of it (I: of inputs, W: of weights)."""

    kind: str
    stage: int
    microbatch: int


def actions_of(schedule: Any) -> dict[int, list[Action]]:
    """Actions of each rank of a schedule of torch, in order; ValueError for an unknown one."""
    if isinstance(schedule, PipelineScheduleMulti):
        return {
            rank: [
                Action(one.computation_type.value, one.stage_index, one.microbatch_index or 0)
                for action in order
                if action is not None
                for one in action.sub_actions or (action,)
                if one.computation_type.value in ("F", "B", "I", "W")
            ]
            for rank, order in schedule.pipeline_order.items()
        }
    if not isinstance(schedule, Schedule1F1B | ScheduleGPipe):
        name = type(schedule).__name__
        raise ValueError(f"pipeline schedule {name}: how long its stages wait is not known.")
    # torch 2.15 has the order of these two for display; 1F1B's last rank starts at microbatch 1.
    return one_stage_actions(
        "GPipe" if isinstance(schedule, ScheduleGPipe) else "1F1B",
        # Neither has a public name.
        schedule._stage.num_stages,
        schedule._n_microbatches,
    )


def one_stage_actions(schedule: str, stages: int, microbatches: int) -> dict[int, list[Action]]:
    """Actions of "1F1B" or "GPipe", with one stage a rank."""
    orders: dict[int, list[Action]] = {}
    for stage in range(stages):
        ahead = microbatches if schedule == "GPipe" else min(microbatches, stages - stage)
        kinds = "F" * ahead + "BF" * (microbatches - ahead) + "B" * ahead
        batches = {"F": itertools.count(), "B": itertools.count()}
        orders[stage] = [Action(kind, stage, next(batches[kind])) for kind in kinds]
    return orders


def idle_share(orders: Mapping[int, Sequence[Action]], forward: float) -> float:
    """Idle time of a rank, over the busy time of the busiest one. ``forward`` is its share of a
    microbatch's time in a stage. Raises ValueError for actions that wait for each other."""
    backward = 1 - forward
    # That both halves of a backward take as long as each other is assumed.
    cost = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    waited_for = {
        (kind == "F", stage, microbatch): Work(cost[kind], queue=rank, index=place)
        for rank, order in orders.items()
        for place, (kind, stage, microbatch) in enumerate(order)
        if kind != "W"
    }
    last = max(action.stage for order in orders.values() for action in order)
    streams = Streams()
    try:
        for rank, order in orders.items():
            for kind, stage, microbatch in order:
                # The first forward and the last stage's backward wait for nothing but their queue.
                if stage != (0 if kind == "F" else last):
                    before = kind == "F", stage + (-1 if kind == "F" else 1), microbatch
                    streams.wait(rank, [waited_for[before]])
                its_own = kind == "F", stage, microbatch
                streams.add(rank, Work(cost[kind]) if kind == "W" else waited_for[its_own])
        streams.run()
    except (KeyError, AssertionError):  # for what nobody does, or for each other
        raise ValueError("the stages of this pipeline schedule wait for each other.") from None
    busiest = max(sum(cost[action.kind] for action in order) for order in orders.values())
    return max(works[-1].end or 0.0 for works in streams.queues.values()) / busiest - 1
