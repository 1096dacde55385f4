"""A model after parallelize and initialisation, in every layout.

No parameter is left outside FSDP or unset, and its values do not depend on the layout.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchtitan.components.checkpointer.utils import canonical_fqn

from tests.helpers.checkpointing import digest
from tests.helpers.cluster import run_ranks
from tests.helpers.dry_run import look
from tests.helpers.training import Run, make_config
from titan_ext.fsdp.units import param_groups

LAYOUTS = [
    Run(model=model, world=world, ep=ep, backend=backend, parallelize=wrap, layers=2)
    for model in ("deepseek_v3", "qwen3")
    for world, ep in ((1, 1), (2, 2), (4, 1), (4, 2), (4, 4))
    if ep == 1 or model != "qwen3"
    for backend in ("spmd_types", "partial_dtensor")
    for wrap in ("block", "submodule")
]


def _inspect(run: Run, folder: Path) -> dict[str, Any]:
    trainer = make_config(run, folder).build()
    (model,) = trainer.model_parts
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    report = {
        "groups": look([model]),
        "unset": [
            name
            for name, t in [*model.named_parameters(), *model.named_buffers()]
            if t.is_meta or not torch.isfinite(torch.view_as_real(t) if t.is_complex() else t).all()
        ],
        "norms_are_ones": all(bool((p.to_local() == 1).all()) for p in norms) and bool(norms),
        "divide_factors": {group.gradient_divide_factor for group in param_groups(model.modules())},
        "values": {
            canonical_fqn(name): digest(param.full_tensor())
            for name, param in model.named_parameters()
        },
        "experts": [
            digest(p.to_local()) for n, p in model.named_parameters() if "inner_experts" in n
        ],
    }
    trainer.close()
    dist.barrier()
    return report


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Initial values of a model on one rank."""

    @functools.cache
    def values(model: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp(model)
        run = Run(model=model, parallelize="block", layers=2)
        return run_ranks(_inspect, 1, run, folder, log_folder=folder)[0]["values"]

    return values


_QUICK = [
    Run(world=4, ep=2, parallelize="submodule", layers=2),
    Run(world=2, ep=2, backend="partial_dtensor", parallelize="block", layers=2),
]
assert set(_QUICK) <= set(LAYOUTS)


@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=[pytest.mark.slow] * (run not in _QUICK)) for run in LAYOUTS],
    ids=str,
)
def test_sharded_and_initialised(run: Run, one_rank, tmp_path: Path):
    reports = run_ranks(_inspect, run.world, run, tmp_path, log_folder=tmp_path / "logs")
    for report in reports:
        assert report["groups"].plain_parameters == report["groups"].root_parameters == []
        assert report["groups"].fsdp_groups == report["groups"].planned_groups
        assert report["unset"] == []
        assert report["norms_are_ones"]
        assert report["divide_factors"] == {1.0}
        assert report["values"] == one_rank(run.model)
    if run.ep > 1:
        shards = [tuple(report["experts"]) for report in reports]
        assert len(set(shards)) == run.world, "two ranks hold the same experts"
