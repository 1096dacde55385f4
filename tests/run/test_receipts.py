"""What a run says at its end of what really ran."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, Runs, observed
from titan_ext.run.record import Receipts, compiled, sent_nbytes


@pytest.mark.parametrize(
    ("kind", "nbytes", "ranks", "sent"),
    [
        ("all_gather", 100, 4, 300),
        ("reduce_scatter", 400, 4, 300),
        ("all_reduce", 400, 4, 600),
        ("all_to_all", 400, 4, 300),
        ("send", 100, 2, 100),
        ("recv", 100, 2, 0),
    ],
)
def test_bytes_that_a_rank_sends(kind: str, nbytes: int, ranks: int, sent: int):
    assert sent_nbytes(kind, nbytes, ranks) == sent


def _count() -> dict[str, Any]:
    """A rank of two, in three steps of which the second counts."""
    dist.init_process_group("gloo")
    trainer: Any = SimpleNamespace(model_parts=[torch.nn.Linear(1, 1)], device=torch.device("cpu"))
    check = Receipts()
    check.after_build(trainer)
    for step in range(1, 4):
        with check.around_step(trainer):
            whole, part = torch.ones(8), torch.ones(4)
            dist.all_gather_into_tensor(whole, part)
            dist.reduce_scatter_tensor(part, whole)
            for _ in range(step):
                dist.all_reduce(whole)
    dist.destroy_process_group()
    return check.receipts()


def test_the_second_step_counts_what_is_sent_and_then_nothing_does(tmp_path: Path):
    first, second = run_ranks(_count, 2, log_folder=tmp_path)
    assert first["sent"] == second["sent"]
    assert first["sent"] == {
        "all_reduce": {"bytes": 64, "calls": 2},
        "all_gather": {"bytes": 16, "calls": 1},
        "reduce_scatter": {"bytes": 16, "calls": 1},
    }
    assert first["communication"]["backend"] == "gloo"


def _compile() -> list[dict[str, Any]]:
    """Receipts without a compiler, after one graph, after recompiles, and over the limit."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 3
    function = torch.compile(lambda x, n: x * n, backend="eager", dynamic=False)
    found = [compiled()]
    for times in ((1,), (2, 3), (4, 5, 6)):
        for n in times:
            function(torch.ones(2), float(n))
        found.append(compiled())
    return found


def test_graphs_recompiles_and_the_limit_are_counted(tmp_path: Path):
    (found,) = run_ranks(_compile, 1, log_folder=tmp_path)
    none, once, again, over = found
    assert none == {}
    assert once == {"graphs": 1, "recompiles": 0, "recompile_limit_count": 0}
    assert again == {"graphs": 3, "recompiles": 2, "recompile_limit_count": 0}
    assert (over["graphs"], over["recompile_limit_count"] > 0) == (3, True)


def test_a_run_leaves_receipts_in_its_folder(runs: Runs):
    run = observed(Run(world=2, ep=2, parallelize="submodule"))
    runs.get(run)
    (start,) = json.loads((runs.folder(run) / "run.json").read_text())["starts"]
    receipts = start["receipts"]
    assert receipts["dispatcher"] == {"FunctionalAllToAllTokenDispatcher": 2}
    assert receipts["attention"]
    assert receipts["sent"]["all_to_all"]["calls"] == 16  # of two layers, five and three again
    (line,) = [line for line in start["gained"] if line.startswith("ran: ")]
    assert "dispatcher FunctionalAllToAllTokenDispatcher x 2; gloo; sent in step 2" in line
