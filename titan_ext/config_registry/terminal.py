# SPDX-License-Identifier: BSD-3-Clause
"""Log and terminal: filters for Titan's log; colours and progress of commands, none in a pipe.

rich draws progress. It is imported only where there is a terminal.
"""

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_ext.plan.search import Search

_warned: set[str] = set()
_NOISE = (
    # Warns of a default. A run that loads weights sets the path anyway.
    ("__post_init__", "initial_load_model_only=True has no effect"),
    # run.checks refuses a tokenizer that is missing; that of the corpus is made first.
    ("_validate_config", "HF assets path "),
    # There is no peak of a CPU to compare with; the log of each step says "mfu: N/A".
    ("__init__", "Peak FLOPS used for computing MFU: nan"),
    # A container without pciutils. Titan goes by the name that the driver tells.
    ("get_peak_flops", "Error running lspci"),
)
"""Lines of Titan's log that say nothing of a healthy run, by function and first words."""
_VERDICTS = {"fits": 32, "does not fit": 31, "uncertain": 33}
"""First words of a plan's verdict, and the colours of ANSI terminals."""
_TAKES_A_WHILE = {"dry-run": "planning a step", "peft": "exporting adapters"}
"""Commands with nothing else to show; the stages of a pipeline print from other processes."""
_VERDICT = re.compile(rf"^(memory +|-- .*: )?({'|'.join(_VERDICTS)})\b", re.M)


def warn_once() -> None:
    """Show each warning of Titan's config classes once, until the next call, and no ``_NOISE``.

    They are built several times on their way to the trainer: by tyro, by Titan's ``build()``, and
    for a file's changes.
    """
    _warned.clear()
    logging.getLogger().addFilter(_is_new)  # Titan logs with the root logger


def _is_new(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if any(record.funcName == where and message.startswith(words) for where, words in _NOISE):
        return False
    if record.funcName != "__post_init__":
        return True
    is_new = message not in _warned
    _warned.add(message)
    return is_new


def log_on_one_node() -> None:
    """Log warnings and errors only, unless this node is ``LOG_NODE`` of the environment.

    launch/multi_node.sh sets it: the rendezvous numbers the nodes, so no launch script can know
    which will be the first. "all" and no value let every node log.
    """
    wanted = os.environ.get("LOG_NODE", "all")
    if wanted != "all" and os.environ.get("GROUP_RANK", wanted) != wanted:
        logging.getLogger().setLevel(logging.WARNING)


@contextlib.contextmanager
def quiet(verbose: bool) -> Iterator[None]:
    """Hide the log of the start, but not warnings of titan_ext; ``verbose`` hides nothing."""
    if verbose:
        from torchtitan.tools.logging import init_logger

        init_logger()
        yield
        return
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torch sets its parent's
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    (handler,) = logging.getLogger().handlers[-1:]
    handler.addFilter(lambda record: "titan_ext" in record.pathname)
    yield


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
            if search.tried and (plan := search.best.plan) is not None:
                fits = "" if plan.fits else ", does not fit"
                best = f"best so far: {plan.time.tokens_per_second:,.0f} tokens/s{fits}"
            forks = search.forks
            progress.update(bar, completed=forks.called, total=forks.planned, best=best)
            progress.refresh()

        search.say = lambda text: progress.update(bar, description=text)
        search.forks.tick = tick
        yield
