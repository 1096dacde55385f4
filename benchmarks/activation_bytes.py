"""What one MoE block keeps between forward and backward, by tensor class, and what that costs.

    python benchmarks/activation_bytes.py                        # all of it, on CPU
    python benchmarks/activation_bytes.py --geometry deepseek_v3_16b --tokens 1024 --ep 1 \\
        --arms stock-none stock-selective fp8-memory fp8-speed --classes

One row an arm:

- MiB kept: every storage alive after the forward that was not before, the block's input included
  (kept_bytes.py). Also as a ratio to stock selective checkpointing under the same backend;
- FLOPs of the forward and of the recompute (the backward's less those without checkpointing);
- all-to-alls in forward and backward;
- the least cosine of a gradient with that of the run without checkpointing, and its parameter.

Attention is one op (fused_attention.py). With EP 2 there are two gloo processes; figures are rank
0's, cosines of the whole gradients.

``stock-*`` is Titan's own parallelization and dispatcher; the others are titan_ext's.
``selective`` is Titan's policy on our dispatcher. ``--logits 20`` scales the queries until the
largest attention logit is 20.
"""

import argparse
import contextlib
import dataclasses
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    SelectiveAC,
)

from benchmarks.fused_attention import FLOP_FORMULAS
from benchmarks.kept_bytes import KeptBytes, KeptClass, kept_total
from benchmarks.moe_blocks import GEOMETRIES, BlockLayout, BlockRun
from tests.helpers.cluster import run_ranks
from tests.helpers.collectives import CollectiveTrace
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.base.no_accelerator import fast_bfloat16_matmul

MIB = 2**20
GFLOP = 1e9

Config = ActivationCheckpointing.Config
_FLOAT8_ATTENTION = {"attention.inner_attention": "save_float8"}
ARMS: dict[str, Callable[[], Config | None]] = {
    "stock-none": lambda: None,
    "stock-selective": SelectiveAC.Config,
    "stock-full": FullAC.Config,
    "selective": SelectiveAC.Config,
    "fp8-memory": lambda: FP8AC.Config(mode="selective", preset="memory"),
    "fp8-speed": lambda: FP8AC.Config(mode="selective", preset="speed"),
    "fp8-full": lambda: FP8AC.Config(mode="full"),
    "fp8-no-recompute": lambda: FP8AC.Config(mode="no_recompute"),
    "fp8-memory-attention": lambda: FP8AC.Config(
        mode="selective", preset="memory", op_policies=_FLOAT8_ATTENTION
    ),
    "fp8-speed-attention": lambda: FP8AC.Config(preset="speed", op_policies=_FLOAT8_ATTENTION),
    "fp8-memory-early": lambda: FP8AC.Config(preset="memory", score_before_last_gemm=True),
    "fp8-balanced": lambda: FP8AC.Config(preset="balanced"),
    "fp8-balanced-early": lambda: FP8AC.Config(preset="balanced", score_before_last_gemm=True),
    "fp8-gemms": lambda: FP8AC.Config(preset="gemms"),
    "fp8-gemms-early": lambda: FP8AC.Config(preset="gemms", score_before_last_gemm=True),
    "fp8-speed-early": lambda: FP8AC.Config(preset="speed", score_before_last_gemm=True),
    "fp8-no-recompute-attention": lambda: FP8AC.Config(
        mode="no_recompute", op_policies=_FLOAT8_ATTENTION
    ),
    "fp8-offload": lambda: _offloaded("offload"),
    "fp8-offload-float8": lambda: _offloaded("offload_float8"),
}
"""By name, what ``--arms`` takes. Any config of Titan's kind will do."""
# On a CPU nothing tells the host's bytes from the device's.
_DEFAULT_ARMS = [name for name in ARMS if name != "selective" and "offload" not in name]
_REFERENCES = ("stock-none", "stock-selective")


def _offloaded(policy: str) -> FP8AC.Config:
    """What stock selective keeps, on the host."""
    return FP8AC.Config(preset="stock", op_policies={"input": policy, "*": policy})


@dataclass(frozen=True)
class Measured:
    """One arm. FLOPs of one rank; ``worst`` is the parameter of the least cosine."""

    arm: str
    classes: list[KeptClass]
    forward_flops: int
    backward_flops: int
    recomputed_flops: int
    forward_all_to_alls: int
    backward_all_to_alls: int
    cosine: float
    worst: str
    seconds: float

    @property
    def nbytes(self) -> int:
        return kept_total(self.classes)


def measure(
    geometry: str,
    layout: BlockLayout,
    tokens: int,
    arms: list[str],
    logits: float | None = None,
) -> list[Measured]:
    """Every arm in this process (a rank, if ``layout.ep`` > 1), "stock-none" first.

    Raises:
        ValueError: for an unknown arm.
    """
    for arm in arms:
        if arm not in ARMS:
            raise ValueError(f"--arms {arm}: expected some of {', '.join(ARMS)}.")
    fast_bfloat16_matmul()
    run = BlockRun(geometry, layout, tokens, logits)
    results: list[Measured] = []
    reference: dict[str, torch.Tensor] = {}
    for arm in ["stock-none", *(name for name in arms if name != "stock-none")]:
        measured, gradients = _measure_arm(run, arm)
        if not results:
            reference = gradients
        base = results[0].backward_flops if results else measured.backward_flops
        cosine, worst = min((_cosine(g, reference[name]), name) for name, g in gradients.items())
        results.append(
            dataclasses.replace(
                measured,
                recomputed_flops=measured.backward_flops - base,
                cosine=cosine,
                worst=worst,
            )
        )
        del gradients
        gc.collect()  # modules are cycles: without it two models are there at a time
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return results


def _measure_arm(run: BlockRun, arm: str) -> tuple[Measured, dict[str, torch.Tensor]]:
    model = run.build(ARMS[arm](), stock=arm.startswith("stock-"))
    leaf_BLD = run.input_BLD.clone().requires_grad_()
    with run.context():
        if dist.is_initialized():
            # FSDP makes its buffers in the first forward: let it, and then look.
            run.forward(model, leaf_BLD).backward()
            _zero(model, leaf_BLD)
        kept, trace, begin = KeptBytes(model, "layers.0"), CollectiveTrace(), time.perf_counter()
        with trace, _flops() as forward, kept:
            loss = run.forward(model, leaf_BLD)
        classes = kept.classes()
        with trace, _flops() as backward:
            loss.backward()
    in_backward = [e.in_backward for e in trace.events if e.kind == "all_to_all"]
    measured = Measured(
        arm=arm,
        classes=classes,
        forward_flops=forward.get_total_flops(),
        backward_flops=backward.get_total_flops(),
        recomputed_flops=0,
        forward_all_to_alls=in_backward.count(False),
        backward_all_to_alls=in_backward.count(True),
        cosine=1.0,
        worst="",
        seconds=time.perf_counter() - begin,
    )
    gradients = {
        canonical_fqn(name).removeprefix("layers.0."): _local(p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    assert leaf_BLD.grad is not None
    return measured, gradients | {"(input)": leaf_BLD.grad}


def _zero(model: torch.nn.Module, leaf: torch.Tensor) -> None:
    model.zero_grad()
    leaf.grad = None


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _flops() -> FlopCounterMode:
    formulas = FLOP_FORMULAS | {torch.ops.aten._grouped_mm: _grouped_mm_flops}
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _grouped_mm_flops(a_shape, b_shape, *args, out_shape=None, **kwargs) -> int:
    """torch 2.15 counts no grouped matrix multiplication. Each row (2D x 3D) or, for the weights'
    gradients, each column (2D x 2D) belongs to one group: as many as without groups."""
    (rows, inner), columns = a_shape[-2:], b_shape[-1]
    return 2 * rows * inner * columns


def _cosine(x: torch.Tensor, y: torch.Tensor) -> float:
    """Of all shards together, in fp64 sums."""
    sums = torch.zeros(3, dtype=torch.float64)
    for a, b in zip(x.flatten().split(1 << 22), y.flatten().split(1 << 22), strict=True):
        a, b = a.double(), b.double()
        sums += torch.stack([a @ b, a @ a, b @ b])
    if dist.is_initialized():
        dist.all_reduce(sums)
    ab, aa, bb = sums.tolist()
    return ab / (aa * bb) ** 0.5 if aa and bb else float(aa == bb)


def measure_layout(
    geometry: str, layout: BlockLayout, tokens: int, arms: list[str], logits: float | None = None
) -> list[Measured]:
    """``measure``, in processes of its own; rank 0's results."""
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError):
        ranks = run_ranks(
            measure,
            layout.ep,
            geometry,
            layout,
            tokens,
            arms,
            logits,
            log_folder=Path(folder),
            timeout_s=7200,
        )
        return ranks[0]
    raise AssertionError("unreachable")


def table(results: list[Measured]) -> str:
    """One line an arm."""
    stock = next(m for m in results if m.arm == "stock-selective")
    lines = [
        f"{'arm':22} {'MiB':>8} {'ratio':>6} {'forward':>8} {'recompute GFLOP':>16} "
        f"{'all-to-alls':>11} {'min cosine':>10}  of"
    ]
    for m in results:
        share = m.recomputed_flops / m.forward_flops
        lines.append(
            f"{m.arm:22} {m.nbytes / MIB:8.2f} {m.nbytes / stock.nbytes:6.3f} "
            f"{m.forward_flops / GFLOP:8.1f} {m.recomputed_flops / GFLOP:8.1f} ({share:5.1%}) "
            f"{m.forward_all_to_alls:5} +{m.backward_all_to_alls:3}  {m.cosine:10.5f}  {m.worst}"
        )
    return "\n".join(lines)


def class_table(measured: Measured, least: float = 0.005) -> str:
    """Tensor classes of one arm, largest first; those below ``least`` of the bytes together."""
    lines = [f"{measured.arm}: {measured.nbytes / MIB:.2f} MiB"]
    small = [c for c in measured.classes if c.nbytes < least * measured.nbytes]
    for c in measured.classes:
        if c not in small:
            lines.append(f"  {c.nbytes / MIB:8.2f} MiB {c.tensors:4}  {c.name}")
    if small:
        count = sum(c.tensors for c in small)
        lines.append(f"  {kept_total(small) / MIB:8.2f} MiB {count:4}  (smaller classes)")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--geometry", nargs="+", default=list(GEOMETRIES[:3]), choices=GEOMETRIES)
    parser.add_argument(
        "--tokens", nargs="+", type=int, help="a rank's; default: 1024, and 4096 at 16B"
    )
    parser.add_argument("--ep", nargs="+", type=int, default=[1, 2])
    backends: list[Any] = ["spmd_types", "partial_dtensor"]
    parser.add_argument("--backend", nargs="+", default=backends, choices=backends)
    parser.add_argument("--arms", nargs="+", default=_DEFAULT_ARMS, choices=list(ARMS))
    saves = ("auto", "always", "never")
    parser.add_argument("--save-all-to-all", default="auto", choices=saves)
    parser.add_argument("--logits", type=float, help="the largest attention logit")
    parser.add_argument("--classes", action="store_true", help="print every arm's tensor classes")
    args = parser.parse_args()

    arms = [*_REFERENCES, *(arm for arm in args.arms if arm not in _REFERENCES)]
    for geometry in args.geometry:
        sizes = args.tokens or ([1024, 4096] if geometry == "deepseek_v3_16b" else [1024])
        for tokens in sizes:
            for ep in args.ep:
                for backend in args.backend if ep > 1 else ["spmd_types"]:
                    layout = BlockLayout(
                        ep=ep, backend=backend, save_all_to_all=args.save_all_to_all
                    )
                    results = measure_layout(geometry, layout, tokens, arms, args.logits)
                    title = f"\n{geometry}, {tokens} tokens a rank, EP {ep}"
                    print(title + (f", {backend}" if ep > 1 else ""))
                    print(table(results), flush=True)
                    for measured in results if args.classes else ():
                        print(class_table(measured), flush=True)


if __name__ == "__main__":
    main()
