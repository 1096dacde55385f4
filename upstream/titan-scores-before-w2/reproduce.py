# SPDX-License-Identifier: BSD-3-Clause
"""Routing scores before or after the last expert GEMM: bytes, FLOPs recomputed, rounding.

For TorchTitan's pull request 4095, on a CPU and TorchTitan 0.3.0 as it is. Widths and top-k are
those of DeepSeek-V3 16B, with 8 experts and 64 tokens: figures are per routed token. Errors are
relative Frobenius norms, against the same step in fp64.

Shape suffixes, as in torchtitan/models/common/moe.py: T = tokens, K = top-k, D = model dimension,
F = hidden dimension of an expert, E = experts, R = routed tokens.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.ops.scatter_add import deterministic_scatter_add

T, K, D, HIDDEN, E = 64, 6, 2048, 1408, 8
R = T * K

Gemm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def after_w2(h_RF, w2_EDF, scores_R1, gemm: Gemm):
    """0.3.0: TokenDispatcher.combine multiplies."""
    out_RD = gemm(h_RF, w2_EDF)
    return (out_RD.to(torch.float32) * scores_R1).to(out_RD.dtype)


def after_w2_promoted(h_RF, w2_EDF, scores_R1, gemm: Gemm):
    """The same without ``.to(float32)``: type promotion multiplies in fp32 all the same."""
    out_RD = gemm(h_RF, w2_EDF)
    return (out_RD * scores_R1).to(out_RD.dtype)


def before_w2(h_RF, w2_EDF, scores_R1, gemm: Gemm):
    """Pull request 4095 at 844fe9c: scores are rounded to bf16 first."""
    return gemm(h_RF * scores_R1.to(h_RF.dtype), w2_EDF)


def before_w2_promoted(h_RF, w2_EDF, scores_R1, gemm: Gemm):
    """The same with one rounding: scores stay in fp32."""
    return gemm((h_RF * scores_R1).to(h_RF.dtype), w2_EDF)


FORMS = (after_w2, after_w2_promoted, before_w2, before_w2_promoted)


class Step:
    """Inputs and weights of one layer of routed experts, in bf16."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        experts = GroupedExperts.Config(dim=D, hidden_dim=HIDDEN, num_experts=E).build()
        self.weights = [w.detach().normal_(std=0.02).bfloat16() for w in experts.parameters()]
        self.names = [name.split("_")[0] for name, _ in experts.named_parameters()]
        self.x_TD = torch.randn(T, D).bfloat16()
        self.scores_TK = torch.rand(T, K) * 0.2 + 0.01
        ids_TK = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
        order_R = ids_TK.flatten().argsort(stable=True)
        self.tokens_R, self.order_R = order_R // K, order_R
        self.offsets_E = ids_TK.flatten().bincount(minlength=E).cumsum(0).int()
        self.grad_TD = torch.randn(T, D)

    def leaves(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        tensors = {"x": self.x_TD, **dict(zip(self.names, self.weights, strict=True))}
        leaves = {name: t.to(dtype, copy=True).requires_grad_() for name, t in tensors.items()}
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scores = self.scores_TK.to(wide, copy=True)
        return {**leaves, "scores": scores.requires_grad_()}

    def gemm(self, a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if a.dtype == torch.bfloat16:
            return torch._grouped_mm(a, w.transpose(-2, -1), offs=self.offsets_E)
        counts = self.offsets_E.diff(prepend=self.offsets_E.new_zeros(1)).tolist()
        return torch.cat([x @ m.T for x, m in zip(a.split(counts), w, strict=True)])

    def forward(self, form: Callable, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        """Dispatch, experts and combine of TorchTitan at EP 1."""
        x_RD = leaves["x"][self.tokens_R]
        scores_R1 = leaves["scores"].flatten()[self.order_R].unsqueeze(-1)
        h_RF = nnf.silu(self.gemm(x_RD, leaves["w1"])) * self.gemm(x_RD, leaves["w3"])
        out_RD = form(h_RF, leaves["w2"], scores_R1, self.gemm)
        index_RD = self.tokens_R.unsqueeze(-1).expand(-1, D)
        return deterministic_scatter_add(torch.zeros_like(leaves["x"]), index_RD, out_RD)

    def results(self, form: Callable, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        leaves = self.leaves(dtype)
        out_TD = self.forward(form, leaves)
        (out_TD * self.grad_TD.to(out_TD.dtype)).sum().backward()
        gradients = {name: leaf.grad for name, leaf in leaves.items()}
        return {"out": out_TD.detach(), **{n: g for n, g in gradients.items() if g is not None}}


def held_bytes(step: Step, form: Callable) -> int:
    """What autograd keeps of one forward, without its inputs and weights."""
    leaves = step.leaves(torch.bfloat16)
    known = {leaf.untyped_storage().data_ptr() for leaf in leaves.values()}
    storages: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        step.forward(form, leaves)
    return sum(x.untyped_storage().nbytes() for p, x in storages.items() if p not in known)


def recomputed_gemms(step: Step, form: Callable, early_stop: bool) -> float:
    """GEMMs that the backward of a checkpoint around it runs again; the backward has six."""

    def flops(a_shape, b_shape, *args, out_shape=None, **kwargs) -> int:
        return 2 * a_shape[-2] * a_shape[-1] * b_shape[-1]

    leaves = step.leaves(torch.bfloat16)
    function = functools.partial(step.forward, form)
    out_TD = checkpoint(function, leaves, use_reentrant=False, early_stop=early_stop)
    mapping = {torch.ops.aten._grouped_mm: flops}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counted:
        out_TD.float().sum().backward()
    return counted.get_total_flops() / (2 * R * D * HIDDEN) - 6


def main() -> None:
    step = Step()
    exact = step.results(after_w2, torch.float64)
    columns = ["form", "bytes", "again", "early stop", *(f"error of {name}" for name in exact)]
    print("| " + " | ".join(columns) + " |")
    held, errors, results = {}, {}, {}
    for form in FORMS:
        results[form] = step.results(form, torch.bfloat16)
        held[form] = held_bytes(step, form) / R
        again = [recomputed_gemms(step, form, early_stop) for early_stop in (False, True)]
        errors[form] = {
            name: ((results[form][name].double() - x).norm() / x.norm()).item()
            for name, x in exact.items()
        }
        row = [f"{form.__name__}", f"{held[form]:.0f}", *(f"{n:.0f}" for n in again)]
        print("| " + " | ".join([*row, *(f"{e:.5f}" for e in errors[form].values())]) + " |")
        assert again == [3, 3], (
            again
        )  # combine's scatter_add keeps its index: early stop is after it
    for name, value in results[after_w2].items():
        assert torch.equal(value, results[after_w2_promoted][name]), name
    assert held[after_w2] - held[after_w2_promoted] == 2 * D
    scores_nbytes = 4
    for form in (before_w2, before_w2_promoted):
        assert abs(held[after_w2] - held[form] - (4 * D - 2 * HIDDEN)) <= scores_nbytes
    assert errors[before_w2_promoted]["out"] < errors[before_w2]["out"]
    print(f"bytes as counted: 4 D - 2 F = {4 * D - 2 * HIDDEN} fewer for each routed token")


if __name__ == "__main__":
    main()
