"""Reads the page of TOML files that are refused, each with its exact message."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BadToml", "bad_tomls"]

_PAGE = Path(__file__).parents[1] / "data" / "toml_errors.md"
_FILE = re.compile(r"`(\S+)`(?:, empty\.|:\n\n```\w+\n(.*?)\n```)\n", re.DOTALL)
_MESSAGE = re.compile(r"```text\n(.*?)\n```\n", re.DOTALL)


@dataclass(frozen=True)
class BadToml:
    """Files by name to their text, and the message of loading one of them."""

    title: str
    files: dict[str, str]
    message: str

    @property
    def loaded(self) -> str:
        """The name of the file that is loaded, which need not be there."""
        return "bad.toml" if "bad.toml" in self.files else self.message.partition(":")[0]


def bad_tomls() -> Iterator[BadToml]:
    """Every entry of the page, in order."""
    for entry in re.split(r"^### ", _PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title, _, rest = entry.partition("\n")
        (message,) = _MESSAGE.findall(rest)
        files = {name: text + "\n" * bool(text) for name, text in _FILE.findall(rest)}
        yield BadToml(title, files, message)
