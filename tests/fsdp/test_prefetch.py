"""What is gathered and then not used, or kept: no later forward may use those old weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed.utils import get_spmd_context

from tests.helpers.cluster import run_ranks
from tests.helpers.training import small_spec
from titan_ext import api
from titan_ext.activation_checkpoint import FP8AC


def _of_each(function: Callable[[Any], Any], cases: tuple[str, ...]) -> list[Any]:
    dist.init_process_group("gloo")
    return [function(case) for case in cases]


def _largest_differences(wrap: Any) -> dict[str, float]:
    """Of logits after a part ran without gradients and weights changed, by part."""
    parallelism = api.ParallelismConfig(fsdp_wrap=wrap, fsdp_prefetch=2)
    model, dims = api.build_decoder(small_spec(3), parallelism=parallelism)
    tokens = torch.arange(2 * 32).view(2, 32) * 7 % 2048
    parameters: Any = model.parameters()
    sharded = [param.to_local() for param in parameters]
    weights = [shard.detach().clone() for shard in sharded]

    @torch.no_grad()
    def scale(factor: float) -> None:
        # As an optimizer does: a state dict that is loaded lets FSDP2 reshard.
        for shard, weight in zip(sharded, weights, strict=True):
            shard.copy_(weight * factor)

    def logits() -> torch.Tensor:
        return model(tokens, positions=torch.arange(32).expand(2, 32))

    def embedding() -> None:
        model.tok_embeddings(tokens)

    def model_without_two_blocks() -> None:
        left_out = {name: model.layers.pop(name) for name in ("1", "2")}
        logits()
        model.layers.update(left_out)

    def after(part: Callable[[], object], factor: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            part()
        scale(factor)
        out = logits()
        out.sum().backward()
        return out.detach()

    parts = (embedding, model_without_two_blocks, logits)
    with get_spmd_context(parallel_dims=dims)():
        after(logits)
        truth = after(lambda: None)
        found = {}
        for part in parts:
            after(lambda: None, 0.5)
            found[part.__name__] = (after(part) - truth).abs().max().item()
        found["other weights"] = (after(lambda: None, 0.5) - truth).abs().max().item()
    return found


def _after_a_failed_backward(ac: str) -> list[str]:
    """What the next forward says, then what differs in a step after the reset."""
    torch.autograd.set_multithreading_enabled(False)
    parallelism = api.ParallelismConfig(fsdp_wrap="submodule", expert_parallel_degree=2)
    policy: Any = FP8AC.Config() if ac == "fp8" else None
    model, dims = api.build_decoder(small_spec(3), parallelism=parallelism, ac_config=policy)
    tokens = torch.arange(2 * 32).view(2, 32) * 7 % 2048

    def gradients() -> dict[str, torch.Tensor]:
        with get_spmd_context(parallel_dims=dims)():
            logits = model(tokens, positions=torch.arange(32).expand(2, 32))
            logits.float().logsumexp(-1).mean().backward()
        params: Any = dict(model.named_parameters())
        found = {name: param.grad.to_local().clone() for name, param in params.items()}
        model.zero_grad()
        return found

    def fail(*_: Any) -> None:
        raise MemoryError("planted")

    truth, said = gradients(), []
    block: Any = model.layers["1"]
    units: Any = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in (block, block.attention):
        hook = module.register_forward_hook(lambda _, __, out: out.register_hook(fail) and None)
        with pytest.raises(MemoryError):
            gradients()
        hook.remove()
        with pytest.raises(RuntimeError) as error:
            gradients()
        said.append(str(error.value))
        cast(Any, model).reset_iter_state()
        for unit in units if torch.__version__ < "2.15" else ():  # it leaves their gradients there
            unit.unshard()
            unit.zero_grad()
            unit.reshard()
        again = gradients()
        said += [name for name in truth if not again[name].equal(truth[name])]
    return said


def test_a_step_after_a_failed_backward_needs_the_reset(tmp_path: Path):
    policies = ("none", "fp8")
    for of_rank in run_ranks(_of_each, 2, _after_a_failed_backward, policies, log_folder=tmp_path):
        for said in of_rank:
            assert len(said) == 2
            assert all("Call reset_iter_state() on the model" in sentence for sentence in said)


def test_no_forward_uses_what_another_has_gathered(tmp_path: Path):
    wraps = ("block", "submodule")
    for of_rank in run_ranks(_of_each, 2, _largest_differences, wraps, log_folder=tmp_path):
        for found in of_rank:
            assert found.pop("other weights") > 0.1
            assert found == dict.fromkeys(found, 0.0) != {}
