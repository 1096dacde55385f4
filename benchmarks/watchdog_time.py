"""CPU time of training steps with and without ``debug.record_collectives``, in turn, in one run.

    python -m benchmarks.watchdog_time

Two gloo ranks train the DeepSeek-V3 debug model with EP 2. Every second step is recorded; on the
others the hooks are gone. A ratio is of one round: a recorded step over the next one that is not.
The median over rounds is printed. Wall time on a shared machine says little, CPU time of the
process more. "Inside" is the CPU time of the recorder's own calls, over that of a step without
them. It has no noise of other work in it, and misses what a call costs beyond itself.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, make_config
from titan_ext.base.run_check import RunCheck
from titan_ext.base.stdlib_corpus import make_corpus
from titan_ext.debug import watchdog
from titan_ext.run.checks import Collectives

WARM_UP = 4


def _train(run: Run, folder: Path) -> dict[str, list[float]]:
    """CPU seconds and wall seconds of each step of one rank, recorded steps first."""
    config: Any = make_config(run, folder)
    config.debug.record_collectives = True
    trainer = config.build()
    (check,) = (c for c in trainer.checks if isinstance(c, Collectives))
    recorder, step = check._watchdog, trainer.train_step
    names = ("cpu on", "cpu off", "wall on", "wall off", "inside on")
    found: dict[str, list[float]] = {name: [] for name in names}

    def timed(data_iterator: Any) -> None:
        is_on = trainer.step % 2 == 1
        check._watchdog = recorder if is_on else RunCheck()
        if not is_on:
            for group in recorder._hooked:
                group.unregister_pre_hook(watchdog._HOOK_ID)
            recorder._hooked.clear()
        else:
            recorder._hook_new_groups()
        wall, cpu, before = time.perf_counter(), time.process_time(), inside[0]
        step(data_iterator)
        if is_on:
            found["inside on"].append(inside[0] - before)
        name = "on" if is_on else "off"
        found[f"cpu {name}"].append(time.process_time() - cpu)
        found[f"wall {name}"].append(time.perf_counter() - wall)

    inside = [0.0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                inside[0] += time.thread_time() - begin

        return call

    recorder._note = counted(recorder._note)
    compared = counted(recorder.compare)

    def compare_if_on(*arguments: Any) -> None:
        if check._watchdog is recorder:
            compared(*arguments)

    recorder.compare = compare_if_on
    trainer.train_step = timed
    with contextlib.redirect_stdout(None):
        trainer.train()
    trainer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ac", default="selective")
    args = parser.parse_args()
    steps = 2 * (args.rounds + WARM_UP)
    run = Run(
        parallelize="submodule", world=2, ep=2, layers=6, steps=steps, seq_len=128, ac=args.ac
    )
    make_corpus()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = run_ranks(_train, 2, run, folder, log_folder=folder / "logs", timeout_s=3600)
    for kind in ("cpu", "wall"):
        for rank, found in enumerate(ranks):
            on, off = (found[f"{kind} {name}"][WARM_UP:] for name in ("on", "off"))
            ratios = sorted(a / b for a, b in zip(on, off, strict=True))
            print(
                f"{kind} rank {rank}: {statistics.median(on):.3f} s recorded, "
                f"{statistics.median(off):.3f} s not; ratio {statistics.median(ratios):.3f} "
                f"({ratios[len(ratios) // 4]:.3f} to {ratios[-len(ratios) // 4]:.3f})"
            )

    for rank, found in enumerate(ranks):
        share = statistics.median(found["inside on"][WARM_UP:]) / statistics.median(
            found["cpu off"][WARM_UP:]
        )
        print(f"inside rank {rank}: {share:.4f} of a step's CPU time")


if __name__ == "__main__":
    main()
