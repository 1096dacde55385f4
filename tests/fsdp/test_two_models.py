"""Two decoders in one process, as of a student and its teacher: each trains as it does alone."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchtitan.distributed.utils import get_spmd_context

from tests.helpers.cluster import run_ranks
from tests.helpers.training import small_spec
from titan_ext import api


def _trained() -> tuple[list[float], list[float], list[list[float]]]:
    """Losses of two decoders that train one after the other, and of both in turn."""
    dist.init_process_group("gloo")
    torch.autograd.set_multithreading_enabled(False)
    (first,), (second,), together = _train([1]), _train([2]), _train([1, 2])
    return first, second, together


def _train(seeds: list[int]) -> list[list[float]]:
    """Train one decoder for each seed, step by step in turn; their losses."""
    models = []
    for seed in seeds:
        torch.manual_seed(seed)
        parallelism = api.ParallelismConfig(expert_parallel_degree=2, fsdp_wrap="submodule")
        model, dims = api.build_decoder(small_spec(2), parallelism=parallelism)
        models.append((model, torch.optim.SGD(model.parameters(), lr=0.1), dims))
    losses: list[list[float]] = [[] for _ in models]
    for step in range(2):
        for found, (model, optimizer, dims) in zip(losses, models, strict=True):
            tokens = (torch.arange(2 * 32).view(2, 32) * 7 + dist.get_rank() + step) % 2048
            with get_spmd_context(parallel_dims=dims)():
                logits = model(tokens, positions=torch.arange(32).expand(2, 32))
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(), tokens.flatten()
                )
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return losses


def test_two_models_train_as_each_alone(tmp_path: Path):
    for first, second, together in run_ranks(_trained, 2, log_folder=tmp_path):
        assert together == [first, second]
        assert first != second


def test_other_degrees_are_refused_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(api.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(api, "_shared_dims", [])
    two, four = (api.ParallelismConfig(expert_parallel_degree=ep) for ep in (2, 4))
    assert api._parallel_dims(two) is api._parallel_dims(two)
    with pytest.raises(ValueError, match=r"ep: expected \[2\], as of the first model, got \[4\]"):
        api._parallel_dims(four)
    two.spmd_backend = four.spmd_backend = "partial_dtensor"
    assert api._parallel_dims(two) is not api._parallel_dims(four)
