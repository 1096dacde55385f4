"""A frozen base in NF4 under FSDP2 trains adapters as the same base rounded to NF4 does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torchao.quantization import NF4Tensor, to_nf4
from torchtitan.components.checkpointer.utils import canonical_fqn

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, make_config
from titan_ext.base import no_accelerator
from titan_ext.fsdp.names import find_frozen_linears
from titan_ext.fsdp.nf4 import quantize_at_first_forward
from titan_ext.fsdp.units import param_groups

RUN = Run(world=2, ep=2, lora=8, layers=2, parallelize="submodule", steps=2)
_CODE_NBYTES = 16 * 2  # NF4's table, in bf16
_MEAN_NBYTES = 2


@dataclass
class Trained:
    """What one rank has after training."""

    losses: list[float]
    norms: list[float]
    adapters: dict[str, Any]
    quantized: dict[str, tuple[int, int]]
    """Elements and bytes of each shard in NF4, by name."""
    gathered: int
    """Bytes that the all-gathers of quantised weights wrote, all together."""
    saved: dict[str, Any]
    """The quantised weights as a state dict has them, unsharded."""


def _train_rank(run: Run, rounded: bool, folder: Path) -> Trained:
    config: Any = make_config(run, folder)
    if not rounded:
        config.parallelism.fsdp_quantize_frozen = ["*"]
    with no_accelerator.layout_independent_init():
        trainer: Any = config.build()
    (model,) = trainer.model_parts
    linears = []
    if rounded:
        linears = find_frozen_linears(model, ["*"], shard_world=2, is_chunk=False)
        for linear in linears:
            weight: Any = model.get_submodule(linear).weight
            whole: Any = to_nf4(weight.full_tensor().to(torch.bfloat16))
            mine = whole.get_original_weight().chunk(run.world)[dist.get_rank()]
            weight.to_local().copy_(mine)
    losses: list[float] = []
    norms: list[float] = []

    def note(step, loss, max_loss, grad_norm, **others) -> None:
        losses.append(loss)
        norms.append(grad_norm)

    trainer.metrics_processor.log = note
    trainer.train()

    quantized = {}
    named = {canonical_fqn(name): param for name, param in model.named_parameters()}
    for name, param in named.items():
        local = param.to_local()
        if isinstance(local, NF4Tensor):
            inner, _ = local.__tensor_flatten__()
            quantized[name] = (local.numel(), sum(getattr(local, n).nbytes for n in inner))
    gathered = sum(
        output.numel() * output.itemsize
        for group in param_groups(model.modules())
        for param in group.fsdp_params
        if isinstance(param._sharded_local_tensor, NF4Tensor)
        for output in param.all_gather_outputs
    )
    if rounded:
        saved = {f"{name}.weight": named[f"{name}.weight"].full_tensor() for name in linears}
    else:
        state = model.state_dict()
        saved = {name: state[name].full_tensor().float() for name in quantized}
    result = Trained(
        losses=losses,
        norms=norms,
        adapters={n: p.detach().full_tensor().numpy() for n, p in named.items() if p.requires_grad},
        quantized=quantized,
        gathered=gathered,
        saved={name: weight.numpy() for name, weight in saved.items()},
    )
    trainer.close()
    dist.barrier()
    return result


def _train(run: Run, folder: Path, *, rounded: bool) -> list[Trained]:
    return run_ranks(_train_rank, run.world, run, rounded, folder, log_folder=folder / "logs")


def test_a_base_in_nf4_trains_as_one_rounded_to_it(tmp_path: Path):
    nf4 = _train(RUN, tmp_path / "nf4", rounded=False)
    rounded = _train(RUN, tmp_path / "rounded", rounded=True)
    for quantized, reference in zip(nf4, rounded, strict=True):
        assert quantized.losses == reference.losses
        assert quantized.norms == reference.norms
        assert quantized.adapters.keys() == reference.adapters.keys()
        for name, adapter in quantized.adapters.items():
            assert (adapter == reference.adapters[name]).all(), name
        assert quantized.saved.keys() == reference.saved.keys()
        for name, weight in quantized.saved.items():
            assert (weight == reference.saved[name]).all(), name

        kinds = {name.split(".")[-2] for name in quantized.quantized}
        assert {"wq", "wkv_b", "wo", "w1", "w2", "w3"} <= kinds
        gathered = 0
        for numel, nbytes in quantized.quantized.values():
            blocks = numel // 64
            shared = numel // 2 + blocks + 2 * (blocks // 256)
            assert nbytes == shared + _CODE_NBYTES + _MEAN_NBYTES
            gathered += 2 * shared
        assert quantized.gathered == gathered


def _loaded_rank() -> list[tuple[float, float, str]]:
    dist.init_process_group("gloo")
    return [_loaded(assign) for assign in (False, True)]


def _loaded(assign: bool) -> tuple[float, float, str]:
    """Errors of a weight that is loaded over one in NF4: of the state, and of what is gathered.

    Before that and after it, the weight is asked to train, which is refused.
    """
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False, dtype=torch.bfloat16))
    model.requires_grad_(False)
    fully_shard(model, reshard_after_forward=True)
    quantize_at_first_forward(model, ["0"])
    x = torch.eye(256, dtype=torch.bfloat16)

    def refuses_to_train() -> None:
        model.requires_grad_(True)
        with pytest.raises(ValueError, match="weight is asked to train"):
            model(x)
        model.requires_grad_(False)

    refuses_to_train()
    model(x)
    new = torch.randn(128, 256).bfloat16()
    expected: Any = to_nf4(new)
    expected = expected.get_original_weight()
    shard = distribute_tensor(new.float(), model[0].weight.device_mesh, model[0].weight.placements)
    model.load_state_dict({"0.weight": shard}, assign=assign)
    saved = model.state_dict()["0.weight"].full_tensor()
    gathered = model(x).T
    kind = type(model[0].weight.to_local()).__name__
    refuses_to_train()
    return (
        (saved.float() - expected.float()).abs().max().item(),
        (gathered.float() - expected.float()).abs().max().item(),
        kind,
    )


def test_a_state_dict_loads_over_weights_in_nf4(tmp_path: Path):
    results = run_ranks(_loaded_rank, 2, log_folder=tmp_path)
    assert results == [[(0.0, 0.0, "NF4Tensor")] * 2] * 2
