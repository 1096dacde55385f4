"""Exchanges of tokens that wait for nothing: planned steps of large jobs, side by side.

    python -m benchmarks.exchanges                   # all jobs, about 20 minutes of two cores
    python -m benchmarks.exchanges --jobs 16B        # some
    python -m benchmarks.exchanges --imbalance 1.5   # the rank whose experts get so many tokens

Nothing is measured: times are planned at an H100's rates (docs/plan.md). Every job has two
sequences or more on a rank, which halves need. All arms of a job take the same batch.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.planned_steps import EAGER, JOBS, planned, print_row

_EP = "--parallelism.expert_parallel_degree"
_BATCH = "--training.local_batch_size"
_FULL = "activation_checkpoint:full"  # stock selective does not fit 671B into 80 GiB
EXCHANGES = {
    "16B, 8 GPUs": JOBS["16B, 8 GPUs"],
    "Qwen3-30B, 16 GPUs": f"qwen3_30b_a3b.toml --ranks 16 {_EP} 16 {_BATCH} 2",
    "gpt_oss-20B, 8 GPUs": f"gpt_oss_20b.toml --ranks 8 {_EP} 8 {_BATCH} 2",
    "gpt_oss-20B, 64 GPUs": f"gpt_oss_20b.toml --ranks 64 {_EP} 8 {_BATCH} 2",
    "671B, 512 GPUs": f"deepseek_v3_671b.toml --ranks 512 {_BATCH} 2 {_FULL}",
    "671B, 2048 GPUs, PP 16": (
        f"deepseek_v3_671b.toml --ranks 2048 --rank 1024 {_EP} 64 {_BATCH} 64 "
        "--parallelism.pipeline_parallel_degree 16 "
        f"--parallelism.pipeline_parallel_microbatch_size 2 {_FULL}"
    ),
}
_HALVES = "--parallelism.overlap_exchanges halves"
_FLOAT8 = "--parallelism.exchange_dtype float8"
_ROWS, _NODE = (f"--parallelism.exchange_rows {once}" for once in ("rank", "node"))
_EXPERTS = (
    "--parallelism.fsdp_float8_all_gather experts --parallelism.fsdp_expert_reduce_scatter bfloat16"
)
ARMS = {
    "stock": "--stock",
    "titan_ext": "",
    "halves": _HALVES,
    "float8": _FLOAT8,
    "one row": _ROWS,
    "halves, float8": f"{_HALVES} {_FLOAT8}",
    "halves, one row": f"{_HALVES} {_ROWS}",
    "halves, float8, one row": f"{_HALVES} {_FLOAT8} {_ROWS}",
    "halves, float8, a node": f"{_HALVES} {_FLOAT8} {_NODE}",
    "halves, float8 gathers": f"{_HALVES} --parallelism.fsdp_float8_all_gather blocks",
    "and experts' gathers": f"{_HALVES} {_FLOAT8} {_EXPERTS}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--jobs", default="", help="only those with this in their name")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), help="only these, in this order")
    parser.add_argument("--imbalance", default="1", help="tokens of the rank's experts")
    args = parser.parse_args()
    options = "" if args.imbalance == "1" else f"--imbalance {args.imbalance}"
    with tempfile.TemporaryDirectory() as folder:
        for name, job in EXCHANGES.items():
            if args.jobs in name:
                config, rest = job.split(" ", 1)  # a policy's name stands last
                arms = [arm for arm in args.arms or ARMS if _is_served(arm, job)]
                plans = {
                    arm: planned(f"{config} {options} {EAGER} {ARMS[arm]} {rest}", Path(folder))
                    for arm in arms
                }
                print_row(name, plans)


def _is_served(arm: str, job: str) -> bool:
    """Experts travel in fewer bits where FSDP shards them, without biases and pipelines."""
    whole = any(f"--ranks {n} {_EP} {n}" in job for n in (8, 16))
    if _NODE in ARMS[arm] and (f"{_EP} 8" in job or job.startswith("deepseek_v3_16b")):
        return False  # all tokens stay on their node
    return _EXPERTS not in ARMS[arm] or not (whole or "pipeline" in job or "gpt_oss" in job)


if __name__ == "__main__":
    main()
