# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes of users: all of them at once, and no traceback.

A mistake is a ValueError that titan_ext or Titan raises on purpose. torchrun's last lines are the
error file of the rank that failed first, so that file gets the message alone. Most are raised in
``toml_config`` (keys and values of a file) and ``limits`` (what does not go together).
"""

import contextlib
import json
import linecache
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from types import TracebackType

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torch.distributed.elastic.multiprocessing.errors
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
    """Whether a config that is made now is checked later."""
    return _deferred.get()


class Mistakes(list[str]):
    """Messages that are raised together, noted check by check."""

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        try:
            yield
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
    """From now on a mistake that nobody catches ends this program with its message only.

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
    if not message.startswith((_source, f"--config {_source}")):
        message = f"{_source}: {message}"
    error_file = os.environ.get(_ERROR_FILE)
    if error_file:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(error_file, "w") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
    if not error_file or os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr)


def _is_raised_on_purpose(trace: TracebackType | None) -> bool:
    """Whether the innermost line is a ``raise`` of titan_ext or Titan, not of what they call."""
    if trace is None:
        return False
    while trace.tb_next:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    line = linecache.getline(code.co_filename, trace.tb_lineno)
    package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    return package in _OURS and line.strip().startswith("raise ")
