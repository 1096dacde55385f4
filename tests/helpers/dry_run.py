"""Parallelize a config's model as one rank of a large job would, with no other rank.

The process group is fake (collectives return at once), and the model is on the meta device. Every
mesh, unit and shard is made as on the real cluster, and nothing is computed.
"""

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.utils import set_default_dtype

from titan_ext.base import no_accelerator
from titan_ext.fsdp.plan import plan_of
from titan_ext.fsdp.units import decoder_blocks, param_groups
from titan_ext.run.trainer import Trainer


@dataclass
class DryRun:
    """What became of the model on this rank (of its chunks together, under pipelining)."""

    blocks: int
    moe_blocks: int
    units: dict[str, int]
    """Planned FSDP units by kind."""
    fsdp_groups: int
    """FSDP2's own count of parameter groups, the root's included."""
    planned_groups: int
    root_parameters: list[str]
    """Parameters that no unit holds."""
    plain_parameters: list[str]
    """Parameters that are not DTensors."""


def build_on_meta(config: Any) -> Any:
    """The model of ``config``, as Titan's trainer builds it."""
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        return config.model_spec.model.build()


def arguments_of(config: Any, parallel_dims: ParallelDims) -> dict[str, Any]:
    """What a parallelize function gets beside the model and a folder."""
    return {
        "parallel_dims": parallel_dims,
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": config.activation_checkpoint,
    }


def dry_run(config: Trainer.Config, world_size: int) -> DryRun:
    """Parallelize the model of ``config`` on the meta device as rank 0 of ``world_size``.

    One per process: Titan allows one ``ParallelDims``.
    """
    no_accelerator.enable()
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group("fake", rank=0, world_size=world_size)
    parallel_dims = ParallelDims.from_config(config.parallelism, world_size)
    spec: Any = config.model_spec
    model = build_on_meta(config)
    arguments = {**arguments_of(config, parallel_dims), "dump_folder": ""}
    if parallel_dims.pp_enabled:
        _, chunks, _, _ = spec.pipelining_fn(
            model,
            **arguments,
            device=torch.device("meta"),
            model_config=spec.model,
            parallelize_fn=spec.parallelize_fn,
            loss_fn=lambda *_, **__: None,
        )
    else:
        chunks = [spec.parallelize_fn(model, **arguments)]
    return look(chunks)


def look(chunks: list[Any]) -> DryRun:
    units = [(chunk, unit) for chunk in chunks for unit in cast(Any, plan_of(chunk)).decoder_units]
    in_units = {p for chunk, unit in units for m in unit.modules(chunk) for p in m.parameters()}
    blocks = [block for chunk in chunks for _, block in decoder_blocks(chunk)]
    named = [pair for chunk in chunks for pair in chunk.named_parameters()]
    return DryRun(
        blocks=len(blocks),
        moe_blocks=sum(bool(getattr(block, "moe_enabled", False)) for block in blocks),
        units=dict(Counter(unit.kind.value for _, unit in units)),
        fsdp_groups=sum(len(param_groups(chunk.modules())) for chunk in chunks),
        planned_groups=sum(len(unit.groups) for _, unit in units),
        root_parameters=[name for name, p in named if p not in in_units],
        plain_parameters=[name for name, p in named if not isinstance(p, DTensor)],
    )
