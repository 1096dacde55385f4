# SPDX-License-Identifier: BSD-3-Clause
"""Modules, configs and an environment that a dry run has instead of the real ones.

Fake tensors have no values, so a dispatcher is told how many tokens go where. And a CPU runs some
modules otherwise than a GPU: its attention has S x S buffers, its RMSNorm keeps fp32 copies, its
autocast leaves the router's gate in bf16. What stands in for them makes and keeps tensors of the
shapes that the GPU's kernels make and keep, so that ``plan.live`` can count them.
"""

import contextlib
import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, make_dataclass
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig
from torchtitan.config.override import derive
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
    HybridEPTokenDispatcher,
    MinimalAsyncEPTokenDispatcher,
    TorchAOTokenDispatcher,
)

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.compile import compiles_model
from titan_ext.base.nodes import NVLINK_DOMAIN, RANKS_PER_NODE
from titan_ext.components.dispatch import (
    CountedHybridEPTokenDispatcher,
    FunctionalAllToAllTokenDispatcher,
    most_rows_of_token,
    replace_configs,
)
from titan_ext.components.exchange_policy import ranks_of_token


def use_stand_ins(
    config: Any, *, as_on_a_gpu: bool = True, imbalance: float = 1.0
) -> Sequence[str]:
    """Put stand-ins into the model of a trainer's config, in place.

    Without ``as_on_a_gpu`` only those without which no step runs. ``imbalance`` are the tokens that
    this rank's experts get, for one if routing were balanced.

    Returns the names of the dispatchers that are planned as Titan's all-to-all. Only their own
    kernels know what they send: a token once a rank or a node, or padded.
    """
    spec, parallelism = config.model_spec, config.parallelism
    context_parallel = parallelism.context_parallel_degree > 1
    found = [at[1] for at in spec.traverse(BaseEPTokenDispatcher.Config)]
    names = {type(one).__qualname__: None for one in found if _kind(one) is None}
    # Titan chooses its exchange by torch.compiler.is_compiling(), which is false where compiled
    # blocks run eagerly (torchtitan/models/common/token_dispatcher.py).
    planned = functools.partial(
        _plan_dispatcher, imbalance=imbalance, is_compiled=compiles_model(config.compile)
    )
    replace_configs(spec, BaseEPTokenDispatcher.Config, planned)
    for _, moe, _, _ in spec.traverse(MoE.Config):
        moe.routed_experts.token_dispatcher.router = moe.router
    if as_on_a_gpu:
        replace_configs(spec, RMSNorm.Config, _rms_norm)
        replace_configs(spec, TokenChoiceTopKRouter.Config, _router)
    if not context_parallel and as_on_a_gpu:
        is_eager = not compiles_model(config.compile)
        selective = is_eager and isinstance(config.activation_checkpoint, SelectiveAC.Config)
        # The first kind first: the stand-ins are of its subclass.
        for kind in (ScaledDotProductAttention, FlexAttention, VarlenAttention):
            for _, _, parent, key in list(spec.traverse(kind.Config)):
                window = getattr(parent, "sliding_window_size", None) or 0
                keeps = selective and kind is FlexAttention
                setattr(parent, str(key), AttentionShapes.Config(window=window, keeps=keeps))
    elif context_parallel and parallelism.spmd_backend == "spmd_types":
        # With its masks, which are split too.
        flex = functools.partial(derive, target_cls=FlexAttentionShapes.Config)
        replace_configs(spec, FlexAttention.Config, flex)
    return [name.removesuffix(".Config") for name in names]


@contextlib.contextmanager
def as_rank(
    ranks: int, rank: int, ranks_per_node: int = RANKS_PER_NODE, nvlink_domain: int = 0
) -> Iterator[None]:
    """The environment of torchrun on the job's nodes: what checks, layout and clock read.

    ``nvlink_domain`` 0 is a node. Nothing of the nodes of this machine's own launcher is left.
    """
    names = {"WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": 0}
    names |= {"LOCAL_WORLD_SIZE": ranks_per_node, NVLINK_DOMAIN: nvlink_domain}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}):
        yield


def as_stock(config: Any) -> None:
    """Make the job one of stock TorchTitan's, in place: without titan_ext, and its keys.

    Policy "fp8" becomes the one of Titan's that is nearest: selective, full or none, by its mode.
    """
    spec = config.model_spec
    config.model_spec = dataclasses.replace(spec, parallelize_fn=spec.stock_parallelize_fn)
    stock: Any = ParallelismConfig
    config.parallelism = derive(config.parallelism, stock)
    config.checkpoint = _titans(config.checkpoint, CheckpointManager.Config)
    policy = config.activation_checkpoint
    if isinstance(policy, FP8AC.Config):
        policies = {"selective": SelectiveAC.Config(), "full": FullAC.Config()}
        config.activation_checkpoint = policies.get(policy.mode)
    for kind in (RoutedExperts, GroupedExperts, AllToAllTokenDispatcher, HybridEPTokenDispatcher):
        replace_configs(spec, kind.Config, lambda ours, kind=kind: _titans(ours, kind.Config))


_IN_FEWER_BITS = "torchtitan.components.quantization.", "titan_ext.components.float8_linears"
"""Modules whose configs are of linears and experts that compute in float8, MX or NVFP4."""


def in_full_precision(spec: Any, *, emulates: bool) -> set[str]:
    """Put plain linears and experts in place of those of Titan's converters, in a model spec.

    Experts take their padded exchange with them, whose kernels are a GPU's. With ``emulates``
    torchao's float8 linears stay, rounding as they do, with plain GEMMs between the roundings.
    Returns the qualified names of the classes that became plain.
    """
    replaced = set()

    def plain(config: Any) -> Any:
        kind = type(config)
        if not kind.__module__.startswith(_IN_FEWER_BITS):
            return config
        if emulates and (torchao := getattr(config, "_torchao_config", None)) is not None:
            config = copy.copy(config)
            config._torchao_config = dataclasses.replace(torchao, emulate=True)
            return config
        replaced.add(kind._owner.__name__)
        wider = (k for k in kind.__mro__ if not k.__module__.startswith(_IN_FEWER_BITS))
        return derive(config, cast(Any, next(wider)))

    for kind in (Linear, GroupedExperts):
        replace_configs(spec, kind.Config, plain)
    padded = TorchAOTokenDispatcher.Config
    replace_configs(spec, padded, lambda at: derive(at, AllToAllTokenDispatcher.Config))
    return replaced


def _titans(config: Any, kind: type) -> Any:
    """A config of ours as the one of Titan's that it extends; others as they are."""
    return derive(config, kind) if type(config).__module__.startswith("titan_ext.") else config


def _plan_dispatcher(config: Any, *, imbalance: float, is_compiled: bool) -> Any:
    if (kind := _kind(config)) is None:
        config = AllToAllTokenDispatcher.Config(num_experts=config.num_experts, top_k=config.top_k)
        kind = PlannedStockTokenDispatcher.Config
    if is_compiled and kind is PlannedStockTokenDispatcher.Config:
        kind = PlannedTokenDispatcher.Config
    device = {"device": torch.device("cpu")} if hasattr(config, "device") else {}
    return derive(config, kind, imbalance=imbalance, **device)


def _kind(config: Any) -> Any:
    """The stand-in of a dispatcher; None for one of which only its own kernels know the shapes."""
    waits = getattr(config, "non_blocking_capacity_factor", 1.0) is None
    return None if waits else _PLANNED.get(type(config))


def _rms_norm(config: Any) -> Any:
    return derive(config, RMSNormShapes.Config) if type(config) is RMSNorm.Config else config


def _router(config: Any) -> Any:
    if type(config.gate) is Linear.Config:
        config.gate = derive(config.gate, GateInFloat32.Config)
    return config


def _config(base: type, *fields: tuple[str, Any, Any]) -> Any:
    """The config of a stand-in: ``base``, and ``fields``."""
    at = {"__module__": __name__}
    return make_dataclass("Config", fields, bases=(base,), kw_only=True, slots=True, namespace=at)


_IMBALANCE = "imbalance", float, 1.0
_ROUTER = "router", TokenChoiceTopKRouter.Config | None, None
"""What a config also says to a dispatcher: where tokens go, which fake tensors do not."""


class _Planned:
    """Mixin of a dispatcher that is told how many tokens go where: fake tensors cannot be asked.

    This rank sends as many to each rank, and gets as many from each: what it sends to one, times
    ``imbalance``. Where a token goes to a rank once, it goes to as many as ``router`` has it.
    """

    _tokens = 0
    _turn: Any = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self._imbalance, self._router = config.imbalance, config.router

    def dispatch(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E):
        self._tokens = topk_expert_ids_TK.numel()
        return super().dispatch(  # type: ignore[misc]
            x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
        )

    def _sync_token_count_exchange(
        self,
        num_local_tokens_per_expert_E: torch.Tensor,
        num_global_tokens_per_local_expert_EP_e: torch.Tensor,
        ep_size: int,
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        for counts in (num_local_tokens_per_expert_E, num_global_tokens_per_local_expert_EP_e):
            counts.view(ep_size, -1).sum(dim=1)  # as Titan's: policies count operations
        sent = _split(self._tokens, ep_size)
        received = _split(round(self._tokens * self._imbalance), ep_size)
        if self._turn is not None and (rows := self._turn.rows) is not None:
            rows.counts_to_read(num_global_tokens_per_local_expert_EP_e)
            tokens, nodes = self._tokens / self._router.top_k, ep_size // rows.ranks
            of_node = 1 + (self._imbalance - 1) / rows.ranks  # other ranks there have their share
            to_nodes, to_ranks = (
                tokens * ranks_of_token(self._router, n) for n in (nodes, ep_size)
            )
            counts = [
                *_split(round(to_nodes), nodes),
                *_split(round(to_nodes * of_node), nodes),
                *_split(round(to_ranks * of_node), rows.ranks),
                *_split(round(to_ranks * self._imbalance), rows.ranks),
                sum(received),
            ]
            return num_global_tokens_per_local_expert_EP_e, [], [rows.read(counts)]
        return num_global_tokens_per_local_expert_EP_e.reshape(-1), sent, received


class PlannedTokenDispatcher(_Planned, FunctionalAllToAllTokenDispatcher):
    Config = _config(FunctionalAllToAllTokenDispatcher.Config, _IMBALANCE, _ROUTER)


class PlannedStockTokenDispatcher(_Planned, AllToAllTokenDispatcher):
    Config = _config(AllToAllTokenDispatcher.Config, _IMBALANCE, _ROUTER)


class Buffered:
    """Mixin of a dispatcher whose receive buffer has room for the worst routing.

    Its operations have shapes of their own (``register_fake``); only symmetric memory is not made.
    """

    symmetric = 0
    """How many buffers of its rows lie in symmetric memory, for all layers together."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self._imbalance = config.imbalance

    def init_buffer(self) -> None:
        """Nothing, where there is no such memory."""

    def buffer(self) -> "Buffer":
        of: Any = self
        ranks = dist.get_process_group_ranks(of.ep_mesh.get_group())
        most = most_rows_of_token(of)
        share = self._imbalance * of.top_k / most
        share /= getattr(of, "non_blocking_capacity_factor", 1.0)
        nbytes = self.symmetric * of.num_max_tokens_per_rank * most * of.hidden_dim * 2
        return Buffer(min(share, 1.0), ranks, nbytes)


class Buffer(NamedTuple):
    """The receive buffer of a ``Buffered`` dispatcher."""

    share: float = 1.0
    """Of its rows that tokens take."""
    ranks: Sequence[int] = ()
    """Those that write into it."""
    symmetric: int = 0
    """Bytes in symmetric memory, which torch's allocator does not have."""

    @classmethod
    def of(cls, parts: Sequence[nn.Module]) -> "Buffer":
        """Of the first dispatcher that has one: all layers share it."""
        modules = (module for part in parts for module in part.modules())
        dispatchers = (getattr(module, "token_dispatcher", None) for module in modules)
        return next((x.buffer() for x in dispatchers if isinstance(x, Buffered)), cls())


class PlannedMinimalAsync(Buffered, MinimalAsyncEPTokenDispatcher):
    symmetric = 2  # _HIDDEN_RECV_BUFFER_COUNT (torchtitan/distributed/minimal_async_ep/api.py)

    Config = _config(MinimalAsyncEPTokenDispatcher.Config, _IMBALANCE, _ROUTER)


class PlannedHybrid(Buffered, HybridEPTokenDispatcher):
    """That does not wait; what deep_ep's own buffer takes, only deep_ep knows."""

    Config = _config(HybridEPTokenDispatcher.Config, _IMBALANCE, _ROUTER)


_PLANNED: dict[type, Any] = {
    MinimalAsyncEPTokenDispatcher.Config: PlannedMinimalAsync.Config,
    CountedHybridEPTokenDispatcher.Config: PlannedHybrid.Config,
    HybridEPTokenDispatcher.Config: PlannedHybrid.Config,
    FunctionalAllToAllTokenDispatcher.Config: PlannedTokenDispatcher.Config,
    AllToAllTokenDispatcher.Config: PlannedStockTokenDispatcher.Config,
}


def _split(tokens: int, ranks: int) -> list[int]:
    splits = [tokens // ranks] * ranks
    splits[0] += tokens - sum(splits)
    return splits


_TILE = 128
"""Positions of a block of FlexAttention's mask."""


class _OneKernel:
    """Attention as one operation that keeps q, k, v, its output and a log-sum-exp.

    torch has it for backends out of tree: a shape function and a backward, and no kernel. A mask
    changes no shape: its operation gets the share of scores that the mask leaves out as
    ``dropout_p``, where ``op_cost`` finds it. Shape suffixes: B = batch, L = sequence, N = heads,
    H = head dimension.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.window, self.keeps = getattr(config, "window", 0), getattr(config, "keeps", False)

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: BlockMask | None = None,
        scale: float | None = None,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        **_: Any,
    ) -> torch.Tensor:
        q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        # The fifth argument is dropout_p, the sixth is_causal.
        fused: Any = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
        masked = self._share_masked(q_BNLH.shape[-2])
        out_BNLH, lse_BNL = fused(q_BNLH, k_BNLH, v_BNLH, None, masked, True, scale=scale)[:2]
        # What a selective policy keeps of such an operation is its output: here one like q, one
        # like k, of scores that are all left out, which cost nothing.
        for x_BNLH in (q_BNLH, k_BNLH) if self.keeps and torch.is_grad_enabled() else ():
            fused(*[x_BNLH.detach()] * 3, None, 1.0, True)
        out_BLNH = out_BNLH.transpose(1, 2)
        if out_transform is None:
            return out_BLNH
        return out_transform(out_BLNH, lse_BNL.transpose(1, 2))

    def _share_masked(self, length: int) -> float:
        """Share of the scores of a causal mask that a window leaves out; kernels do whole tiles."""
        if not 0 < self.window < length:
            return 0.0
        return 1 - min(2 * min(self.window + _TILE, length) / length, 1.0)


class AttentionShapes(_OneKernel, ScaledDotProductAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        window: int = 0
        """Positions that a query sees, itself included; 0 for all before it."""
        keeps: bool = False
        """Whether q and k are kept as well: Titan's selective checkpointing saves what an eager
        FlexAttention's region returns, and it returns them for its backward. v is a projection's
        output, which is kept already."""


class FlexAttentionShapes(_OneKernel, FlexAttention):
    Config = _config(FlexAttention.Config)


class RMSNormShapes(RMSNorm):
    """RMSNorm as one operation, which keeps its input and one fp32 number a row."""

    Config = _config(RMSNorm.Config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return _RMSNorm.apply(x, self.weight)
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        local = _RMSNorm.apply(x.to_local(), weight)
        return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)


class _RMSNorm(torch.autograd.Function):
    is_stand_in = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32), weight)
        return x.contiguous() * 1  # one kernel that reads all values, as the norm does

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, _, weight = ctx.saved_tensors
        return x + grads[0], None if weight is None else torch.empty_like(weight)


class GateInFloat32(Linear):
    """The router's gate under autocast to fp32, which copies input and weight first."""

    Config = _config(Linear.Config)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(input.float(), self.weight.float(), bias)


class NoDataLoader:
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        def build(self, **_: Any) -> None:
            return None


class NoTokenizer:
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        def build(self, **_: Any) -> None:
            return None


class RankOrder(DefaultReduceScatter):
    """Sums rank 0's values first, then rank 1's, and so on.

    gloo, as NCCL, adds in an order that depends on where in the bucket a value lies, which differs
    between units and shows in the last bit from three ranks on.
    """

    def __call__(  # pyrefly: ignore[bad-override]
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert not async_op
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        first, *others = received.chunk(dist.get_world_size(group))
        output_tensor.copy_(first.view_as(output_tensor))
        for values in others:
            output_tensor.add_(values.view_as(output_tensor))
