"""Does float8 activation checkpointing change the loss? Paired runs, beside a run of mere noise.

    python benchmarks/fp8_ac_loss.py                    # every arm, 3 seeds; goes on where it was
    python benchmarks/fp8_ac_loss.py --arms selective noise --seeds 0
    python benchmarks/fp8_ac_loss.py --report-only
    python benchmarks/fp8_ac_loss.py --recorded docs/images/fp8_ac_loss.png   # no run
    python benchmarks/fp8_ac_loss.py --ep 1 --warm 300 --steps 100 \
        --arms selective noise float8-gather bad-gather --output outputs/fp8_gather_loss
    python benchmarks/fp8_ac_loss.py --warm 200 --steps 80 --output outputs/exchange_loss \
        --arms selective noise halves rows float8-exchange bad-exchange
    python benchmarks/fp8_ac_loss.py --warm 150 --steps 60 --output outputs/compiled_loss \
        --arms selective noise compiled compiled-fp8 bad-exchange

It trains the DeepSeek-V3 debug model with 3 layers, EP 2 on 2 gloo ranks, for 300 steps on Python's
standard library. Parameters are fp32, computation is bf16. Training is chaotic: a relative change
of 1e-5 of every weight ("noise") moves single losses by hundredths. So every arm is compared with
Titan's selective checkpointing of the same seed, by the mean of the last 50 steps. ``bad-codec``
and ``bad-gather`` lose the sign: a comparison that they pass would prove nothing. With ``--ep 1``
the experts are FSDP units that both ranks share, as the arms with "gather" need.

At the debug model's own learning rate (8e-4) noise alone moves the mean by up to 0.08 nat. Nobody
could then tell one arm from another within 0.01. So the rate here is a quarter of that.

Fresh experts add little to the loss, so that 150 steps could not tell a gather that loses the sign.
``--warm N`` first trains N steps with selective checkpointing, once a seed; every arm goes on from
there, optimizer included.

Each run writes ARM-SEED.json when it ends; a run that has one is not run again. The table and
``fp8_ac_loss.png`` are made of what is there.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import tomllib
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.tools.logging import init_logger

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, make_config
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.base import no_accelerator
from titan_ext.base.run_folder import LOSS, read_scalar
from titan_ext.base.stdlib_corpus import make_corpus, register_stdlib_corpus
from titan_ext.fp8 import codec, dequantize

REFERENCE = "selective"
WARM = "warm"
BOUND = 0.01  # nat
ARMS: dict[str, Any] = {
    REFERENCE: SelectiveAC.Config,
    "noise": SelectiveAC.Config,
    "early-scores": lambda: FP8AC.Config(preset="stock", score_before_last_gemm=True),
    "fp8": FP8AC.Config,
    "fp8-early": lambda: FP8AC.Config(score_before_last_gemm=True),
    "fp8-balanced": lambda: FP8AC.Config(preset="balanced"),
    "fp8-gemms": lambda: FP8AC.Config(preset="gemms"),
    "fp8-speed": lambda: FP8AC.Config(preset="speed"),
    "fp8-full": lambda: FP8AC.Config(mode="full"),
    "fp8-no-recompute": lambda: FP8AC.Config(mode="no_recompute"),
    "bad-codec": FP8AC.Config,
    "float8-gather": SelectiveAC.Config,
    "float8-gather-all": SelectiveAC.Config,
    "bad-gather": SelectiveAC.Config,
    "bad-gather-all": SelectiveAC.Config,
    "halves": SelectiveAC.Config,
    "rows": SelectiveAC.Config,
    "float8-exchange": SelectiveAC.Config,
    "bad-exchange": SelectiveAC.Config,
    "compiled": SelectiveAC.Config,
    "compiled-fp8": FP8AC.Config,
}
"""By name, what checkpoints activations. "fp8" is the policy's default."""
_GATHERS = ("float8-gather", "bad-gather")
_GATHERS_ALL = ("float8-gather-all", "bad-gather-all")
_EXCHANGES = ("float8-exchange", "bad-exchange")


def _gathered(arm: str) -> str:
    return "experts" if arm in _GATHERS else "blocks" if arm in _GATHERS_ALL else "none"


def train_rank(
    arm: str,
    seed: int,
    steps: int,
    batch: int,
    seq_len: int,
    lr: float,
    ep: int,
    folder: Path,
    warm: str = "",
) -> None:
    """One rank of one run; the losses are in TensorBoard's files under ``folder``.

    It goes on from the checkpoint ``warm``, if there is one; ``arm`` "warm" ends with one.
    """
    init_logger()
    no_accelerator.enable()
    register_stdlib_corpus()
    run = Run(
        parallelize="auto" if ep > 1 else "experts",
        world=2,
        ep=ep,
        ac=ARMS[REFERENCE if arm == WARM else arm](),
        float8_all_gather=_gathered(arm),
        exchange_dtype="float8" if arm in _EXCHANGES else None,
        exchange_rows="rank" if arm == "rows" else "expert",
        overlap_exchanges="halves" if arm == "halves" else "shared_experts",
        compiled=arm.startswith("compiled"),
        global_batch=2 * batch,
        seq_len=seq_len,
        steps=steps,
        layers=3,
    )
    config = make_config(run, folder)
    config.debug.seed = 42 + seed
    config.lr_scheduler.warmup_steps = min(20, steps)
    _set_lr(config.optimizer, lr)
    if arm == WARM:
        config.checkpoint = CheckpointManager.Config(enable=True, last_save_model_only=False)
    elif warm:
        config.checkpoint = CheckpointManager.Config(
            enable=True, load_only=True, initial_load_path=warm, initial_load_model_only=False
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch("torchtitan.trainer.time.sleep"))
        if arm.startswith("bad-"):
            stack.enter_context(_bad_codec())
        trainer = config.build()
        if arm == "noise":
            for part in trainer.model_parts:
                _perturb_at_first_forward(part)
        trainer.train()
    trainer.close()
    dist.barrier()
    dist.destroy_process_group()


def _perturb_at_first_forward(model: torch.nn.Module) -> None:
    """Multiply all weights by 1 + 1e-5, once a checkpoint is loaded."""

    @torch.no_grad()
    def perturb(*_: Any) -> None:
        handle.remove()
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-5)

    handle = model.register_forward_pre_hook(perturb, prepend=True)


def _set_lr(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group.optimizer_kwargs["lr"] = lr


@contextlib.contextmanager
def _bad_codec() -> Iterator[None]:
    def without_sign(quantized, settings, dtype):
        return dequantize(quantized, settings, dtype).abs()

    with unittest.mock.patch.object(codec, "dequantize", without_sign):
        yield


def train(
    arm: str,
    seed: int,
    *,
    steps: int,
    batch: int,
    seq_len: int,
    lr: float,
    output: Path,
    ep: int = 2,
    warm: int = 0,
) -> dict[str, Any]:
    """Run one arm with one seed, unless its file is there; return what the file says.

    With ``warm`` it runs ``steps`` more after those that all arms of the seed share.

    Raises:
        ValueError: if the file is of a run of another size.
    """
    file = output / f"{arm}-{seed}.json"
    size = {"steps": steps, "batch": batch, "seq_len": seq_len, "lr": lr, "ep": ep}
    size["warm"] = warm
    if file.exists():
        record = {"ep": 2, "warm": 0} | json.loads(file.read_text())
        if {key: record.get(key) for key in size} != size:
            raise ValueError(f"{file} is of another size than {size}: choose another --output.")
        return record
    begin = time.monotonic()
    start = ""
    if warm:
        trunk = (output / f"{WARM}-{seed}").absolute()
        checkpoint = trunk / "checkpoint" / f"step-{warm}"
        start = str(checkpoint)
        if not (checkpoint / ".metadata").exists():
            run_ranks(
                train_rank,
                2,
                *(WARM, seed, warm, batch, seq_len, lr, ep, trunk),
                log_folder=trunk / "logs",
                timeout_s=7200,
            )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        args = (arm, seed, warm + steps, batch, seq_len, lr, ep, folder, start)
        run_ranks(train_rank, 2, *args, log_folder=folder / "logs", timeout_s=7200)
        losses = list(read_scalar(folder, LOSS).values())
    record = size | {"arm": arm, "seed": seed, "seconds": time.monotonic() - begin}
    record["losses"] = losses
    output.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(record))
    part.replace(file)  # whole or not there
    return record


def load(output: Path) -> dict[str, dict[int, list[float]]]:
    """Losses by arm and seed of the runs that have ended, arms in the order of ``ARMS``."""
    runs: dict[str, dict[int, list[float]]] = {}
    for arm in ARMS:
        for file in sorted(output.glob(f"{arm}-[0-9]*.json")):
            record = json.loads(file.read_text())
            runs.setdefault(arm, {})[record["seed"]] = record["losses"]
    return runs


def mean_of_last(losses: list[float], last: int = 50) -> float:
    return statistics.fmean(losses[-last:])


def differences(runs: dict[str, dict[int, list[float]]], arm: str) -> dict[int, float]:
    """By seed: how much larger the arm's mean of the last 50 losses is than the reference's."""
    reference = runs.get(REFERENCE, {})
    return {
        seed: mean_of_last(losses) - mean_of_last(reference[seed])
        for seed, losses in runs[arm].items()
        if seed in reference
    }


def table(runs: dict[str, dict[int, list[float]]]) -> str:
    """Means by arm; the last column has the mean difference over the largest one of noise."""
    lines = [
        "| arm | seeds | mean loss, last 50 steps | less selective, by seed | mean | over noise |",
        "|---|---|---|---|---|---|",
    ]
    noise = max(map(abs, differences(runs, "noise").values()), default=0.0)
    for arm, by_seed in runs.items():
        mean = statistics.fmean(mean_of_last(losses) for losses in by_seed.values())
        pairs = differences(runs, arm)
        cells = average = over = ""
        if arm != REFERENCE and pairs:
            cells = ", ".join(f"{d:+.5f}" for d in pairs.values())
            found = statistics.fmean(pairs.values())
            average, over = f"{found:+.5f}", f"{abs(found) / noise:.1f}" if noise else ""
        lines.append(f"| {arm} | {len(by_seed)} | {mean:.4f} | {cells} | {average} | {over} |")
    return "\n".join(lines)


def plot(gaps: dict[str, dict[int, float]], job: str, file: Path) -> None:
    """A row for each arm with a point for each seed: its mean loss less that of the reference.

    Args:
        gaps: As of ``differences``, by arm and seed.
        job: Model, ranks and batch, for the title.
        file: The picture.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator

    figure = Figure(figsize=(9.5, 2 + 0.4 * len(gaps)), layout="constrained")
    axes = figure.subplots()
    noise = max(map(abs, gaps.get("noise", {}).values()), default=0.0)
    if noise:
        axes.axvspan(-noise, noise, color="0.88", label="within the largest difference of noise")
    axes.axvline(0, color="0.5", linewidth=1)
    for row, (arm, by_seed) in enumerate(gaps.items()):
        found = list(by_seed.values())
        colour = "#c00000" if arm.startswith(("bad-", "a codec")) else "#1f4e79"
        axes.plot([min(found), max(found)], [row, row], color=colour, linewidth=2, alpha=0.4)
        axes.plot(found, [row] * len(found), "o", color=colour, label=None if row else "one seed")
        mean = statistics.fmean(found)
        label = None if row else "mean of the seeds"
        axes.plot([mean], [row], "|", color="black", markersize=16, label=label)
    axes.set_yticks(
        range(len(gaps)),
        [f"{arm} ({len(x)} seed{'s' if len(x) > 1 else ''})" for arm, x in gaps.items()],
    )
    axes.invert_yaxis()
    # Linear where noise is, and then by powers of ten: a broken codec is on the same axis.
    straight = 2 * noise or BOUND
    every = [gap for by_seed in gaps.values() for gap in by_seed.values()]
    low, high = min([-straight, *every]), max([straight, *every])
    axes.set_xscale("symlog", linthresh=straight, linscale=2)
    axes.set_xlim(1.3 * low, 1.8 * high)
    ticks = [0.0, noise, straight, *(x for x in (1e-3, 1e-2, 1e-1, 1.0) if x > 2 * straight)]
    axes.xaxis.set_major_locator(FixedLocator(sorted({*ticks, *(-x for x in ticks)})))
    axes.xaxis.set_minor_locator(FixedLocator([]))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:+.5f}".rstrip("0").rstrip(".") if x else "0")
    axes.set_xlabel(
        "mean of the last 50 losses, difference in nats a token (linear as far as twice the grey)"
    )
    axes.grid(axis="x", alpha=0.3)
    figure.suptitle(f"Loss less that of stock selective checkpointing\n{job}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file, dpi=120)


def recorded() -> tuple[str, dict[str, dict[int, float]]]:
    """The job and the differences of docs/float8.md, as ``plot`` takes them."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return table["job"], {arm: dict(enumerate(gaps)) for arm, gaps in table["gaps"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    activations = [arm for arm in ARMS if arm not in _GATHERS]
    parser.add_argument("--arms", nargs="+", default=activations, choices=list(ARMS))
    parser.add_argument("--ep", type=int, default=2, choices=(1, 2), help="of the 2 ranks")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm", type=int, default=0, help="steps that all arms share, before")
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank (%(default)s)")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--output", type=Path, default=Path("outputs/fp8_ac_loss"))
    parser.add_argument("--report-only", action="store_true", help="train nothing")
    parser.add_argument("--recorded", type=Path, help="draw fp8_ac_loss.toml into this file, only")
    args = parser.parse_args()
    if args.recorded:
        job, gaps = recorded()
        plot(gaps, job, args.recorded)
        return
    if not args.report_only:
        make_corpus()
        for seed in args.seeds:
            for arm in args.arms:
                record = train(
                    arm,
                    seed,
                    steps=args.steps,
                    batch=args.batch,
                    seq_len=args.seq_len,
                    lr=args.lr,
                    ep=args.ep,
                    warm=args.warm,
                    output=args.output,
                )
                mean = mean_of_last(record["losses"])
                print(f"{arm} {seed}: {mean:.4f}, {record['seconds']:.0f} s", flush=True)
    runs = load(args.output)
    if not runs:
        raise ValueError(f"{args.output} has no run yet; leave --report-only out.")
    print(table(runs))
    gaps = {arm: found for arm in runs if arm != REFERENCE and (found := differences(runs, arm))}
    job = (
        f"DeepSeek-V3 debug model, 3 layers, 2 gloo ranks, EP {args.ep}, {args.batch} x "
        f"{args.seq_len} tokens a rank, {args.steps} steps after {args.warm}"
    )
    plot(gaps, job, args.output / "fp8_ac_loss.png")


if __name__ == "__main__":
    main()
