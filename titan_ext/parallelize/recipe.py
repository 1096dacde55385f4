# SPDX-License-Identifier: BSD-3-Clause
"""All that is decided for a job, in one frozen object, before anything is done.

``resolve`` makes it from config, model and degrees, without a mesh or a process group. The passes,
the dry run, tune, the record of a run and its log read it, and no section of a config.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn as nn
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.models.common.decoder import Decoder

from titan_ext.activation_checkpoint.compile import compiles_model
from titan_ext.activation_checkpoint.policy import FP8AC, Checkpointing, resolve_checkpointing
from titan_ext.base.messages import Mistakes
from titan_ext.base.nodes import RANKS_PER_NODE, Nodes
from titan_ext.components.exchange_policy import Exchanges, resolve_exchanges
from titan_ext.fsdp.plan import FSDPPlan
from titan_ext.fsdp.resolve import resolve_sharding
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.fsdp.units import vision_modules
from titan_ext.parallelize.limits import stage_dims, wrong_together


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All decisions for a model, or for the chunk of a pipeline stage."""

    fsdp: FSDPPlan
    """What FSDP gathers, keeps and frees, and in which dtypes."""
    exchanges: Exchanges
    """How tokens travel between ranks, and what runs meanwhile."""
    checkpointing: Checkpointing
    """What blocks keep for backward."""
    compile: CompileConfig | None = None
    """Titan's section, where the model is compiled."""
    notes: tuple[str, ...] = ()
    """Lines for the log: which key does nothing, and why."""


def resolve(
    model: Decoder,
    *,
    parallel_dims: ParallelDims,
    nodes: Nodes,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig,
    ignored: Sequence[str] = (),
) -> Recipe:
    """Decide everything for ``model``, which stays as it is. Equal inputs give equal recipes.

    Args:
        model: A decoder or a chunk of one, on the meta device, before any pass.
        parallel_dims: Of it only the degrees and the backend are read.
        parallelism: Titan's section, whose missing keys read as their defaults, or ours.
        ignored: As ``FSDPSettings`` has it.

    Raises ValueError for a setting that does not fit the model, or a name that is not in it.
    """
    compiled = compiles_model(compile_config)
    settings = FSDPSettings.from_config(parallelism, training, ignored)
    wrong = Mistakes(
        wrong_together(
            settings, parallelism, compiled=compiled, model=model.config, ac_config=ac_config
        )
    )
    if parallel_dims.cp_enabled and vision_modules(model):
        wrong.append(
            "parallelism.context_parallel_degree > 1 is not supported for a model with a vision "
            "encoder: images are scattered into the whole sequence (as in stock TorchTitan)."
        )
    wrong.raise_all()
    # Of the whole model's config, which every chunk has: all ranks make the same meshes.
    exchanges = resolve_exchanges(
        model.config, parallelism, training, parallel_dims, nodes, compiled=compiled
    )
    return Recipe(
        fsdp=resolve_sharding(
            model,
            settings,
            parallel_dims,
            nodes,
            compiles_blocks=compiled and not exchanges.order_blocks(model.config),
        ),
        exchanges=exchanges,
        checkpointing=resolve_checkpointing(model, ac_config, exchanges),
        compile=compile_config if compiled else None,
        notes=exchanges.notes,
    )


def recipe_of(model: nn.Module) -> Recipe | None:
    """The recipe of a model or a pipeline chunk; None if titan_ext did not parallelize it."""
    return cast(Any, model).__dict__.get("_recipe")


def resolve_config(config: Any, parallel_dims: ParallelDims, nodes: Nodes) -> Recipe:
    """``resolve`` for the whole model of a trainer's ``config``, built on the meta device."""
    policy = config.activation_checkpoint
    if isinstance(policy, FP8AC.Config):  # a run solves and builds these, before its recipe
        policy = replace(policy, budget="", offload_limit="", score_before_last_gemm=False)
    with torch.device("meta"):
        model = cast(Decoder, config.model_spec.model.build())
    return resolve(
        model,
        parallel_dims=parallel_dims,
        nodes=nodes,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=policy,
    )


def check_names(config: Any) -> None:
    """Resolve a trainer's ``config`` if its keys name modules, or ranks to reshard to.

    That raises ValueError for names that are not in the model. The whole model is looked at, since
    a name may lie in any stage of a pipeline, and nothing where the number of ranks is not known
    yet, or no degrees fit it.
    """
    settings = FSDPSettings.from_config(config.parallelism, config.training)
    to_ranks = any(isinstance(n, int) for n in settings.reshard_by_key.values())
    names = [*settings.reshard_groups, *settings.replicate, *settings.quantize_frozen]
    policy = config.activation_checkpoint
    if isinstance(policy, FP8AC.Config):
        names += {*policy.op_policies, *policy.exempt} - {"*"}
    if (names or to_ranks) and (dims := stage_dims(config.parallelism)) is not None:
        # The nodes of a job are known when it starts. They decide only what "auto" takes first, and
        # it takes units that have the names, if any have.
        resolve_config(config, dims, Nodes(RANKS_PER_NODE, RANKS_PER_NODE))
