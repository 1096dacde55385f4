# SPDX-License-Identifier: BSD-3-Clause
# pyrefly: ignore-errors
"""What TorchTitan's main has moved since 0.3, imported from where it is, or has mended."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchtitan.distributed import ParallelDims

__all__ = [
    "apply_cp_to_forward",
    "keep_frozen",
    "resolve_fsdp_mesh",
    "resolve_sparse_fsdp_mesh",
    "validate_config",
]

try:  # 0.3
    from torchtitan.distributed.context_parallel import apply_cp_to_forward
    from torchtitan.distributed.full_dtensor import (
        resolve_fsdp_mesh,
        resolve_sparse_fsdp_mesh,
        validate_config,
    )
except ImportError:  # main
    from torchtitan.distributed.fsdp import resolve_fsdp_mesh, resolve_sparse_fsdp_mesh

    # Main refuses context parallelism under partial_dtensor, and both in the model's config.
    apply_cp_to_forward: Any = None

    def validate_config(parallel_dims: ParallelDims, model: Any) -> None: ...


@contextmanager
def keep_frozen(model: nn.Module) -> Iterator[None]:
    """Around a pass that replaces parameters: freeze again, by name, what was frozen.

    With the SPMD backend ``spmd_types`` TorchTitan 0.3.0 replaces each parameter by a trainable one
    when it distributes it, so LoRA would train the whole model. Later versions keep the flag (their
    PR 4267); there this changes nothing.
    """
    frozen = [
        name
        for name, param in model.named_parameters(remove_duplicate=False)
        if not param.requires_grad
    ]
    yield
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
