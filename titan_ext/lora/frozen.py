"""Frozen parameters stay frozen through Titan's ``Module.parallelize``.

With the SPMD backend ``spmd_types`` TorchTitan 0.3.0 makes each parameter anew when it distributes
it, and trainable: LoRA would train, and its optimizer hold, the whole model. Later versions keep
the flag (their PR 4267); there this changes nothing.
"""

import contextlib
from collections.abc import Iterator

import torch.nn as nn

__all__ = ["keep_frozen"]


@contextlib.contextmanager
def keep_frozen(model: nn.Module) -> Iterator[None]:
    """Around a pass that replaces parameters under their names: what was frozen is so again."""
    frozen = [
        name
        for name, param in model.named_parameters(remove_duplicate=False)
        if not param.requires_grad
    ]
    yield
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
