"""The errors that docs/float8.md gives: relative RMS by format, and beside an outlier.

    python benchmarks/fp8_error.py          # from the root of the repository; a minute on one core

Random values are normal, or Student's t with 2 degrees of freedom (infinite variance). Real ones
are what the MoE blocks of TorchTitan's DeepSeek-V3 debug model save after a few training steps
(tests/helpers/fp8_activations.py). The reference is fp64. Error is taken by block of 128 and
averaged: in the norm of a heavy-tailed tensor a few values are all that counts. ``--no-real`` does
without TorchTitan.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from titan_ext.fp8 import Codec, dequantize, quantize

BLOCKS = (64, 128, 256)


def block_error(x: torch.Tensor, codec: Codec) -> float:
    """Mean over blocks of 128 of norm(error) / norm(x), in fp64; blocks of zeros left out."""
    y = dequantize(quantize(x, codec), codec, x.dtype)
    pieces = [
        torch.nn.functional.pad(t.double().reshape(-1, t.shape[-1]), (0, -t.shape[-1] % 128))
        for t in (y.double() - x.double(), x)
    ]
    error, size = (piece.reshape(-1, 128).norm(dim=-1) for piece in pieces)
    return (error[size > 0] / size[size > 0]).mean().item()


def beside_outlier(outlier: float, codec: Codec) -> float:
    """Relative RMS of 127 normal neighbours of one outlier in a block of 128, 4096 blocks."""
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0))
    x[:, 17] = outlier
    y = dequantize(quantize(x, codec), codec, x.dtype).double()
    keep = torch.arange(128) != 17
    return ((y - x)[:, keep].norm() / x[:, keep].double().norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--no-real", action="store_true", help="random values only")
    args = parser.parse_args()

    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(512, 2048, generator=generator)
    other = torch.randn(2, 512, 2048, generator=generator).square().mean(0).sqrt()
    data = {"normal": [normal.bfloat16()], "heavy": [(normal / other).bfloat16()]}
    activations = {}
    if not args.no_real:
        from tests.helpers.fp8_activations import block_activations

        activations = block_activations()
        data["real"] = list(activations.values())

    print(f"torch {torch.__version__}\n\nrelative RMS by block of 128, in %")
    print(f"| format | bytes of bf16 | {' | '.join(data)} |\n|---|---|{'---|' * len(data)}")
    for dtype in ("e4m3", "e5m2"):
        for block in BLOCKS:
            codec = Codec(dtype, block)
            errors = [
                sum(block_error(x, codec) for x in tensors) / len(tensors)
                for tensors in data.values()
            ]
            ratio = codec.nbytes(torch.Size((512, 2048))) / (512 * 2048 * 2)
            cells = " | ".join(f"{100 * e:.2f}" for e in errors)
            print(f"| {dtype} {block} | {ratio:.4f} | {cells} |")

    print("\nrelative RMS of the neighbours of one outlier (standard normal, block of 128)")
    print("| format | 1e3 | 1e4 | 1e5 | 1e6 |\n|---|---|---|---|---|")
    for dtype in ("e4m3", "e5m2"):
        cells = " | ".join(f"{beside_outlier(o, Codec(dtype)):.4f}" for o in (1e3, 1e4, 1e5, 1e6))
        print(f"| {dtype} | {cells} |")

    if activations:
        print("\nreal activations, one by one, in %: e4m3, e5m2 (128), largest / RMS")
        for name, x in activations.items():
            both = [100 * block_error(x, Codec(dtype)) for dtype in ("e4m3", "e5m2")]
            peak = (x.abs().max() / x.float().square().mean().sqrt()).item()
            print(f"{name:28} {both[0]:6.2f} {both[1]:6.2f} {peak:8.1f}")


if __name__ == "__main__":
    main()
