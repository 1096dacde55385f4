"""Parameters that are not FSDP's like all others: replicated, ignored, or added late, refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchtitan.config import TrainingConfig
from torchtitan.distributed.utils import clip_grad_norm_, get_spmd_context

from tests.helpers.cluster import refusal_of, run_ranks
from tests.helpers.collectives import count
from tests.helpers.training import Run, Runs, observed, small_spec
from titan_ext import api

# Nothing is clipped: the norm of a whole tensor and that of its shards differ in the last bit.
EXPERTS = Run(world=2, ep=2, layers=2, parallelize="submodule", keep_gradients=True, max_norm=1e9)
EXPERTS = replace(observed(EXPERTS), accumulate=2, optimizer="muon")
REPLICAS = replace(EXPERTS, ep=1, dp_replicate=2, accumulate=1)


@pytest.mark.parametrize("run", [EXPERTS, pytest.param(REPLICAS, marks=pytest.mark.slow)], ids=str)
def test_replicated_trains_as_sharded(run: Run, runs: Runs):
    """The second step's gradients tell of parameters and optimizer states after the first.

    AdamW updates norms, and Muon matrices, of which a layer has whole ones beside sharded.
    """
    names = ("router", "norms", "layers.1.attention.wq")
    kept = runs.get(replace(run, replicate=names, reduce_scatter_buffers=2))
    sharded = runs.get(run)
    assert kept.losses == sharded.losses
    assert kept.grad_norms == pytest.approx(sharded.grad_norms, rel=1e-5)
    gradients = kept.ranks[0].gradients
    assert gradients.keys() == sharded.ranks[0].gradients.keys()
    for name, gradient in sharded.ranks[0].gradients.items():
        assert np.array_equal(gradients[name], gradient), name
    ours, its = (count(result.ranks[0].collectives) for result in (kept, sharded))
    assert ours["all_reduce"] > its["all_reduce"]


def _own_loop(folder: Path) -> dict[str, Any]:
    dist.init_process_group("gloo")
    torch.autograd.set_multithreading_enabled(False)
    torch.manual_seed(42)
    training = TrainingConfig(mixed_precision_param="float32")
    ignored = "layers.1.attention_norm"
    built, parallel_dims = api.build_decoder(
        small_spec(2),
        parallelism=api.ParallelismConfig(fsdp_wrap="submodule"),
        training=training,
        ignored=(ignored,),
    )
    model: Any = built
    attention: Any = model.layers["0"].attention
    found: dict[str, Any] = {}

    def forward() -> Any:
        tokens = (torch.arange(2 * 32).view(2, 32) * 7 + dist.get_rank()) % 2048
        return model(tokens, positions=torch.arange(32).expand(2, 32)).float().square().mean()

    whole = attention.wo.weight
    with get_spmd_context(parallel_dims=parallel_dims)():
        attention.wo.weight = nn.Parameter(torch.ones(4, 4))
        found["replaced"] = refusal_of(forward)
        attention.wo.weight = whole
        attention.late = nn.Linear(4, 4)
        found["late"] = refusal_of(forward)
        del attention.late
        optimizer = torch.optim.AdamW(
            [p for name, p in model.named_parameters() if not name.startswith(ignored)], lr=1e-2
        )
        for _ in range(2):
            forward().backward()
            found["norm"] = clip_grad_norm_(
                [p for p in model.parameters() if isinstance(p, DTensor)], max_norm=1.0
            ).item()
            found["ignored gradient"] = model.get_parameter(f"{ignored}.weight").grad.sum().item()
            optimizer.step()
            optimizer.zero_grad()
    found["ignored is whole"] = not isinstance(model.get_parameter(f"{ignored}.weight"), DTensor)
    dist.barrier()
    return found


def test_own_loop(tmp_path: Path):
    first, second = run_ranks(_own_loop, 2, tmp_path, log_folder=tmp_path / "logs")
    for found in (first, second):
        assert found["replaced"].startswith("layers.0.attention.wo.weight: added to the model, or")
        assert found["late"].startswith(
            "layers.0.attention.late.weight, layers.0.attention.late.bias: added to"
        )
        assert found["ignored is whole"]
    assert first["norm"] == second["norm"]
    assert first["ignored gradient"] != second["ignored gradient"]
