"""Steps of Titan's own trainer, stock and ours, one arm after another in one process.

    python benchmarks/titan_steps.py --arms fp8-memory fp8-speed-early   # a GPU: 16B, 4 layers
    python benchmarks/titan_steps.py --toy --arms fp8-memory             # the same, tiny, on a CPU
    torchrun --nproc_per_node=2 benchmarks/titan_steps.py --gloo --cp 2  # two ranks on one GPU

The model is the first layers of DeepSeek-V3 16B with embedding and head, trained on Python's
standard library: tokens a second (the median step), the peak of the allocator, every loss, and
what each is of stock selective checkpointing's, which comes first and once more at the end.

- ``--largest-batch N``: then more and more sequences in a step, until memory ends, or N.
- ``--compile BACKEND``: also graphs and recompiles of each arm.
- ``--float8 experts``: Titan's float8 grouped GEMMs (``linear``: its linears, emulated).
- ``--plan-only``: the bytes and the milliseconds of a dry run; needs no GPU. full_scale.py holds
  plans against what is measured.
- Arm ``units``: sub-module units, with what the allocator gave to FSDP.

A line is ``arm: figure = value``, which benchmarks/gpu_receipts.py reads.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as Titan's run script

import torch
import torch.distributed as dist
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC
from torchtitan.tools import utils as titan_utils

from benchmarks.activation_bytes import ARMS
from tests.helpers.training import Run, make_config, patched
from titan_ext.base import no_accelerator
from titan_ext.base.stdlib_corpus import make_corpus, register_stdlib_corpus
from titan_ext.verify.ranks import free_port

STOCK = "stock-selective"
GIB = 2**30
_WARM_UP = 3
_SUBMODULE: dict[str, Any] = {"parallelize": "submodule", "ac": "selective"}
NAMES = (*ARMS, "stock-memory-budget", "units")


@dataclass
class Steps:
    """What one arm did."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0
    figures: dict[str, float] = field(default_factory=dict)


def run_of(arm: str, base: Run) -> Run:
    """``base`` as ``arm`` trains it: "stock-*" by Titan alone, the others by titan_ext."""
    if arm == "units":
        return replace(base, **_SUBMODULE)
    policy = MemoryBudgetAC.Config() if arm == "stock-memory-budget" else ARMS[arm]()
    return replace(base, ac=policy, parallelize="stock" if arm.startswith("stock-") else "block")


def train(run: Run, largest: int) -> Steps:
    """Every step of ``run`` under Titan's trainer; up to ``largest`` sequences in one more."""
    no_accelerator.enable()
    register_stdlib_corpus()
    done, device = Steps(), titan_utils.device_module
    of_units = run.parallelize == "submodule"
    torch._dynamo.reset()
    torch._functorch.config.activation_memory_budget = 1.0  # the budget policy changes it
    counters.clear()
    clear_compilation_metrics()
    with tempfile.TemporaryDirectory() as folder, patched(run):
        config: Any = make_config(run, Path(_of_first_rank(folder)))
        config.debug.deterministic = False
        config.metrics.enable_tensorboard = False
        config.training.steps += 100  # the schedule of the learning rate ends with them
        with no_accelerator.layout_independent_init():
            trainer = config.build()
        if dist.get_backend() != "nccl":  # the others have no PREMUL_SUM
            for part in trainer.model_parts:
                no_accelerator.reduce_without_premul_sum(part)
        trainer.metrics_processor.log = lambda step, loss, *_, **__: done.losses.append(loss)
        batches = trainer.batch_generator(trainer.dataloader)
        for step in range(1, run.steps + 1):
            trainer.step = step
            if step == min(_WARM_UP, run.steps):
                device.reset_peak_memory_stats()
            last = step == run.steps
            with AllocatorTrace() if of_units and last else _Timer() as timer:
                trainer.train_step(batches)
                device.synchronize()
            if isinstance(timer, _Timer) and step > min(_WARM_UP, run.steps - 2):
                done.seconds.append(timer.seconds)
            elif isinstance(timer, AllocatorTrace) and timer.entries:
                given = fsdp_peak(timer.entries)
                done.figures["GiB that the allocator gave to FSDP at most"] = given / GIB
        done.peak = allocated_peak()
        if run.compiled:
            recompiled = [m for m in get_compilation_metrics() if m.recompile_reason]
            done.figures["graphs"] = counters["stats"]["unique_graphs"]
            done.figures["recompiles"] = len(recompiled)
        if largest:
            trainer.metrics_processor.log = lambda *_, **__: None
            batch = next(batches)

            def peak_of(sequences: int) -> int:
                device.reset_peak_memory_stats()
                trainer.step += 1
                trainer.train_step(iter([of_size(batch, sequences)]))
                device.synchronize()
                return allocated_peak()

            memory = device.get_device_properties(trainer.device).total_memory
            local = config.training.local_batch_size
            done.figures["sequences in the largest batch"] = largest_batch(
                peak_of, local, memory, largest
            )
        trainer.close()
    return done


def _of_first_rank(folder: str) -> str:
    folders = [folder]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(folders)
    return folders[0]


def allocated_peak() -> int:
    """The most bytes that tensors had since the reset; of a CPU, the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return titan_utils.device_module.memory_stats()["active_bytes.all.peak"]


def of_size(batch: tuple[Mapping[str, torch.Tensor], torch.Tensor], sequences: int) -> Any:
    """``batch`` with so many sequences, its own again and again."""
    inputs, labels = batch
    index = torch.arange(sequences) % len(labels)
    return {name: x[index] for name, x in inputs.items()}, labels[index]


def largest_batch(peak_of: Callable[[int], int], first: int, memory: int, most: int) -> int:
    """How many sequences fit, from ``first`` upwards; ``peak_of`` raises OutOfMemoryError.

    Half of what should still fit is added at a time: after a failure no step can be trusted.
    """
    fits, step = first, 1
    try:
        peak = peak_of(fits)
        while fits < most:
            higher = peak_of(min(fits + step, most))
            slope = max(higher - peak, 1) / step
            fits, peak = min(fits + step, most), higher
            step = max(1, int((memory - peak) / slope / 2))
    except torch.OutOfMemoryError:
        pass
    return fits


class _Timer:
    def __enter__(self) -> "_Timer":
        titan_utils.device_module.synchronize()
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._begin


class AllocatorTrace:
    """Every allocation of a step with the Python code that asked for it; none on a CPU."""

    def __enter__(self) -> "AllocatorTrace":
        self.entries: Sequence[Mapping[str, Any]] = ()
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=1_000_000)
        return self

    def __exit__(self, *_: object) -> None:
        if torch.cuda.is_available():
            self.entries = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(None)


def fsdp_peak(entries: Sequence[Mapping[str, Any]]) -> int:
    """The most bytes alive of those that FSDP's code, torch's or ours, allocated in a trace."""
    alive: dict[int, int] = {}
    peak = now = 0
    for entry in entries:
        if entry["action"] == "alloc":
            if any("/fsdp/" in frame["filename"] for frame in entry.get("frames", ())):
                alive[entry["addr"]] = entry["size"]
                now += entry["size"]
                peak = max(peak, now)
        elif entry["action"] == "free_completed":
            now -= alive.pop(entry["addr"], 0)
    return peak


def plan(arms: Sequence[str], base: Run) -> dict[str, dict[str, float]]:
    """Of a dry run on the CPU, by arm: GiB at the peak, and ms a step at an H100's rates.

    Also those of the optimizer: without them, runs that differ by a layer tell its time.
    """
    from titan_ext.plan.dry_run import dry_run
    from titan_ext.plan.stand_ins import as_rank
    from titan_ext.plan.time import Category

    planned = {}
    for arm in arms:
        run = run_of(arm, base)
        if run.parallelize == "stock":  # whole blocks, as our "block"
            run = replace(run, parallelize="block")
        with tempfile.TemporaryDirectory() as folder, as_rank(base.world, 0):
            with no_accelerator.as_with_an_accelerator():
                config: Any = make_config(run, Path(folder))
            config.debug.deterministic = False
            planned_run = dry_run(config, base.world, memory=80 * GIB, machine="h100")
        dist.destroy_process_group()
        assert planned_run.memory is not None
        assert planned_run.time is not None
        planned[arm] = {
            "GiB": planned_run.memory.peak.nbytes / GIB,
            "ms": planned_run.time.step_ms,
            "optimizer ms": planned_run.time.ms[Category.OPTIMIZER],
        }
        del planned_run
        gc.collect()
    return planned


def lines(done: Mapping[str, Steps], tokens: int) -> Iterator[str]:
    """Every figure, ``tokens`` being those of a rank's step."""
    stock = done[STOCK]
    for arm, steps in done.items():
        seconds = statistics.median(steps.seconds)
        yield f"{arm}: tokens a second = {tokens / seconds:.0f}"
        yield f"{arm}: peak GiB = {steps.peak / GIB:.3f}"
        for name, value in steps.figures.items():
            yield f"{arm}: {name} = {value:g}"
        if arm == STOCK:
            continue
        faster = statistics.median(stock.seconds) / seconds
        yield f"{arm}: tokens a second of stock selective's = {faster:.3f}"
        yield f"{arm}: peak of stock selective's = {steps.peak / stock.peak:.3f}"
        largest = "sequences in the largest batch"
        if largest in steps.figures:
            ratio = steps.figures[largest] / stock.figures[largest]
            yield f"{arm}: largest batch of stock selective's = {ratio:.3f}"
        apart = [a - b for a, b in zip(steps.losses, stock.losses, strict=True)]
        yield f"{arm}: loss more than stock's, mean = {statistics.fmean(apart):.5f}"
        yield f"{arm}: loss more than stock's, at most = {max(map(abs, apart)):.5f}"
    for arm, steps in done.items():
        yield f"{arm} losses {' '.join(f'{loss:.4f}' for loss in steps.losses)}"


def plan_lines(planned: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for arm, figures in planned.items():
        yield f"{arm}: GiB at the peak, planned = {figures['GiB']:.3f}"
        yield f"{arm}: ms a step, modelled at an H100's rates = {figures['ms']:.1f}"
        yield f"{arm}: optimizer ms of these = {figures['optimizer ms']:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arms", nargs="*", default=["fp8-memory"], choices=NAMES, metavar="ARM")
    parser.add_argument("--toy", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 4096 tokens")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cp", type=int, default=1, help="context parallelism: the ranks")
    parser.add_argument("--gloo", action="store_true", help="all ranks on one device")
    parser.add_argument("--compile", metavar="BACKEND", help="inductor or aot_eager")
    parser.add_argument("--float8", choices=("experts", "linear"))
    parser.add_argument("--largest-batch", type=int, default=0, metavar="N")
    parser.add_argument("--plan-only", action="store_true", help="a dry run of each arm, no more")
    args = parser.parse_args()
    if not (args.toy or args.plan_only or torch.cuda.is_available()):
        parser.error("torch sees no GPU here; --toy trains a tiny model on the CPU.")

    arms = [STOCK, *(arm for arm in args.arms if arm != STOCK)]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    base = Run(
        model="deepseek_v3" if args.toy else "deepseek_v3_16b",
        layers=2 if args.toy else args.layers,
        seq_len=(64 if args.cp == 1 else 256) if args.toy else 4096,  # its masks have blocks of 128
        global_batch=args.batch * world // args.cp,
        steps=args.steps,
        world=world,
        cp=args.cp,
        attention="flex" if args.cp > 1 and args.toy else "cpu",
        compiled=args.compile is not None,
        compile_backend=args.compile or "inductor",
        converters=(f"float8_{args.float8}",) if args.float8 else (),
    )
    if args.plan_only:
        print("\n".join(plan_lines(plan(arms, base))))
        return
    make_corpus()
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    for name, value in {**environment, "MASTER_PORT": str(free_port())}.items():
        os.environ.setdefault(name, value)
    if args.gloo:  # NCCL takes no device twice; Titan uses the group that is there
        os.environ["LOCAL_RANK"] = "0"
        torch.autograd.set_multithreading_enabled(False)
        dist.init_process_group("gloo")
    done: dict[str, Steps] = {}
    for arm in (*arms, STOCK):
        name = arm if arm not in done else f"{STOCK}, again"
        done[name] = train(run_of(arm, base), args.largest_batch if name == arm else 0)
        _clear_sharding_prop_cache()  # it has the last arm's mesh, which FSDP refuses
        gc.collect()
        titan_utils.device_module.empty_cache()
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    if not is_first:
        return
    print("\n".join(lines(done, args.batch * base.seq_len // args.cp)))


if __name__ == "__main__":
    main()
