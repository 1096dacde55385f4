"""A token goes to a rank or a node once: the same sums, counted rows, and what is refused."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.config import TrainingConfig
from torchtitan.distributed.spmd_types import set_current_spmd_mesh

from tests.helpers.cluster import RankError, run_ranks
from tests.helpers.training import Run, Runs, degrees, observed, titan_config, train
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.base.nodes import Nodes
from titan_ext.components.dispatch import FunctionalAllToAllTokenDispatcher
from titan_ext.components.exchange import Inside
from titan_ext.components.exchange_policy import ranks_of_token, resolve_exchanges
from titan_ext.components.rows import Hops, TokenRows, _experts_of, exchange_once, hops_across_nodes
from titan_ext.fp8.codec import Codec, use_codec
from titan_ext.parallelize.keys import ParallelismConfig
from titan_ext.plan.stand_ins import PlannedTokenDispatcher
from titan_ext.run.trainer import extend_config

_T, _D = 24, 16


def _routing(kind: str, experts: int, top_k: int, rank: int, ranks: int) -> torch.Tensor:
    """Expert ids ``(T, K)`` of the tokens of ``rank``."""
    generator = torch.Generator().manual_seed(rank)
    local = experts // ranks
    if kind == "one rank":  # of all tokens; the others get none
        choices = [torch.randperm(local, generator=generator)[:top_k] for _ in range(_T)]
    elif kind == "a rank each":
        choices = [token % ranks * local + torch.arange(top_k) for token in range(_T)]
    else:
        choices = [torch.randperm(experts, generator=generator)[:top_k] for _ in range(_T)]
    return torch.stack(choices)


class _Inputs:
    """What one rank has: tokens, scores, expert ids, and the weights of all experts."""

    def __init__(self, kind: str, experts: int, top_k: int, ranks: int, rank: int, dtype: Any):
        self.ids_TK = _routing(kind, experts, top_k, rank, ranks)
        generator = torch.Generator().manual_seed(100 + rank)
        self.x_TD = torch.randn(_T, _D, generator=generator, dtype=torch.float64).to(dtype)
        self.scores_TK = torch.rand(_T, top_k, generator=generator, dtype=torch.float64)
        self.scores_TK = self.scores_TK.to(torch.promote_types(dtype, torch.float32))
        weights = torch.Generator().manual_seed(7)
        self.w_EDD = torch.randn(experts, _D, _D, generator=weights, dtype=torch.float64) / 4
        self.w_EDD = self.w_EDD.to(dtype)


class _Exchanges(TorchDispatchMode):
    """Counts all-to-alls, and notes how many rows of tokens each sends."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.rows = 0, list[int]()

    def __torch_dispatch__(self, func, types, args: Any = (), kwargs=None):
        if func.__name__.startswith("all_to_all_single"):
            self.count += 1
            if args[0].dim() == 2 and args[0].is_floating_point():
                self.rows.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def _loss(out_TD: torch.Tensor) -> torch.Tensor:
    return (out_TD * torch.arange(1.0, _D + 1, dtype=out_TD.dtype)).sum()


def _exchange_once(routed: Any, mesh: Any, nodes: int) -> None:
    dims: Any = SimpleNamespace(ep=mesh.size(), get_optional_mesh=lambda names, **_: mesh)
    exchange_once(routed, hops_across_nodes(dims, nodes) if nodes else ())


@dataclass(frozen=True)
class _Case:
    """A layer on ``ranks``, with an even one in each of two nodes if ``rows`` is "node".

    With ``float8`` "lossless" rows travel packed as those in float8 do, by a codec that changes
    nothing. ``in_steps`` sends and receives as halves do.
    """

    ranks: int
    rows: str
    shape: tuple[str, int, int]
    in_steps: bool
    dtype: torch.dtype = torch.float64
    float8: Literal["", "e4m3", "lossless"] = ""


def _both(ranks: int, rows: str, shape: tuple[str, int, int], **keys: Any) -> list[_Case]:
    return [_Case(ranks, rows, shape, in_steps, **keys) for in_steps in (False, True)]


SUMS = [
    *_both(2, "expert", ("one rank", 8, 3)),
    *_both(2, "rank", ("random", 8, 3)),
    *_both(2, "rank", ("one rank", 8, 3)),
    *_both(4, "rank", ("random", 16, 4)),
    *_both(4, "rank", ("a rank each", 16, 4)),
    *_both(4, "rank", ("random", 4, 2)),  # one expert a rank: nothing to gain
    *_both(4, "node", ("random", 16, 4)),
    *_both(4, "node", ("one rank", 16, 4)),
    *_both(4, "node", ("random", 4, 2)),
]
_LOSSLESS: Any = {"dtype": torch.float32, "float8": "lossless"}
PACKED = [
    *_both(2, "expert", ("random", 8, 3), **_LOSSLESS),
    *_both(2, "rank", ("random", 8, 3), **_LOSSLESS),
    *_both(2, "rank", ("one rank", 8, 3), **_LOSSLESS),
    *_both(4, "node", ("random", 16, 4), **_LOSSLESS),
]
HOPS = [
    _Case(4, rows, ("random", 16, 4), True, torch.bfloat16, "e4m3") for rows in ("rank", "node")
]
BF16 = [_Case(2, rows, ("random", 8, 3), False, torch.bfloat16) for rows in ("expert", "rank")]


def _layers(cases: list[_Case]) -> dict[_Case, dict[str, Any]]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("ep",))
    return {case: _layer(case, mesh) for case in cases}


def _found(cases: list[_Case], folder: Path) -> dict[_Case, list[dict[str, Any]]]:
    """What each rank has of each case; all cases of as many ranks run in one start of them."""
    results = {}
    for ranks in {case.ranks for case in cases}:
        of_ranks = run_ranks(
            _layers, ranks, [case for case in cases if case.ranks == ranks], log_folder=folder
        )
        results |= {case: [each[case] for each in of_ranks] for case in of_ranks[0]}
    return results


def _layer(case: _Case, mesh: Any) -> dict[str, Any]:
    """Dispatch, experts and combine of one layer, and its backward, on this rank."""
    rank, ranks = mesh.get_local_rank(), case.ranks
    kind, experts, top_k = case.shape
    config = FunctionalAllToAllTokenDispatcher.Config(num_experts=experts, top_k=top_k)
    routed: Any = nn.Module()
    routed.token_dispatcher = dispatcher = config.build()
    dispatcher.ep_mesh = mesh
    dispatcher.sends_float8 = bool(case.float8)
    nodes = 2 if case.rows == "node" else 0
    if case.rows != "expert":
        _exchange_once(routed, mesh, nodes)
        assert bool(dispatcher.sends_once) == (min(top_k, experts // (nodes or ranks)) > 1)
    inputs = _Inputs(kind, experts, top_k, ranks, rank, case.dtype)
    counts_E = torch.bincount(inputs.ids_TK.flatten(), minlength=experts)
    x_TD, scores_TK = inputs.x_TD.requires_grad_(), inputs.scores_TK.requires_grad_()
    w_eDD = inputs.w_EDD.chunk(ranks)[rank].clone().requires_grad_()

    def experts_of(x_RD: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
        parts = x_RD.split(counts_e.tolist())
        return torch.cat([torch.tanh(x @ w) for x, w in zip(parts, w_eDD, strict=True)])

    codec = Codec("exact" if case.float8 == "lossless" else "e4m3")
    with set_current_spmd_mesh(mesh), use_codec(codec), _Exchanges() as exchanges:
        given = (x_TD, scores_TK, inputs.ids_TK, counts_E)
        if case.in_steps:  # as halves do
            turn = dispatcher.send(*given)
            dispatcher.relay(turn)
            dispatcher.send_back(turn, experts_of(*dispatcher.receive(turn)))
            dispatcher.relay_back(turn)
            out_TD = dispatcher.collect(turn, x_TD)
        else:
            routed_RD, counts_e, metadata = dispatcher.dispatch(*given)
            out_TD = dispatcher.combine(experts_of(routed_RD, counts_e), metadata, x_TD)
        _loss(out_TD).backward()
    values: dict[str, Any] = {"out": out_TD, "x": x_TD.grad, "w": w_eDD.grad}
    values["scores"] = scores_TK.grad
    return {
        "values": {name: value.detach().double().numpy() for name, value in values.items()},
        "rows": exchanges.rows,
        "exchanges": exchanges.count,
    }


def _without_ranks(shape: tuple[str, int, int], ranks: int) -> list[dict[str, np.ndarray]]:
    """The same of all ranks, token by token, in float64."""
    kind, experts, top_k = shape
    given = [_Inputs(kind, experts, top_k, ranks, rank, torch.float64) for rank in range(ranks)]
    w_EDD = given[0].w_EDD.requires_grad_()
    outs = []
    for each in given:
        x_TD, scores_TK = each.x_TD.requires_grad_(), each.scores_TK.requires_grad_()
        out_TKD = torch.tanh(torch.einsum("td,tkdf->tkf", x_TD, w_EDD[each.ids_TK]))
        outs.append((out_TKD * scores_TK.unsqueeze(-1)).sum(1))
        _loss(outs[-1]).backward()
    assert w_EDD.grad is not None
    return [
        {
            "out": out_TD.detach().numpy(),
            "x": each.x_TD.grad.numpy(),  # type: ignore[union-attr]
            "scores": each.scores_TK.grad.numpy(),  # type: ignore[union-attr]
            "w": w_eDD.numpy(),
        }
        for each, out_TD, w_eDD in zip(given, outs, w_EDD.grad.chunk(ranks), strict=True)
    ]


def test_sums_are_those_of_every_expert(tmp_path: Path):
    for case, found in _found(SUMS, tmp_path).items():
        ranks, rows, shape = case.ranks, case.rows, case.shape
        kind, experts, top_k = shape
        gains = rows == "node" or (rows == "rank" and experts > ranks)
        sends, forwards = torch.zeros(2, ranks, ranks, dtype=torch.int64)
        for rank in range(ranks):
            ids_TK = _routing(kind, experts, top_k, rank, ranks)
            for ids in (ids_TK // (experts // ranks)).tolist():
                here = [to // 2 * 2 + rank % 2 for to in set(ids)]  # of its node, in my place
                for via, to in zip(here, set(ids), strict=True):
                    forwards[via, to] += 1
                for to in set(here if rows == "node" else ids) if gains else ids:
                    sends[rank, to] += 1
        # Titan makes the products of outputs and scores in fp32, whatever comes.
        _assert_sums(found, case, 1e-12 if gains else 1e-6)
        for rank, mine in enumerate(found):
            hops = (sends, forwards) if rows == "node" else (sends,)
            out = [int(hop[rank].sum()) for hop in hops]
            back = [int(hop[:, rank].sum()) for hop in hops[::-1]]
            # Tokens out and back, gradients out and back. Once more: the counts; scores both ways.
            assert mine["rows"] == [*out, *back] * 2, case
            assert mine["exchanges"] == 1 + len(hops) * (4 + (2 if gains else 0)), case


def _assert_sums(of_ranks: list[dict[str, Any]], case: _Case, tolerance: float) -> None:
    for mine, expected in zip(of_ranks, _without_ranks(case.shape, case.ranks), strict=True):
        for name, value in expected.items():
            scale = max(np.abs(value).max(), 1.0)
            assert np.abs(mine["values"][name] - value).max() < tolerance * scale, (case, name)


def test_packed_rows_have_the_gradients_of_every_expert(tmp_path: Path):
    """Several experts of a rank read one row: its gradient is the sum of theirs."""
    for case, found in _found(PACKED, tmp_path).items():
        _assert_sums(found, case, 1e-6)


def test_two_hops_pass_float8_on_as_it_came(tmp_path: Path):
    """Tokens, and gradients of what comes back, are quantized once, however many hops there are."""
    one, two = _found(HOPS, tmp_path).values()
    for mine, its in zip(two, one, strict=True):
        for name, value in its["values"].items():
            error = np.linalg.norm(mine["values"][name] - value) / np.linalg.norm(value)
            # Of sums, the order and what is rounded on the way.
            assert error < (0.005 if name in ("out", "x") else 1e-6), name


def test_experts_of_large_numbers_travel_beside_scores_in_bf16():
    mesh: Any = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0)
    ids_TK = torch.arange(500, 508).view(4, 2)
    scores_TK = torch.full((4, 2), 0.5, dtype=torch.bfloat16)
    rows = TokenRows(scores_TK, ids_TK, Hops([mesh], Inside(), Inside()), 512)
    assert torch.equal(_experts_of(rows._routes_T2K), ids_TK)


def test_bf16_is_as_close_as_a_row_for_each_expert(tmp_path: Path):
    """Sums in fp32 round less than a bf16 number for each expert."""
    found, errors = _found(BF16, tmp_path), {}
    for case in BF16:
        errors[case.rows] = {
            name: max(
                np.linalg.norm(mine["values"][name] - its[name]) / np.linalg.norm(its[name])
                for mine, its in zip(found[case], _without_ranks(case.shape, 2), strict=True)
            )
            for name in found[case][0]["values"]
        }
    for name, error in errors["rank"].items():
        assert error < min(0.02, 1.05 * errors["expert"][name]), name


def _of_titan(experts: int, top_k: int, groups: int | None, chosen: int | None) -> Any:
    return SimpleNamespace(
        num_experts=experts, top_k=top_k, num_expert_groups=groups, num_limited_groups=chosen
    )


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "chosen", "ep"),
    [(64, 6, None, None, 8), (256, 8, 8, 4, 32), (256, 8, 8, 4, 4), (32, 4, None, None, 32)],
)
def test_to_how_many_ranks_a_token_goes(
    experts: int, top_k: int, groups: int | None, chosen: int | None, ep: int
):
    """As counted among random scores."""
    scores_TE = torch.rand(20_000, experts, generator=torch.Generator().manual_seed(0))
    if groups is not None:
        assert chosen is not None
        open_TG = torch.rand(20_000, groups).argsort(1) < chosen
        scores_TE *= open_TG.repeat_interleave(experts // groups, dim=1)
    rank_TK = scores_TE.topk(top_k).indices // (experts // ep)
    counted = torch.zeros(20_000, ep).scatter_(1, rank_TK, 1).sum(1).mean().item()
    router = _of_titan(experts, top_k, groups, chosen)
    assert ranks_of_token(router, ep) == pytest.approx(counted, rel=0.01)


def _planned() -> list[tuple[Any, Any, int]]:
    """Rows that a rank of 8 sends and receives in dry runs, and tokens of its experts."""
    dist.init_process_group("fake", rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("ep",))
    return [_planned_rows(mesh, nodes) for nodes in (0, 2)]


def _planned_rows(mesh: Any, nodes: int) -> tuple[Any, Any, int]:
    router = _of_titan(64, 6, None, None)
    config = PlannedTokenDispatcher.Config(num_experts=64, top_k=6, imbalance=1.5, router=router)
    routed: Any = nn.Module()
    routed.token_dispatcher = dispatcher = config.build()
    dispatcher.ep_mesh = mesh
    _exchange_once(routed, mesh, nodes)
    assert dispatcher.sends_once
    with FakeTensorMode(), set_current_spmd_mesh(mesh):
        ids_TK, counts_E = (torch.zeros(n, dtype=torch.int64) for n in ((1000, 6), (64,)))
        turn = dispatcher.send(torch.zeros(1000, _D), torch.zeros(1000, 6), ids_TK, counts_E)
        routed_RD, _ = dispatcher.receive(turn)
    assert turn.rows is not None
    sends, receives = ([sum(hop) for hop in hops] for hops in (turn.rows.sends, turn.rows.receives))
    return sends, receives, len(routed_RD)


def test_a_dry_run_counts_fewer_rows(tmp_path: Path):
    """4.536 ranks a token, or 1.976 of two nodes of 4 ranks.

    This rank's experts get 1.5 times the tokens, and its node 1.125 times.
    """
    (((sends, receives, tokens), two),) = run_ranks(_planned, 1, log_folder=tmp_path)
    assert (sends[0], receives[0], tokens) == (4536, 6803, 9000)
    assert two == ([1976, 5102], [2223, 6803], 9000)


PLAIN = observed(Run(world=2, ep=2, global_batch=8, layers=3, parallelize="submodule"))


def test_exchanges_of_two_hops(runs: Runs):
    """Of one layer: twice as many but for the counts, and fewer bytes through the network."""
    # Two nodes, on fake tensors: as many tokens go there as if all experts are as likely.
    planned = replace(PLAIN, world=64, global_batch=64, ep=16, experts=32, layers=2, ac="fp8")
    cases = [("always", "expert"), ("always", "rank"), ("always", "node"), ("never", "node")]
    steps = runs.planned(
        *(replace(planned, save_all_to_all=saves, exchange_rows=rows) for saves, rows in cases)
    )
    largest = {}
    for case, step in zip(cases, steps, strict=True):
        again, hops = case[0] == "never", 2 if case[1] == "node" else 1
        with_scores = case[1] != "expert"
        events = [e for e in step.collectives if e.kind == "all_to_all"]
        forward, backward = ([e for e in events if e.in_backward is x] for x in (False, True))
        # Counts; scores, tokens out and back. The recompute sends tokens out.
        assert len(forward) == 1 + (2 + with_scores) * hops, case
        assert len(backward) == (2 + with_scores + again) * hops, case
        largest[case] = max(e.nbytes for e in forward[: 2 + hops])
    assert largest["always", "node"] < 0.85 * largest["always", "rank"]
    # 64 tokens have three of 32 experts, which lie on 2.903 of 16 ranks.
    assert largest["always", "expert"] == 192 * 512
    assert largest["always", "rank"] == 186 * 512


def test_outputs_of_experts_are_read_by_scores(tmp_path: Path):
    """Here, and not behind the exchange: to discard them would make gradients NaN."""
    last_gemm = {"moe.routed_experts.inner_experts:aten._grouped_mm:w2*": "discard"}
    run = replace(PLAIN, layers=2, steps=1, traced_step=0, ac=FP8AC.Config(op_policies=last_gemm))
    with pytest.raises(RankError, match=r"aten\.mul in moe\.routed_experts reads it"):
        train(replace(run, exchange_rows="rank"), tmp_path)


@pytest.mark.parametrize(
    ("ep", "joined", "nodes"), [(32, 8, 4), (64, 72, 0), (8, 8, 0), (12, 8, 0), (4, 1, 0)]
)
def test_two_hops_need_whole_nodes(ep: int, joined: int, nodes: int):
    parallelism = ParallelismConfig(exchange_rows="node", expert_parallel_degree=ep)
    model: Any = extend_config(titan_config("deepseek_v3_16b")).model_spec
    dims = degrees(dp_shard=ep, ep=ep)
    exchanges = resolve_exchanges(
        model.model, parallelism, TrainingConfig(), dims, Nodes(8, joined), compiled=False
    )
    assert nodes == Nodes(8, joined).among(ep)
    said = f'"node" works as "rank": {ep} ranks exchange tokens, and NVLink joins {joined}.'
    assert any(said in note for note in exchanges.notes) == (not nodes)
    # Of 64 experts no rank of 64 has two, and the 12 ranks share none evenly.
    rows = "node" if nodes else "rank" if ep < 64 else "expert"
    assert (exchanges.rows, exchanges.nodes) == (rows, nodes)
