"""What "auto" means for FSDP's units, prefetch and buffers: a rule, and what the user has set."""

from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.common.decoder import Decoder

from tests.helpers.training import degrees, meta_model
from titan_ext.base.nodes import Nodes
from titan_ext.fsdp.auto import AUTO_BACKWARD, Choice, choose
from titan_ext.fsdp.resolve import resolve_sharding
from titan_ext.fsdp.settings import FSDPSettings


@pytest.fixture(scope="module")
def model() -> Decoder:
    return meta_model()


NODES = Nodes(ranks=8, nvlink_domain=8)


def _chosen(choice: Choice) -> tuple[str, int | None, int]:
    backward = choice.backward
    assert backward == AUTO_BACKWARD or backward.from_attention is None
    return choice.wrap, None if backward == AUTO_BACKWARD else backward.units, choice.buffers


_ACROSS = {"dp_shard": 64, "ep": 8}


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ({"dp_shard": 8}, ("block", None, 1)),
        ({"dp_shard": 8, "ep": 2}, ("block", None, 1)),  # on one node
        ({"dp_shard": 64, "ep": 64}, ("block", None, 1)),  # whole on a rank
        (_ACROSS, ("experts", 2, 2)),
        ({"dp_shard": 4096, "ep": 8}, ("experts", 2, 2)),
        ({"dp_shard": 2, "tp": 8, "ep": 8}, ("experts", 2, 2)),
        (_ACROSS | {"compiles_blocks": True}, ("submodule", None, 3)),
    ],
)
def test_the_rule(dims: dict[str, int], expected: tuple, model: Decoder):
    of = {key: value for key, value in dims.items() if key != "compiles_blocks"}
    compiles = "compiles_blocks" in dims
    chosen = choose(model, FSDPSettings(), degrees(**of), NODES, compiles_blocks=compiles)
    assert _chosen(chosen) == expected
    assert (expected[0] in chosen.why) == (dims.get("ep", 1) > 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"wrap": "submodule"}, ("submodule", None, 3)),
        ({"wrap": "block"}, ("block", None, 1)),
        ({"wrap": "experts"}, ("experts", 2, 2)),
        ({"reshard_groups": {"attention": "never"}}, ("submodule", None, 3)),
        ({"reshard_groups": {"block": "never", "experts": "always"}}, ("experts", 2, 2)),
        ({"symm_mem": True}, ("block", None, 1)),
        ({"symm_mem": True, "wrap": "submodule"}, ("submodule", None, 1)),
    ],
)
def test_what_the_user_has_set_stays(given: dict[str, Any], expected: tuple, model: Decoder):
    assert _chosen(choose(model, FSDPSettings(**given), degrees(**_ACROSS), NODES)) == expected


def test_a_dense_model_has_nothing_to_split():
    """Expert parallelism may be on all the same: Titan takes it, and the ranks shard as without."""
    choice = choose(meta_model("llama3"), FSDPSettings(), degrees(**_ACROSS), NODES)
    assert _chosen(choice) == ("block", None, 1)


def test_a_torch_without_the_buffers(model: Decoder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_max_input_buffers")
    chosen = choose(model, FSDPSettings(), degrees(**_ACROSS), NODES)
    assert _chosen(chosen) == ("block", None, 1)
    assert "from 2.14.1 on" in chosen.why


def test_a_size_of_the_user_holds_in_both_directions(model: Decoder):
    def ahead(prefetch: int | str) -> list[int]:
        settings = FSDPSettings(prefetch=prefetch)
        plan = resolve_sharding(model, settings, degrees(**_ACROSS), NODES)
        assert (plan.wrap, plan.reduce_scatter_buffers) == ("experts", 2)
        return [len(unit.backward_prefetch) for unit in plan.units]

    assert max(ahead(0)) == 0
    assert sum(ahead(1)) < sum(ahead("auto")) == sum(ahead(2))
