"""Parameters that FSDP2 does not know of are refused.

FSDP2 gathers, and reduces the gradients of, the parameters that a module has when ``fully_shard``
is called. One that is added later (an adapter injected after wrapping, a new head) trains on each
rank's own data, and the ranks' copies drift apart with no error. Parameters that FSDP1 has
flattened are not the model's any more.
"""

from collections.abc import Iterable, Iterator

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn

__all__ = ["late_parameters", "refuse_fsdp1", "refuse_late_parameters"]

_NAMES_SHOWN = 5


def refuse_late_parameters(models: Iterable[nn.Module]) -> None:
    """Check that FSDP2 manages every parameter; call it before the first step.

    Args:
        models: The model, or the chunks of it that the pipeline stages of this rank hold. One
            without FSDP2 (nothing was sharded) passes.

    Raises:
        ValueError: naming the parameters that were added after ``fully_shard``.
    """
    late = [name for model in models for name in late_parameters(model)]
    if not late:
        return
    names = ", ".join(late[:_NAMES_SHOWN])
    more = f" and {len(late) - _NAMES_SHOWN} more" if len(late) > _NAMES_SHOWN else ""
    raise ValueError(
        f"{names}{more}: added to the model, or replaced, after fully_shard. FSDP does not know of "
        "them, and their gradients would not be summed over the ranks. Add parameters before the "
        "model is parallelized: through its config (torchtitan.components.lora.LoRAConverter for "
        "LoRA) or before titan_ext.api.parallelize."
    )


def late_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters of ``model`` that FSDP2 does not manage; none without FSDP2."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return []
    managed = set(_managed_places(model))
    return [
        canonical_fqn(f"{path}.{name}" if path else name)
        for path, module in model.named_modules()
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False)
        if (module, name) not in managed or not isinstance(param, DTensor)
    ]


def refuse_fsdp1(model: nn.Module) -> None:
    """Check that no module of ``model`` is wrapped by FSDP1.

    Raises:
        ValueError: naming the first such module.
    """
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                f"{name or 'The model'} is wrapped by FSDP1 "
                "(torch.distributed.fsdp.FullyShardedDataParallel), which titan_ext does not "
                "support; expected a module that is not wrapped: titan_ext applies FSDP2."
            )


def _managed_places(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Module and attribute of every parameter that FSDP2 swaps, tied ones at each place."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for param in group.fsdp_params:
                info = param._module_info
                yield info.module, info.param_name
                yield from zip(info.shared_modules, info.shared_param_names, strict=True)
