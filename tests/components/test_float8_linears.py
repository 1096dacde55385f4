"""Linears that FSDP2 gathers in float8: the same results, fewer bytes, one all-reduce of scales."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig
from torchtitan.components.quantization.float8 import Float8Linear
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, Runs, observed
from titan_ext.base.no_accelerator import reduce_without_premul_sum
from titan_ext.components.float8_linears import (
    Float8Scales,
    GatheredFloat8Linear,
    make_scales_together,
)

PLAIN = observed(Run(world=2, ep=2, parallelize="submodule", global_batch=8, layers=2))
GATHERED = replace(PLAIN, converters=("float8_gather",))
IN_BF16 = replace(PLAIN, converters=("float8_tensorwise",))
_LINEARS = 14
"""Float8 linears of two layers: all but the head's."""


def test_the_same_results_as_gathered_in_full(runs: Runs):
    """In fp32, where a weight is rounded once; from bf16 it would be rounded twice.

    Without its norms an attention unit gathers float8 alone, which is no dtype of gloo's. A weight
    that is replicated has no shards to pad.
    """
    whole_on_each = ("norms", "layers.0.attention.*")
    run = replace(GATHERED, param_dtype="float32", exact_sums=True, replicate=whole_on_each)
    ours, whole = (runs.get(each) for each in (run, replace(run, converters=IN_BF16.converters)))
    assert ours.losses == whole.losses
    assert ours.grad_norms == whole.grad_norms
    assert [r.state_hash for r in ours.ranks] == [r.state_hash for r in whole.ranks]


def test_bytes_of_gathers_and_one_all_reduce_of_scales(runs: Runs):
    run = replace(GATHERED, world=64, ep=8, global_batch=128)
    steps = runs.planned(run, replace(run, converters=IN_BF16.converters))

    def sent(kind: str) -> list[list[int]]:
        return [
            [e.nbytes for e in step.collectives if e.kind == kind and e.main_module != "lm_head"]
            for step in steps
        ]

    ours, whole = sent("all_gather")
    assert len(ours) == len(whole)
    assert 0.5 < sum(ours) / sum(whole) < 0.6  # norms, router and embedding stay in bf16
    scales, others = sent("all_reduce")
    assert len(scales) == len(others) + 1
    assert scales.count(4 * _LINEARS) == 1


def _uneven_linears() -> list[float]:
    """Outputs and gradients of float8 linears of 2 and 5 rows, on 4 ranks and whole."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    found = []
    for is_whole in (False, True):
        torch.manual_seed(0)
        of: Any = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=not is_whole)
        cls: Any = Float8Linear if is_whole else GatheredFloat8Linear
        sizes = ((16, 5), (5, 2))
        layers = [
            cls.Config(in_features=n, out_features=m, bias=False, _torchao_config=of).build()
            for n, m in sizes
        ]
        for layer in layers:
            nn.init.normal_(getattr(layer.weight, "_tensor", layer.weight))
        model: Any = nn.Sequential(*layers)
        if not is_whole:
            fully_shard(model, mesh=mesh)
            disable_fsdp_gradient_division(model)
            reduce_without_premul_sum(model)
            make_scales_together(model)
        for step in range(2):  # the second gather is into what the first one made
            model.zero_grad()
            if not is_whole and not step:
                # What is gathered ahead of the forward makes its own scale, and keeps none.
                model.unshard()
                assert [layer.weight_scale for layer in layers] == [None, None]
            out = model(torch.arange(64.0).view(4, 16).cos())
            (out.sum() / (1 if is_whole else mesh.size())).backward()
        grads = [p.grad if is_whole else p.grad.full_tensor() for p in model.parameters()]
        found.append([out.detach(), *grads])
    return [float((a - b).abs().amax()) for a, b in zip(*found, strict=True)]


def test_ranks_with_fewer_rows_or_none_gather_as_many_bytes(tmp_path: Path):
    """torchao's own cast pads nothing: gloo ended, and NCCL would take what it finds."""
    assert run_ranks(_uneven_linears, 4, log_folder=tmp_path) == [[0.0] * 3] * 4


def _counted_scales() -> tuple[Float8Scales, list[int]]:
    """Scales of one linear, and what grows when they are made."""
    made: list[int] = []
    linear: Any = SimpleNamespace(weight=None, weight_scale=None)
    scales = Float8Scales([linear])

    def make() -> None:
        made.append(1)
        linear.weight_scale = 1.0

    scales.make = make  # type: ignore[method-assign]
    return scales, made


def test_scales_follow_the_optimizer():
    scales, made = _counted_scales()
    for _ in range(2):
        scales()
    assert len(made) == 2  # no step has been seen
    step = torch.optim.SGD([nn.Parameter(torch.ones(1))]).step
    step()
    assert scales._linears[0].weight_scale is None  # a gather ahead of the forward makes its own
    scales()
    scales()
    assert len(made) == 3
    del scales
    step()  # asks nobody


def test_each_forward_inside_of_a_step_makes_scales():
    scales, made = _counted_scales()
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.ones(1))], max_iter=1)
    for _ in range(2):
        optimizer.step(lambda: [scales(), scales()] and 1.0)
    assert len(made) == 4
    scales()
    scales()
    assert len(made) == 5


def test_a_loaded_weight_has_no_scale_yet():
    of: Any = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    cls: Any = GatheredFloat8Linear
    linear = cls.Config(in_features=16, out_features=16, _torchao_config=of).build()
    linear.weight_scale = torch.ones(())
    model = nn.Sequential(linear)
    model.load_state_dict(model.state_dict())
    assert linear.weight_scale is None
