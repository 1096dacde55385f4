# SPDX-License-Identifier: BSD-3-Clause
"""How much slower kernels were in a run than a dry run's clock takes them to be.

``titan_ext dry-run --machine h100 --measured FOLDER`` dry-runs the config of a finished run, holds
the clock's step against the run's, and slows down all kernels until both are the same. What the run
waited for its links stays as modelled. The time of the config that was asked for then has the same
factor.
"""

import json
import multiprocessing
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from titan_ext.config_registry import resolve_config
from titan_ext.run_folder import read_scalar
from titan_ext.run_record import CONFIG, RECORD
from titan_ext.step_time import WAITS, StepTime

_SECONDS = "time_metrics/end_to_end(s)"


@dataclass(frozen=True)
class Calibration:
    """What a run says about a machine.

    Attributes:
        folder: Of the run.
        slower: Kernels take this times the ideal.
        measured_ms: Of a step of the run.
        modelled_ms: Of the same step, with kernels so slow.
    """

    folder: Path
    slower: float
    measured_ms: float
    modelled_ms: float

    def __str__(self) -> str:
        return (
            f"kernels {self.slower:.2f} times slower than ideal, from {self.folder}: a step of "
            f"{self.measured_ms:.1f} ms, so modelled at {self.modelled_ms:.1f} "
            f"({self.modelled_ms / self.measured_ms - 1:+.1%})"
        )


def calibrate(
    folder: Path, machine: str, model: Callable[[Path, int, str, float], StepTime] | None = None
) -> Calibration:
    """Compare a run with its dry runs, of rank 0.

    Args:
        folder: Of the run: its ``config.toml``, ``run.json`` and TensorBoard files.
        machine: On which it ran.
        model: Times a step of a config file, on so many ranks, with kernels so slow.

    Raises:
        ValueError: for a folder without these files, or a step shorter than its waits.
    """
    model = model or _dry_run_elsewhere
    for name in (CONFIG, RECORD):
        if not (folder / name).exists():
            raise ValueError(f"--measured {folder}: expected the folder of a run, with {name}.")
    ranks = json.loads((folder / RECORD).read_text())["starts"][-1]["ranks"]
    _, *seconds = read_scalar(folder, _SECONDS).values()  # the first step makes kernels and plans
    if not seconds:
        raise ValueError(f"--measured {folder}: expected a run that logged two steps or more.")
    measured_ms = statistics.median(seconds) * 1e3
    ideal = model(folder / CONFIG, ranks, machine, 1.0)
    waits_ms = sum(ideal.ms.get(part, 0.0) for part in WAITS)
    if measured_ms <= waits_ms:
        raise ValueError(
            f"--measured {folder}: a step took {measured_ms:.1f} ms, where {machine} waits "
            f"{waits_ms:.1f} ms for its links; was it another machine?"
        )
    slower = (measured_ms - waits_ms) / (ideal.step_ms - waits_ms)
    modelled = model(folder / CONFIG, ranks, machine, slower)
    return Calibration(folder, slower, measured_ms, modelled.step_ms)


def _dry_run_elsewhere(config: Path, ranks: int, machine: str, slower: float) -> StepTime:
    """In a process of its own: Titan allows one layout in a process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_dry_run, (config, ranks, machine, slower))


def _dry_run(config_file: Path, ranks: int, machine: str, slower: float) -> StepTime:
    from titan_ext import no_accelerator
    from titan_ext.dry_run import as_rank, dry_run

    with as_rank(ranks, 0):
        with no_accelerator.as_with_an_accelerator():
            config = resolve_config(str(config_file), []).config
        time = dry_run(config, ranks, machine=machine, slower=slower).time
    assert time is not None
    return time
