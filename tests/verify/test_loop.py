"""``titan_ext.api.verify``: a loop of the user's own, on two ranks."""

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.config import TrainingConfig
from torchtitan.distributed.utils import get_spmd_context

from tests.helpers.cluster import run_ranks
from tests.helpers.training import small_spec
from titan_ext import api
from titan_ext.base import no_accelerator


def _no_plain_one() -> nn.Module:
    raise ValueError("no plain one")


def _verify() -> list[list[str]]:
    dims: list[Any] = []
    scale = 1.0

    def build() -> nn.Module:
        (wrong := small_spec(3)).model.layers[1].moe.router.route_scale *= scale
        model, parallel_dims = api.build_decoder(
            wrong,
            parallelism=api.ParallelismConfig(expert_parallel_degree=2, exchange_dtype="float8"),
            training=TrainingConfig(mixed_precision_param="float32"),
        )
        dims.append(parallel_dims)
        return model

    def plain() -> nn.Module:
        found = small_spec(3)
        no_accelerator.adapt_spec(found)
        found.model.update_from_config(config=SimpleNamespace(parallelism=api.ParallelismConfig()))
        model = found.model.build()
        model.init_weights()
        return model.train()

    def loss(model: nn.Module, tokens_BL: torch.Tensor) -> torch.Tensor:
        positions_BL = torch.arange(32).expand(2, 32)
        logits_BLV = model(tokens_BL[:, :-1], positions=positions_BL)
        losses = nn.functional.cross_entropy(
            logits_BLV.flatten(0, 1), tokens_BL[:, 1:].flatten(), reduction="sum"
        )
        return losses / (4 * 64)

    def context() -> contextlib.AbstractContextManager[Any]:
        return get_spmd_context(parallel_dims=dims[-1])()

    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 256, (2, 33), generator=generator) for _ in range(4)]
    ranks = {"data_rank": int(os.environ["RANK"]), "data_ranks": 2}
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"{count} batches; expected a multiple of 2"):
            api.verify(build, loss, batches[:count], plain=plain, **ranks)
    with pytest.raises(ValueError, match="no plain one"):  # on all ranks
        api.verify(build, loss, batches, plain=_no_plain_one, context=context, **ranks)
    found = []
    for scale in (1.0, 1.01):  # noqa: B007  build reads it
        verdict = api.verify(build, loss, batches, plain=plain, context=context, **ranks)
        found.append(verdict.lines())
    return found


def test_a_loop_of_the_users_is_verified(tmp_path: Path):
    """The second time, a scale of one layer's scores is off by 1 %."""
    first, second = run_ranks(_verify, 2, log_folder=tmp_path)
    assert first == second
    right, wrong = first
    assert right[0].startswith("grads     rounding only")
    assert wrong[0].startswith("grads     WRONG")
    assert [line for line in wrong if "layers.1.moe" in line]
