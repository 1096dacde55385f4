"""Tokens travel in float8: what arrives, bytes on the wire, codec calls, and what is refused."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.distributed.spmd_types import set_current_spmd_mesh

from tests.helpers.cluster import run_ranks
from tests.helpers.collectives import PlannedStep
from tests.helpers.training import Run, Runs, observed
from titan_ext.components.exchange import AddUp, Finish, FinishSorted, Start, pack, unpack
from titan_ext.components.rows import Relay, exchange_once
from titan_ext.fp8.codec import Codec, dequantize, quantize
from titan_ext.fp8.saved_tensors import SavedTensorStore
from titan_ext.plan.stand_ins import PlannedTokenDispatcher

PLAIN = observed(Run(world=2, ep=2, global_batch=8, layers=3, parallelize="submodule"))
PLANNED = Run(
    world=64,
    ep=16,  # over two nodes
    global_batch=64,
    layers=2,  # one with experts
    experts=32,  # two a rank: of one expert no token has two
    narrow=True,
    parallelize="submodule",
    save_all_to_all="always",
)
_DIM = 256  # of the debug model
_COUNTS = 1024
"""Bytes that the exchange of token counts stays below, and that of tokens does not."""
_QUANTIZE, _DEQUANTIZE = "titan_ext::float8_quantize", "titan_ext::float8_dequantize"


ROWS = {
    "normal": lambda width: torch.randn(5, width),
    "zero": lambda width: torch.zeros(3, width),
    "inf": lambda width: torch.randn(2, width).index_fill_(1, torch.tensor([1]), torch.inf),
    "nan": lambda width: torch.randn(2, width).index_fill_(1, torch.tensor([0]), torch.nan),
    "subnormal": lambda width: torch.full((2, width), 1e-40),
    "huge": lambda width: torch.randn(2, width) * 1e38,
    "none": lambda width: torch.zeros(0, width),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("width", [64, 256, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_arrive_as_the_codec_has_them(kind: str, width: int, dtype: torch.dtype):
    rows = ROWS[kind](width).to(dtype)
    packed = pack(rows)
    assert packed.dtype == torch.uint8
    assert packed.shape == (len(rows), -(-(width + -(-width // 128)) // 16) * 16)
    sorted_rows = torch.arange(len(rows)).flip(0)
    expected = dequantize(quantize(rows, Codec()), Codec(), dtype)[sorted_rows]
    arrived = unpack(packed[sorted_rows], width, dtype)
    assert torch.equal(arrived.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert arrived.dtype == dtype


def test_to_store_what_arrived_rounds_nothing():
    rows = torch.randn(64, _DIM, dtype=torch.bfloat16)
    arrived = unpack(pack(rows), _DIM, torch.bfloat16)
    store = SavedTensorStore(Codec())
    entry = store.pack(arrived)
    assert store.memory_report.nbytes == 64 * (_DIM + 2)
    assert torch.equal(store.unpack(entry), arrived)


def _tokens(step: PlannedStep, in_backward: bool) -> list[int]:
    """Bytes of the exchanges of tokens."""
    exchanges = (e for e in step.collectives if e.kind == "all_to_all" and e.nbytes > _COUNTS)
    return [e.nbytes for e in exchanges if e.in_backward == in_backward]


def _codec_calls(step: PlannedStep) -> tuple[int, int]:
    return step.operations[_QUANTIZE], step.operations[_DEQUANTIZE]


def test_bytes_on_the_wire_and_codec_calls(runs: Runs):
    """Tokens and gradients of what comes back are packed; experts' outputs and tokens' are not.

    A layer packs and unpacks both: 2 calls each way. What a store would quantize of it comes in
    float8 and stays so, and no recompute packs again.
    """
    none, fp8 = (replace(PLANNED, ac=ac) for ac in ("none", "fp8"))
    of_node = replace(fp8, exchange_rows="node")
    in_float8 = (replace(run, exchange_dtype="float8") for run in (none, fp8, of_node))
    sends_none, sends, of_two_hops, plain = runs.planned(*in_float8, fp8)
    for in_backward in (False, True):
        ours, its = (_tokens(step, in_backward) for step in (sends, plain))
        assert len(ours) == len(its) > 0
        # A packed row is 256 values, 2 scales and 14 zeros, a plain one 512 bytes; one of two.
        assert 0.76 < sum(ours) / sum(its) < 0.77
    assert _codec_calls(sends_none) == (2, 2)
    # Alone the store makes 8 calls each way, and 7 with rows of nodes.
    assert _codec_calls(plain) == (8, 8)
    assert _codec_calls(sends) == (8 + 2 - 1, 8 + 2)
    assert _codec_calls(of_two_hops) == (7 + 2 - 1, 7 + 2)


@pytest.mark.parametrize(
    ("keys", "least"),
    [({"exchange_dtype": "float8"}, 0.98), ({"exchange_rows": "rank"}, 0.9999)],
)
def test_gradients_are_close(keys: dict[str, Any], least: float, runs: Runs):
    plain_run = replace(PLAIN, steps=1, traced_step=0, keep_gradients=True)
    both = replace(plain_run, **keys), plain_run
    ours, plain = (runs.get(run).ranks[0].gradients for run in both)
    assert ours.keys() == plain.keys()
    for name, mine in ours.items():
        x, y = mine.astype(np.float64).ravel(), plain[name].astype(np.float64).ravel()
        assert least < x @ y / (np.linalg.norm(x) * np.linalg.norm(y)), name
    assert not all(np.array_equal(mine, plain[name]) for name, mine in ours.items())


class _NarrowIntegers(TorchDispatchMode):
    """Notes operations that take or make integers of 8 to 32 bits with a sign."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, torch.Tensor) and x.dtype in (torch.int8, torch.int16, torch.int32):
                self.found.add(func._schema.name)
        return out


def _large_layers(cases: list[tuple[bool, str]]) -> list[tuple[int, int, set[str]]]:
    """Values of 16 x 4096 tokens for 8 experts each, of a dimension of 7168, and of gradients."""
    dist.init_process_group("fake", rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("ep",))
    return [_large_layer(mesh, *case) for case in cases]


def _large_layer(mesh: Any, float8: bool, rows: str) -> tuple[int, int, set[str]]:
    tokens, top_k, dim = 16 * 4096, 8, 7168
    router: Any = SimpleNamespace(num_experts=64, top_k=top_k, num_expert_groups=None)
    config = PlannedTokenDispatcher.Config(num_experts=64, top_k=top_k, router=router)
    routed: Any = nn.Module()
    routed.token_dispatcher = dispatcher = config.build()
    dispatcher.ep_mesh, dispatcher.sends_float8 = mesh, float8
    if rows == "rank":
        exchange_once(routed)
        assert dispatcher.sends_once
    with FakeTensorMode(), set_current_spmd_mesh(mesh), _NarrowIntegers() as narrow:
        x_TD = torch.zeros(tokens, dim, dtype=torch.bfloat16, requires_grad=True)
        scores_TK = torch.zeros(tokens, top_k, requires_grad=True)
        ids_TK = torch.zeros(tokens, top_k, dtype=torch.int64)
        turn = dispatcher.send(x_TD, scores_TK, ids_TK, torch.zeros(64, dtype=torch.int64))
        routed_RD, _ = dispatcher.receive(turn)
        dispatcher.send_back(turn, routed_RD * 2)
        dispatcher.collect(turn, x_TD).sum().backward()
        assert x_TD.grad is not None
        assert scores_TK.grad is not None
    return routed_RD.numel(), x_TD.grad.numel(), narrow.found


def test_indices_beyond_2_31(tmp_path: Path):
    """All are int64, with which torch's own operations take tensors of any size."""
    cases = [(float8, rows) for float8 in (False, True) for rows in ("expert", "rank")]
    (found,) = run_ranks(_large_layers, 1, cases, log_folder=tmp_path)
    for case, (values, gradients, narrow) in zip(cases, found, strict=True):
        assert values == 16 * 4096 * 8 * 7168 > 2**31, case
        assert gradients == 16 * 4096 * 7168, case
        assert narrow == set(), case


class _Loopback:
    """An exchange of a rank with itself."""

    float8 = ""

    def start(self, rows: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        self.rows = rows.detach().clone()
        return self.rows

    def arrived(self) -> torch.Tensor:
        return self.rows


def test_gradients_of_gradients_are_refused():
    x = torch.randn(4, 128, requires_grad=True)
    order, scores, here = torch.arange(4), torch.ones(4), [_Loopback(), _Loopback()]
    here[1].rows = x.detach()
    outputs = [
        AddUp.apply(x, order, 4, scores),
        Finish.apply(Start.apply(x, here[0]), here[0]),
        FinishSorted.apply(x, here[0], pack(x), order, 4),
        Relay.apply(x, *here, order, 4, False),
    ]
    for out in outputs:
        (grad,) = torch.autograd.grad((out**2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()
