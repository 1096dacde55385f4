"""The benchmarks of activation checkpointing, on tiny shapes: their counts, not their times."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import DeviceType

from benchmarks import (
    device_events,
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
from titan_ext.components.exchange import Exchange

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


def test_unknown_arm_is_refused() -> None:
    with pytest.raises(ValueError, match="--arms bogus: expected some of stock-none"):
        measure("debug", Layout(), TOKENS, ["bogus"])


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_step_time_refuses_cuda_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["step_time", "--cuda"])
    with pytest.raises(SystemExit, match="2"):
        step_time.main()
    assert "--cuda needs a GPU" in capsys.readouterr().err


def _receipts(monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str) -> int:
    monkeypatch.setattr("sys.argv", ["gpu_receipts", "--dry", "--out", str(out), *flags])
    return gpu_receipts.main()


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


def test_gathered_bytes_count_a_unit_once_and_its_buffer_beside() -> None:
    """A unit that is whole, one that arrives, and a buffer that FSDP2 has copied out of."""

    def group(wholes: list[torch.Tensor], buffer: torch.Tensor | None, kept: Any = None) -> Any:
        params = [SimpleNamespace(all_gather_outputs=[whole, whole[:1]]) for whole in wholes]
        arriving = None if buffer is None else SimpleNamespace(all_gather_output=buffer)
        state = SimpleNamespace(all_gather_state=kept)
        return SimpleNamespace(fsdp_params=params, _all_gather_result=arriving, comm_ctx=state)

    last = SimpleNamespace(all_gather_result=SimpleNamespace(all_gather_output=torch.ones(20)))
    groups = [group([torch.ones(2), torch.ones(3)], None, last), group([], torch.ones(7))]
    with (gathered := host_and_memory.Gathered(groups)):
        torch.ones(1)
        groups[0].fsdp_params.clear()
        torch.ones(1)
    assert (gathered.units, gathered.buffers) == (4 * (5 + 7), 4 * (5 + 7 + 20))


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


def test_gpu_receipts_fit_their_minutes() -> None:
    seconds = [item.seconds for item in gpu_receipts.ITEMS]
    assert sum(seconds) <= 30 * 60
    first = [item.name for item in gpu_receipts.ITEMS[:4]]
    assert first == ["16B beside stock", "codec", "gradients", "full scale"]
    assert sum(seconds[:4]) <= 10 * 60, "--quick ends with the plan at full scale"


def test_gpu_receipts_leave_out_what_an_older_torch_cannot_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trains = gpu_receipts.Item("trains", "", 60, "", "-c 1/0", trains=True)
    other = gpu_receipts.Item("other", "", 60, "", "-c 1")
    monkeypatch.setattr(gpu_receipts, "ITEMS", (trains, other))
    monkeypatch.setattr(gpu_receipts, "torch_version", lambda: (2, 11))
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # nor has it this
    assert _receipts(monkeypatch, tmp_path) == 0
    assert list(json.loads((tmp_path / "results.json").read_text())["items"]) == ["other"]
    assert "needs torch 2.14" in capsys.readouterr().out


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


@pytest.mark.parametrize("fits", [4, 5, 11, 64])
def test_the_largest_batch_is_found_from_below(fits: int) -> None:
    tried: list[int] = []

    def peak_of(sequences: int) -> int:
        assert not tried or tried[-1] <= fits, "a step after a failure"
        tried.append(sequences)
        if sequences > fits:
            raise torch.OutOfMemoryError
        return 20 + 5 * sequences

    memory = 20 + 5 * fits + 4
    assert titan_steps.largest_batch(peak_of, 4, memory, most=64) == fits
    assert len(tried) < 12


def test_fsdp_peak_of_an_allocator_trace() -> None:
    ours, theirs = [{"filename": "/x/titan_ext/fsdp/shard.py"}], [{"filename": "/x/moe.py"}]
    trace: list[dict[str, Any]] = [
        {"action": "alloc", "addr": 1, "size": 10, "frames": ours},
        {"action": "alloc", "addr": 2, "size": 99, "frames": theirs},
        {"action": "free_requested", "addr": 1, "size": 10, "frames": []},
        {"action": "alloc", "addr": 3, "size": 7, "frames": [*theirs, *ours]},
        {"action": "free_completed", "addr": 1, "size": 10, "frames": []},
        {"action": "alloc", "addr": 1, "size": 6, "frames": ours},
    ]
    assert titan_steps.fsdp_peak(trace) == 17
    assert titan_steps.fsdp_peak([]) == 0


def test_idle_share_and_overlap() -> None:
    kernels = [device_events.Busy(begin, begin + 2, 7, False) for begin in (0, 1, 6)]
    copies = [device_events.Busy(2, 6, 9, True)]
    assert device_events.idle_share([*kernels, *copies]) == 3 / 8
    assert device_events.copies_beside_kernels([*kernels, *copies]) == 1 / 4
    assert device_events.copies_beside_kernels(kernels) is None


def test_kernels_are_classed_by_the_operations_around_them() -> None:
    def ran(names: str, *kernels: tuple[str, float]) -> Any:
        event = None
        for name in names.split():
            found = [SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels]
            event = SimpleNamespace(
                name=name,
                cpu_parent=event,
                device_type=DeviceType.CPU,
                kernels=found if name == names.split()[-1] else [],
            )
        return event

    def on_the_gpu(us: float, is_user_annotation: bool = False) -> Any:
        span = SimpleNamespace(elapsed_us=lambda: us)
        kind = DeviceType.CUDA
        return SimpleNamespace(
            device_type=kind, time_range=span, is_user_annotation=is_user_annotation
        )

    events = [
        ran("aten::linear aten::mm", ("nvjet", 1000)),
        ran("aten::_grouped_mm aten::mm", ("nvjet", 2000), ("cutlass", 500)),
        ran("titan_ext::float8_quantize aten::copy_", ("triton_per", 300)),
        ran("c10d::_allgather_base_ aten::copy_", ("Memcpy DtoD", 70)),
        ran("fsdp::all_gather_copy_in", ("copy", 40)),
        ran("Torch-Compiled", ("triton_tem_fused_flex_attention", 9)),
        ran("aten::add", ("add", 2)),
        on_the_gpu(4000),
        on_the_gpu(5000, is_user_annotation=True),
    ]
    assert device_events.kernel_ms(events, cuda=True) == pytest.approx(
        {
            "GEMM": 1.0,
            "grouped GEMM": 2.5,
            "codec": 0.3,
            "collectives": 0.07,
            "copies": 0.04,
            "attention": 0.009,
            "elementwise": 0.002,
            "of no operation": 4.0 - 3.921,
        }
    )


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


def test_a_wire_copies_what_is_exchanged() -> None:
    exchange: Any = SimpleNamespace()
    with (
        patch.object(Exchange, "start", lambda _, rows, **__: rows),
        patch.object(Exchange, "arrived", return_value="what came"),
    ):
        wire = full_scale._Wire(cuda=False)

        def step() -> None:
            for rows in (3, 2):
                Exchange.start(exchange, torch.ones(rows, 5), back=True)
                assert Exchange.arrived(exchange) == "what came"

        with wire.in_place():
            busy = device_events.device_busy(step, cuda=False)
        assert sum(b.is_copy for b in busy) == 2
        assert len(wire._host) == len(wire._device) == 3 * 5 * 4
        assert not any(b.is_copy for b in device_events.device_busy(step, cuda=False))


def test_calls_in_which_the_host_waits() -> None:
    def call(name: str, us: float, device: DeviceType = DeviceType.CPU) -> Any:
        span = SimpleNamespace(elapsed_us=lambda: us)
        return SimpleNamespace(name=name, device_type=device, time_range=span)

    events = [
        call("cudaLaunchKernel", 500),
        call("cuMemMap", 250),
        call("cudaStreamSynchronize", 2000),
        call("cudaLaunchKernel", 700),
        call("aten::cumsum", 9000),
        call("cudaKernel", 9000, DeviceType.CUDA),
    ]
    calls = full_scale._host_calls(events, most=2)
    assert calls == {"cudaStreamSynchronize": [1, 2.0], "cudaLaunchKernel": [2, 1.2]}


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpu_receipts_need_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_receipts"])
    with pytest.raises(SystemExit):
        gpu_receipts.main()
    assert "torch sees no GPU here" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["A7", "B1", "F1"])
def test_published_memory_is_planned(name: str, tmp_path: Path) -> None:
    """Of a mixture of experts, a dense model, and one in float8: no byte of a plan is fitted."""
    row = published.read_rows()[name]
    plan = published.planned(name, row, tmp_path)
    assert plan["reserved"] / 2**30 == pytest.approx(row["reserved"], rel=0.08)
    assert plan["reserved"] > plan["peak"]["sum"]
    assert (plan["fits"], plan["uncertain"]) == (row["fits"], False)


def test_rows_that_are_alike_are_fitted_or_tested_together() -> None:
    rows = published.read_rows()
    assert {row["source"] for row in rows.values()}  # each has one
    assert rows["D2"]["values"]["compile"] == {"enable": True, "components": ["model"]}
    timed = [name for name, row in rows.items() if row.get("time", "tokens" in row)]
    for seed in range(20):
        some, others = published.halves(timed, rows, seed)
        assert sorted([*some, *others]) == sorted(timed)
        for pair in (("B1", "B2"), ("D1", "D2"), ("D4", "D5")):
            assert len(set(pair) & set(some)) != 1


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


def test_factors_are_on_kernels_alone() -> None:
    """10 ms of waits beside 30 ms of kernels, which take twice as long: 70 ms."""
    time = {"step_ms": 40.0, "tokens_per_second": 700.0, "ms": {"exchanges": 10.0}}
    rows = {"eager": {"tokens": 400.0, "values": {}, "job": "", "fits": True}}
    plans = {"eager": {"time": time}}
    factors = published.fit(rows, rows, plans)
    assert factors == {False: pytest.approx(2.0)}
    assert published._expected(plans["eager"], factors[False]) == pytest.approx(400.0)


def test_orders_compare_jobs_of_one_model() -> None:
    """B against C is 2% apart, and planned the wrong way round; D is another model's."""
    model, other = {"extends": "llama3_8b"}, {"extends": "qwen3_32b"}
    published_ = {"A": 5000, "B": 6600, "C": 6500, "D": 900}
    rows = {
        name: {"tokens": tokens, "values": other if name == "D" else model}
        for name, tokens in published_.items()
    }
    planned = {"A": 5100.0, "B": 8000.0, "C": 8100.0, "D": 1000.0}
    plans = {
        name: {"time": {"expected_tokens_per_second": speed}} for name, speed in planned.items()
    }
    assert published.orders(rows, plans) == {
        "apart": {("A", "B"): True, ("A", "C"): True},
        "close": {("B", "C"): False},
    }
