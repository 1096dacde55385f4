"""Bytes against milliseconds of activation checkpointing: presets, stock, and what is possible.

    python benchmarks/ac_frontier.py --out docs/images/frontier.png
    python benchmarks/ac_frontier.py --early --ep 8   # scores before the last GEMM

One MoE block with 4096 tokens a rank, traced in a dry run of 8 ranks at EP 1 and EP 8. Figures are
priced, not measured: bytes are those that a real block holds (tests), the milliseconds of recompute
and codec come from ``op_cost`` at an H100's rates.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

MIB = 2**20
RANKS = 8
CURVES: dict[str, dict[str, Any]] = {
    "budget, nothing in float8": {"float8": False},
    "budget, attention exact": {},
}
PRESETS = {
    "stock selective": "stock",
    "memory": "memory",
    "balanced": "balanced",
    "speed": "speed",
    "gemms": "gemms",
}


_MARKERS = {
    "stock selective": "^",
    "memory": "s",
    "balanced": "D",
    "speed": "P",
    "gemms": "o",
    "no checkpointing": "v",
}
"""Of policies in the picture, whose points lie too close for names beside them."""


def frontier(model_name: str, ep: int, *, early: bool = False) -> dict[str, Any]:
    """Points ``[MiB, ms]`` of policies and of curves; one layout in a process."""
    from titan_ext.activation_checkpoint import FP8AC
    from titan_ext.base import no_accelerator
    from titan_ext.base.machines import MACHINES
    from titan_ext.components.early_scores import use_early_scores
    from titan_ext.components.exchange_policy import Exchanges
    from titan_ext.config_registry.resolve import resolve
    from titan_ext.plan.budget import TracedBlocks
    from titan_ext.plan.dry_run import dry_run
    from titan_ext.plan.solver import BlockKind, BudgetTooSmallError, solve
    from titan_ext.plan.stand_ins import as_rank

    flags = ["--training.local_batch_size", "1", "--training.seq_len", "4096"]
    flags += ["--training.disable_cuda_graphs"]  # as EP's standard dispatcher needs it
    flags += ["--parallelism.expert_parallel_degree", str(ep), "activation_checkpoint:none"]
    with as_rank(RANKS, 0):
        with no_accelerator.as_with_an_accelerator():
            config = resolve(model_name, flags).config
        model = config.model_spec.model
        model.layers = model.layers[:2]  # a dense block, and one with experts
        if early:
            use_early_scores(config.model_spec)
        traced = TracedBlocks(dry_run(config, RANKS), None)
    blocks, launch_ms = traced.blocks[-1], MACHINES["h100"].launch * 1e3
    (graph,) = blocks.graphs
    kinds = [BlockKind(graph)]

    def price(preset: Any, saves: bool) -> list[float]:
        policy = FP8AC.Config(preset=preset)
        plan = policy.policies_of(blocks.first, blocks.name, Exchanges(ep=ep, saved=saves))
        nbytes, ms = graph.price(graph.chosen_by(plan))
        return [nbytes / MIB, ms]

    def best(mib: float, **options: Any) -> list[float] | None:
        try:
            found = solve(kinds, int(mib * MIB), rule_ms=launch_ms, **options)
        except BudgetTooSmallError:
            return None
        return [mib, found.ms]

    sent_again = {name: price(preset, False) for name, preset in PRESETS.items()}
    saved = {name: price(preset, True) for name, preset in PRESETS.items()} if ep > 1 else {}
    forward = sum(node.ms for node in graph.nodes)
    policies = {
        **sent_again,
        **{f"{name}, all-to-alls saved": point for name, point in saved.items()},
        "no checkpointing": [graph.none_nbytes / MIB, 0.0],
    }
    most = graph.none_nbytes / MIB
    tried = {*(mib for mib, _ in policies.values()), *(10 * 1.25**k for k in range(21))}
    points = sorted(mib for mib in tried if mib <= most)
    curves = {
        name: [point for mib in points if (point := best(mib, **options)) is not None]
        for name, options in CURVES.items()
    }
    title = f"{model_name}, EP {ep}{', early scores' * early}"
    return {"title": title, "forward_ms": forward, "policies": policies, "curves": curves}


def table(result: dict[str, Any]) -> str:
    """A line a policy, and what is possible at its bytes."""
    curves = {name: dict(points) for name, points in result["curves"].items()}
    lines = [
        f"{result['title']}: forward {result['forward_ms']:.2f} ms",
        f"{'':34}{'MiB':>7}{'ms':>7}" + "".join(f"{name:>32}" for name in curves),
    ]
    for name, (mib, ms) in sorted(result["policies"].items(), key=lambda item: item[1]):
        cells = (
            f"{curve[mib]:.2f} ({curve[mib] / ms:.0%})" if mib in curve and ms else ""
            for curve in curves.values()
        )
        lines.append(f"{name:34}{mib:7.1f}{ms:7.2f}" + "".join(f"{cell:>32}" for cell in cells))
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], file: Path) -> None:
    """Two panels, one a layout."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(13, 5.5), sharey=True, squeeze=False)
    for axes, result in zip(panels[0], results, strict=True):
        for name, points in result["curves"].items():
            axes.plot(*zip(*points, strict=True), label=name, linewidth=1.8)
        for name, (mib, ms) in result["policies"].items():
            base, _, saves = name.partition(", ")
            color = "k" if base.startswith(("stock", "no ")) else "r"
            fill = "none" if saves else color
            axes.plot(mib, ms, _MARKERS[base], color=color, markerfacecolor=fill, markersize=7)
        axes.axhline(result["forward_ms"], color="grey", linestyle=":", linewidth=0.8)
        axes.text(500, result["forward_ms"] + 0.03, "one forward", color="grey", fontsize=8)
        axes.set_title(f"{result['title']}: one MoE block, 4096 tokens, planned")
        axes.set_xlabel("MiB held until backward")
        axes.set_xlim(0, 900)
        axes.set_ylim(-0.05, 3.2)  # or markers at 0 would be cut
        axes.grid(alpha=0.3)
    axes = panels[0][0]
    for base, marker in _MARKERS.items():
        is_stock = base.startswith(("stock", "no "))
        label = base if is_stock else f'preset "{base}"'
        axes.plot([], [], marker, color="k" if is_stock else "r", label=label)
    axes.plot([], [], "s", color="grey", markerfacecolor="none", label="hollow: all-to-alls saved")
    axes.set_ylabel("planned ms of recompute and float8 codec (H100)")
    figure.legend(*axes.get_legend_handles_labels(), loc="lower center", ncol=5, fontsize=8)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ep", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--model", nargs="+", default=["deepseek_v3_16b"])
    parser.add_argument("--early", action="store_true", help="scores before the last expert GEMM")
    parser.add_argument("--out", type=Path, help="where to draw")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        (model,), (ep,) = arguments.model, arguments.ep
        print(json.dumps(frontier(model, ep, early=arguments.early)))
        return
    results = []
    for model in arguments.model:
        for ep in arguments.ep:
            command = [sys.executable, __file__, "--one", "--model", model, "--ep", str(ep)]
            command += ["--early"] * arguments.early
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(table(results[-1]), flush=True)
    if arguments.out is not None:
        draw(results, arguments.out)


if __name__ == "__main__":
    main()
