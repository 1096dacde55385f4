"""What a checkpoint holds, held against what the run that loads it needs.

Titan finds out while it loads: with the name of the first tensor that is missing, an assertion
about the data loader, or not at all (tensors of the checkpoint that the model does not have, and
optimizer settings that the checkpoint overrides, pass without a word). Here it is one error, or a
warning, before training.
"""

import difflib
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_ext.run_folder import whole_checkpoint_steps

__all__ = ["check_excluded", "check_resume", "checkpoint_to_load", "warn_of_saved_settings"]

_STATES = ("dataloader", "lr_scheduler", "optimizer", "train_state")
_NAMES_SHOWN = 5
_MODEL_ONLY_KEY = "checkpoint.last_save_model_only"


def checkpoint_to_load(config: Trainer.Config) -> tuple[Path, bool] | None:
    """The checkpoint in torch's format that Titan will load, and whether its model only.

    None for a fresh start, for safetensors, and for a remote folder, which is not looked into.

    Raises:
        ValueError: if the newest in the run's own folder is safetensors: an export, which Titan
            would take for a checkpoint and fail on; or if ``initial_load_path`` is no checkpoint.
    """
    checkpoint = config.checkpoint
    if not checkpoint.enable or config.comm.mode != "default":
        return None
    own = Path(config.dump_folder) / checkpoint.folder
    steps = whole_checkpoint_steps(own)
    exports = _exported_steps(own)
    step = checkpoint.load_step
    if step == -1:
        step = max([*steps, *exports], default=-1)
    if step in exports and step not in steps:
        raise ValueError(
            f"{own}/step-{step} is an export (checkpoint.last_save_in_hf) with the model only: "
            f"training cannot resume from it. "
            + _alternatives(own, step, " --checkpoint.initial_load_in_hf")
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


def check_excluded(config: Trainer.Config) -> None:
    """Check the names in ``checkpoint.exclude_from_loading``.

    Raises:
        ValueError: for a name that is no state of Titan's, with the nearest that is.
    """
    for name in config.checkpoint.exclude_from_loading:
        if name not in _STATES:
            nearest = difflib.get_close_matches(name, _STATES, n=1, cutoff=0.3)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(
                f"checkpoint.exclude_from_loading has {name!r}; expected names of "
                f"{', '.join(_STATES)}{hint}"
            )


def check_resume(trainer: Trainer) -> None:
    """Check that the checkpoint that ``trainer`` is about to load has what it needs.

    Raises:
        ValueError: if states are missing, if tensors of the model are missing or have other
            shapes, or if another number of data-parallel ranks saved the data position.
    """
    config = trainer.config
    found = checkpoint_to_load(config)
    if found is None:
        return
    folder, model_only = found
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    if not model_only:
        _check_states(config, folder, set(saved))
        _check_data_ranks(trainer, folder, set(saved))
    _check_model(trainer, folder, saved)


def warn_of_saved_settings(optimizers: Any) -> None:
    """Have ``optimizers`` say which of their settings a checkpoint is about to override.

    torch restores weight decay, betas and the rest with the state, whatever the config says. The
    learning rate is computed from the config's again, after one step.
    """

    def warn(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            for key, value in group.items():
                if key in ("params", "param_names", "lr", "initial_lr") or key not in saved:
                    continue
                if saved[key] != value:
                    logger.warning(
                        f"optimizer: {key} is {saved[key]} from the checkpoint, not {value} as "
                        "configured. checkpoint.exclude_from_loading optimizer takes the "
                        "configured value, and starts the moments from zero."
                    )

    for optimizer in optimizers:
        optimizer.register_load_state_dict_pre_hook(warn)


def _exported_steps(checkpoints: Path) -> list[int]:
    return [
        int(match[1])
        for path in checkpoints.glob("step-*/model.safetensors.index.json")
        if (match := re.fullmatch(r"step-(\d+)", path.parent.name))
    ]


def _alternatives(own: Path, step: int, flags: str = "") -> str:
    earlier = [other for other in whole_checkpoint_steps(own) if other != step]
    resume = f"--checkpoint.load_step {max(earlier)} resumes before it. " if earlier else ""
    return (
        f"{resume}A new run, in another dump_folder, starts from its weights with "
        f"--checkpoint.initial_load_path {own}/step-{step}{flags}. Runs that are to be resumed at "
        f"their end save everything with {_MODEL_ONLY_KEY} = false."
    )


def _check_states(config: Trainer.Config, folder: Path, saved: set[str]) -> None:
    wanted = [name for name in _STATES if name not in config.checkpoint.exclude_from_loading]
    sections = {name.partition(".")[0] for name in saved}
    missing = [name for name in wanted if name not in sections]
    if not missing:
        return
    is_initial = folder.parent != Path(config.dump_folder) / config.checkpoint.folder
    advice = (
        "Load its weights only with --checkpoint.initial_load_model_only."
        if is_initial
        else _alternatives(folder.parent, int(folder.name.removeprefix("step-")))
    )
    kind = "the model only" if len(missing) == len(_STATES) else f"no {', '.join(missing)}"
    raise ValueError(f"{folder} has {kind}: training cannot resume from it. {advice}")


def _check_data_ranks(trainer: Trainer, folder: Path, saved: set[str]) -> None:
    if not isinstance(trainer.dataloader, ParallelAwareDataloader):
        return
    if "dataloader" in trainer.config.checkpoint.exclude_from_loading:
        logger.warning(
            "checkpoint.exclude_from_loading has 'dataloader': the data starts from its "
            "beginning, and samples that the saved run has seen are seen again."
        )
        return
    ranks = trainer.dataloader.dp_world_size
    saved_ranks = len([name for name in saved if name.startswith("dataloader.dp_rank_")])
    if saved_ranks != ranks:
        raise ValueError(
            f"{folder} has the data position of {saved_ranks} data-parallel rank(s), and this run "
            f"has {ranks}: TorchTitan keeps a position for each and cannot divide them anew. Run "
            f"with {saved_ranks}, or with --checkpoint.exclude_from_loading dataloader: weights, "
            "optimizer and schedule go on, and the data starts from its beginning."
        )


def _check_model(trainer: Trainer, folder: Path, saved: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = trainer.model_config.build()
    wanted = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    shapes = {
        name: tuple(item.size)
        for name, item in saved.items()
        if name.partition(".")[0] not in _STATES and hasattr(item, "size")
    }
    missing = [name for name in wanted if name not in shapes]
    others = [
        f"{name} {list(shapes[name])}, here {list(shape)}"
        for name, shape in wanted.items()
        if name in shapes and shapes[name] != shape
    ]
    unused = [name for name in shapes if name not in wanted]
    if missing or others:
        said = [f"without {_shown(missing)}"] if missing else []
        said += [f"with {_shown(others)}"] if others else []
        raise ValueError(f"{folder} is a checkpoint of another model: {'; '.join(said)}.")
    if unused:
        logger.warning(f"{folder} also has {_shown(unused)}, which this model has not: not loaded.")


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
