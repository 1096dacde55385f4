"""The picture on the first page: one step of DeepSeek-V3 671B on 512 GPUs, stock and ours, by part.

    python -m benchmarks.first_page      # writes docs/images/first_page.png (2 minutes on 2 cores)

Planned at an H100's rates, not measured (docs/plan.md).
"""

import tempfile
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.exchanges import ARMS, EXCHANGES
from benchmarks.planned_steps import planned
from titan_ext.plan.time import SPREAD

_JOB = "671B, 512 GPUs"
_BARS = {
    "stock TorchTitan": "stock",
    "titan_ext": "titan_ext",
    "and halves": "halves",
    "halves, float8 tokens,\none row a node": "halves, float8, a node",
}
_PARTS = {
    "forward": "#1f4e79",
    "loss": "#4f81bd",
    "recompute": "#9dc3e6",
    "backward": "#2e75b6",
    "codec": "#ffc000",
    "copies": "#a9d18e",
    "optimizer": "#548235",
    "exchanges": "#c00000",
    "host": "#7030a0",
    "gathers": "#ed7d31",
    "reductions": "#f4b183",
    "collectives": "#a6a6a6",
}
_WORDS = {"exchanges": "waits for exchanges of tokens", "gathers": "waits for FSDP's gathers"}
_WORDS |= {"reductions": "waits for FSDP's reductions", "loss": "loss and head"}


def main() -> None:
    config, rest = EXCHANGES[_JOB].split(" ", 1)  # a policy's name stands last
    with tempfile.TemporaryDirectory() as folder:
        plans = {
            bar: planned(f"{config} {ARMS[arm]} {rest}", Path(folder)) for bar, arm in _BARS.items()
        }
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    axes = figure.subplots()
    left = dict.fromkeys(plans, 0.0)
    longest = max(plan["time"]["expected_ms"] for plan in plans.values())
    for part, colour in _PARTS.items():
        widths = [plan["time"]["expected"][part] / 1e3 for plan in plans.values()]
        if max(widths) < 0.005 * longest / 1e3:
            continue
        label = _WORDS.get(part, part)
        axes.barh(list(plans), widths, left=list(left.values()), color=colour, label=label)
        left = {bar: left[bar] + width for bar, width in zip(plans, widths, strict=True)}
    for bar, plan in plans.items():
        axes.errorbar(left[bar], bar, xerr=SPREAD * left[bar], color="grey", capsize=3, lw=1)
        text = f"{plan['time']['expected_tokens_per_second']:,.0f} tokens/s a GPU"
        axes.text((1 + SPREAD) * left[bar], bar, f"  {text}", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * longest / 1e3)
    axes.set_xlabel(f"expected seconds of a step on H100s; lines: error of plans, {SPREAD:.0%}")
    job = "DeepSeek-V3 671B on 512 GPUs, EP 32, 2 x 4096 tokens a GPU, full checkpointing"
    axes.set_title(f"{job}: planned", loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize="small")
    path = Path(__file__).parents[1] / "docs" / "images" / "first_page.png"
    figure.savefig(path, dpi=110)
    print(path)


if __name__ == "__main__":
    main()
