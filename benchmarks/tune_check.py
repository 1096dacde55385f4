"""``titan_ext tune`` against every config of a small grid, and its order against measured steps.

    python -m benchmarks.tune_check                     # three jobs
    python -m benchmarks.tune_check --jobs 16B
    python -m benchmarks.tune_check --order cpu.toml    # 8 configs of the debug model, measured

A grid has degrees of expert parallelism, batches, routing scores and units. Each of its configs
gets the best checkpointing that fits, as in ``tune``. Prices are of shortened models, for both
alike. Nothing is measured. ``tune`` may use keys that a grid does not have, and so be better.

``--order`` takes the CPU's rates (benchmarks/rates.py), prices eight configs as ``tune`` does, and
trains each on two gloo ranks, in processes of its own and in rounds. It prints Spearman's rank
correlation of the prices with the median step, and with the CPU seconds of a step: on a machine
with other work the clock on the wall shows that work, too.
"""

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from titan_ext.config_registry.terminal import quiet
from titan_ext.toml.files import to_toml

_LOCAL, _GLOBAL = "training.local_batch_size", "training.global_batch_size"
_EP, _WRAP = "parallelism.expert_parallel_degree", "parallelism.fsdp_wrap"
_SCORES = "activation_checkpoint.score_before_last_gemm"
_COPIES = "parallelism.data_parallel_replicate_degree"
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2")
JOBS: dict[str, tuple[str, int, str, dict[str, tuple[Any, ...]]]] = {
    "debug, 8 GPUs of 2.5 GiB": (
        "moe_debug_gpu.toml",
        8,
        "2560MiB",
        {_EP: (1, 2, 8), _SCORES: (False, True), _LOCAL: (4, 8), _COPIES: (1, 2)},
    ),
    "16B, 8 GPUs of 60 GiB": (
        "train_configs/deepseek_v3_16b.toml",
        8,
        "60GiB",
        {_EP: (2, 4, 8), _SCORES: (False, True), _WRAP: ("auto", "block"), _LOCAL: (2, 4)},
    ),
    "gpt_oss-20B, 64 GPUs": (
        "train_configs/gpt_oss_20b.toml",
        64,
        "80GiB",
        {_EP: (4, 8, 16), _COPIES: (1, 8), _WRAP: ("auto", "block"), _LOCAL: (1, 2)},
    ),
}


_POLICY, _PRESET = "activation_checkpoint.policy", "activation_checkpoint.preset"
_ORDER_RANKS, _SEQUENCES = 2, 8
ORDER: dict[str, dict[str, Any]] = {
    "none": {_POLICY: "none"},
    "none, EP 1": {_POLICY: "none", _EP: 1},
    "none, EP 1, 4 passes": {_POLICY: "none", _EP: 1, _LOCAL: 1, _GLOBAL: _SEQUENCES},
    "selective": {_POLICY: "selective"},
    "selective, units of blocks": {_POLICY: "selective", _WRAP: "block"},
    "full": {_POLICY: "full"},
    "full, 4 passes": {_POLICY: "full", _LOCAL: 1, _GLOBAL: _SEQUENCES},
    "float8": {_POLICY: "fp8", _PRESET: "memory"},
}
"""Configs of moe_debug with 4 x 256 tokens a rank and step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--jobs", default="", help="only those with this in their name")
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--order", metavar="FILE", help="the machine file of this CPU")
    parser.add_argument("--rounds", type=int, default=3, help="of --order")
    parser.add_argument("--out", type=Path, help="of --order: a JSON file")
    parser.add_argument("--steps", type=Path, help=argparse.SUPPRESS)  # a rank of --order
    args = parser.parse_args()
    if args.steps:
        train(args.steps)
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if args.order:
        order(args.order, args.rounds, args.out)
        return
    gc.disable()
    for name, job in JOBS.items():
        if args.jobs in name:
            with quiet(False):
                check(name, *job, args.processes)


def check(
    name: str,
    config: str,
    ranks: int,
    memory: str,
    grid: dict[str, tuple[Any, ...]],
    processes: int = 0,
) -> None:
    """Tune a job, plan its grid, and print which is better."""
    from titan_ext.config_registry.tune import Tune
    from titan_ext.plan.moves import Move
    from titan_ext.plan.search import Search
    from titan_ext.plan.stand_ins import as_rank

    point = Move("a point of the grid", lambda now, facts: (), ())
    command = Tune(config, ranks, memory=memory, processes=processes)
    with tempfile.TemporaryDirectory() as folder, as_rank(ranks, 0):
        search, _ = command.search([], Path(folder))
        with search.forks:
            search.run()
        tuned, priced = search.compared, len(search.tried)
        cpu_s = sum(os.times()[:4])
        now = search.job.values
        copies = search.job.facts.copies(now)
        total = now[_GLOBAL] if now[_GLOBAL] > 0 else now[_LOCAL] * copies
        points = []
        for values in itertools.product(*grid.values()):
            keys = dict(zip(grid, values, strict=True))
            points.append({point: keys | ({_GLOBAL: total} if _LOCAL in keys else {})})
        own, of_grid = search.tried[0], Search(search.job, search.forks)
        with search.forks:
            best = min(of_grid.evaluate(points, own), key=lambda one: one.order)
        grid_s = sum(os.times()[:4]) - cpu_s
        print(
            f"{name}: yours {_words(own)}; tuned {_words(tuned)}, {priced} plans, {cpu_s:.0f} CPU "
            f"s; best of {len(points)} in the grid {_words(best)}, {grid_s:.0f} CPU s: "
            f"tune saves {tuned.saves(best):+.2%} of it",
            flush=True,
        )


def order(machine: str, rounds: int, out: Path | None) -> None:
    """Price the configs of ``ORDER``, train them, and print how far the orders agree."""
    from scipy.stats import spearmanr

    from titan_ext.config_registry.tune import Tune
    from titan_ext.plan.forks import Forks
    from titan_ext.plan.stand_ins import as_rank

    command = Tune("moe_debug.toml", _ORDER_RANKS, machine=machine, memory="8GiB", processes=1)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with as_rank(_ORDER_RANKS, 0, _ORDER_RANKS), quiet(False):
            search, _ = command.search([], Path(folder))
            with Forks(search.job.step, 1) as forks:
                priced = dict(forks.run([(keys,) for keys in ORDER.values()]))
        for at, name in enumerate(ORDER):
            _, planned = priced[at]
            rows[name] = {"planned": planned.step_ms, "wall": [], "cpu": []}
            rows[name]["parts"] = {part.name.lower(): ms for part, ms in planned.ms.items() if ms}
            print(f"{name}: {planned.step_ms:.0f} ms planned", flush=True)
        for _, (name, keys) in itertools.product(range(rounds), ORDER.items()):
            lines = [
                'extends = "moe_debug.toml"',
                *(f"{k} = {to_toml(v)}" for k, v in keys.items()),
            ]
            file = Path(folder) / "config.toml"
            file.write_text("\n".join(lines) + "\n")
            found = subprocess.run(
                [*_TORCHRUN, "-m", "benchmarks.tune_check", "--steps", file],
                check=True,
                capture_output=True,
                text=True,
            )
            for wall, cpu in json.loads(found.stdout.splitlines()[-1]):
                rows[name]["wall"].append(wall)
                rows[name]["cpu"].append(cpu)
            print(f"{name}: {found.stdout.splitlines()[-1]}", flush=True)
            if out is not None:
                out.write_text(json.dumps(rows, indent=1) + "\n")
    print("config: ms planned, median ms of a step, median CPU ms of a rank's step")
    for name, row in sorted(rows.items(), key=lambda x: x[1]["planned"]):
        measured = [statistics.median(row[key]) for key in ("wall", "cpu")]
        print(f"{name}: {row['planned']:.0f}, {measured[0]:.0f}, {measured[1]:.0f}")
    for key in ("wall", "cpu"):
        medians = [statistics.median(row[key]) for row in rows.values()]
        found = spearmanr([row["planned"] for row in rows.values()], medians)
        print(f"order: rank correlation with {key} = {found.statistic:.3f}")


def train(file: Path) -> None:
    """A rank: four steps of a config; rank 0 prints ms and CPU ms of the last three, for all."""
    import torch.distributed as dist

    from titan_ext.base import no_accelerator
    from titan_ext.config_registry.resolve import resolve

    no_accelerator.enable()
    own = "--checkpoint.no-enable --metrics.no-enable_tensorboard --debug.moe_force_load_balance"
    own += f" --dump_folder {file.parent}/run"
    config: Any = resolve(str(file), own.split()).config
    with no_accelerator.layout_independent_init():
        trainer = config.build()
    trainer.metrics_processor.log = lambda *_, **__: None
    batches, took = trainer.batch_generator(trainer.dataloader), []
    for step in range(1, 5):
        trainer.step = step
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        trainer.train_step(batches)
        cpu = time.process_time() - cpu
        dist.barrier()
        took.append((1e3 * (time.perf_counter() - begin), 1e3 * cpu))
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, took[1:])
    if dist.get_rank() == 0:
        steps = zip(*each, strict=True)
        print(json.dumps([[max(w for w, _ in s), max(c for _, c in s)] for s in steps]))
    trainer.close()


def _words(one: Any) -> str:
    too_large = "" if one.fits else ", which is too large,"
    return f"{one.us_per_token:.3f} us a token{too_large} with {dict(one.keys)}"


if __name__ == "__main__":
    main()
