"""The benchmarks of activation checkpointing, on tiny shapes: their counts, not their times."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import fp8_ac_loss, gpu_receipts, host_and_memory, published, rates
from benchmarks.activation_bytes import Measured, measure
from benchmarks.moe_blocks import BlockLayout
from titan_ext.base.machines import MACHINES

ROOT = Path(__file__).parents[2]
TOKENS = 64


@pytest.fixture(scope="module")
def block() -> dict[str, Measured]:
    """One debug MoE block: dim 256, 16 heads, MLA of 192 / 128, experts of 256, shared of 512."""
    arms = ["stock-selective", "stock-full", "fp8-memory"]
    return {m.arm: m for m in measure("debug", BlockLayout(), TOKENS, arms)}


def test_stock_selective_keeps_its_saved_set(block: dict[str, Measured]) -> None:
    by_class = {(c.module, c.op): c.nbytes for c in block["stock-selective"].classes}
    bf16 = 2 * TOKENS
    sdpa = "_scaled_dot_product_fused_attention_overrideable"
    assert by_class["attention.wq", "mm"] == bf16 * 16 * 192
    assert by_class["attention.wkv_b", "mm"] == bf16 * 16 * 256
    assert by_class["moe.shared_experts.w1", "mm"] == bf16 * 512
    assert by_class["moe.shared_experts.w2", "mm"] == bf16 * 256
    assert by_class["", "clone"] == bf16 * 256  # the input of the block
    attention = [c for c in block["stock-selective"].classes if c.op == sdpa]
    out, lse = bf16 * 16 * 128, 4 * 16 * TOKENS
    assert {c.dtype: c.nbytes for c in attention} == {"bfloat16": out, "float32": lse}


def test_recomputed_flops_and_gradients(block: dict[str, Measured]) -> None:
    selective, full = block["stock-selective"], block["stock-full"]
    dim, experts, hidden, top_k = 256, 8, 256, 3
    # wkv_a, wo, gate, the shared w3 and every expert GEMM, of 12 matrix multiplications
    shapes = [dim * (512 + 64), 16 * 128 * dim, dim * experts, dim * 2 * hidden]
    gemms = sum(shapes) + top_k * 3 * dim * hidden
    assert selective.recomputed_flops == 2 * TOKENS * gemms
    assert full.recomputed_flops == full.forward_flops
    assert block["stock-none"].recomputed_flops == 0
    for arm in ("stock-selective", "stock-full"):
        assert block[arm].cosine == pytest.approx(1.0, abs=1e-12)
    assert 0.99 < block["fp8-memory"].cosine < 0.99999


def test_the_recorded_losses_are_those_of_the_docs() -> None:
    page = (ROOT / "docs" / "float8.md").read_text()
    _, gaps = fp8_ac_loss.recorded()
    for by_seed in gaps.values():
        cells = ", ".join(f"{gap:+.5f}" for gap in by_seed.values())
        assert f"| {cells} |" in page


def _receipts(monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str) -> int:
    monkeypatch.setattr("sys.argv", ["gpu_receipts", "--dry", "--out", str(out), *flags])
    return gpu_receipts.main()


@pytest.mark.slow
def test_gpu_receipts_leave_results_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codec = next(item for item in gpu_receipts.ITEMS if item.name == "codec")
    broken = gpu_receipts.Item("broken", "", 60, "", "-c 1/0")
    slow = gpu_receipts.Item("slow", "", 1, "", "-m http.server --bind 127.0.0.1 0")
    monkeypatch.setattr(gpu_receipts, "ITEMS", (codec, broken, slow))
    assert _receipts(monkeypatch, tmp_path) == 1
    results = json.loads((tmp_path / "results.json").read_text())["items"]
    endings = [result["ending"] for result in results.values()]
    assert endings == ["exit code 0", "exit code 1", "stopped after 5 s"]
    assert {figure["kind"] for figure in results["codec"]["figures"]} == {
        "of a copy's bandwidth",
        "kernels",
    }
    log = (tmp_path / "log.md").read_text()
    assert "ZeroDivisionError" in log
    assert codec.goal in log
    assert (tmp_path / "figures.png").stat().st_size > 1000
    capsys.readouterr()
    assert _receipts(monkeypatch, tmp_path, "--only", "codec") == 0
    assert "codec: done before" in capsys.readouterr().out


def test_the_host_beside_stock() -> None:
    """Ratios are of one round: a slow round slows both."""
    plan = {"held": 2**20}
    stock = {"step": [1.0, 2.0, 9.0], "held": 2**21, "plan": plan}
    ours = {"step": [0.9, 2.0, 9.9], "held": 2**20, "plan": plan, "hooked": 0, "block": None}
    *_, line = host_and_memory.table({"stock": stock, "ours": ours})
    step, held = "2.00 (1.000, 0.900 to 1.100)", "1.00 (0.500; plan 1.00)"
    assert line == f"| ours |  |  | {step} | {held} |  |  |  |  |"


@pytest.mark.slow
@pytest.mark.parametrize("item", gpu_receipts.ITEMS, ids=lambda item: item.name)
def test_every_gpu_receipt_runs_tiny(
    item: gpu_receipts.Item, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _receipts(monkeypatch, tmp_path, "--only", item.name) == 0
    results = json.loads((tmp_path / "results.json").read_text())["items"]
    assert results[item.name]["figures"]


def test_rates_are_those_by_which_the_times_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was held out is then planned right, where the table's rates were far off."""
    h100 = MACHINES["h100"]
    known: dict[str, Any] = {
        "gemm": 6e10,
        "grouped": 5e10,
        "half_rate_rows": 90.0,
        "attention": 3e10,
    }
    known |= {"fp32": 4e10, "memory": 1.1e10, "launch": 5e-6, "float8": 1.4}
    monkeypatch.setattr(rates, "has_cuda_capability", lambda *least: True)
    card = replace(h100, **known)
    with FakeTensorMode():
        made = [(item, held_out, item.make()) for item, held_out in rates.chosen("cpu", False)]
        prices = [(item, held_out, price_of(call())) for item, held_out, (call, price_of) in made]
    found = [
        rates.Timed(item.kind, item.name, price(card), price, held_out)
        for item, held_out, price in prices
    ]
    fitted = rates.fit(h100, found)
    assert {name: getattr(fitted, name) for name in known} == pytest.approx(known, rel=0.05)
    held_out = [one for one in found if one.held_out]
    assert rates.mean_error(held_out, fitted) < 0.02
    lines = [*rates.lines(found, replace(h100, name="h100"), fitted)]
    said = {f["kind"]: f["value"] for f in gpu_receipts.figures("\n".join(lines))}
    assert (
        said["their mean error by the rates of h100"]
        > 0.3
        > said["their mean error by these rates"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["A7", "B1", "F1"])
def test_published_memory_is_planned(name: str, tmp_path: Path) -> None:
    """Of a mixture of experts, a dense model, and one in float8: no byte of a plan is fitted."""
    row = published.read_rows()[name]
    plan = published.planned(name, row, tmp_path)
    assert plan["reserved"] / 2**30 == pytest.approx(row["reserved"], rel=0.08)
    assert plan["reserved"] > plan["peak"]["sum"]
    assert (plan["fits"], plan["uncertain"]) == (row["fits"], False)
