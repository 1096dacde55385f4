# SPDX-License-Identifier: BSD-3-Clause
"""TorchTitan's LoRA: keeps the frozen base frozen, and refuses bad targets before the start."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import spmd_types as spmd
import torch.nn as nn
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import BaseModel

from titan_ext.names import and_more

_ADAPTABLE = (dense_param_placement(tp=spmd.S(0)), dense_param_placement(tp=spmd.S(1)))


@contextlib.contextmanager
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


def is_adapter_weight(name: str) -> bool:
    """Whether a name in a state dict is that of a LoRA adapter weight."""
    return name.endswith((".lora_a.weight", ".lora_b.weight"))


def lora_settings(model: BaseModel.Config) -> set[tuple[int, float]]:
    """The (rank, alpha) of the adapters in a model's config; empty if it has none."""
    linears: Any = [linear for _, linear, _, _ in model.traverse(Linear.Config, recurse=True)]
    return {(linear.rank, linear.alpha) for linear in linears if hasattr(linear, "rank")}


def check_lora_targets(model: BaseModel.Config, config: Any) -> None:
    """Raise ValueError for adapters on linears that TorchTitan cannot give them to.

    Its adapters copy how tensor parallelism splits their linear, whatever its degree. A linear that
    is not split ends in a bare AssertionError (torchtitan/components/lora.py) during start-up.

    Args:
        model: The model's config, after ``LoRAConverter``; it is left as it is.
        config: The trainer's, from which the model takes how it is split.
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
        "torchtitan.components.lora.LoRAConverter adapts only linears that tensor parallelism "
        f"splits, and not {and_more(refused, 1)}; target_modules: {expected}."
    )


def _adapted(model: BaseModel.Config) -> dict[str, bool]:
    """The linears with adapters, by name, and whether their sharding allows adapters."""
    found = {}
    for name, linear, _, _ in model.traverse(Linear.Config, recurse=True):
        if not (hasattr(linear, "rank") and hasattr(linear, "alpha")):
            continue
        sharding = getattr(linear, "sharding_config", None)
        weight = sharding.state_shardings.get("weight") if sharding else None
        found[name] = weight is None or weight in _ADAPTABLE
    return found
