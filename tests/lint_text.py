"""What ``make lint`` reads in the text of README, docs and upstream's patches; it runs no code.

    python -m tests.lint_text

Sentences are those that a reader takes in at once, in ASCII; links lead somewhere; patches apply to
the installed sources (``make upstream`` runs their tests). It says what is wrong, and then ends 1.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from upstream import check

ROOT = Path(__file__).parents[1]
MOST_WORDS = 25
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / "benchmarks" / name for name in ("fp8_ac.md", "gpu_receipts.md", "support.md")),
    *sorted((ROOT / "upstream").rglob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def sentences(text: str) -> Iterator[str]:
    """Those of the running text: without headings, tables, commands and code."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^( {4,}\S|\||#).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "NAME", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*\d]+\.? )", text):
        yield from re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split()))


def wrong_in_page(page: Path) -> Iterator[str]:
    text = page.read_text()
    for sentence in sentences(text):
        if (words := len(re.findall(r"[\w'/.-]*\w[\w'/.-]*", sentence))) > MOST_WORDS:
            yield f"a sentence of {words} words, of at most {MOST_WORDS}: {sentence}"
    yield from (f"not ASCII: {line}" for line in text.splitlines() if not line.isascii())
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if not target.startswith("http") and not _leads_somewhere(page, target):
            yield f"a link to nowhere: {target}"


def _leads_somewhere(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    path = page.parent / name if name else page
    if not path.exists() or not anchor:
        return path.exists()
    headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


def wrong_in_index() -> Iterator[str]:
    index = (ROOT / "docs" / "start.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        if page.name != "start.md" and f"({page.name})" not in index:
            yield f"no link to {page.name}"


def wrong_upstream() -> Iterator[str]:
    """A folder that is not ready to be sent, or a patch that the installed sources refuse."""
    readme = (check.HERE / "README.md").read_text()
    patches = check.patches()
    for name in {file.parent.name for file in check.HERE.glob("*/README.md")}:
        if name not in {patch.name for patch in patches}:
            yield f"{name} has no patch"
    for patch in patches:
        yield from (f"{patch.name}: {words}" for words in patch.lacks())
        package, version = patch.applies_to
        if f"]({patch.name}/README.md) | {package} {version} |" not in readme:
            yield f"README.md has no row of {patch.name} for {package} {version}"
        said = check.check(patch, quick=True).before
        if said != "applies" and not said.startswith("not tried"):
            yield said


def main() -> int:
    found = {page.relative_to(ROOT): list(wrong_in_page(page)) for page in PAGES}
    found[Path("docs/start.md")] += wrong_in_index()
    found[Path("upstream")] = list(wrong_upstream())
    for place, wrong in found.items():
        for words in wrong:
            print(f"{place}: {words}", file=sys.stderr)
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
