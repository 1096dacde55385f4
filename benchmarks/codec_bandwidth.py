"""The codec's bandwidth against the device's copy bandwidth, both ways, in one run.

    python benchmarks/codec_bandwidth.py            # CUDA if there is one, else CPU
    python benchmarks/codec_bandwidth.py --device cpu --rows 2048 --cols 2048

It needs torch >= 2.11 and this folder's parent, and no TorchTitan: on another machine,
``PYTHONPATH=. python benchmarks/codec_bandwidth.py``.

Bandwidth is bytes read plus bytes written over time. A copy of the tensor reads and writes 2 bytes
a value; the codec reads 2 and writes 1 + 1/128, or the other way round. So at equal bandwidth it is
faster than a copy, and a ratio of 1 means that memory, not arithmetic, is the limit. Every round
measures copy and codec side by side, in turn, and the ratio is the median over the rounds.
"Kernels" are those of one call; a CPU's operations count as such.

On CPU only with a tensor larger than the last-level cache is the copy a copy of memory.
"""

import argparse
import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.device_events import device_busy
from titan_ext.fp8 import Codec, dequantize, quantize
from titan_ext.fp8 import codec as codec_module


def seconds(function: Callable[[], object], device: torch.device, iterations: int) -> float:
    """Time of one call: by events on CUDA, by the clock on CPU."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(iterations):
            function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / iterations
    begin = time.perf_counter()
    for _ in range(iterations):
        function()
    return (time.perf_counter() - begin) / iterations


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} thread"
    return f"{name}, torch {torch.__version__}"


def measure(codec: Codec, x: torch.Tensor, rounds: int, iterations: int, eager: bool) -> None:
    device = x.device
    target = torch.empty_like(x)
    stored = quantize(x, codec)
    one_way = x.nbytes + sum(t.nbytes for t in stored)
    copy = lambda: target.copy_(x)  # noqa: E731

    # The path of the store, in one kernel; on a CPU, too.
    codec_module.compiles_for = lambda device: True
    ops, name = torch.ops.titan_ext, codec_module.codec_name(codec)
    one_kernel = (
        lambda x, _: ops.float8_quantize(x, name),
        lambda stored, _, dtype: ops.float8_dequantize(*stored, name, dtype),
    )
    kinds = {"compiled": one_kernel} | ({"eager": (quantize, dequantize)} if eager else {})
    for kind, (encode, decode) in kinds.items():
        ways = {
            "quantize": lambda e=encode: e(x, codec),
            "dequantize": lambda d=decode: d(stored, codec, x.dtype),
        }
        for way, function in ways.items():
            for warm_up in (copy, function):
                seconds(warm_up, device, 3)
            copies, times = [], []
            for _ in range(rounds):
                copies.append(seconds(copy, device, iterations))
                times.append(seconds(function, device, iterations))
            ratios = [
                (one_way / t) / (2 * x.nbytes / c) for t, c in zip(times, copies, strict=True)
            ]
            kernels = len(device_busy(function, device.type == "cuda"))
            print(
                f"{x.shape[-1]} wide, {codec.dtype} {codec.block:>6} {kind:>8} "
                f"{way:>10}: "
                f"{one_way / statistics.median(times) / 1e9:8.2f} GB/s, copy "
                f"{2 * x.nbytes / statistics.median(copies) / 1e9:8.2f} GB/s, ratio "
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
                f"{kernels} kernels",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--rows", type=int, help="default: 65536 on CUDA, 16384 on CPU")
    parser.add_argument("--cols", type=int, nargs="+", default=[2048], help="last dimension")
    parser.add_argument("--dtype", nargs="+", default=["e4m3"], help="e4m3 e5m2")
    parser.add_argument("--block", nargs="+", type=int, default=[128], help="64 128 256")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--iterations", type=int, help="a round; default: 20 on CUDA, 1 on CPU")
    parser.add_argument("--no-eager", action="store_true", help="compiled only")
    args = parser.parse_args()

    device = torch.device(args.device)
    on_cuda = device.type == "cuda"
    rows = args.rows or (65536 if on_cuda else 16384)
    print(f"{machine(device)}; x is bf16")
    for cols in args.cols:
        x = torch.randn(rows, cols, dtype=torch.bfloat16, device=device)
        print(f"[{rows}, {cols}], {x.nbytes / 2**20:.0f} MiB")
        for dtype, block in itertools.product(args.dtype, args.block):
            codec = Codec(dtype, block)
            iterations = args.iterations or (20 if on_cuda else 1)
            measure(codec, x, args.rounds, iterations, not args.no_eager)


if __name__ == "__main__":
    main()
