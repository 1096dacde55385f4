# SPDX-License-Identifier: BSD-3-Clause
"""The passes that turn a Titan decoder into a parallel one, in order, on one screen."""

from collections.abc import Sequence

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.models.common.decoder import Decoder

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.policy import build_policy, heeds_save_all_to_all
from titan_ext.compile import apply_activation_checkpointing, compile_units, compiles_model
from titan_ext.configs import check_parallelism
from titan_ext.dispatch import log_all_to_all, overlap_shared_experts, saves_all_to_all
from titan_ext.fsdp.auto import choose
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.fsdp.shard import shard_decoder
from titan_ext.fsdp.units import decoder_blocks, plan_units, vision_modules
from titan_ext.fsdp.unmanaged import refuse_fsdp1
from titan_ext.limits import check_schedule
from titan_ext.lora import keep_frozen
from titan_ext.titan import apply_cp_to_forward, validate_config


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
        ac_config: An activation checkpointing policy, or None.
        skip_dp: Stop before FSDP; Titan's inference callers pass it.
        ignored: Patterns for names of parameters, or of modules, that FSDP neither shards nor
            synchronises (docs/lora.md).

    Raises:
        ValueError: for a configuration that titan_ext does not serve, or a module that FSDP1 wraps.
    """
    compiled = compiles_model(compile_config)
    check_parallelism(parallelism, training, compiled=compiled)
    check_schedule(parallelism, loss=None, activation_checkpoint=ac_config, compiled=compiled)
    refuse_fsdp1(model)
    if parallel_dims.cp_enabled and vision_modules(model):
        raise ValueError(
            "parallelism.context_parallel_degree > 1 is not supported for a model with a vision "
            "encoder: images are scattered into the whole sequence (as in stock TorchTitan)."
        )
    saves = saves_all_to_all(parallelism, parallel_dims.ep, compiled=compiled)
    overlaps = getattr(parallelism, "overlap_shared_experts", True) and (
        parallel_dims.ep_enabled and not (parallel_dims.tp_enabled or compiled)
    )
    settings = choose(
        model,
        FSDPSettings.from_config(parallelism, training, ignored),
        parallel_dims,
        training=training,
        parallelism=parallelism,
        ac_config=ac_config,
        compiled=compiled,
        exchanges_again=not saves,
        overlaps_shared=overlaps,
    )
    units = plan_units(model, settings.resolved_wrap)

    # 1. Shard over the model-parallel axes: TP, EP, CP.
    with keep_frozen(model):
        _shard_model_axes(model, parallel_dims)

    if overlaps:
        overlap_shared_experts(model)

    # 2. Float8 and the other quantized linears: nothing to do. Titan's converters put them into
    #    the model config, and the model was built with them.

    # 3. Activation checkpointing, of the blocks of a vision tower too.
    policy = None
    if ac_config is not None:
        policy = build_policy(ac_config, dump_folder, saves_all_to_all=saves)
        if parallel_dims.ep_enabled and heeds_save_all_to_all(ac_config):
            log_all_to_all(model, saves, parallel_dims.ep)
        apply_activation_checkpointing(model, policy, units, compiled=compiled)
        for tower in vision_modules(model).values():
            if hasattr(tower, "layers"):
                policy.apply(tower)

    # 4. Compile, inside of FSDP's hooks.
    if compiled:
        compile_units(
            model,
            units,
            compile_config=compile_config,
            parallel_dims=parallel_dims,
            float8=policy if isinstance(policy, FP8AC) else None,
        )

    # 5. FSDP, the outermost: it wraps what the other passes have made of the modules.
    if skip_dp:
        return model
    shard_decoder(model, parallel_dims, settings, units=units)
    return model


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
        apply_cp_to_forward(attention, parallel_dims.get_mesh("cp"))
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        model.parallelize(parallel_dims)
