"""Host time of a block's forward under each policy, beside stock's selective checkpointing.

    python benchmarks/ac_host_time.py --rounds 40
    python benchmarks/ac_host_time.py --rounds 40 --one-kernel

A MoE block of the DeepSeek-V3 debug model on a CPU, with so few tokens that Python dominates. The
policies take turns in each round, so that other load on the machine falls on all of them. A ratio
is the median over the rounds. CPU time of the thread, not wall time. ``--one-kernel`` compiles the
codec, as on a GPU; else it is a dozen kernels here, whose arithmetic counts too.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, SelectiveAC

from tests.helpers.fp8_activations import debug_model
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.fp8 import codec

_POLICIES: dict[str, ActivationCheckpointing.Config] = {
    "stock selective": SelectiveAC.Config(),
    "stock selective, again": SelectiveAC.Config(),
    "fp8, stock": FP8AC.Config(preset="stock"),
    "fp8, memory": FP8AC.Config(),
    "fp8, balanced": FP8AC.Config(preset="balanced"),
    "fp8, speed": FP8AC.Config(preset="speed"),
    "fp8, gemms": FP8AC.Config(preset="gemms"),
    "fp8, full": FP8AC.Config(mode="full"),
    "fp8, no_recompute": FP8AC.Config(mode="no_recompute"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--one-kernel", action="store_true", help="compile the codec")
    args = parser.parse_args()
    if args.one_kernel:
        codec.compiles_for = lambda device: True
    torch.set_num_threads(1)
    x_BLD = torch.randn(1, 16, 256, dtype=torch.bfloat16, requires_grad=True)
    blocks = {}
    for name, config in _POLICIES.items():
        model = debug_model(layers=2)
        config.build(dump_folder="").apply(model)
        blocks[name] = model.layers["1"]
        for block in model.layers.values():  # the first forward of each is reported
            block(x_BLD, None, None)

    times: dict[str, list[float]] = {name: [] for name in blocks}
    for _ in range(args.rounds):
        for name, block in blocks.items():
            start = time.thread_time()
            block(x_BLD, None, None)
            times[name].append(time.thread_time() - start)

    stock = times["stock selective"]
    print(f"{'policy':24} {'forward ms':>10} {'ratio':>6}")
    for name, ours in times.items():
        ratios = [a / b for a, b in zip(ours, stock, strict=True)]
        print(f"{name:24} {1e3 * statistics.median(ours):10.2f} {statistics.median(ratios):6.3f}")


if __name__ == "__main__":
    main()
