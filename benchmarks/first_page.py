"""The picture on the first page: what stock TorchTitan holds, and what titan_ext holds.

    python -m benchmarks.first_page      # writes docs/images/first_page.png (10 minutes on 2 cores)

Left: one MoE block of DeepSeek-V3 16B, 1024 tokens, one rank; measured here (activation_bytes.py).
Right: DeepSeek-V3 16B on 64 ranks, EP 8; predicted from shapes (unsharded_peak.py). For the debug
model the prediction equals what the tracker measures, to the byte.
"""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_16b

from benchmarks.activation_bytes import measure
from benchmarks.moe_blocks import Layout
from benchmarks.unsharded_peak import figures, predicted
from tests.training import Run

_MIB = 2**20
_TOKENS = 1024
_STOCK, _OURS = "tab:gray", "tab:blue"
_ARMS = {
    "stock-selective": "stock selective",
    "fp8-speed": "fp8, speed",
    "fp8-memory": "fp8, memory",
}
Bar = tuple[str, float, str]
"""Label, MiB, color."""


def main() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.2), layout="constrained")
    _draw(
        axes[0],
        f"Activations of one MoE block ({_TOKENS} tokens) kept for backward",
        _activations(),
    )
    _draw(axes[1], "Unsharded parameters of blocks at the peak of a step", _parameters())
    path = Path(__file__).parents[1] / "docs" / "images" / "first_page.png"
    figure.savefig(path, dpi=110)
    print(path)


def _activations() -> list[Bar]:
    results = measure("deepseek_v3_16b", Layout(), _TOKENS, list(_ARMS))
    bars = []
    for result in (result for result in results if result.arm in _ARMS):
        share = result.recomputed_flops / result.forward_flops
        color = _STOCK if result.arm.startswith("stock") else _OURS
        label = f"{_ARMS[result.arm]}\n({share:.0%} recomputed)"
        bars.append((label, result.nbytes / _MIB, color))
    return bars


def _parameters() -> list[Bar]:
    with torch.device("meta"):
        model = deepseek_v3_16b().model_spec.model.build()
    bars = []
    for wrap, name, color in (("block", "stock", _STOCK), ("submodule", "submodule", _OURS)):
        row = figures(predicted(Run(world=64, ep=8), model, wrap))
        bars.append((name, row["logical"] / _MIB, color))
        bars.append((f"{name}, with\nall-gather buffers", row["with flat"] / _MIB, color))
    return [bars[0], bars[2], bars[1], bars[3]]


def _draw(axis: plt.Axes, title: str, bars: list[Bar]) -> None:
    labels, sizes, colors = zip(*bars, strict=True)
    drawn = axis.barh(labels, sizes, color=colors)
    axis.bar_label(drawn, fmt="%.0f MiB", padding=3)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set_xlabel("MiB on one rank")
    axis.set_title(title, fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
