"""Data that is not where the config says is found before anything starts."""

from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer import HuggingFaceTokenizer

from titan_ext.data.stdlib_corpus import STDLIB_CORPUS

__all__ = ["check_assets_path", "check_dataset_path"]

_LOCAL = ("/", "./", "../", "~")


def check_dataset_path(dataloader: Any) -> None:
    """Look for the file or folder that ``dataloader.dataset_path`` names, if it names one.

    A name like "allenai/c4" may be one of the Hugging Face hub; it is left to the loader.

    Raises:
        ValueError: if a path is absolute, or starts with "." or "~", and nothing is there.
    """
    path = getattr(dataloader, "dataset_path", None)
    if path is None or getattr(dataloader, "dataset", "") == STDLIB_CORPUS:  # made where it is not
        return
    if str(path).startswith(_LOCAL) and not Path(path).exists():
        raise ValueError(
            f"dataloader.dataset_path is {str(path)!r}: no such file or folder; expected one, or "
            "the name of a data set on the Hugging Face hub."
        )


def check_assets_path(tokenizer: Any, path: str) -> None:
    """Look for the folder that ``hf_assets_path`` names, if Titan's tokenizer is to read it.

    Raises:
        ValueError: if there is no such folder.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer.Config) and not Path(path).is_dir():
        raise ValueError(
            f"hf_assets_path is {str(path)!r}: no such folder; expected one with the files of a "
            f'tokenizer, or "{STDLIB_CORPUS}" in a TOML file.'
        )
