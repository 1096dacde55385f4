# SPDX-License-Identifier: BSD-3-Clause
"""Other configs beside a plan, by dry runs in processes of their own.

``titan_ext dry-run CONFIG --ranks N --memory 80GiB --against other.toml`` plans both. With
``--machine`` each is timed, too, and of those that fit the fastest comes first. A config that does
not start is an answer as well: with its reason. ``titan_ext tune``, which plans many changes of one
config, is ``plan.search``.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_ext.base.messages import format_bytes
from titan_ext.run.record import dry_run_elsewhere, file_name
from titan_ext.toml.files import to_toml

_REASON = 160
"""Characters of a reason, at most."""


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
