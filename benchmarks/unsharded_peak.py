"""Peak of unsharded parameters: sub-module units against whole blocks.

    python -m benchmarks.unsharded_peak              # predicted, from shapes on the meta device
    python -m benchmarks.unsharded_peak --measure    # the debug model too, trained here (2 minutes)

Bytes on one rank, in MiB, at the peak of a steady step with activation checkpointing and chunked
loss. Prefetch is "auto", the default (one unit ahead, in backward two from an attention unit);
for sub-module units there is "one ahead", too. "logical": parameters of blocks between unshard
and reshard. "with flat": live storages of blocks, gathered and all-gather buffers. Reduce-scatter
buffers, and embedding and head (logical), have peaks of their own. Blocks with EP > 1 are gathered
as stock TorchTitan gathers them. With EP = 1 stock leaves the prefetch in forward to the device's
queue, which amounts to the same.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_16b

from tests.training import Run, titan_config, train
from titan_ext.fsdp.auto import local_plan
from titan_ext.fsdp.memory.accounting import Timeline
from titan_ext.fsdp.memory.predict import StepOrder, predict
from titan_ext.fsdp.plan import ShardSizes
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.fsdp.units import Wrap

_MIB = 2**20
_OTHERS = ("embedding", "head")
_COLUMNS = ("logical", "with flat", "reduce-scatter", "embedding+head")
_GOALS = {"logical": 0.51, "with flat": 0.65}
_ARMS: dict[str, tuple[Wrap, int | str]] = {
    "block, auto": ("block", "auto"),
    "submodule, auto": ("submodule", "auto"),
    "submodule, one ahead": ("submodule", 1),
}
"""Units and ``fsdp_prefetch``. All are compared with the first."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="train the debug model, too")
    measures = parser.parse_args().measure
    print(f"{'':52}" + "".join(f"{name:>16}" for name in _COLUMNS))
    for world, ep in ((2, 1), (2, 2), (4, 2)):
        run = Run(world=world, ep=ep, layers=6, steps=2)
        with torch.device("meta"):
            model = titan_config("deepseek_v3").model_spec.model.build()
        name = f"debug, {world} ranks, EP {ep}"
        compare(f"{name}, predicted", [predicted(run, model, *arm) for arm in _ARMS.values()])
        if measures and ep > 1:
            compare(f"{name}, measured", [measured(run, *arm) for arm in _ARMS.values()])
    for world, ep in ((8, 1), (8, 8), (64, 1), (64, 8), (512, 8)):
        with torch.device("meta"):
            model = deepseek_v3_16b().model_spec.model.build()
        run = Run(world=world, ep=ep)
        name = f"DeepSeek-V3 16B, {world} ranks, EP {ep}"
        compare(f"{name}, predicted", [predicted(run, model, *arm) for arm in _ARMS.values()])


def predicted(run: Run, model: Decoder, wrap: Wrap, prefetch: int | str = "auto") -> Timeline:
    sizes = ShardSizes(
        dense=run.world,
        experts=run.world // run.ep if run.ep > 1 else None,
        expert_ranks=run.world,
    )
    settings = FSDPSettings(wrap=wrap, prefetch=prefetch)
    plan = local_plan(model, settings, sizes, run.ep)
    ours = wrap != "block"  # stock's blocks
    order = StepOrder(loss_chunks=8, copies_out_directly=ours, frees_buffers=ours)
    return predict(plan.units, order)


def measured(run: Run, wrap: Wrap, prefetch: int | str) -> Timeline:
    with tempfile.TemporaryDirectory() as folder:
        run = replace(run, parallelize=wrap, prefetch=prefetch)
        run = replace(run, tracked=True, stock_copy_out=wrap == "block")
        result = train(run, Path(folder))
    timeline = result.ranks[0].memory
    assert timeline is not None
    return timeline


def compare(name: str, timelines: list[Timeline]) -> None:
    print(name)
    base, *_ = rows = [figures(timeline) for timeline in timelines]
    for title, row in zip(_ARMS, rows, strict=True):
        print(f"  {title:50}" + "".join(f"{row[c] / _MIB:16.2f}" for c in _COLUMNS))
        if row is base:
            continue
        ratios = {column: row[column] / base[column] for column in _COLUMNS}
        print(f"  {'  ratio':50}" + "".join(f"{ratios[c]:16.3f}" for c in _COLUMNS))
        missed = [f"{c} at most {goal}" for c, goal in _GOALS.items() if ratios[c] > goal]
        if missed:
            print(f"    goal missed: {', '.join(missed)}")


def figures(timeline: Timeline) -> dict[str, int]:
    peaks = timeline.peaks()
    return {
        "logical": peaks["blocks_logical"],
        "with flat": peaks["blocks_unsharded"],
        "reduce-scatter": peaks["reduce_scatter"],
        "embedding+head": timeline.peak("logical", _OTHERS),
    }


if __name__ == "__main__":
    main()
