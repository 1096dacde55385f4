"""Titan's LoRA: adapters train and agree, the rest stays frozen; unmanaged ones are refused."""

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
from torchtitan.components.lora import LoRAConverter

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, make_config, state_hash, titan_config, train
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.components.lora import wrong_targets
from titan_ext.run.trainer import extend_config

ADAPTERS = ("lora_a.weight", "lora_b.weight")
SPMD = Run(world=2, ep=2, lora=8, layers=2, narrow=True, parallelize="submodule", steps=2)
DTENSOR = replace(SPMD, backend="partial_dtensor")


@dataclass
class Adapted:
    """What one rank has after training."""

    state_hash: str
    before: dict[str, str]
    """SHA-256 of the rank's own part of each parameter, as it was initialised."""
    after: dict[str, str]
    trainable: list[str]
    optimized: list[str]
    gradients: dict[str, str]
    """SHA-256 of the rank's own part of each gradient of the last step."""


def _train_rank(run: Run, replicate: int, folder: Path) -> Adapted:
    import torch.distributed as dist
    from torchtitan.components.checkpointer.utils import canonical_fqn

    from titan_ext.base import no_accelerator

    config = make_config(run, folder)
    config.parallelism.data_parallel_replicate_degree = replicate
    with no_accelerator.layout_independent_init():
        trainer = config.build()
    (model,) = trainer.model_parts
    named = {canonical_fqn(name): param for name, param in model.named_parameters()}
    before = {name: _digest(param) for name, param in named.items()}
    gradients = {}

    def keep_gradients(*_) -> None:
        gradients.update({n: _digest(p.grad) for n, p in named.items() if p.grad is not None})

    trainer.optimizers.register_step_pre_hook(keep_gradients)
    trainer.train()
    names = {param: name for name, param in named.items()}
    result = Adapted(
        state_hash=state_hash(trainer),
        before=before,
        after={name: _digest(param) for name, param in named.items()},
        trainable=[name for name, param in named.items() if param.requires_grad],
        optimized=[
            names[param]
            for optimizer in trainer.optimizers.optimizers
            for group in optimizer.param_groups
            for param in group["params"]
        ],
        gradients=gradients,
    )
    trainer.close()
    dist.barrier()
    dist.destroy_process_group()
    return result


def _digest(tensor: Any) -> str:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return hashlib.sha256(local.detach().contiguous().numpy().tobytes()).hexdigest()


def _train(run: Run, folder: Path, *, replicate: int = 1) -> list[Adapted]:
    return run_ranks(_train_rank, run.world, run, replicate, folder, log_folder=folder / "logs")


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """State hashes of stock Titan where it keeps the base frozen."""
    folder = tmp_path_factory.mktemp("stock")
    return [rank.state_hash for rank in train(replace(DTENSOR, parallelize="stock"), folder).ranks]


@pytest.mark.parametrize(
    "run",
    [
        SPMD,
        pytest.param(DTENSOR, marks=pytest.mark.slow),
        replace(SPMD, tp=2),
        pytest.param(replace(DTENSOR, tp=2), marks=pytest.mark.slow),
        pytest.param(replace(SPMD, ac=FP8AC.Config()), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_only_adapters_train(run: Run, stock: list[str], tmp_path: Path):
    ranks = _train(run, tmp_path)
    for rank in ranks:
        adapters = {name for name in rank.before if name.endswith(ADAPTERS)}
        assert len(adapters) == 2 * 2 * run.layers
        assert set(rank.trainable) == set(rank.gradients) == adapters
        assert sorted(rank.optimized) == sorted(adapters)
        assert {name for name in rank.before if rank.before[name] != rank.after[name]} == adapters
    if run in (SPMD, DTENSOR):
        # Under spmd_types stock trains the whole model, so both are held against partial_dtensor.
        assert [rank.state_hash for rank in ranks] == stock
    if run.tp > 1:
        _assert_ranks_agree(ranks, ("wq.lora_a.weight", "wo.lora_b.weight"), 2 * run.layers)


def test_replicated_adapters_agree(tmp_path: Path):
    run = replace(SPMD, ep=1)
    _assert_ranks_agree(_train(run, tmp_path, replicate=2), ADAPTERS, 4 * run.layers)


def _assert_ranks_agree(ranks: list[Adapted], replicated: tuple[str, ...], count: int) -> None:
    first, second = (
        {name: (grad, rank.after[name]) for name, grad in rank.gradients.items()} for rank in ranks
    )
    names = [name for name in first if name.endswith(replicated)]
    assert len(names) == count
    assert {name: first[name] for name in names} == {name: second[name] for name in names}


@pytest.mark.parametrize("target_modules", [None, ["wkv_a", "wq"]])
def test_linears_that_cannot_be_adapted_are_named(target_modules: list[str] | None):
    config = titan_config("deepseek_v3")
    assert config.model_spec is not None
    converter = LoRAConverter.Config(target_modules=target_modules).build()
    config.model_spec.model = cast(Any, converter.convert(config.model_spec.model))
    with pytest.raises(ValueError, match=r"not .*wkv_a.* expected some of .*wq"):
        extend_config(config).build()


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (
            ["wq", "inner_experts"],
            "^inner_experts of this model can have no adapter; .*gate, lm_head",
        ),
        (["tok_embeddings"], "^tok_embeddings of this model"),
        (["wqq"], "did you mean 'wq'"),
        ([], "^it is empty"),
        (["wq", "w1"], "^$"),
        (None, "^$"),
    ],
)
def test_targets_that_no_linear_has_are_named(targets: list[str] | None, said: str):
    config = titan_config("deepseek_v3")
    assert config.model_spec is not None
    converter = LoRAConverter.Config(target_modules=targets)
    model = cast(Any, converter.build().convert(cast(Any, config.model_spec.model)))
    assert re.search(said, wrong_targets(model, converter))


def _refusals(folder: Path) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    from titan_ext.api import parallelize, refuse_unmanaged_parameters
    from titan_ext.fsdp.unmanaged import unmanaged_parameters

    # Embeddings and head are tied when FSDP comes; under spmd_types Titan ties them again after it.
    run = Run(model="qwen3", parallelize="submodule", backend="partial_dtensor", steps=1)
    config = make_config(run, folder)
    assert config.model_spec is not None
    with torch.device("meta"):
        wrapped: Any = config.model_spec.model.build()
    trainer = config.build()
    (model,) = trainer.model_parts
    found: dict[str, Any] = {"before": unmanaged_parameters(model)}

    attention = model.layers["0"].attention
    attention.adapter = nn.Linear(4, 4, bias=False)
    found["added"] = unmanaged_parameters(model)
    try:
        trainer.train()
    except ValueError as error:
        found["trainer"] = str(error)
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
    try:
        refuse_unmanaged_parameters([own])
    except ValueError as error:
        found["own"] = str(error)

    wrapped.layers["0"].attention.wo = FullyShardedDataParallel(
        nn.Linear(4, 4), device_id=torch.device("cpu")
    )
    try:
        parallelize(
            wrapped,
            parallel_dims=trainer.parallel_dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=config.activation_checkpoint,
            dump_folder=str(folder),
        )
    except ValueError as error:
        found["fsdp1"] = str(error)
    trainer.close()
    dist.destroy_process_group()
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
