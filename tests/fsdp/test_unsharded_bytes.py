"""Bytes that FSDP holds unsharded: those of dry runs, against what was measured in real runs.

A tracker on FSDP2's storages read the numbers event by event on two gloo ranks, when the tree had
one (fsdp/tracker.py, last in commit 3026e80), and gave these peaks.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, observed, patched, planned_config

_SUBMODULE = Run(world=2, ep=2, parallelize="submodule", narrow=True, steps=2)
_WHOLE = observed(Run(world=2, parallelize="block"))
MEASURED = {
    _WHOLE: 11_874_304,  # two blocks of three; FSDP2 by itself has three
    replace(_WHOLE, stock_copy_out=True): 17_811_456,
    replace(_SUBMODULE, global_batch=8): 6_364_672,
    replace(
        _SUBMODULE,
        prefetch="2MiB",
        reshard_groups=(("attention", "never"), ("layers.2.*", "always")),
    ): 10_365_440,
}


@pytest.mark.parametrize(("run", "measured"), MEASURED.items(), ids=str)
def test_a_plan_holds_unsharded_what_was_measured(run: Run, measured: int, tmp_path: Path):
    (planned,) = run_ranks(_planned, 1, run, tmp_path, log_folder=tmp_path / "logs")
    assert planned == measured


def _planned(run: Run, folder: Path) -> int:
    from titan_ext.plan.dry_run import dry_run
    from titan_ext.plan.stand_ins import as_rank

    with as_rank(run.world, 0), patched(run):
        done = dry_run(planned_config(run, folder), run.world, 0, memory=0, as_on_a_gpu=False)
    assert done.memory is not None
    return done.memory.unsharded
