"""An export to Hugging Face safetensors that cannot work, or leaves weights out, is known at once.

Titan converts names and layouts after the last step: a name that its adapter does not know, or a
layout that it cannot split into experts, ends a run of weeks without the export; and a name that
the adapter skips is just not there. The same conversions are tried before training.
"""

from typing import Any

import torch
import torch.nn as nn
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

__all__ = ["check_export", "check_export_layout"]

_NAMES_SHOWN = 3


def check_export(config: Trainer.Config) -> None:
    """Convert the names of the model to Hugging Face's and back, on the meta device.

    Buffers that are left out (a router's load-balancing bias, which some architectures do not have
    there) are warned of.

    Raises:
        ValueError: if the model has no adapter, or one that does not know, or skips, a parameter.
    """
    key = _asked_by(config)
    if not key:
        return
    spec = config.model_spec
    assert spec is not None
    adapter = f"adapter of TorchTitan's for {spec.name!r} and Hugging Face"
    if spec.state_dict_adapter is None:
        raise ValueError(
            f"{key} is on, and TorchTitan has no Hugging Face adapter for {spec.name!r}."
        )
    with torch.device("meta"):
        model = spec.model.build()
    lost, is_skipped = _lost_names(model, spec.state_dict_adapter(spec.model, None))
    if is_skipped and not config.checkpoint.last_save_in_hf:
        # Adapters that begin at their initial values on weights from elsewhere: what LoRA is for.
        lost = [name for name in lost if ".lora_a." not in name and ".lora_b." not in name]
    parameters = [name for name, _ in model.named_parameters() if name in lost]
    if parameters:
        raise ValueError(
            f"{key} is on, and the {adapter} has no name for {_shown(parameters)}: they would be "
            "left out. Checkpoints in torch's format have everything."
        )
    if lost:
        logger.warning(f"{key}: the {adapter} has no name for {_shown(lost)}; they are left out.")


def check_export_layout(trainer: Trainer) -> None:
    """Convert the sharded weights as Titan will do after the last step; no copies are made.

    Raises:
        ValueError: if the adapter cannot convert this layout.
    """
    key = _asked_by(trainer.config)
    if not key:
        return
    checkpointer: Any = trainer.checkpointer
    try:
        checkpointer.sd_adapter.to_hf(checkpointer.states["model"].state_dict())
    except Exception as error:  # Titan's adapters raise what comes: AttributeError, ValueError, ...
        raise ValueError(
            f"{key} is on, and TorchTitan's Hugging Face adapter cannot convert weights that are "
            f"sharded in this way ({type(error).__name__}: {error}). Checkpoints in torch's format "
            "work in every layout: save one (checkpoint.last_save_in_hf = false) and export it on "
            "one rank."
        ) from error


def _asked_by(config: Trainer.Config) -> str:
    checkpoint = config.checkpoint
    if not checkpoint.enable or config.comm.mode != "default":
        return ""
    asked = [key for key in ("last_save_in_hf", "initial_load_in_hf") if getattr(checkpoint, key)]
    return f"checkpoint.{asked[0]}" if asked else ""


def _lost_names(model: nn.Module, adapter: Any) -> tuple[list[str], bool]:
    """Names that do not survive the way there and back, and whether the adapter skips them."""
    weights = model.state_dict()
    try:
        returned = adapter.from_hf(adapter.to_hf(weights))
        return [name for name in weights if name not in returned], True
    except KeyError:  # of the first name that it does not know; which others, it does not say
        return [name for name in weights if not _is_known(adapter, name, weights[name])], False


def _is_known(adapter: Any, name: str, tensor: torch.Tensor) -> bool:
    try:
        adapter.to_hf({name: tensor})
    except KeyError:
        return False
    return True


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
