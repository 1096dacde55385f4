"""``fsdp_replicate`` and ``fsdp_quantize_frozen``: what a name matches, and what is refused.

On the meta device, before any process group.
"""

from typing import cast

import pytest
import torch
import torch.nn as nn
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common.decoder import Decoder

from tests.helpers.training import degrees, titan_config
from titan_ext.base.nodes import Nodes
from titan_ext.fsdp.names import find_frozen_linears, find_replicated
from titan_ext.fsdp.plan import FSDPPlan
from titan_ext.fsdp.resolve import resolve_sharding
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.fsdp.units import plan_units, replicated_by_unit, units_without


def _model(name: str = "deepseek_v3", *, lora: bool = False) -> Decoder:
    config = titan_config(name)
    model_config = cast(Decoder.Config, config.model_spec.model)
    model_config.layers = model_config.layers[:2]
    if lora:
        converter = LoRAConverter.Config(target_modules=["wq"]).build()
        model_config = cast(Decoder.Config, converter.convert(model_config))
    with torch.device("meta"):
        return cast(Decoder, model_config.build())


def _kept(*names: str, model: Decoder | None = None) -> list[str]:
    return find_replicated(model or _model(), names, is_chunk=False)


def test_what_names_mean():
    assert _kept("router") == ["layers.1.moe.router.gate"]
    assert _kept("norms")[-3:] == ["layers.1.attention_norm", "layers.1.ffn_norm", "norm"]
    assert _kept("adapters", model=_model(lora=True)) == [
        f"layers.{i}.attention.wq.{name}" for i in range(2) for name in ("lora_a", "lora_b")
    ]
    assert _kept("layers.0.attention.w[qo]*") == ["layers.0.attention.wq", "layers.0.attention.wo"]
    assert _kept("layers.1.moe.routed_experts") == ["layers.1.moe.routed_experts.inner_experts"]
    assert set(_kept("layers.0.*")) == set(_kept("layers.0"))
    assert find_replicated(_model(), ("no such name",), is_chunk=True) == []


def test_units_go_without_what_is_kept():
    model = _model()
    units = plan_units(model, "submodule")
    replicated = find_replicated(model, ("norms", "layers.0.feed_forward"), is_chunk=False)
    left = {unit.name: unit.module_names for unit in units_without(model, units, replicated)}
    assert left == {
        "tok_embeddings": ("tok_embeddings",),
        "layers.0.attention": ("layers.0.attention",),
        "layers.1.attention": ("layers.1.attention",),
        "layers.1.moe": ("layers.1.moe",),
        "lm_head": ("lm_head",),
    }
    groups = replicated_by_unit(units, replicated)
    assert ["layers.1.attention_norm", "layers.1.attention.kv_norm"] in groups
    assert sorted(name for group in groups for name in group) == sorted(replicated)


def test_the_plan_counts_what_is_replicated():
    model = _model()

    def planned(*names: str) -> FSDPPlan:
        settings = FSDPSettings(wrap="submodule", replicate=names)
        return resolve_sharding(model, settings, degrees(dp_shard=4), Nodes(8, 8))

    whole, plan = planned(), planned("router", "norms")
    modules = find_replicated(model, ("router", "norms"), is_chunk=False)
    numel = sum(
        param.numel()
        for name in modules
        for param in model.get_submodule(name).parameters(recurse=False)
    )
    assert sorted(name for group in plan.replicated for name in group.module_names) == sorted(
        modules
    )
    assert sum(group.gathered_nbytes for group in plan.replicated) == 2 * numel
    gathered, less = (sum(u.gathered_nbytes for u in p.units) for p in (whole, plan))
    assert gathered - less == 2 * numel
    assert f"replicated ({len(modules)} parameters)" in plan.table()
    assert plan["lm_head"].backward_prefetch == ("layers.1.moe",)


def test_frozen_linears():
    model = _model(lora=True)

    def found(*names: str, world: int = 2) -> list[str]:
        return find_frozen_linears(model, names, shard_world=world, is_chunk=False)

    everything = found("*")
    assert "layers.0.attention.wq" in everything
    assert "layers.1.moe.shared_experts.w1" in everything
    assert not any("lora" in name or "router" in name or "lm_head" in name for name in everything)
    assert found("layers.0.feed_forward") == [f"layers.0.feed_forward.w{i}" for i in (1, 2, 3)]
    assert found("layers.0.attention.wq") == ["layers.0.attention.wq"]
    with pytest.raises(ValueError, match="needs an axis to shard over"):
        found("*", world=1)
    assert isinstance(model.get_submodule(everything[0]), nn.Linear)
