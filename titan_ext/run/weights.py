# SPDX-License-Identifier: BSD-3-Clause
"""Weights to load, in torch's format or as safetensors, held against the model.

Titan finds out while it loads, after minutes and on every rank, from the first name that is
missing. In silence it leaves unread what the model does not have. Scales of float8 weights are
among that: the codes would be trained on as if they were weights.
"""

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_ext.base.messages import and_more
from titan_ext.base.run_check import RunCheck
from titan_ext.components.hf_export import INDEX, differences, hf_weights, is_whole, stored_weights
from titan_ext.fsdp.names import matches
from titan_ext.run.checkpoints import STATES, checkpoint_to_load, is_inspected

_NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that load into a weight of any other; float8 and integers are codes that need a scale."""


class Weights(RunCheck):
    """Checks names, shapes and dtypes of the weights to load before any process group exists."""

    def before_start(self, config: Trainer.Config) -> None:
        """On rank 0: all load the same, and the list is long."""
        if os.environ.get("RANK", "0") == "0" and (said := check_weights(config)):
            logger.info(f"Weights: {said}")


def check_weights(config: Trainer.Config, *, may_be_elsewhere: bool = False) -> str:
    """Hold the weights that a run will load against its model: names, shapes and dtypes.

    Reads lists and headers, no tensors, and needs no process group. Both formats alike. Returns how
    many fit, of which folder; "" if nothing is loaded, or the folder is remote. A folder that is
    not here is an error, unless it ``may_be_elsewhere``.

    Raises ValueError, naming the folder, what differs, and what to set.
    """
    spec = config.model_spec
    if spec is None or not is_inspected(config):
        return ""
    checkpoint: Any = config.checkpoint
    found = checkpoint_to_load(config)
    is_hf = found is None and checkpoint.load_step == -1 and checkpoint.initial_load_in_hf
    if found is None and not (is_hf and spec.state_dict_adapter):
        return ""
    key = "checkpoint.initial_load_path" if checkpoint.initial_load_path else "hf_assets_path"
    folder = found[0] if found else Path(checkpoint.initial_load_path or config.hf_assets_path)
    if not folder.is_dir():
        if may_be_elsewhere:
            return f"not read, {folder} is not on this machine"
        raise ValueError(f"{key} is {str(folder)!r}: no such folder; expected one with weights.")
    with torch.device("meta"):
        model = spec.model.build()
    needless: Collection[str] = ()
    # A run that resumes from its own checkpoint keeps the keys that it began with.
    is_initial = is_hf or folder == Path(checkpoint.initial_load_path or "")
    if is_hf:
        wanted, stored, needless, differ = _read_safetensors(config, folder, model)
    else:
        wanted, stored, differ = model.state_dict(), _read_checkpoint(folder), []
        if stored is None:
            return ""  # verify_checksums says what is corrupt
    differ = differences(wanted, stored) + differ
    unread = [name for name in stored if name not in wanted]
    ignored = set()
    for pattern in getattr(checkpoint, "ignore_weights", ()):  # Titan's class has no such key
        matched = [name for name in unread if matches(name, pattern)]
        ignored.update(matched)
        if is_initial and not matched:
            differ.append(
                f"checkpoint.ignore_weights has {pattern!r}, which matches nothing there that the "
                "model does not have"
            )
    if extra := [name for name in unread if name not in ignored and name not in needless]:
        differ.append(
            f"with {and_more(extra)}, which the model does not have (to leave them unread, name "
            "them, or modules that have them, in checkpoint.ignore_weights)"
        )
    if differ:
        raise ValueError(f"{folder} does not fit the model: {'; '.join(differ)}.")
    dtypes = sorted({str(stored[n].properties.dtype).removeprefix("torch.") for n in wanted})
    more = f"; {len(ignored)} more ignored" if ignored else ""
    return f"{len(wanted)} of {len(wanted)} fit ({', '.join(dtypes)}){more}, in {folder}"


def _read_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The weights in a checkpoint in torch's format; None if its list cannot be read."""
    try:
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception:  # a pickle: anything can come out of broken bytes
        return None
    return {
        name: item
        for name, item in saved.items()
        if name.partition(".")[0] not in STATES and hasattr(item, "size")
    }


def _read_safetensors(
    config: Trainer.Config, folder: Path, model: nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, Any], set[str], list[str]]:
    """The tensors that the model wants, those that are stored, and the mistakes but for shapes.

    Third come the names that it needs no tensor for: scales of quantized weights, which torch's
    reader applies as it reads the weights, and what the model computes.
    """
    spec = config.model_spec
    assert spec is not None
    assert spec.state_dict_adapter is not None
    adapter: Any = spec.state_dict_adapter(spec.model, None)
    wanted, _ = hf_weights(model, adapter)
    is_asked = config.checkpoint.initial_load_in_hf_quantized
    reader = adapter.get_hf_storage_reader(str(folder), is_asked)
    stored = stored_weights(folder, reader)
    files = _read_json(folder / INDEX).get("weight_map", {})
    wrong = []
    scales = {n: w for n in stored if (w := _weight_of_scale(n)) in stored}
    reads_codes = type(reader) is not HuggingFaceStorageReader
    coded = {
        name: str(stored[name].properties.dtype).removeprefix("torch.")
        for name in wanted
        if name in stored
        and (name in scales.values() or stored[name].properties.dtype not in _NUMBERS)
    }
    is_read = {weight for scale, weight in scales.items() if reads_codes and scale in files}
    # torch's reader gives MXFP4 weights their sizes, and leaves those of the chunks that it reads.
    if part := [n for n in coded if n in is_read and not is_whole(stored[n])]:
        wrong.append(
            f"with codes of which torch {torch.__version__} reads a part and leaves the rest of "
            f"the weight as it was: {and_more(part, 2)}"
        )
    if unread := [name for name in coded if name not in is_read]:
        can = type(adapter.get_hf_storage_reader(str(folder), True)) is not HuggingFaceStorageReader
        can = can and bool(scales or is_asked)
        way_on = (
            "set checkpoint.initial_load_in_hf_quantized = true, and initial_load_path to it, with "
            f"a scale of each in {INDEX} and in the files"
            if can
            else f"TorchTitan cannot read them for {spec.name}: convert them to bfloat16"
        )
        said = and_more([f"{name} ({coded[name]})" for name in unread], 2)
        wrong.append(f"with codes that mean nothing without their scales: {said}; {way_on}")
    block = getattr(reader, "block_size", 0)  # torch's reader of float8 has one, and asks nobody
    for scale, weight in scales.items():
        sizes = stored[weight].size, stored[scale].size
        if weight in is_read and block and len(sizes[0]) == 2:
            blocks = [-(-size // block) for size in sizes[0]]
            if blocks != list(sizes[1]):
                wrong.append(f"with {scale} {list(sizes[1])}, for blocks of {block} {blocks}")
                break
    has_own_head = _read_json(folder / "config.json").get("tie_word_embeddings") is False
    names = () if has_own_head else set(model.state_dict())
    others = {name: item for name, item in stored.items() if name not in wanted}
    needless = {n for n, t in others.items() if n in scales or _is_no_weight(n, t, adapter, names)}
    return wanted, stored, needless, wrong


def _read_json(path: Path) -> dict[str, Any]:
    """Metadata that Hugging Face's tools wrote; nothing where there is no such file."""
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}).") from error


def _weight_of_scale(name: str) -> str:
    """The weight for which ``name`` would be the scale, as torch's reader pairs them."""
    if name.endswith("_scales"):
        return f"{name.removesuffix('_scales')}_blocks"
    return name.removesuffix("_scale_inv") if name.endswith(".weight_scale_inv") else ""


def _is_no_weight(name: str, item: Any, adapter: Any, names: Collection[str]) -> bool:
    """True if the model computes it, or has it under another name, as a head that is tied."""
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    try:
        found = adapter.from_hf({name: torch.empty(item.size, device="meta")})
    except Exception:  # Titan's adapters raise KeyError, ValueError, AssertionError, ...
        return False
    return bool(found) and all(known in names for known in found)
