"""Where the time of an eager step goes: on the host by function, on the device by stream.

    python benchmarks/step_profile.py --out outputs/profile          # a GPU: a 16B block
    python benchmarks/step_profile.py --toy --out outputs/profile    # the same, tiny, on a CPU

For each activation checkpointing policy: CPU time of a step (one thread: autograd runs in it), the
Python functions that take most of it, the kernels and the share of the step in which none runs.
``timeline.png`` has the kernels and the copies to and from the host over time; "copies beside
computation" is the share of the copies' time in which a kernel runs. A profiler slows the host
down, so the idle share is an upper bound. On a CPU each operation counts as a kernel.
"""

import argparse
import contextlib
import cProfile
import pstats
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.activation_bytes import ARMS
from benchmarks.device_events import Busy, copies_beside_kernels, device_busy, draw, idle_share
from benchmarks.step_time import STOCK, Size, model_step


def host_ms(step: Callable[[], None], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        step()
        times.append(time.thread_time() - begin)
    return 1e3 * statistics.median(times)


def by_function(step: Callable[[], None], most: int) -> Iterator[str]:
    """The Python functions in which the host spends most, and each package's share."""
    profiler = cProfile.Profile()
    profiler.runcall(step)
    stats: Any = pstats.Stats(profiler)
    rows, packages, total = [], defaultdict(float), stats.total_tt
    for (file, line, name), (_, calls, own, _, _) in stats.stats.items():
        parts = Path(file).parts
        known = [p for p in ("titan_ext", "torchtitan", "torchao", "torch") if p in parts]
        package = known[0] if known else "built-in" if file == "~" else "other"
        packages[package] += own
        rows.append((own, calls, f"{package} {Path(file).name}:{line} {name}"))
    for package, own in sorted(packages.items(), key=lambda item: -item[1]):
        yield f"    {own / total:6.1%} in functions of {package}"
    for own, calls, name in sorted(rows, reverse=True)[:most]:
        yield f"    {1e3 * own:8.2f} ms {calls:6} calls  {name[:110]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--toy", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument("--arms", nargs="+", default=["fp8-memory"], choices=ARMS, metavar="ARM")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--batch", type=int, default=2, help="sequences of 4096 tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--functions", type=int, default=12, help="how many are listed")
    parser.add_argument("--out", type=Path, required=True, help="folder of the picture")
    args = parser.parse_args()
    cuda = not args.toy
    if cuda and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --toy profiles a tiny model on the CPU.")

    torch.autograd.set_multithreading_enabled(False)  # as Titan does
    size = Size("16B", args.layers, args.batch, 4096, blocks=True)
    if args.toy:
        size = Size("debugmodel", args.layers, 2, 16, blocks=True, device="cpu")
    timelines: dict[str, Sequence[Busy]] = {}
    stock_ms = 0.0
    for arm in [STOCK, *(arm for arm in args.arms if arm != STOCK)]:
        step = model_step(arm, size)
        for _ in range(3):
            step()
        if cuda:
            torch.cuda.synchronize()
        ms = host_ms(step, args.rounds)
        stock_ms = stock_ms or ms
        timelines[arm] = busy = device_busy(step, cuda)
        beside = copies_beside_kernels(busy)
        print(f"{arm}: host ms a step = {ms:.2f}")
        print(f"{arm}: host time of stock selective's = {ms / stock_ms:.3f}")
        print(f"{arm}: kernels a step = {sum(not b.is_copy for b in busy)}")
        print(f"{arm}: idle share of the device = {idle_share(busy):.3f}")
        if beside is not None:
            print(f"{arm}: copies beside computation = {beside:.3f}")
        print("\n".join(by_function(step, args.functions)), flush=True)
    with contextlib.suppress(ImportError):  # a machine may have no matplotlib
        draw(timelines, args.out / "timeline.png")


if __name__ == "__main__":
    main()
