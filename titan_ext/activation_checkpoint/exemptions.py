"""Which layers and modules keep exactly what the others keep in float8."""

import fnmatch
from typing import Protocol

import torch.nn as nn

__all__ = ["Exempting", "is_exempt", "number_of_layers"]


class Exempting(Protocol):
    """The keys of ``FP8AC.Config`` that exempt."""

    exempt_first: int
    exempt_last: int
    exempt: list[str]


def is_exempt(config: Exempting, block: str, module: str, total_layers: int | None) -> bool:
    """Whether ``module`` of ``block`` is exempt.

    Args:
        block: In the model ("layers.3").
        module: In the block; "" for all of it.
        total_layers: Of the whole model; None for a block that is none of its layers.
    """
    layer = block.rpartition(".")[2]
    if total_layers is not None and layer.isdecimal():
        from_end = total_layers - 1 - int(layer)
        if int(layer) < config.exempt_first or from_end < config.exempt_last:
            return True
    parts = (f"{block}.{module}" if module else block).split(".")
    names = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return any(fnmatch.fnmatchcase(name, glob) for glob in config.exempt for name in names)


def number_of_layers(model: nn.Module) -> int:
    """Of the whole model, of which ``model`` may be a pipeline stage."""
    config = getattr(model, "config", None)
    layers = getattr(config, "layers", None)
    return len(layers) if layers else len(list(model.get_submodule("layers").children()))
