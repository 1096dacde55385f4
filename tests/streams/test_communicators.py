"""Collectives of each communicator come in one order on all its ranks, and how many there are.

Two ranks that give one communicator different collectives hang. Each communicator costs memory:
a plan counts 600 MiB for one.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.training import Run
from tests.streams.sanitizer import sanitized
from tests.streams.test_races import BASE

Order = dict[tuple[int, ...], list[str]]


def _orders(folder: Path, run: Run, rank: int) -> Order:
    """Operations by the ranks that take part; neither of one rank, nor between stages."""
    (step,) = sanitized(folder, run, rank=rank)
    found: Order = defaultdict(list)
    for ranks, name in step.collectives:
        if len(ranks) > 1 and "send" not in name and "recv" not in name:
            found[ranks].append(name)
    return found


SMALL = replace(BASE, world=4, ep=2, global_batch=16)
RUNS = {
    "an empty shard": replace(SMALL, ep=1, experts=5, replicate=("router",), ac="fp8"),
    "halves and HSDP": replace(SMALL, overlap_exchanges="halves", dp_replicate=2),
    "rows and float8": replace(SMALL, exchange_rows="rank", exchange_dtype="float8", tp=2),
    "stages": replace(
        SMALL, pp=2, microbatch_size=2, overlap_exchanges="halves", exchange_rows="rank"
    ),
}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(pytest.param(name, range(4), marks=pytest.mark.slow) for name in RUNS),
        ("stages", (2, 3)),
    ],
)
def test_all_ranks_give_one_order(name: str, ranks: Sequence[int], tmp_path: Path):
    """The first stage of "stages" has a dense block and none with experts."""
    orders = {rank: _orders(tmp_path, RUNS[name], rank) for rank in ranks}
    compared = 0
    for (one, mine), (other, its) in itertools.combinations(orders.items(), 2):
        for of in {of for of in mine.keys() | its.keys() if {one, other} <= set(of)}:
            assert mine[of] == its[of], (one, other, of)
            compared += len(mine[of])
    assert compared > 0


@pytest.mark.slow
def test_how_many_communicators_there_are(tmp_path: Path):
    """Halves have one more, for counts of tokens, and rows by node two, for their hops."""
    run = replace(BASE, world=16, ep=16, experts=32, global_batch=32)
    stock, ours, halves, node, both = (
        step.communicators
        for step in sanitized(
            tmp_path,
            replace(run, parallelize="stock"),
            run,
            replace(run, overlap_exchanges="halves"),
            replace(run, exchange_rows="node"),
            replace(run, exchange_rows="node", overlap_exchanges="halves"),
        )
    )
    assert (stock, ours, halves) == (ours, ours, ours + 1)
    assert (node, both) == (ours + 2, halves + 2)


def test_replicated_parameters_are_summed_over_replicas_of_shards_too(tmp_path: Path):
    """Under HSDP two axes replicate them: that of the replicas, and that of the shards."""
    run = replace(BASE, ep=2, dp_replicate=2)
    sums = [
        Counter(ranks for ranks, name in step.collectives if name == "c10d::allreduce_")
        for step in sanitized(tmp_path, run, replace(run, replicate=("router",)))
    ]
    (more,) = (sums[1] - sums[0]).items()
    assert more == (tuple(range(run.world)), 1)
