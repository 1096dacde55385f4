# SPDX-License-Identifier: BSD-3-Clause
"""Checks on checkpoints: one that cannot be written, read, trusted or resumed is one clear error.

Titan finds out while it loads, from the first missing tensor or an assertion about the data loader.
It silently ignores optimizer settings that the checkpoint overrides. torch.distributed.checkpoint
stores every tensor as a zip archive with a CRC-32 for each member. It never compares them, so a run
would train on a flipped bit. ``run.weights`` compares the model.

Tensors of the optimizer are not compared with the model's: torch loads them by names, which are
``components.optim``'s, into shards that ``fsdp.mesh`` cuts.
"""

import contextlib
import io
import json
import math
import resource
import shutil
import zipfile
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_ext.base.agreement import this_job
from titan_ext.base.messages import and_more, did_you_mean, format_bytes
from titan_ext.base.run_check import RunCheck
from titan_ext.base.run_folder import whole_checkpoint_steps
from titan_ext.base.titan.data import data_facts, other_data, ranks_of_data
from titan_ext.components.hf_export import INDEX
from titan_ext.run.checkpointer import WRITTEN_LAST, CheckpointManager
from titan_ext.run.start import check_folder

_NOT_OVERRIDDEN = {"params", "param_names", "lr", "initial_lr"}
_REFUSED_WRITE = "unexpected pos"
"""The error of torch's zip writer as it closes a file, if it could not write all of it."""
_DATA = "train_state.data"
STATES = ("dataloader", "lr_scheduler", "optimizer", "train_state")


class Checkpoints(RunCheck):
    """Before loading, checks that the checkpoint is intact and complete; then reports failures."""

    def after_build(self, trainer: Trainer) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_load_state_dict_pre_hook(_warn_of_overridden_settings)

    @contextlib.contextmanager
    def around_run(self, trainer: Trainer) -> Iterator[None]:
        """Turn torch's report of a failed save or load into one line, of a RuntimeError."""
        config = trainer.config
        try:
            verify_checksums(config)
            check_resume(trainer)
            yield
            trainer.checkpointer.maybe_wait_for_saving()  # an asynchronous save may have failed
        except CheckpointException as error:
            causes = defaultdict(list)
            for rank, (cause, _) in error.failures.items():
                words = f"{type(cause).__name__}: {cause}"
                if _REFUSED_WRITE in words:
                    words = f"the file system refused a write (torch says: {words})"
                causes[words].append(str(rank))
            said = "; ".join(f"on rank {', '.join(r)}: {cause}" for cause, r in causes.items())
            # Titan loads before its first step; nobody is told to try the same one again.
            loaded = None if trainer.step else checkpoint_to_load(config)
            if loaded is not None:
                newest = _newest_whole(config, but=loaded[0])
                raise RuntimeError(f"{loaded[0]} could not be loaded, {said}. {newest}") from error
            raise RuntimeError(
                f"a checkpoint could not be saved, {said}. "
                f"{why_refused(config.dump_folder)} {_newest_whole(config)}"
            ) from error


def why_refused(folder: str) -> str:
    """The reason why writes into ``folder`` fail, as far as this process can find out.

    torch's writer keeps the error of the failed write from the report: it comes from another rank.
    """
    size_limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size_limit != resource.RLIM_INFINITY:
        return f"No file of this process can have more than {format_bytes(size_limit)} (ulimit -f)."
    try:
        check_folder.cache_clear()  # it was fine before
        check_folder(folder)
    except ValueError as error:
        return str(error)
    return f"{format_bytes(shutil.disk_usage(folder).free)} are free in {folder}."


def check_excluded(config: Trainer.Config) -> None:
    """Raise ValueError for an unknown name in ``checkpoint.exclude_from_loading``."""
    for name in config.checkpoint.exclude_from_loading:
        if name not in STATES:
            raise ValueError(
                f"checkpoint.exclude_from_loading has {name!r}; expected names of "
                f"{', '.join(STATES)}{did_you_mean(name, STATES)}"
            )


def checkpoint_to_load(config: Trainer.Config) -> tuple[Path, bool] | None:
    """The checkpoint in torch's format that Titan will load, and whether its model only.

    None for a fresh start, for safetensors, and for a remote folder, which is not inspected.

    Raises ValueError if the newest in the run's own folder is safetensors, that is, an export:
    Titan would take it for a checkpoint and fail. Also if ``initial_load_path`` is no checkpoint.
    """
    checkpoint = config.checkpoint
    if not is_inspected(config):
        return None
    own = _folder(config)
    steps = whole_checkpoint_steps(own)
    exports = whole_checkpoint_steps(own, marker=INDEX)
    step = checkpoint.load_step
    if step == -1:
        step = max([*steps, *exports], default=-1)
    if step in exports and step not in steps:
        raise ValueError(
            f"{own}/step-{step} is an export (checkpoint.last_save_in_hf) with the model only: "
            "training cannot resume from it. "
            + _other_ways_on(own, step, " --checkpoint.initial_load_in_hf")
        )
    if step != -1:
        return (own / f"step-{step}", step == 0) if step in steps else None
    initial = checkpoint.initial_load_path
    if not initial or checkpoint.initial_load_in_hf or filesystem.is_remote(initial):
        return None
    if Path(initial).is_dir() and not (Path(initial) / ".metadata").exists():
        raise ValueError(
            f"checkpoint.initial_load_path is {initial!r}, which has no .metadata; expected the "
            "folder of one checkpoint (.../step-100), or checkpoint.initial_load_in_hf = true for "
            "safetensors."
        )
    return Path(initial), checkpoint.initial_load_model_only


def verify_checksums(config: Trainer.Config) -> None:
    """Compare the checksums of the checkpoint that the run will load; call it on every rank.

    Rank 0 alone reads what is in which file, and scatters the files. Raises ValueError on every
    rank, naming the files that are corrupt and the checkpoint before.
    """
    if not is_inspected(config):
        return
    job = this_job()
    share = job.scatter("files to verify", lambda: _shares(config, job.ranks))
    if share is None:
        return
    folder = Path(share["folder"])

    def verdict_of(classes: list[tuple[str, list[int]]]) -> str:
        corrupt = dict(ChainMap(*(json.loads(word) for word, _ in classes)))
        files = "; ".join(f"{name}: {item}" for name, item in sorted(corrupt.items())[:5])
        newest = _newest_whole(config, but=folder)
        return f"{folder} is corrupt ({files}). {newest}" if corrupt else ""

    wrong = share["wrong"] or _corrupt(folder, share["items"])
    if verdict := job.compare("corrupt files", json.dumps(wrong), verdict_of):
        raise ValueError(verdict)


def _shares(config: Trainer.Config, ranks: int) -> list[dict[str, Any]]:
    """The files that each rank verifies; none, if the checkpoint is not verified."""
    if (found := checkpoint_to_load(config)) is None:
        return []
    folder, _ = found
    default = CheckpointManager.Config().verify_checksums_up_to_gib
    limit = getattr(config.checkpoint, "verify_checksums_up_to_gib", default)
    nbytes = sum(f.stat().st_size for f in folder.glob("*.distcp")) if limit < math.inf else 0
    if nbytes > limit * 2**30:
        logger.info(
            f"The checksums of {folder} ({format_bytes(nbytes)}) are not compared before it is "
            f"loaded: checkpoint.verify_checksums_up_to_gib is {limit:g}."
        )
        return []
    items, wrong = _items(folder)
    share = {"folder": str(folder), "wrong": wrong}
    names = sorted(items)
    return [
        {**share, "items": {name: items[name] for name in names[rank::ranks]}}
        for rank in range(ranks)
    ]


def _items(folder: Path) -> tuple[dict[str, list[tuple[int, int, str]]], dict[str, str]]:
    """Offset, length and name of what is in each file; and what is wrong with the list."""
    try:
        storage = FileSystemReader(folder).read_metadata().storage_data or {}
    except Exception as error:  # a pickle: anything can come out of broken bytes
        return {}, {".metadata": f"cannot be read ({type(error).__name__}: {error})"}
    items = defaultdict(list)
    for index, place in storage.items():
        items[place.relative_path].append((place.offset, place.length, index.fqn))
    return items, {}


def _corrupt(folder: Path, items: Mapping[str, list[tuple[int, int, str]]]) -> dict[str, str]:
    """The first item of each file whose bytes are not those that were saved, by file name."""
    return {
        name: wrong
        for name in sorted(items)
        if (wrong := _first_wrong(folder / name, sorted(items[name])))
    }


def _first_wrong(path: Path, items: list[tuple[int, int, str]]) -> str:
    try:
        with open(path, "rb") as file:
            for offset, length, name in items:
                file.seek(offset)
                stored = io.BytesIO(file.read(length))
                is_whole = stored.getbuffer().nbytes == length
                if not (is_whole and _is_sound(stored)):
                    return name
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def _is_sound(stored: io.BytesIO) -> bool:
    """True if an archive that torch.save wrote is as it was: contents and directory.

    ``testzip`` compares contents with the checksums of the directory, which has none itself. So
    torch's own reader (caffe2/serialize/inline_container.cc), which refuses what Python's takes,
    has to find the same records in it.
    """
    try:
        archive = zipfile.ZipFile(stored)
        if archive.testzip() is not None:
            return False
        stored.seek(0)  # it takes where the stream stands for the beginning
        reader: Any = torch._C.PyTorchFileReader(stored)
        records = reader.get_all_records()
        for record in records:
            reader.get_record_offset(record)
        return {name.partition("/")[2] for name in archive.namelist()} == set(records)
    except Exception:  # anything can come out of broken bytes
        return False


def check_resume(trainer: Trainer) -> None:
    """Raise ValueError if the checkpoint that ``trainer`` is about to load lacks what it needs.

    On every rank, by the word of rank 0: all load the same one, and its list is long.

    States may be missing. Another number of data-parallel ranks may have saved the data position,
    or it may be one in other data. ``run.weights`` has compared the model.
    """
    if is_inspected(trainer.config):
        this_job().broadcast("what is loaded", lambda: _check_resume(trainer))


def _check_resume(trainer: Trainer) -> None:
    found = checkpoint_to_load(trainer.config)
    if trainer.config.checkpoint.load_step == -1:
        _check_cut_off(_folder(trainer.config), found and found[0])
    if found is None:
        return
    folder, model_only = found
    if not model_only:
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        _check_states(trainer.config, folder, saved)
        _check_data_ranks(trainer, folder, saved)
        _check_data(trainer, folder, saved)


def _check_cut_off(own: Path, found: Path | None) -> None:
    """Say which saves newer than ``found`` were cut off.

    Raises ValueError where a run that has trained would begin at step 1.
    """
    step = int(found.name.removeprefix("step-")) if found and found.parent == own else 0
    whole = whole_checkpoint_steps(own)
    cut_off = [s for s in whole_checkpoint_steps(own, marker="") if s > step and s not in whole]
    if not cut_off:
        return
    names = and_more([f"step-{s}" for s in cut_off])
    why = f"{names} in {own}: no {WRITTEN_LAST}, which a save writes last, so it was cut off"
    if not step:
        raise ValueError(
            f"this run had trained, and no checkpoint is left to resume from, only {why}. It would "
            "begin at step 1. Bring a whole checkpoint back, or begin anew: in another "
            "dump_folder, or here once these folders are moved away."
        )
    logger.warning(f"passed over {why}. Training resumes from step-{step}.")


def _check_states(config: Trainer.Config, folder: Path, saved: Iterable[str]) -> None:
    sections = {name.partition(".")[0] for name in saved}
    missing = sorted(set(STATES) - sections - set(config.checkpoint.exclude_from_loading))
    if not missing:
        return
    ways_on = (
        _other_ways_on(folder.parent, int(folder.name.removeprefix("step-")))
        if folder.parent == _folder(config)
        else "Load its weights only with --checkpoint.initial_load_model_only."
    )
    kind = "the model only" if len(missing) == len(STATES) else f"no {', '.join(missing)}"
    raise ValueError(f"{folder} has {kind}: training cannot resume from it. {ways_on}")


def _check_data_ranks(trainer: Trainer, folder: Path, saved: Iterable[str]) -> None:
    if (ranks := ranks_of_data(trainer.dataloader)) is None:
        return
    if "dataloader" in trainer.config.checkpoint.exclude_from_loading:
        logger.warning(
            "checkpoint.exclude_from_loading has 'dataloader': the data starts from its "
            "beginning, so this run repeats samples of the saved run."
        )
        return
    # One entry for each, or several below it.
    names = [name.split(".")[1] for name in saved if name.startswith("dataloader.dp_rank_")]
    saved_ranks = len(set(names))
    if saved_ranks != ranks:
        raise ValueError(
            f"{folder} has the data position of {saved_ranks} data-parallel rank(s), and this run "
            f"has {ranks}: TorchTitan keeps a position for each and cannot split them again. Run "
            f"with {saved_ranks}, or with --checkpoint.exclude_from_loading dataloader: weights, "
            "optimizer and schedule continue, and the data starts from its beginning."
        )


def _check_data(trainer: Trainer, folder: Path, saved: Iterable[str]) -> None:
    config = trainer.config
    if _DATA not in saved or "dataloader" in config.checkpoint.exclude_from_loading:
        return  # stock TorchTitan's, or all the same
    state = {"train_state": {"data": ""}}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    facts = json.loads(state["train_state"]["data"])
    if difference := other_data(facts, data_facts(config.dataloader, trainer.dataloader)):
        raise ValueError(
            f"{folder} was made with {difference}: the saved position and leftover tokens are not "
            "of these. Run as it was, or with --checkpoint.exclude_from_loading dataloader: "
            "weights, optimizer and schedule continue, and the data starts from its beginning."
        )


def _warn_of_overridden_settings(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Warn of optimizer settings that the checkpoint overrides.

    torch restores weight decay, betas and the rest with the state, whatever the config says. The
    rate is that of the config's schedule again (``run.checks.Schedule``).
    """
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for key in sorted(group.keys() & saved.keys() - _NOT_OVERRIDDEN):
            if saved[key] != group[key]:
                logger.warning(
                    f"optimizer: {key} is {saved[key]} from the checkpoint, not {group[key]} as "
                    "configured. checkpoint.exclude_from_loading optimizer takes the configured "
                    "value, and starts the moments from zero."
                )


def is_inspected(config: Trainer.Config) -> bool:
    """True if the run has checkpoints, and a process for each rank."""
    return config.checkpoint.enable and config.comm.mode == "default"


def _folder(config: Trainer.Config) -> Path:
    return Path(config.dump_folder) / config.checkpoint.folder


def _other_ways_on(own: Path, step: int, flags: str = "") -> str:
    earlier = [other for other in whole_checkpoint_steps(own) if other != step]
    resume = f"--checkpoint.load_step {max(earlier)} resumes before it. " if earlier else ""
    return (
        f"{resume}A new run, in another dump_folder, starts from its weights with "
        f"--checkpoint.initial_load_path {own}/step-{step}{flags}. To make "
        "finished runs resumable, set checkpoint.last_save_model_only = false."
    )


def _newest_whole(config: Trainer.Config, *, but: Path | None = None) -> str:
    own = _folder(config)
    steps = [s for s in whole_checkpoint_steps(own) if own / f"step-{s}" != but]
    if not steps:
        return f"There is no whole checkpoint in {own}."
    newest = f"The newest whole checkpoint is {own}/step-{max(steps)}"
    if but is None:
        return f"{newest}."
    step = f"--checkpoint.load_step {max(steps)}"
    return f"{newest}: to resume from it, move {but.name} away or add {step}."
