"""Scores before the last expert GEMM: equal but for rounding, and one output less to keep."""

import json
import math
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torchtitan.config import derive
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from tests.helpers.training import Run, Runs, observed, titan_config
from titan_ext.activation_checkpoint import FP8AC, measure_block
from titan_ext.base import no_accelerator
from titan_ext.components.early_scores import (
    EarlyScoreRoutedExperts,
    has_early_scores,
    scaled,
    use_early_scores,
    with_early_scores,
)
from titan_ext.plan.stand_ins import use_stand_ins
from titan_ext.run.trainer import extend_config

Config = FP8AC.Config
EARLY = Config(preset="speed", score_before_last_gemm=True)
B, L, D = 2, 64, 256


class _OtherDispatcher(AllToAllTokenDispatcher):
    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass


def _block(early: bool) -> Any:
    """A MoE block of the debug model; equal for both but for the class of its routed experts."""
    spec = titan_config("deepseek_v3").model_spec
    if early:
        use_early_scores(spec)
        use_early_scores(spec)  # twice is harmless
    no_accelerator.adapt_spec(spec)
    model = cast(Any, spec.model.build())
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model.layers["1"].bfloat16()


def _run(experts: RoutedExperts) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    x_BLD = torch.randn(B, L, D).bfloat16().requires_grad_()
    scores_BLK = torch.rand(B, L, 3).requires_grad_()
    ids_BLK = torch.stack([torch.randperm(8)[:3] for _ in range(B * L)]).view(B, L, 3)
    counts_E = torch.bincount(ids_BLK.flatten(), minlength=8)
    out_BLD = experts(x_BLD, scores_BLK, ids_BLK, counts_E)
    out_BLD.float().square().sum().backward()
    grads = {name: cast(torch.Tensor, p.grad) for name, p in experts.named_parameters()}
    return out_BLD, grads | {"x": cast(Any, x_BLD.grad), "scores": cast(Any, scores_BLK.grad)}


def test_it_computes_what_titan_computes():
    ours, our_grads = _run(_block(early=True).moe.routed_experts)
    titans, titan_grads = _run(_block(early=False).moe.routed_experts)
    assert not torch.equal(ours, titans)  # another rounding
    assert (ours - titans).float().norm() < 0.01 * titans.float().norm()
    assert our_grads.keys() == titan_grads.keys()
    for name, grad in our_grads.items():
        other = titan_grads[name]
        cosine = torch.cosine_similarity(grad.double().flatten(), other.double().flatten(), 0)
        assert cosine > 0.9999, name
        assert grad.float().norm() == pytest.approx(other.float().norm().item(), rel=0.01), name


def test_scores_are_not_rounded_before_they_multiply():
    torch.manual_seed(0)
    h_RF, scores_R = torch.randn(64, 64).bfloat16(), torch.rand(64)
    products_RF = h_RF.double() * scores_R.double().unsqueeze(1)
    assert torch.equal(scaled(h_RF, scores_R), products_RF.float().bfloat16())


def test_no_copy_in_fp32_is_kept():
    """Without checkpointing, of an expert's hidden values or of its output."""
    kept: dict[bool, list[torch.Size]] = {}
    for early in (True, False):
        shapes = kept[early] = []

        def keep(x: torch.Tensor, shapes: list[torch.Size] = shapes) -> torch.Tensor:
            if x.dtype is torch.float32 and x.dim() == 2 and x.shape[1] > 1:
                shapes.append(x.shape)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            _run(_block(early).moe.routed_experts)
    assert kept[True] == [], "stock keeps its output"
    assert kept[False] == [(B * L * 3, D)]


def test_the_last_gemm_is_neither_kept_nor_run_again():
    reports = {}
    for early in (False, True):
        torch.manual_seed(1)
        x_BLD = torch.randn(B, L, D).bfloat16().requires_grad_()
        config = EARLY if early else replace(EARLY, score_before_last_gemm=False)
        reports[early] = measure_block(_block(early), x_BLD, None, None, config=config)
    last_gemm = 2 * (B * L * 3) * 256 * 256
    assert reports[False].recomputed_flops - reports[True].recomputed_flops == last_gemm
    assert reports[True].nbytes == reports[False].nbytes
    (dropped,) = [row for row in reports[True].ops if "w2_EDF" in row.name]
    assert dropped.policy == "discard"


def test_a_dry_run_checks_its_stand_ins_too():
    config = replace(extend_config(titan_config("deepseek_v3")), activation_checkpoint=EARLY)
    config = with_early_scores(config)
    use_stand_ins(config)
    replace(config)


def test_a_check_leaves_the_model_to_configs_that_share_it():
    base = extend_config(titan_config("deepseek_v3"))
    early = replace(base, activation_checkpoint=EARLY)
    later = replace(early, activation_checkpoint=Config(preset="speed"))
    built = [with_early_scores(config) for config in (early, base, later)]
    found = [any(b.model_spec.traverse(EarlyScoreRoutedExperts.Config)) for b in built]
    assert found == [True, False, False]


def test_scores_travel_with_the_tokens(runs: Runs):
    run = observed(Run(world=2, ep=2, parallelize="submodule", keep_gradients=True))
    run = replace(run, steps=1, layers=2, traced_step=1)
    ours, stock = runs.get(replace(run, ac="fp8_early")), runs.get(run)
    assert math.isclose(ours.losses[0], stock.losses[0], rel_tol=3e-5)
    assert math.isclose(ours.grad_norms[0], stock.grad_norms[0], rel_tol=1e-4)
    assert ours.losses != stock.losses, "another rounding"
    for name, gradient in ours.ranks[0].gradients.items():
        other = stock.ranks[0].gradients[name]
        cosine = (gradient * other).sum() / math.sqrt((gradient**2).sum() * (other**2).sum())
        assert cosine > 0.999, name
    exchanges = [e.in_backward for e in ours.ranks[0].collectives if e.kind == "all_to_all"]
    # Of counts, tokens, scores and back; of tokens again, and of three gradients.
    assert (exchanges.count(False), exchanges.count(True)) == (4, 1 + 3)
    folder = runs.folder(replace(run, ac="fp8_early")) / "activation_checkpoint"
    report = json.loads(next(folder.glob("rank0_*.json")).read_text())
    (block,) = [block for block in report["blocks"] if block["block"] == "layers.1"]
    discarded = {row["name"] for row in block["stored"] if row["treatment"] == "discarded"}
    assert "moe.routed_experts.inner_experts:aten._grouped_mm:w2_EDF" in discarded
    assert "moe.routed_experts:_c10d_functional.all_to_all_single" in discarded


def test_a_block_of_another_library_has_a_config_of_another_kind():
    block = torch.nn.Linear(2, 2)
    block.config = cast(Any, {"hidden_size": 2})
    assert not has_early_scores(block)


def test_where_it_cannot_be_it_is_refused():
    config = extend_config(titan_config("deepseek_v3"))
    experts = cast(Any, config.model_spec).model.layers[1].moe.routed_experts
    experts.token_dispatcher = derive(experts.token_dispatcher, _OtherDispatcher.Config)
    with pytest.raises(ValueError, match="or a dispatcher of another kind"):
        replace(config, activation_checkpoint=EARLY)
    with pytest.raises(ValueError, match="was not built for it"):
        measure_block(_block(early=False), torch.randn(B, L, D), None, None, config=EARLY)


def test_a_hook_that_would_see_multiplied_outputs_is_refused():
    block = _block(early=True)
    experts = block.moe.routed_experts.inner_experts
    experts.register_forward_pre_hook(lambda *_: None)  # sees what it would see in any case
    x_BLD = torch.randn(B, L, D).bfloat16()
    block(x_BLD, None, None)
    experts.register_forward_hook(lambda module, args, out: out + 1)
    with pytest.raises(ValueError, match="would see outputs that are multiplied by scores"):
        block(x_BLD, None, None)
