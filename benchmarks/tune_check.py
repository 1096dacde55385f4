"""``titan_ext tune`` against every config of a small grid: is anything better than what it finds?

    python -m benchmarks.tune_check                     # three jobs
    python -m benchmarks.tune_check --jobs 16B

A grid has degrees of expert parallelism, batches, routing scores and units. Each of its configs
gets the best checkpointing that fits, as in ``tune``. Prices are of shortened models, for both
alike. Nothing is measured. ``tune`` may use keys that a grid does not have, and so be better.
"""

import argparse
import gc
import itertools
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

from titan_ext.base.messages import quiet

_LOCAL, _GLOBAL = "training.local_batch_size", "training.global_batch_size"
_EP, _WRAP = "parallelism.expert_parallel_degree", "parallelism.fsdp_wrap"
_SCORES = "activation_checkpoint.score_before_last_gemm"
_COPIES = "parallelism.data_parallel_replicate_degree"
JOBS: dict[str, tuple[str, int, str, dict[str, tuple[Any, ...]]]] = {
    "debug, 8 GPUs of 1.5 GiB": (
        "moe_debug_gpu",
        8,
        "1536MiB",
        {_EP: (2, 4, 8), _SCORES: (False, True), _WRAP: ("auto", "block"), _COPIES: (1, 2)},
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--jobs", default="", help="only those with this in their name")
    parser.add_argument("--processes", type=int, default=0)
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
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
    from titan_ext.plan.moves import Effect, Move
    from titan_ext.plan.stand_ins import as_rank

    every = Move((), (), Effect.ROUNDING, "a point of the grid", lambda now, facts: ())
    command = Tune(config, ranks, memory=memory, processes=processes)
    with tempfile.TemporaryDirectory() as folder, as_rank(ranks, 0):
        search, _ = command.search([], Path(folder))
        search.run()
        tuned, priced = search.compared, len(search.tried)
        assert tuned is not None
        assert search.own is not None
        cpu_s = _cpu_s()
        now = search.job.values
        copies = search.job.facts.copies(now)
        total = now[_GLOBAL] if now[_GLOBAL] > 0 else now[_LOCAL] * copies
        points = []
        for values in itertools.product(*grid.values()):
            keys = dict(zip(grid, values, strict=True))
            points.append({every: keys | ({_GLOBAL: total} if _LOCAL in keys else {})})
        own = search.tried[0]
        found = search.forks.run(search.evaluate(point, own) for point in points)
        best = min(found, key=lambda one: one.order)
        print(
            f"{name}: yours {own.us_per_token:.3f} us a token{'' if own.fits else ' (too large)'}; "
            f"tuned {tuned.us_per_token:.3f} with {dict(tuned.keys)}, {priced} plans, "
            f"{cpu_s:.0f} CPU s; best of {len(points)} in the grid {best.us_per_token:.3f} with "
            f"{dict(best.keys)}, {_cpu_s() - cpu_s:.0f} CPU s: "
            f"tune saves {tuned.saves(best):+.2%} of it",
            flush=True,
        )


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main()
