"""``python -m tests.matrix.table`` writes docs/support.md from the rows of the matrix.

What it says is what ``make matrix`` checks: no line of it is written by hand.
"""

import itertools
import textwrap
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from tests.helpers.training import Run
from tests.matrix.features import BACKENDS, HEADINGS, describe, is_lossy
from tests.matrix.refused import REFUSALS, Refusal
from tests.matrix.rows import DRY, ROWS, reference_of

__all__ = ["DOCUMENT", "counts", "document", "share_that_fails"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "support.md"

_WRAPS = ("block", "submodule", "experts")


@dataclass(frozen=True)
class _Entry:
    """One cell's worth: a run and what becomes of it."""

    run: Run
    outcome: str


def counts() -> dict[str, int]:
    """How many runs are equal to stock, lossy, dry, refused by titan_ext, and limited upstream."""
    outcomes = [_outcome(run) for run in ROWS]
    by = [refusal.by for refusal in REFUSALS]
    return {
        "equal": outcomes.count("equal"),
        "lossy": outcomes.count("lossy"),
        "dry": len(DRY),
        "refused": by.count("titan_ext"),
        "upstream": len(by) - by.count("titan_ext"),
    }


def document() -> str:
    """The text of docs/support.md."""
    numbers = _numbers()
    entries = [_Entry(run, _outcome(run)) for run in ROWS]
    entries += [_Entry(run, "dry") for run in DRY]
    entries += [
        _Entry(r.run, f"{'refused' if r.by == 'titan_ext' else 'upstream'} [{numbers[_reason(r)]}]")
        for r in REFUSALS
    ]
    parts = [_introduction()]
    parts += [_section(heading, entries) for heading in HEADINGS]
    parts.append(_reasons(numbers))
    return "\n".join(part for part in parts if part)


def _outcome(run: Run) -> str:
    return "lossy" if is_lossy(run) else "equal"


def _introduction() -> str:
    n = counts()
    total = sum(n.values())
    return f"""# What runs with what

`python -m tests.matrix.table` writes this page from what `make matrix` checks; do not edit it.

{
        textwrap.fill(
            f"{total} layouts: {n['equal']} equal stock TorchTitan bit for bit, {n['lossy']} are "
            f"lossy, and {n['dry']} are dry runs. titan_ext refuses {n['refused']}, and TorchTitan "
            f"or torch stops {n['upstream']}. {100 * share_that_fails():.1f} % do not run. All "
            "are on CPU ranks with gloo.",
            width=100,
        )
    }

- **equal**: losses, gradient norms, parameters and optimizer states of every step and rank are
  those of stock TorchTitan, to the bit.
- **lossy**: activations, or gathered experts, in float8. Equal to ours with whole-block units, to
  the bit.
- **dry**: parallelized on the meta device, every shard as stock's; not trained.
- **refused [n]**, **upstream [n]**: an error whose words a test checks; the reasons are below.
- An empty cell was not tried.
{"".join(_other_references())}
`block`, `submodule` and `experts` are what one FSDP unit is (`parallelism.fsdp_wrap`). CP trains
here with FlexAttention as plain operations, for stock and ours alike (`tests/helpers/on_cpu.py`).
"""


def _other_references() -> list[str]:
    pairs = {(run.schedule, reference_of(run).schedule): None for run in ROWS}
    said = [
        f"- {ours} is compared with {other}: the same sums in another order.\n"
        for ours, other in pairs
        if ours != other
    ]
    if any(run.backend != reference_of(run).backend for run in ROWS):
        said.append(
            "- LoRA under `spmd_types` is compared with stock's `partial_dtensor`, which keeps\n"
            "  the base frozen.\n"
        )
    return said


def share_that_fails() -> float:
    """Refused and limited upstream, of all layouts."""
    n = counts()
    return (n["refused"] + n["upstream"]) / sum(n.values())


def _section(heading: str, entries: list[_Entry]) -> str:
    cells: dict[tuple[str, str], dict[tuple[str, str], set[str]]] = {}
    ranks: dict[tuple[str, str], set[int]] = defaultdict(set)
    for entry in entries:
        run = entry.run
        found, features = describe(run)
        if found == heading:
            line = cells.setdefault((features, run.model), defaultdict(set))
            for backend in [run.backend] if run.backend in BACKENDS else BACKENDS:
                line[backend, run.parallelize].add(entry.outcome)
            ranks[features, run.model].add(run.world)
    if not cells:
        return ""
    wraps = {wrap for line in cells.values() for _, wrap in line} | {*_WRAPS[:2]}
    columns = list(itertools.product(BACKENDS, [wrap for wrap in _WRAPS if wrap in wraps]))
    # Models of which the same is said share a line.
    lines: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (features, model), line in cells.items():
        world = ", ".join(map(str, sorted(ranks[features, model])))
        said = ("; ".join(sorted(line[column])) for column in columns)
        lines[features, world, *said].append(model)
    text = [f"## {heading}", ""]
    text.append(_row("", "models", "ranks", *(f"{b}, {w}" for b, w in columns)))
    text.append(_row(*["---"] * (3 + len(columns))))
    for (features, world, *said), models in lines.items():
        text.append(_row(features, ", ".join(models), world, *said))
    return "\n".join([*text, ""])


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _reason(refusal: Refusal) -> Refusal:
    """What refusals of the same kind share."""
    return replace(refusal, run=Run())


def _numbers() -> dict[Refusal, int]:
    numbers: dict[Refusal, int] = {}
    for refusal in REFUSALS:
        numbers.setdefault(_reason(refusal), len(numbers) + 1)
    return numbers


def _reasons(numbers: dict[Refusal, int]) -> str:
    text = ["## Reasons", ""]
    for reason, number in numbers.items():
        runs = [r.run for r in REFUSALS if _reason(r) == reason]
        end = f"Ours ends with `{reason.message}`"
        stock = {
            None: f"{end}; stock TorchTitan {_without_error(runs[0])}",
            reason.message: f"Both end with `{reason.message}`",
        }.get(reason.stock_message, f"{end}, stock TorchTitan with `{reason.stock_message}`")
        address = f" <{reason.address}>" if reason.address else ""
        text += [
            textwrap.fill(
                f"{number}. {reason.by}: {reason.reason} {stock}.{address}",
                width=100,
                subsequent_indent="   ",
                break_long_words=False,
                break_on_hyphens=False,
            ),
            "",
            f"       python -m tests.matrix.reproduce {runs[0]}{' --ours' * is_lossy(runs[0])}",
            "",
        ]
    return "\n".join(text)


def _without_error(run: Run) -> str:
    return "has no such policy" if is_lossy(run) else "trains it"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}")
