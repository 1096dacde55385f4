"""The examples of the docs run as they stand."""

import os
import re
from pathlib import Path
from typing import Any, cast

from tests import muon
from tests.cluster import run_ranks
from tests.toml_files import Loader
from titan_ext.optim.param_groups import resolve_groups

DOCS = Path(__file__).parent.parent / "docs"


def _example(name: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), flags=re.DOTALL)
    return code


def _run_own_loop() -> list[float]:
    from torchtitan.tools.logging import init_logger

    init_logger()
    names: dict[str, Any] = {}
    exec(_example("own_loop.md"), names)
    return names["losses"]


def test_own_loop(tmp_path: Path):
    ranks = run_ranks(_run_own_loop, 2, log_folder=tmp_path)
    for losses in ranks:
        assert losses[-1] < losses[0] - 0.5
    assert "submodule, 14 units in 19 groups" in (tmp_path / "rank_0.log").read_text()


def _run_your_model(wrap: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    from titan_ext import api

    # dataclass() looks its class' module up by name
    names: dict[str, Any] = {"__name__": "tests.test_docs_examples"}
    exec(_example("your_model.md"), names)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, _ = api.build_decoder(
        names["my_spec"](),
        parallelism=api.ParallelismConfig(
            fsdp_wrap=cast(Any, wrap), spmd_backend="partial_dtensor"
        ),
    )
    tokens = torch.arange(64).view(2, 32) + int(os.environ["RANK"])
    loss = model(tokens).float().pow(2).sum()
    loss.backward()
    gains = {
        name: cast(Any, param.grad).full_tensor().tolist()
        for name, param in model.named_parameters()
        if "gain" in name
    }
    units = [n for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    dist.destroy_process_group()
    return {"loss": loss.item(), "gains": gains, "units": units}


def test_your_model_goes_through_the_same_function(tmp_path: Path):
    block, submodule = (
        run_ranks(_run_your_model, 2, wrap, log_folder=tmp_path / wrap)
        for wrap in ("block", "submodule")
    )
    assert "layers.0.attention" in submodule[0]["units"]
    assert "layers.0" in submodule[0]["units"], "the gain is a group of the block"
    assert "layers.0.attention" not in block[0]["units"]
    assert len(block[0]["gains"]) == 6
    for a, b in zip(block, submodule, strict=True):
        assert (a["loss"], a["gains"]) == (b["loss"], b["gains"])
    assert any(any(gain) for gain in block[0]["gains"].values())


def test_muon_from_a_file(config: Loader):
    """The matrix trains with this pattern (tests.muon)."""
    import torch

    text = (DOCS / "optimizers.md").read_text()
    (toml,) = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    ours = config(toml)
    assert ours.optimizer.param_groups[0].pattern == muon.PATTERN
    assert ours.model_spec is not None
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in ours.model_spec.model.build().named_parameters()}
    matrices, rest = resolve_groups(shapes, ours.optimizer.param_groups)
    assert {"tok_embeddings.weight", "lm_head.weight"} <= set(rest)
    assert all(len(shapes[name]) == 1 for name in rest if name.startswith("layers."))
    # attention, the dense layer; attention, router, shared and routed experts
    assert len(matrices) == (4 + 3) + 26 * (4 + 1 + 3 + 3)
