"""One card as a rank of a large job: what its step takes, beside what a dry run plans for it.

    python -m benchmarks.full_scale --out outputs/full_scale         # a GPU; about 5 minutes
    python -m benchmarks.full_scale --jobs 16B --shallow --arms stock whole halves halves-wire
    python -m benchmarks.full_scale --jobs 16B --no-plans      # where a card is lent by the minute,
    python -m benchmarks.full_scale --add-plans                # then, anywhere, the same --out
    python -m benchmarks.full_scale --out outputs/dry --dry          # a debug model on a CPU

Titan's fake process group (``comm.mode`` "fake_backend") makes one process a rank of any mesh, with
real kernels, a real allocator and FSDP's own hooks. There is no wire: what would arrive is filled
with copies of what is sent. These are the kernels "collectives", which a plan does not have, and
which are left out of the ratios. Routing is forced to be balanced, as a plan takes it, and every
rank then sends what this one does.

With the arm "halves-wire" each exchange also copies as many bytes from pinned host memory, on a
stream of its own, and is waited for until they have come: a wire of the host's link, about as fast
as a network card's. So the profiler shows how much of it lies beside kernels.

Each job runs at two depths, so that slopes show what a layer adds, in processes of its own: one for
the plan and one for steps, all of one batch, so that the host makes none meanwhile. The first step
makes states and tunes kernels. The second begins with an empty allocator, for its peaks. The next
five are timed: figures are their medians. The last is profiled.
``full_scale.json`` and ``full_scale.md`` have all of it.
A job that ends in an error, such as too little memory, has its last line there.
"""

import argparse
import contextlib
import copy
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.exchanges import EXCHANGES
from benchmarks.planned_steps import EAGER

ROOT = Path(__file__).parents[1]

# The depths of 671B are cut: three dense layers and two or six with experts.
JOBS = {
    "16B, 8 GPUs": (EXCHANGES["16B, 8 GPUs"], (8, 27)),
    "Qwen3-30B, 16 GPUs": (EXCHANGES["Qwen3-30B, 16 GPUs"], (12, 48)),
    "gpt_oss-20B, 64 GPUs": (EXCHANGES["gpt_oss-20B, 64 GPUs"], (8, 24)),
    "671B, 512 GPUs": (EXCHANGES["671B, 512 GPUs"], (5, 9)),
}
DRY_JOBS = {
    "debug, 8 ranks": (
        "moe_debug.toml --ranks 8 --parallelism.expert_parallel_degree 4 "
        "--training.local_batch_size 2 --training.seq_len 64",
        (2, 3),
    )
}
_OVERLAP = "--parallelism.overlap_exchanges halves"
_HALVES = f"{EAGER} {_OVERLAP}"
_COMPILED = "--compile.enable --compile.components model,loss"
_FP8 = "activation-checkpoint:fp8"
ARMS = {
    "whole": EAGER,
    "stock": EAGER,
    "halves": _HALVES,
    "halves-wire": _HALVES,
    "compiled": _COMPILED,  # in pieces, where shared experts overlap with exchanges
    "compiled-blocks": f"{_COMPILED} --parallelism.overlap_exchanges none",
    "halves-compiled": f"{_COMPILED} {_OVERLAP}",
    "fp8": f"{EAGER} {_FP8}",
    "fp8-compiled": f"{_COMPILED} {_FP8}",
    "stock-compiled": _COMPILED,
}
_EXCEPTION = re.compile(r"(\[rank\d+\]:)?\s*[A-Za-z_][\w.]*(: |$)")
_GIB = 2**30
_BYTES = {
    "allocated": "GiB allocated at most",
    "reserved": "GiB reserved",
    "reserved_aside": "GiB reserved by other streams",
}
_TIMED = 5
_WIRE = ("exchanges", "gathers", "reductions", "collectives")
"""Messages of a plan, and the class of kernels that stand for them."""

Figures = dict[str, Any]


def _config(job: str, depth: int, arm: str, own: Sequence[str]) -> Any:
    """The job's config, cut to its first layers.

    ``own`` are flags of this program; a policy's name stands last. An arm "stock" is TorchTitan's
    own job, without titan_ext.
    """
    from titan_ext.config_registry.resolve import resolve
    from titan_ext.plan.stand_ins import as_stock

    name, _, _, *flags = job.split()
    more = ["--debug.moe_force_load_balance", *own, *ARMS[arm].split()]
    config: Any = resolve(name, [*more, *flags]).config
    model = config.model_spec.model
    assert len(model.layers) >= depth
    model.layers = model.layers[:depth]
    if arm.startswith("stock"):
        as_stock(config)
    return config


def plan(job: str, depth: int, arm: str, machine: str) -> Figures:
    """Of a dry run, in bytes and ms; CUDA has to be hidden from the process."""
    from titan_ext.base import no_accelerator
    from titan_ext.plan.dry_run import dry_run
    from titan_ext.plan.report import to_json
    from titan_ext.plan.stand_ins import as_rank

    ranks = int(job.split()[2])
    with as_rank(ranks, 0):
        with no_accelerator.as_with_an_accelerator():
            config = _config(job, depth, arm, ())
        run = dry_run(config, ranks, memory=80 * _GIB, machine=machine)
        planned = to_json(run, {})
    return {
        "allocated": planned["peak"]["sum"],
        "reserved": planned["reserved"],
        "reserved_aside": planned["reserved_aside"],
        "kernels": planned["time"]["kernels"],
        "step_ms": planned["time"]["step_ms"],
        "launched": planned["time"]["launched"],
    }


def trained_config(job: str, depth: int, arm: str, folder: str) -> Any:
    """The job's config for one process, which writes nothing but into ``folder``."""
    from titan_ext.base.stdlib_corpus import default_tokenizer_path

    own = f"--comm.mode fake_backend --dump_folder {folder} --training.steps 100 "
    own += f"--dataloader.dataset python_stdlib --hf_assets_path {default_tokenizer_path()} "
    own += "--checkpoint.no-enable --metrics.no-enable_tensorboard"
    return _config(job, depth, arm, own.split())


class _Wire:
    """Copies from the host that stand for exchanges of tokens, while ``in_place``."""

    def __init__(self, cuda: bool) -> None:
        import torch

        self._stream = torch.Stream() if cuda else None
        self._host = self._device = torch.empty(0, dtype=torch.uint8)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        from titan_ext.components.exchange import Exchange

        start, arrived = Exchange.start, Exchange.arrived

        def send(exchange: Any, rows: Any, *, back: bool = False) -> Any:
            arriving = start(exchange, rows, back=back)
            exchange.has_come = self._send(arriving)
            return arriving

        def receive(exchange: Any) -> Any:
            if exchange.has_come is not None:
                exchange.has_come.wait()
            return arrived(exchange)

        with (
            mock.patch.object(Exchange, "start", send),
            mock.patch.object(Exchange, "arrived", receive),
        ):
            yield

    def _send(self, arriving: Any) -> Any:
        import torch

        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream or contextlib.nullcontext():
            if arriving.nbytes > len(self._host):
                size: Any = {"size": (arriving.nbytes,), "dtype": torch.uint8}
                self._host = torch.empty(**size, pin_memory=self._stream is not None)
                self._device = torch.empty(**size, device=arriving.device)
            part = slice(arriving.nbytes)
            self._device[part].copy_(self._host[part], non_blocking=True)
        return None if self._stream is None else self._stream.record_event()


def measure(job: str, depth: int, arm: str) -> Figures:
    """Of steps of Titan's trainer, in the units of ``plan``; see above."""
    import torch
    from torchtitan.tools import utils as titan_utils

    from benchmarks.device_events import (
        busy_in,
        copies_beside_kernels,
        events_of,
        idle_share,
        kernel_ms,
    )
    from titan_ext.base.stdlib_corpus import make_corpus
    from titan_ext.plan.stand_ins import as_rank

    make_corpus()
    ranks = job.split()[2]
    os.environ["NGPU"] = ranks  # where fake_backend's init_distributed reads it
    cuda, has_wire = torch.cuda.is_available(), arm.endswith("wire")
    with (
        tempfile.TemporaryDirectory() as folder,
        as_rank(int(ranks), 0),
        _Wire(cuda).in_place() if has_wire else contextlib.nullcontext(),
    ):
        trainer = trained_config(job, depth, arm, folder).build()
        trainer.metrics_processor.log = lambda *_, **__: None  # it would begin a new peak
        batch = next(trainer.batch_generator(trainer.dataloader))
        device = titan_utils.device_module

        def step() -> None:
            trainer.step += 1
            trainer.train_step(map(copy.deepcopy, itertools.repeat(batch)))

        step()
        device.synchronize()
        device.empty_cache()
        device.reset_peak_memory_stats()
        step()
        device.synchronize()
        stats = device.memory_stats()
        segments = torch.cuda.memory_snapshot() if cuda else []
        timed = []
        for _ in range(_TIMED):
            begin, thread = time.perf_counter(), time.thread_time()
            step()
            host, busy_s = time.perf_counter() - begin, time.thread_time() - thread
            device.synchronize()
            timed.append((host, time.perf_counter() - begin, busy_s))
        host, whole, thread = map(statistics.median, zip(*timed, strict=True))
        events = events_of(step, cuda)
        busy = busy_in(events, cuda)
        trainer.close()
    copies = [b.end - b.begin for b in busy if b.is_copy]
    wire = {"wire_ms": sum(copies) / 1e3, "beside": copies_beside_kernels(busy)} if has_wire else {}
    return wire | {
        # A CPU has only the resident set of the process.
        "allocated": stats.get("allocated_bytes.all.peak", stats["active_bytes.all.peak"]),
        "reserved": stats["reserved_bytes.all.peak"],
        "reserved_aside": sum(s["total_size"] for s in segments if s["stream"]),
        "kernels": kernel_ms(events, cuda, launched := {}),
        "step_ms": 1e3 * whole,
        "host_ms": 1e3 * host,
        "thread_ms": 1e3 * thread,
        "launched_by_kind": launched,
        "launched": sum(n for kind, n in launched.items() if kind not in _WIRE),
        "idle": idle_share(busy),
        "host_calls": _host_calls(events),
    }


def _host_calls(events: Iterable[Any], most: int = 8) -> dict[str, list[float]]:
    """Calls of CUDA's runtime and driver in which the host spent most: their number, and ms.

    Those that wait say why the host is late: a synchronization, or memory that is mapped.
    """
    from torch.autograd import DeviceType

    found: dict[str, list[float]] = {}
    for event in events:
        if event.device_type == DeviceType.CPU and re.match(r"cu(da)?[A-Z]", event.name):
            call = found.setdefault(event.name, [0, 0.0])
            call[0] += 1
            call[1] += event.time_range.elapsed_us() / 1e3
    return dict(sorted(found.items(), key=lambda item: -item[1][1])[:most])


def _start(task: str, job: str, depth: int, arm: str, dry: bool, machine: str) -> Any:
    """A process of its own, since Titan allows one layout in each; its result is its last line."""
    words = [task, "--job", job, "--depth", str(depth), "--arms", arm, "--machine", machine]
    usual = {"OMP_NUM_THREADS": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    environment = {**usual, **os.environ}  # as Titan's run script
    if task == "--plan":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.full_scale", *words, *(["--dry"] if dry else [])],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _result(process: subprocess.Popen[str]) -> Figures:
    said, errors = process.communicate()
    if process.returncode == 0:
        return json.loads(said.splitlines()[-1])
    lines = [line for line in errors.splitlines() if line.strip()] or [""]
    print("\n".join(lines[-12:]), file=sys.stderr)
    # An exception's line begins with its dotted name, behind torchrun's prefix; "Error running
    # lspci", which Titan logs on a healthy machine without it, does not.
    raised = [line for line in lines if _EXCEPTION.match(line)]
    return {"error": f"exit code {process.returncode}: {(raised or lines)[-1]}"[:300]}


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """``name: figure = value``, which benchmarks/gpu_receipts.py reads."""
    for row in rows:
        name, measured, planned = row["name"], row["measured"], row["planned"]
        for side, found in (("measured", measured), ("planned", planned)):
            if "error" in found:
                yield f"{name}: not {side}: {found['error']}"
        for key, words in _BYTES.items():
            if key in measured:
                yield f"{name}: {words} = {measured[key] / _GIB:.3f}"
            if measured.get(key) and planned.get(key):
                yield f"{name}: {words}, of the plan's = {measured[key] / planned[key]:.3f}"
        for key, words in (
            ("step_ms", "ms a step on this card"),
            ("host_ms", "host ms a step"),
            ("thread_ms", "ms of the host's thread a step"),
            ("launched", "kernels a step"),
            ("idle", "idle share of the device"),
            ("wire_ms", "ms of exchanges on a wire"),
            ("beside", "share of them beside kernels"),
        ):
            if key in measured:
                yield f"{name}: {words} = {measured[key]:g}"
        for call, (count, ms) in measured.get("host_calls", {}).items():
            yield f"{name}: ms of the host in {count} {call} = {ms:.1f}"
        ratio = _ratio(_computing(measured), _computing(planned))
        if ratio is not None:
            yield f"{name}: ms of all kernels, of the plan's = {ratio:.3f}"


def _computing(figures: Mapping[str, Any]) -> float | None:
    kernels = figures.get("kernels")
    return kernels and sum(ms for kind, ms in kernels.items() if kind not in _WIRE)


def _ratio(measured: float | None, planned: float | None) -> float | None:
    return measured / planned if measured and planned else None


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Measured, planned and their ratio, of each job, depth and arm; then of what a layer adds."""
    yield "| job | of | measured | planned | ratio |"
    yield "|---|---|---|---|---|"
    for row in [*rows, *_slopes(rows)]:
        measured, planned = row["measured"], row["planned"]
        for found in (measured, planned):
            if "error" in found:
                yield f"| {row['name']} | {found['error'].replace('|', '/')} | | | |"
        for key, words in _BYTES.items():
            yield from _line(row["name"], words, *_of(key, _GIB, measured, planned), 2)
        kinds = {**planned.get("kernels", {}), **measured.get("kernels", {})}
        for kind in [k for k in kinds if k not in _WIRE]:
            sides = (side.get("kernels", {}).get(kind) for side in (measured, planned))
            yield from _line(row["name"], f"ms, {kind}", *sides, 1)
        yield from _line(
            row["name"], "ms, all but collectives", _computing(measured), _computing(planned), 1
        )
        # A plan's step has a wire and no host, so the two have no ratio.
        yield from _line(row["name"], "host ms", measured.get("host_ms"), None, 1)


def _of(key: str, unit: float, *sides: Mapping[str, Any]) -> list[float | None]:
    return [side[key] / unit if key in side else None for side in sides]


def _line(
    name: str, words: str, measured: float | None, planned: float | None, digits: int
) -> Iterator[str]:
    if measured is None and planned is None:
        return
    ratio = _ratio(measured, planned)
    cells = [
        "" if value is None else f"{value:.{n}f}"
        for value, n in ((measured, digits), (planned, digits), (ratio, 2))
    ]
    yield f"| {name} | {words} | {' | '.join(cells)} |"


def _slopes(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """What a layer adds, by two depths of a job and arm."""
    for low in rows:
        for high in rows:
            same = all(low[key] == high[key] for key in ("job", "arm"))
            sides = [row[side] for row in (low, high) for side in ("measured", "planned")]
            if same and low["depth"] < high["depth"] and all("kernels" in s for s in sides):
                layers = high["depth"] - low["depth"]
                yield {
                    "name": f"{low['job']}, {low['arm']}, a layer",
                    **{k: _slope(low[k], high[k], layers) for k in ("measured", "planned")},
                }


def _slope(low: Mapping[str, Any], high: Mapping[str, Any], layers: int) -> Figures:
    kernels = {
        kind: (high["kernels"].get(kind, 0.0) - low["kernels"].get(kind, 0.0)) / layers
        for kind in {**low["kernels"], **high["kernels"]}
    }
    return {key: (high[key] - low[key]) / layers for key in _BYTES} | {"kernels": kernels}


def write(rows: Sequence[Mapping[str, Any]], machine: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "full_scale.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    (out / "full_scale.md").write_text("\n".join([f"Plans for {machine}.", "", *table(rows), ""]))


def add_plans(machine: str, out: Path) -> None:
    """Plan what was measured with ``--no-plans``, one after another."""
    rows = json.loads((out / "full_scale.json").read_text())["rows"]
    for row in rows:
        if not row["planned"]:
            job, _ = (DRY_JOBS | JOBS)[row["job"]]
            dry = row["job"] in DRY_JOBS
            row["planned"] = _result(_start("--plan", job, row["depth"], row["arm"], dry, machine))
            write(rows, machine, out)
            print("\n".join(lines([row])), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "full_scale")
    parser.add_argument("--jobs", default="", help="only those with this in their name")
    parser.add_argument("--arms", nargs="+", default=["whole"], choices=list(ARMS))
    parser.add_argument("--machine", default="h100", help="whose plan stands beside")
    parser.add_argument("--shallow", action="store_true", help="only the first of two depths")
    parser.add_argument("--dry", action="store_true", help="a debug model, on a CPU")
    parser.add_argument("--no-plans", action="store_true", help="measure alone")
    parser.add_argument("--add-plans", action="store_true", help="plan what --out has measured")
    task = parser.add_mutually_exclusive_group()  # what a process of its own does
    task.add_argument("--plan", action="store_true", help=argparse.SUPPRESS)
    task.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--depth", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plan or args.measure:
        with contextlib.redirect_stdout(sys.stderr):
            found = (
                plan(args.job, args.depth, args.arms[0], args.machine)
                if args.plan
                else measure(args.job, args.depth, args.arms[0])
            )
        print(json.dumps(found))
        return
    if args.add_plans:
        add_plans(args.machine, args.out)
        return
    if not args.dry:
        import torch

        if not torch.cuda.is_available():
            parser.error("torch sees no GPU here; --dry takes a debug model on the CPU.")
    jobs = DRY_JOBS if args.dry else {k: v for k, v in JOBS.items() if args.jobs in k}
    wanted = [
        (name, job, depth, arm)
        for name, (job, depths) in jobs.items()
        for depth in depths[: 1 if args.shallow else None]
        for arm in args.arms
    ]
    planned = [] if args.no_plans else wanted
    plans = [_start("--plan", *of, args.dry, args.machine) for _, *of in planned]
    rows = []
    for (name, job, depth, arm), planning in itertools.zip_longest(wanted, plans):
        measured = _result(_start("--measure", job, depth, arm, args.dry, args.machine))
        row = {"job": name, "depth": depth, "arm": arm, "measured": measured}
        row |= {"name": f"{name}, {depth} layers, {arm}"}
        row |= {"planned": _result(planning) if planning else {}}
        rows.append(row)
        write(rows, args.machine, args.out)
        print("\n".join(lines([row])), flush=True)
    if all("error" in row["measured"] for row in rows):
        raise SystemExit("no job was measured")


if __name__ == "__main__":
    main()
