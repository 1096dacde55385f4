"""FP8 activation checkpointing, eagerly, on one process: what is stored, and the gradients."""

import dataclasses
import gc
import logging
import unittest.mock
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, SelectiveAC

from tests.fp8_activations import debug_model, tokens
from tests.toml_files import DEBUG, resolve_text
from titan_ext.activation_checkpoint import (
    FP8AC,
    Verdict,
    drops,
    enable_fp8_activation_checkpointing,
    measure_block,
    receipt_of,
)
from titan_ext.activation_checkpoint.presets import BlockPlan
from titan_ext.activation_checkpoint.sites import BlockSites
from titan_ext.fp8 import Codec

Config = FP8AC.Config


def _forward(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    h = model.get_submodule("tok_embeddings")(inputs)
    for block in model.get_submodule("layers").children():
        h = block(h, None, None)
    logits = model.get_submodule("lm_head")(model.get_submodule("norm")(h)).float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())


def _gradients(
    config: ActivationCheckpointing.Config | None,
    batches: int = 1,
    interleaved: bool = False,
    converters: tuple[str, ...] = (),
) -> dict[str, torch.Tensor]:
    model = debug_model(layers=2, converters=converters)
    if config is not None:
        config.build(dump_folder="").apply(model)
    inputs = tokens(batch=2 * batches).chunk(batches)
    if interleaved:
        losses = [_forward(model, x) for x in inputs]
        for loss in losses:
            loss.backward()
    else:
        for x in inputs:
            _forward(model, x).backward()
    names = (
        name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_parameters()
    )
    return {n: p.grad for n, p in zip(names, model.parameters(), strict=True) if p.grad is not None}


def _worst(reference: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> tuple[float, str]:
    assert reference.keys() == other.keys()
    return min((_cosine(reference[name], other[name]), name) for name in reference)


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()


def _block(index: str = "1") -> nn.Module:
    return debug_model(layers=2).layers[index]


def _input() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 64, 256, dtype=torch.bfloat16, requires_grad=True)


@pytest.fixture(scope="module")
def stock() -> dict[str, torch.Tensor]:
    return _gradients(SelectiveAC.Config())


def test_the_stock_preset_is_stock(stock):
    ours = _gradients(Config(preset="stock"))
    assert all(torch.equal(stock[name], ours[name]) for name in stock)


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(preset="speed"),
        Config(preset="attention"),
        Config(mode="none"),
        Config(mode="full"),
        Config(mode="none", fp32="float8"),
    ],
    ids=lambda c: f"{c.mode}-{c.preset}-{c.attention}-{c.fp32}",
)
def test_gradients_point_where_those_of_bf16_do(config, stock):
    cosine, name = _worst(stock, _gradients(config))
    assert cosine >= 0.999, name


@pytest.mark.parametrize("config", [Config(), Config(preset="speed"), Config(mode="none")])
def test_several_forwards_before_the_first_backward(config):
    """As under a pipeline: all state belongs to one forward."""
    apart, together = _gradients(config, 2), _gradients(config, 2, interleaved=True)
    assert all(torch.equal(apart[name], together[name]) for name in apart)


# One MoE block of the debug model, 128 tokens, top 3 of 8: bytes, packs and operations of it.
_T, _D, _ROUTED = 128, 256, 3 * 128
_FLOAT8 = Codec().nbytes


def _bytes(*shape: int) -> int:
    return _FLOAT8(torch.Size(shape))


@pytest.mark.parametrize(
    ("config", "float8", "tensors", "packs"),
    [
        (Config(preset="stock"), 0, 0, 9),
        # input, shared w1
        (Config(), _bytes(_T, _D) + _bytes(_T, 512), 2, 9),
        (Config(mode="full"), _bytes(_T, _D), 1, 3),
        # input, wq, wo, experts' w1 and w3, shared w1 and w3
        (
            Config(preset="speed"),
            2 * _bytes(_T, _D) + _bytes(_T, 3072) + 2 * _bytes(_ROUTED, 256) + 2 * _bytes(_T, 512),
            7,
            12,
        ),
    ],
    ids=["stock", "memory", "full", "speed"],
)
def test_bytes_of_a_block(config, float8: int, tensors: int, packs: int):
    receipt = measure_block(_block(), _input(), None, None, config=config)
    assert (receipt.float8_nbytes, receipt.float8_tensors) == (float8, tensors)
    assert receipt.packs == packs
    assert receipt.nbytes == sum(row.nbytes for row in receipt.stored)


def test_flops_of_a_block():
    gemms = {"wq": 3072 * 256, "wkv_a": 576 * 256, "wkv_b": 4096 * 512, "wo": 256 * 2048}
    experts, shared, gate = 256 * 256, 512 * 256, 8 * 256
    attention = 2 * 2 * 16 * 64 * 64 * (192 + 128)
    forward = 2 * _T * (sum(gemms.values()) + 3 * shared + gate) + attention
    forward += 2 * _ROUTED * 3 * experts
    full = measure_block(_block(), _input(), None, None, config=Config(mode="full"))
    assert (full.flops, full.recomputed_flops) == (forward, forward)
    memory = measure_block(_block(), _input(), None, None)
    # wq, wkv_a and the attention stay; wkv_b comes from wkv_a; the shared w2 is dropped.
    again = 2 * _T * (gemms["wkv_b"] + gemms["wo"] + shared + gate) + 2 * _ROUTED * 3 * experts
    assert memory.recomputed_flops == again
    none = measure_block(_block(), _input(), None, None, config=Config(mode="none"))
    assert none.recomputed_ops == 0


def test_attention_is_exact_by_default():
    receipt = measure_block(_block(), _input(), None, None)
    kept = {row.name for row in receipt.stored if row.treatment.startswith("exact: attention")}
    assert {"attention.wq:aten.mm:weight", "attention.wkv_a:aten.mm:weight"} <= kept
    grads = _gradients(None), _gradients(Config(verdicts={"input": "exact"}))
    for name in ("wq", "wkv_a", "wkv_b"):
        key = f"layers.1.attention.{name}.weight"
        # What reaches it from float8 comes through the feed-forward of the block only.
        assert _cosine(grads[0][key], grads[1][key]) > 0.9998


@pytest.mark.parametrize("config", [Config(), Config(preset="speed"), Config(mode="full")])
def test_the_recompute_routes_as_the_forward_did(config):
    assert _routing_is_equal(config)


def test_forgetting_the_top_k_changes_the_routing():
    """The test above can fail."""
    keeps = BlockPlan.base_verdict

    def forget(self, site, out, *, stock_saves):
        verdict = keeps(self, site, out, stock_saves=stock_saves)
        return Verdict.RECOMPUTE if site.op == "aten.topk" else verdict

    with unittest.mock.patch.object(BlockPlan, "base_verdict", forget):
        assert not _routing_is_equal(Config(mode="full"))


def _routing_is_equal(config) -> bool:
    block = _block()
    ids: list[torch.Tensor] = []
    block.get_submodule("moe.router").register_forward_hook(
        lambda module, args, output: ids.append(output[1].clone())
    )
    measure_block(block, _input(), None, None, config=config)
    forward, recompute = ids
    return torch.equal(forward, recompute)


def test_tokens_are_counted_as_titan_expects():
    """Titan halves the counts of blocks that say NO_REENTRANT."""
    for config, times in ((Config(), 2), (Config(mode="full"), 2), (Config(mode="none"), 1)):
        model = debug_model(layers=2)
        config.build(dump_folder="").apply(model)
        _forward(model, tokens()).backward()
        block = model.layers["1"]
        assert block.get_submodule("moe").get_buffer("tokens_per_expert_E").sum() == times * _ROUTED
        halves = getattr(block, "checkpoint_impl", None) is CheckpointImpl.NO_REENTRANT
        assert halves == (times == 2)


def test_parameters_are_called_as_under_stock():
    def names(config) -> list[str]:
        model = debug_model(layers=2)
        config.build(dump_folder="").apply(model)
        return [name for name, _ in model.named_parameters()]

    for mode in ("selective", "full", "none"):
        assert names(Config(mode=mode)) == names(SelectiveAC.Config())


def test_a_drop_that_backward_reads_is_refused():
    config = Config(verdicts={"attention.wo": "drop"})
    with pytest.raises(ValueError, match=r"attention\.wo:aten\.mm.*cannot be dropped.*norm"):
        measure_block(_block(), _input(), None, None, config=config)


def test_a_drop_of_a_preset_that_backward_reads_is_passed_over():
    """With one rank the routed experts' output is read for the gradient of the scores."""
    with unittest.mock.patch(
        "titan_ext.activation_checkpoint.presets._exchange_is_stored", return_value=True
    ):
        gradients = _gradients(Config())
        receipt = measure_block(_block(), _input(), None, None)
    assert all(g.isfinite().all() for g in gradients.values())
    assert any("read by" in row.treatment for row in receipt.stored)


def test_a_wrong_drop_shows_as_nan():
    """Were the proof wrong, the loss would say so: the dummy is NaN."""
    anything = unittest.mock.MagicMock()
    anything.__contains__.return_value = True
    block = _block()
    with unittest.mock.patch.object(drops, "_READ_NO_VALUES", anything):
        measure_block(block, _input(), None, None, config=Config(verdicts={"attention.wo": "drop"}))
    gradient = block.get_parameter("ffn_norm.weight").grad
    assert gradient is not None
    assert gradient.isnan().all()


def test_nothing_of_a_block_outlives_its_backward():
    model = debug_model(layers=2)
    Config().build(dump_folder="").apply(model)
    _forward(model, tokens()).backward()
    gc.collect()
    alive = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    assert not [t for t in alive if t.dtype == torch.float8_e4m3fn]


def test_nothing_in_float8_is_an_error():
    block = _block().float()
    with pytest.raises(RuntimeError, match=r"nothing was stored in it.*exact: float32"):
        measure_block(block, _input().float(), None, None)
    receipt = measure_block(
        _block().float(), _input().float(), None, None, config=Config(fp32="float8")
    )
    assert receipt.float8_tensors == 2


def test_exempt_layers_and_modules_are_exact():
    def float8(config) -> dict[str, int]:
        model = debug_model(layers=3)
        enable_fp8_activation_checkpointing(model, config)
        _forward(model, tokens()).backward()
        return {r.block: r.float8_tensors for r in receipt_of([model]).blocks}

    assert float8(Config(exempt_first=1)) == {"layers.0": 0, "layers.1": 2, "layers.2": 2}
    assert float8(Config(exempt_last=1)) == {"layers.0": 2, "layers.1": 2, "layers.2": 0}
    assert float8(Config(exempt=["layers.1.moe"])) == {"layers.0": 2, "layers.1": 1, "layers.2": 2}


def test_fp32_copies_of_bf16_are_kept_as_bf16():
    """Without a loss: with everything else exact, the gradients are those of no policy."""
    exact = Config(mode="none", verdicts={"*": "exact", "input": "float8"})
    with unittest.mock.patch.object(FP8AC, "_wants_float8", return_value=False):
        receipt = measure_block(_block(), _input(), None, None, config=exact)
        ours = _gradients(exact)
    narrowed = [row for row in receipt.stored if row.treatment == "exact: as bfloat16"]
    assert any(2 * row.nbytes == row.original_nbytes for row in narrowed)
    assert sum(row.nbytes for row in narrowed) >= 2 * _ROUTED * _D
    reference = _gradients(None)
    assert all(torch.equal(reference[name], ours[name]) for name in reference)


def test_verdicts_by_name():
    config = Config(
        preset="stock",
        verdicts={
            "moe.routed_experts:aten._grouped_mm:w1*": "float8",
            "*:aten.mm:*:1": "recompute",
            "moe.shared_experts.w2": "drop",
        },
    )
    receipt = measure_block(_block(), _input(), None, None, config=config)
    by_name = {row.name: row.verdict for row in receipt.ops if row.flops}
    assert by_name["moe.routed_experts.inner_experts:aten._grouped_mm:w1_EFD"] == "float8"
    assert by_name["moe.routed_experts.inner_experts:aten._grouped_mm:w3_EFD"] == "recompute"
    assert by_name["moe.shared_experts.w2:aten.mm:weight"] == "drop"
    assert by_name["attention.wq:aten.mm:weight"] == "recompute"  # the first aten.mm
    assert by_name["attention.wkv_b:aten.mm:weight"] == "exact"


def test_a_verdict_that_decides_nothing_is_said(caplog):
    verdicts = {"moe:aten.mm:w9*": "exact", "moe.shared_experts.w1": "exact"}
    with caplog.at_level(logging.WARNING):
        measure_block(_block(), _input(), None, None, config=Config(verdicts=verdicts))
    said = [record.message for record in caplog.records if "decided nothing" in record.message]
    assert len(said) == 1
    assert "moe:aten.mm:w9*" in said[0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mode": "selektive"}, r"activation_checkpoint\.mode is 'selektive'; .*mean 'selective'"),
        ({"preset": "speedy"}, r"activation_checkpoint\.preset is 'speedy'.*mean 'speed'"),
        ({"dtype": "e4m4"}, r"activation_checkpoint\.dtype"),
        ({"block": 100}, r"activation_checkpoint\.block"),
        ({"exempt_first": -1}, r"exempt_first is -1; expected 0 or more"),
        ({"mode": "full", "preset": "speed"}, r"preset is 'speed'; it has no meaning with"),
        ({"mode": "full", "attention": "float8"}, r"attention is 'float8'; it has no meaning"),
        ({"mode": "none", "attention": "recompute"}, r"recomputes nothing"),
        ({"debug": True}, r"debug is on"),
        ({"verdicts": {"moe": "flaot8"}}, r"verdicts\.'moe' is 'flaot8'.*mean 'float8'"),
        ({"verdicts": {"moe::x": "float8"}}, r"'moe::x' is no pattern"),
        ({"verdicts": {"*:aten.mm:*:x": "exact"}}, r"the occurrence in '\*:aten\.mm:\*:x'"),
        ({"verdicts": {"*:aten.mmm": "exact"}}, r"no operation 'aten\.mmm'; .*mean 'aten\.mm'"),
        ({"verdicts": {"input": "drop"}}, r'verdicts\."input" is .drop.; the inputs'),
        ({"mode": "none", "verdicts": {"moe": "drop"}}, r"autograd decides what is saved"),
    ],
)
def test_bad_values(keys, message):
    with pytest.raises(ValueError, match=message):
        Config(**keys)


def test_unknown_exempt():
    with pytest.raises(ValueError, match=r"exempt: no module of the model is called 'layers\.7'"):
        enable_fp8_activation_checkpointing(debug_model(layers=2), Config(exempt=["layers.7"]))


def test_unknown_module():
    with pytest.raises(ValueError, match=r"no module of a block is called 'moe\.shared_expert'"):
        enable_fp8_activation_checkpointing(
            debug_model(layers=2), Config(verdicts={"moe.shared_expert": "exact"})
        )


def test_command_line():
    line = (
        "--module titan_ext --config deepseek_v3_debugmodel activation_checkpoint:fp8 "
        "--activation_checkpoint.preset speed --activation_checkpoint.exempt_first 2"
    )
    config: Any = ConfigManager().parse_args([str(word) for word in line.split()])
    assert config.activation_checkpoint == Config(preset="speed", exempt_first=2)


def test_toml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = """
    [activation_checkpoint]
    policy = "fp8"
    preset = "speed"
    block = 64
    [activation_checkpoint.verdicts]
    "moe.shared_experts" = "exact"
    "*:aten.mm" = "float8"
    """
    config = resolve_text(tmp_path, DEBUG + section).config.activation_checkpoint
    verdicts = {"moe.shared_experts": "exact", "*:aten.mm": "float8"}
    assert config == Config(preset="speed", block=64, verdicts=verdicts)
    assert [rule.module for rule in config.rules()] == ["moe.shared_experts", "*"]


def test_what_compiled_code_cannot_do_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compiled = "[compile]\nenable = true\n"
    section = '[activation_checkpoint]\npolicy = "fp8"\n'
    resolve_text(tmp_path, DEBUG + section + compiled)
    for key, message in (
        ('mode = "none"\nfp32 = "float8"\n', r'fp32 is .float8.; expected "exact" under'),
        ("stochastic = true\n", "stochastic"),
        ('block = "tensor"\n', "row"),
    ):
        resolve_text(tmp_path, DEBUG + section + key)
        with pytest.raises(ValueError, match=message):
            resolve_text(tmp_path, DEBUG + section + key + compiled)


def test_every_key_of_the_codec_is_a_key():
    names = {f.name for f in dataclasses.fields(Config)}
    assert {f.name for f in dataclasses.fields(Codec)} <= names


def test_a_freed_cast_of_a_weight_lends_its_name_to_no_other_tensor():
    """FSDP's all-gather in bf16 makes such casts; the storage after the next has their address."""
    linear = nn.Linear(8, 8)
    sites = BlockSites(nn.Sequential(nn.Linear(8, 8), linear))
    cast = linear.weight.detach().bfloat16()
    sites.see_cast(torch.ops.aten._to_copy.default, (linear.weight,), cast)
    mm = torch.ops.aten.mm.default
    assert sites.site(mm, (cast,), with_operand=True).operand == "1.weight"
    del cast
    others = [torch.ones(8, 8, dtype=torch.bfloat16) for _ in range(100)]
    assert {sites.site(mm, (x,), with_operand=True).operand for x in others} == {""}


_FLOAT8_LINEARS = ("float8_linear",)


@pytest.mark.parametrize("config", [Config(), Config(preset="speed"), Config(mode="none")])
def test_float8_linears_get_the_verdicts_of_bf16_linears(config):
    """The same modules keep the same bytes; Float8's scales (an aten.max each) come on top."""

    def stored(converters: tuple[str, ...]) -> set[tuple[str, str, int]]:
        model = debug_model(layers=2, converters=converters)
        config.build(dump_folder="").apply(model)
        _forward(model, tokens()).backward()
        return {
            (":".join(row.name.split(":")[:2]), row.treatment, row.nbytes)
            for block in receipt_of([model]).blocks
            for row in block.stored
            if row.nbytes >= 64 or row.treatment == "dropped"
        }

    assert stored(_FLOAT8_LINEARS) == stored(())


@pytest.mark.parametrize("config", [Config(), Config(preset="speed"), Config(mode="none")])
def test_float8_activations_cost_float8_linears_less_than_they_cost_themselves(config, stock):
    linears = _gradients(SelectiveAC.Config(), converters=_FLOAT8_LINEARS)
    both = _gradients(config, converters=_FLOAT8_LINEARS)
    assert _worst(linears, both) > _worst(stock, linears)
