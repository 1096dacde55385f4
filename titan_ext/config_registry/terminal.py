# SPDX-License-Identifier: BSD-3-Clause
"""What a person at a terminal sees of a command beside its output; nothing of it goes to a pipe.

rich draws it. It is imported only where there is a terminal.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_ext.plan.search import Search

_VERDICTS = {"fits": 32, "does not fit": 31, "uncertain": 33}
"""First words of a plan's verdict, and the colours of ANSI terminals."""
_TAKES_A_WHILE = {"dry-run": "planning a step", "peft": "exporting adapters"}
"""Commands with nothing else to show; the stages of a pipeline print from other processes."""
_VERDICT = re.compile(rf"^(memory +|-- .*: )?({'|'.join(_VERDICTS)})\b", re.M)


def coloured(text: str) -> str:
    """``text`` with its verdicts in green, red or yellow, if it is for a terminal."""
    if not sys.stdout.isatty():
        return text
    return _VERDICT.sub(
        lambda found: f"{found[1] or ''}\033[{_VERDICTS[found[2]]}m{found[2]}\033[0m", text
    )


@contextlib.contextmanager
def working(name: str, command: Any) -> Iterator[None]:
    """A line that says for how long a command has run; what it prints comes above."""
    what = _TAKES_A_WHILE.get(name)
    if what is None or getattr(command, "all_stages", False) or not sys.stdout.isatty():
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


@contextlib.contextmanager
def progress_of(search: "Search") -> Iterator[None]:
    """On a terminal: what is tried, i of n so far, time left and the best; nothing in a pipe.

    Without rich's thread, for processes are forked here.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[best]}"),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, redirect_stdout=False
    ) as progress:
        bar = progress.add_task("", total=None, best="")

        def tick() -> None:
            best = ""
            if search.tried and (time := search.best.time) is not None:
                fits = "" if search.best.fits else ", does not fit"
                best = f"best so far: {time.tokens_per_second:,.0f} tokens/s{fits}"
            forks = search.forks
            progress.update(bar, completed=forks.called, total=forks.planned, best=best)
            progress.refresh()

        search.say = lambda text: progress.update(bar, description=text)
        search.forks.tick = tick
        yield
