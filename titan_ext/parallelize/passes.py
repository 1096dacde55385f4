# SPDX-License-Identifier: BSD-3-Clause
"""The passes that turn a Titan decoder into a parallel one, in order, straight down."""

from collections.abc import Sequence

import torch
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.distributed.context_parallel import apply_cp_to_forward
from torchtitan.distributed.full_dtensor import validate_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.logging import logger

from titan_ext.activation_checkpoint.compile import checkpoint_blocks, compile_units, make_pieces
from titan_ext.base.agreement import leaves_files
from titan_ext.base.nodes import Nodes
from titan_ext.base.titan.parallelism import context_mesh, keep_frozen
from titan_ext.components.dispatch import exchange_in_float8
from titan_ext.components.float8_linears import make_scales_together
from titan_ext.components.overlap import overlap_in_halves, overlap_shared_experts
from titan_ext.components.rows import exchange_once, hops_across_nodes
from titan_ext.fsdp.prefetch import hide_fsdp
from titan_ext.fsdp.shard import shard
from titan_ext.fsdp.units import before_first_forward, decoder_blocks
from titan_ext.fsdp.unmanaged import refuse_fsdp1
from titan_ext.parallelize.recipe import resolve


def parallelize(
    model: Decoder,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig,
    dump_folder: str,
    skip_dp: bool = False,
    ignored: Sequence[str] = (),
) -> Decoder:
    """Parallelize a Titan decoder, or the chunk of one that a pipeline stage holds, in place.

    It has the signature that Titan's trainer and pipelining functions call a model spec's
    ``parallelize_fn`` with, and works for every decoder (``torchtitan.models.common.decoder``).

    Args:
        model: The decoder on the meta device; it is returned.
        parallelism: Titan's section, or ours with ``fsdp_wrap``.
        skip_dp: Stop before FSDP; Titan's inference callers pass it.
        ignored: Patterns for names of parameters, or of modules, that FSDP neither shards nor
            synchronises (docs/lora.md).

    Raises ValueError for a configuration that titan_ext does not serve, or a module that FSDP1
    wraps.
    """
    refuse_fsdp1(model)
    recipe = resolve(
        model,
        parallel_dims=parallel_dims,
        nodes=Nodes.agreed(),
        training=training,
        parallelism=parallelism,
        compile_config=compile_config,
        ac_config=ac_config,
        ignored=ignored,
    )
    for note in recipe.notes:
        logger.info(note)
    # The rest does what the recipe says, and decides nothing. The recipe is this chunk's alone:
    # Titan deep-copies the whole model for each stage of a pipeline, before it calls us
    # (torchtitan/distributed/pipeline_parallel.py).
    model.__dict__["_recipe"] = recipe
    before_first_forward(model, lambda: _refuse_threads(model))

    # Model axes first: FSDP shards what they leave. Quantized linears are there already: Titan's
    # converters put them into the model's config. Titan 0.3 makes frozen parameters trainable here
    # (torchtitan/protocols/module.py).
    with keep_frozen(model):
        _shard_model_axes(model, parallel_dims)

    # After expert parallelism, which gives dispatchers their mesh, and before checkpoints, which
    # count exchanges by module. Process groups are made by every rank, with a stage of dense
    # blocks, too.
    exchanges = recipe.exchanges
    if exchanges.dtype is not None:
        exchange_in_float8(model)
    if exchanges.rows != "expert":
        nodes = exchanges.nodes
        exchange_once(model, hops_across_nodes(parallel_dims, nodes) if nodes else ())
    if exchanges.overlap == "halves":
        overlap_in_halves(model, parallel_dims)
    if exchanges.overlap != "none":
        overlap_shared_experts(model)

    # Checkpoints inside of what is compiled: around it they would see one opaque operation.
    units, compiled = recipe.fsdp.decoder_units, recipe.compile
    if compiled is not None:
        make_pieces(model, units)
    policy = recipe.checkpointing.build(dump_folder if leaves_files(parallel_dims) else "")
    if policy is not None:
        checkpoint_blocks(model, policy, units, compiled=compiled is not None)

    # Compile inside of FSDP's hooks, which cannot be traced.
    if compiled is not None:
        compile_units(model, units, compiled, parallel_dims, policy)

    # FSDP last, around what the others made of the modules.
    if skip_dp:
        return model
    shard(model, recipe.fsdp, parallel_dims)
    hide_fsdp(model.modules())
    # Scales are made from shards: after FSDP, ahead of its first hook.
    make_scales_together(model)
    return model


def _refuse_threads(model: Decoder) -> None:
    """Refuse a backward in autograd's own threads, which accelerators have, in a loop of a user's.

    A recompute there has none of the meshes that this thread is in.
    """
    on_accelerator = next(model.parameters()).device.type != "cpu"
    if on_accelerator and torch.is_grad_enabled() and torch.autograd.is_multithreading_enabled():
        raise ValueError(
            "backward would run in another thread, which lacks the meshes of this one. Expected "
            "torch.autograd.set_multithreading_enabled(False) before the first step, as in "
            "TorchTitan (docs/your_model.md)."
        )


def _shard_model_axes(model: Decoder, parallel_dims: ParallelDims) -> None:
    if parallel_dims.spmd_backend == "spmd_types":
        validate_config(parallel_dims, model)
        model.parallelize(parallel_dims)
        return
    if parallel_dims.cp_enabled:
        # Before parallelize(): context parallelism works on the local tensors inside local_map.
        attention = [
            block.get_submodule("attention.inner_attention") for _, block in decoder_blocks(model)
        ]
        if attention:  # Titan looks at the first; a pipeline stage may have no block
            apply_cp_to_forward(attention, context_mesh(parallel_dims))
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        model.parallelize(parallel_dims)
