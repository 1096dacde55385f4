"""Activation checkpointing of what is compiled: whole blocks, or the modules of sub-module units.

With sub-module units FSDP's hooks run between the modules of a block, so each module is compiled by
itself. A checkpoint around the block then sees compiled code where its policy expects matrix
multiplications: nothing is saved, and selective checkpointing has become full. So the checkpoint
goes *inside* what is compiled, where the compiler asks its policy about every operation.

What enters a checkpoint is saved. A unit is a chain, norm -> attention (-> norm), and would save
what enters each of its links. So its main module runs the whole chain as one compiled function, and
the others pass through what they get. No module is added or moved: parameters keep their names,
FSDP its hooks, and the block its forward.

Titan's load balancing halves the tokens per expert of a block that is wrapped in a checkpoint, as
an eager recompute counts them again. Compiled code does not, and these blocks are not wrapped.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch.nn as nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, SelectiveAC
from torchtitan.models.common.decoder import Decoder

from titan_ext.activation_checkpoint.compiled.decisions import CompiledPolicy, compiled_checkpoint
from titan_ext.fsdp.units import UnitKind, Wrap, plan_units

__all__ = ["Part", "apply_activation_checkpointing", "parts", "passes_through"]

_MAIN = ("attention", "attn", "moe", "feed_forward")
_KINDS: dict[Wrap, tuple[UnitKind, ...]] = {
    "block": (UnitKind.BLOCK,),
    "submodule": (UnitKind.ATTENTION, UnitKind.MOE, UnitKind.FEED_FORWARD),
}


@dataclass(frozen=True)
class Part:
    """What is compiled by itself: a block, or the modules of a sub-module unit.

    Attributes:
        block: The block.
        block_name: Its name in the model.
        modules: By name in the block, in the order in which they run; the block itself is "".
        child: The name in the block of the one that runs all of them.
    """

    block: nn.Module
    block_name: str
    modules: dict[str, nn.Module]
    child: str

    @property
    def main(self) -> nn.Module:
        """The module that runs all of it: the block or, for example, its attention."""
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


def apply_activation_checkpointing(
    model: Decoder, policy: ActivationCheckpointing, wrap: Wrap, *, compiled: bool
) -> None:
    """Apply ``policy`` to the transformer blocks of ``model``, in place.

    Before they are compiled, and before FSDP. Eagerly, and for policies that recompute whole
    blocks, this is ``policy.apply``. Multi-token-prediction blocks are left alone, as by Titan.
    """
    if compiled and isinstance(policy, CompiledPolicy):
        policy.prepare(model)
        for part in parts(model, wrap):
            decisions = policy.compiled_decisions(part.block, part.block_name)
            if decisions is not None:
                part.checkpoint(compiled_checkpoint(part.modules, part.child, decisions))
    elif compiled and wrap == "submodule" and isinstance(policy, SelectiveAC):
        policy.apply(_NoLayers())
        for part in parts(model, wrap):
            wrapper = policy._wrap_block(part.main, base_fqn=part.name)
            part.checkpoint(cast(Any, wrapper).checkpoint_fn)
    else:
        policy.apply(model)


def parts(model: Decoder, wrap: Wrap) -> Iterator[Part]:
    """The parts of the transformer blocks of ``model`` that are compiled, in forward order."""
    blocks = {f"layers.{name}": block for name, block in model.layers.items()}
    for unit in plan_units(model, wrap):
        block_name = ".".join(unit.name.split(".")[:2])
        if unit.kind not in _KINDS[wrap] or block_name not in blocks:
            continue
        block = blocks[block_name]
        names = {block: "", **{module: name for name, module in block.named_children()}}
        modules = {names[module]: module for module in unit.modules}
        child = next(name for name in modules if name in ("", *_MAIN))
        yield Part(block, block_name, modules, child)


def passes_through(module: nn.Module) -> bool:
    """Whether another module of its unit does the work of ``module``."""
    return cast(Any, module.forward) is _pass_through


def _pass_through(x: Any) -> Any:
    return x


class _NoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
