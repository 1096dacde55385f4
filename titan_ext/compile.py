# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile for the pieces that FSDP leaves whole, with activation checkpointing inside.

FSDP's hooks cannot run inside a compiled region. With whole-block units we compile the block, as
stock Titan does; with sub-module units each module of a unit. Both go through Titan's own
``apply_compile``, which sets the compiler flags and handles FlexAttention regions. The recompile
limit is raised here, too.

A checkpoint around a block would see compiled code instead of matrix multiplications. It would save
nothing, and so turn selective checkpointing into full. So the checkpoint goes *inside* what is
compiled, where the compiler asks its policy about every operation. It saves its inputs, and a unit
is a chain: norm -> attention (-> norm). So its main module runs the whole chain as one compiled
function, and the other modules return their inputs. No module is added or moved: parameters keep
their names, FSDP its hooks, and the block its forward.

Titan's load balancing halves the token counts of blocks wrapped in a checkpoint, because an eager
recompute counts again. Compiled code does not count again, and these blocks are not wrapped.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch._dynamo
import torch.nn as nn
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, SelectiveAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.models.common.decoder import Decoder

from titan_ext.activation_checkpoint.compiled.checkpoint import CompiledPolicy, compiled_checkpoint
from titan_ext.activation_checkpoint.compiled.partition import Float8Partitioner, compile_arguments
from titan_ext.fsdp.units import SUBMODULE_KINDS, Unit, UnitKind, splits_blocks, vision_modules

_MAIN = ("attention", "attn", "moe", "feed_forward")
_RECOMPILE_LIMIT = 12


def compiles_model(config: CompileConfig) -> bool:
    """Whether the model is compiled, not just the loss."""
    return config.enable and "model" in config.components


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
        policy.apply(_Layers({}))
        for part in parts(model, units):
            wrapper = policy._wrap_block(part.main, base_fqn=part.name)
            part.checkpoint(cast(Any, wrapper).checkpoint_fn)
    else:
        policy.apply(model)


@dataclass(frozen=True)
class Part:
    """What is compiled by itself: a block, or the modules of a sub-module unit.

    Attributes:
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
        before, main_forward = forwards[:position], forwards[position]
        after = forwards[position + 1 :]

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


def compile_units(
    model: Decoder,
    units: Sequence[Unit],
    *,
    compile_config: CompileConfig,
    parallel_dims: ParallelDims,
    float8: CompiledPolicy | None = None,
) -> None:
    """Compile the blocks of ``model``, or the modules of ``units`` that split them, in place.

    Multi-token-prediction blocks stay eager, as in stock Titan. Activation checkpointing has been
    applied; ``float8`` is the policy, if it stores in float8. Raises ValueError if the compiler
    backend cannot do that.
    """
    float8_arguments = None
    if float8 is not None:
        partitioner = Float8Partitioner(float8.compiled_codec(), report=float8.take_graph)
        float8_arguments = compile_arguments(partitioner, compile_config.backend)
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        # A block may be compiled once while its inputs are still in flight (AsyncCollectiveTensor)
        # and again for plain tensors. Models that alternate kinds of attention need twice that.
        # From torchtitan/models/gpt_oss/parallelize.py, for every decoder.
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, _RECOMPILE_LIMIT)
    targets = [_units_as_layers(model, units) if splits_blocks(units) else model]
    targets += [tower for tower in vision_modules(model).values() if hasattr(tower, "layers")]
    for target in targets:
        apply_compile(target, compile_config=compile_config, parallel_dims=parallel_dims)
        if float8_arguments is not None:
            for module in target.get_submodule("layers").children():
                module.compile(fullgraph=True, **float8_arguments)


class _Layers(nn.Module):
    """Modules under the name where Titan looks for blocks."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)


def _units_as_layers(model: nn.Module, units: Sequence[Unit]) -> nn.Module:
    return _Layers(
        {
            f"{unit.name}/{index}".replace(".", "/"): module
            for unit in units
            if unit.kind in SUBMODULE_KINDS and unit.name.startswith("layers.")
            for index, module in enumerate(unit.modules(model))
            if cast(Any, module.forward) is not _pass_through
        }
    )


def _pass_through(x: Any) -> Any:
    return x
