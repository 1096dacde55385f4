"""FP8 activation checkpointing without Titan's trainer: on a model, or on one block, measured."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from titan_ext.activation_checkpoint.policy import FP8AC
from titan_ext.activation_checkpoint.receipts import BlockReceipt

__all__ = ["enable_fp8_activation_checkpointing", "measure_block"]


def enable_fp8_activation_checkpointing(
    model: nn.Module, config: FP8AC.Config | None = None, *, dump_folder: str = ""
) -> FP8AC:
    """Checkpoint the blocks of a model in place, without Titan's trainer.

    Call it after sharding over the model-parallel axes and before FSDP.

    Args:
        model: Its blocks are the children of ``model.layers``.
        config: Default: mode "selective", preset "memory".
        dump_folder: Where the receipt goes, as JSON; "" for nowhere.

    Returns:
        The policy; its ``receipt`` says what was stored.

    Raises:
        ValueError: for a name that no module has.
    """
    policy = FP8AC(config or FP8AC.Config(), dump_folder)
    policy.apply(model)
    return policy


def measure_block(
    block: nn.Module,
    *args: Any,
    config: FP8AC.Config | None = None,
    loss: Callable[[torch.Tensor], torch.Tensor] | None = None,
    **kwargs: Any,
) -> BlockReceipt:
    """Run one block forward and backward under a policy and say what was stored and recomputed.

    The block is left as it was; gradients are accumulated into its parameters and inputs.

    Args:
        block: A transformer block.
        args, kwargs: Its inputs.
        config: The policy.
        loss: From the output of the block to a scalar; the sum if None.
    """
    policy = FP8AC(config or FP8AC.Config())
    holder = nn.Module()
    holder.layers = nn.ModuleDict({"0": block})
    policy.apply(holder)
    out = holder.get_submodule("layers.0")(*args, **kwargs)
    (loss(out) if loss is not None else out.float().sum()).backward()
    policy.remove_hooks()
    (receipt,) = policy.receipt.blocks
    return receipt
