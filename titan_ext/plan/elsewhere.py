# SPDX-License-Identifier: BSD-3-Clause
"""What needs dry runs in processes of their own: other configs beside a plan, and calibration.

``titan_ext dry-run CONFIG --ranks N --memory 80GiB --against other.toml`` plans both. With
``--machine`` each is timed, too, and of those that fit the fastest comes first. A config that does
not start is an answer as well: with its reason. ``calibrate`` learns from a finished run how slow
kernels are. ``titan_ext tune``, which plans many changes of one config, is ``plan.search``.
"""

import json
import resource
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_ext.base.messages import format_bytes
from titan_ext.base.op_cost import nvlink_domain, ranks_per_node
from titan_ext.base.run_folder import read_scalar
from titan_ext.plan.ledger import Ledger
from titan_ext.plan.time import WAITS, Part
from titan_ext.run.planned import dry_run_elsewhere, file_name
from titan_ext.run.record import CONFIG, RECORD
from titan_ext.toml.files import to_toml

_SECONDS = "time_metrics/end_to_end(s)"
_REASON = 160
"""Characters of a reason, at most."""

_Time = Mapping[str, Any]
"""The "time" of a plan's file."""
_ANY_MEMORY = "1TiB"
_KERNELS = [part for part in Part if part not in (*WAITS, Part.BUBBLE, Part.OTHER)]


def compare(
    folder: Path, plan: Mapping[str, Any], options: Sequence[str], against: Mapping[str, str]
) -> Iterator[str]:
    """Plan other configs: a line for each before it is planned, and the results, best first.

    Args:
        folder: Where files go.
        plan: Of the first config, as ``plan.report.to_json`` made it. The same rank is planned.
        options: Of the command, such as ``--memory 80GiB --machine h100``.
        against: The others by name, and as a TOML file in ``folder`` extends them.
    """
    before_s, found, failed = _cpu_s(), [], []
    yield f"-- what would fit on rank {plan['rank']}: {len(against)} configs, a dry run each"
    for name, extends in against.items():
        yield f"trying {name}"
        file, planned = folder / "other.toml", folder / file_name(plan["rank"])
        planned.unlink(missing_ok=True)
        file.write_text(f"extends = {to_toml(extends)}\n")
        where = ["--rank", str(plan["rank"]), "--out", str(folder)]
        done = dry_run_elsewhere(file, [*options, *where])
        if planned.exists():
            found.append((json.loads(planned.read_text()), name))
        else:
            failed.append(f"does not start: {name}: {_reason(done.stderr, file)}")
    for other, name in sorted(found, key=_order):
        spare, time = other["spare"], other["time"]
        saved = spare - plan["spare"]
        moved = f"{'saves' if saved >= 0 else 'needs'} {format_bytes(abs(saved))}"
        taken = f", {time['step_ms']:.0f} ms a step" if time else ""
        yield f"{'fits' if spare >= 0 else 'does not fit'}, {moved}{taken}: {name}"
    yield from failed
    yield f"{len(found) + len(failed)} tried, {_cpu_s() - before_s:.0f} CPU seconds"


def _order(found: tuple[Mapping[str, Any], str]) -> tuple[bool, float, float]:
    """The fastest that fits first, or by bytes where no step was timed."""
    plan, _ = found
    fits, time = plan["spare"] >= 0, plan["time"]
    return not fits, time["step_ms"] if fits and time else 0.0, -plan["spare"]


def _reason(error: str, file: Path) -> str:
    """The first line of an error, without the file that nobody wrote."""
    lines = [line for line in error.splitlines() if line.strip()] or ["no message"]
    words = lines[0].removeprefix(f"{file}: ")
    return words if len(words) <= _REASON else f"{words[: _REASON - 4]} ..."


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class Calibration:
    """What the run in ``folder`` says about a machine: its kernels take ``slower`` times the ideal.

    A step took ``measured_ms``; the same step is modelled at ``modelled_ms``, with kernels so slow.
    ``waits`` has, for each kind of waits in a trace of the run, its ms measured and modelled.
    """

    folder: Path
    slower: float
    measured_ms: float
    modelled_ms: float
    waits: Mapping[Part, tuple[float, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        where = "a trace of" if self.waits else "from"
        waits = (f"{part} {ms:.1f}, not {model:.1f}" for part, (ms, model) in self.waits.items())
        return (
            f"kernels {self.slower:.2f} times slower than ideal, {where} {self.folder}: a step of "
            f"{self.measured_ms:.1f} ms, so modelled at {self.modelled_ms:.1f} "
            f"({self.modelled_ms / self.measured_ms - 1:+.1%})" + "".join(f"; {x}" for x in waits)
        )


def calibrate(
    folder: Path, machine: str, model: Callable[[Path, int, str, float], _Time] | None = None
) -> Calibration:
    """How much slower kernels were in a run than a dry run's clock takes them to be.

    ``titan_ext dry-run --machine h100 --measured FOLDER`` dry-runs the config of a finished run,
    holds the clock's step against the run's, and slows down all kernels until both are the same.
    What the run waited for its links stays as modelled. If the run was profiled, its kernels are
    held against the clock's by themselves, and waits of each kind stand beside those modelled.

    Args:
        folder: Of the run: its ``config.toml``, ``run.json`` and TensorBoard files.
        machine: On which it ran.
        model: Times a step of a config file, on so many ranks, with kernels so slow, as a plan's
            file has it; by default a dry run of rank 0.

    Raises:
        ValueError: for a folder without these files, or a step shorter than its waits.
    """
    model = model or _timed_elsewhere
    for name in (CONFIG, RECORD):
        if not (folder / name).exists():
            raise ValueError(f"--measured {folder}: expected the folder of a run, with {name}.")
    ranks = json.loads((folder / RECORD).read_text())["starts"][-1]["ranks"]
    _, *seconds = read_scalar(folder, _SECONDS).values()  # the first step makes kernels and plans
    if not seconds:
        raise ValueError(f"--measured {folder}: expected a run that logged two steps or more.")
    measured_ms = statistics.median(seconds) * 1e3
    ideal = model(folder / CONFIG, ranks, machine, 1.0)
    waits_ms = sum(ideal["ms"].get(part.name.lower(), 0.0) for part in WAITS)
    if measured_ms <= waits_ms:
        raise ValueError(
            f"--measured {folder}: a step took {measured_ms:.1f} ms, where {machine} waits "
            f"{waits_ms:.1f} ms for its links; was it another machine?"
        )
    slower = (measured_ms - waits_ms) / (ideal["step_ms"] - waits_ms)
    if traced := _traced_ms(folder):
        kernels = [sum(ms.get(part, 0.0) for part in _KERNELS) for ms in (traced, _by_part(ideal))]
        slower = kernels[0] / kernels[1]
    modelled = model(folder / CONFIG, ranks, machine, slower)
    then = _by_part(modelled)
    waits = {part: (traced.get(part, 0.0), then.get(part, 0.0)) for part in WAITS if part in traced}
    return Calibration(folder, slower, measured_ms, modelled["step_ms"], waits)


def _by_part(time: _Time) -> dict[Part, float]:
    return {part: time["ms"].get(part.name.lower(), 0.0) for part in Part}


def _traced_ms(folder: Path) -> Mapping[Part, float]:
    """Of rank 0 in the newest trace of a run on accelerators; empty without one."""
    try:
        ledger = Ledger.read(folder)
    except ValueError:
        return {}
    return ledger.ms[0] if ledger.traces[0].on_device else {}


def _timed_elsewhere(config: Path, ranks: int, machine: str, slower: float) -> _Time:
    options = ["--ranks", str(ranks), "--machine", machine, "--slower", str(slower)]
    options += ["--ranks-per-node", str(ranks_per_node())]
    options += ["--nvlink-domain", str(nvlink_domain())]
    with tempfile.TemporaryDirectory() as folder:  # only a plan's file has times
        done = dry_run_elsewhere(config, [*options, "--memory", _ANY_MEMORY, "--out", folder])
        planned = Path(folder, file_name(0))
        if not planned.exists():
            raise ValueError(f"--measured {config.parent}: {_reason(done.stderr, config)}")
        return json.loads(planned.read_text())["time"]
