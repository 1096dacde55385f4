"""``python -m tests.matrix.table`` writes benchmarks/support.md: what ``make matrix`` checks."""

import textwrap
from pathlib import Path

from tests.matrix.exact import RUNS
from tests.matrix.rows import AXES, EXACT, FEATURES, REFUSED, ROUNDING, WRONG_IN_STOCK, rows

DOCUMENT = Path(__file__).parents[2] / "benchmarks" / "support.md"


def document() -> str:
    """The text of benchmarks/support.md."""
    cells = {feature: [f"{feature}, {axis}" for axis in AXES] for feature in FEATURES}
    in_table = {name for names in cells.values() for name in names}
    others = [name for name in rows() if name not in in_table | REFUSED.keys()]
    others = [f"{name}{': ' if (why := _wrong(name)) else ''}{why}" for name in others]
    right = len(rows()) - len(REFUSED) - len(WRONG_IN_STOCK)
    counts = textwrap.fill(
        f"[`titan_ext verify`](../docs/verify.md) has to find {right} jobs RIGHT, {len(RUNS)} runs "
        f"have to equal stock TorchTitan, and {len(REFUSED)} jobs have to be refused with a "
        "message. [The log](LOG.md) says which have run. All use CPU ranks with gloo. The two SPMD "
        "backends alternate from cell to cell. The model is Titan's debug model of DeepSeek-V3, "
        "unless another is named.",
        width=120,
    )
    table = [["", *AXES], ["---"] * (1 + len(AXES))]
    table += [[feature, *map(_outcome, names)] for feature, names in cells.items()]
    ends = [["job", "words of the message"], ["---", "---"]]
    ends += [[name, f"`{words}`"] for name, words in REFUSED.items()]
    return f"""# What runs with what

`python -m tests.matrix.table` writes this page from what `make matrix` checks; do not edit it.

{counts}

- **equal**: also, losses, norms, parameters and optimizer states of five steps equal stock's bit for bit.
- **rounding**: sums have another order; gradients stay within rounding.
- **lossy**: values are rounded to fewer bits. With a codec that changes nothing, results are exact.

{_lines(table)}

## Other models and layouts

{chr(10).join(f"- {name}" for name in others)}

## Refused

{_lines(ends)}
"""  # noqa: E501


def _wrong(name: str) -> str:
    if name not in WRONG_IN_STOCK:
        return ""
    return "equal to stock, where each weight's own backward counts the tokens of experts again"


def _outcome(name: str) -> str:
    feature = name.partition(", ")[0]
    if name in REFUSED:
        return "refused"
    return "equal" if feature in EXACT else "rounding" if feature in ROUNDING else "lossy"


def _lines(table: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}")
