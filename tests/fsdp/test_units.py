"""What one unit is: planned on the meta device, without a process group."""

import dataclasses
from typing import cast

import pytest
import torch
import torch.nn as nn
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.decoder import Decoder

from tests.helpers.training import degrees, titan_config
from titan_ext.base.op_cost import Nodes
from titan_ext.fsdp.auto import choose
from titan_ext.fsdp.resolve import resolve_sharding
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.fsdp.units import Unit, UnitKind, plan_units

MODELS = ["deepseek_v3", "deepseek_v3_mtp", "qwen3", "qwen3_moe", "muse_glimmer"]


def _build(model: str, layers: int = 3) -> Decoder:
    spec = titan_config(model).model_spec
    assert spec is not None
    config = cast(Decoder.Config, spec.model)
    config.layers = config.layers[:layers]
    with torch.device("meta"):
        return cast(Decoder, config.build())


def _names(units: list[Unit]) -> list[str]:
    return [unit.name for unit in units]


def _params(model: Decoder, unit: Unit) -> set[nn.Parameter]:
    return {param for module in unit.modules(model) for param in module.parameters()}


def test_submodule_units_of_a_moe_decoder():
    assert _names(plan_units(_build("deepseek_v3"), "submodule")) == [
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
    decoder = _build("deepseek_v3")
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
    decoder = _build(model)
    units = plan_units(decoder, wrap)
    owned = [param for unit in units for param in _params(decoder, unit)]
    assert len(owned) == len(set(owned))
    assert set(owned) == set(decoder.parameters())


@pytest.mark.parametrize("model", MODELS)
def test_norms_are_never_a_unit_of_their_own(model: str):
    decoder = _build(model)
    for unit in plan_units(decoder, "submodule"):
        assert max(param.dim() for param in _params(decoder, unit)) > 1, unit.name


def test_mtp_blocks_add_their_projection_to_attention():
    decoder = _build("deepseek_v3_mtp")
    units = {unit.name: unit for unit in plan_units(decoder, "submodule")}
    attention, moe = units["mtp_layers.0.attention"], units["mtp_layers.0.moe"]
    block = cast(nn.ModuleList, decoder.mtp_layers)[0]
    assert {type(m).__name__ for m in attention.modules(decoder)} >= {"Linear"}
    assert _params(decoder, attention) | _params(decoder, moe) == set(block.parameters())


def test_tied_embeddings_and_head_are_one_unit():
    decoder = _build("qwen3")
    first, *rest = plan_units(decoder, "submodule")
    assert first.kind is UnitKind.TIED
    assert first.modules(decoder) == [decoder.tok_embeddings, decoder.norm, decoder.lm_head]
    assert all(unit.kind in (UnitKind.ATTENTION, UnitKind.FEED_FORWARD) for unit in rest)


def test_pipeline_chunk_without_embeddings_or_head():
    decoder = _build("deepseek_v3")
    decoder.tok_embeddings = decoder.norm = decoder.lm_head = None
    assert {unit.kind for unit in plan_units(decoder, "submodule")} == {
        UnitKind.ATTENTION,
        UnitKind.FEED_FORWARD,
        UnitKind.MOE,
    }


def test_pipeline_chunk_with_a_norm_and_no_head():
    decoder = _build("deepseek_v3")
    decoder.lm_head = None
    assert plan_units(decoder, "block")[-1].name == "norm"


def test_units_are_found_inside_activation_checkpointing():
    decoder = _build("deepseek_v3")
    plain = _names(plan_units(decoder, "submodule"))
    SelectiveAC.Config().build(dump_folder="").apply(decoder)
    wrapped = plan_units(decoder, "submodule")
    assert _names(wrapped) == plain
    assert {p for unit in wrapped for p in _params(decoder, unit)} == set(decoder.parameters())


def test_units_that_were_planned_before_wrap_what_wraps_their_modules_now():
    decoder = _build("deepseek_v3")
    block = plan_units(decoder, "block")[1]
    (plain,) = block.modules(decoder)
    SelectiveAC.Config().build(dump_folder="").apply(decoder)
    (wrapped,) = block.modules(decoder)
    assert wrapped is decoder.layers["0"]
    assert wrapped is not plain


def test_a_block_with_parameters_of_its_own_is_a_unit_around_the_others():
    decoder = _build("deepseek_v3")
    block = decoder.layers["1"]
    block.register_parameter("gain", nn.Parameter(torch.empty(4, device="meta")))
    names = _names(plan_units(decoder, "submodule"))
    assert names[3:6] == ["layers.1", "layers.1.attention", "layers.1.moe"]


def test_experts_apart_are_a_unit_inside_their_block():
    decoder = _build("deepseek_v3")
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


@pytest.mark.parametrize(("name", "wrap"), [("deepseek_v3", "submodule"), ("llama3", "block")])
def test_auto_splits_blocks_only_where_expert_parallelism_splits_experts(name: str, wrap: str):
    dims = degrees(dp_shard=4, ep=2)
    assert choose(_build(name), FSDPSettings(), dims, Nodes(8, 8)).wrap == wrap


def test_experts_of_another_name_are_told_with_their_block():
    model = _build("deepseek_v3")
    block = cast(nn.Module, model.layers["1"])
    block.mixture = block.moe
    del block.moe
    with pytest.raises(ValueError, match=r"layers\.1 says .* no child called moe.*, mixture\."):
        plan_units(model, "submodule")


def test_a_unit_is_immutable():
    unit = plan_units(_build("qwen3"), "block")[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        unit.name = "other"  # pyrefly: ignore[read-only]
