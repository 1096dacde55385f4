"""Titan's LoRA: adapters train and agree, the rest stays frozen; unmanaged ones are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torchtitan.components.lora import LoRAConverter

from tests.helpers.cluster import refusal_of, run_ranks
from tests.helpers.dry_run import arguments_of
from tests.helpers.training import Run, Runs, make_config, observed, titan_config
from titan_ext.api import parallelize, refuse_unmanaged_parameters
from titan_ext.fsdp.unmanaged import unmanaged_parameters
from titan_ext.run.trainer import extend_config

ADAPTERS = {
    f"layers.{layer}.attention.{linear}.lora_{part}.weight"
    for layer in range(2)
    for linear in ("wq", "wo")
    for part in "ab"
}
SPMD = observed(Run(world=2, ep=2, lora=8, layers=2, parallelize="submodule", keep_gradients=True))


def test_only_adapters_train(runs: Runs):
    """As in stock, which keeps the base frozen under partial_dtensor, but not under spmd_types."""
    ours = runs.get(SPMD)
    stock = runs.get(replace(SPMD, parallelize="stock", backend="partial_dtensor"))
    assert ours.ranks[0].gradients.keys() == ADAPTERS
    assert [rank.state_hash for rank in ours.ranks] == [rank.state_hash for rank in stock.ranks]


@pytest.mark.parametrize(
    ("layout", "same_batches"),
    [({"tp": 2}, {"world": 1, "ep": 1}), ({"ep": 1, "dp_replicate": 2}, {})],
    ids=str,
)
def test_adapters_have_the_same_gradients_in_another_layout(
    layout: dict[str, Any], same_batches: dict[str, Any], runs: Runs
):
    """Those that ranks hold whole are summed over them."""
    ours, expected = (runs.get(replace(SPMD, **keys)) for keys in (layout, same_batches))
    assert ours.ranks[0].grad_norms == ours.ranks[1].grad_norms
    gradients = ours.ranks[0].gradients
    assert gradients.keys() == ADAPTERS
    for name, gradient in expected.ranks[0].gradients.items():
        error = np.linalg.norm(gradients[name] - gradient) / np.linalg.norm(gradient)
        # Of 0.06 after a step of Adam, which takes the sign of what is rounded otherwise.
        assert error < 0.2, name


@pytest.mark.parametrize("target_modules", [None, ["wkv_a", "wq"]])
def test_linears_that_cannot_be_adapted_are_named(target_modules: list[str] | None):
    config = titan_config("deepseek_v3")
    converter = LoRAConverter.Config(target_modules=target_modules).build()
    config.model_spec.model = cast(Any, converter.convert(config.model_spec.model))
    with pytest.raises(ValueError, match=r"not .*wkv_a.* expected some of .*wq"):
        extend_config(config).build()


def _refusals(folder: Path) -> dict[str, Any]:
    # Embeddings and head are tied when FSDP comes; under spmd_types Titan ties them again after it.
    run = Run(model="qwen3", parallelize="submodule", backend="partial_dtensor", steps=1)
    config = make_config(run, folder)
    with torch.device("meta"):
        wrapped: Any = config.model_spec.model.build()
    trainer = config.build()
    (model,) = trainer.model_parts
    found: dict[str, Any] = {"before": unmanaged_parameters(model)}

    attention = model.layers["0"].attention
    attention.adapter = nn.Linear(4, 4, bias=False)
    found["added"] = unmanaged_parameters(model)
    found["trainer"] = refusal_of(trainer.train)
    del attention.adapter

    attention.again = attention.wo
    found["same module at another place"] = unmanaged_parameters(model)
    del attention.again
    attention.wo.alias = attention.wo.weight
    found["same parameter at another place"] = unmanaged_parameters(model)
    del attention.wo.alias
    attention.wo.weight = nn.Parameter(torch.zeros(4, 4))
    found["replaced"] = unmanaged_parameters(model)

    own = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    refuse_unmanaged_parameters([own])  # nothing sharded, nothing to say
    fully_shard(own[0])
    fully_shard(own)
    own(torch.ones(1, 4)).sum().backward()
    found["after a step"] = unmanaged_parameters(own)
    own.extend([nn.Linear(4, 4, bias=False) for _ in range(6)])
    found["own"] = refusal_of(refuse_unmanaged_parameters, [own])

    wrapped.layers["0"].attention.wo = FullyShardedDataParallel(
        nn.Linear(4, 4), device_id=torch.device("cpu")
    )
    arguments = arguments_of(config, trainer.parallel_dims) | {"dump_folder": str(folder)}
    found["fsdp1"] = refusal_of(parallelize, wrapped, **arguments)
    trainer.close()
    return found


def test_what_fsdp_does_not_manage_is_refused(tmp_path: Path):
    (found,) = run_ranks(_refusals, 1, tmp_path, log_folder=tmp_path / "logs")
    assert found["before"] == []
    assert found["added"] == ["layers.0.attention.adapter.weight"]
    assert found["trainer"].startswith(
        "layers.0.attention.adapter.weight: added to the model, or replaced, after fully_shard."
    )
    assert found["same module at another place"] == []
    assert found["same parameter at another place"] == ["layers.0.attention.wo.alias"]
    assert found["replaced"] == ["layers.0.attention.wo.weight"]
    assert found["after a step"] == []
    assert found["own"].startswith(
        "2.weight, 3.weight, 4.weight, 5.weight, 6.weight and 1 more: added to the model"
    )
    assert found["fsdp1"].startswith("layers.0.attention.wo is wrapped by FSDP1")
