# SPDX-License-Identifier: BSD-3-Clause
"""Names and messages: the nearest valid name, lists cut short, units.

Mistakes of users are at the end: all of them at once, and no traceback. A mistake is a ValueError
that titan_ext or Titan raises on purpose. Most are raised in ``toml`` (keys and values of a
file) and ``limits`` (what does not go together).
"""

import contextlib
import json
import linecache
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from difflib import get_close_matches
from itertools import chain
from types import TracebackType
from typing import Any

from tyro.constructors import PrimitiveConstructorSpec


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown ``name``: the nearest of ``known``, or a full stop."""
    by_lower = {word.lower(): word for word in known}
    close = get_close_matches(str(name).lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else "."


def check_choice(key: str, value: object, known: Collection[str]) -> None:
    """Raise ValueError if the value of ``key`` is not one of ``known``."""
    if value not in known:
        raise ValueError(
            f"{key} is {value!r}; expected one of {', '.join(known)}{did_you_mean(value, known)}"
        )


def and_more(names: Collection[object], limit: int = 5) -> str:
    """``names`` in a row; of a long list, the first ``limit`` and how many follow."""
    shown = ", ".join(str(name) for name in list(names)[:limit])
    rest = len(names) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown


def ranks_in_words(ranks: Collection[int]) -> str:
    """``rank 3``, or ``ranks 0-3, 8``: neighbours as ranges."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {and_more(words, limit=8)}"


def table_flag(value_from: Callable[[str], Any] = str) -> PrimitiveConstructorSpec[dict[str, Any]]:
    """Make the flag of a key of type ``Annotated[dict[str, ...], table_flag()]`` the whole table.

    ``--parallelism.fsdp_reshard_groups attention never moe always``. For a dict that is not empty,
    tyro by itself makes one flag for each of its names and takes no other name. ``value_from``
    reads a value; the config checks it.
    """

    def read(words: list[str]) -> dict[str, Any]:
        if len(words) % 2:
            raise ValueError("expected names and values in turn")
        return dict(zip(words[::2], map(value_from, words[1::2]), strict=True))

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME VALUE ...",
        instance_from_str=read,
        is_instance=lambda instance: isinstance(instance, dict),
        str_from_instance=lambda table: [str(word) for word in chain(*table.items())],
    )


PHASE = "-- now: "
"""Begins a line on stderr that says what a command does now."""


def without_phases(text: str) -> str:
    """What a command wrote on stderr, but for what it did when."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(PHASE))


def duration(seconds: float) -> str:
    """``35 s``, ``12 min``, ``2 h 5 min`` or ``3 d 4 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


BYTES = {
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
    **{"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
}
"""Units of sizes that users give."""


def parse_bytes(text: str) -> int | None:
    """The bytes of a size such as "512MiB" or "80 GiB"; None if it is none."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(BYTES)})", text)
    return int(float(match[1]) * BYTES[match[2]]) if match else None


def size_of(option: str, text: str) -> int | None:
    """The bytes that an option of a command gives, None for "". Raises ValueError for no size."""
    if not text:
        return None
    if (nbytes := parse_bytes(text)) is None:
        raise ValueError(
            f"{option} is {text!r}; expected a size: 80GiB (units {', '.join(BYTES)})."
        )
    return nbytes


def format_bytes(nbytes: int) -> str:
    """``nbytes`` in the largest binary unit in which it is at least 1."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"


def format_count(number: int) -> str:
    """``33.01 M``, ``671.03 B`` or ``1,024``."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,}"


_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable with the file whose text torchrun prints last, of the rank that failed first."""
_MOST_SHOWN = 10
_OURS = ("titan_ext", "torchtitan")

_deferred: ContextVar[bool] = ContextVar("deferred", default=False)


@contextlib.contextmanager
def checks_later() -> Iterator[None]:
    """Configs that are made inside are not checked: flags may still change them."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def are_checked_later() -> bool:
    """True inside of ``checks_later``."""
    return _deferred.get()


class Mistakes(list[str]):
    """Messages that are raised together, noted check by check."""

    def note(self, check: Callable[[], Iterable[str] | None]) -> None:
        """Add the messages that ``check`` returns or yields, or the one that it raises."""
        try:
            self.extend(check() or ())
        except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
            self.append(str(error) or type(error).__name__)

    def raise_all(self) -> None:
        """Raise ValueError if there are any."""
        if self:
            raise ValueError(in_one(self))


def in_one(messages: Iterable[str]) -> str:
    """One message as it is; several below each other, the first ten."""
    found = list(dict.fromkeys(messages))
    if len(found) == 1:
        return found[0]
    more = [f"... and {len(found) - _MOST_SHOWN} more"] if len(found) > _MOST_SHOWN else []
    return "\n  ".join([f"{len(found)} mistakes:", *found[:_MOST_SHOWN], *more])


_source = ""
_other_hook = sys.excepthook


def end_with_messages(source: str) -> None:
    """Let a mistake that nobody catches end this program with its message only.

    ``source`` is the config file or function, in front of the message.
    """
    global _source, _other_hook
    _source = source
    if sys.excepthook is not _end:
        _other_hook, sys.excepthook = sys.excepthook, _end


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not (isinstance(error, ValueError) and _is_raised_on_purpose(trace)):
        _other_hook(kind, error, trace)
        return
    message = str(error)
    if not message.startswith(_source):
        message = f"{_source}: {message}"
    error_file = os.environ.get(_ERROR_FILE)
    if error_file:
        # As torch.distributed.elastic's error_handler.py writes it, whose file with a traceback
        # this replaces: torchrun prints what it finds.
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(error_file, "w") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
    if not error_file or os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr)


def _is_raised_on_purpose(trace: TracebackType | None) -> bool:
    """True if the innermost line is a ``raise`` of titan_ext or Titan, not of what they call."""
    if trace is None:
        return False
    while trace.tb_next:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    line = linecache.getline(code.co_filename, trace.tb_lineno)
    package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    return package in _OURS and line.strip().startswith("raise ")
