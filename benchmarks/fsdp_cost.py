"""What each kind of FSDP unit costs at the sizes of real jobs, by the model of ``fsdp.cost``.

    python -m benchmarks.fsdp_cost                                    # the table, about a minute
    python -m benchmarks.fsdp_cost --experts           # seconds and GiB with experts in fewer bytes
    python -m benchmarks.fsdp_cost --exchanges         # saved or sent again; shared experts
    python -m benchmarks.fsdp_cost --picture docs/images/fsdp_streams.png

Nothing runs and nothing is measured: times are of the model, on H100s of eight to a node. What
"auto" takes is marked. Bytes are the peak of what FSDP holds in the last blocks.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.deepseek_v3 import model_registry as deepseek_v3
from torchtitan.models.qwen3 import model_registry as qwen3

from titan_ext.fsdp.auto import CANDIDATES, STOCK, Choice, PlanComparison, job_of
from titan_ext.fsdp.cost import Estimate, Job, estimate
from titan_ext.fsdp.memory.predict import StepOrder
from titan_ext.fsdp.plan import ShardSizes
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.op_cost import MACHINES

# Model, size, ranks, EP, tokens of a microbatch on a rank, activation checkpointing.
JOBS: dict[str, tuple[Any, str, int, int, int, Any]] = {
    "16B, 64 ranks, EP 8, 16k tokens": (deepseek_v3, "16B", 64, 8, 16384, SelectiveAC.Config()),
    "16B, 64 ranks, EP 8, 4k tokens": (deepseek_v3, "16B", 64, 8, 4096, SelectiveAC.Config()),
    "16B, 512 ranks, EP 8, 16k tokens": (deepseek_v3, "16B", 512, 8, 16384, SelectiveAC.Config()),
    "16B, 4096 ranks, EP 8, 16k tokens": (deepseek_v3, "16B", 4096, 8, 16384, SelectiveAC.Config()),
    "Qwen3-235B, 256 ranks, EP 8, 8k tokens": (
        *(qwen3, "235B-A22B", 256, 8, 8192, SelectiveAC.Config()),
    ),
    "671B, 512 ranks, EP 32, 4k tokens, full AC": (
        *(deepseek_v3, "671B", 512, 32, 4096, FullAC.Config()),
    ),
    "671B, 2048 ranks, EP 8, 8k tokens": (
        *(deepseek_v3, "671B", 2048, 8, 8192, SelectiveAC.Config()),
    ),
}
BEFORE = Choice("submodule", 1, 1)
_DRAWN = "671B, 512 ranks, EP 32, 4k tokens, full AC"
_COLOURS = {"compute": "tab:blue", "gather": "tab:green", "reduce-scatter": "tab:orange"}


def comparison(name: str) -> PlanComparison:
    """What the candidates cost for a job."""
    registry, size, ranks, ep, tokens, ac_config = JOBS[name]
    with torch.device("meta"):
        model = registry(size, attn_backend="flex").model.build()
    sizes = ShardSizes(dense=ranks, experts=ranks // ep, expert_ranks=ranks)
    job = job_of(
        model,
        tokens=tokens,
        seq_len=4096,
        ac_config=ac_config,
        ep=ep,
        exchanges_again=ep <= Job.ranks_per_node,  # as save_all_to_all = "auto" decides
    )
    return PlanComparison(model, FSDPSettings(), sizes, job, MACHINES["h100"])


def step(choice: Choice, name: str) -> Estimate:
    """The modelled step of a job."""
    given = comparison(name)
    order = StepOrder(reduce_scatter_buffers=choice.buffers, frees_buffers=False)  # as stock
    return estimate(given.units(choice), order, given.job, given.machine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--exchanges", action="store_true", help="what saving all-to-alls gains")
    parser.add_argument("--picture", type=Path, help="draw the streams of one job to this PNG")
    parser.add_argument("--experts", action="store_true", help="what fsdp_expert_* keys change")
    args = parser.parse_args()
    if args.picture is not None:
        draw(args.picture)
        return
    if args.experts:
        print_expert_collectives()
        return
    if args.exchanges:
        print_exchanges()
        return
    rows = [BEFORE, *CANDIDATES]
    print(f"{'time and bytes, of whole blocks in stock':44}", *(f"{_say(c):>21}" for c in rows))
    for name in JOBS:
        given = comparison(name)
        costs = {c: given.cost(c) for c in rows}
        best, _ = given.cheapest(CANDIDATES)
        ms, nbytes = given.cost(STOCK, as_stock=True)
        cells = [
            f"{costs[c][0] / ms:.3f} {costs[c][1] / nbytes:.2f}{' *' if c == best else '  '}"
            for c in rows
        ]
        print(f"{name:44}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


def print_expert_collectives() -> None:
    """A step in s, and GiB, of what "auto" takes without them."""
    arms: dict[str, dict[str, Any]] = {
        "neither": {},
        "float8 gathers": {"expert_all_gather": "float8"},
        "bf16 reductions": {"expert_reduce_scatter": "bfloat16"},
    }
    arms["both"] = arms["float8 gathers"] | arms["bf16 reductions"]
    print(f"{'s a step, GiB':44}" + "".join(f"{arm:>18}" for arm in arms))
    for name in JOBS:
        given = comparison(name)
        choice, _ = given.cheapest(CANDIDATES)
        each = (replace(given.settings, **arm) for arm in arms.values())
        costs = [replace(given, settings=settings).cost(choice) for settings in each]
        cells = [f"{ms / 1e3:.2f} {nbytes / 2**30:.2f}" for ms, nbytes in costs]
        print(f"{name:44}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def print_exchanges() -> None:
    """The step's time with exchanges saved, over that with exchanges sent again; what it keeps.

    Then its time with shared experts run while tokens travel, over that without.
    """
    selective = {name: job for name, job in JOBS.items() if "full AC" not in name}
    across = {"671B, 512 ranks, EP 32, 4k tokens": (deepseek_v3, "671B", 512, 32, 4096)}
    across["16B, 64 ranks, EP 64, 16k tokens"] = (deepseek_v3, "16B", 64, 64, 16384)
    JOBS.update({name: (*job, SelectiveAC.Config()) for name, job in across.items()})
    for name in [*selective, *across]:
        given = comparison(name)
        job, (choice, _) = given.job, given.cheapest(CANDIDATES)
        saved, again, plain, overlapped = (
            replace(given, job=replace(job, **{key: value})).cost(choice)[0]
            for key in ("exchanges_again", "overlaps_shared")
            for value in (False, True)
        )
        kept = 2 * job.tokens * job.top_k * job.dim * 2
        print(
            f"{name:36} {saved / again:.3f}  {kept / 2**20:7.0f} MiB a MoE layer; "
            f"shared experts overlapped {overlapped / plain:.3f}",
            flush=True,
        )


def draw(picture: Path) -> None:
    """A row for each stream, some blocks of backward, for three kinds of units."""
    from matplotlib.figure import Figure

    arms = {"whole blocks (stock)": STOCK, "attention | MoE, one ahead": BEFORE}
    arms["auto"] = comparison(_DRAWN).cheapest(CANDIDATES)[0]
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    panels = figure.subplots(len(arms), 1)
    for axes, (title, choice) in zip(panels, arms.items(), strict=True):
        estimated = step(choice, _DRAWN)
        at = next(s.start for s in reversed(estimated.spans) if s.what.startswith("layers.40"))
        streams = ["compute", *sorted({s.stream for s in estimated.spans} - {"compute"})]
        for span in estimated.spans:
            if at <= span.end and span.start <= at + 300:
                kind = next(kind for kind in _COLOURS if span.stream.endswith(kind))
                axes.barh(
                    streams.index(span.stream),
                    span.end - span.start,
                    left=span.start - at,
                    color=_COLOURS[kind],
                    edgecolor="white",
                )
        axes.set_yticks(range(len(streams)), streams)
        axes.invert_yaxis()
        axes.set_xlim(0, 300)
        waits = sum(estimated.exposed_ms.values())
        axes.set_title(f"{title}: step {estimated.ms:.0f} ms, waiting for FSDP {waits:.0f} ms")
    panels[-1].set_xlabel(f"ms of backward ({_DRAWN}; modelled)")
    figure.savefig(picture, dpi=110)


def _say(choice: Choice) -> str:
    return f"{choice.wrap} {choice.prefetch_backward} {choice.buffers}"


if __name__ == "__main__":
    main()
