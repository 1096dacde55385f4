"""QLoRA: the shards of frozen linears are kept, and gathered, in torchao's NF4 (4 bits).

FSDP2 lets a parameter bring its own form of all-gather, which NF4Tensor has; and it takes the
parameters as they are when the model first runs. So the base is quantised then, one weight at a
time: whatever has initialised or loaded it has done so in full precision. A weight is gathered,
quantised whole and cut again, since all its scales share a mean.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchao.quantization import NF4Tensor, to_nf4
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.tools.logging import logger

from titan_ext.fsdp.names import matching_modules

__all__ = ["KEY", "find_frozen_linears", "quantize_at_first_forward"]

KEY = "parallelism.fsdp_frozen_nf4"
_ALL = "linears"
_BLOCK = 64 * 256  # elements whose scales have one scale of their own


def find_frozen_linears(
    model: nn.Module,
    names: Sequence[str],
    *,
    shard_world: int,
    is_chunk: bool,
    cpu_offload: bool = False,
    others: Collection[str] = (),
) -> dict[str, nn.Linear]:
    """The linears whose frozen weights ``parallelism.fsdp_frozen_nf4`` keeps in NF4, by name.

    Args:
        model: A decoder, before FSDP, its parameters frozen or not.
        names: Patterns for names of modules; "linears" for every frozen one in the blocks, but
            routers, that can be cut.
        shard_world: Ranks that dense parameters are sharded over.
        is_chunk: Whether the model is the chunk of a pipeline stage, which may lack a name.
        cpu_offload: Whether shards are kept in host memory.
        others: Modules that are kept replicated.

    Raises:
        ValueError: for a name that no frozen linear has, or a weight that cannot be cut.
    """
    if not names:
        return {}
    if shard_world == 1:
        raise ValueError(
            f"{KEY} needs an axis to shard over: over one rank torch copies a parameter and skips "
            "the all-gather that NF4 brings. Expected parallelism.data_parallel_shard_degree > 1."
        )
    if cpu_offload:
        raise ValueError(f"{KEY} needs training.enable_cpu_offload = false.")
    linears = {
        canonical_fqn(path): module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    patterns = [name for name in names if name != _ALL]
    frozen = {path: m for path, m in linears.items() if not m.weight.requires_grad}
    chosen = matching_modules(KEY, frozen, patterns, kind="frozen linear", is_chunk=is_chunk)
    for path, linear in chosen.items():
        if path in others:
            raise ValueError(f"{KEY}: {path} is in parallelism.fsdp_keep_replicated as well.")
        if not _can_be_cut(linear, shard_world):
            raise ValueError(
                f"{KEY}: {path}.weight has {linear.weight.numel()} elements; {shard_world} ranks "
                f"need a multiple of {_BLOCK * shard_world} (NF4's blocks) and equal rows."
            )
    if _ALL in names:
        chosen |= {
            path: linear
            for path, linear in frozen.items()
            if path.startswith(("layers.", "mtp_layers."))
            and ".router." not in path
            and path not in others
            and _can_be_cut(linear, shard_world)
        }
    return chosen


def quantize_at_first_forward(model: nn.Module, linears: Mapping[str, nn.Linear]) -> None:
    """Have the weights of ``linears`` quantised when ``model`` first runs forward, before FSDP."""
    if not linears:
        return

    @torch._dynamo.disable  # as FSDP's own hooks are
    def quantize_once(module: nn.Module, args: object) -> None:
        handle.remove()
        before = after = 0
        for linear in linears.values():
            shard_nbytes, quantized_nbytes = _quantize(linear)
            before += shard_nbytes
            after += quantized_nbytes
        logger.info(
            f"NF4: {len(linears)} frozen weights, {before} bytes on this rank are {after} now "
            "(the FSDP plan counts them as they were)"
        )

    handle = model.register_forward_pre_hook(quantize_once, prepend=True)


def _can_be_cut(linear: nn.Linear, shard_world: int) -> bool:
    rows, columns = linear.weight.shape
    return rows % shard_world == 0 and rows * columns % (_BLOCK * shard_world) == 0


@torch.no_grad()
def _quantize(linear: nn.Linear) -> tuple[int, int]:
    """Put NF4 in the place of a linear's shard; the bytes of either."""
    weight = linear.weight
    assert isinstance(weight, DTensor)
    local = weight.to_local()
    axis = next(i for i, placement in enumerate(weight.placements) if placement.is_shard())
    mesh = weight.device_mesh
    whole: Any = to_nf4(weight.full_tensor().to(torch.bfloat16))
    shard = _copy(whole.chunk(mesh.size(axis))[mesh.get_local_rank(axis)])
    dtype, nbytes = local.dtype, local.nbytes
    # Frees it for good: FSDP2 and the checkpointer hold the old tensor still.
    local.untyped_storage().resize_(0)
    quantized = DTensor.from_local(
        shard,
        mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
    linear.weight = nn.Parameter(quantized, requires_grad=False)
    # Titan's checkpointer replaces, and does not write into, what has got another dtype.
    saved_dtype = torch.bfloat16 if dtype != torch.bfloat16 else torch.float32

    def save_dequantized(module: Any, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        state_dict[f"{prefix}weight"] = DTensor.from_local(
            shard.get_original_weight().to(saved_dtype),
            mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )

    linear.register_state_dict_post_hook(save_dequantized)
    names, _ = shard.__tensor_flatten__()
    return nbytes, sum(getattr(shard, name).nbytes for name in names)


def _copy(shard: NF4Tensor) -> NF4Tensor:
    """The same, in storages of its own: a chunk's are views of the whole. (clone() requantises.)"""
    names, context = shard.__tensor_flatten__()
    inner = {name: getattr(shard, name).clone() for name in names}
    return NF4Tensor.__tensor_unflatten__(inner, context, shard.shape, shard.stride())
