"""Which linears TorchTitan's LoRA can adapt, said before the model is built.

Its adapters copy how tensor parallelism splits their linear, whatever its degree; a linear that is
not split ends in a bare AssertionError (torchtitan/components/lora.py) in the middle of a start.
"""

import copy
from typing import Any

import spmd_types as spmd
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import BaseModel

__all__ = ["check_lora_targets"]

_ADAPTABLE = (dense_param_placement(tp=spmd.S(0)), dense_param_placement(tp=spmd.S(1)))


def check_lora_targets(model: BaseModel.Config, config: Any) -> None:
    """Refuse adapters on linears that TorchTitan cannot give them to.

    Args:
        model: The model's config, after ``LoRAConverter``; it is left as it is.
        config: The trainer's, from which the model takes how it is split.

    Raises:
        ValueError: naming such linears, and those that can have adapters.
    """
    if not _adapted(model):
        return
    split = copy.deepcopy(model)
    split.update_from_config(config=config)
    linears = _adapted(split)
    refused = [name for name, can in linears.items() if not can]
    if not refused:
        return
    others = sorted({name.rsplit(".", 1)[-1] for name, can in linears.items() if can})
    expected = f"expected some of {', '.join(others)}" if others else "expected other names"
    raise ValueError(
        f"torchtitan.components.lora.LoRAConverter: {refused[0]} cannot have an adapter (nor can "
        f"{len(refused) - 1} more linears), because tensor parallelism does not split it; "
        f"target_modules: {expected}."
    )


def _adapted(model: BaseModel.Config) -> dict[str, bool]:
    """The linears with adapters, by name, and whether the sharding of each has a place for them."""
    found = {}
    for name, linear, _, _ in model.traverse(Linear.Config, recurse=True):
        if not (hasattr(linear, "rank") and hasattr(linear, "alpha")):
            continue
        sharding = getattr(linear, "sharding_config", None)
        weight = sharding.state_shardings.get("weight") if sharding else None
        found[name] = weight is None or weight in _ADAPTABLE
    return found
