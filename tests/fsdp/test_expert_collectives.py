"""Weights in fewer bytes: what travels, what arrives, and what does not change."""

import functools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import Shard

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, make_config
from titan_ext.fp8 import Codec, dequantize, quantize
from titan_ext.fsdp.collectives import BFloat16ReduceScatter, Float8AllGather, _copy_out
from titan_ext.fsdp.plan import ParamPlan, ShardSizes, plan_of
from titan_ext.fsdp.settings import FSDPSettings

FLOAT8 = Run(world=4, ep=2, parallelize="submodule", float8_all_gather="experts")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [1, 2, 3, 20])
@pytest.mark.parametrize("float8", [[1], [100], [128, 172], [3, 300], [-5], [-3, 1], [7, -5, 2]])
def test_every_rank_decodes_what_every_rank_has(ranks: int, float8: list[int], dtype: torch.dtype):
    """Elements of parameters, negative where they stay exact; all ranks in one process."""
    numels = [abs(n) for n in float8]
    shards = torch.randn(ranks, sum(numels)).to(dtype)
    by_parameter = [shard.split(numels) for shard in shards]
    expected = torch.cat(
        [
            _rounded(values) if n > 0 else values
            for row in by_parameter
            for values, n in zip(row, float8, strict=True)
        ]
    )
    gather = Float8AllGather([(2 * abs(n), n > 0) for n in float8])  # or of fewer, larger shards
    group = MagicMock(size=lambda: ranks)
    sent_by_rank: list[torch.Tensor] = []
    with patch.object(
        dist, "all_gather_into_tensor", lambda _, sent, **__: sent_by_rank.append(sent)
    ):
        for shard in shards:
            gather(torch.empty(ranks * shard.numel(), dtype=dtype), shard, group)
    (nbytes,) = {sent.numel() for sent in sent_by_rank}
    rounded = [n for n in float8 if n > 0]
    wire = sum(rounded) + sum(math.ceil(n / 128) for n in rounded)
    wire += sum(-n for n in float8 if n < 0) * dtype.itemsize
    assert 0 <= nbytes - wire < 16 * (len(float8) + len(rounded))
    assert nbytes <= shards[0].nbytes
    output = torch.empty(expected.numel(), dtype=dtype)
    output[-shards[-1].numel() :] = shards[-1]
    fill = lambda received, _, **__: received.copy_(torch.cat(sent_by_rank))  # noqa: E731
    with patch.object(dist, "all_gather_into_tensor", fill):
        assert gather(output, output[-shards[-1].numel() :], group) is None
    assert torch.equal(output, expected)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shards_are_put_together_along_their_dimension(dim: int):
    whole = torch.arange(48.0).view(2, 4, 6)
    shards, out = whole.chunk(2, dim), torch.empty(48)
    shape = shards[0].shape
    param: Any = MagicMock(fsdp_placement=Shard(dim), padded_sharded_param_size=shape)
    param.configure_mock(sharded_state=ShardedState.SHARDED, all_gather_outputs=[out])
    param._sharded_local_tensor = shards[0]
    buffer = torch.cat([shard.flatten() for shard in shards])
    _copy_out([param], (buffer, None, None, [[buffer.dtype]], [[48]], [24]), 2)
    assert torch.equal(out.view_as(whole), whole)
    planned = ParamPlan(name="w", shape=(5, 7, 9), dtype=torch.float32, shard_dim=dim)
    assert planned.padded_numel(2) == 5 * 7 * 9 * (6 / 5, 8 / 7, 10 / 9)[dim]


@pytest.mark.parametrize(("ranks", "numel"), [(2, 1), (2, 1000), (3, 1000), (20, 300)])
def test_a_rank_sums_what_every_rank_sends(ranks: int, numel: int):
    gradients = torch.randn(ranks, ranks * numel).bfloat16()
    mine = gradients.view(ranks, ranks, numel)[:, 1]

    def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: object) -> None:
        assert sent.dtype == received.dtype == torch.bfloat16
        received.copy_(mine.reshape(-1))

    comm, group = BFloat16ReduceScatter(), MagicMock(size=lambda: ranks)
    for _ in range(2):
        whole, shard = (
            comm.allocate((n,), dtype=torch.float32, device=torch.device("cpu"))
            for n in (ranks * numel, numel)
        )
        assert (whole.dtype, shard.dtype) == (torch.bfloat16, torch.float32)
        whole.copy_(gradients[1])
        with patch.object(dist, "all_to_all_single", all_to_all):
            assert comm(shard, whole, group, dist.ReduceOp.SUM) is None
        in_order = functools.reduce(torch.add, mine.float())
        if ranks == 2:
            assert torch.equal(shard, in_order)
        assert torch.allclose(shard, in_order, rtol=0, atol=ranks * 2**-23 * 4)
        with pytest.raises(AssertionError):
            comm(shard, whole, group, dist.ReduceOp.AVG)
    # After an exception between the two, for an input that is lost.
    _, whole, shard = (
        comm.allocate((n,), dtype=torch.float32, device=torch.device("cpu"))
        for n in (ranks * numel, ranks * numel, numel)
    )
    with pytest.raises(AssertionError, match="allocates an input"):
        comm(shard, whole, group, dist.ReduceOp.SUM)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return dequantize(quantize(x, Codec()), Codec(), x.dtype)


def test_what_cannot_be_sent_so_is_refused():
    """Titan refuses symmetric memory on a CPU before it comes to this."""
    with pytest.raises(ValueError, match=r"needs parallelism.enable_fsdp_symm_mem = false"):
        FSDPSettings(float8_all_gather="experts", symm_mem=True)


def _not_as_planned(run: Run, shard_dim: int, folder: Path) -> tuple[list[str], Counter[bool]]:
    """Parameters that come otherwise than their plan says, and how many it lets come in float8."""
    with patch.object(ShardSizes, "expert_shard_dim", lambda *_: shard_dim):
        trainer: Any = make_config(run, folder).build()
    (model,) = trainer.model_parts
    plan = plan_of(model)
    assert plan is not None
    wrong, counts = [], Counter[bool]()
    for unit in plan.decoder_units:
        groups = [group for group in unit.groups if group.shard_world > 1]
        worlds = {param: group.shard_world for group in groups for param in group.params}
        masters: list[Any] = [model.get_parameter(param.name) for param in worlds]
        mine = [master.to_local().bfloat16() for master in masters]
        unit.fsdp_module(model).unshard()
        for (param, world), here in zip(worlds.items(), mine, strict=True):
            gathered: Any = model.get_parameter(param.name)
            shards = getattr(gathered, "_local_tensor", gathered).chunk(world, dim=param.shard_dim)
            rounded = _rounded(here.flatten()).view_as(here)
            arrived = [any(torch.equal(x, y) for x in shards) for y in (here, rounded)]
            expected = [not param.float8, param.float8]
            if arrived != ([True, True] if torch.equal(here, rounded) else expected):
                wrong.append(param.name)
            counts[param.float8] += 1
        unit.fsdp_module(model).reshard()
    trainer.close()
    dist.barrier()
    return wrong, counts


@pytest.mark.parametrize(
    ("run", "shard_dim"),
    [
        # Attention has sinks beside its linears.
        (Run(model="gpt_oss", world=2, parallelize="block", float8_all_gather="blocks"), 0),
        (Run(world=2, parallelize="experts", float8_all_gather="experts"), 0),
        # The experts come first in a unit whose router and norm are not in it.
        pytest.param(replace(FLOAT8, replicate=("router", "norms")), 0, marks=pytest.mark.slow),
        # As with more ranks than experts.
        pytest.param(FLOAT8, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_the_plan_says_travels_in_float8_as_the_codec_has_it(
    run: Run, shard_dim: int, tmp_path: Path
):
    run = replace(run, layers=2, narrow=False)
    arguments = (run, shard_dim, tmp_path)
    for wrong, counts in run_ranks(
        _not_as_planned, run.world, *arguments, log_folder=tmp_path / "logs"
    ):
        assert wrong == []
        assert counts[True] >= 3
        assert counts[False] >= 3
