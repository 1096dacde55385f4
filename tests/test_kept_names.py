"""``fsdp_keep_replicated`` and ``fsdp_frozen_nf4``: what answers to a name, and what does not.

On the meta device, before any process group.
"""

from typing import Any, cast

import pytest
import torch
import torch.nn as nn
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common.decoder import Decoder

from tests.training import titan_config
from titan_ext.configs import ParallelismConfig, check_compiled, check_unit_names
from titan_ext.fsdp.planning import make_plan
from titan_ext.fsdp.quantized import find_frozen_linears
from titan_ext.fsdp.replicated import find_kept, kept_by_unit, units_without
from titan_ext.fsdp.units import plan_units


def _model(name: str = "deepseek_v3", *, lora: bool = False) -> Decoder:
    config = titan_config(name)
    assert config.model_spec is not None
    model_config = cast(Decoder.Config, config.model_spec.model)
    model_config.layers = model_config.layers[:2]
    if lora:
        converter = LoRAConverter.Config(target_modules=["wq"]).build()
        model_config = cast(Decoder.Config, converter.convert(model_config))
    with torch.device("meta"):
        return cast(Decoder, model_config.build())


def _kept(*names: str, model: Decoder | None = None) -> list[str]:
    return list(find_kept(model or _model(), names, is_chunk=False))


def test_what_names_mean():
    assert _kept("router") == ["layers.1.moe.router.gate"]
    assert _kept("norms")[-3:] == ["layers.1.attention_norm", "layers.1.ffn_norm", "norm"]
    assert _kept("adapters", model=_model(lora=True)) == [
        f"layers.{i}.attention.wq.{name}" for i in range(2) for name in ("lora_a", "lora_b")
    ]
    assert _kept("layers.0.attention.w[qo]*") == ["layers.0.attention.wq", "layers.0.attention.wo"]
    assert _kept("layers.1.moe.routed_experts") == ["layers.1.moe.routed_experts.inner_experts"]
    assert set(_kept("layers.0.*")) == set(_kept("layers.0"))
    assert find_kept(_model(), ("no such name",), is_chunk=True) == {}


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (("routers",), r"nothing in this model answers to 'routers'; .* did you mean 'router'\?"),
        (("layers.7",), r"nothing in this model answers to 'layers.7'"),
        (("lm_head",), r"lm_head cannot be kept"),
        (("*.w1_EFD",), r".*inner_experts has w\d_\w+ too, which no name in it answers to"),
    ],
)
def test_refused_names(names: tuple[str, ...], error: str):
    config = titan_config("deepseek_v3")
    assert config.model_spec is not None
    with pytest.raises(ValueError, match=f"parallelism.fsdp_keep_replicated: {error}"):
        check_unit_names(
            config.model_spec.model, ParallelismConfig(fsdp_keep_replicated=list(names))
        )


def test_tied_embeddings_are_refused():
    with pytest.raises(ValueError, match="tok_embeddings cannot be kept"):
        _kept("tok_embeddings", model=_model("qwen3"))


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"data_parallel_replicate_degree": 2, "spmd_backend": "partial_dtensor"}, "one axis only"),
        ({"context_parallel_degree": 2}, "gradient norm takes one mesh only"),
    ],
)
def test_refused_layouts(values: dict[str, Any], error: str):
    with pytest.raises(ValueError, match=error):
        ParallelismConfig(fsdp_keep_replicated=["norms"], **values)


def test_other_refusals():
    with pytest.raises(ValueError, match=r"fsdp_frozen_nf4 needs .*tensor_parallel_degree = 1"):
        ParallelismConfig(fsdp_frozen_nf4=["linears"], tensor_parallel_degree=2)
    with pytest.raises(ValueError, match="fsdp_frozen_nf4 is 'linears'; expected a list of names"):
        ParallelismConfig(fsdp_frozen_nf4=cast(Any, "linears"))
    with pytest.raises(ValueError, match="which torch does not offer for weights in NF4"):
        ParallelismConfig(
            fsdp_frozen_nf4=["linears"],
            fsdp_reshard_after_forward=2,
            spmd_backend="partial_dtensor",
        )
    for key in ("fsdp_keep_replicated", "fsdp_frozen_nf4"):
        parallelism = ParallelismConfig(**cast(Any, {key: ["norms"]}))
        check_compiled(parallelism, compiled=False)
        with pytest.raises(ValueError, match=f"{key} does not go with compile.enable"):
            check_compiled(parallelism, compiled=True)


def test_units_go_without_what_is_kept():
    model = _model()
    units = plan_units(model, "submodule")
    kept = find_kept(model, ("norms", "layers.0.feed_forward"), is_chunk=False)
    left = {unit.name: unit.module_names for unit in units_without(units, kept.values())}
    assert left == {
        "tok_embeddings": ("tok_embeddings",),
        "layers.0.attention": ("attention",),
        "layers.1.attention": ("attention",),
        "layers.1.moe": ("moe",),
        "lm_head": ("lm_head",),
    }
    groups = kept_by_unit(units, kept.values())
    names = {module: name for name, module in kept.items()}
    assert ["layers.1.attention_norm", "layers.1.attention.kv_norm"] in [
        [names[module] for module in group] for group in groups
    ]
    assert sorted(names[m] for group in groups for m in group) == sorted(kept)


def test_the_plan_counts_what_is_kept():
    model = _model()
    units = plan_units(model, "submodule")
    arguments: Any = {
        "shard_world": 4,
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
    }
    whole = make_plan(units, **arguments)
    kept = find_kept(model, ("router", "norms"), is_chunk=False)
    plan = make_plan(units_without(units, kept.values()), **arguments, kept=kept)
    numel = sum(p.numel() for m in kept.values() for p in m.parameters(recurse=False))
    assert plan.replicated_nbytes == 2 * numel
    gathered, less = (sum(u.gathered_nbytes for u in p.units) for p in (whole, plan))
    assert gathered - less == 2 * numel
    assert f"replicated ({len(kept)} parameters)" in plan.table()
    # Alone, the head would gather the block before it with every chunk of the loss.
    assert plan["lm_head"].backward_prefetch == ()


def test_frozen_linears():
    model = _model(lora=True)

    def found(*names: str, world: int = 2) -> list[str]:
        return list(find_frozen_linears(model, names, shard_world=world, is_chunk=False))

    everything = found("linears")
    assert "layers.0.attention.wq" in everything
    assert "layers.1.moe.shared_experts.w1" in everything
    assert not any("lora" in name or "router" in name or "lm_head" in name for name in everything)
    assert found("layers.0.feed_forward") == [f"layers.0.feed_forward.w{i}" for i in (1, 2, 3)]
    with pytest.raises(ValueError, match=r"did you mean 'layers.0.attention.wq'"):
        found("layers.0.attention.w_q")
    assert found("layers.0.attention.wq") == ["layers.0.attention.wq"]
    with pytest.raises(ValueError, match=r"no frozen linear answers to 'layers.0.attention.wq.l"):
        found("layers.0.attention.wq.lora_a")
    with pytest.raises(ValueError, match="needs an axis to shard over"):
        found("linears", world=1)
    with pytest.raises(ValueError, match=r"wkv_a.weight has \d+ elements; 64 ranks need"):
        found("layers.0.attention.wkv_a", world=64)
    assert isinstance(model.get_submodule(everything[0]), nn.Linear)
