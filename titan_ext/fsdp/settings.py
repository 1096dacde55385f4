"""What ``fully_shard`` is told of every unit: dtypes of the work, and where shards are kept."""

from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

__all__ = ["unit_settings"]


def unit_settings(
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool,
    device_type: str,
) -> dict[str, Any]:
    """Keyword arguments of ``fully_shard`` that are the same for all units of a model.

    Args:
        param_dtype: Of gathered parameters and of the computation; inputs are not cast.
        reduce_dtype: In which gradients are summed.
        cpu_offload: Whether shards are kept in host memory.
        device_type: Of the mesh. Host memory is pinned for copies to an accelerator; on a CPU there
            is none that could pin it.
    """
    settings: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        )
    }
    if cpu_offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device_type != "cpu")
    return settings
