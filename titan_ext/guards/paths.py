# SPDX-License-Identifier: BSD-3-Clause
"""Checks, before anything starts, that paths in the config exist."""

from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer import HuggingFaceTokenizer

from titan_ext.data.stdlib_corpus import STDLIB_CORPUS
from titan_ext.guards import RunCheck

_LOCAL = ("/", "./", "../", "~")


class Paths(RunCheck):
    """Checks ``dataloader.dataset_path`` and ``hf_assets_path``."""

    def before_start(self, config: Any) -> None:
        """Raise ValueError for a path that does not exist.

        A name like "allenai/c4" may be on the Hugging Face hub; the loader checks it.
        """
        loader = config.dataloader
        path = str(getattr(loader, "dataset_path", None) or "")
        is_made_here = getattr(loader, "dataset", "") == STDLIB_CORPUS
        if path.startswith(_LOCAL) and not Path(path).exists() and not is_made_here:
            raise ValueError(
                f"dataloader.dataset_path is {path!r}: no such file or folder; expected one, or "
                "the name of a data set on the Hugging Face hub."
            )
        assets = config.hf_assets_path
        if isinstance(config.tokenizer, HuggingFaceTokenizer.Config) and not Path(assets).is_dir():
            raise ValueError(
                f"hf_assets_path is {assets!r}: no such folder; expected one with the files of a "
                f'tokenizer, or "{STDLIB_CORPUS}" in a TOML file.'
            )
