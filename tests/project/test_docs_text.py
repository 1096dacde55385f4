"""The text of README and docs: sentences that a reader takes in at once, in ASCII."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_WORDS = 25
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / "benchmarks" / name for name in ("fp8_ac.md", "gpu_receipts.md")),
    *(ROOT / "upstream" / name for name in ("README.md", "titan_main.md")),
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


def _words(sentence: str) -> int:
    return len(re.findall(r"[\w'/.-]*\w[\w'/.-]*", sentence))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short(page: Path):
    found = list(sentences(page.read_text()))
    assert found
    assert [sentence for sentence in found if _words(sentence) > MOST_WORDS] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_ascii(page: Path):
    lines = page.read_text().splitlines()
    assert [line for line in lines if not line.isascii()] == []
