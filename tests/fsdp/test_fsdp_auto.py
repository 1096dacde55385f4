"""What "auto" means for FSDP's units, prefetch and buffers: a rule, and what the user has set."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder

from tests.helpers.training import titan_config
from titan_ext.fsdp.auto import choose
from titan_ext.fsdp.settings import FSDPSettings


def _dims(**sizes: int) -> ParallelDims:
    dims = {"ep": 1, "dp_shard": 1, "cp": 1, "tp": 1, "dp_replicate": 1, "pp": 1} | sizes
    return cast(ParallelDims, SimpleNamespace(**dims, pp_enabled=dims["pp"] > 1))


@pytest.fixture(scope="module")
def model() -> Decoder:
    with torch.device("meta"):
        return cast(Any, titan_config("deepseek_v3").model_spec).model.build()


@pytest.fixture(autouse=True)
def node_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")


def _chosen(settings: FSDPSettings) -> tuple[str, Any, Any]:
    return settings.wrap, settings.prefetch_backward, settings.reduce_scatter_buffers


_ACROSS = {"dp_shard": 64, "ep": 8}


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ({"dp_shard": 8}, ("block", "auto", 1)),
        ({"dp_shard": 8, "ep": 2}, ("submodule", "auto", 1)),  # on one node
        ({"dp_shard": 64, "ep": 64}, ("submodule", "auto", 1)),  # whole on a rank
        (_ACROSS, ("experts", 2, 2)),
        ({"dp_shard": 4096, "ep": 8}, ("experts", 2, 2)),
        ({"dp_shard": 2, "tp": 8, "ep": 8}, ("experts", 2, 2)),
    ],
)
def test_the_rule(dims: dict[str, int], expected: tuple, model: Decoder):
    chosen = choose(model, FSDPSettings(), _dims(**dims))
    assert _chosen(chosen) == expected
    assert (expected[0] in chosen.chosen) == (dims.get("ep", 1) > 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"wrap": "submodule"}, ("submodule", "auto", 3)),
        ({"wrap": "block"}, ("block", "auto", 1)),
        ({"wrap": "submodule", "reduce_scatter_buffers": 1}, ("submodule", "auto", 1)),
        ({"wrap": "experts", "reduce_scatter_buffers": 2}, ("experts", 2, 2)),
        ({"reduce_scatter_buffers": 1}, ("block", "auto", 1)),
        ({"reduce_scatter_buffers": 4}, ("experts", 2, 4)),
        ({"prefetch_backward": 1}, ("experts", 1, 2)),
        ({"reshard_groups": {"attention": "never"}}, ("submodule", "auto", 3)),
        ({"reshard_groups": {"block": "never", "experts": "always"}}, ("experts", 2, 2)),
        ({"symm_mem": True}, ("block", "auto", 1)),
        ({"symm_mem": True, "wrap": "submodule"}, ("submodule", "auto", 1)),
    ],
)
def test_what_the_user_has_set_stays(given: dict[str, Any], expected: tuple, model: Decoder):
    assert _chosen(choose(model, FSDPSettings(**given), _dims(**_ACROSS))) == expected


def test_compiled_blocks_hold_no_unit(model: Decoder):
    chosen = choose(model, FSDPSettings(), _dims(**_ACROSS), compiled=True)
    assert _chosen(chosen) == ("block", "auto", 1)


def test_a_torch_without_the_buffers(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_max_input_buffers")
    assert _chosen(choose(model, FSDPSettings(), _dims(**_ACROSS))) == ("block", "auto", 1)
    assert "from 2.15 on" in caplog.text
