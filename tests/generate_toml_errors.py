"""Writes ``data/toml_errors.md`` from the table of refused files: ``python -m`` this module."""

import itertools
from pathlib import Path

from tests.bad_tomls import BAD_TOMLS, BadToml

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).parent / "data" / "toml_errors.md"

_INTRODUCTION = """\
# Mistakes in TOML files, and what titan_ext says

Each entry is a file and the message that it gets; a test checks each. A message names the file, the
dotted key, what was expected, and the nearest valid name. One message shows up to ten mistakes.
titan_ext checks keys that depend on each other after the command line's flags, which may put them
right. Under torchrun the message ends its summary ("Root Cause"), whichever rank failed first.
`python -m tests.generate_toml_errors` writes this page from `tests/bad_tomls.py`.
"""


def page() -> str:
    """The text of the page."""
    parts = [_INTRODUCTION]
    for chapter, entries in itertools.groupby(BAD_TOMLS, key=lambda bad: bad.chapter):
        parts.append(f"\n## {chapter}\n")
        parts.extend(_entry(bad) for bad in entries)
    return "".join(parts)


def _entry(bad: BadToml) -> str:
    lines = [f"\n### {bad.title[0].upper()}{bad.title[1:]}\n"]
    for name, text in bad.written.items():
        if text:
            kind = "python" if name.endswith(".py") else "toml"
            lines.append(f"\n`{name}`:\n\n```{kind}\n{text.rstrip()}\n```\n")
    lines.append(f"\n```text\n{bad.message}\n```\n")
    return "".join(lines)


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
