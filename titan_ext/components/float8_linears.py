# SPDX-License-Identifier: BSD-3-Clause
"""Float8 linears whose weights FSDP2 gathers in float8, as TorchTitan had them before 0.3.

torchao's tensorwise float8 linears compute with weights of one scale each. FSDP2 can gather these
in float8 already, in half of bf16's bytes. Titan 0.3 offers rowwise recipes only, which cannot: a
scale would belong to a row of the whole weight. A file asks for them as a converter::

    [[model.converters]]
    component = "titan_ext.components.float8_linears.TensorwiseFloat8LinearConverter"
    filter_fqns = ["lm_head", "router.gate"]

A scale needs the largest value of the whole weight, of which a rank holds a part. So a forward that
follows an optimizer's step begins with one all-reduce for the scales of all weights together. What
is gathered ahead of that forward makes its own, as schedules of pipelines with several stages on a
rank do. Source: torchao/float8/fsdp_utils.py, whose own functions fail on a rank without rows.
"""

import dataclasses
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as nnf
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_map_only
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_utils import amax_to_scale
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
from torchtitan.components.quantization import float8 as titan_float8
from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.config import derive
from torchtitan.protocols.module import Module

from titan_ext.base.tensors import Sharding, local_tensor, out_of_sight_of_checkpointing
from titan_ext.components.dispatch import replace_configs

_Float8Linear: Any = titan_float8.Float8Linear  # None where there is no torchao


class GatheredWeight(WeightWithDynamicFloat8CastTensor):
    """torchao's weight, cast for FSDP2 out of sight of a checkpoint: a recompute casts none.

    It travels as bytes: gloo has no float8, and FSDP2 sends a unit of one dtype in that
    (``_get_all_gather_input_metadatas`` in _fsdp_collectives.py). Shards of fewer rows, or none,
    are padded to the first one's: all ranks send equally many bytes. FSDP2 pads plain shards
    alone, and cuts what it has gathered (``init_unsharded_param`` in _fsdp_param.py).
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        # torchao's returns its own class, whatever the class of its arguments.
        return tree_map_only(
            WeightWithDynamicFloat8CastTensor,
            lambda x: cls(x._tensor, x._linear_mm_config, x._dtype),
            super().__torch_dispatch__(func, types, args, kwargs),
        )

    # With fewer arguments, as torchao's, FSDP2 does not check the sizes.
    def fsdp_pre_all_gather(  # pyrefly: ignore
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: Any, policy: Any
    ) -> Any:
        with out_of_sight_of_checkpointing():
            scale = getattr(module, "weight_scale", None)
            if scale is None:
                (scale,) = _scales([self], mesh, [Shard(0)])
            self._precomputed_scale = scale
            (data,), metadata = super().fsdp_pre_all_gather(mesh)
            data = data.view(torch.uint8)
            missing = -(-outer_size[0] // mesh.size()) - len(data)
            if missing > 0:  # not where the weight is replicated over ``mesh``
                data = nnf.pad(data, (0, 0, 0, missing))
            return (data,), metadata

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[torch.Tensor, ...], *given: Any, **named: Any
    ) -> Any:
        (data,) = all_gather_outputs
        return super().fsdp_post_all_gather((data.view(self._dtype),), *given, **named)


class GatheredFloat8Linear(_Float8Linear):
    """Titan's float8 linear, with a weight that FSDP2 gathers in float8."""

    weight_scale: torch.Tensor | None = None
    """The weight's scale, if ``Float8Scales`` has made it. Who writes to weights between steps sets
    it to None, on all ranks. Not the weight has it: on ranks that it pads, FSDP2 makes another one
    in its first forward (``reset_sharded_param`` in _fsdp_param.py), and all ranks have to know the
    same."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(_Float8Linear.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # As torchao's Float8Linear.from_float, which Titan does not call.
        dtype = self.config.cast_config_weight.target_dtype
        weight = GatheredWeight(self.weight, self.linear_mm_config, dtype)
        self.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)
        self.register_state_dict_post_hook(_as_plain)
        self.register_load_state_dict_post_hook(_forget_scale)


def _forget_scale(module: nn.Module, _: Any) -> None:
    module.weight_scale = None  # type: ignore[assignment]


def _as_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Checkpoints hold the weight as any other: torch cannot save a wrapper around it."""
    weight = state_dict[f"{prefix}weight"]
    inner = local_tensor(weight)
    if isinstance(inner, WeightWithDynamicFloat8CastTensor):
        is_sharded = isinstance(weight, DTensor)
        plain = inner._tensor.detach()
        state_dict[f"{prefix}weight"] = Sharding.of(weight).wrap(plain) if is_sharded else plain


class TensorwiseFloat8LinearConverter(Float8LinearConverter):
    """Replaces linears by torchao's tensorwise float8 ones."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Float8LinearConverter.Config):
        # Another recipe than the parent's.
        recipe_name: Literal["tensorwise"] = "tensorwise"  # pyrefly: ignore
        """Float8 recipe name."""

        enable_fsdp_float8_all_gather: bool = True
        """True if FSDP gathers the weights in float8 instead of mixed_precision_param."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)  # refuses hardware without float8, by name
        self._gathers = config.enable_fsdp_float8_all_gather
        self.torchao_config = Float8LinearConfig(
            emulate=config.emulate, enable_fsdp_float8_all_gather=self._gathers
        )

    def convert(self, model_config: Any) -> Any:
        model_config = super().convert(model_config)
        if self._gathers:
            gathered = functools.partial(derive, target_cls=GatheredFloat8Linear.Config)
            replace_configs(model_config, _Float8Linear.Config, gathered)
        return model_config


class Float8Scales:
    """A forward pre-hook of a model: makes the scales of its gathered float8 weights, all together.

    A step of any of torch's optimizers makes them unknown, and so does a state dict that is loaded.
    Until the first step, and inside of one (a closure's, of LBFGS for example), every forward makes
    them anew: weights may change in a way that shows nowhere. Version counters do not tell: foreach
    steps change none, and a write by one rank alone would leave that rank alone in the all-reduce.
    """

    def __init__(self, linears: Sequence[GatheredFloat8Linear]) -> None:
        self._linears = linears
        self._weights: list[Any] = [linear.weight for linear in linears]  # sharded
        self._knows_steps = False
        # A model may end before the process does, and its hooks with it.
        forget = weakref.WeakMethod(self._forget)

        def step(knows_steps: bool, *_: Any) -> None:
            if (method := forget()) is not None:
                method(knows_steps)

        for register, ended in (
            (register_optimizer_step_pre_hook, False),
            (register_optimizer_step_post_hook, True),
        ):
            weakref.finalize(self, register(functools.partial(step, ended)).remove)

    def __call__(self, *_: Any) -> None:
        if not self._knows_steps or any(linear.weight_scale is None for linear in self._linears):
            self.make()

    def _forget(self, knows_steps: bool) -> None:
        self._knows_steps = knows_steps
        for linear in self._linears:
            linear.weight_scale = None

    @torch.no_grad()
    def make(self) -> None:
        """One all-reduce for each mesh that weights lie on: one, where all lie on the same."""
        by_layout: dict[Any, list[Any]] = {}
        for linear, weight in zip(self._linears, self._weights, strict=True):
            layout = weight.device_mesh, weight.placements
            by_layout.setdefault(layout, []).append((linear, local_tensor(weight)))
        for (mesh, placements), pairs in by_layout.items():
            scales = _scales([shard for _, shard in pairs], mesh, placements)
            for (linear, _), scale in zip(pairs, scales, strict=True):
                linear.weight_scale = scale


@torch.no_grad()
def _scales(shards: list[Any], mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """Scales ``(N,)`` of the whole weights of which these are a rank's ``N`` shards."""
    values = [shard._tensor for shard in shards]
    largest_N = torch.stack([x.abs().amax() if len(x) else x.new_zeros(()) for x in values])
    of_ranks = [Partial("max") if p.is_shard() else Replicate() for p in placements]
    whole = DTensor.from_local(largest_N, mesh, of_ranks)
    amax_N = whole.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
    return torch.stack([amax_to_scale(a, x._dtype) for a, x in zip(amax_N, shards, strict=True)])


def gathers_float8(model: Module.Config) -> bool:
    """True if a model config has linears whose weights FSDP2 gathers in float8."""
    return any(model.traverse(GatheredFloat8Linear.Config))


def wrong_float8(model: Module.Config, tp: int, ep: int, backend: str) -> Iterator[str]:
    """A message for a layout in which TorchTitan 0.3 would drop a model config's float8.

    It shards weights as plain tensors: linears by tensor parallelism, and experts by either kind,
    where ``spmd_types.shard`` does it. Experts compute in float8 because of the class of their
    weights, so that they would train in bf16, and nobody would be told.
    """
    if tp > 1 and gathers_float8(model):
        yield (
            "enable_fsdp_float8_all_gather of the converter TensorwiseFloat8LinearConverter needs "
            f"parallelism.tensor_parallel_degree = 1, not {tp}: TorchTitan's sharding by tensor "
            "parallelism takes torchao's weights for plain ones. Expected false."
        )
    # Titan makes a class of float8 experts for each class of experts, and keeps them here alone.
    experts: Any = titan_float8._float8_experts_cache.values()
    axis, degree = ("expert", ep) if ep > 1 else ("tensor", tp)
    is_lost = degree > 1 and backend == "spmd_types"
    if is_lost and any(any(model.traverse(cls.Config)) for cls in experts):
        yield (
            f"parallelism.{axis}_parallel_degree is {degree} and spmd_backend 'spmd_types': "
            "TorchTitan 0.3 then takes the float8 weights of Float8GroupedExpertsConverter for "
            "plain ones, and the experts would train without float8. Expected spmd_backend = "
            "'partial_dtensor', or no Float8GroupedExpertsConverter."
        )


def make_scales_together(model: nn.Module) -> None:
    """Register ``Float8Scales``, if ``model``, which FSDP2 has sharded, has such weights."""
    found = [m for m in model.modules() if isinstance(m, GatheredFloat8Linear)]
    if sharded := [linear for linear in found if isinstance(linear.weight, DTensor)]:
        model.register_forward_pre_hook(Float8Scales(sharded), prepend=True)
