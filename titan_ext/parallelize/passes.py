# SPDX-License-Identifier: BSD-3-Clause
"""The passes that turn a Titan decoder into a parallel one, in order, on one screen.

Model-parallel sharding, overlap of shared experts, activation checkpointing, compile, FSDP.
``extend_model_spec`` makes a Titan model spec call them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn as nn
from torchtitan.components.optimizer import (
    OptimizersContainer,
    register_moe_load_balancing_hook,
)
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.distributed.context_parallel import apply_cp_to_forward
from torchtitan.distributed.full_dtensor import validate_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.compile import (
    apply_activation_checkpointing,
    compile_units,
    compiles_model,
)
from titan_ext.activation_checkpoint.policy import build_policy, heeds_save_all_to_all
from titan_ext.base.agreement import leaves_files
from titan_ext.base.titan.parallelism import context_mesh, keep_frozen
from titan_ext.components.dispatch import (
    check_dispatchers,
    exchange_in_float8,
    use_functional_all_to_all,
)
from titan_ext.components.exchange_policy import ExchangePolicy
from titan_ext.components.float8_linears import (
    check_float8,
    gathers_float8,
    make_scales_together,
    note_steps,
)
from titan_ext.components.halves import overlap_in_halves
from titan_ext.components.hf_export import for_replicated_weights
from titan_ext.components.lora import lora_settings
from titan_ext.components.rows import exchange_once, hops_across_nodes
from titan_ext.components.shared_experts import overlap_shared_experts
from titan_ext.fsdp.auto import choose
from titan_ext.fsdp.shard import shard_decoder
from titan_ext.fsdp.units import decoder_blocks, plan_units, vision_modules
from titan_ext.fsdp.unmanaged import refuse_fsdp1
from titan_ext.parallelize.keys import check_parallelism
from titan_ext.parallelize.limits import check_schedule


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
    # 0. Refuse what cannot run, and choose the FSDP units. Nothing is changed yet.
    compiled = compiles_model(compile_config)
    settings = check_parallelism(parallelism, training, compiled=compiled)
    check_schedule(parallelism, loss=None, activation_checkpoint=ac_config, compiled=compiled)
    check_dispatchers(model.config, parallelism)
    check_float8(model.config, parallelism)
    refuse_fsdp1(model)
    if parallel_dims.cp_enabled and vision_modules(model):
        raise ValueError(
            "parallelism.context_parallel_degree > 1 is not supported for a model with a vision "
            "encoder: images are scattered into the whole sequence (as in stock TorchTitan)."
        )
    exchanges = ExchangePolicy.decide(parallelism, training, parallel_dims, compiled=compiled)
    exchanges = exchanges.of_model(model.config)
    exchanges.leave_with(model)
    settings = dataclasses.replace(settings, ignored=ignored)
    settings = choose(model, settings, parallel_dims, compiled=compiled)
    units = plan_units(model, settings.resolved_wrap)

    # 1. Shard over the model-parallel axes: TP, EP, CP. Quantized linears are there already:
    #    Titan's converters put them into the model's config.
    with keep_frozen(model):
        _shard_model_axes(model, parallel_dims)

    # 2. Let tokens travel in fewer bytes or rows, and the other half of a batch or shared experts
    #    run meanwhile.
    if exchanges.dtype is not None:
        exchange_in_float8(model)
    if exchanges.rows != "expert":
        nodes = exchanges.nodes
        exchange_once(model, hops_across_nodes(parallel_dims, nodes) if nodes else ())
    if exchanges.overlap == "halves":
        overlap_in_halves(model, exchanges.ep)
    if exchanges.overlap != "none":
        overlap_shared_experts(model)

    # 3. Activation checkpointing, of the blocks of a vision tower too.
    policy = None
    if ac_config is not None:
        folder = dump_folder if leaves_files(parallel_dims) else ""
        policy = build_policy(ac_config, folder, saves_all_to_all=exchanges.saved)
        if exchanges.ep > 1 and heeds_save_all_to_all(ac_config):
            exchanges.log_saved(model)
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
    make_scales_together(model)
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
        apply_cp_to_forward(attention, context_mesh(parallel_dims))
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        model.parallelize(parallel_dims)


@dataclasses.dataclass
class ExtendedModelSpec(ModelSpec):
    """A model spec of Titan's that titan_ext has extended.

    Attributes:
        stock_parallelize_fn: Titan's own, for a dry run of stock.
        extends: The config function that its config comes from, as a file has it; "" if a config
            was made in Python.
        choices: The [model] section of its file, by key.
    """

    stock_parallelize_fn: Callable[..., nn.Module] = lambda model, **_: model
    extends: str = dataclasses.field(default="", compare=False, repr=False)
    choices: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)


def balance_all_blocks(
    optimizers: OptimizersContainer, model_parts: list[Decoder], parallel_dims: ParallelDims
) -> None:
    """Titan's balancing of experts, for the blocks of multi-token prediction too.

    Titan's hook walks ``layers`` of each model part (torchtitan/components/optimizer/optimizer.py).
    The blocks are the models' own; only the lists of them are made here.
    """
    lists = []
    for part in model_parts:
        lists.append(nn.Module())
        blocks = {name.replace(".", "_"): block for name, block in decoder_blocks(part)}
        lists[-1].layers = nn.ModuleDict(blocks)
    register_moe_load_balancing_hook(optimizers, lists, parallel_dims)


def extend_model_spec(spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with titan_ext's parallelize function and expert dispatcher.

    Model, pipelining function and checkpoints stay Titan's. So does its balancing of experts, for
    blocks of multi-token prediction too. The Hugging Face adapter also learns HSDP and LoRA. The
    result shares the model config of ``spec``, whose dispatchers are swapped in place. So give it a
    fresh spec, as Titan's ``model_registry`` functions return.

    A model with LoRA adapters gets no load balancing. Balancing would keep changing the routers'
    bias, which belongs to the frozen base, and exported adapters would not fit that base.

    Raises:
        ValueError: if the model is not a decoder: its blocks, and so its units, are unknown.
    """
    if not isinstance(spec.model, Decoder.Config):
        raise ValueError(
            f"titan_ext does not serve the model {spec.name!r}: its config is a "
            f"{type(spec.model).__qualname__}, not one of a decoder "
            "(torchtitan.models.common.decoder.Decoder)."
        )
    use_functional_all_to_all(spec)
    adapter = spec.state_dict_adapter
    after_optimizer = spec.post_optimizer_build_fn
    if after_optimizer is register_moe_load_balancing_hook and lora_settings(spec.model):
        after_optimizer = None
        if list(spec.model.traverse(MoE.Config)):
            logger.info("LoRA: load balancing is off, the routers' bias is frozen with the base.")
    elif after_optimizer is register_moe_load_balancing_hook:
        after_optimizer = balance_all_blocks
    if isinstance(spec, ExtendedModelSpec):
        return spec
    if gathers_float8(spec.model):
        after_optimizer = note_steps(after_optimizer)
    return ExtendedModelSpec(
        name=spec.name,
        flavor=spec.flavor,
        model=spec.model,
        parallelize_fn=parallelize,
        pipelining_fn=spec.pipelining_fn,
        post_optimizer_build_fn=after_optimizer,
        state_dict_adapter=for_replicated_weights(adapter) if adapter else None,
        stock_parallelize_fn=spec.parallelize_fn,
    )
