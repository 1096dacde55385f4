# SPDX-License-Identifier: BSD-3-Clause
"""The same steps in one process, by a loop written by hand: no mesh, no trainer, no titan_ext.

One forward of all samples, one sum of losses over all tokens that count, one backward. It runs in
fp32 and in fp64; the distance between the two is what rounding alone does to each tensor.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import ParallelismConfig, derive
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, LocalTokenDispatcher

from titan_ext.base import no_accelerator
from titan_ext.components.dispatch import replace_configs
from titan_ext.verify.arm import (
    Arm,
    batch,
    fill_model,
    force_routing,
    gradients,
    max_norm,
    samples_of_step,
)
from titan_ext.verify.small import SmallJob

_CASTS = (torch.Tensor.bfloat16, torch.Tensor.half, torch.Tensor.to, torch.Tensor.type)
_WIDE, _NARROW = (torch.float32, torch.float64), (torch.bfloat16, torch.float16)
_EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_


@dataclass
class Step:
    """A step of the reference."""

    grads: dict[str, torch.Tensor]
    """Clipped gradients, by name of parameter."""
    loads: dict[str, torch.Tensor]
    """Tokens of each expert, by name of MoE layer."""
    loss: float
    """The mean loss of a token."""
    norm: float
    """The gradients' norm before it is clipped."""
    gap: float
    """The smallest distance between scores of which one was chosen, and the other was not."""
    choices: list[torch.Tensor]
    """What each call of ``topk`` chose, in order."""
    without: list[str]
    """Names of trained parameters that the model itself gives no gradient, or zeros."""


class OneProcess(TorchFunctionMode):
    """Operations as the reference computes them: no narrower dtype, and experts one by one.

    In fp64 ``Tensor.float`` does nothing either. It notes how near choices of experts were, and
    makes those of ``choices`` again, if that has any.
    """

    def __init__(self, choices: list[torch.Tensor]) -> None:
        super().__init__()
        self.gap = float("inf")
        self.chosen: list[torch.Tensor] = []
        self._again = iter(choices)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            # In the mode, which torch has taken away: a model that checkpoints by itself recomputes
            # now. The public ways to the engine (torch/autograd/__init__.py) all come back here.
            flags = {"allow_unreachable": True, "accumulate_grad": True}
            with self:
                return _engine_run_backward(
                    args, (torch.ones_like(args[0]),), False, False, (), **flags
                )
        if func is torch.Tensor.float and args[0].dtype is torch.float64:
            return args[0]
        if func is torch._grouped_mm:
            return _one_by_one(*args, **kwargs)
        if func in (nn.functional.softmax, torch.softmax) and args[0].dtype is torch.float64:
            kwargs = {key: value for key, value in kwargs.items() if key != "dtype"}
        result = func(*args, **kwargs)
        if func in _CASTS and args[0].dtype in _WIDE and result.dtype in _NARROW:
            return args[0]
        if func in (torch.topk, torch.Tensor.topk):
            return self._choose(args[0], result)
        return result

    def _choose(self, scores: torch.Tensor, result: Any) -> Any:
        count = result.indices.shape[-1]
        if count < scores.shape[-1]:
            nearest = scores.detach().sort(dim=-1, descending=True).values
            gaps = nearest[..., count - 1] - nearest[..., count]
            self.gap = min(self.gap, float(gaps.min()))
        indices = next(self._again, result.indices)
        self.chosen.append(indices)
        return type(result)((scores.gather(-1, indices), indices))


def _one_by_one(
    rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor, **_: Any
) -> torch.Tensor:
    """The product of each expert's rows with its weights, ``(R, D) @ (E, D, F)``."""
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    # Not by index: the gradient of each part would be added to one of all.
    *parts, rest = rows.split([*sizes, len(rows) - sum(sizes)])
    products = [part @ weight for part, weight in zip(parts, weights.unbind(), strict=True)]
    return torch.cat([*products, rest.new_zeros(len(rest), weights.shape[-1])])


@dataclass
class Reference:
    """The model in one process."""

    job: SmallJob
    seed: int
    dtype: torch.dtype
    masks: bool = True
    """Attention has documents; else it is that of an arm in the job's dtypes."""
    model: Any = field(init=False)

    def __post_init__(self) -> None:
        arm = Arm(stock=True, seed=self.seed)
        config = arm.config_of(self.job, masks=self.masks, documents=True)
        spec, backend = config.model_spec, "partial_dtensor"
        config.parallelism = ParallelismConfig(data_parallel_shard_degree=1, spmd_backend=backend)
        dist_utils.set_spmd_backend(backend)
        local = functools.partial(derive, target_cls=LocalTokenDispatcher.Config)
        replace_configs(spec, BaseEPTokenDispatcher.Config, local)
        spec.model.update_from_config(config=config)
        self.config = config
        self.model = spec.model.build()
        ours = {type(m).__module__ for m in self.model.modules()} - {no_accelerator.__name__}
        assert not [name for name in ours if name.startswith("titan_ext")], ours
        with torch.no_grad():
            self.model.init_weights()
        fill_model([self.model], self.seed, self.job.routing)
        for param in self.model.parameters():  # buffers of rotary embeddings are complex
            param.data = param.data.to(self.dtype)
        self.model.train()

    def step(self, number: int, like: Step | None = None) -> Step:
        """Loss and clipped gradients of a step with the weights that the model has.

        Tokens go to the experts of ``like``, if that is given.
        """
        model, job = self.model, self.job
        model.zero_grad()
        for _, moe in self._moes():
            moe.tokens_per_expert_E.zero_()
        with torch.no_grad():
            force_routing([model], job, number)
        with OneProcess(like.choices if like else []) as mode:
            inputs, labels_BL = batch(samples_of_step(job, number), job, self.seed)
            positions_BL = inputs["positions"]
            logits_BLV = model(inputs["input"], **self._positions(positions_BL))
            first_BLV, *ahead = logits_BLV if isinstance(logits_BLV, list) else [logits_BLV]
            losses = [_cross_entropy(first_BLV, labels_BL)]
            for depth, ahead_BLV in enumerate(ahead, 1):
                share = self.config.loss.mtp_scale / len(ahead)
                further_BL = _labels_ahead(labels_BL, positions_BL, depth)
                losses.append(share * _cross_entropy(ahead_BLV, further_BL))
            loss = torch.stack(losses).sum() / (labels_BL != IGNORE_INDEX).sum()
            loss.backward()
        grads = gradients(model)
        trained = [canonical_fqn(n) for n, p in model.named_parameters() if p.requires_grad]
        without = [name for name in trained if name not in grads or not grads[name].any()]
        norm = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads.values()])))
        factor = min(1.0, max_norm(job, number) / (norm + _EPS))
        loads = {name: moe.tokens_per_expert_E.clone() for name, moe in self._moes()}
        grads = {name: grad * factor for name, grad in grads.items()}
        return Step(grads, loads, loss.item(), norm, mode.gap, mode.chosen, without)

    def _positions(self, positions_BL: torch.Tensor) -> dict[str, Any]:
        """Positions, and documents where the model's attention has masks."""
        attention = self.model.config.first_attention
        kind = no_accelerator.CausalAttention.Config
        has_documents = self.masks or self.job.large_layout.cp > 1
        if not (has_documents and isinstance(attention and attention.inner_attention, kind)):
            return {"positions": positions_BL}
        return {"positions": positions_BL, "attention_masks": (positions_BL == 0).cumsum(-1)}

    def expected_biases(self, step: Step) -> dict[str, torch.Tensor]:
        """Experts' biases after a step: towards those with fewer tokens, by Titan's rule."""
        expected = {}
        for name, moe in self._moes():
            if moe.load_balance_coeff is not None:
                load_E = step.loads[name].double()
                delta_E = moe.load_balance_coeff * torch.sign(load_E.mean() - load_E)
                expected[f"{name}.expert_bias_E"] = moe.expert_bias_E + delta_E - delta_E.mean()
        return expected

    def optimizer(self) -> Any:
        """Titan's optimizers and schedule for this model."""
        config: Any = derive(self.config.optimizer, OptimizersContainer.Config)
        container = OptimizersContainer(config, model_parts=[self.model])
        steps = self.config.training.steps
        schedule = self.config.lr_scheduler.build(optimizers=container, training_steps=steps)
        return container, schedule

    def update(self, optimizer: Any, grads: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Step with these gradients; the parameters after it, by name."""
        container, schedule = optimizer
        for name, param in self.model.named_parameters():
            grad = grads.get(canonical_fqn(name))
            param.grad = None if grad is None else grad.clone()
        container.step()
        schedule.step()
        return self.weights()

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters, by name."""
        named = self.model.named_parameters()
        return {canonical_fqn(name): param.detach().clone() for name, param in named}

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from the job's own weights and experts' biases: ``param:`` and ``bias:`` names."""
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(tensors[f"param:{canonical_fqn(name)}"])
            for name, buffer in self.model.named_buffers():
                if name.endswith("expert_bias_E"):
                    buffer.copy_(tensors[f"bias:{canonical_fqn(name)}"])

    def _moes(self) -> Iterator[tuple[str, Any]]:
        for name, module in self.model.named_modules():
            if isinstance(module, MoE):
                yield canonical_fqn(name), module


def _labels_ahead(labels_BL: torch.Tensor, positions_BL: torch.Tensor, depth: int) -> torch.Tensor:
    """Of each token the label that many tokens further on, if that token is of its document."""
    document_BL = (positions_BL == 0).cumsum(-1)
    same_BL = document_BL[:, depth:] == document_BL[:, :-depth]
    ahead_BL = torch.full_like(labels_BL, IGNORE_INDEX)
    ahead_BL[:, :-depth] = labels_BL[:, depth:].masked_fill(~same_BL, IGNORE_INDEX)
    return ahead_BL


def _cross_entropy(logits_BLV: torch.Tensor, labels_BL: torch.Tensor) -> torch.Tensor:
    """The sum over tokens that count, by hand."""
    counted_BL = labels_BL != IGNORE_INDEX
    targets_BL1 = labels_BL.masked_fill(~counted_BL, 0)[..., None]
    losses_BL = logits_BLV.logsumexp(-1) - logits_BLV.gather(-1, targets_BL1)[..., 0]
    return (losses_BL * counted_BL).sum()
