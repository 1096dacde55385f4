"""What one unit is: planned on the meta device, without a process group."""

from typing import cast

import pytest
import torch
import torch.nn as nn
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.decoder import Decoder

from tests.helpers.training import degrees, meta_model
from titan_ext.base.nodes import Nodes
from titan_ext.fsdp.resolve import resolve_sharding
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.fsdp.units import Unit, UnitKind, plan_units

MODELS = ["deepseek_v3", "deepseek_v3_mtp", "qwen3", "qwen3_moe", "muse_glimmer"]


def _names(units: list[Unit]) -> list[str]:
    return [unit.name for unit in units]


def _params(model: Decoder, unit: Unit) -> set[nn.Parameter]:
    return {param for module in unit.modules(model) for param in module.parameters()}


def test_submodule_units_of_a_moe_decoder():
    assert _names(plan_units(meta_model(layers=3), "submodule")) == [
        "tok_embeddings",
        "layers.0.attention",
        "layers.0.feed_forward",
        "layers.1.attention",
        "layers.1.moe",
        "layers.2.attention",
        "layers.2.moe",
        "lm_head",
    ]


def test_block_units_are_whole_blocks():
    decoder = meta_model(layers=3)
    units = plan_units(decoder, "block")
    assert _names(units) == ["tok_embeddings", "layers.0", "layers.1", "layers.2", "lm_head"]
    assert units[-1].module_names == ("norm", "lm_head")
    settings = FSDPSettings(wrap="block")
    for ep, groups in ((2, [1, 1, 2, 2, 1]), (1, [1] * 5)):
        dims = degrees(dp_shard=4, ep=ep)
        plan = resolve_sharding(decoder, settings, dims, Nodes(8, 8))
        assert [len(unit.groups) for unit in plan.units] == groups


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("wrap", ["submodule", "block"])
def test_every_parameter_is_in_one_unit_so_that_the_root_owns_none(model: str, wrap):
    """And norms are never a unit of their own."""
    decoder = meta_model(model, 3)
    owned = [_params(decoder, unit) for unit in plan_units(decoder, wrap)]
    assert sum(map(len, owned)) == len(set().union(*owned))
    assert set().union(*owned) == set(decoder.parameters())
    assert min(max(param.dim() for param in params) for params in owned) > 1


def test_tied_embeddings_and_head_are_one_unit():
    decoder = meta_model("qwen3", 3)
    first, *rest = plan_units(decoder, "submodule")
    assert first.kind is UnitKind.TIED
    assert first.modules(decoder) == [decoder.tok_embeddings, decoder.norm, decoder.lm_head]
    assert all(unit.kind in (UnitKind.ATTENTION, UnitKind.FEED_FORWARD) for unit in rest)


def test_pipeline_chunks():
    decoder = meta_model(layers=3)
    decoder.tok_embeddings = decoder.lm_head = None
    assert _names(plan_units(decoder, "block")) == ["layers.0", "layers.1", "layers.2", "norm"]
    decoder.norm = None
    assert plan_units(decoder, "submodule")[-1].name == "layers.2.moe"


def test_units_are_found_inside_activation_checkpointing():
    """Those that were planned before wrap what wraps their modules now."""
    decoder = meta_model(layers=3)
    plain, block = _names(plan_units(decoder, "submodule")), plan_units(decoder, "block")[1]
    (bare,) = block.modules(decoder)
    SelectiveAC.Config().build(dump_folder="").apply(decoder)
    units = plan_units(decoder, "submodule")
    assert _names(units) == plain
    assert {p for unit in units for p in _params(decoder, unit)} == set(decoder.parameters())
    (wrapped,) = block.modules(decoder)
    assert wrapped is decoder.layers["0"]
    assert wrapped is not bare


def test_a_block_with_parameters_of_its_own_is_a_unit_around_the_others():
    decoder = meta_model(layers=3)
    block = decoder.layers["1"]
    block.register_parameter("gain", nn.Parameter(torch.empty(4, device="meta")))
    names = _names(plan_units(decoder, "submodule"))
    assert names[3:6] == ["layers.1", "layers.1.attention", "layers.1.moe"]


def test_experts_apart_are_a_unit_inside_their_block():
    decoder = meta_model(layers=3)
    units = plan_units(decoder, "experts")
    assert _names(units)[:6] == [
        *("tok_embeddings", "layers.0", "layers.1", "layers.1.experts"),
        *("layers.2", "layers.2.experts"),
    ]
    inner = next(unit for unit in units if unit.kind is UnitKind.EXPERTS)
    assert inner.module_names == (inner.experts,) == ("layers.1.moe.routed_experts.inner_experts",)
    assert next(unit for unit in units if unit.name == "layers.1").experts is None
    settings, dims = FSDPSettings(wrap="experts"), degrees(dp_shard=4)
    plan = resolve_sharding(decoder, settings, dims, Nodes(8, 8))
    (own,), (others,) = (plan[name].groups for name in ("layers.1.experts", "layers.1"))
    assert [".inner_experts." in param.name for param in own.params] == [True] * 3
    assert not any(".inner_experts." in param.name for param in others.params)


def test_experts_of_another_name_are_told_with_their_block():
    model = meta_model(layers=3)
    block = cast(nn.Module, model.layers["1"])
    block.mixture = block.moe
    del block.moe
    with pytest.raises(ValueError, match=r"layers\.1 says .* no child called moe.*, mixture\."):
        plan_units(model, "submodule")
