# SPDX-License-Identifier: BSD-3-Clause
"""Copies gathered parameters out of their flat buffer without a temporary.

Where routed experts have more ranks than there are experts, they are sharded along dim 1. FSDP2
copies such parameters into a temporary of the whole group, and concatenates that into place. A copy
between strided views does it at once, bit for bit. FSDP2 has a function for each parameter group
that copies out (private; tests/test_contracts.py); only groups that need it get ours.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, ``_default_all_gather_output_fn``.
"""

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from titan_ext.fsdp.units import param_groups


def copies_out_directly() -> bool:
    """Whether this torch (2.15) lets a parameter group bring its own copy-out."""
    return hasattr(_fsdp_collectives, "_default_all_gather_output_fn")


def copy_out_directly(model: nn.Module) -> None:
    """Give the groups under ``model`` that are sharded along other dims than 0 our copy-out."""
    if not copies_out_directly():
        return
    for group in param_groups(model.modules()):
        if any(param.fsdp_placement.dim != 0 for param in group.fsdp_params):
            group._all_gather_output_fn = _copy_out


@torch.no_grad()
def _copy_out(params: list[FSDPParam], result: Any, world: int) -> None:
    """Fill the unsharded tensors of ``params`` from the flat buffer of ``world`` ranks' shards."""
    buffer, _, _, dtypes, numels, splits = result
    is_plain = all(
        param.sharded_state == ShardedState.SHARDED
        and not hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
        for param in params
    )
    if not is_plain or buffer.dtype == torch.uint8:  # extensions, or several dtypes as bytes
        _fsdp_collectives._default_all_gather_output_fn(params, result, world)
        return
    shards = buffer.view(world, -1).split_with_sizes(splits, dim=1)
    for param, shard, its_numels, its_dtypes in zip(params, shards, numels, dtypes, strict=True):
        param.init_all_gather_outputs(its_numels, its_dtypes, world, buffer.device)
        param.alloc_all_gather_outputs()
        (whole,) = param.all_gather_outputs
        dim, shape = param.fsdp_placement.dim, param.padded_sharded_param_size
        by_rank = whole.view(*shape[:dim], world, *shape[dim:]).movedim(dim, 0)
        kept = () if whole.is_inference() else (whole,)  # as FSDP2: autograd sees no change
        with torch.autograd._unsafe_preserve_version_counter(kept):
            by_rank.copy_(shard.unflatten(1, shape))
