# SPDX-License-Identifier: BSD-3-Clause
"""Checks before a run starts: paths exist, nobody else uses its folder, all ranks run the same.

Two runs in one folder overwrite each other's checkpoints. Rank 0 holds a lock on ``run.lock`` as
long as its process lives. After any death the kernel, or the server of a shared file system, gives
it back. It is a POSIX lock, because NFS and Lustre have those. A forked child, such as a worker of
the data loader, does not keep it.
"""

import errno
import fcntl
import json
import os
import re
import socket
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import IO, Any

from torch.utils._pytree import MappingKey, tree_flatten_with_path
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_ext.base.agreement import this_job
from titan_ext.base.messages import ranks_in_words
from titan_ext.base.nodes import ranks_per_node
from titan_ext.base.run_check import ONE_PROCESS_MODES, RunCheck
from titan_ext.base.stdlib_corpus import STDLIB_CORPUS
from titan_ext.run.record import versions

LOCK = "run.lock"
_PROBE_NBYTES = 2**20
# POSIX lets a lock that another process holds answer with either (fcntl(2)).
_HELD_ELSEWHERE = (errno.EACCES, errno.EAGAIN)
_held: dict[Path, IO[str]] = {}
"""Locks of this process. Closing any file of the name would give its lock back."""
_IN_CHECKOUT = "tests/assets/"
"""Files of Titan's checkout that some of its configs name."""
_LOCAL = ("/", "./", "../", "~", _IN_CHECKOUT)
_WITHOUT_CHECKOUT = (
    f'or {STDLIB_CORPUS} for one that is made here: "--hf_assets_path {STDLIB_CORPUS} '
    f'--dataloader.dataset {STDLIB_CORPUS}" (--config moe_debug.toml has both)'
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SHOWN_KEYS = 10


class Paths(RunCheck):
    """Checks that ``dataloader.dataset_path`` and ``hf_assets_path`` exist."""

    def before_start(self, config: Trainer.Config) -> None:
        """Raise ValueError for a path that does not.

        A name like "allenai/c4" may be on the Hugging Face hub; the loader checks it.
        """
        loader = config.dataloader
        name = str(getattr(loader, "dataset", ""))
        known = getattr(DATASETS.get(name), "path", "")
        in_checkout = known if known.startswith(_IN_CHECKOUT) else ""
        path = str(getattr(loader, "dataset_path", None) or in_checkout)
        is_local = path.startswith(_LOCAL) or Path(path).is_file()
        if is_local and not Path(path).is_dir() and name != STDLIB_CORPUS:
            raise ValueError(
                f"dataloader.dataset_path is {path!r}: no such folder; expected the folder of the "
                f"files, the name of a data set on the Hugging Face hub, {_WITHOUT_CHECKOUT}."
            )
        assets = config.hf_assets_path
        if isinstance(config.tokenizer, HuggingFaceTokenizer.Config) and not Path(assets).is_dir():
            raise ValueError(
                f"hf_assets_path is {assets!r}: no such folder; expected one with the files of a "
                f"tokenizer, {_WITHOUT_CHECKOUT}."
            )


class Folder(RunCheck):
    """Checks that ``dump_folder`` can be written, and locks it."""

    def before_start(self, config: Trainer.Config) -> None:
        """Raise ValueError for a folder where this rank cannot write, or whose disk is full."""
        folder = config.dump_folder
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(_PROBE_NBYTES))
        except OSError as error:
            raise ValueError(
                f"dump_folder is {folder!r}, where this rank cannot write: {error}."
            ) from error
        if os.environ.get("RANK", "0") == "0":
            lock_folder(folder)


def lock_folder(folder: str) -> None:
    """Lock the folder for this process, until it ends.

    Raises ValueError naming host and process of the run that has it.
    """
    path = Path(folder).resolve() / LOCK
    if path in _held:
        return
    # Not "w", which would empty the line of the run that has the lock.
    file = path.open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        if error.errno in _HELD_ELSEWHERE:
            raise ValueError(
                f"dump_folder is {folder!r}, where another run trains ({owner}). Stop that run, or "
                "give this one another dump_folder."
            ) from None
        logger.warning(f"{path} cannot be locked ({error}): another run could write there too.")
        return
    file.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"host {socket.gethostname()}, process {os.getpid()}, since {since}\n")
    file.flush()
    _held[path] = file


class RanksAgree(RunCheck):
    """Compares the versions and the config of all ranks.

    A rank with another version of torch, or another value for one key, issues other collectives. On
    hundreds of nodes that is a hang after minutes, without a cause.
    """

    def before_build(self, config: Trainer.Config) -> None:
        """Raise ValueError on every rank if any two differ: which keys, ranks and values."""
        if config.comm.mode in ONE_PROCESS_MODES:
            return
        mine = describe(config) | {"ranks of the smallest node": str(ranks_per_node())}
        facts = json.dumps(mine, sort_keys=True)
        if difference := this_job().compare("what to run", facts, ranks_differ):
            raise ValueError(difference)


def describe(config: Trainer.Config) -> dict[str, str]:
    """Facts that must be equal on every rank: package versions and config values, by dotted key."""
    description = {f"version of {name}": version for name, version in versions().items()}
    values: Any = tree_flatten_with_path(config.to_dict(), is_leaf=_is_whole)[0]
    for path, value in values:
        key = ".".join(str(at.key if isinstance(at, MappingKey) else at.idx) for at in path)
        # A function is shown with its address, which differs from process to process.
        description[key] = _ADDRESS.sub("", str(value))
    return description


def _is_whole(value: Any) -> bool:
    """True for a value that is compared as one: an empty list, too, and a named tuple."""
    return type(value) not in (dict, list, tuple) or not value


def ranks_differ(classes: list[tuple[str, list[int]]]) -> str:
    """The facts that differ, and on which ranks; "" if none do. ``classes`` has them in JSON."""
    if len(classes) == 1:
        return ""
    descriptions = [(json.loads(facts), ranks) for facts, ranks in classes]
    lines = []
    for key in sorted({key for description, _ in descriptions for key in description}):
        ranks_by_value: dict[str, set[int]] = defaultdict(set)
        for description, ranks in descriptions:
            ranks_by_value[description.get(key, "(absent)")].update(ranks)
        if len(ranks_by_value) > 1:
            values = [f"{v} on {ranks_in_words(ranks)}" for v, ranks in ranks_by_value.items()]
            lines.append(f"  {key}: {'; '.join(values)}")
    if len(lines) > _SHOWN_KEYS:
        lines[_SHOWN_KEYS:] = [f"  ... and {len(lines) - _SHOWN_KEYS} more"]
    return "\n".join(["the ranks disagree on what to run:", *lines])
