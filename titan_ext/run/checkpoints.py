# SPDX-License-Identifier: BSD-3-Clause
"""Titan's checkpointer with whole checkpoints, and checks on what a run saves and loads.

A checkpoint that cannot be written, read, trusted or resumed is one clear error. Titan finds out
while it loads, from the first missing tensor or an assertion about the data loader. It silently
ignores optimizer settings that the checkpoint overrides. torch.distributed.checkpoint stores every
tensor as a zip archive with a CRC-32 for each member. It never compares them, so a run would train
on a flipped bit. ``run.weights`` compares the model.

Tensors of the optimizer are not compared with the model's: torch loads them by names, which are
``components.optim``'s, into shards that ``fsdp.shard`` cuts.
"""

import contextlib
import io
import json
import re
import shutil
import zipfile
from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import CheckpointManager as TitanCheckpointManager
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_ext.base.agreement import this_job
from titan_ext.base.messages import and_more, format_bytes, ranks_in_words
from titan_ext.base.run_check import RunCheck
from titan_ext.base.run_folder import whole_checkpoint_steps
from titan_ext.base.titan.data import data_facts, other_data
from titan_ext.components.hf_export import INDEX, differences, stored_weights
from titan_ext.run.record import as_json

WRITTEN_LAST = ".metadata"
"""The file that makes a checkpoint in torch's format whole."""
_NOT_OVERRIDDEN = {"params", "param_names", "lr", "initial_lr"}
_REFUSED_WRITE = "unexpected pos"
"""The error of torch's zip writer as it closes a file, if it could not write all of it."""
STATES = ("dataloader", "lr_scheduler", "optimizer", "train_state")


class CheckpointManager(TitanCheckpointManager):
    """Titan's checkpointer, with a key for what is verified before it loads.

    ``keep_latest_k`` counts whole checkpoints. Titan's purge counts folders
    (torchtitan/components/checkpointer/dcp.py): those of saves that were cut off, or are still
    being written, push whole checkpoints out.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanCheckpointManager.Config):
        verify_checksums_up_to_gib: float = 64.0
        """Before a run loads a checkpoint of at most this many GiB, its ranks read all of it, each
        a part, and compare the checksums. 0: never; inf: always. See docs/running.md."""
        ignore_weights: list[str] = field(default_factory=list)
        """Names, or globs, of weights and modules in a checkpoint or in safetensors that the model
        does not have and that stay unread ("model.layers.61"). All others are refused."""

    exported: Mapping[str, torch.Tensor] = {}
    """The tensors that an export must have, on the meta device; ``HuggingFaceExport`` sets them."""

    _saved_step = 0

    def _load(self, step: int = -1) -> bool:
        folder = Path(self.folder)
        if (own := _step_to_load(folder, step, _loadable_steps(folder))) != step != -1:
            logger.info(f"This run began at checkpoint.load_step {step}: it goes on from its own.")
        return super()._load(own)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self._saved_step = curr_step
        is_written = self._should_save(curr_step, last_step) and dist.get_rank() == 0
        if is_written and not filesystem.is_remote(self.folder):
            folder = Path(self._create_checkpoint_id(curr_step))
            # No rank writes before rank 0 has come.
            if last_step and self.last_save_in_hf:
                # torch joins what it finds, that of an export by more ranks that was cut off, too.
                shutil.rmtree(folder / "sharded", ignore_errors=True)
                for path in folder.glob("*.safetensors*"):
                    path.unlink()
            else:
                # torch overwrites files one by one, and this one last: cut off in between, old and
                # new files would pass for a whole checkpoint.
                (folder / WRITTEN_LAST).unlink(missing_ok=True)
        return super()._save(curr_step, last_step)

    def _save_last_step(self, curr_step: int) -> None:
        """Titan's. An export is opened again; if it fails, torch's format keeps the weights."""
        if not self.last_save_in_hf:
            super()._save_last_step(curr_step)
            return
        folder = self._create_checkpoint_id(curr_step)
        failed: Any = None
        try:
            super()._save_last_step(curr_step)
            wrong = this_job().broadcast("export", lambda: _wrong_export(folder, self.exported))
            if wrong:
                failed = RuntimeError(f"the export to {folder} is not whole: {wrong}.")
        except CheckpointException as error:  # raised on every rank
            failed = error
        if failed is None:
            return
        self.last_save_in_hf = False
        super()._save_last_step(curr_step)
        logger.error(f"The export failed. {folder} has the weights in torch's format.")
        raise failed

    def dcp_save(self, state_dict: dict[str, Any], *args: Any, **arguments: Any) -> Any:
        """Titan's, with floating-point buffers as they are: ``export_dtype`` is for parameters.

        A router's load-balancing bias is a buffer in fp32, in Titan and in transformers. In
        bfloat16 it would choose other experts.
        """
        model = self.states[MODEL]
        buffers = {canonical_fqn(n) for part in model.model for n, _ in part.named_buffers()}
        kept = {n: t for n, t in model.state_dict().items() if n in buffers and n in state_dict}
        return super().dcp_save({**state_dict, **kept}, *args, **arguments)

    def _purge_stale_checkpoints(self) -> None:
        """Delete what is older than the ``keep_latest_k`` newest whole checkpoints of this run.

        What lies above the step that is saved is of another start, and neither counts nor goes:
        where a folder is remote, no branch below newer checkpoints is refused.
        """
        if not self._should_purge():
            return
        names = [re.fullmatch(r"step-(\d+)", name) for name in filesystem.listdir(self.folder)]
        steps = (int(name[1]) for name in names if name)
        whole = 0
        for step in sorted((s for s in steps if s <= self._saved_step), reverse=True):
            path = self._create_checkpoint_id(step)
            if whole >= self.keep_latest_k:
                self.purge_queue.put(path)
            else:
                whole += filesystem.isfile(filesystem.join(path, WRITTEN_LAST))


def _wrong_export(folder: str, exported: Mapping[str, torch.Tensor]) -> str:
    """The mistake in safetensors that were written, by their headers; "" if there is none."""
    try:
        stored = stored_weights(Path(folder))
    except ValueError as error:
        return str(error).removesuffix(".")
    return "; ".join(differences(exported, stored))


class Checkpoints(RunCheck):
    """Before loading, checks that the checkpoint is intact and complete; then reports failures."""

    def before_start(self, config: Trainer.Config) -> None:
        """Refuse to begin a branch below newer checkpoints: a later start would load those."""
        own, step = _folder(config), config.checkpoint.load_step
        if step == -1 or not is_inspected(config):
            return
        steps = _loadable_steps(own)
        newer = [s for s in steps if s > step]
        if not newer or _step_to_load(own, step, steps) != step:
            return
        whole = " --checkpoint.no-initial-load-model-only" if step else ""
        names = and_more([f"step-{s}" for s in newer])
        raise ValueError(
            f"checkpoint.load_step is {step}, and {own} has {names}: later starts, and restarts, "
            f"would load step-{max(newer)}. Expected "
            f"--checkpoint.initial_load_path {own}/step-{step}{whole} in another dump_folder, or "
            "the newer ones moved away."
        )

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
                causes[f"{type(cause).__name__}: {cause}"].append(rank)
            said = "; ".join(f"on {ranks_in_words(r)}: {cause}" for cause, r in causes.items())
            what = "saved" if trainer.step else "loaded"  # Titan loads before its first step
            if _REFUSED_WRITE in said:
                said += " (the file system refused a write: a full disk, a quota or ulimit -f)"
            raise RuntimeError(f"a checkpoint could not be {what}, {said}.") from error


def checkpoint_to_load(config: Trainer.Config) -> tuple[Path, bool] | None:
    """The checkpoint in torch's format that Titan will load, and whether its model only.

    None for a fresh start, for safetensors, and for a remote folder, which is not inspected.

    Raises ValueError if the newest in the run's own folder is safetensors, that is, an export:
    Titan would take it for a checkpoint and fail.
    """
    checkpoint = config.checkpoint
    if not is_inspected(config):
        return None
    own = _folder(config)
    steps = whole_checkpoint_steps(own)
    exports = whole_checkpoint_steps(own, marker=INDEX)
    step = _step_to_load(own, checkpoint.load_step, [*steps, *exports])
    if step in exports and step not in steps:
        kind = "an export (checkpoint.last_save_in_hf), the model only"
        raise _nothing_to_resume(own / f"step-{step}", kind, " --checkpoint.initial_load_in_hf")
    if step != -1:
        return (own / f"step-{step}", step == 0) if step in steps else None
    initial = checkpoint.initial_load_path
    if not initial or checkpoint.initial_load_in_hf or filesystem.is_remote(initial):
        return None
    return Path(initial), checkpoint.initial_load_model_only


def _loadable_steps(own: Path) -> list[int]:
    return whole_checkpoint_steps(own) + whole_checkpoint_steps(own, marker=INDEX)


def _step_to_load(own: Path, step: int, loadable: Sequence[int]) -> int:
    """``checkpoint.load_step``, or the newest where a start with that has saved it.

    A supervisor repeats its command, and would train the same steps each time.
    """
    newest = max(loadable, default=-1)
    if step >= newest or step == -1:
        return max(step, newest)
    return newest if _facts(own / f"step-{newest}").get("load_step") == str(step) else step


def _facts(folder: Path) -> dict[str, str]:
    """What ``Trainer.state_dict`` says of its run; {} of stock's, or if it cannot be read."""
    state = {"train_state": {"data": "{}"}}
    with contextlib.suppress(Exception, CheckpointException):  # which is no Exception
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        return json.loads(state["train_state"]["data"])
    return {}


def verify_checksums(config: Trainer.Config) -> None:
    """Compare the checksums of the checkpoint that the run will load; call it on every rank.

    Each rank reads a part of the files. Raises ValueError on every rank, naming the files that are
    corrupt and the checkpoint before.
    """
    if not is_inspected(config):
        return
    job = this_job()
    if not (name := job.broadcast("what is verified", lambda: _to_verify(config))):
        return
    folder = Path(name)

    def verdict_of(classes: list[tuple[str, list[int]]]) -> str:
        corrupt = dict(ChainMap(*(json.loads(found) for found, _ in classes)))
        files = "; ".join(f"{name}: {item}" for name, item in sorted(corrupt.items())[:5])
        others = [f"step-{s}" for s in whole_checkpoint_steps(_folder(config))]
        left = and_more([name for name in reversed(others) if name != folder.name]) or "none"
        return f"{folder} is corrupt ({files}). Moved away, it leaves {left}." if corrupt else ""

    wrong = _corrupt(folder, job.rank, job.ranks)
    if verdict := job.compare("corrupt files", json.dumps(wrong), verdict_of):
        raise ValueError(verdict)


def _to_verify(config: Trainer.Config) -> str:
    """The folder of the checkpoint whose checksums are compared; "" if none are."""
    if (found := checkpoint_to_load(config)) is None:
        return ""
    folder, _ = found
    default = CheckpointManager.Config().verify_checksums_up_to_gib
    limit = getattr(config.checkpoint, "verify_checksums_up_to_gib", default)
    nbytes = sum(f.stat().st_size for f in folder.glob("*.distcp"))
    if nbytes <= limit * 2**30:
        return str(folder)
    logger.info(
        f"The checksums of {folder} ({format_bytes(nbytes)}) are not compared before it is loaded: "
        f"checkpoint.verify_checksums_up_to_gib is {limit:g}."
    )
    return ""


def _corrupt(folder: Path, rank: int, ranks: int) -> dict[str, str]:
    """The first item whose bytes are not those that were saved, by file; of this rank's files."""
    try:  # as each rank does again to load it
        stored = FileSystemReader(folder).read_metadata().storage_data or {}
    except Exception as error:  # a pickle: anything can come out of broken bytes
        return {".metadata": f"cannot be read ({type(error).__name__}: {error})"}
    items = defaultdict(list)
    for index, place in stored.items():
        items[place.relative_path].append((place.offset, place.length, index.fqn))
    mine = sorted(items)[rank::ranks]
    found = {name: _first_wrong(folder / name, sorted(items[name])) for name in mine}
    return {name: item for name, item in found.items() if item}


def _first_wrong(path: Path, items: list[tuple[int, int, str]]) -> str:
    """torch itself refuses a damaged directory of an archive, which has no checksum."""
    name = ""
    try:
        with open(path, "rb") as file:
            for offset, length, name in items:
                file.seek(offset)
                if zipfile.ZipFile(io.BytesIO(file.read(length))).testzip() is not None:
                    return name
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except Exception:  # anything can come out of broken bytes
        return name
    return ""


def check_resume(trainer: Trainer) -> None:
    """Raise ValueError if the checkpoint that ``trainer`` is about to load lacks what it needs.

    On every rank, as rank 0 finds: all load the same one, and its list is long.

    States may be missing. The position in the data may be one of other ranks, or in other data.
    ``run.weights`` has compared the model.
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
        sections = {name.partition(".")[0] for name in saved}
        unread = trainer.config.checkpoint.exclude_from_loading
        if missing := sorted(set(STATES) - sections - set(unread)):
            kind = "the model only" if len(missing) == len(STATES) else f"no {', '.join(missing)}"
            raise _nothing_to_resume(folder, kind)
        _check_data(trainer, folder)


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


def _nothing_to_resume(folder: Path, kind: str, flags: str = "") -> ValueError:
    return ValueError(
        f"{folder} has {kind}: training cannot resume from it. Moved away, it leaves the one "
        "before. A run in another dump_folder starts from these weights with "
        f"--checkpoint.initial_load_path {folder} --checkpoint.initial_load_model_only{flags}. To "
        "make finished runs resumable, set checkpoint.last_save_model_only = false."
    )


def _check_data(trainer: Trainer, folder: Path) -> None:
    config = trainer.config
    if "dataloader" in config.checkpoint.exclude_from_loading or not (facts := _facts(folder)):
        return  # all the same, or stock TorchTitan's
    if difference := other_data(facts, data_facts(config.dataloader, trainer.dataloader)):
        raise ValueError(
            f"{folder} was made with {difference}: the saved position and leftover tokens do not "
            "belong to this run. Run as it was, or with --checkpoint.exclude_from_loading "
            "dataloader: weights, optimizer and schedule continue, and the data starts from its "
            "beginning."
        )


def _warn_of_overridden_settings(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Warn of optimizer settings that the checkpoint overrides.

    torch restores weight decay, betas and the rest with the state, whatever the config says. The
    rate is that of the config's schedule again (``run.checks.Schedule``). Values are compared as
    JSON has them: a file has lists for tuples, words for enums and paths.
    """
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for key in sorted(group.keys() & saved.keys() - _NOT_OVERRIDDEN):
            if as_json({key: saved[key]}) != as_json({key: group[key]}):
                names = and_more(group.get("param_names", ["unnamed parameters"]), 1)
                logger.warning(
                    f"optimizer: {key} of {names} is {saved[key]} from the checkpoint, not "
                    f"{group[key]} as configured. checkpoint.exclude_from_loading optimizer takes "
                    "the configured value, and starts the moments from zero."
                )


def is_inspected(config: Trainer.Config) -> bool:
    """True if the run has checkpoints, and a process for each rank."""
    return config.checkpoint.enable and config.comm.mode == "default"


def _folder(config: Trainer.Config) -> Path:
    return Path(config.dump_folder) / config.checkpoint.folder
