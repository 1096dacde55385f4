"""The host waits for the device where it reads a value: how often a step does, stock beside ours.

On ranks of gloo, whose tensors have values: those of a dry run have none, and are not read. Counted
are the Python calls that wait where a tensor is on an accelerator.
"""

import sys
import unittest.mock
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, start_as_planned
from tests.streams.sanitizer import WATCHED

READS = (
    "tolist",
    "item",
    "numpy",
    "cpu",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)
BASE = Run(world=2, ep=2, narrow=True, global_batch=8, parallelize="submodule", ac="selective")
_MOE_LAYERS = 2


def _reads(run: Run, folder: Path) -> Counter[str]:
    """Calls by function in the second step: of Titan's layers, of ours, or of FSDP2."""
    found: Counter[str] = Counter()

    def counted(name: str) -> Any:
        real = getattr(torch.Tensor, name)

        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            frame: Any = sys._getframe(1)
            path = frame.f_code.co_filename
            if path.startswith(WATCHED):
                found[f"{Path(path).stem}.{frame.f_code.co_name}"] += 1
            return real(tensor, *args, **kwargs)

        return unittest.mock.patch.object(torch.Tensor, name, read)

    trainer, batches = start_as_planned(run, folder)
    trainer.train_step(batches)
    trainer.step = 2
    patches = [counted(name) for name in READS]
    for patch in patches:
        patch.start()
    trainer.train_step(batches)
    for patch in patches:
        patch.stop()
    trainer.close()
    return found


FEATURES: dict[str, dict[str, Any]] = {
    "halves": {"overlap_exchanges": "halves"},
    "rows": {"exchange_rows": "rank"},
    "float8": {"ac": "fp8", "exchange_dtype": "float8", "float8_all_gather": "blocks"},
    "offload": {"ac": "on_host"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(k, marks=[pytest.mark.slow] * (k != "halves")) for k in FEATURES]
)
def test_no_feature_reads_more_of_a_layer(name: str, tmp_path: Path):
    """Once a step more than stock: are the gradients finite? Halves read once for each of them.

    Of a layer Titan reads what to send and what to expect, in the forward and in the recompute.
    The recompute's are on the host already where a policy saves them.
    """

    def reads(run: Run) -> Counter[str]:
        first, second = run_ranks(_reads, 2, run, tmp_path / str(run), log_folder=tmp_path)
        assert first == second
        return first

    stock = reads(replace(BASE, parallelize="stock"))
    ours = reads(replace(BASE, **FEATURES[name]))
    counts = "token_dispatcher._sync_token_count_exchange"
    assert stock[counts] == 2 * 2 * _MOE_LAYERS
    assert ours.pop("tensors.are_finite") == 1
    expected = dict(stock)
    if name == "halves":
        # B's tokens could not be sent before A's experts have run, else.
        expected[counts] *= 2
    elif name == "rows":
        # What to expect is told with what to send.
        expected["dispatch._sync_token_count_exchange"] = expected.pop(counts) // 2
    assert ours == expected
