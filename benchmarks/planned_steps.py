"""Steps of large jobs by the clock of a dry run, side by side: stock TorchTitan, and arms of ours.

    python -m benchmarks.planned_steps                                  # about 10 minutes
    python -m benchmarks.planned_steps --jobs 671B --arms stock auto

Nothing is measured: times are planned at an H100's rates (docs/plan.md). A row has, for each arm,
the step's time over stock's, GiB at the peak, and the largest waits in ms. ``planned`` makes and
keeps one plan; benchmarks/first_page.py draws such plans, exchanges.py has a table of its own.
"""

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_EP = "--parallelism.expert_parallel_degree"
_BATCH = "--training.local_batch_size"
JOBS = {
    "16B, 8 GPUs": f"deepseek_v3_16b --ranks 8 {_EP} 8",
    "16B, 64 GPUs": f"deepseek_v3_16b --ranks 64 {_EP} 8",
    "16B, 64 GPUs, 4k tokens": f"deepseek_v3_16b --ranks 64 {_EP} 8 {_BATCH} 1",
    "16B, 512 GPUs": f"deepseek_v3_16b --ranks 512 {_EP} 8",
    "Qwen3-235B, 256 GPUs": f"qwen3_235b_a22b.toml --ranks 256 {_EP} 8 {_BATCH} 2",
    "671B, 512 GPUs": "deepseek_v3_671b.toml --ranks 512",
    "671B, 2048 GPUs, EP 8": f"deepseek_v3_671b.toml --ranks 2048 {_EP} 8 {_BATCH} 2",
}
EAGER = "--compile.components loss"
"""Shipped files compile their blocks; these rows, and those of an H100, do not."""
_WRAP = "--parallelism.fsdp_wrap"
ARMS = {
    "stock": "--stock",
    "auto": "",
    "block": f"{_WRAP} block",
    "submodule": f"{_WRAP} submodule",
    "experts": f"{_WRAP} experts",
}
_WAITS = ("exchanges", "host", "gathers", "reductions", "collectives")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--jobs", default="", help="only those with this in their name")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), help="only these, in this order")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, job in JOBS.items():
            if args.jobs in name:
                config, rest = job.split(" ", 1)  # a policy's name stands last
                done = {
                    arm: planned(f"{config} {EAGER} {ARMS[arm]} {rest}", Path(folder))
                    for arm in args.arms or ARMS
                }
                print_row(name, done)


def planned(command: str, folder: Path, memory: str = "80GiB") -> dict[str, Any]:
    """The plan of ``titan_ext dry-run COMMAND`` on an H100, from ``folder`` if it has it."""
    out = folder / hashlib.sha256(f"{command} {memory}".encode()).hexdigest()[:16]
    if not list(out.glob("plan_rank*.json")):
        line = f"{command} --memory {memory} --machine h100 --out {out}"
        program = [sys.executable, "-m", "titan_ext", "dry-run"]
        done = subprocess.run(
            [*program, *shlex.split(line)], capture_output=True, text=True, check=False
        )
        if not list(out.glob("plan_rank*.json")):
            raise SystemExit(f"{line}: {done.stderr}")
    (file,) = out.glob("plan_rank*.json")
    return json.loads(file.read_text())


def print_row(job: str, plans: Mapping[str, Mapping[str, Any]]) -> None:
    """One line for each arm; ratios are to the first."""
    print(job)
    first = next(iter(plans.values()))["time"]["step_ms"]
    for arm, plan in plans.items():
        ms, gib = plan["time"]["ms"], plan["peak"]["sum"] / 2**30
        waits = ", ".join(f"{part} {ms[part]:.0f}" for part in _WAITS if ms[part] >= 0.5)
        step = plan["time"]["step_ms"]
        print(
            f"  {arm:22} {step:8.1f} ms {step / first:6.3f} {gib:7.2f} GiB, unsharded "
            f"{plan['unsharded'] / 2**20:7.0f} MiB; waits for {waits}",
            flush=True,
        )


if __name__ == "__main__":
    main()
