"""The benchmarks of activation checkpointing, on tiny shapes: their counts, not their times."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import (
    fp8_ac_loss,
    full_scale,
    gpu_receipts,
    host_and_memory,
    published,
    rates,
    step_time,
    titan_steps,
)
from benchmarks.activation_bytes import Measured, measure, table
from benchmarks.kept_bytes import KeptBytes, kept_total
from benchmarks.moe_blocks import Layout
from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run
from titan_ext.base.machines import MACHINES
from titan_ext.base.stdlib_corpus import make_corpus

ROOT = Path(__file__).parents[2]
TOKENS = 64


@pytest.fixture(scope="module")
def block() -> dict[str, Measured]:
    """One debug MoE block: dim 256, 16 heads, MLA of 192 / 128, experts of 256, shared of 512."""
    arms = ["stock-selective", "stock-full", "fp8-memory"]
    return {m.arm: m for m in measure("debug", Layout(), TOKENS, arms)}


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


def test_recomputed_flops(block: dict[str, Measured]) -> None:
    selective, full = block["stock-selective"], block["stock-full"]
    dim, experts, hidden, top_k = 256, 8, 256, 3
    # wkv_a, wo, gate, the shared w3 and every expert GEMM, of 12 matrix multiplications
    shapes = [dim * (512 + 64), 16 * 128 * dim, dim * experts, dim * 2 * hidden]
    gemms = sum(shapes) + top_k * 3 * dim * hidden
    assert selective.recomputed_flops == 2 * TOKENS * gemms
    assert full.recomputed_flops == full.forward_flops
    assert block["stock-none"].recomputed_flops == 0


def test_recompute_changes_no_gradient(block: dict[str, Measured]) -> None:
    for arm in ("stock-selective", "stock-full"):
        assert block[arm].cosine == pytest.approx(1.0, abs=1e-12)
    assert 0.99 < block["fp8-memory"].cosine < 0.99999
    assert "fp8-memory" in table(list(block.values()))


def test_kept_bytes_counts_a_storage_once_and_leaves_parameters_out() -> None:
    model = torch.nn.Linear(8, 8)
    x = torch.ones(4, 8)
    with (kept := KeptBytes(model)):
        held = [model(x).exp()]
        held.append(held[0][:2])
        torch.zeros(1000)  # dropped at once
    assert kept_total(kept.classes()) == 4 * 8 * 4
    held.clear()
    assert kept.classes() == []


def test_the_recorded_losses_are_those_of_the_docs() -> None:
    page = (ROOT / "docs" / "float8.md").read_text()
    _, gaps = fp8_ac_loss.recorded()
    for by_seed in gaps.values():
        cells = ", ".join(f"{gap:+.5f}" for gap in by_seed.values())
        assert f"| {cells} |" in page


def test_loss_table_and_plot_from_files(tmp_path: Path) -> None:
    size = {"steps": 60, "batch": 2, "seq_len": 64, "lr": 2e-4, "seconds": 1.0}
    for arm, shift in (("selective", 0.0), ("noise", -0.002), ("fp8", 0.004), ("bad-codec", -0.3)):
        for seed in (0, 1):
            losses = [5.0] * 10 + [3.0 + shift + seed] * 50
            record = size | {"arm": arm, "seed": seed, "losses": losses}
            (tmp_path / f"{arm}-{seed}.json").write_text(json.dumps(record))
    runs = fp8_ac_loss.load(tmp_path)
    lines = fp8_ac_loss.table(runs).splitlines()
    assert "| fp8 | 2 | 3.5040 | +0.00400, +0.00400 | +0.00400 | 2.0 |" in lines
    assert "| bad-codec | 2 | 3.2000 | -0.30000, -0.30000 | -0.30000 | 150.0 |" in lines
    gaps = {arm: fp8_ac_loss.differences(runs, arm) for arm in ("noise", "fp8", "bad-codec")}
    fp8_ac_loss.plot(gaps, "a job", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000

    kept = fp8_ac_loss.train("fp8", 0, steps=60, batch=2, seq_len=64, lr=2e-4, output=tmp_path)
    assert kept["losses"][-1] == 3.004  # read, not trained again
    with pytest.raises(ValueError, match="of another size"):
        fp8_ac_loss.train("fp8", 0, steps=61, batch=2, seq_len=64, lr=2e-4, output=tmp_path)


@pytest.mark.parametrize("blocks", [False, True], ids=["model", "blocks"])
def test_step_time_measures_every_arm(blocks: bool) -> None:
    size = step_time.Size("debugmodel", 2, 2, 16, blocks, device="cpu")
    arms = ["stock-selective", "fp8-speed-early"]
    times = step_time.measure(arms, rounds=2, warm_up=0, size=size)
    assert {arm: len(values) for arm, values in times.items()} == dict.fromkeys(arms, 2)


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
    assert line == f"| ours |  | {step} | {held} |  |  |  |  |"


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


def test_titan_steps_trains_an_arm(tmp_path: Path) -> None:
    base = Run(seq_len=64, global_batch=2, layers=2, steps=2)
    run = titan_steps.run_of("units", base)
    make_corpus()
    (steps,) = run_ranks(titan_steps.train, 1, run, 3, log_folder=tmp_path)
    assert len(steps.losses) == 2
    assert len(steps.seconds) >= 1
    assert steps.figures["sequences in the largest batch"] == 3
    done = {titan_steps.STOCK: steps, "again": steps}
    found = gpu_receipts.figures("\n".join(titan_steps.lines(done, 128)))
    assert {"kind": "peak of stock selective's", "name": "again", "value": 1.0} in found


@pytest.mark.parametrize("name", full_scale.JOBS)
def test_jobs_on_one_card_are_as_shipped(name: str, tmp_path: Path) -> None:
    job, depths = full_scale.JOBS[name]
    for arm in full_scale.ARMS:
        config = full_scale.trained_config(job, depths[-1], arm, str(tmp_path))
        assert config.comm.mode == "fake_backend"
        assert config.debug.moe_force_load_balance
        stock, halves, compiled = (word in arm for word in ("stock", "halves", "compiled"))
        overlap = None if stock else "halves" if halves else "shared_experts"
        assert getattr(config.parallelism, "overlap_exchanges", None) == overlap
        assert not compiled or "model" in config.compile.components
        layers = config.model_spec.model.layers
        assert len(layers) == depths[-1] > depths[0] > 0
        assert sum(layer.moe is not None for layer in layers[: depths[0]]) >= 2


def test_a_job_on_one_card_beside_its_plan(tmp_path: Path) -> None:
    def side(layers: int, ms: float, **more: float) -> dict[str, Any]:
        sizes = dict.fromkeys(("allocated", "reserved", "reserved_aside"), layers << 30)
        return {**sizes, "kernels": {"GEMM": layers * ms} | more}

    names = {"job": "J", "arm": "whole"}
    rows: list[dict[str, Any]] = [
        names
        | {"depth": n, "name": f"J {n}", "measured": side(n, 3, collectives=99.0)}
        | {"planned": side(n, 2)}
        for n in (2, 5)
    ]
    rows.append(names | {"depth": 9, "name": "J 9", "measured": {"error": "a | b"}})
    rows[-1]["planned"] = side(9, 2)
    full_scale.write(rows, "h100", tmp_path)
    lines = (tmp_path / "full_scale.md").read_text().splitlines()
    assert "| J 5 | ms, GEMM | 15.0 | 10.0 | 1.50 |" in lines
    assert "| J 5 | ms, all but collectives | 15.0 | 10.0 | 1.50 |" in lines
    assert "| J, whole, a layer | ms, GEMM | 3.0 | 2.0 | 1.50 |" in lines
    assert "| J, whole, a layer | GiB reserved | 1.00 | 1.00 | 1.00 |" in lines
    assert "| J 9 | a / b | | | |" in lines
    assert json.loads((tmp_path / "full_scale.json").read_text())["rows"] == rows
    found = gpu_receipts.figures("\n".join(full_scale.lines(rows)))
    assert {"kind": "GiB reserved, of the plan's", "name": "J 2", "value": 1.0} in found
    assert {"kind": "ms of all kernels, of the plan's", "name": "J 5", "value": 1.5} in found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["A7", "B1", "F1"])
def test_published_memory_is_planned(name: str, tmp_path: Path) -> None:
    """Of a mixture of experts, a dense model, and one in float8: no byte of a plan is fitted."""
    row = published.read_rows()[name]
    plan = published.planned(name, row, tmp_path)
    assert plan["reserved"] / 2**30 == pytest.approx(row["reserved"], rel=0.08)
    assert plan["reserved"] > plan["peak"]["sum"]
    assert (plan["fits"], plan["uncertain"]) == (row["fits"], False)


def test_the_picture_of_published_rows_is_drawn_from_the_page() -> None:
    rows, found = published.read_rows(), published.recorded()
    assert found["reserved"]["A13"] == 237.5
    assert found["tokens"]["C1"] == 4752
    assert all("reserved" in rows[name] for name in found["reserved"])
    jobs = {name: row["job"] for name, row in rows.items()}
    assert jobs["A14"] == "gpt-oss 20B, 64 GB300, 8 x 8192, selective, compiled"
    assert jobs["D2"] == "Llama 3.1 8B, 128 H100, 2 x 8192, selective, compiled"
    assert jobs["F1"].startswith("Llama 3.1 8B, 8 H100 of 96 GB and 500 W, linears in float8")
    labels = [text.get_text() for text in published.draw(rows, found).axes[0].get_yticklabels()]
    assert [label.split()[0] for label in labels] == list(found["reserved"])
