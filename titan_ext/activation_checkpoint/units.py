# SPDX-License-Identifier: BSD-3-Clause
"""Activation checkpointing of what is compiled: whole blocks, or the modules of sub-module units.

With sub-module units FSDP's hooks run between the modules of a block, so each module is compiled by
itself. A checkpoint around the block would see compiled code instead of matrix multiplications,
save nothing, and so turn selective checkpointing into full. So the checkpoint goes *inside* what is
compiled, where the compiler asks its policy about every operation.

A checkpoint saves its inputs. A unit is a chain, norm -> attention (-> norm), and would save the
inputs of each link. So its main module runs the whole chain as one compiled function, and the other
modules return their inputs. No module is added or moved: parameters keep their names, FSDP its
hooks, and the block its forward.

Titan's load balancing halves the token counts of blocks wrapped in a checkpoint, because an eager
recompute counts again. Compiled code does not count again, and these blocks are not wrapped.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn as nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, SelectiveAC
from torchtitan.models.common.decoder import Decoder

from titan_ext.activation_checkpoint.compiled.checkpoint import CompiledPolicy, compiled_checkpoint
from titan_ext.activation_checkpoint.policy import FP8AC
from titan_ext.fsdp.units import SUBMODULE_KINDS, Unit, UnitKind, splits_blocks

_MAIN = ("attention", "attn", "moe", "feed_forward")


@dataclass(frozen=True)
class Part:
    """What is compiled by itself: a block, or the modules of a sub-module unit.

    Attributes:
        block: The block.
        block_name: Its name in the model.
        modules: By name in the block, in the order in which they run; the block itself is "".
        child: The name in the block of the module that runs them all.
    """

    block: nn.Module
    block_name: str
    modules: dict[str, nn.Module]
    child: str

    @property
    def main(self) -> nn.Module:
        """The module that runs it all: the block or, for example, its attention."""
        return self.modules[self.child]

    @property
    def name(self) -> str:
        """The name of ``main`` in the model."""
        return ".".join(part for part in (self.block_name, self.child) if part)

    def checkpoint(self, checkpoint: Callable[..., Any]) -> None:
        """Let ``main`` run the whole chain as ``checkpoint(function, *args, **kwargs)``."""
        position = list(self.modules).index(self.child)
        forwards = [module.forward for module in self.modules.values()]
        before, main_forward, after = (
            forwards[:position],
            forwards[position],
            forwards[position + 1 :],
        )

        def chain(x: Any, *args: Any, **kwargs: Any) -> Any:
            for forward in before:
                x = forward(x)
            x = main_forward(x, *args, **kwargs)
            for forward in after:
                x = forward(x)
            return x

        def forward(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(chain, *args, **kwargs)

        # On the instances, as Titan's own Module.parallelize does: FSDP's hooks stay around them.
        for module in self.modules.values():
            cast(Any, module).forward = forward if module is self.main else _pass_through


def build_policy(
    config: ActivationCheckpointing.Config, dump_folder: str, *, saves_all_to_all: bool
) -> ActivationCheckpointing:
    """The policy of a config, told whether to save what exchanges of tokens deliver.

    A subclass of Titan's ``SelectiveAC`` decides by itself (``get_save_ops``).
    """
    if isinstance(config, FP8AC.Config):
        return config.build(dump_folder=dump_folder, saves_all_to_all=saves_all_to_all)
    if type(config) is SelectiveAC.Config and not saves_all_to_all:
        return SelectiveACWithoutAllToAll(config, dump_folder)
    return config.build(dump_folder=dump_folder)


def apply_activation_checkpointing(
    model: Decoder, policy: ActivationCheckpointing, units: Sequence[Unit], *, compiled: bool
) -> None:
    """Apply ``policy`` to the transformer blocks of ``model``, split into ``units``, in place.

    Call it before compile and before FSDP. In eager mode, and for policies that recompute whole
    blocks, this is ``policy.apply``. Multi-token-prediction blocks stay as they are, as in Titan.
    """
    if compiled and isinstance(policy, CompiledPolicy):
        policy.prepare(model)
        for part in parts(model, units):
            decisions = policy.compiled_decisions(part.block, part.block_name)
            if decisions is not None:
                part.checkpoint(compiled_checkpoint(part.modules, part.child, decisions))
    elif compiled and splits_blocks(units) and isinstance(policy, SelectiveAC):
        policy.apply(_NoLayers())
        for part in parts(model, units):
            wrapper = policy._wrap_block(part.main, base_fqn=part.name)
            part.checkpoint(cast(Any, wrapper).checkpoint_fn)
    else:
        policy.apply(model)


def parts(model: Decoder, units: Sequence[Unit]) -> Iterator[Part]:
    """The parts of the transformer blocks of ``model`` that are compiled, in forward order."""
    blocks = {f"layers.{name}": block for name, block in model.layers.items()}
    kinds = SUBMODULE_KINDS if splits_blocks(units) else (UnitKind.BLOCK,)
    for unit in units:
        if unit.kind not in kinds or unit.block not in blocks:
            continue
        block = blocks[unit.block]
        names = {block: "", **{module: name for name, module in block.named_children()}}
        modules = {names[module]: module for module in unit.modules(model)}
        child = next(name for name in modules if name in ("", *_MAIN))
        yield Part(block, unit.block, modules, child)


def passes_through(module: nn.Module) -> bool:
    """Whether another module of the unit does the work of ``module``."""
    return cast(Any, module.forward) is _pass_through


def _pass_through(x: Any) -> Any:
    return x


class SelectiveACWithoutAllToAll(SelectiveAC):
    """Stock's policy, but the recompute sends the tokens of expert parallelism again."""

    def get_save_ops(self) -> set:
        return super().get_save_ops() - {torch.ops._c10d_functional.all_to_all_single.default}


class _NoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
