# SPDX-License-Identifier: BSD-3-Clause
"""A text corpus that every machine with Python has: the source of its standard library.

It is real text, so a small model can learn from it, and it needs no download. It is the same for
everyone with the same Python version. About 10 MB become a Hugging Face data set and a byte-level
BPE tokenizer of 2,048 tokens, the vocabulary of Titan's debug models. Both lie under ``.data/`` of
the checkout, or in the user's cache folder where titan_ext is installed. A row is some 50 lines of
a file, and rows are shuffled: batches of whole files would differ in kind, and so in loss.

``python -m titan_ext.base.stdlib_corpus`` makes them; training makes what is missing.
"""

import hashlib
import json
import os
import platform
import shutil
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, load_from_disk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from titan_ext.base.titan.data import register_dataset

STDLIB_CORPUS = "python_stdlib"
"""The name of the data set in Titan's registry (``--dataloader.dataset``)."""

VOCAB_SIZE = 2048
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
PIECE_CHARACTERS = 2000
_STDLIB = Path(sysconfig.get_paths()["stdlib"])
# Not the library itself: what distributions leave out, pip puts in, or is not text.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "__pycache__"}
)


def default_folder() -> Path:
    """The corpus' folder for this Python version; ``TITAN_EXT_DATA`` moves its parent."""
    version = f"{platform.python_implementation()}-{platform.python_version()}".lower()
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").exists():
        parent = checkout / ".data"
    else:
        parent = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titan_ext"
    return Path(os.environ.get("TITAN_EXT_DATA", parent)).absolute() / f"stdlib-{version}"


def default_tokenizer_path() -> Path:
    """The folder of the tokenizer, for ``hf_assets_path``."""
    return default_folder() / "tokenizer"


def register_stdlib_corpus() -> None:
    """Add the corpus to Titan's table of data sets, the way its docs/datasets.md describes."""
    register_dataset(STDLIB_CORPUS, str(default_folder()), _load)


def prepare_corpus(config: Any) -> None:
    """Register the corpus, and make it if a trainer's config names it: before anyone looks."""
    register_stdlib_corpus()
    loaders = config.dataloader, config.validator.dataloader
    data = [getattr(loader, "dataset", "") for loader in loaders]
    if STDLIB_CORPUS in data or config.hf_assets_path == str(default_tokenizer_path()):
        make_corpus()


def make_corpus(folder: Path | None = None) -> Path:
    """Write the data set and the tokenizer under ``folder`` unless they are there; return it.

    Every rank of a job may call it at once: each writes into its own folder. The first one to
    finish moves it into place, with ``dataset/`` and ``tokenizer/``.
    """
    folder = folder or default_folder()
    if (folder / "dataset").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Containers that share a disk may have the same process ids, and even host names.
    staging = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
    rows = list(_stdlib_pieces())
    if not rows:
        raise ValueError(f"no Python source under {_STDLIB}: cannot make the corpus.")
    Dataset.from_list(rows).save_to_disk(staging / "dataset")
    _train_tokenizer(rows, staging / "tokenizer")
    try:
        staging.rename(folder)
    except OSError:
        if not (folder / "dataset").exists():
            raise
        shutil.rmtree(staging)  # another process was first, with the same content
    return folder


def _load(path: str) -> Dataset:
    dataset = load_from_disk(str(make_corpus(Path(path)) / "dataset"))
    assert isinstance(dataset, Dataset), f"{path} holds one split"
    return dataset


def _stdlib_pieces() -> Iterator[dict[str, str]]:
    """The library in pieces of whole lines, in a shuffled order that depends only on them."""
    pieces = []
    for path in sorted(_STDLIB.rglob("*.py")):
        relative = path.relative_to(_STDLIB)
        # _sysconfigdata has the paths of the machine that built Python.
        if _SKIPPED_FOLDERS & set(relative.parts) or path.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for index, piece in enumerate(_split(text)):
            pieces.append({"path": f"{relative.as_posix()}#{index}", "text": piece})
    return iter(sorted(pieces, key=lambda piece: hashlib.sha256(piece["path"].encode()).digest()))


def _split(text: str) -> Iterator[str]:
    piece = ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= PIECE_CHARACTERS:
            yield piece
            piece = ""
    if piece:
        yield piece


def _train_tokenizer(rows: list[dict[str, str]], folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((row["text"] for row in rows), trainer)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    print(make_corpus())
