# SPDX-License-Identifier: BSD-3-Clause
"""What needs dry runs in processes of their own: other configs beside a plan, and calibration.

``titan_ext dry-run CONFIG --ranks N --memory 80GiB --against other.toml`` plans both. With
``--machine`` each is timed, too, and of those that fit the fastest comes first. A config that does
not start is an answer as well: with its reason. ``calibrate`` learns from a finished run how slow
kernels are. ``titan_ext tune``, which plans many changes of one config, is ``plan.search``.
"""

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan_ext.base.machines import machine_of, machine_toml
from titan_ext.base.messages import format_bytes
from titan_ext.base.op_cost import nvlink_domain, ranks_per_node
from titan_ext.base.run_folder import read_scalar
from titan_ext.plan.ledger import LEDGER, Ledger
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
MEASURED = "measured.toml"
"""A machine as slow as a run has shown it to be."""


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
    before, found, failed = os.times(), [], []
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
    used_s = sum(os.times()[2:4]) - sum(before[2:4])  # of processes that have ended
    yield f"{len(found) + len(failed)} tried, {used_s:.0f} CPU seconds"


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


@dataclass(frozen=True)
class Calibration:
    """What the run in ``folder`` says about a machine: its kernels take ``slower`` times the ideal.

    A step took ``measured_ms``; the same step is modelled at ``modelled_ms``, with kernels so slow.
    If the run has a ledger, ``machine`` is a file with what each kind of kernels and messages takes
    (``kinds``), and ``slower`` is 1. ``waits`` has each kind of waits, in ms measured and modelled.
    """

    folder: Path
    machine: str
    slower: float
    measured_ms: float
    modelled_ms: float
    kinds: Mapping[str, float] = field(default_factory=dict)
    waits: Mapping[Part, tuple[float, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        what = f"kernels {self.slower:.2f} times slower than ideal, from"
        if self.kinds:
            kinds = ", ".join(f"{kind} {by:.2f}" for kind, by in self.kinds.items())
            what = f"times the ideal: {kinds}, in the ledger of"
        waits = (f"{part} {ms:.1f}, not {model:.1f}" for part, (ms, model) in self.waits.items())
        return (
            f"{what} {self.folder}: a step of "
            f"{self.measured_ms:.1f} ms, so modelled at {self.modelled_ms:.1f} "
            f"({self.modelled_ms / self.measured_ms - 1:+.1%})" + "".join(f"; {x}" for x in waits)
        )


def calibrate(
    folder: Path,
    machine: str,
    out: Path,
    model: Callable[[Path, int, str, float], _Time] | None = None,
) -> Calibration:
    """How much slower kernels were in a run than a dry run's clock takes them to be.

    ``titan_ext dry-run --machine h100 --measured FOLDER`` dry-runs the config of a finished run,
    holds the clock's step against the run's, and slows down all kernels until both are the same.
    What the run waited for its links stays as modelled. If the run was profiled on accelerators,
    or its folder has the ``ledger.json`` of such a run, each kind of kernels and messages is held
    against the clock's by itself, and waits of each kind stand beside those modelled.

    Args:
        folder: Of the run: its ``config.toml``, ``run.json`` and TensorBoard files.
        machine: On which it ran.
        out: The folder for ``MEASURED``.
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
    ledger, factors = _ledger(folder), {}
    if ledger:
        before = machine_of(machine)
        took, slower = ideal["kernels"], 1.0
        factors = {k: ms / took[k] for k, ms in ledger["kinds"].items() if took.get(k)}
        total = {k: by * before.slower.get(k, 1.0) for k, by in factors.items()}
        machine = str(out / MEASURED)
        lines = machine_toml(replace(before, slower={**before.slower, **total}))
        Path(machine).write_text("\n".join([f"# {folder}", *lines]) + "\n")
    modelled = model(folder / CONFIG, ranks, machine, slower)
    names = {part: part.name.lower() for part in WAITS}
    waits = {
        part: (ledger["ms"][name], modelled["ms"].get(name, 0.0))
        for part, name in names.items()
        if name in ledger.get("ms", ())
    }
    return Calibration(folder, machine, slower, measured_ms, modelled["step_ms"], factors, waits)


def _ledger(folder: Path) -> Mapping[str, Any]:
    """The folder's ``ledger.json``, or of its newest trace; empty where no accelerator ran."""
    try:
        if (file := folder / LEDGER).exists():
            found = json.loads(file.read_text())
        else:
            found = Ledger.read(folder).to_json()
    except ValueError:
        return {}
    return found if found.get("kinds") else {}


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
