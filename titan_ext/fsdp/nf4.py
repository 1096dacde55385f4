# SPDX-License-Identifier: BSD-3-Clause
"""QLoRA: FSDP holds and gathers the shards of frozen linears in torchao's NF4 (4 bits).

A parameter may bring its own form of all-gather, as NF4Tensor does, and FSDP2 takes the parameters
as they are when the model first runs. So titan_ext quantizes the weights then, one at a time, after
they were initialised or loaded in full precision. All scales of a weight share a mean, so each
weight is gathered, quantized whole and cut again.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchao.quantization import NF4Tensor, to_nf4
from torchtitan.tools.logging import logger

from titan_ext.base.tensors import Sharding
from titan_ext.fsdp.settings import QUANTIZE_FROZEN
from titan_ext.fsdp.units import before_first_forward


def quantize_at_first_forward(model: nn.Module, linears: Sequence[str]) -> None:
    """Quantize the weights of ``linears`` when ``model`` first runs forward, before FSDP does."""
    modules: dict[str, Any] = {name: model.get_submodule(name) for name in linears}

    def quantize() -> None:
        nbytes = [_quantize(linear) for linear in modules.values()]
        before, after = map(sum, zip(*nbytes, strict=True))
        logger.info(
            f"NF4: {len(linears)} frozen weights took {before} bytes on this rank, now {after} "
            "(the FSDP plan counts them before quantization)"
        )

    def refuse_trainable(*_: Any) -> None:
        for name, linear in modules.items():
            if linear.weight.requires_grad:
                raise ValueError(
                    f"{QUANTIZE_FROZEN}: {name}.weight is asked to train, and weights in NF4 have "
                    "no gradients; expected it frozen, or the key without it."
                )

    if modules:
        before_first_forward(model, quantize)
        model.register_forward_pre_hook(refuse_trainable, prepend=True)


@torch.no_grad()
def _quantize(linear: nn.Module) -> tuple[int, int]:
    """Replace a linear's shard by NF4; return the bytes of both."""
    weight = linear.weight
    assert isinstance(weight, DTensor)
    local = weight.to_local()
    axis = next(i for i, placement in enumerate(weight.placements) if placement.is_shard())
    mesh = weight.device_mesh

    def quantized(weight: DTensor) -> NF4Tensor:
        whole: Any = to_nf4(weight.full_tensor().to(torch.bfloat16))
        own = whole.chunk(mesh.size(axis))[mesh.get_local_rank(axis)]
        # A copy with its own storages: a chunk's are views of the whole. (clone() requantizes.)
        names, context = own.__tensor_flatten__()
        inner = {name: getattr(own, name).clone() for name in names}
        return NF4Tensor.__tensor_unflatten__(inner, context, own.shape, own.stride())

    shard = quantized(weight)
    dtype, nbytes = local.dtype, local.nbytes
    # Free it for good: FSDP2 and the checkpointer still hold the old tensor.
    # Without bytes its data_ptr() is 0, and FSDPParam.reset_sharded_param compares none with NF4's.
    local.untyped_storage().resize_(0)

    sharded = Sharding.of(weight).wrap  # FSDP2 takes contiguous parameters only
    linear.weight = stored = nn.Parameter(sharded(shard), requires_grad=False)
    # Titan's checkpointer writes into tensors of the same dtype and replaces all others.
    saved_dtype = torch.bfloat16 if dtype != torch.bfloat16 else torch.float32

    def save_dequantized(module: Any, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        state_dict[f"{prefix}weight"] = sharded(shard.get_original_weight().to(saved_dtype))

    @torch.no_grad()
    def load_quantized(_: Any, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        # In place: FSDP2 holds tensors of this shard, so none may replace it (assign=True). NF4's
        # ``copy_`` would quantize these rows alone, find them unlike the shard, and do it again.
        loaded = state_dict.get(f"{prefix}weight")
        if isinstance(loaded, DTensor) and loaded.shape == stored.shape:
            shard.copy_(quantized(loaded))
            state_dict[f"{prefix}weight"] = stored

    linear.register_state_dict_post_hook(save_dequantized)
    linear.register_load_state_dict_pre_hook(load_quantized)
    names, _ = shard.__tensor_flatten__()
    return nbytes, sum(getattr(shard, name).nbytes for name in names)
