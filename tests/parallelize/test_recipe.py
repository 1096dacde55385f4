"""The recipe is made before any pass, without a process group, and is what the passes then do."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from tests.helpers.cluster import run_ranks
from tests.helpers.dry_run import arguments_of, build_on_meta
from tests.helpers.training import Run, make_config
from titan_ext.base.nodes import Nodes
from titan_ext.fsdp.plan import FSDPPlan
from titan_ext.fsdp.units import param_groups
from titan_ext.parallelize import passes
from titan_ext.parallelize.recipe import Recipe, recipe_of, resolve
from titan_ext.plan.dry_run import dry_run
from titan_ext.plan.stand_ins import as_rank

_JOB = Run(world=16, ep=4, narrow=True, global_batch=64, ac="fp8", parallelize="auto")
_FLOAT8: dict[str, Any] = {"exchange_dtype": "float8", "float8_all_gather": "experts"}
_JOBS: dict[str, dict[str, Any]] = {
    "nodes of 2, one row a node, halves": {
        "exchange_rows": "node",
        "overlap_exchanges": "halves",
    },
    "TP above EP": {"tp": 4, "ep": 2, "replicate": ("norms",)},
    "TP below EP, partial_dtensor": {"tp": 2, "ep": 8, "backend": "partial_dtensor"},
    "replicated routers, float8 experts": {"replicate": ("router", "norms"), **_FLOAT8},
    "HSDP, float8 everywhere": {"dp_replicate": 2, **_FLOAT8},
    "more ranks than experts": {"ep": 1, "parallelize": "experts", "experts": 5},
    "a pipeline": {"pp": 2, "layers": 6, "save_all_to_all": "never"},
    "a stage without blocks": {"pp": 4, "cp": 2, "layers": 2, "backend": "partial_dtensor"},
    "tied embeddings, no experts": {"model": "qwen3", "tp": 2, "ep": 1, "replicate": ("norms",)},
    "multi-token prediction": {"model": "deepseek_v3_mtp", "reshard": "always"},
    "biases, sinks": {
        "model": "gpt_oss",
        "ep": 2,
        "ac": "selective",
        "float8_all_gather": "blocks",
    },
}


def _resolved_by_itself(config: Any, world: int) -> Recipe:
    """As nothing else exists: from the config and the model on the meta device."""
    assert not dist.is_initialized()
    model = build_on_meta(config)
    dims = ParallelDims.from_config(config.parallelism, world)
    arguments: dict[str, Any] = {**arguments_of(config, dims), "nodes": Nodes(2, 2)}
    before = {name: (id(p), p.shape) for name, p in model.named_parameters()}, repr(config)
    recipe = resolve(model, **arguments)
    assert resolve(model, **arguments) == recipe
    assert before == (
        {name: (id(p), p.shape) for name, p in model.named_parameters()},
        repr(config),
    )
    assert not dist.is_initialized()
    return recipe


def _compare(run: Run, rank: int, folder: Path) -> list[str]:
    """What differs between the recipe and what the passes made of the model."""
    found: list[str] = []
    shard_model_axes = passes._shard_model_axes
    with as_rank(run.world, rank, ranks_per_node=2, nvlink_domain=2):
        config: Any = make_config(run, folder)
        alone = None if run.pp > 1 else _resolved_by_itself(config, run.world)

        def sharded(model: Any, dims: ParallelDims) -> None:
            shard_model_axes(model, dims)
            again = resolve(model, **arguments_of(config, dims), nodes=Nodes(2, 2))
            if again != recipe_of(model):
                found.append("after TP and EP")

        cast(Any, passes)._shard_model_axes = sharded
        for part in dry_run(config, run.world, rank, step=False).model_parts:
            recipe = recipe_of(part)
            assert recipe is not None
            if alone is not None and recipe != alone:
                found.append("by itself")
            found += _sharded_otherwise(part, recipe.fsdp)
    return found


def _sharded_otherwise(model: Any, plan: FSDPPlan) -> list[str]:
    """The groups of FSDP2 whose parameters, shards or reshard are not those of the plan."""
    found = []
    for unit in plan.decoder_units:
        groups = param_groups([unit.fsdp_module(model)])
        for planned, group in zip(unit.groups, groups, strict=True):
            world = planned.shard_world
            shards = [p.padded_numel(world) // world for p in planned.params]
            made = [p.padded_sharded_param_size.numel() for p in group.fsdp_params]
            names = [p.name.rsplit(".", 1)[1] for p in planned.params]
            said = [p._module_info.param_name for p in group.fsdp_params]
            mesh = cast(Any, group.mesh_info)
            freed = group._reshard_after_forward
            if (shards, names, world) != (made, said, mesh.shard_mesh_size) or (
                freed != bool(unit.reshard_after_forward)
            ):
                found.append(f"{unit.name}: {planned} is {made}, {said}, {freed}")
    return found


@pytest.mark.parametrize("name", _JOBS)
def test_the_recipe_is_what_the_passes_do(name: str, tmp_path: Path):
    run = replace(_JOB, **_JOBS[name])
    (found,) = run_ranks(_compare, 1, run, run.world - 1, tmp_path, log_folder=tmp_path / "logs")
    assert found == []


def _units(runs: Sequence[Run], folder: Path) -> list[str]:
    with as_rank(16, 0, ranks_per_node=2, nvlink_domain=2):
        configs: list[Any] = [make_config(run, folder) for run in runs]
        return [_resolved_by_itself(config, 16).fsdp.wrap for config in configs]


def test_blocks_that_are_compiled_whole_have_no_unit_of_experts(tmp_path: Path):
    """Exchanges order the blocks of a model with shared experts: those are in pieces anyway."""
    run = replace(_JOB, ac="selective", compiled=True)
    no_shared = replace(run, model="qwen3_moe", ep=2)
    runs = [
        run,
        replace(run, compiled=False),
        replace(run, overlap_exchanges="none"),
        no_shared,
        replace(no_shared, overlap_exchanges="halves"),
    ]
    (found,) = run_ranks(_units, 1, runs, tmp_path, log_folder=tmp_path / "logs")
    assert found == ["experts", "experts", "submodule", "submodule", "experts"]
