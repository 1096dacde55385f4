# SPDX-License-Identifier: BSD-3-Clause
"""Log and terminal: filters for Titan's log; phases, progress and colours of commands.

rich draws the progress of a search. It is imported only where there is a terminal.
"""

import contextlib
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from titan_ext.base.messages import PHASE

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
_started = time.monotonic()
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


def phase(text: str) -> None:
    """Say on stderr what a command does now, a line each, from its second second on."""
    seconds = time.monotonic() - _started
    if seconds >= 1:
        print(f"{PHASE}{text} ({seconds:.0f} s)", file=sys.stderr, flush=True)


def loading() -> None:
    """``phase`` of the first import of torch, which takes longer than a second in any case."""
    if "torch" not in sys.modules:
        print(f"{PHASE}loading torch and TorchTitan", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_of(search: "Search") -> Iterator[None]:
    """What is tried, i of about n plans, time left and the best: a bar, or a line each in a pipe.

    Without rich's thread, for processes are forked here.
    """
    if not sys.stderr.isatty():
        search.say = lambda text: phase(f"{text}: {search.progress()}")
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}")
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, redirect_stdout=False
    ) as progress:
        bar = progress.add_task("", total=None, state="")

        def tick() -> None:
            done, left = search.work()
            progress.update(bar, completed=done, total=done + left, state=search.progress())
            progress.refresh()

        search.say = lambda text: progress.update(bar, description=text)
        search.forks.tick = tick
        yield
