"""Layouts that nothing here can train, held against stock Titan without computing.

One process stands for rank 0: a fake process group, the model on the meta device, and converters
that believe in a GPU. Every mesh, unit and shard is made as on the real cluster.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.distributed import ParallelDims

from tests.helpers.cluster import run_ranks
from tests.helpers.converters import any_gpu
from tests.helpers.dry_run import arguments_of, build_on_meta
from tests.helpers.on_cpu import flex_on_cpu
from tests.helpers.training import Run, make_config
from tests.matrix.exact import BACKENDS, reference_of
from titan_ext.base import no_accelerator

Shard = tuple[Any, ...]


def _shards(run: Run, folder: Path) -> dict[str, Shard]:
    no_accelerator.enable()
    os.environ["WORLD_SIZE"] = str(run.world)
    with any_gpu(), flex_on_cpu():
        config = make_config(run, folder)
        dist.init_process_group("fake", rank=0, world_size=run.world)
        parallel_dims = ParallelDims.from_config(config.parallelism, run.world)
        arguments = arguments_of(config, parallel_dims)
        model = build_on_meta(config)
        model = config.model_spec.parallelize_fn(model, **arguments, dump_folder="")
    return {canonical_fqn(name): _shard(param) for name, param in model.named_parameters()}


def _shard(param: torch.Tensor) -> Shard:
    assert isinstance(param, DTensor), "a parameter outside FSDP"
    local = param.to_local()
    mesh = param.device_mesh
    axes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return (
        axes,
        tuple(map(str, param.placements)),
        tuple(local.shape),
        str(param.dtype),
        type(local).__name__,
    )


_LAYOUTS: dict[str, dict[str, Any]] = {
    "CP 4, TP 2": {"world": 16, "ep": 4, "cp": 4, "tp": 2, "attention": "flex"},
    "CP 2, HSDP 2": {"world": 16, "ep": 4, "cp": 2, "dp_replicate": 2, "attention": "flex"},
    "float8": {"world": 8, "ep": 4, "converters": ("float8_linear", "float8_experts")},
    "mxfp8": {"world": 8, "ep": 4, "converters": ("mxfp8_linear", "mxfp8_experts")},
    "nvfp4": {"world": 8, "ep": 4, "converters": ("nvfp4_linear",)},
}
_SLOW = ("CP 4, TP 2", "mxfp8")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in _LAYOUTS]
)
def test_shards_are_those_of_stock(name: str, tmp_path: Path):
    """With float8 experts under partial_dtensor: under spmd_types they would lose their float8."""
    backend = BACKENDS["experts" in str(_LAYOUTS[name])]
    run = Run(parallelize="submodule", backend=backend, **_LAYOUTS[name])
    ours, stock = (
        run_ranks(_shards, 1, each, tmp_path / place, log_folder=tmp_path / place)[0]
        for place, each in (("ours", run), ("stock", reference_of(run)))
    )
    assert ours == stock
