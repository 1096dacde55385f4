"""Published figures of real GPUs, and the plan of each job beside them.

    python -m benchmarks.published                       # the tables of published.md, 10 minutes
    python -m benchmarks.published --rows A1 B1          # some of them
    python -m benchmarks.published --recorded --plot docs/images/published.png   # of published.md

Rows are in published.toml, with their sources. No byte is fitted: memory is what torch's allocator
would reserve for the plan's storages. Of the time two factors are, on kernels of eager and of
compiled jobs: on a random half of the rows with a time, and they are tested on the others.
"""

import argparse
import json
import math
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

from titan_ext.plan.memory import BANDS, JobClass
from titan_ext.plan.time import SPREAD, WAITS
from titan_ext.toml.files import to_toml

_GIB = 2**30
_AT_ONCE = 2
_SEED = 33
_SPLITS = 200
_APART = 0.03
"""Of a speed: jobs that are nearer to each other are listed apart."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    rows = read_rows()
    parser.add_argument("--rows", nargs="+", choices=list(rows), default=list(rows))
    parser.add_argument("--plot", type=Path, help="a picture to write")
    parser.add_argument("--plans", type=Path, help="folder of plans to keep, and to take if there")
    parser.add_argument("--recorded", action="store_true", help="plot published.md; plan nothing")
    args = parser.parse_args()
    if args.recorded:
        draw(rows, recorded()).savefig(args.plot, dpi=100)
        return
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(_AT_ONCE) as threads:
        folder = args.plans or Path(temporary)
        plans = threads.map(lambda name: planned(name, rows[name], folder), args.rows)
        done = dict(zip(args.rows, plans, strict=True))
    print(*memory_table(rows, done), "", *time_table(rows, done), sep="\n")
    if args.plot is not None:
        draw(rows, figures(rows, done)).savefig(args.plot, dpi=100)


def read_rows() -> dict[str, dict[str, Any]]:
    """Every row of published.toml by its name, with what it takes from the row it is ``like``."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    for name, row in rows.items():
        row["values"] = tomllib.loads(row["config"])
        if (base := rows.get(row.get("like"))) is not None:
            row["values"] = _merged(base["values"], row["values"])
            taken = ("source", "dry_run", "differs", "time", "fits", "planned")
            rows[name] = {key: base[key] for key in taken if key in base} | row
    return rows


def _merged(base: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changed.items():
        is_table = isinstance(value, dict) and key != "op_policies"
        if key == "activation_checkpoint":
            merged[key] = value  # another policy has other keys
            if "policy" not in value:
                merged[key] = {**base[key], **value}
        else:
            merged[key] = _merged(base.get(key, {}), value) if is_table else value
    return merged


def planned(name: str, row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The plan of a row's job, as ``titan_ext dry-run --out`` writes it."""
    out = folder / name
    file = out / "plan_rank0.json"
    if not file.exists():
        out.mkdir(parents=True, exist_ok=True)
        config = out / "config.toml"
        config.write_text("\n".join(_lines(row["values"])) + "\n")
        line = f"{config} {row['dry_run']} --out {out}"
        program = [sys.executable, "-m", "titan_ext", "dry-run", *shlex.split(line)]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        if not file.exists():
            raise SystemExit(f"{name}: {line}: {done.stderr}")
    return json.loads(file.read_text())


def _lines(values: Mapping[str, Any], at: str = "") -> Iterable[str]:
    for key, value in values.items():
        key = json.dumps(key) if not key.isidentifier() and "_" not in at else key
        if isinstance(value, dict) and key != "op_policies":
            yield from _lines(value, f"{at}{key}.")
        else:
            yield f"{at}{key} = {to_toml(value)}"


def memory_table(
    rows: Mapping[str, Mapping[str, Any]], plans: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Lines of Markdown, and what they come to."""
    lines = ["| row | job | class | allocated | reserved | published | off by | verdict | it |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    wrong, uncertain = [], []
    for name, plan in plans.items():
        row, off_by = rows[name], ""
        verdict = "uncertain" if plan["uncertain"] else "fits" if plan["fits"] else "does not fit"
        if not row.get("planned", True):
            verdict = "not planned"
        elif plan["uncertain"]:
            uncertain.append(name)
        elif plan["fits"] != row["fits"]:
            wrong.append(name)
        if "reserved" in row:
            off_by = f"{_error(name, rows, plans):+.1%}"
        lines.append(
            f"| {name} | {row['job']} | {plan['class']} | {plan['peak']['sum'] / _GIB:.1f} "
            f"| {plan['reserved'] / _GIB:.1f} | {row.get('reserved', '')} | {off_by} | {verdict} "
            f"| {'ran' if row['fits'] else 'did not'} |"
        )
    lines += [f"verdicts: {len(plans)}, wrong {wrong}, uncertain {uncertain}", ""]
    return [*lines, *_by_class(rows, plans), "", *_lines_through(rows, plans)]


def _error(
    name: str, rows: Mapping[str, Mapping[str, Any]], plans: Mapping[str, Mapping[str, Any]]
) -> float:
    return plans[name]["reserved"] / _GIB / rows[name]["reserved"] - 1


def _by_class(
    rows: Mapping[str, Mapping[str, Any]], plans: Mapping[str, Mapping[str, Any]]
) -> Iterable[str]:
    """A line for each class of jobs: how far its plans are off, and what each job adds to that."""
    for job_class in JobClass:
        jobs: dict[str, float] = {}
        errors = []
        for name, plan in plans.items():
            if plan["class"] == job_class and "reserved" in rows[name]:
                errors.append(abs(_error(name, rows, plans)))
                if not rows[name].get("found", False):
                    job = _family(name, rows)
                    jobs[job] = max(jobs.get(job, 0.0), errors[-1])
        if jobs:
            beyond = [
                f"{job} {error:.1%} (others {max([0.0, *others]):.1%})"
                for job, error in jobs.items()
                for others in [[x for other, x in jobs.items() if other != job]]
                if error > max([0.0, *others])
            ]
            band = BANDS[job_class]
            yield (
                f"{job_class}: {len(errors)} rows of {len(jobs)} jobs, mean "
                f"{statistics.mean(errors):.1%}, largest {max(errors):.1%}; band {band:.0%}, "
                f"{sum(x <= band for x in errors)} within; left out in turn, beyond the others: "
                f"{', '.join(beyond)}"
            )


def _lines_through(
    rows: Mapping[str, Mapping[str, Any]], plans: Mapping[str, Mapping[str, Any]]
) -> Iterable[str]:
    """GiB whatever the batch, and GiB a sequence, of rows that differ in that alone."""
    for name, row in rows.items():
        base = row.get("like")
        values = row["values"]["training"]
        others = {**row["values"], "training": None}
        if base is None or base not in plans or name not in plans:
            continue
        before = rows[base]["values"]
        both = all("reserved" in rows[x] for x in (name, base))
        if (
            not both
            or others != {**before, "training": None}
            or row["dry_run"] != rows[base]["dry_run"]
        ):
            continue
        few, many = before["training"]["local_batch_size"], values["local_batch_size"]
        found = []
        for low, high in (
            (rows[base]["reserved"], row["reserved"]),
            (plans[base]["reserved"] / _GIB, plans[name]["reserved"] / _GIB),
        ):
            slope = (high - low) / (many - few)
            found.append(f"{low - few * slope:.1f} + {slope:.2f} a sequence")
        yield f"{base} and {name}: published {found[0]}, planned {found[1]} GiB"


def is_compiled(row: Mapping[str, Any]) -> bool:
    """Whether the blocks are; a compiled loss alone leaves them eager."""
    return "model" in _compiled(row)


def _compiled(row: Mapping[str, Any]) -> Sequence[str]:
    compiler = row["values"].get("compile", {})
    return compiler.get("components", ["model"]) if compiler.get("enable", False) else ()


def time_table(
    rows: Mapping[str, Mapping[str, Any]], plans: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Lines of Markdown, with the factors of one half, and how well halves predict the others."""
    timed = [name for name in plans if "tokens" in rows[name]]
    fitted, judged = halves([n for n in timed if rows[n].get("time", True)], rows)
    factor = fit(fitted, rows, plans)
    lines = ["| row | job | ideal | expected | published | off by | half |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name in timed:
        row, ideal = rows[name], plans[name]["time"]["tokens_per_second"]
        expected = _expected(plans[name], factor.get(is_compiled(row), math.nan))
        half = "fitted" if name in fitted else "tested" if name in judged else row["differs"]
        lines.append(
            f"| {name} | {row['job']} | {ideal:,.0f} | {expected:,.0f} | {row['tokens']:,} "
            f"| {expected / row['tokens'] - 1:+.1%} | {half} |"
        )
    lines.append(f"factors on kernels, eager and compiled: {factor}")
    errors = []
    for seed in range(_SPLITS):
        some, others = halves([*fitted, *judged], rows, seed)
        found = fit(some, rows, plans)
        errors += [
            abs(_expected(plans[n], found[is_compiled(rows[n])]) / rows[n]["tokens"] - 1)
            for n in others
            if is_compiled(rows[n]) in found
        ]
    if errors:
        tenth = sorted(errors)[int(0.9 * len(errors))]
        mean = statistics.mean(errors)
        lines.append(f"{_SPLITS} random halves: mean {mean:.1%}, nine of ten within {tenth:.1%}")
    for words, pairs in orders(rows, plans).items():
        wrong = [pair for pair, is_right in pairs.items() if not is_right]
        lines.append(f"order of two jobs of a model, {words}: {len(pairs)} pairs, wrong {wrong}")
    return lines


def orders(
    rows: Mapping[str, Mapping[str, Any]], plans: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[tuple[str, str], bool]]:
    """Whether the plan has the faster of two jobs of a model right: what ``tune`` relies on.

    Pairs whose published speeds are at least ``_APART`` apart come first, then the others.
    """
    found: dict[str, dict[tuple[str, str], bool]] = {"apart": {}, "close": {}}
    timed = [name for name in plans if "tokens" in rows[name]]
    for pair in combinations(timed, 2):
        if len({rows[name]["values"]["extends"] for name in pair}) == 1:
            a, b = (rows[name]["tokens"] for name in pair)
            mine, other = (plans[name]["time"]["expected_tokens_per_second"] for name in pair)
            is_apart = abs(a - b) >= _APART * min(a, b)
            found["apart" if is_apart else "close"][pair] = (a > b) == (mine > other)
    return found


def halves(
    names: Sequence[str], rows: Mapping[str, Mapping[str, Any]], seed: int = _SEED
) -> tuple[list[str], list[str]]:
    """A random half of the eager jobs and of the compiled ones, and the others.

    Rows that are ``like`` each other go together: one would tell the answer of the other.
    """
    some: list[str] = []
    for compiled in (False, True):
        group = [name for name in names if is_compiled(rows[name]) == compiled]
        families = sorted({_family(name, rows) for name in group})
        drawn = random.Random(seed).sample(families, (len(families) + 1) // 2)
        some += [name for name in group if _family(name, rows) in drawn]
    return some, [name for name in names if name not in some]


def _family(name: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    base = rows[name].get("like")
    return name if base is None else _family(base, rows)


def fit(
    names: Iterable[str],
    rows: Mapping[str, Mapping[str, Any]],
    plans: Mapping[str, Mapping[str, Any]],
) -> dict[bool, float]:
    """How many times the expected kernels took, eager (False) and compiled: geometric means."""
    found: dict[bool, list[float]] = {}
    for name in names:
        time = plans[name]["time"]
        took_ms = time["expected_ms"] * time["expected_tokens_per_second"] / rows[name]["tokens"]
        waits = _waits(time)
        found.setdefault(is_compiled(rows[name]), []).append(
            (took_ms - waits) / (time["expected_ms"] - waits)
        )
    return {compiled: statistics.geometric_mean(some) for compiled, some in found.items()}


def _waits(time: Mapping[str, Any]) -> float:
    return sum(time["expected"].get(part.name.lower(), 0.0) for part in WAITS)


def _expected(plan: Mapping[str, Any], factor: float) -> float:
    time = plan["time"]
    waits = _waits(time)
    step = waits + factor * (time["expected_ms"] - waits)
    return time["expected_tokens_per_second"] * time["expected_ms"] / step


def figures(
    rows: Mapping[str, Mapping[str, Any]], plans: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """GiB reserved and tokens/s expected by the plans of rows whose published figure is known."""
    found = {name: plan["reserved"] / _GIB for name, plan in plans.items()}
    speeds = {
        name: plan["time"]["expected_tokens_per_second"]
        for name, plan in plans.items()
        if "tokens" in rows[name]
    }
    return {"reserved": {n: x for n, x in found.items() if "reserved" in rows[n]}, "tokens": speeds}


def recorded() -> dict[str, dict[str, float]]:
    """The figures of published.md's two tables, as ``figures`` gives them."""
    found: dict[str, dict[str, float]] = {"reserved": {}, "tokens": {}}
    for line in Path(__file__).with_suffix(".md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 9 and cells[6].endswith("%") and cells[4]:
            found["reserved"][cells[0]] = float(cells[4])
        elif len(cells) == 7 and cells[5][:1] in "+-" and cells[5].endswith("%"):
            found["tokens"][cells[0]] = float(cells[3].replace(",", ""))
    return found


def draw(rows: Mapping[str, Mapping[str, Any]], planned: Mapping[str, Mapping[str, float]]) -> Any:
    """A matplotlib figure: a row for each job, planned over published, with the plan's error."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    titles = {
        "reserved": "memory reserved, planned over published",
        "tokens": "tokens/s a GPU, planned over published",
    }
    heights = [len(planned[key]) for key in titles]
    figure = Figure(figsize=(11, 2 + 0.26 * sum(heights)), layout="constrained")
    panels = figure.subplots(2, height_ratios=heights)
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        names = list(planned[key])
        for at, name in enumerate(names):
            ratio = planned[key][name] / rows[name][key]
            band = _band(rows[name]) if key == "reserved" else SPREAD
            colour = "#ed7d31" if is_compiled(rows[name]) else "#1f4e79"
            axes.errorbar(
                *([ratio - 1], [at]), xerr=[[ratio * band]] * 2, fmt="o", color=colour, capsize=2
            )
        axes.axvline(0, color="grey", linewidth=1)
        labels = [f"{name}  {rows[name]['job']}" for name in names]
        axes.set_yticks(range(len(names)), labels, fontsize=9)
        axes.invert_yaxis()
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(axis="x", alpha=0.3)
        axes.set_title(title, loc="left")
    for colour, label in (("#1f4e79", "eager blocks"), ("#ed7d31", "compiled blocks")):
        figure.axes[1].plot([], [], "o", color=colour, label=label)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    figure.supxlabel(
        "off by; a line is the plan's error, and crosses 0 where that covers it", size="medium"
    )
    return figure


def _band(row: Mapping[str, Any]) -> float:
    """The error of a plan's memory, of the class of its job."""
    degree = row["values"].get("parallelism", {}).get("expert_parallel_degree", 1)
    return BANDS[JobClass.of(_compiled(row), degree)]


if __name__ == "__main__":
    main()
