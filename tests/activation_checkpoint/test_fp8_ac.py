"""FP8 activation checkpointing, eagerly, on one process: what is stored, and the gradients."""

import contextlib
import copy
import gc
import logging
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, SelectiveAC

from tests.helpers.fp8_activations import CHOICES, ChecksItself, LooksUp, debug_model, tokens
from titan_ext.activation_checkpoint import (
    FP8AC,
    BlockMemoryReport,
    discards,
    enable_fp8_activation_checkpointing,
    measure_block,
    memory_report_of,
)
from titan_ext.activation_checkpoint.blocks import _Call
from titan_ext.activation_checkpoint.locator import OpLocator
from titan_ext.activation_checkpoint.memory_report import PolicyReport
from titan_ext.fp8 import Codec
from titan_ext.fp8.saved_tensors import StoredEntry

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
    backwards: int = 1,
    converters: tuple[str, ...] = (),
    name: str = "deepseek_v3",
) -> dict[str, torch.Tensor]:
    model = debug_model(layers=2, converters=converters, name=name)
    if config is not None:
        config.build(dump_folder="").apply(model)
    inputs = tokens(batch=2 * batches).chunk(batches)
    if interleaved:
        losses = [_forward(model, x) for x in inputs]
        with torch.no_grad():  # a validation
            _forward(model, inputs[0])
        for loss in losses:
            for again in reversed(range(backwards)):
                loss.backward(retain_graph=again > 0)
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


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"attention": "recompute", "*": "save"},
        {"*:aten.*": "save"},  # what can be kept is
    ],
    ids=str,
)
def test_exact_tables_over_the_stock_preset(table: dict[str, str], stock):
    """Attention alone: nothing is in float8, and that is no error."""
    ours = _gradients(Config(preset="stock", op_policies=table))
    assert all(torch.equal(stock[name], ours[name]) for name in stock)


_MODES = [Config(), Config(preset="gemms"), Config(mode="full"), Config(mode="no_recompute")]


@pytest.mark.parametrize("config", _MODES, ids=lambda c: f"{c.mode}-{c.preset}")
def test_gradients_point_where_those_of_bf16_do(config, stock):
    cosine, name = _worst(stock, _gradients(config))
    assert cosine >= 0.999, name


@pytest.mark.parametrize("config", _MODES, ids=lambda c: f"{c.mode}-{c.preset}")
def test_several_forwards_before_the_first_backward(config):
    """As under a pipeline, and a validation between: all state belongs to one forward."""
    apart, together = _gradients(config, 2), _gradients(config, 2, interleaved=True)
    assert all(torch.equal(apart[name], together[name]) for name in apart)


def test_a_second_backward():
    """Torch's selective checkpoint refuses one, ours with it; without recompute it is the same."""
    config = Config(mode="no_recompute")
    once, twice = (_gradients(config, interleaved=True, backwards=n) for n in (1, 2))
    assert all(torch.equal(2 * once[name], twice[name]) for name in once)
    for config in (SelectiveAC.Config(), Config()):
        with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
            _gradients(config, interleaved=True, backwards=2)


@pytest.mark.skipif(
    not hasattr(torch.utils.checkpoint, "_is_cacheable_effect"), reason="torch 2.14 looks up none"
)
def test_torch_looks_up_the_side_effects_of_few_operations(monkeypatch):
    """It takes long, and torch does it for every operation that stock checkpointing recomputes."""

    def asked(config: ActivationCheckpointing.Config) -> int:
        effects = unittest.mock.Mock(return_value=False)
        monkeypatch.setattr(torch.utils.checkpoint, "_is_cacheable_effect", effects)
        model = debug_model(layers=2)
        config.build(dump_folder="").apply(model)
        model.layers["1"](_input(), None, None)
        return effects.call_count

    assert asked(SelectiveAC.Config()) > 100 > 10 * asked(Config(preset="stock"))


# One MoE block of the debug model, 128 tokens, top 3 of 8: bytes, packs and operations of it.
_T, _D, _ROUTED = 128, 256, 3 * 128
_FLOAT8 = Codec().nbytes


def _in_float8(report: BlockMemoryReport) -> tuple[int, int]:
    """Bytes and number of the tensors that a block keeps in float8."""
    rows = [row for row in report.stored if row.treatment.startswith("float8")]
    return sum(row.nbytes for row in rows), sum(row.entries for row in rows)


def _bytes(*shape: int) -> int:
    return _FLOAT8(torch.Size(shape))


@pytest.mark.parametrize(
    ("config", "float8", "tensors", "packs"),
    [
        (Config(preset="stock"), 0, 0, 9),
        # wo, shared w1 and w3
        (Config(), _bytes(_T, _D) + 2 * _bytes(_T, 512), 3, 16),
        (Config(mode="full"), _bytes(_T, _D), 1, 3),
        # wo, experts' w1 and w3, shared w1 and w3
        (
            Config(preset="speed"),
            _bytes(_T, _D) + 2 * _bytes(_ROUTED, 256) + 2 * _bytes(_T, 512),
            5,
            18,
        ),
    ],
    ids=["stock", "memory", "full", "speed"],
)
def test_bytes_of_a_block(config, float8: int, tensors: int, packs: int):
    report = measure_block(_block(), _input(), None, None, config=config)
    assert _in_float8(report) == (float8, tensors)
    assert report.packs == packs
    assert report.nbytes == sum(row.nbytes for row in report.stored)


def test_a_block_whose_step_fails_stays_as_it_was():
    block = _block()
    with pytest.raises(ZeroDivisionError):
        measure_block(block, _input(), None, None, loss=lambda out: out / (1 // 0))
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    assert not any(getattr(module, kind) for module in block.modules() for kind in hooks)


def test_flops_of_a_block():
    gemms = {"wq": 3072 * 256, "wkv_a": 576 * 256, "wkv_b": 4096 * 512, "wo": 256 * 2048}
    experts, shared, gate = 256 * 256, 512 * 256, 8 * 256
    attention = 2 * 2 * 16 * 64 * 64 * (192 + 128)
    forward = 2 * _T * (sum(gemms.values()) + 3 * shared + gate) + attention
    forward += 2 * _ROUTED * 3 * experts
    full = measure_block(_block(), _input(), None, None, config=Config(mode="full"))
    assert (full.flops, full.recomputed_flops) == (forward, forward)
    memory = measure_block(_block(), _input(), None, None)
    # Attention and wo stay; q, k and v come from the input; the shared w2 is discarded.
    qkv = gemms["wq"] + gemms["wkv_a"] + gemms["wkv_b"]
    assert memory.recomputed_flops == 2 * _T * qkv + 2 * _ROUTED * 3 * experts
    none = measure_block(_block(), _input(), None, None, config=Config(mode="no_recompute"))
    assert none.recomputed_ops == 0

    balanced = measure_block(_block(), _input(), None, None, config=Config(preset="balanced"))
    assert balanced.recomputed_flops == 2 * _T * (qkv + shared) + 2 * _ROUTED * 2 * experts
    all_gemms = measure_block(_block(), _input(), None, None, config=Config(preset="gemms"))
    assert all_gemms.recomputed_flops == 2 * _T * gemms["wkv_b"] + 2 * _ROUTED * experts
    assert memory.nbytes < balanced.nbytes < all_gemms.nbytes < none.nbytes


def test_attention_is_exact_by_default():
    report = measure_block(_block(), _input(), None, None)
    treatments = {row.name: row.treatment for row in report.stored}
    assert treatments["attention.inner_attention:aten.bmm"] == "exact: attention"
    assert treatments["input"] == "exact: by policy"  # and q, k and v again from it
    grads = _gradients(None), _gradients(Config())
    for name in ("wq", "wkv_a", "wkv_b"):
        key = f"layers.1.attention.{name}.weight"
        # What reaches it from float8 comes through the feed-forward of the block only.
        assert _cosine(grads[0][key], grads[1][key]) > 0.9998


def test_grouped_query_attention_is_computed_again_from_an_exact_input():
    """Exactly, and for fewer bytes than stock's, which saves q, k and v."""
    exact, ours = (_gradients(config, name="qwen3_moe") for config in (None, Config()))
    for name, grad in exact.items():
        assert torch.equal(grad, ours[name]), name
    reports = {
        preset: measure_block(
            debug_model(layers=1, name="qwen3_moe").layers["0"],
            _input(),
            None,
            None,
            config=Config(preset=preset),
        )
        for preset in ("stock", "memory", "balanced")
    }
    by_policy = {row.name: row.policy for row in reports["memory"].ops}
    assert by_policy["attention.qkv_linear.wqkv:aten.mm:weight"] == "recompute"
    assert reports["memory"].nbytes < 0.6 * reports["stock"].nbytes
    assert _in_float8(reports["memory"]) == (0, 0)
    assert _in_float8(reports["balanced"])[1] > 0  # nothing in float8 is no error of the model's


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(preset="stock"),
        Config(mode="full"),
        Config(op_policies={"*:aten.topk": "recompute"}),  # that is not for a user to decide
    ],
    ids=lambda config: f"{config.mode}-{config.preset}-{config.op_policies}",
)
def test_a_router_that_rounds_otherwise_in_the_recompute_routes_alike(config):
    """TorchTitan's issue 3336: a near tie flips, and experts get other tokens than in forward."""
    model = debug_model(layers=2)
    config.build(dump_folder="").apply(model)
    forward, recompute = _routing_with_a_gate_that_differs(model)
    assert torch.equal(forward, recompute)


def _routing_with_a_gate_that_differs(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of all tokens in a block's forward and recompute; its gate differs in the latter."""
    router, ids = model.layers["1"].get_submodule("moe.router"), []
    gate = router.gate.forward

    def differs(x: torch.Tensor) -> torch.Tensor:
        scores = gate(x)
        noise = torch.randn(scores.shape, generator=torch.Generator().manual_seed(0))
        return scores + noise * (1.0 if ids else 0.0)

    router.gate.forward = differs
    router.register_forward_hook(lambda module, args, output: ids.append(output[1].clone()))
    _forward(model, tokens()).backward()
    forward, recompute = ids
    return forward, recompute


def test_tokens_are_counted_and_parameters_called_as_titan_expects():
    """Titan halves the counts of blocks that say NO_REENTRANT."""

    def built(config: ActivationCheckpointing.Config) -> Any:
        model = debug_model(layers=2)
        config.build(dump_folder="").apply(model)
        return model

    names = [name for name, _ in built(SelectiveAC.Config()).named_parameters()]
    for mode, times in (("selective", 2), ("full", 2), ("no_recompute", 1)):
        model = built(Config(mode=mode))
        assert [name for name, _ in model.named_parameters()] == names
        _forward(model, tokens()).backward()
        block = model.layers["1"]
        assert block.get_submodule("moe").get_buffer("tokens_per_expert_E").sum() == times * _ROUTED
        halves = getattr(block, "checkpoint_impl", None) is CheckpointImpl.NO_REENTRANT
        assert halves == (times == 2)


def test_a_wrong_discard_shows_as_nan():
    """Were the proof wrong, the loss would say so: the dummy is NaN."""
    block = _block()
    with unittest.mock.patch.object(discards, "_blame"):
        measure_block(
            block, _input(), None, None, config=Config(op_policies={"attention.wo": "discard"})
        )
    gradient = block.get_parameter("ffn_norm.weight").grad
    assert gradient is not None
    assert gradient.isnan().all()


def test_nothing_in_float8_is_an_error():
    block = _block().float()
    with pytest.raises(RuntimeError, match=r"nothing was stored in it.*exact: float32"):
        measure_block(block, _input().float(), None, None)
    report = measure_block(_block(), _input()[:1, :2], None, None)  # small copies of jobs are so
    treatments = {row.treatment for row in report.stored if row.nbytes}
    assert "exact: small" in treatments
    assert not any(kind.startswith("float8") for kind in treatments)


def test_exempt_layers_and_modules_are_exact():
    def float8(config) -> dict[str, int]:
        model = debug_model(layers=3)
        enable_fp8_activation_checkpointing(model, config)
        _forward(model, tokens()).backward()
        return {r.block: _in_float8(r)[1] for r in memory_report_of([model]).blocks}

    assert float8(Config(exempt=["layers.0"])) == {"layers.0": 0, "layers.1": 3, "layers.2": 3}
    assert float8(Config(exempt=["layers.2"])) == {"layers.0": 3, "layers.1": 3, "layers.2": 0}
    assert float8(Config(exempt=["layers.1.moe"])) == {"layers.0": 3, "layers.1": 1, "layers.2": 3}
    assert float8(Config(exempt=["moe"])) == {"layers.0": 3, "layers.1": 1, "layers.2": 1}


def test_fp32_copies_of_bf16_are_kept_as_bf16():
    """Without a loss: with everything else exact, the gradients are those of no policy."""
    exact = Config(mode="no_recompute", op_policies={"*": "save", "input": "save_float8"})
    with unittest.mock.patch.object(PolicyReport, "check"):
        report = measure_block(_block(), _input(), None, None, config=exact)
        ours = _gradients(exact)
    narrowed = [row for row in report.stored if row.treatment == "exact: as bfloat16"]
    assert any(2 * row.nbytes == row.original_nbytes for row in narrowed)
    assert sum(row.nbytes for row in narrowed) >= 2 * _ROUTED * _D
    reference = _gradients(None)
    assert all(torch.equal(reference[name], ours[name]) for name in reference)


def test_op_policies_by_name():
    config = Config(
        preset="stock",
        op_policies={
            "moe.routed_experts:aten._grouped_mm:w1*": "save_float8",
            "*:aten.mm:*:1": "recompute",
            "moe.shared_experts.w2": "discard",
        },
    )
    report = measure_block(_block(), _input(), None, None, config=config)
    by_name = {row.name: row.policy for row in report.ops if row.flops}
    assert by_name["moe.routed_experts.inner_experts:aten._grouped_mm:w1_EFD"] == "save_float8"
    assert by_name["moe.routed_experts.inner_experts:aten._grouped_mm:w3_EFD"] == "recompute"
    assert by_name["moe.shared_experts.w2:aten.mm:weight"] == "discard"
    assert by_name["attention.wq:aten.mm:weight"] == "recompute"  # the first aten.mm
    assert by_name["attention.wkv_b:aten.mm:weight"] == "save"


def test_occurrences_count_every_operation_that_matches():
    """Also those that an earlier rule has decided."""
    policies = {"*:aten.mm:*:1": "save", "*:aten.mm:*:2": "save", "*:aten.mm": "recompute"}
    config = Config(preset="stock", op_policies=policies)
    report = measure_block(_block(), _input(), None, None, config=config)
    gemms = [row for row in report.ops if ":aten.mm:" in row.name]
    assert [row.policy for row in gemms] == ["save"] * 2 + ["recompute"] * (len(gemms) - 2)


def test_a_policy_that_decides_nothing_is_said(caplog):
    policies = {"moe:aten.mm:w9*": "save", "moe.shared_experts.w1": "save"}
    with caplog.at_level(logging.WARNING):
        measure_block(_block(), _input(), None, None, config=Config(op_policies=policies))
    said = [record.message for record in caplog.records if "has no effect in" in record.message]
    assert len(said) == 1
    assert "moe:aten.mm:w9*" in said[0]


@pytest.mark.parametrize(
    "config",
    [
        Config(mode="no_recompute"),
        Config(preset="stock", op_policies={"moe.routed_experts:aten._grouped_mm": "save_float8"}),
    ],
    ids=["no_recompute", "op_policies"],
)
def test_a_block_that_leaves_itself_out_is_reported_once_it_runs(config: Config, caplog):
    """As by stochastic depth, in the first forward: nothing is wrong with the policy."""
    model = debug_model(layers=2)
    block = model.layers["1"]
    base, skips = type(block), [True]

    def forward(self: Any, x_BLD: torch.Tensor, *args: Any) -> torch.Tensor:
        return x_BLD + torch.rand(()) if skips and skips.pop() else base.forward(self, x_BLD, *args)

    block.__class__ = type("Mine", (base,), {"forward": forward})
    enable_fp8_activation_checkpointing(model, config)
    with caplog.at_level(logging.WARNING):
        for blocks in (["layers.0"], ["layers.0", "layers.1"]):
            _forward(model, tokens())
            assert [report.block for report in memory_report_of([model]).blocks] == blocks
    assert "has no effect in" not in caplog.text


def test_an_unknown_name_in_an_own_loop():
    config = Config(op_policies={"moe.shared_expert": "save"})
    with pytest.raises(ValueError, match=r"no module of a block is called 'moe\.shared_expert'"):
        enable_fp8_activation_checkpointing(debug_model(layers=2), config)


def test_op_policies_by_the_name_in_the_model():
    model = debug_model(layers=3)
    config = Config(op_policies={"layers.1.attention.wq": "save"})
    enable_fp8_activation_checkpointing(model, config)
    _forward(model, tokens())
    kept = {
        block.block
        for block in memory_report_of([model]).blocks
        if any(row.name.startswith("attention.wq:") for row in block.stored)
    }
    assert kept == {"layers.1"}
    # Compiled code is not shared with a block that decides otherwise.
    policy, blocks = FP8AC(config), debug_model(layers=3).layers
    plans = [policy.compiled_policies(blocks["1"], f"layers.{i}") for i in range(3)]
    names = [name for name, _ in blocks["1"].named_modules()]
    first, second, third = (plan.key(names) for plan in plans)
    assert first == third != second


def test_a_freed_cast_of_a_weight_lends_its_name_to_no_other_tensor():
    """FSDP's all-gather in bf16 makes such casts; the storage after the next has their address."""
    linear = nn.Linear(8, 8)
    locator = OpLocator(nn.Sequential(nn.Linear(8, 8), linear))
    cast = linear.weight.detach().bfloat16()
    locator.begin(with_operands=True)
    locator.see_cast(linear.weight, cast)
    mm = torch.ops.aten.mm.default
    assert locator.locate(mm, (cast,)).operand == "1.weight"
    del cast
    others = [torch.ones(8, 8, dtype=torch.bfloat16) for _ in range(100)]
    assert {locator.locate(mm, (x,)).operand for x in others} == {""}


_FLOAT8_LINEARS = ("float8_linear",)


@pytest.mark.parametrize("config", [Config(preset="speed"), Config(mode="no_recompute")])
def test_float8_linears_get_the_op_policies_of_bf16_linears(config):
    """The same modules keep the same bytes; Float8's scales (an aten.max each) come on top.

    Only the sum of the routed experts is not discarded: Float8 linears may run after it.
    """

    def stored(converters: tuple[str, ...]) -> set[tuple[str, str, int]]:
        model = debug_model(layers=2, converters=converters)
        config.build(dump_folder="").apply(model)
        _forward(model, tokens()).backward()
        return {
            (":".join(row.name.split(":")[:2]), row.treatment, row.nbytes)
            for block in memory_report_of([model]).blocks
            for row in block.stored
            if row.nbytes >= 64 or row.treatment == "discarded"
            if not row.name.startswith("moe.routed_experts:") or row.nbytes
        }

    assert stored(_FLOAT8_LINEARS) == stored(())


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_is_kept(choice: str):
    """The gradient of the table tells which rows were looked up, and nothing of float8."""

    def gradient(config: FP8AC.Config | None) -> torch.Tensor:
        torch.manual_seed(3)
        block = LooksUp(CHOICES[choice]).bfloat16()
        x_TD = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True)
        if config is None:
            block(x_TD).float().sum().backward()
        else:
            report = measure_block(block, x_TD, config=config)
            assert _in_float8(report)[1]
        assert block.table.weight.grad is not None
        return block.table.weight.grad

    plain = gradient(None)
    for config in (Config(), Config(preset="speed"), Config(mode="full")):
        assert torch.equal(plain, gradient(config)), config


def test_only_a_rule_that_names_a_choice_lets_it_run_again():
    def held(**op_policies: str) -> int:
        config = Config(op_policies={**op_policies, "*": "recompute"})
        x_TD = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True)
        return measure_block(LooksUp(CHOICES["gate"]).bfloat16(), x_TD, config=config).nbytes

    mask = 256 * 256
    assert held() - mask == held(**{"*:aten.gt": "recompute"})
    assert held(**{"*:aten.gt": "save_float8"}) == held(**{"*:aten.gt": "discard"}) == held()


@pytest.mark.parametrize(
    "choose", [lambda h: h.clone().round_(), lambda h: h.new_empty(256, dtype=int).copy_(h[:, 0])]
)
def test_a_choice_in_place_is_refused(choose: Callable[[torch.Tensor], torch.Tensor]):
    """What is written in place runs again, so it cannot be kept."""
    x_TD = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True)
    block = LooksUp(choose).bfloat16()
    with pytest.raises(ValueError, match=r"\(block\):aten\.\w+_ of layers\.0 writes .* in place"):
        measure_block(block, x_TD)
    rules = {"*:aten.round_": "recompute", "*:aten.copy_": "recompute"}
    measure_block(block, x_TD, config=Config(op_policies=rules))
    measure_block(block, x_TD, config=Config(preset="stock"))


class _Ends(nn.Module):
    """A block with a function before its last linear."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(256, 256, bias=False) for _ in range(2))
        self._function = function

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.last(self._function(nn.functional.silu(self.first(x_TD))))


def _first_gradient(
    function: Callable[[torch.Tensor], torch.Tensor], config: Config | None
) -> torch.Tensor:
    """The gradient of ``first`` with ``function`` after it; with None, without checkpointing."""
    torch.manual_seed(3)
    block = _Ends(function).bfloat16()
    x_TD = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True)
    if config is None:
        block(x_TD).float().sum().backward()
    else:
        measure_block(block, x_TD, config=config)
    assert block.first.weight.grad is not None
    return block.first.weight.grad


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h / h.max(),
        lambda h: h - h.amax(),
        lambda h: h / torch.linalg.vector_norm(h, float("inf")),
    ],
)
def test_a_result_that_its_derivative_looks_for_is_refused(function: Any):
    """Among values that come from float8 it was not found, or in other places: cosine 0.7."""
    modes: Any = "selective", "full", "no_recompute"
    for config in (*(Config(mode=mode) for mode in modes), Config(preset="speed")):
        with pytest.raises(ValueError, match="looks for its result among values that float8"):
            _first_gradient(function, config)
    plain = _first_gradient(function, None)
    for config in (*(Config(mode=mode, exempt=["*"]) for mode in modes), Config(preset="stock")):
        assert torch.equal(plain, _first_gradient(function, config))
    _first_gradient(function, Config(op_policies={"*:aten.*": "recompute"}))


def test_a_result_among_values_that_stay_exact_is_found():
    def function(h_TD: torch.Tensor) -> torch.Tensor:
        return (h_TD.double() / h_TD.double().max()).to(h_TD.dtype)

    config = Config(mode="no_recompute")
    assert _cosine(_first_gradient(function, None), _first_gradient(function, config)) > 0.99
    _first_gradient(lambda h: h / h.detach().max(), Config())


def test_random_numbers_are_not_drawn_after_kept_ones():
    """The recompute does not draw what is kept, and so would draw others from there on."""

    def coins(h_TD: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(h_TD * torch.bernoulli(h_TD.sigmoid()), 0.3)

    def noise(h_TD: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(h_TD * torch.rand_like(h_TD), 0.3)

    keeps_noise = Config(preset="stock", op_policies={"*:aten.rand_like": "save"})
    for function, config in ((coins, Config()), (coins, Config(mode="full")), (noise, keeps_noise)):
        with pytest.raises(ValueError, match=r"draws random numbers after .*, which is kept"):
            _first_gradient(function, config)
    stock = Config(preset="stock")
    for function in (coins, noise):
        assert torch.equal(_first_gradient(function, None), _first_gradient(function, stock))
    assert _cosine(_first_gradient(noise, None), _first_gradient(noise, Config())) > 0.99


def test_a_hook_that_raises_leaves_no_trace():
    """Before ours has run: torch then calls our hook after the forward alone."""
    model, bad = debug_model(layers=2), [True]

    def hook(*_: Any) -> None:
        if bad:
            raise ArithmeticError

    FP8AC(Config()).apply(model)
    wo = model.get_submodule("layers.1").get_submodule("_checkpoint_wrapped_module.attention.wo")
    wo.register_forward_pre_hook(hook, prepend=True)
    with pytest.raises(ArithmeticError):
        _forward(model, tokens())
    bad.clear()
    _forward(model, tokens()).backward()
    assert "attention.wo:aten.mm" in str(memory_report_of([model]).rows())


class _Region(nn.Module):
    """A region that Inductor compiles, as Titan compiles FlexAttention on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        options: Any = {"wrap_inductor_compiled_regions": True}
        # Products alone: Inductor has no kernel of its own to compile.
        self._region = torch.compile(lambda x: x @ x.detach().t(), options=options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._region(x.transpose(0, 1)).transpose(0, 1)


class _HasRegion(nn.Module):
    """A block with such a region, whose argument nothing else keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.second = nn.Linear(8, 8), _Region(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.inner(self.first(x).cos()))


@pytest.mark.parametrize(
    "config", [Config(preset="stock"), Config(mode="no_recompute", exempt=["*"])]
)
def test_regions_that_inductor_compiles(config: Config) -> None:
    """They are compiled under our modes, too. A selective policy saves what they return, but for
    arguments, which they return for their backward.
    """
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    block, x = _HasRegion(), torch.randn(4, 8)
    report = measure_block(block, x, config=config)
    assert counters["stats"]["unique_graphs"] == 1
    if config.mode == "selective":
        (row,) = (row for row in report.stored if "inductor_compiled_code" in row.name)
        assert (row.entries, row.nbytes) == (1, 4 * 8 * 8)
    grads = [parameter.grad for parameter in block.parameters()]
    block.zero_grad()
    block(x).sum().backward()
    torch.testing.assert_close(grads, [parameter.grad for parameter in block.parameters()])


def test_what_wraps_an_exchange_is_never_saved():
    """What is saved has no wrapper: a recompute would run other operations on it."""
    ops: Any = torch.ops._c10d_functional
    block = debug_model(layers=2).layers["1"]
    config = Config(op_policies={"*:_c10d_functional*": "save"})
    policies = config.policies_of(block, "layers.1")
    assert policies.fixed(ops.all_to_all_single.default, "moe")[0] is None
    assert policies.fixed(ops._wrap_tensor_autograd.default, "moe")[0] is not None


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    ("config", "is_refused"),
    [(Config(), True), (Config(mode="no_recompute"), True), (Config(preset="stock"), False)],
)
def test_a_block_that_checkpoints_itself_would_choose_again(
    config: Config, is_refused: bool, use_reentrant: bool
):
    block = ChecksItself(CHOICES["argmax"]).bfloat16()
    block.use_reentrant = use_reentrant
    x_TD = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True)
    says = pytest.raises(ValueError, match=r"argmax.* chooses inside of a checkpoint")
    with says if is_refused else contextlib.nullcontext():
        measure_block(block, x_TD, config=config)


@pytest.mark.parametrize("config", [Config(), Config(mode="no_recompute")])
def test_nothing_of_a_forward_outlives_its_backward(config: Config):
    """Titan collects garbage every 50 steps: what a cycle holds would pile up."""
    model: Any = nn.Module()
    model.layers = nn.ModuleDict({"0": nn.Sequential(nn.Linear(256, 256, bias=False).bfloat16())})
    FP8AC(config).apply(model)

    def alive() -> int:
        return sum(isinstance(each, _Call | StoredEntry) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        x = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True) * 1
        loss = model.layers["0"](x).sum()
        assert alive() > before
        loss.backward()
        assert alive() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", ["selective", "no_recompute"])
def test_a_model_with_the_policy_is_not_copied(mode: Any):
    """Hooks would name the operations of the copy by where the model's own were last."""
    model = debug_model(layers=2)
    enable_fp8_activation_checkpointing(model, Config(mode=mode))
    with pytest.raises(ValueError, match=r"layers\.0 cannot be copied.* before policy fp8 is appl"):
        copy.deepcopy(model)


def test_casts_of_weights_by_autocast_stay_exact():
    """It caches them in its context: the second forward casts no weight."""
    model = nn.Module()
    layer = nn.Sequential(nn.Linear(128, 128, bias=False), nn.SiLU())
    model.layers = nn.ModuleDict({"0": layer})
    enable_fp8_activation_checkpointing(model, Config(mode="no_recompute"))
    block: Any = model.get_submodule("layers.0")
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [block(torch.randn(64, 128, requires_grad=True)) for _ in range(2)]
    rows = {row.treatment: row for row in block._block.store.memory_report if row.name == "0"}
    assert rows["exact: cast weight"].nbytes == 2 * 128 * 128
    # For each forward the input of the linear.
    assert rows["float8 e4m3"].entries == 2
    torch.stack(outputs).float().sum().backward()
