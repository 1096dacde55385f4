# SPDX-License-Identifier: BSD-3-Clause
"""Log and terminal: filters for Titan's log; what a command does now."""

import contextlib
import gc
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator

from titan_ext.base.messages import PHASE

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
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_started = time.monotonic()


def hide_noise() -> None:
    """Leave ``_NOISE`` out of Titan's log."""
    logging.getLogger().addFilter(_is_no_noise)  # Titan logs with the root logger


def _is_no_noise(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(record.funcName == at and message.startswith(words) for at, words in _NOISE)


def _is_ours(record: logging.LogRecord) -> bool:
    # By folder: in a checkout called titan_ext all of .venv has that in its path, too.
    return record.pathname.startswith(_PACKAGE)


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
    handler.addFilter(_is_ours)
    yield


def phase(text: str) -> None:
    """Say on stderr what a command does now, a line each, from its second second on."""
    seconds = time.monotonic() - _started
    if seconds >= 1:
        print(f"{PHASE}{text} ({seconds:.0f} s)", file=sys.stderr, flush=True)


def start_without_a_gpu() -> None:
    """For a command that runs on this machine alone, before torch is imported."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.disable()  # imports alone make it walk millions of objects, and commands end soon
    loading()


def loading() -> None:
    """``phase`` of the first import of torch, which takes longer than a second in any case."""
    if "torch" not in sys.modules:
        print(f"{PHASE}loading torch and TorchTitan", file=sys.stderr, flush=True)
