"""The rates of the card at hand, as a machine file for ``--machine``, and what they are worth.

    python -m benchmarks.rates --out my_card.toml                      # a GPU; under two minutes
    torchrun --nproc_per_node=8 -m benchmarks.rates --out my_card.toml  # and the links of a node
    torchrun --nproc_per_node=2 -m benchmarks.rates --out cpu.toml     # the CPU, on gloo ranks

It times kernels as a training step has them: GEMMs (those of float8 where a GPU has it), grouped
GEMMs with few and many rows an expert, attention forward and backward, elementwise operations and
copies from tiny to large. On a GPU the profiler says how long kernels ran. On a CPU a call is timed
with all that torch does around it, and bfloat16 is multiplied as in a run
(``no_accelerator.fast_bfloat16_matmul``). With several ranks all of them compute at once, and
collectives are timed, too.

Rates are fitted with the formulas of the planner's clock (``op_cost``): the mean of ``|log(planned
/ measured)|`` is least. Half of the shapes are held out. On those it prints the error of the plan
with the machine's usual rates and with the fitted ones. A line is ``kind: figure = value``, which
benchmarks/gpu_receipts.py reads.
"""

import argparse
import itertools
import math
import operator
import os
import statistics
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only
from torchtitan.tools.utils import has_cuda_capability

from benchmarks.device_events import events_of, kernel_ms
from titan_ext.base import no_accelerator
from titan_ext.base.machines import MACHINES, Machine, machine_toml
from titan_ext.plan.op_cost import collective_ms, op_cost

RATES = {
    "elementwise and copies": ("memory", "launch"),
    "GEMM": ("gemm",),
    "GEMM in fp32": ("fp32",),
    "GEMM in float8": ("float8",),
    "grouped GEMM": ("grouped", "half_rate_rows"),
    "attention": ("attention",),
    "gathers and reductions": ("in_node", "collective"),
    "exchanges": ("in_node_all_to_all",),
}
"""What is timed, and the rates that are fitted to it, in this order."""
_SENT = ("gathers and reductions", "exchanges")
_GRIDS = ((2.0, 12), (1 / 2, 4), (1 / 8, 4), (1 / 32, 4), (1 / 128, 4))
"""Exponents of 2 that are tried: their distance, and how many to each side."""
_CALLS = 5

_ops: Any = torch.ops.aten


@dataclass(frozen=True)
class Item:
    """Something to time. ``make`` returns the call, and what it is called in ``op_cost``."""

    kind: str
    name: str
    make: Callable[[], tuple[Callable[[], Any], Callable[[Any], Callable[[Machine], float]]]]


@dataclass(frozen=True)
class Timed:
    """How long an item took, and its milliseconds by the rates of a machine."""

    kind: str
    name: str
    ms: float
    price: Callable[[Machine], float]
    held_out: bool

    def error(self, machine: Machine) -> float:
        return abs(math.log(self.price(machine) / self.ms))


def _priced(func: Any, args: Any, out: Any) -> Callable[[Machine], float]:
    """By the shapes alone, so that the tensors can go."""
    args, out = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, out))
    return lambda machine: op_cost(func, args, {}, out, machine).ms


def _of_op(func: Any, *args: Any) -> Any:
    return lambda: func(*args), lambda out: _priced(func, args, out)


def _gemm(m: int, k: int, n: int, dtype: torch.dtype, of: str, device: str) -> Any:
    """A linear's product forward, for the gradient of its input, or for that of its weight."""
    x, w = (torch.randn(a, k, device=device).to(dtype) for a in (m, n))
    grad = torch.randn(m, n, device=device).to(dtype)
    pairs = {"forward": (x, w.t()), "input": (grad, w), "weight": (grad.t(), x)}
    return _of_op(_ops.mm.default, *pairs[of])


def _scaled(m: int, k: int, n: int, device: str) -> Any:
    """A linear's product forward, of float8 with one scale a tensor."""
    x, w = (torch.randn(a, k, device=device).to(torch.float8_e4m3fn) for a in (m, n))
    one = torch.ones((), device=device)
    return _of_op(_ops._scaled_mm.default, x, w.t(), one, one, None, None, torch.bfloat16)


def _grouped(experts: int, rows: int, k: int, n: int, of: str, device: str) -> Any:
    x, grad = (torch.randn(experts * rows, a, device=device).bfloat16() for a in (k, n))
    w = torch.randn(experts, n, k, device=device).bfloat16()
    ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * rows
    pairs = {"forward": (x, w.transpose(1, 2)), "input": (grad, w), "weight": (grad.t(), x)}
    return _of_op(_ops._grouped_mm.default, *pairs[of], ends)


def _attention(batch: int, heads: int, length: int, qk: int, v: int, of: str, device: str) -> Any:
    fused = _ops._scaled_dot_product_fused_attention_overrideable
    q, k, value = (
        torch.randn(batch, heads, length, dim, device=device).bfloat16().requires_grad_()
        for dim in (qk, qk, v)
    )
    if of == "forward":
        call = torch.no_grad()(lambda: scaled_dot_product_attention(q, k, value, is_causal=True))
        return call, lambda out: _priced(fused.default, (q, k, value), out)
    out = scaled_dot_product_attention(q, k, value, is_causal=True)
    grad = torch.randn_like(out)
    back = _ops._scaled_dot_product_fused_attention_overrideable_backward.default
    return (
        lambda: torch.autograd.grad(out, (q, k, value), grad, retain_graph=True),
        lambda grads: _priced(back, (grad, q, k, value), grads),
    )


def _elementwise(op: str, count: int, device: str) -> Any:
    x, y = (torch.randn(max(count // 256, 1), 256, device=device).bfloat16() for _ in range(2))
    if op == "cast":
        func: Any = _ops._to_copy.default
        call = lambda: func(x, dtype=torch.float32)  # noqa: E731
        return call, lambda out: _priced(func, (x,), out)
    index = torch.arange(len(x), device=device).flip(0)
    calls = {
        "mul": (_ops.mul.Tensor, x, y),
        "add_": (_ops.add_.Tensor, x, y),
        "silu": (_ops.silu.default, x),
        "copy_": (_ops.copy_.default, x, y),
        "rows": (_ops.index_select.default, x, 0, index),
        "cat": (_ops.cat.default, [x, y]),
    }
    return _of_op(*calls[op])


def _collective(op: str, nbytes: int, device: str) -> Any:
    """Of ``nbytes`` in the whole buffer."""
    ranks = dist.get_world_size()
    whole = torch.zeros(max(nbytes // 4 // ranks, 1) * ranks, device=device)
    shard, other = whole.chunk(ranks)[0].clone(), torch.empty_like(whole)
    calls: dict[str, Callable[[], Any]] = {
        "all-gather": lambda: dist.all_gather_into_tensor(whole, shard),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(shard, whole),
        "all-to-all": lambda: dist.all_to_all_single(other, whole),
    }

    def price(machine: Machine) -> float:
        is_exchange = op == "all-to-all"
        return collective_ms(machine, whole.nbytes, ranks, ranks, is_exchange=is_exchange)[0]

    return calls[op], lambda _: price


def items(device: str) -> Iterator[Item]:
    """What is timed: shapes of the shipped jobs on a card, those of the debug model on a CPU."""
    on_card, bf16 = device != "cpu", torch.bfloat16

    def item(kind: str, make: Callable[..., Any], *args: Any) -> Item:
        name = " ".join(str(arg).removeprefix("torch.") for arg in args)
        return Item(kind, name, lambda: make(*args, device))

    counts = [2**n for n in (range(12, 29, 2) if on_card else range(8, 23, 2))]
    for op, count in itertools.product(("mul", "add_", "silu", "copy_", "rows", "cat"), counts):
        yield item("elementwise and copies", _elementwise, op, count)
    for count in counts:
        yield item("elementwise and copies", _elementwise, "cast", count)
    widths = ((256, 3072), (256, 576), (512, 4096), (2048, 256), (256, 1024), (256, 2048))
    tokens = (128, 512, 1024)
    if on_card:  # of 16B, gpt-oss 20B, Qwen3-30B, 671B; the last is a head
        widths = (
            (2048, 3072),
            (2048, 576),
            (2880, 5120),
            (7168, 1536),
            (1536, 24576),
            (2048, 2**17),
        )
        tokens = (1024, 4096, 16384)
    sides = ("forward", "input", "weight")
    for index, (m, (k, n)) in enumerate(itertools.product(tokens, widths)):
        yield item("GEMM", _gemm, m, k, n, bf16, sides[index % 3])
        if k * n < 2**24:
            yield item("GEMM in fp32", _gemm, m, k, n, torch.float32, sides[index % 3])
        if has_cuda_capability(8, 9):
            yield item("GEMM in float8", _scaled, m, k, n)
    experts = (
        ((8, 2048, 1408), (32, 2880, 5760), (16, 7168, 2048))
        if on_card
        else ((4, 256, 256), (8, 256, 256), (4, 256, 512))
    )
    rows = (16, 64, 128, 256, 512, 1024, 4096)
    for index, ((e, k, n), r) in enumerate(itertools.product(experts, rows)):
        yield item("grouped GEMM", _grouped, e, r, k, n, sides[index % 3])
    shapes = ((4, 16, 256), (2, 16, 256), (1, 16, 512), (8, 16, 128), (2, 16, 384), (4, 16, 64))
    heads = ((192, 128), (128, 128)) if on_card else ((192, 128),)  # of MLA
    if on_card:
        shapes = ((4, 16, 4096), (1, 64, 4096), (8, 16, 2048), (1, 32, 8192), (16, 16, 1024))
    for shape, (qk, v) in itertools.product(shapes, heads):
        for of in ("forward", "backward"):
            yield item("attention", _attention, *shape, qk, v, of)
    if dist.is_initialized():
        for nbytes in (2**n for n in (range(10, 31, 2) if on_card else range(10, 25, 2))):
            for op in ("all-gather", "reduce-scatter"):
                yield item("gathers and reductions", _collective, op, nbytes)
            yield item("exchanges", _collective, "all-to-all", nbytes)


def chosen(device: str, quick: bool) -> Iterator[tuple[Item, bool]]:
    """Items, or with ``quick`` a third of each kind, and whether they are held out: every second.

    They are mixed, and always alike.
    """
    order = sorted(items(device), key=lambda item: zlib.crc32(item.name.encode()))
    for kind in RATES:
        its = [item for item in order if item.kind == kind]
        for index, item in enumerate(its[: max(len(its) // 3, 2) if quick else None]):
            yield item, index % 2 == 1


def timed(some: Iterable[tuple[Item, bool]], device: str) -> Iterator[Timed]:
    for item, held_out in some:
        call, price_of = item.make()
        out = call()
        call()
        ms = _ms(call, device, item.kind in _SENT)
        if dist.is_initialized():
            each = [0.0] * dist.get_world_size()
            dist.all_gather_object(each, ms)
            ms = statistics.fmean(each)
        yield Timed(item.kind, item.name, ms, price_of(out), held_out)
        del call, price_of, out


def _ms(call: Callable[[], Any], device: str, is_sent: bool) -> float:
    if device != "cpu":
        events = events_of(lambda: [call() for _ in range(_CALLS)], cuda=True)
        return sum(kernel_ms(events, cuda=True).values()) / _CALLS
    took: list[float] = []
    clock = time.perf_counter if is_sent else time.thread_time  # which no other program disturbs
    while len(took) < _CALLS or (sum(took) < 0.02 and not is_sent):
        begin = clock()
        call()
        took.append(clock() - begin)
    return statistics.median(took) * 1e3


def fit(machine: Machine, found: Sequence[Timed]) -> Machine:
    """``machine`` with the rates at which the planned times of ``found`` are nearest."""
    for kind, names in RATES.items():
        its = [one for one in found if one.kind == kind and not one.held_out]
        for distance, count in _GRIDS * bool(its):
            powers = [2 ** (i * distance) for i in range(-count, count + 1)]
            now = [getattr(machine, name) for name in names]
            tried = [
                replace(machine, **dict(zip(names, map(operator.mul, now, by), strict=True)))
                for by in itertools.product(powers, repeat=len(names))
            ]
            machine = min(tried, key=lambda one: mean_error(its, one))
    return machine


def mean_error(found: Sequence[Timed], machine: Machine) -> float:
    return statistics.fmean(one.error(machine) for one in found)


def usual(device: str) -> Machine:
    """The machine of the planner's table whose name is in that of the card, if there is one."""
    name = "" if device == "cpu" else torch.cuda.get_device_name().lower().replace(" ", "")
    known = max((known for known in MACHINES if known in name), key=len, default="")
    return replace(MACHINES[known or "h100"], name=known)


def lines(found: Sequence[Timed], before: Machine, after: Machine) -> Iterator[str]:
    """Rates, and the mean error of what was held out; 0.1 is 10 % too long or too short."""
    for kind, names in (*RATES.items(), ("all", ())):
        its = [one for one in found if one.held_out and kind in (one.kind, "all")]
        if not its:
            continue
        for name in names:
            yield f"{kind}: {name} = {getattr(after, name):.4g}"
        errors = [math.exp(mean_error(its, one)) - 1 for one in (before, after)]
        yield f"{kind}: shapes held out = {len(its)}"
        if before.name:
            yield f"{kind}: their mean error by the rates of {before.name} = {errors[0]:.3f}"
        yield f"{kind}: their mean error by these rates = {errors[1]:.3f}"
        worst = max(its, key=lambda one: one.error(after))
        times = worst.price(after) / worst.ms
        yield f"{kind}: worst, planned of measured, {worst.name} = {times:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the machine file to write")
    parser.add_argument("--quick", action="store_true", help="a third of the shapes")
    parser.add_argument("--all", action="store_true", help="print every item")
    args = parser.parse_args()
    if args.out.suffix != ".toml":
        parser.error(f"--out is {args.out}; expected a file whose name ends in .toml")
    device = "cpu" if no_accelerator.needed() else "cuda"
    if "RANK" in os.environ:
        if device != "cpu":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
    if device == "cpu":
        no_accelerator.fast_bfloat16_matmul()
    warnings.filterwarnings("ignore", category=FutureWarning)  # names of collectives
    begin = time.monotonic()
    found = [*timed(chosen(device, args.quick), device)]
    before = usual(device)
    after = fit(before, found)
    if dist.is_initialized():
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank:
            return
    if args.all:
        for one in found:
            held = "held out" if one.held_out else "fitted"
            print(f"{one.ms:10.4f} {one.price(after):10.4f} ms, {one.kind}: {one.name}, {held}")
    print(*lines(found, before, after), sep="\n")
    name = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    about = f"# {name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}: benchmarks/rates.py"
    args.out.write_text("\n".join([about, *machine_toml(after)]) + "\n")
    took = time.monotonic() - begin
    print(
        f"{args.out}: {len(found)} shapes in {took:.0f} s; titan_ext dry-run --machine {args.out}"
    )


if __name__ == "__main__":
    main()
