"""One message per mistake: which file, which key, what was expected, the nearest valid name.

Everything that a user can get wrong in a TOML file ends here, so that all messages read alike.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Place", "TomlConfigError", "describe_value", "nearest"]

MOST_NAMES_SHOWN = 12


class TomlConfigError(ValueError):
    """A TOML file that cannot become a config. Its text is for the person who wrote the file.

    Attributes:
        file: The file, as it was named to us or relative to the file that extends it.
        key: The dotted key; empty where the file as a whole is at fault.
    """

    def __init__(self, file: str, key: str, problem: str) -> None:
        self.file = file
        self.key = key
        where = f"{file}: {key}: " if key else f"{file}: "
        super().__init__(f"{where}{problem}")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A dotted key of a file, and the record of which file set which key."""

    file: str
    key: str = ""
    origins: dict[str, str] = field(default_factory=dict)

    def at(self, name: str) -> "Place":
        """The place of a key below this one."""
        key = f"{self.key}.{name}" if self.key else name
        return Place(file=self.file, key=key, origins=self.origins)

    def error(self, problem: str) -> TomlConfigError:
        return TomlConfigError(self.file, self.key, problem)

    def expected(self, what: str, value: Any, hint: str = "") -> TomlConfigError:
        """The error for a value of the wrong type."""
        return self.error(f"expected {what}, got {describe_value(value)}{hint or '.'}")

    def record(self, origin: str | None = None) -> None:
        """Remember who set this key and with it all keys below: ``origin``, else the file."""
        below = f"{self.key}."
        for key in [key for key in self.origins if key.startswith(below)]:
            del self.origins[key]
        self.origins[self.key] = origin or self.file


def nearest(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """End of a message: the valid name that ``name`` is most like, or the valid names.

    ``prefix`` goes before each name that is shown.
    """
    names = sorted(set(valid))
    lowered = {candidate.lower(): candidate for candidate in reversed(names)}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {prefix}{lowered[close[0]]}?"
    if not names:
        return "; there are none."
    if len(names) == 1:
        return f"; the only one is {prefix}{names[0]}."
    shown = ", ".join(prefix + candidate for candidate in names[:MOST_NAMES_SHOWN])
    more = len(names) - MOST_NAMES_SHOWN
    return f"; expected one of {shown}{f' and {more} more' if more > 0 else ''}."


def describe_value(value: Any) -> str:
    """What stands in the file, in TOML's words."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'the string "{value}"'
    if isinstance(value, int):
        return f"the integer {value}"
    if isinstance(value, float):
        return f"the float {value}"
    if isinstance(value, list):
        return "a list of tables" if value and isinstance(value[0], dict) else "a list"
    if isinstance(value, dict):
        return "a table"
    return f"the {type(value).__name__} {value}"
