"""A checkpoint that cannot be written, read or trusted is one error that says which and what to do.

torch.distributed.checkpoint tells every rank what failed where, as a traceback of each rank. And it
does not look at the checksums in its own files: every tensor is stored as a zip archive with a
CRC-32 for each member, which torch's reader skips, so that a flipped bit would be trained on. They
are compared here, before Titan loads: each file by one rank, at the speed of reading it.
"""

import contextlib
import io
import shutil
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.trainer import Trainer

from titan_ext.guards.resume import checkpoint_to_load
from titan_ext.run_folder import whole_checkpoint_steps

__all__ = ["check_checkpoint", "corrupt_items", "one_clear_error"]


def check_checkpoint(config: Trainer.Config) -> None:
    """Compare the checksums of the checkpoint that the run resumes from; on every rank.

    Raises:
        ValueError: on every rank, naming the files that are corrupt and the checkpoint before.
    """
    found = checkpoint_to_load(config)
    if found is None:
        return
    folder, _ = found
    mine = corrupt_items(folder, part=dist.get_rank(), parts=dist.get_world_size())
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    corrupt = {name: item for found in everyone for name, item in found.items()}
    if corrupt:
        files = "; ".join(f"{name}: {item}" for name, item in sorted(corrupt.items())[:5])
        raise ValueError(f"{folder} is corrupt ({files}). {_advice(config, folder)}")


def corrupt_items(folder: Path, *, part: int = 0, parts: int = 1) -> dict[str, str]:
    """The files of a checkpoint with an item whose bytes are not those that were saved.

    Args:
        folder: A checkpoint in torch's format (``.metadata`` and ``*.distcp``).
        part: Which files to read: every ``parts``-th, from this one.

    Returns:
        The first corrupt item by file name. Items are named as in the checkpoint.
    """
    try:
        storage = FileSystemReader(folder).read_metadata().storage_data or {}
    except Exception as error:  # a pickle: anything can come out of broken bytes
        return {".metadata": f"cannot be read ({type(error).__name__}: {error})"}
    items = defaultdict(list)
    for index, place in storage.items():
        items[place.relative_path].append((place.offset, place.length, index.fqn))
    found = {}
    for name in sorted(items)[part::parts]:
        if wrong := _first_wrong(folder / name, sorted(items[name])):
            found[name] = wrong
    return found


def _first_wrong(path: Path, items: list[tuple[int, int, str]]) -> str:
    try:
        with open(path, "rb") as file:
            for offset, length, fqn in items:
                file.seek(offset)
                if not _is_intact(file.read(length), length):
                    return fqn
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def _is_intact(stored: bytes, length: int) -> bool:
    if len(stored) != length:
        return False
    try:
        with zipfile.ZipFile(io.BytesIO(stored)) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, NotImplementedError, EOFError):
        return False


@contextlib.contextmanager
def one_clear_error(config: Trainer.Config) -> Iterator[None]:
    """Around training: what torch says of a failed save or load, in one line.

    Raises:
        RuntimeError: from CheckpointException, naming the ranks, the cause and what is left.
    """
    try:
        yield
    except CheckpointException as error:
        causes = defaultdict(list)
        for rank, (cause, _) in error.failures.items():
            causes[f"{type(cause).__name__}: {cause}"].append(rank)
        said = "; ".join(f"on rank {', '.join(map(str, r))}: {c}" for c, r in causes.items())
        # torch's writer does not pass on why a write failed: the most frequent reason is shown.
        free_gib = shutil.disk_usage(config.dump_folder).free / 2**30
        raise RuntimeError(
            f"a checkpoint could not be saved or loaded, {said}. {free_gib:.2f} GiB are free in "
            f"{config.dump_folder}. {_advice(config)}"
        ) from error


def _folder(config: Trainer.Config) -> Path:
    return Path(config.dump_folder) / config.checkpoint.folder


def _advice(config: Trainer.Config, corrupt: Path | None = None) -> str:
    steps = whole_checkpoint_steps(_folder(config))
    steps = [step for step in steps if corrupt != _folder(config) / f"step-{step}"]
    if not steps:
        return f"There is no whole checkpoint in {_folder(config)}."
    kept = f"The newest whole checkpoint is {_folder(config)}/step-{max(steps)}"
    if corrupt is None:
        return f"{kept}."
    return f"{kept}: move {corrupt.name} away to resume from it, or --checkpoint.load_step."
