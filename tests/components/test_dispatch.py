"""The functional all-to-alls: the same exchange as Titan's, swapped in where they belong."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchtitan.config import TrainingConfig
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalTokenDispatcher,
    TorchAOTokenDispatcher,
)
from torchtitan.protocols import BaseModel

from tests.helpers.cluster import run_ranks
from tests.helpers.training import degrees, titan_config
from titan_ext.base.nodes import Nodes
from titan_ext.components.dispatch import FunctionalAllToAllTokenDispatcher, use_our_dispatchers
from titan_ext.components.exchange_policy import resolve_exchanges
from titan_ext.components.overlap import overlap_shared_experts
from titan_ext.parallelize.keys import ParallelismConfig
from titan_ext.parallelize.model_spec import extend_model_spec
from titan_ext.parallelize.passes import parallelize


def test_swaps_the_stock_dispatcher_of_every_moe_layer_once():
    spec = titan_config("deepseek_v3_mtp").model_spec
    for _ in range(2):  # the second time changes nothing
        use_our_dispatchers(spec)
    found = [config for _, config, _, _ in spec.traverse(LocalTokenDispatcher.Config)]
    assert len(found) == 6  # 5 MoE layers, one MTP layer
    for config in found:
        assert type(config) is FunctionalAllToAllTokenDispatcher.Config
        dispatcher = cast(AllToAllTokenDispatcher.Config, config)
        assert (dispatcher.num_experts, dispatcher.top_k) == (8, 3)
        assert isinstance(dispatcher.build(), FunctionalAllToAllTokenDispatcher)


def test_leaves_other_dispatchers_alone():
    spec = titan_config("deepseek_v3").model_spec
    layer = spec.model.layers[1]
    padded = TorchAOTokenDispatcher.Config(num_experts=8, top_k=3, pad_multiple=16)
    layer.moe.routed_experts.token_dispatcher = padded
    use_our_dispatchers(spec)
    assert layer.moe.routed_experts.token_dispatcher is padded


def test_extended_spec_keeps_everything_but_the_parallelize_function():
    spec = titan_config("qwen3_moe").model_spec
    ours: Any = extend_model_spec(spec)
    assert ours.parallelize_fn is parallelize
    for kept in ("name", "flavor", "model", "pipelining_fn"):
        assert getattr(ours, kept) is getattr(spec, kept), kept
    assert issubclass(ours.state_dict_adapter, spec.state_dict_adapter)
    assert extend_model_spec(ours) == ours


def test_refuses_a_model_by_name():
    spec = titan_config("qwen3").model_spec
    spec = dataclasses.replace(spec, name="flux", model=BaseModel.Config())
    with pytest.raises(ValueError, match=r"does not serve the model 'flux': its config is"):
        extend_model_spec(spec)


def _with_our_dispatcher() -> Any:
    """A MoE layer of the debug model."""
    use_our_dispatchers(spec := titan_config("deepseek_v3").model_spec)
    return spec.model.layers[1].moe.build()


def _moe_layers(cases: list[tuple[bool, bool]]) -> list[dict[str, Any]]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    return [_moe_layer(mesh, *case) for case in cases]


def _moe_layer(mesh: Any, overlaps: bool, checkpoints: bool) -> dict[str, Any]:
    """A step of a layer whose experts lie on two ranks; what ran between all-to-all and wait."""

    class Order(TorchDispatchMode):
        names: list[str]

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.__name__.partition(".")[0]
            if name in ("all_to_all_single", "wait_tensor") or name == "mm":
                self.names.append(name)
            return func(*args, **(kwargs or {}))

    rank = mesh.get_local_rank()
    torch.manual_seed(0)
    layer = _with_our_dispatcher()
    experts = layer.routed_experts.inner_experts
    for param in layer.parameters():
        torch.nn.init.normal_(param, std=0.02)
    for param in experts.parameters():
        param.data = param.data.chunk(2)[rank].clone()
    dispatcher = layer.routed_experts.token_dispatcher
    dispatcher.ep_mesh = mesh
    overlap_shared_experts(layer if overlaps else torch.nn.Module())
    x_BLD = torch.randn(2, 16, 256, generator=torch.Generator().manual_seed(rank))
    x_BLD.requires_grad_()
    order = Order()
    phases = {}
    with set_current_spmd_mesh(mesh), order:
        order.names = phases["forward"] = []
        out = checkpoint(layer, x_BLD, use_reentrant=False) if checkpoints else layer(x_BLD)
        order.names = phases["backward"] = []
        (out * torch.arange(256.0)).sum().backward()
        with torch.no_grad():
            order.names = []
            again = layer(x_BLD)  # nothing is left over from the step before
    assert x_BLD.grad is not None
    grads = [param.grad for param in layer.parameters()]
    return {
        "values": [t.numpy().tobytes() for t in (out.detach(), again, x_BLD.grad, *grads)],
        "overlapped": {phase: _between(names) for phase, names in phases.items()},
    }


def test_a_dispatcher_of_the_users_keeps_its_own_shared_experts():
    layer = titan_config("deepseek_v3").model_spec.model.layers[1].moe.build()
    dispatcher, own = layer.routed_experts.token_dispatcher, object()
    dispatcher.shared_experts = own
    overlap_shared_experts(layer)
    assert dispatcher.shared_experts is own
    assert layer.shared_experts._compiled_call_impl is None


def test_shared_experts_that_ran_ahead_of_other_tokens_run_again():
    layer = _with_our_dispatcher()
    overlap_shared_experts(layer)
    x_BLD, out = torch.zeros(1, 2, 256), object()
    for given, is_it in ((x_BLD, True), (x_BLD + 1, False)):
        layer.routed_experts.token_dispatcher.shared_experts._ahead[0] = x_BLD, out
        assert (layer.shared_experts(given) is out) is is_it


def _between(names: list[str]) -> list[int]:
    """GEMMs between each all-to-all and a wait that follows them."""
    exchanges = " ".join(names).split("all_to_all_single")[1:]
    return [text.partition("wait_tensor")[0].count("mm") * ("wait" in text) for text in exchanges]


def test_shared_experts_run_while_outputs_travel_back(tmp_path: Path):
    cases = [(overlaps, checkpoints) for checkpoints in (False, True) for overlaps in (False, True)]
    for found in run_ranks(_moe_layers, 2, cases, log_folder=tmp_path):
        for checkpoints, plain, overlapped in ((False, *found[:2]), (True, *found[2:])):
            assert plain["values"] == overlapped["values"]
            # Counts, tokens out, tokens back; in backward the last first. 3 GEMMs, and their 6.
            again = [0, 0, 3] if checkpoints else []
            assert overlapped["overlapped"] == {"forward": [0, 0, 3], "backward": [*again, 6, 0]}
            assert {n for counts in plain["overlapped"].values() for n in counts} == {0}


@pytest.mark.parametrize(
    ("value", "backend", "compiled", "ep", "saves"),
    [
        ("auto", "spmd_types", False, 4, False),  # as stock
        ("auto", "spmd_types", True, 4, True),
        ("auto", "partial_dtensor", False, 4, True),
        ("auto", "spmd_types", False, 8, True),  # across nodes
        ("always", "spmd_types", False, 4, True),
        ("never", "partial_dtensor", True, 8, False),
    ],
)
def test_what_saves_all_to_alls(value: Any, backend: Any, compiled: bool, ep: int, saves: bool):
    parallelism = ParallelismConfig(save_all_to_all=value, spmd_backend=backend)
    model = titan_config("deepseek_v3").model_spec.model
    dims = degrees(dp_shard=8, ep=ep, backend=backend)
    exchanges = resolve_exchanges(
        model, parallelism, TrainingConfig(), dims, Nodes(4, 4), compiled=compiled
    )
    assert exchanges.saved is saves


def test_no_clock_is_read_in_compiled_code():
    """In a logged step the dispatcher of a block that is compiled whole would break its graph."""
    dispatcher: Any = object.__new__(FunctionalAllToAllTokenDispatcher)
    dispatcher.meter = object()

    def timed(x: torch.Tensor) -> torch.Tensor:
        return x if dispatcher._stopwatch is None else x + 1

    assert timed(torch.zeros(())) == 1
    assert torch.compile(timed, backend="eager", fullgraph=True)(torch.zeros(())) == 0
