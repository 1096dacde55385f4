"""Parameters that FSDP2 does not know of are refused.

FSDP2 gathers, and reduces the gradients of, the parameters that a module has when ``fully_shard``
is called. One that is added later (an adapter injected after wrapping, a new head) trains on each
rank's own data, and the ranks' copies drift apart with no error: that is found out at the model's
first forward, whoever's training loop it is in. Parameters that FSDP1 has flattened are not the
model's any more.
"""

from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn

__all__ = [
    "late_parameters",
    "managed_places",
    "refuse_fsdp1",
    "refuse_late_parameters",
    "refuse_late_parameters_at_first_forward",
    "remember_ignored",
]

_NAMES_SHOWN = 5
_IGNORED: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def remember_ignored(model: nn.Module, names: Iterable[str]) -> None:
    """Note the parameters of ``model`` that FSDP has been told to leave alone, by name."""
    _IGNORED[model] = frozenset(names)


def refuse_late_parameters_at_first_forward(model: nn.Module) -> None:
    """Have ``refuse_late_parameters`` look when ``model`` first runs forward, before FSDP does."""

    @torch._dynamo.disable  # as FSDP's own hooks are
    def check_once(module: nn.Module, args: object) -> None:
        refuse_late_parameters([module])
        handle.remove()

    handle = model.register_forward_pre_hook(check_once, prepend=True)


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
        "LoRA) or before titan_ext.api.parallelize; or give new ones to "
        "titan_ext.api.synchronize_late_parameters before the optimizer is built."
    )


def late_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters of ``model`` that FSDP2 should manage and does not.

    Those that it was told to ignore are not among them, nor new ones that are frozen: they have no
    gradients to sum. None without FSDP2.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return []
    managed = set(managed_places(model))
    ignored = _IGNORED.get(model, frozenset())
    late = []
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            full_name = canonical_fqn(f"{path}.{name}" if path else name)
            if (module, name) in managed:
                is_late = not isinstance(param, DTensor)  # replaced: FSDP has another one
            else:
                is_late = param.requires_grad and full_name not in ignored
            if is_late:
                late.append(full_name)
    return late


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


def managed_places(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Module and attribute of every parameter that FSDP2 swaps, tied ones at each place."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for param in group.fsdp_params:
                info = param._module_info
                yield info.module, info.param_name
                yield from zip(info.shared_modules, info.shared_param_names, strict=True)
