"""The host waits for the device where it reads a value: how often a step does, stock beside ours.

On ranks of gloo, whose tensors have values: those of a dry run have none, and are not read. Counted
are the Python calls that wait where a tensor is on an accelerator.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cluster import run_ranks
from tests.helpers.planted import reads
from tests.helpers.training import Run, start_as_planned

BASE = Run(world=2, ep=2, narrow=True, global_batch=8, parallelize="submodule", ac="selective")
_MOE_LAYERS = 2


def _reads(run: Run, folder: Path) -> Counter[str]:
    """By function, in the second step."""
    found: Counter[str] = Counter()
    trainer, batches = start_as_planned(run, folder)
    trainer.train_step(batches)
    trainer.step = 2
    with reads(found):
        trainer.train_step(batches)
    trainer.close()
    return found


FEATURES: dict[str, dict[str, Any]] = {
    "halves": {"overlap_exchanges": "halves"},
    "rows": {"exchange_rows": "rank"},
    "float8": {"ac": "fp8", "exchange_dtype": "float8", "float8_all_gather": "blocks"},
    "offload": {"ac": "on_host"},
    "recorder": {"ac": "fp8", "recorded": True},
}


@pytest.mark.parametrize(
    "names",
    [
        ("halves", "recorder"),
        pytest.param(("rows", "float8", "offload"), marks=pytest.mark.slow),
    ],
)
def test_no_feature_reads_more_of_a_layer(names: tuple[str, ...], tmp_path: Path):
    """Once a step more than stock: are the gradients finite? Halves read once for each of them.

    The recorder's ranks compare what they sent, too, where Titan's own reads have waited already.
    Of a layer Titan reads what to send and what to expect, in the forward and in the recompute.
    The recompute's are on the host already where a policy saves them.
    """

    def of(run: Run) -> Counter[str]:
        first, second = run_ranks(_reads, 2, run, tmp_path / str(run), log_folder=tmp_path)
        assert first == second
        return first

    stock = of(replace(BASE, parallelize="stock"))
    counts = "AllToAllTokenDispatcher._sync_token_count_exchange"
    assert stock[counts] == 2 * 2 * _MOE_LAYERS
    for name in names:
        ours = of(replace(BASE, **FEATURES[name]))
        assert ours.pop("are_finite") == 1
        assert ours.pop("CollectiveWatchdog.compare", 0) == (name == "recorder")
        expected = dict(stock)
        if name == "halves":
            # B's tokens could not be sent before A's experts have run, else.
            expected[counts] *= 2
        elif name == "rows":
            # What to expect is told with what to send.
            expected[f"Functional{counts}"] = expected.pop(counts) // 2
        assert ours == expected
