"""HybridEP's exchange on CPU ranks: what it sends, drops and counts, against a loop by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.cluster import run_ranks
from titan_ext.base import no_accelerator
from titan_ext.verify.buffered import BufferedTokenDispatcher

RANKS, TOKENS, TOP_K, EXPERTS, DIM = 2, 5, 3, 8, 4


def _of_rank(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, scores and experts of a rank; most go to the first half."""
    draw = torch.Generator().manual_seed(rank)
    likely = torch.rand(TOKENS, EXPERTS, generator=draw) + torch.arange(EXPERTS).lt(5)
    experts_TK = likely.topk(TOP_K).indices
    x_TD = torch.randn(TOKENS, DIM, generator=draw)
    return x_TD, torch.rand(TOKENS, TOP_K, generator=draw), experts_TK


def _layer(share: float, pad_multiple: int | None) -> dict[str, Any]:
    """Two passes of a layer, whose expert e multiplies by e + 1, and what the second one gave."""
    no_accelerator.enable()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    dispatcher = BufferedTokenDispatcher.Config(
        num_experts=EXPERTS,
        top_k=TOP_K,
        non_blocking_capacity_factor=share,
        pad_multiple=pad_multiple,
    ).build()
    dispatcher.wire_meshes(ep_mesh=mesh)
    found: dict[str, Any] = {}
    for _ in range(2):
        x_TD, scores_TK, experts_TK = _of_rank(rank)
        x_TD.requires_grad_()
        scores_TK.requires_grad_()
        counts_E = experts_TK.flatten().bincount(minlength=EXPERTS)
        rows_RD, counts_e, metadata = dispatcher.dispatch(x_TD, scores_TK, experts_TK, counts_E)
        own = rank * len(counts_e) + torch.arange(len(counts_e)) + 1
        times = own.repeat_interleave(counts_e)[: len(rows_RD)]
        filler = torch.full((len(rows_RD) - len(times),), torch.nan)  # as a grouped GEMM leaves
        out_TD = dispatcher.combine(rows_RD * torch.cat([times, filler])[:, None], metadata, x_TD)
        (out_TD * torch.arange(1.0, DIM + 1)).sum().backward()
        found = {"out": out_TD.detach(), "x": x_TD.grad, "scores": scores_TK.grad}
    rows = dispatcher.rows.tolist()
    return {k: v.tolist() for k, v in found.items()} | {"rows": rows, "size": len(rows_RD)}


def _by_hand(share: float, multiple: int) -> list[dict[str, Any]]:
    """The same, route by route, as deep_ep drops."""
    given = [_of_rank(rank) for rank in range(RANKS)]
    found: list[dict[str, Any]] = [
        {"out": torch.zeros(TOKENS, DIM), "x": torch.zeros(TOKENS, DIM)}
        | {"scores": torch.zeros(TOKENS, TOP_K)}
        for _ in range(RANKS)
    ]
    weight, local = torch.arange(1.0, DIM + 1), EXPERTS // RANKS
    worst = RANKS * TOKENS * min(local, TOP_K)
    size = -(-int(worst * share) // multiple) * multiple
    for rank in range(RANKS):
        row = 0
        for expert in range(rank * local, (rank + 1) * local):
            for source, (x_TD, scores_TK, experts_TK) in enumerate(given):
                for token, k in (experts_TK == expert).nonzero().tolist():
                    row += 1
                    if share < 1 and row >= size:
                        continue
                    of, times = found[source], float(expert + 1)
                    of["out"][token] += scores_TK[token, k] * times * x_TD[token]
                    of["x"][token] += scores_TK[token, k] * times * weight
                    of["scores"][token, k] = times * (x_TD[token] * weight).sum()
            row += -row % multiple
        room = size - 1 if share < 1 else worst
        found[rank] |= {"rows": [2 * row, 2 * max(row - room, 0), row + 1], "size": size}
    return found


@pytest.mark.parametrize(("share", "multiple"), [(1.0, 1), (0.5, 1), (0.6, 4)])
def test_rows_gradients_and_drops_are_those_of_a_loop(share: float, multiple: int, tmp_path: Path):
    """A buffer for all, one that overflows, and one with padded groups; the rest of it is NaN."""
    pads = multiple if multiple > 1 else None
    found = run_ranks(_layer, RANKS, share, pads, log_folder=tmp_path)
    right = _by_hand(share, multiple)
    assert any(each["rows"][1] for each in right) == (share < 1), "this drops where it should"
    for of_rank, expected in zip(found, right, strict=True):
        for name, value in expected.items():
            if name in ("rows", "size"):
                assert of_rank[name] == value, name
            else:
                torch.testing.assert_close(torch.tensor(of_rank[name]), value)
