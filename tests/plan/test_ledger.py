"""`titan_ext ledger`: what traces of an accelerator and of gloo say of the parts of a step."""

import gzip
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from titan_ext.config_registry.commands import main
from titan_ext.plan.ledger import Ledger
from titan_ext.plan.time import Part
from titan_ext.plan.trace import read_trace

ATTENTION = "layers.0._checkpoint_wrapped_module.attention"
MS = {
    Part.FORWARD: 1.7,
    Part.LOSS: 0.2,
    Part.RECOMPUTE: 0.5,
    Part.BACKWARD: 1.0,
    Part.CODEC: 0.1,
    Part.COPIES: 0.2,
    Part.OPTIMIZER: 0.5,
    Part.EXCHANGES: 0.4,
    Part.HOST: 0.31,
    Part.GATHERS: 0.79,
    Part.REDUCTIONS: 0.7,
}
"""What ``on_device`` says, added up by hand from its times in us."""


def _event(kind: str, name: str, start: int, end: int, tid: int, **args: Any) -> dict[str, Any]:
    event = {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start}
    return event | {"pid": 1, "tid": tid, "args": args}


def _op(name: str, start: int, end: int, tid: int = 1, **args: Any) -> dict[str, Any]:
    kind = "user_annotation" if name.startswith(("FSDP", "Profiler", "Optimizer")) else "cpu_op"
    return _event(kind, name, start, end, tid, **args)


def _kernel(name: str, launched: int, tid: int, start: int, end: int, stream: int) -> list[Any]:
    """A kernel and its launch, which takes 5 us."""
    return [
        _event("cuda_runtime", "cudaLaunchKernel", launched, launched + 5, tid, correlation=start),
        _event("kernel", name, start, end, stream, correlation=start, stream=stream),
    ]


def on_device(rows: int = 64, late_us: int = 0) -> list[dict[str, Any]]:
    """A step of one layer: streams 7 (compute), 20 to 22 (NCCL); backward in a thread of its own.

    ``late_us`` is how long the host is late with the first kernel of backward.
    """
    recorded = {"Sequence number": 7, "Fwd thread id": 0}
    later = late_us
    return [
        _op("ProfilerStep#4", 0, 6000 + later),
        _op("aten::embedding", 50, 90),
        *_kernel("embedding", 60, 1, 100, 200, 7),
        _op(f"FSDP::pre_forward ({ATTENTION})", 100, 300),
        _op("c10d::_allgather_base_", 110, 150),
        *_kernel("ncclDevKernel_AllGather_RING_LL(args)", 120, 1, 201, 1000, 20),
        _op("fsdp::split_with_sizes_copy", 200, 250),
        *_kernel("copy", 205, 1, 1000, 1200, 7),
        _op("aten::mm", 300, 400, **recorded),
        *_kernel("gemm", 305, 1, 1201, 2000, 7),
        _op("_c10d_functional::all_to_all_single", 400, 500, **recorded),
        *_kernel("ncclDevKernel_SendRecv(args)", 405, 1, 2001, 2400, 21),
        _event("cuda_runtime", "cudaStreamSynchronize", 500, 2500, 1),
        _op("aten::_grouped_mm", 2500, 2600, **recorded, **{"Input Dims": [[rows, 8], [4, 8, 8]]}),
        *_kernel("grouped_gemm", 2505, 1, 2700, 3500, 7),
        _op("FSDP::pre_forward (lm_head)", 2600, 2650),
        _op("aten::mm", 2650, 2700, **recorded),
        *_kernel("gemm", 2655, 1, 3501, 3700, 7),
        _op(f"FSDP::pre_backward ({ATTENTION})", 3000, 3010, 2),
        _op(
            "autograd::engine::evaluate_function: MmBackward0",
            3010,
            3600 + later,
            2,
            **{"Sequence number": 7, "Fwd thread id": 1},
        ),
        _op("aten::mm", 3050 + later, 3100 + later, 2, **recorded),
        *_kernel("gemm", 3055 + later, 2, 3701 + later, 4200 + later, 7),
        _op("aten::mm", 3200 + later, 3250 + later, 2),
        *_kernel("gemm", 3205 + later, 2, 4201 + later, 5200 + later, 7),
        _op("titan_ext::float8_dequantize", 3300 + later, 3350 + later, 2),
        *_kernel("dequantize", 3305 + later, 2, 5201 + later, 5300 + later, 7),
        _op(
            "autograd::engine::evaluate_function: RegisterPostBackwardFunctionBackward",
            3650 + later,
            3850 + later,
            2,
        ),
        _op(f"FSDP::post_backward_reduce ({ATTENTION})", 3700 + later, 3800 + later, 2),
        _op("c10d::_reduce_scatter_base_", 3710 + later, 3750 + later, 2),
        *_kernel(
            "ncclDevKernel_ReduceScatter(args)", 3720 + later, 2, 5301 + later, 5999 + later, 22
        ),
        _op("Optimizer.step#AdamW.step", 4000 + later, 4200 + later),
        _op("aten::_fused_adamw_", 4050 + later, 4100 + later),
        *_kernel("adamw", 4055 + later, 1, 6000 + later, 6500 + later, 7),
    ]


def write_traces(
    folder: Path, traces: Mapping[int, list[dict[str, Any]]], group: bool = True
) -> None:
    traced = folder / "profiling" / "traces" / "iteration_5"
    traced.mkdir(parents=True, exist_ok=True)
    for rank, events in traces.items():
        first = rank // 2 * 2
        ep = {"pg_desc": "mesh_ep", "pg_size": 2, "ranks": [first, first + 1]}
        info = {"rank": rank, "pg_config": [ep]}
        data = json.dumps({"distributedInfo": info, "traceEvents": events})
        with gzip.open(traced / f"rank{rank}_trace.json.gz", "wt") as file:
            file.write(data)


def test_every_microsecond_of_the_compute_stream_has_a_part(tmp_path: Path):
    write_traces(tmp_path, {0: on_device()})
    ledger = Ledger.read(tmp_path)
    # Kernels that follow each other begin a us later, each with an id of its own: the host's.
    assert ledger.ms[0] == pytest.approx(MS, abs=0.01)
    assert ledger.step_ms == pytest.approx(6.4)
    (step,) = ledger.traces[0].steps
    assert ledger.step == 5
    assert step.rows == {"layers.0.attention": 64}
    assert step.by_unit()["layers.0.attention"][Part.BACKWARD] == pytest.approx(1.0, abs=0.002)
    assert step.by_unit()["lm_head"][Part.LOSS] == pytest.approx(0.2, abs=0.002)
    spans = sorted(step.spans, key=lambda span: span.start)
    assert all(a.end == b.start for a, b in itertools.pairwise(spans))


def test_kernels_and_messages_are_added_up_by_kind(tmp_path: Path):
    write_traces(tmp_path, {0: on_device()})
    kinds = {"GEMM": 2.5, "grouped GEMM": 0.8, "elementwise": 0.6, "copies": 0.2, "codec": 0.1}
    messages = {"exchanges": 0.4, "gathers": 0.8, "reductions": 0.7}
    assert Ledger.read(tmp_path).kinds() == pytest.approx(kinds | messages, abs=0.01)
    # A message takes as long as the last rank to come sees it.
    late = on_device()
    for event in late:
        if "SendRecv" in event["name"]:
            event |= {"ts": event["ts"] + 300, "dur": event["dur"] - 300}
    write_traces(tmp_path, {0: on_device(), 1: late})
    kinds |= messages | {"exchanges": 0.1}
    assert Ledger.read(tmp_path).kinds() == pytest.approx(kinds, abs=0.01)


def test_a_host_that_is_late_is_no_wait_for_what_runs_beside(tmp_path: Path):
    write_traces(tmp_path, {0: on_device(late_us=900)})
    ms = Ledger.read(tmp_path).ms[0]
    # Backward's first kernel was launched 255 us after the stream was free, and came 645 later.
    assert ms[Part.HOST] == pytest.approx(MS[Part.HOST] + 0.9, abs=0.01)
    assert ms[Part.REDUCTIONS] == pytest.approx(MS[Part.REDUCTIONS], abs=0.01)


def test_what_runs_beside_a_late_host_is_waited_for_once_the_host_is_there(tmp_path: Path):
    prefetch = [
        _op(f"FSDP::backward_prefetch for {ATTENTION}", 2950, 2990, 2),
        *_kernel("ncclDevKernel_AllGather_RING_LL(args)", 2960, 2, 3702, 4500, 20),
    ]
    write_traces(tmp_path, {0: on_device(late_us=900) + prefetch})
    ms = Ledger.read(tmp_path).ms[0]
    # The stream is free at 3700, the kernel launched at 3960, its input there at 4500.
    assert ms[Part.GATHERS] == pytest.approx(MS[Part.GATHERS] + 0.54, abs=0.01)
    assert ms[Part.HOST] == pytest.approx(MS[Part.HOST] + 0.9 - 0.54, abs=0.01)


def test_a_host_slower_than_its_device_is_waited_for(tmp_path: Path):
    events = on_device()
    events[0]["dur"] = 9400
    write_traces(tmp_path, {0: events})
    ledger = Ledger.read(tmp_path)
    assert ledger.step_ms == pytest.approx(9.4)
    assert ledger.ms[0][Part.HOST] == pytest.approx(MS[Part.HOST] + 3.0, abs=0.01)


def test_several_steps_of_a_trace_are_averaged(tmp_path: Path):
    second = [dict(event, ts=event["ts"] + 20_000) for event in on_device(late_us=1000)]
    for event in second:
        event["args"] = {
            key: value + 20_000 if key == "correlation" else value
            for key, value in event["args"].items()
        }
    second[0]["name"] = "ProfilerStep#5"
    write_traces(tmp_path, {0: on_device() + second})
    ledger = Ledger.read(tmp_path)
    assert len(ledger.traces[0].steps) == 2
    assert ledger.step_ms == pytest.approx(6.4 + 0.5)


def _plan(folder: Path, **ms: float) -> None:
    time = {"machine": "h100", "slower": 1.0, "step_ms": sum(ms.values()), "ms": ms}
    (folder / "plan_rank0.json").write_text(json.dumps({"time": time}))


def test_the_largest_difference_from_the_plan_comes_first_and_says_why(tmp_path: Path):
    ranks = {rank: on_device(rows=190 if rank == 1 else 70) for rank in range(4)}
    write_traces(tmp_path, ranks)
    _plan(tmp_path, forward=1.7, exchanges=0.01, backward=0.9, optimizer=0.5, gathers=0.7)
    ledger = Ledger.read(tmp_path)
    assert next(part for part, *_ in ledger.differences()) is Part.REDUCTIONS
    _plan(tmp_path, forward=1.7, exchanges=9.0, backward=0.9, optimizer=0.5, gathers=0.7)
    assert next(Ledger.read(tmp_path).verdicts()) == (
        "largest difference: waits for exchanges of tokens, 0.4 ms, planned 9.0: rank 1's experts "
        "got 1.90 times the mean tokens in layers.0.attention"
    )


def test_a_late_rank_is_the_one_that_waits_least(tmp_path: Path):
    def waiting(more_us: int) -> list[dict[str, Any]]:
        """Others' reduce-scatter begins on time and ends with that of the late rank."""
        events = on_device()
        for event in events:
            if "ReduceScatter" in event["name"] or event["name"] == "ProfilerStep#4":
                event["dur"] += more_us
            if event["name"] == "adamw":
                event["ts"] += more_us
        return events

    write_traces(
        tmp_path, {0: waiting(900), 1: waiting(900), 2: on_device(late_us=900), 3: waiting(900)}
    )
    ledger = Ledger.read(tmp_path)
    assert {round(sum(ms.values()), 3) for ms in ledger.ms.values()} == {7.3}
    rank, by_ms, why = ledger.late() or (-1, 0.0, "")
    assert (rank, by_ms) == (2, pytest.approx(0.9, abs=0.02))
    assert why.startswith("waits for the host: +0.9 ms against the others, most in layers.0.att")
    assert any(line.startswith("late: rank 2 keeps") for line in ledger.verdicts())
    write_traces(tmp_path, {rank: on_device(late_us=900) for rank in range(4)})
    assert Ledger.read(tmp_path).late() is None


def test_a_slow_link_is_slow_for_both_of_its_ranks(tmp_path: Path):
    def slowly(more_us: int) -> list[dict[str, Any]]:
        events = on_device(late_us=0)
        for event in events:
            if "SendRecv" in event["name"]:
                event["dur"] += more_us
            elif event["ts"] >= 2500 and event["name"] != "ProfilerStep#4":
                event["ts"] += more_us
            elif event["name"] in ("ProfilerStep#4", "cudaStreamSynchronize"):
                event["dur"] += more_us
        return events

    write_traces(tmp_path, {rank: slowly(1000 if rank > 1 else 0) for rank in range(4)})
    assert Ledger.read(tmp_path).slow_link() == ((2, 3), pytest.approx(1.399), pytest.approx(0.399))
    # One rank that comes late makes the other wait, and the link is not slow for it.
    write_traces(tmp_path, {rank: slowly(1000 if rank == 3 else 0) for rank in range(4)})
    assert Ledger.read(tmp_path).slow_link() is None


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_traces(tmp_path, {0: on_device(), 1: on_device()})
    _plan(tmp_path, forward=1.7, backward=0.3)
    log = tmp_path / "structured_logs" / "training.global_rank_0.x.jsonl"
    log.parent.mkdir()
    entries = [("step_end", 8.4), ("kineto_profiler_step_call_end", 2.0)]
    log.write_text(
        "".join(
            json.dumps({"log_type_name": name, "step": 5, "value": ms}) + "\n"
            for name, ms in entries
        )
    )
    out = tmp_path / "out"
    assert main(["ledger", str(tmp_path), "--by-unit", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "step 5, rank 0 of 2 read: 6.4 ms, the sum of its parts; 6.4 by Titan's log (100.0%)\n"
    )
    assert "       1.0        0.3 backward\n" in text
    assert "layers.0.attention: forward 1.6, recompute 0.5, backward 1.0" in text
    written = json.loads((out / "ledger.json").read_text())
    assert sum(written["ms"].values()) == pytest.approx(written["step_ms"])
    assert written["planned"] == {"forward": 1.7, "backward": 0.3}
    assert (out / "ledger.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected traces of Titan's profiler"),
        (["--step", "7"], "step 7 has no trace; expected one of [5]"),
        (["--rank", "3"], "rank 3 has no trace of step 5"),
    ],
)
def test_what_is_not_there_is_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    if arguments:
        write_traces(tmp_path, {0: on_device()})
    assert main(["ledger", str(tmp_path), *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a trace of torch.profiler"),
        ('{"other": 1}', "expected a trace of torch.profiler"),
        ('{"traceEvents": []}', "expected a step"),
    ],
)
def test_a_file_that_is_no_trace(text: str, message: str, tmp_path: Path):
    file = tmp_path / "rank0_trace.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_trace(file)
    assert str(file) in str(error.value)
