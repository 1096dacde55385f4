# SPDX-License-Identifier: BSD-3-Clause
"""Hugging Face safetensors: names and headers, exports under HSDP, and a try before training.

The adapters of TorchTitan 0.3 split stacked experts along the shard axes of their mesh. They fail
on an axis that replicates ("'Replicate' object has no attribute 'dim'"). ``for_replicated_weights``
hands them each weight without its replicating axes, and gives the result the model's layout. It
skips LoRA weights, which no Hugging Face model has, so that base weights load under them;
``titan_ext peft`` exports them.

Titan converts after the last step. If its adapter does not know a name, or cannot split a layout
into experts, a run of weeks ends without the export. A weight that the adapter skips is silently
missing. ``HuggingFaceExport`` tries the same conversions first.

The index in ``hf_assets_path`` says which tensor goes to which file. Titan takes it as it is, for
any model: torch writes a header without a dtype for a tensor that is not exported, and its writer
ends in a KeyError for one that the index lacks. ``files_of`` completes it.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_ext.base.messages import and_more
from titan_ext.base.run_check import RunCheck
from titan_ext.base.tensors import Sharding
from titan_ext.components.lora import is_adapter_weight

INDEX = "model.safetensors.index.json"


@functools.cache
def for_replicated_weights(adapter: type[BaseStateDictAdapter]) -> type[BaseStateDictAdapter]:
    """A subclass of ``adapter`` that converts weights which some mesh axes replicate."""
    if issubclass(adapter, _WithoutCopies):
        return adapter
    return type(adapter.__name__, (_WithoutCopies, adapter), {"__module__": __name__})


class _WithoutCopies:
    """Mixin that comes before an adapter in the bases."""

    _whole: dict[str, DTensor]

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dict = {n: t for n, t in state_dict.items() if not is_adapter_weight(n)}
        self._whole = {
            name: tensor
            for name, tensor in state_dict.items()
            if isinstance(tensor, DTensor) and any(p.is_replicate() for p in tensor.placements)
        }
        sharded = {name: _without_copies(tensor) for name, tensor in self._whole.items()}
        return super().to_hf({**state_dict, **sharded})  # type: ignore[misc]

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dict = super().from_hf(hf_state_dict)  # type: ignore[misc]
        for name, whole in getattr(self, "_whole", {}).items():
            if name in state_dict:
                tensor = state_dict[name]
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                state_dict[name] = Sharding.of(whole).wrap(local)
        return state_dict


def _without_copies(tensor: DTensor) -> torch.Tensor:
    """The same local shard on the shard axes of its mesh only; a plain tensor if there are none."""
    axes = [axis for axis, p in enumerate(tensor.placements) if not p.is_replicate()]
    if not axes:
        return tensor.to_local()
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None
    mesh = tensor.device_mesh[tuple(names[axis] for axis in axes)]
    placements = tuple(tensor.placements[axis] for axis in axes)
    return replace(Sharding.of(tensor), mesh=mesh, placements=placements).wrap(tensor.to_local())


def hf_weights(model: nn.Module, adapter: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights of a whole model by their Hugging Face names, and the names that have none.

    In the same order on every rank, if ``model`` is on the meta device.
    """
    weights = model.state_dict()
    exported, known = None, {}
    try:
        exported = adapter.to_hf(weights)
        known = adapter.from_hf({**exported})  # adapters pass over some names without a word
    except KeyError:  # names only the first that it does not know
        for name, tensor in weights.items():
            with contextlib.suppress(KeyError):
                adapter.to_hf({name: tensor})
                known[name] = tensor
    lost = [name for name in weights if name not in known]
    if exported is None or lost:
        exported = adapter.to_hf({n: t for n, t in weights.items() if n in known})
    return exported, lost


def stored_weights(folder: Path, reader: HuggingFaceStorageReader | None = None) -> dict[str, Any]:
    """Size and dtype of all tensors in a folder of safetensors, as torch's reader finds them.

    It opens every ``*.safetensors`` there, and reads headers only. Raises ValueError, naming the
    files that cannot be opened, or tensors that several files have.
    """
    try:
        reader = reader or HuggingFaceStorageReader(str(folder))
        stored: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    except Exception as error:  # torch does not say which file it was
        files = sorted(folder.glob("*.safetensors"))
        wrong = [f"{path.name}: {why}" for path in files if (why := _unreadable(path))]
        said = and_more(wrong, 3) or f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder} cannot be read as safetensors ({said}).") from error
    twice = [n for n, t in stored.items() if len({c.offsets for c in t.chunks}) < len(t.chunks)]
    if twice:
        raise ValueError(
            f"{folder} has {and_more(twice)} in more than one file, and torch would load any of "
            f"them. Move the files away that {INDEX} does not name."
        )
    # A reader of codes may have given a weight its size, and left the dims of its codes.
    pieces = {n: t for n, t in stored.items() if len(t.chunks[0].sizes) == len(t.size)}
    if torn := [name for name, item in pieces.items() if not is_whole(item)]:
        raise ValueError(
            f"{folder} has {and_more(torn)} in part, and torch would leave the rest of them as it "
            "was: expected the files of all ranks that exported them."
        )
    return stored


def is_whole(item: Any) -> bool:
    """True if the pieces that torch's reader found of a tensor, which do not overlap, are all."""
    return sum(chunk.sizes.numel() for chunk in item.chunks) >= item.size.numel()


def differences(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """In words, which names and shapes of ``wanted`` a folder does not have in ``stored``."""
    found = []
    if missing := [name for name in wanted if name not in stored]:
        found.append(f"without {and_more(missing)}")
    sizes = {name: list(stored[name].size) for name in wanted if name in stored}
    if others := [
        f"{name} {size}, here {list(wanted[name].shape)}"
        for name, size in sizes.items()
        if size != list(wanted[name].shape)
    ]:
        found.append(f"with {and_more(others)}")
    return found


def files_of(names: Iterable[str], index: Mapping[str, int]) -> dict[str, int]:
    """The number of the file of each exported tensor, of files that are numbered from 1.

    As ``index`` has it; a tensor that is not there goes with the one before it.
    """
    names = list(names)
    number = next((index[name] for name in names if name in index), 1)
    files = {}
    for name in names:
        files[name] = number = index.get(name, number)
    renumbered = {old: new for new, old in enumerate(sorted(set(files.values())), start=1)}
    return {name: renumbered[number] for name, number in files.items()}


def _unreadable(path: Path) -> str:
    try:
        with safe_open(path, framework="pt"):
            return ""
    except Exception as error:  # safetensors' own, or an OSError
        return str(error)


class HuggingFaceExport(RunCheck):
    """Tries to convert names before anything starts, and layouts before the first step."""

    _exported: Mapping[str, torch.Tensor]

    def before_start(self, config: Trainer.Config) -> None:
        """Convert the names of the model to Hugging Face's and back, on the meta device.

        Raises ValueError if the model has no adapter, or one that does not know, or skips, a
        parameter. Warns of buffers that the export leaves out (a router's load-balancing bias,
        which some architectures lack there).
        """
        key = _asked_by(config)
        if not key:
            return
        spec = config.model_spec
        assert spec is not None
        if spec.state_dict_adapter is None:
            raise ValueError(
                f"{key} is on, and TorchTitan has no Hugging Face adapter for {spec.name!r}."
            )
        with torch.device("meta"):
            model = spec.model.build()
        adapter = _adapter_of(
            spec, config.hf_assets_path if config.checkpoint.last_save_in_hf else ""
        )
        self._exported, lost = hf_weights(model, adapter)
        if config.checkpoint.last_save_in_hf and any(map(is_adapter_weight, lost)):
            raise ValueError(
                f"{key} is on, and would leave out the LoRA adapters. Set it to false: "
                "`titan_ext peft CONFIG` exports adapters from checkpoints in torch's format."
            )
        lost = [name for name in lost if not is_adapter_weight(name)]
        named = f"adapter of TorchTitan's for {spec.name!r} and Hugging Face"
        if parameters := [name for name, _ in model.named_parameters() if name in lost]:
            raise ValueError(
                f"{key} is on, and the {named} has no name for {and_more(parameters, 3)}: they "
                "would be left out. Checkpoints in torch's format have everything."
            )
        if lost:
            logger.warning(
                f"{key}: the {named} has no name for {and_more(lost, 3)}; they are left out."
            )

    @contextlib.contextmanager
    def around_run(self, trainer: Trainer) -> Iterator[None]:
        """Convert the sharded weights as Titan will do after the last step, without copies.

        Raises ValueError if the adapter cannot convert this layout.
        """
        if key := _asked_by(trainer.config):
            checkpointer: Any = trainer.checkpointer
            try:
                checkpointer.sd_adapter.to_hf(checkpointer.states["model"].state_dict())
            except Exception as error:  # Titan's adapters raise AttributeError, ValueError, ...
                raise ValueError(
                    f"{key} is on, and TorchTitan's Hugging Face adapter cannot convert weights "
                    f"that are sharded in this way ({type(error).__name__}: {error}). Checkpoints "
                    "in torch's format work in every layout: save one "
                    "(checkpoint.last_save_in_hf = false) and export it on one rank."
                ) from error
            self._complete(checkpointer, trainer.config.hf_assets_path)
        yield

    def _complete(self, checkpointer: Any, folder: str) -> None:
        """Give every tensor that is exported a file, and no other, and say what differs."""
        adapter = checkpointer.sd_adapter
        checkpointer.exported = self._exported
        if not checkpointer.last_save_in_hf or not (index := adapter.fqn_to_index_mapping):
            return
        adapter.fqn_to_index_mapping = files_of(self._exported, index)
        for kind, names in (
            ("has {}, which this model does not have: not exported", index.keys() - self._exported),
            ("lacks {}: exported beside others", self._exported.keys() - index),
        ):
            if names:
                logger.warning(f"{folder}/{INDEX} {kind.format(and_more(sorted(names), 3))}.")


def _adapter_of(spec: Any, folder: str) -> Any:
    """The adapter that Titan makes, which reads the index in ``folder`` if there is one."""
    try:
        return spec.state_dict_adapter(
            spec.model, folder if (Path(folder) / INDEX).exists() else None
        )
    except Exception as error:  # no JSON, no weight_map, a file without a number
        raise ValueError(
            f"hf_assets_path is {folder!r}, whose {INDEX} TorchTitan cannot read "
            f"({type(error).__name__}: {error}); expected names of files with a number "
            "(model-00001-of-00002.safetensors), or no such index."
        ) from error


def _asked_by(config: Trainer.Config) -> str:
    checkpoint = config.checkpoint
    if not checkpoint.enable or config.comm.mode != "default":
        return ""
    asked = [key for key in ("last_save_in_hf", "initial_load_in_hf") if getattr(checkpoint, key)]
    return f"checkpoint.{asked[0]}" if asked else ""
