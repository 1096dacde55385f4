"""Parameters that are not FSDP's like all others: replicated, ignored, or added late, refused."""

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, make_config

REPLICATE = ("router", "norms", "layers.1.attention.wq")
# Nothing is clipped: the norm of a whole tensor and that of its shards differ in the last bit.
EXPERTS = Run(
    world=2,
    ep=2,
    layers=2,
    narrow=True,
    parallelize="submodule",
    steps=2,
    accumulate=2,
    max_norm=1e9,
)
REPLICAS = replace(EXPERTS, ep=1, dp_replicate=2, accumulate=1)


@dataclass
class Trained:
    """What one rank has after training."""

    state: dict[str, str]
    """SHA-256 of each parameter and optimizer state, unsharded."""
    norms: list[float]
    replicated: list[str]
    optimized: int


def _train_rank(run: Run, folder: Path) -> Trained:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torchtitan.components.checkpointer.utils import canonical_fqn

    from titan_ext.base import no_accelerator

    config = make_config(run, folder)
    with no_accelerator.layout_independent_init():
        trainer = config.build()
    (model,) = trainer.model_parts
    norms: list[float] = []
    log = trainer.metrics_processor.log

    def note_norm(step, loss, max_loss, grad_norm, **others) -> None:
        norms.append(grad_norm)
        log(step, loss, max_loss, grad_norm, **others)

    trainer.metrics_processor.log = note_norm
    trainer.train()

    named = {canonical_fqn(name): param for name, param in model.named_parameters()}
    names = {param: name for name, param in named.items()}
    tensors: dict[str, Any] = dict(named)
    for optimizer in trainer.optimizers.optimizers:
        for param, state in optimizer.state.items():
            tensors |= {f"{names[param]}.{key}": value for key, value in state.items()}
    state = {}
    for name in sorted(tensors):
        value = tensors[name]
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        state[name] = hashlib.sha256(whole.detach().numpy().tobytes()).hexdigest()
    result = Trained(
        state=state,
        norms=norms,
        replicated=[
            name
            for name, param in named.items()
            if not any(placement.is_shard() for placement in param.placements)
        ],
        optimized=sum(
            len(group["params"])
            for optimizer in trainer.optimizers.optimizers
            for group in optimizer.param_groups
        ),
    )
    trainer.close()
    dist.barrier()
    dist.destroy_process_group()
    return result


def _train(run: Run, folder: Path) -> list[Trained]:
    return run_ranks(_train_rank, run.world, run, folder, log_folder=folder / "logs")


@pytest.mark.parametrize("run", [EXPERTS, pytest.param(REPLICAS, marks=pytest.mark.slow)], ids=str)
def test_replicated_trains_as_sharded(run: Run, tmp_path: Path):
    sharded = _train(run, tmp_path / "sharded")
    replicating = replace(run, replicate=REPLICATE, reduce_scatter_buffers=2)
    kept = _train(replicating, tmp_path / "kept")

    for reference, replicated in zip(sharded, kept, strict=True):
        assert reference.state == replicated.state == sharded[0].state
        assert replicated.norms == pytest.approx(reference.norms, rel=1e-5)
        assert reference.optimized == replicated.optimized
        assert "layers.1.attention.wq.weight.exp_avg" in reference.state
    if run.dp_replicate > 1:
        return  # one copy each, whatever is kept
    kinds = Counter(name.split(".")[-2] for name in kept[0].replicated)
    assert kinds["gate"] == kinds["wq"] == 1
    assert kinds["attention_norm"] == kinds["ffn_norm"] == kinds["kv_norm"] == 2
    assert sharded[0].replicated == []


def _own_loop(folder: Path) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    from torch.distributed.tensor import DTensor
    from torchtitan.config import TrainingConfig
    from torchtitan.distributed.utils import clip_grad_norm_, get_spmd_context
    from torchtitan.models.deepseek_v3 import model_registry

    from titan_ext import api

    dist.init_process_group("gloo")
    torch.autograd.set_multithreading_enabled(False)
    torch.manual_seed(42)
    training = TrainingConfig(mixed_precision_param="float32")
    ignored = "layers.1.attention_norm"
    built, parallel_dims = api.build_decoder(
        model_registry("debugmodel"),
        parallelism=api.ParallelismConfig(fsdp_wrap="submodule"),
        training=training,
        ignored=(ignored,),
    )
    model: Any = built
    attention: Any = model.layers["0"].attention
    found: dict[str, Any] = {}

    def error_of(call: Any, *args: Any, **named: Any) -> str:
        try:
            call(*args, **named)
        except ValueError as error:
            return str(error)
        return ""

    def forward() -> Any:
        tokens = (torch.arange(2 * 32).view(2, 32) * 7 + dist.get_rank()) % 2048
        return model(tokens, positions=torch.arange(32).expand(2, 32)).float().square().mean()

    whole = attention.wo.weight
    with get_spmd_context(parallel_dims=parallel_dims)():
        attention.wo.weight = nn.Parameter(torch.ones(4, 4))
        found["replaced"] = error_of(forward)
        attention.wo.weight = whole
        attention.late = nn.Linear(4, 4)
        found["late"] = error_of(forward)
        del attention.late
        optimizer = torch.optim.AdamW(
            [p for name, p in model.named_parameters() if not name.startswith(ignored)], lr=1e-2
        )
        for _ in range(2):
            forward().backward()
            found["norm"] = clip_grad_norm_(
                [p for p in model.parameters() if isinstance(p, DTensor)], max_norm=1.0
            ).item()
            found["ignored gradient"] = model.get_parameter(f"{ignored}.weight").grad.sum().item()
            optimizer.step()
            optimizer.zero_grad()
    found["ignored is whole"] = not isinstance(model.get_parameter(f"{ignored}.weight"), DTensor)
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_own_loop(tmp_path: Path):
    first, second = run_ranks(_own_loop, 2, tmp_path, log_folder=tmp_path / "logs")
    for found in (first, second):
        assert found["replaced"].startswith("layers.0.attention.wo.weight: added to the model, or")
        assert found["late"].startswith(
            "layers.0.attention.late.weight, layers.0.attention.late.bias: added to"
        )
        assert found["ignored is whole"]
    assert first["norm"] == second["norm"]
    assert first["ignored gradient"] != second["ignored gradient"]
