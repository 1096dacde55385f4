# SPDX-License-Identifier: BSD-3-Clause
"""Routing scores applied before the last expert GEMM instead of after it, on request.

Titan multiplies the routed experts' outputs by their scores. The gradient of a score then needs
that output, the largest tensor of a block that is expensive to recompute. The last GEMM is linear
in each token, so multiplying its input by the score gives the same result but for rounding. The
output can then be discarded, and so can what an all-to-all brings back of it. With expert
parallelism one more all-to-all takes the scores to the experts, an fp32 number for a token, and
their gradients back. The last bits change, so this is off by default.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as nnf
from torch.distributed.tensor import DTensor
from torchtitan.config import derive
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from titan_ext.base.hooks import user_hook
from titan_ext.base.messages import Mistakes
from titan_ext.components.dispatch import FunctionalAllToAllTokenDispatcher, replace_configs

_KEY = "activation_checkpoint.score_before_last_gemm"

# Shape suffixes, as in torchtitan/models/common/moe.py: R = routed tokens that this rank's experts
# receive, F = hidden dimension of an expert, D = model dimension, E = experts of this rank.


class EarlyScoreExperts(GroupedExperts):
    """Titan's experts, with tokens scaled by their scores before the last GEMM."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    send_scores: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Do what Titan's does: tokens by expert ``(R, D)``, counts ``(E,)`` -> ``(R, D)``."""
        if hook := user_hook(self, before=False):
            raise ValueError(
                f"{_KEY}: {hook} would see outputs that are multiplied by scores already. Expected "
                "no such hook, or one on the routed experts around them."
            )
        # Here, not beside the exchanges of tokens, which op_policies count by module.
        scores_R, order_R = self.send_scores()
        offsets_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)

        def gemm(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            return self._grouped_mm(
                A=tokens, B_t=local.bfloat16().transpose(-2, -1), offs=offsets_E
            )

        # In bf16, whatever the parameters are, as GroupedExperts (torchtitan/models/common/moe.py).
        tokens_RD = x_RD.bfloat16()
        h_RF = nnf.silu(gemm(tokens_RD, self.w1_EFD)) * gemm(tokens_RD, self.w3_EFD)
        if order_R is not None:
            scores_R = scores_R[order_R]  # waits until they have come
        return gemm(scaled(h_RF, scores_R), self.w2_EDF).type_as(x_RD)


def scaled(h_RF: torch.Tensor, scores_R: torch.Tensor) -> torch.Tensor:
    """Rows times their scores; in fp32 by type promotion, so autograd keeps no such copy."""
    return (h_RF * scores_R.float().unsqueeze(-1)).to(h_RF.dtype)


class EarlyScoreRoutedExperts(RoutedExperts):
    """Titan's routed experts, whose experts ask the dispatcher for the scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    token_dispatcher: FunctionalAllToAllTokenDispatcher
    inner_experts: EarlyScoreExperts

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.inner_experts.send_scores = self.token_dispatcher.send_scores


def wrong_early_scores(spec: ModelSpec) -> Iterator[str]:
    """A message for a model without Titan's routed experts, or with experts or a dispatcher
    of its own; ``spec`` stays as it is."""
    found = [cast(RoutedExperts.Config, c) for _, c, _, _ in spec.traverse(RoutedExperts.Config)]
    stock = [config for config in found if type(config) is not EarlyScoreRoutedExperts.Config]
    dispatchers = (
        LocalTokenDispatcher.Config,
        AllToAllTokenDispatcher.Config,
        FunctionalAllToAllTokenDispatcher.Config,
    )
    if not found or any(
        type(config) is not RoutedExperts.Config
        or type(config.inner_experts) is not GroupedExperts.Config
        or type(config.token_dispatcher) not in dispatchers
        for config in stock
    ):
        yield (
            f"{_KEY}: {spec.name} has no routed experts, or experts or a dispatcher of another "
            "kind than Titan's grouped experts and its all-to-all."
        )


def use_early_scores(spec: ModelSpec) -> None:
    """Swap the routed experts in the model config of ``spec``, in place. Twice is harmless.

    Raises ValueError for what ``wrong_early_scores`` refuses.
    """
    Mistakes(wrong_early_scores(spec)).raise_all()

    def ours(config: RoutedExperts.Config) -> RoutedExperts.Config:
        if isinstance(config, EarlyScoreRoutedExperts.Config):
            return config
        dispatcher = derive(
            config.token_dispatcher, FunctionalAllToAllTokenDispatcher.Config, sends_scores=True
        )
        experts = derive(config.inner_experts, EarlyScoreExperts.Config)
        return derive(
            config,
            EarlyScoreRoutedExperts.Config,
            inner_experts=experts,
            token_dispatcher=dispatcher,
        )

    replace_configs(spec, RoutedExperts.Config, ours)


def with_early_scores(config: Any) -> Any:
    """A trainer's config whose model has the routed experts that its policy asks for.

    ``config`` stays as it is, since others may share its model: the model is copied. The same
    config returns where the policy does not ask, or the model has them.
    """
    spec, policy = config.model_spec, config.activation_checkpoint
    experts = [type(c) for _, c, _, _ in spec.traverse(RoutedExperts.Config)] if spec else []
    asks = getattr(policy, "score_before_last_gemm", False)
    if not asks or all(kind is EarlyScoreRoutedExperts.Config for kind in experts):
        return config
    changed = copy.copy(config)
    changed.model_spec = dataclasses.replace(spec, model=copy.deepcopy(spec.model))
    use_early_scores(changed.model_spec)
    return changed


def has_early_scores(model: nn.Module) -> bool:
    """True if a block or a model was built so. A pipeline stage may have no MoE layer of it."""
    config: Any = getattr(model, "config", None)
    if isinstance(config, Module.Config):
        return any(True for _ in config.traverse(EarlyScoreRoutedExperts.Config))
    return any(isinstance(module, EarlyScoreRoutedExperts) for module in model.modules())
