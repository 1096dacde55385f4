"""Units that are gathered ahead and then do not run: no later forward may use those old weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cluster import run_ranks
from tests.helpers.training import narrow_attention
from titan_ext import api


def _largest_differences(wrap: Any) -> dict[str, float]:
    """Of logits after a part of the model ran and new weights were loaded, by part."""
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
    states = [
        {name: x * factor if x.ndim > 1 else x.clone() for name, x in model.state_dict().items()}
        for factor in (1.0, 2.0)
    ]

    def logits() -> torch.Tensor:
        return model(tokens, positions=torch.arange(32).expand(2, 32))

    def embedding() -> None:
        model.tok_embeddings(tokens)

    def model_without_two_blocks() -> None:
        left_out = {name: model.layers.pop(name) for name in ("1", "2")}
        logits()
        model.layers.update(left_out)

    def after(part: Callable[[], object]) -> torch.Tensor:
        model.load_state_dict(states[0])
        part()
        model.load_state_dict(states[1])
        return logits()

    parts = (embedding, model_without_two_blocks)
    with torch.no_grad(), get_spmd_context(parallel_dims=dims)():
        truth = after(logits)
        found = {part.__name__: (after(part) - truth).abs().max().item() for part in parts}
        model.load_state_dict(states[0])
        found["other weights"] = (logits() - truth).abs().max().item()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("wrap", ["block", "submodule"])
def test_no_forward_uses_what_another_has_gathered(wrap: str, tmp_path: Path):
    for found in run_ranks(_largest_differences, 2, wrap, log_folder=tmp_path):
        assert found.pop("other weights") > 0.1
        assert found == {"embedding": 0.0, "model_without_two_blocks": 0.0}
