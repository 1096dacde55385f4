# SPDX-License-Identifier: BSD-3-Clause
"""HybridEP's exchange of tokens on CPU ranks, where neither it nor MinimalAsyncEP has kernels.

Titan's dispatcher and its autograd formulas stay (``torchtitan/distributed/deepep/hybridep.py``).
Its four operations get kernels for a CPU with the contract of deep_ep's that do not wait: buffers
for the configured share of the worst routing, counts that stay on the device, and what overflows
left out. Every rank gets the tokens of all and takes its own, so no size depends on the routing.

Shape suffixes: T = tokens of a rank, K = experts of a token, A = tokens of all ranks, N = their
routes (A x K), R = rows of the buffer, D = model dimension, e = experts of a rank, E = of all.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torchtitan.config.override import derive
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
    DeepEPTokenDispatcher,
    HybridEPTokenDispatcher,
    MinimalAsyncEPTokenDispatcher,
)

from titan_ext.components.dispatch import CountedHybridEPTokenDispatcher, replace_configs

_KINDS = DeepEPTokenDispatcher, HybridEPTokenDispatcher, MinimalAsyncEPTokenDispatcher


class BufferedTokenDispatcher(CountedHybridEPTokenDispatcher):
    """HybridEP that does not wait, with the kernels below."""

    @dataclass(kw_only=True, slots=True)
    class Config(CountedHybridEPTokenDispatcher.Config):
        pass

    def init_buffer(self) -> None:
        """Titan's makes the buffer of deep_ep."""
        _register()


def run_on_a_cpu(config: Any, *, drops: bool) -> set[str]:
    """Put what a CPU runs in place of dispatchers without kernels for it in a trainer's config.

    MinimalAsyncEP, and HybridEP that does not wait, get ``BufferedTokenDispatcher``; others read
    counts on the host, as Titan's all-to-all does. Without ``drops`` a buffer is for the worst
    routing. In a layout without expert parallelism, in which they cannot be, nothing is sent.
    Returns the names of their classes.
    """
    replaced = set()

    def replacement(of: Any) -> Any:
        kind = next((kind for kind in _KINDS if isinstance(of, kind.Config)), None)
        if kind is None:
            return of
        replaced.add(kind.__name__)
        # MinimalAsyncEP's buffer is for the worst routing; the other two may have none.
        is_minimal = kind is MinimalAsyncEPTokenDispatcher
        share = 1.0 if is_minimal else getattr(of, "non_blocking_capacity_factor", None)
        if share is None or config.parallelism.expert_parallel_degree == 1:
            return derive(of, AllToAllTokenDispatcher.Config)
        share = share if drops else 1.0
        return derive(of, BufferedTokenDispatcher.Config, non_blocking_capacity_factor=share)

    replace_configs(config.model_spec, BaseEPTokenDispatcher.Config, replacement)
    return replaced


class Routes(NamedTuple):
    """What a dispatch tells its combine, and the backward of both; deep_ep's handle."""

    sources: torch.Tensor
    """The route that each row is of; -1 for a row of none."""
    expert_ids: torch.Tensor
    group: dist.ProcessGroup

    def to_rows(self, x_TD: torch.Tensor, per_token: int) -> torch.Tensor:
        """Tokens, or routes if they are one ``per_token``, of all ranks as rows of the buffer."""
        x_AD = _of_all_ranks(x_TD, self.group)
        index_R = self.sources.clamp(min=0) // per_token
        has_token_R1 = (self.sources >= 0).view(-1, *[1] * (x_TD.dim() - 1))
        return torch.where(has_token_R1, x_AD[index_R], 0)

    def to_tokens(self, rows_RD: torch.Tensor, per_token: int) -> torch.Tensor:
        """The sums of rows, of all ranks, for each token of this one; in fp32."""
        has_token_R1 = (self.sources >= 0).view(-1, *[1] * (rows_RD.dim() - 1))
        index_R = self.sources.clamp(min=0) // per_token
        tokens = self.expert_ids.numel() // per_token * self.group.size()
        sums_AD = rows_RD.new_zeros(tokens, *rows_RD.shape[1:], dtype=torch.float32)
        sums_AD.index_add_(0, index_R, torch.where(has_token_R1, rows_RD, 0).float())
        # Summed in the order of ranks: a reduce-scatter's is the backend's.
        parts_AD = torch.empty_like(sums_AD)
        dist.all_to_all_single(parts_AD, sums_AD, group=self.group)
        return parts_AD.view(self.group.size(), -1, *rows_RD.shape[1:]).sum(0)


def _of_all_ranks(x_TD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x_AD = x_TD.new_empty(len(x_TD) * group.size(), *x_TD.shape[1:])
    dist.all_gather_into_tensor(x_AD, x_TD.contiguous(), group=group)
    return x_AD


def _dispatch(
    x_TD: torch.Tensor,
    expert_ids: torch.Tensor,
    scores_TK: torch.Tensor,
    num_experts: int,
    ranks: int,
    group_name: str,
    non_blocking: bool = False,
    share: float | None = None,
    pad_multiple: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    from torchtitan.distributed.deepep import hybridep

    assert share is not None, "run_on_a_cpu leaves out those that wait"
    group: Any = _resolve_process_group(group_name)  # pyrefly: ignore[bad-argument-type]
    experts, top_k = num_experts // ranks, expert_ids.shape[1]
    size = hybridep._num_permuted_tokens_for_non_blocking(
        len(x_TD), ranks, experts, top_k, share, pad_multiple
    )
    mine_N = _of_all_ranks(expert_ids, group).view(-1) - group.rank() * experts
    mine_N = torch.where((mine_N >= 0) & (mine_N < experts), mine_N, experts)
    counts_e = (mine_N[:, None] == torch.arange(experts)).sum(0)
    multiple = pad_multiple or 1
    padded_e = (counts_e + multiple - 1) // multiple * multiple
    # Where the routes of an expert begin among all that are sorted, and in the buffer.
    order_N = mine_N.argsort(stable=True)
    sorted_N = mine_N[order_N]
    first = torch.cat([counts_e.new_zeros(1), counts_e.cumsum(0)])
    first_row = torch.cat([counts_e.new_zeros(1), padded_e.cumsum(0)])
    row_N = torch.arange(len(order_N)) - first[sorted_N] + first_row[sorted_N]
    room = size - 1 if share < 1 else size  # as deep_ep, which counts rows from one
    row_N = torch.where((sorted_N < experts) & (row_N < room), row_N, size)
    sources = counts_e.new_full((size + 1,), -1).scatter_(0, row_N, order_N)[:-1]
    routes = Routes(sources, expert_ids.clone(), group)
    scores_R = routes.to_rows(scores_TK.float().reshape(-1), 1)
    handle = hybridep.DispatchHandle(routes)
    return routes.to_rows(x_TD, top_k), scores_R, padded_e, handle


def _combine(
    x_RD: torch.Tensor, handle: Any, num_tokens: int, pad_multiple: int | None = None
) -> torch.Tensor:
    routes: Routes = handle.value
    return routes.to_tokens(x_RD, routes.expert_ids.shape[1]).to(x_RD.dtype)


def _combine_backward(
    grad_TD: torch.Tensor, handle: Any, num_rows: int, pad_multiple: int | None = None
) -> torch.Tensor:
    routes: Routes = handle.value
    return routes.to_rows(grad_TD, routes.expert_ids.shape[1])


def _dispatch_backward(
    grad_RD: torch.Tensor, grad_R: torch.Tensor, handle: Any, num_tokens: int, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    routes: Routes = handle.value
    ids_TK = routes.expert_ids
    grads_TK = routes.to_tokens(grad_R, 1).view(ids_TK.shape)
    dense_TE = grads_TK.new_zeros(num_tokens, num_experts).scatter_(1, ids_TK, grads_TK)
    return _combine(grad_RD, handle, num_tokens), dense_TE


@functools.cache
def _register() -> None:
    """Give Titan's operations, which have kernels for CUDA alone, these for a CPU."""
    kernels = {
        "dispatch": _dispatch,
        "combine": _combine,
        "dispatch_bwd": _combine_backward,
        "combine_bwd": _dispatch_backward,
    }
    for name, kernel in kernels.items():
        torch.library.register_kernel(f"hybridep::{name}", "cpu", kernel)
