"""``titan_ext verify`` as its users have it: its exit code and its lines, beside another truth.

Nothing here knows verify from inside, so a verify that skips a comparison turns it red. What is
right says one MoE layer computed by hand, and a run of ours that equals stock's bit for bit. Faults
are planted in Titan's code or in ours, as a branch of a user would have them.
"""

import contextlib
import copy
import re
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.config import derive
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from tests.helpers.training import Run, Runs, observed, titan_config
from tests.matrix.exact import differences
from tests.verify.test_verify import _run_command
from titan_ext.components import exchange
from titan_ext.components.dispatch import FunctionalAllToAllTokenDispatcher, exchange_in_float8
from titan_ext.fp8.codec import default_codec

patch = unittest.mock.patch.object
FLOAT8 = ("--ranks", "2", "--parallelism.expert_parallel_degree", "2")
FLOAT8 += ("--parallelism.exchange_dtype", "float8")
GATE = "router.gate.weight"

# -- faults: contexts in which a layer, or a job, is broken


def one_bit_of_bfloat16() -> Any:
    """What experts send back in bfloat16 has another last bit."""
    real = FunctionalAllToAllTokenDispatcher._combine_token_exchange

    def combine(self: Any, *args: Any) -> Any:
        rows_ND = real(self, *args)
        return rows_ND * (1 + 2**-7) if rows_ND.dtype is torch.bfloat16 else rows_ND

    return patch(FunctionalAllToAllTokenDispatcher, "_combine_token_exchange", combine)


def scales_of_float8() -> Any:
    """Tokens that traveled in float8 are four times what they were."""
    real = exchange.unpack

    def unpack(*args: Any) -> torch.Tensor:
        return real(*args) * (1 if default_codec().dtype == "exact" else 4)

    return patch(exchange, "unpack", unpack)


@contextlib.contextmanager
def in_fewer_bits() -> Iterator[None]:
    with one_bit_of_bfloat16(), scales_of_float8():
        yield


# -- what is true, without verify


def _layer(kind: type = FunctionalAllToAllTokenDispatcher, *, float8: bool = False) -> Any:
    """A MoE layer of DeepSeek-V3, parallelized on the one rank that there is."""
    spec = titan_config("deepseek_v3").model_spec
    config: Any = copy.deepcopy(spec.model)
    config = config.layers[1].moe
    config.routed_experts.token_dispatcher = derive(
        config.routed_experts.token_dispatcher, kind.Config
    )
    layer = config.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * param.shape[-1] ** -0.5)
        layer.tokens_per_expert_E.zero_()
        layer.expert_bias_E.copy_(torch.randn(layer.expert_bias_E.shape, generator=generator) / 10)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    layer.parallelize(SimpleNamespace(get_optional_mesh=lambda name: mesh))
    if float8:
        exchange_in_float8(layer)
    return layer


def _passed(layer: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Its output and gradients of a pass of 64 tokens."""
    layer.to(dtype)
    x_BLD, grad_BLD = _tokens(layer)
    mesh = layer.routed_experts.token_dispatcher.ep_mesh
    with set_current_spmd_mesh(mesh):
        out_BLD = layer(x_BLD.to(dtype))
        out_BLD.backward(grad_BLD.to(dtype))
    return {"out": out_BLD.detach()} | {n: p.grad for n, p in layer.named_parameters()}


def _tokens(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2, 1, 32, layer.router.gate.weight.shape[-1])
    x_BLD, grad_BLD = torch.randn(shape, generator=generator)
    return x_BLD, grad_BLD


def _by_hand(layer: Any) -> dict[str, torch.Tensor]:
    """The same by plain products, expert by expert, and how many tokens each expert gets."""
    of = {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}
    (x_TD,), (grad_TD,) = _tokens(layer)
    router = layer.router
    logits_TE = x_TD @ of[GATE].T
    scores_TE = {"softmax": logits_TE.softmax(-1), "sigmoid": logits_TE.sigmoid()}[
        router.score_func
    ]
    assert (router.route_norm, router.num_expert_groups) == (False, None)
    ids_TK = (scores_TE + layer.expert_bias_E).topk(router.top_k).indices
    w1, w2, w3 = (of[f"routed_experts.inner_experts.{n}"] for n in ("w1_EFD", "w2_EDF", "w3_EFD"))
    shared = {n: of[f"shared_experts.{n}.weight"] for n in ("w1", "w2", "w3")}
    out_TD = (nnf.silu(x_TD @ shared["w1"].T) * (x_TD @ shared["w3"].T)) @ shared["w2"].T
    for expert in range(router.num_experts):
        tokens = (ids_TK == expert).any(-1).nonzero()[:, 0]
        rows = x_TD[tokens]
        rows = (nnf.silu(rows @ w1[expert].T) * (rows @ w3[expert].T)) @ w2[expert].T
        score = scores_TE[tokens, expert, None] * router.route_scale
        out_TD = out_TD.index_add(0, tokens, rows * score)
    out_TD.backward(grad_TD)
    loads_E = torch.bincount(ids_TK.flatten(), minlength=router.num_experts)
    return {"out": out_TD.detach()[None], "loads": loads_E} | {n: w.grad for n, w in of.items()}


def _factors(found: dict[str, Any], right: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of tensors that are off by more than experts in bfloat16 are: by which factor; 0 is lost."""
    wrong = {}
    for name, tensor in found.items():
        tensor = torch.zeros_like(right[name]) if tensor is None else tensor.float()
        if (tensor - right[name]).norm() > 0.02 * right[name].norm():
            wrong[name] = float((tensor * right[name]).sum() / right[name].norm() ** 2)
    return wrong


# -- the command


def _verify(folder: Path, *flags: str, fault: Callable[[], Any] | None = None) -> Any:
    """Exit code, output, and what it calls WRONG by category, as ``name is ...``."""
    code, said = _run_command(folder, "--checkpoint.no-enable", *flags, fault=fault)
    wrong: dict[str, list[str]] = {}
    category = ""
    for line in said.splitlines():
        if found := re.match(r"  (\S+) +WRONG +(.*)", line):
            category = found[1]
            wrong.setdefault(category, []).append(found[2])
        elif found := re.match(r" {28}(\S.*)", line):
            wrong[category].append(found[1])
    return code, said, wrong


@pytest.mark.usefixtures("one_rank")
def test_right_code_is_right(tmp_path: Path, runs: Runs):
    """A layer as by hand, in float8 too; a neutral key as stock; then the command agrees."""
    right = _by_hand(_layer())
    layer = _layer()
    assert _factors(_passed(layer), right) == {}
    assert layer.tokens_per_expert_E.tolist() == right["loads"].tolist()
    in_float8 = _factors(_passed(_layer(float8=True)), right)
    assert all(abs(factor - 1) < 0.05 for factor in in_float8.values())
    ours = observed(Run(parallelize="submodule", world=2, ep=2))
    stock = observed(Run(parallelize="stock", world=2, ep=2))
    assert differences(runs.get(ours), runs.get(stock)) == []
    code, said, wrong = _verify(tmp_path, *FLOAT8)
    assert (code, wrong) == (0, {}), said
    assert "engaged   float8: exchange_dtype in " in said
    assert "\nRIGHT (" in said


@pytest.mark.usefixtures("one_rank")
def test_faults_of_fewer_bits(tmp_path: Path):
    """Of bfloat16 and of float8 alone: fp32 with an exact codec does not have them."""
    stock, right = _layer(AllToAllTokenDispatcher), _layer()
    first, second = (_passed(layer, dtype=torch.bfloat16) for layer in (stock, right))
    assert all(torch.equal(first[name], second[name]) for name in first)
    with in_fewer_bits():
        assert _factors(_passed(_layer()), _by_hand(_layer())) == {}
        off = _passed(_layer(), dtype=torch.bfloat16)["out"]
        assert not torch.equal(off, first["out"])
        assert (off - first["out"]).norm() < 0.02 * first["out"].norm()
        in_float8 = _factors(_passed(_layer(float8=True)), _by_hand(_layer()))
        assert in_float8["out"] > 1.5
    code, said, wrong = _verify(tmp_path, *FLOAT8, fault=in_fewer_bits)
    assert code == 1, said
    axes, keys = said.split("\nkeys ")
    assert "WRONG" not in axes
    assert wrong.keys() >= {"grads", "lossy"}
    assert wrong["lossy"][0].startswith("the whole gradient is ")
    assert "stock TorchTitan is right on this layout" in keys
