"""Every figure that the docs leave open without a GPU, in one command on one.

    make gpu-receipts                                           # all, within 34 minutes on one H100
    python benchmarks/gpu_receipts.py --quick                   # the first 10 minutes of it
    python benchmarks/gpu_receipts.py --dry --out outputs/dry  # every item, tiny, on a CPU

The most valuable items come first. Each is one of the other benchmarks in a process of its own,
with a time limit; together they take at most 34 minutes, and the first ones 10. After each,
``--out`` has ``results.json`` (commands, outputs, figures),
``figures.png`` and ``log.md`` (a paragraph for benchmarks/LOG.md), so a run that is cut off leaves
what it has. The same command goes on after the last item that succeeded.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_ARMS = (
    "fp8-memory fp8-balanced fp8-speed fp8-speed-early fp8-gemms fp8-no-recompute "
    "stock-none stock-full"
)
_STEPS = "benchmarks/titan_steps.py"
_TOY = f"{_STEPS} --toy --batch 2 --steps 3"
_TRAIN = (
    "-m torch.distributed.run --nproc_per_node=1 --local-ranks-filter 0 --role rank --tee 3 "
    "-m torchtitan.train --module titan_ext --config train_configs/moe_debug_gpu.toml "
    "--checkpoint.no-enable --dump_folder {out}/"
)
_SHALLOW = "-m benchmarks.full_scale --shallow --out {out}/"
_HALVES = f"{_SHALLOW}halves --arms whole halves halves-wire"
_TWO_RANKS = "-m torch.distributed.run --nproc_per_node=2 --master_port 29511"
_MINUTES, _QUICK_MINUTES = 34, 10
_DRY_TIMES = 5
"""How many times as long an item may take on a CPU, which other work may share."""
_TITAN_NEEDS = (2, 14)


@dataclass(frozen=True)
class Item:
    """One measurement.

    Attributes:
        goal: What the docs claim or predict.
        seconds: After this it is stopped.
        command: Arguments of Python; ``{out}`` is the folder of the results.
        dry: The same, tiny and on a CPU.
        trains: Needs Titan's trainer, and so the torch that Titan asks for; else it is left out.
    """

    name: str
    goal: str
    seconds: int
    command: str
    dry: str
    trains: bool = False


ITEMS = (
    Item(
        "16B beside stock",
        "ms a step of stock's, eager and compiled: 1; which calls the host waits in",
        190,
        f"{_SHALLOW}16B --jobs 16B --arms stock whole stock-compiled compiled",
        f"{_SHALLOW}16B --dry --arms stock whole",
        trains=True,
    ),
    Item(
        "codec",
        "bandwidth as the store calls it, of a copy's: 0.80; one kernel each way",
        50,
        "benchmarks/codec_bandwidth.py --device cuda --cols 2048 2880 --dtype e4m3 e5m2",
        "benchmarks/codec_bandwidth.py --device cpu --rows 64 --cols 256 192 --rounds 1",
    ),
    Item(
        "gradients",
        "of one step of two layers, beside stock selective's: float8 0.997, exact offload equal",
        50,
        "benchmarks/step_time.py --cuda --layers 2 --batch 2 --gradients --arms fp8-memory "
        "fp8-speed fp8-gemms fp8-full fp8-no-recompute fp8-offload fp8-offload-float8",
        "benchmarks/step_time.py --toy --layers 2 --gradients --arms fp8-memory fp8-full",
    ),
    Item(
        "full scale",
        "one card as a rank of 8 to 512: bytes and kernel time of the plan's, by class: 1",
        280,
        "-m benchmarks.full_scale --out {out}/full_scale",
        "-m benchmarks.full_scale --out {out}/full_scale --dry",
        trains=True,
    ),
    Item(
        "rates",
        "a machine file of this card; plans of shapes that were not fitted: errors below 0.20",
        30,
        "-m benchmarks.rates --quick --out {out}/rates.toml",
        "-m benchmarks.rates --quick --out {out}/rates.toml",
    ),
    Item(
        "block of 8k tokens",
        "step time of stock's: memory 1.03, speed 0.96, early scores 0.90, no recompute 0.88",
        70,
        f"benchmarks/step_time.py --cuda --blocks --layers 1 --batch 2 --graph --arms {_ARMS}",
        "benchmarks/step_time.py --toy --blocks --rounds 1 --graph --arms fp8-speed-early",
    ),
    Item(
        "trainer, 4 layers, 4 x 4096 tokens",
        "tokens a second with early scores 1.10 of stock's; a batch 1.2 times as large; its losses",
        220,
        f"{_STEPS} --arms fp8-memory fp8-speed-early --largest-batch 64",
        f"{_TOY} --arms fp8-memory --largest-batch 3",
        trains=True,
    ),
    Item(
        "exchanges",
        "halves of a batch: ms of all kernels and idle share as whole's; 0.9 of a wire beside them",
        100,
        f"{_HALVES} --jobs 16B",
        f"{_HALVES} --dry",
        trains=True,
    ),
    Item(
        "pieces",
        "ms a step, of stock compiled: 1; host below eager's, with halves, too; GiB 1.1 of blocks'",
        240,
        f"{_SHALLOW}pieces --jobs 16B --no-plans "
        "--arms stock-compiled compiled-blocks compiled halves halves-compiled",
        f"{_SHALLOW}pieces --dry --arms whole halves",
        trains=True,
    ),
    Item(
        "profile",
        "host time of stock's: 1.2; idle share of the GPU as stock's",
        100,
        "benchmarks/step_profile.py --out {out}/profile "
        "--arms fp8-memory fp8-speed fp8-no-recompute",
        "benchmarks/step_profile.py --out {out}/profile --toy",
    ),
    Item(
        "host offload, 8 blocks of 8k tokens",
        "copies overlap: step time 1.0 of stock's, and the peak of the last two blocks",
        120,
        "benchmarks/step_time.py --cuda --blocks --layers 8 --batch 2 "
        "--arms fp8-offload fp8-offload-float8",
        "benchmarks/step_time.py --toy --blocks --rounds 1 --layers 3 --arms fp8-offload",
    ),
    Item(
        "units",
        "what the allocator gave to FSDP at most; losses as stock's",
        80,
        f"{_STEPS} --steps 6 --arms units",
        f"{_TOY} --arms units",
        trains=True,
    ),
    Item(
        "compiled",
        "as many graphs as stock, no recompile in a steady step; tokens a second above eager's",
        200,
        f"{_STEPS} --steps 8 --compile inductor --arms fp8-memory stock-memory-budget",
        f"{_TOY} --compile aot_eager --arms fp8-memory",
        trains=True,
    ),
    Item(
        "float8 experts",
        "Titan's float8 grouped GEMMs with float8 activations: losses as with them alone",
        90,
        f"{_STEPS} --steps 8 --float8 experts --arms fp8-memory",
        f"{_TOY} --float8 linear --arms fp8-memory",
        trains=True,
    ),
    Item(
        "context parallelism",
        "FlexAttention itself, two ranks on this GPU over gloo (if gloo can): losses as stock's",
        80,
        f"{_TWO_RANKS} {_STEPS} --gloo --cp 2 --layers 2 --batch 1 --steps 6 --arms fp8-memory",
        f"{_TWO_RANKS} {_TOY} --gloo --cp 2 --arms fp8-memory",
        trains=True,
    ),
    Item(
        "training",
        "the shipped config, with units per sub-module: it trains",
        100,
        f"{_TRAIN}training --training.steps 10",
        f"{_TRAIN}training --training.steps 2 --training.seq_len 64 --training.local_batch_size 1",
        trains=True,
    ),
)

_FIGURES = (
    (re.compile(r"^(.+?): .*, ratio ([\d.]+) "), "of a copy's bandwidth"),
    (re.compile(r"^(\S+) .*step time ([\d.]+) of stock"), "step time of stock selective's"),
    (re.compile(r"^(\S+) .*GiB, ([\d.]+) of stock"), "peak of stock selective's"),
    (re.compile(r"^(.+ wide, .+?): .*\), (\d+) kernels$"), "kernels"),
    (re.compile(r"(step: +\d+).* tps: ([\d,]+)"), "tokens a second"),
    (re.compile(r"(step: +\d+).* memory: +([\d.]+)GiB"), "GiB reserved"),
    (re.compile(r"(step: +\d+).* loss: +([\d.]+)"), "loss"),
)
_FIGURE = re.compile(r"^(\S[^:]*): (.+) = (-?[\d.]+(?:e[+-]\d+)?|nan)$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def figures(output: str) -> list[dict[str, Any]]:
    """What the benchmarks print, as numbers: ``kind``, ``name`` and ``value``."""
    found = []
    for line in _COLOUR.sub("", output).splitlines():
        for pattern, kind in _FIGURES:
            if match := pattern.search(line):
                value = float(match[2].replace(",", ""))
                found.append({"kind": kind, "name": " ".join(match[1].split()), "value": value})
        if match := _FIGURE.match(line):
            found.append({"kind": match[2], "name": match[1], "value": float(match[3])})
    return found


def measure(item: Item, out: Path, *, dry: bool, seconds: float) -> dict[str, Any]:
    """Run ``item`` and say how it went; it may fail or be stopped."""
    arguments = (item.dry if dry else item.command).format(out=out).split()
    # What was there stays: torch may lie there.
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(ROOT), *([before] if before else [])])
    environment = {**os.environ, "PYTHONPATH": path}
    if dry and "--compile" not in arguments:  # a CPU's compiler says nothing of a GPU's
        environment["TORCH_COMPILE_DISABLE"] = "1"
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # to end it with the processes that it starts: they hold the GPU
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        ending = f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        _end(process)
        output, _ = process.communicate()
        ending = f"stopped after {seconds:.0f} s"
    finally:
        _end(process)
    return {
        "command": " ".join(["python", *arguments]).replace(str(out), "OUT"),
        "ending": ending,
        "seconds": round(time.monotonic() - begin, 1),
        "figures": figures(output),
        "output": output[-20_000:],
    }


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def machine() -> str:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def torch_version() -> tuple[int, int]:
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def succeeded(result: dict[str, Any]) -> bool:
    return result["ending"] == "exit code 0"


def write(results: dict[str, Any], out: Path) -> None:
    """``results.json``, ``figures.png`` and ``log.md``, of what there is."""
    partial = out / "results.json.part"
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(out / "results.json")
    goals = {item.name: item.goal for item in ITEMS}
    lines = [f"## {results['date']}: GPU receipts ({results['machine']})", ""]
    for name, result in results["items"].items():
        lines += [f"{name} (goal: {goals[name]}): `{result['command']}`", ""]
        lines += [f"{result['ending']} after {result['seconds']} s.", ""]
        lines += [f"    {f['name']}: {f['value']:g} {f['kind']}" for f in result["figures"]]
        if not succeeded(result):
            lines += ["    " + line for line in result["output"].splitlines()[-8:]]
        lines.append("")
    (out / "log.md").write_text("\n".join(lines))
    with contextlib.suppress(ImportError):  # a machine may have no matplotlib
        plot(results, out / "figures.png")


def plot(results: dict[str, Any], path: Path) -> None:
    """A bar for each ratio; 1 is the copy, or stock selective."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    bars = [
        (f"{name}: {f['name']}, {f['kind']}", f["value"])
        for name, result in results["items"].items()
        for f in result["figures"]
        if " of " in f" {f['kind']}"
    ]
    figure, axes = plt.subplots(figsize=(11, 1 + 0.25 * len(bars)))
    axes.barh([label for label, _ in bars], [value for _, value in bars])
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_title(results["machine"])
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu_receipts")
    parser.add_argument("--quick", action="store_true", help="10 minutes instead of 30")
    parser.add_argument("--dry", action="store_true", help="every item, tiny, on a CPU")
    names = [item.name for item in ITEMS]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="ITEM")
    args = parser.parse_args()
    now = machine() + (", dry" if args.dry else "")
    if now.startswith("no GPU") and not args.dry:
        parser.error("torch sees no GPU here; --dry runs every item, tiny, on the CPU.")

    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": now, "items": {}}
    if (out / "results.json").exists():
        before = json.loads((out / "results.json").read_text())
        if before["machine"] != now:
            parser.error(f"--out has results of another machine: {before['machine']}")
        results["items"] = before["items"]
    end = time.monotonic() + (_QUICK_MINUTES if args.quick else _MINUTES) * 60
    has_trainer = torch_version() >= _TITAN_NEEDS
    items = [item for item in ITEMS if item.name in args.only and (has_trainer or not item.trains)]
    if len(items) < len(args.only):
        print("Titan's trainer needs torch 2.14: only what does not need it is measured")
    for item in items:
        old = results["items"].get(item.name)
        if old is not None and succeeded(old):
            print(f"{item.name}: done before", flush=True)
            continue
        left = end - time.monotonic()
        if left < 20:
            print(f"{item.name}: no time left; the same command goes on", flush=True)
            break
        seconds = item.seconds * (_DRY_TIMES if args.dry else 1)
        result = measure(item, out, dry=args.dry, seconds=min(left, seconds))
        results["items"][item.name] = result
        write(results, out)
        print(f"{item.name}: {result['ending']}, {result['seconds']} s", flush=True)
    print(f"Results are in {out}")
    measured = [results["items"].get(item.name) for item in items]
    return 0 if all(result is not None and succeeded(result) for result in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
