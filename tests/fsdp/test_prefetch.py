"""What is gathered and then not used, or kept: no later forward may use those old weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cluster import run_ranks
from tests.helpers.training import narrow_attention
from titan_ext import api


def _largest_differences(wrap: Any) -> dict[str, float]:
    """Of logits after a part ran without gradients and weights changed, by part."""
    import torch
    import torch.distributed as dist
    from torchtitan.distributed.utils import get_spmd_context
    from torchtitan.models.deepseek_v3 import model_registry

    dist.init_process_group("gloo")
    spec = model_registry("debugmodel")
    decoder: Any = spec.model
    decoder.layers = decoder.layers[:3]
    narrow_attention(decoder)
    parallelism = api.ParallelismConfig(fsdp_wrap=wrap, fsdp_prefetch=2)
    model, dims = api.build_decoder(spec, parallelism=parallelism)
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
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("wrap", ["block", "submodule"])
def test_no_forward_uses_what_another_has_gathered(wrap: str, tmp_path: Path):
    for found in run_ranks(_largest_differences, 2, wrap, log_folder=tmp_path):
        assert found.pop("other weights") > 0.1
        assert found == dict.fromkeys(found, 0.0) != {}
