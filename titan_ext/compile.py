# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile for the pieces that FSDP leaves whole.

FSDP's hooks cannot run inside a compiled region: with whole-block units the block is compiled, as
in stock Titan; with sub-module units each module of a unit is. Both go through Titan's own
``apply_compile``, which sets the compiler flags and handles FlexAttention regions.
"""

from collections.abc import Sequence

import torch._dynamo
import torch.nn as nn
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile
from torchtitan.models.common.decoder import Decoder

from titan_ext.activation_checkpoint.compiled.checkpoint import CompiledPolicy
from titan_ext.activation_checkpoint.compiled.partition import Float8Partitioner, compile_arguments
from titan_ext.activation_checkpoint.units import passes_through
from titan_ext.fsdp.units import SUBMODULE_KINDS, Unit, splits_blocks, vision_modules

__all__ = ["compile_units"]

_RECOMPILE_LIMIT = 12


def compiles_model(config: CompileConfig) -> bool:
    """Whether the model is compiled, not just the loss."""
    return config.enable and "model" in config.components


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
        # and again for plain tensors; times two for models that alternate kinds of attention.
        # From torchtitan/models/gpt_oss/parallelize.py, for every decoder.
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, _RECOMPILE_LIMIT)
    targets = [_UnitsAsLayers(model, units) if splits_blocks(units) else model]
    targets += [tower for tower in vision_modules(model).values() if hasattr(tower, "layers")]
    for target in targets:
        apply_compile(target, compile_config=compile_config, parallel_dims=parallel_dims)
        if float8_arguments is not None:
            for module in target.get_submodule("layers").children():
                module.compile(fullgraph=True, **float8_arguments)


class _UnitsAsLayers(nn.Module):
    """The units' modules under the name where ``apply_compile`` looks for blocks."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {
                f"{unit.name}/{index}".replace(".", "/"): module
                for unit in units
                if unit.kind in SUBMODULE_KINDS and unit.name.startswith("layers.")
                for index, module in enumerate(unit.modules(model))
                if not passes_through(module)
            }
        )
