# SPDX-License-Identifier: BSD-3-Clause
"""TorchTitan's LoRA: keeps the frozen base frozen, refuses bad targets, exports for PEFT.

Titan's own export (``checkpoint.last_save_in_hf``) cannot write adapters: torch's writer of
safetensors chooses the file names, and the base model would be written too. ``export_adapters``
needs one process for any layout, for a checkpoint in torch's format has whole tensors.
"""

import contextlib
import copy
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import BaseModel

from titan_ext.base.messages import and_more, did_you_mean
from titan_ext.base.run_folder import whole_checkpoint_steps

_PREFIX = "base_model.model."
# The two cases of Titan's _lora_adapter_sharding, which asserts that there is no third.
_ADAPTABLE = (dense_param_placement(tp=spmd.S(0)), dense_param_placement(tp=spmd.S(1)))


def is_adapter_weight(name: str) -> bool:
    """True if a name in a state dict is that of a LoRA adapter weight."""
    return name.endswith((".lora_a.weight", ".lora_b.weight"))


def lora_settings(model: BaseModel.Config) -> set[tuple[int, float]]:
    """The (rank, alpha) of the adapters in a model's config; empty if it has none."""
    return {(linear.rank, linear.alpha) for linear in _adapted(model).values()}


def _adapted(model: BaseModel.Config) -> dict[str, Any]:
    """The linears with adapters, by name."""
    linears = {name: linear for name, linear, _, _ in model.traverse(Linear.Config, recurse=True)}
    return {name: linear for name, linear in linears.items() if hasattr(linear, "rank")}


def wrong_targets(model: BaseModel.Config, converter: Any) -> Iterator[str]:
    """A message if a linear that ``converter`` adapts is not in ``model``.

    Titan warns of a target that matches nothing and trains the others; without any the optimizer
    gets an empty list of parameters. Both are configs, the model's after the converter; a converter
    of another kind than ``LoRAConverter`` is passed over.
    """
    targets = getattr(converter, "target_modules", None)
    if not isinstance(converter, LoRAConverter.Config) or targets is None:
        return
    linears = {name: at for name, at, _, _ in model.traverse(Linear.Config, recurse=True)}
    names = sorted({name.rsplit(".", 1)[-1] for name in linears})
    missing = [target for target in targets if target not in names]
    if targets and not missing:
        return
    said = f"{and_more(missing)} of this model can have no adapter" if missing else "it is empty"
    nearest = did_you_mean(missing[0], names) if missing else "."
    yield f"{said}; expected the last part of names of linears: {and_more(names, 20)}{nearest}"


def wrong_adapters(model: BaseModel.Config, config: Any) -> Iterator[str]:
    """A message for adapters on linears that TorchTitan cannot give them to.

    Its adapters copy how tensor parallelism splits their linear, whatever its degree. A linear that
    is not split ends in a bare AssertionError (torchtitan/components/lora.py) during start-up.
    ``model`` is a config, after ``LoRAConverter``; it stays as it is. From the trainer's ``config``
    it takes how it is split.
    """
    if not _adapted(model):
        return
    split = copy.deepcopy(model)
    split.update_from_config(config=config)
    can = {name for name, linear in _adapted(split).items() if _is_adaptable(linear)}
    if refused := [name for name in _adapted(split) if name not in can]:
        others = sorted({name.rsplit(".", 1)[-1] for name in can})
        expected = f"expected some of {', '.join(others)}" if others else "expected other names"
        yield (
            "torchtitan.components.lora.LoRAConverter adapts only linears that tensor parallelism "
            f"splits, and not {and_more(refused, 1)}; target_modules: {expected}."
        )


def _is_adaptable(linear: Any) -> bool:
    sharding = getattr(linear, "sharding_config", None)
    weight = sharding.state_shardings.get("weight") if sharding else None
    return weight is None or weight in _ADAPTABLE


def export_adapters(config: Any, output: Path | None = None, base_model: str = "") -> Path:
    """Write the adapters in a checkpoint of a run as PEFT does, in its dtype; return the folder.

    ``checkpoint.load_step`` of the run's ``config`` chooses the checkpoint, by default the newest.
    ``output`` is by default ``peft/step-N`` in the run's ``dump_folder``. ``base_model`` becomes
    ``base_model_name_or_path``, by default the path of the safetensors that the run started from.

    Raises ValueError if there is no such checkpoint, or its adapters are not those of ``config``.
    Also if TorchTitan has no Hugging Face name for a linear with an adapter.
    """
    spec = config.model_spec
    assert spec is not None
    settings = lora_settings(spec.model)
    if len(settings) != 1:
        raise ValueError(
            f"{spec.name} has {'several ranks of' if settings else 'no'} LoRA adapters; expected "
            "one [[model.converters]] with component torchtitan.components.lora.LoRAConverter."
        )
    if spec.state_dict_adapter is None:
        raise ValueError(f"TorchTitan has no Hugging Face names for {spec.name}.")
    # A tied lm_head has no weight in safetensors, and yet a name for its adapter.
    untied: Any = dataclasses.replace(spec.model, enable_weight_tying=False)  # type: ignore[call-arg]
    names = spec.state_dict_adapter(untied, None)
    with torch.device("meta"):
        model = untied.build()
    step, adapters = _read_adapters(config, model)

    weights = {}
    for linear in sorted({name.rpartition(".lora_")[0] for name in adapters}):
        down, up = (adapters[f"{linear}.lora_{half}.weight"] for half in "ab")
        for module, rows in _split_outputs(model, names, linear, up).items():
            # Several modules for a fused linear; they share the first matrix.
            weights[f"{_PREFIX}{module}.lora_A.weight"] = down.clone()
            weights[f"{_PREFIX}{module}.lora_B.weight"] = rows
    ((rank, alpha),) = settings
    checkpoint = config.checkpoint
    started_from = checkpoint.initial_load_path if checkpoint.initial_load_in_hf else None
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or started_from or config.hf_assets_path,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        **_targets(weights, names.to_hf(model.state_dict())),
    }
    output = output or Path(config.dump_folder) / "peft" / f"step-{step}"
    output.mkdir(parents=True, exist_ok=True)
    save_file(weights, output / "adapter_model.safetensors", metadata={"format": "pt"})
    (output / "adapter_config.json").write_text(json.dumps(adapter_config, indent=2) + "\n")
    return output


def _read_adapters(config: Any, model: nn.Module) -> tuple[int, dict[str, torch.Tensor]]:
    folder = Path(config.dump_folder) / config.checkpoint.folder
    steps = whole_checkpoint_steps(folder)
    step = config.checkpoint.load_step
    step = max(steps, default=-1) if step == -1 else step
    if step not in steps:
        found = f"has steps {and_more(steps)}" if steps else "has none"
        raise ValueError(f"expected a checkpoint in torch's format; {folder} {found}.")
    folder /= f"step-{step}"
    saved: Any = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {n: saved[n].size for n in saved if is_adapter_weight(n) and "optimizer." not in n}
    wanted = {n: p.shape for n, p in model.state_dict().items() if is_adapter_weight(n)}
    others = [name for name in wanted | found if found.get(name) != wanted.get(name)]
    if others:
        raise ValueError(
            f"{folder} does not have the adapters of this config: {and_more(others, 3)}. Use the "
            "config of the run, with its rank and target_modules."
        )
    adapters = {n: torch.empty(found[n], dtype=saved[n].properties.dtype) for n in found}
    dcp.load(adapters, checkpoint_id=folder, no_dist=True)
    return step, adapters


def _split_outputs(
    model: nn.Module, names: Any, linear: str, up: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The rows of ``up`` as Hugging Face orders the outputs of ``linear``, by its module there.

    Titan splits fused linears in hooks of its state dict, and its Hugging Face adapters reorder
    rows. Both want a weight of the linear's own shape, so ``up`` goes through them padded.
    """
    module: Any = model.get_submodule(linear)
    padded = up.new_zeros(module.weight.shape)
    padded[:, : up.shape[1]] = up
    module.weight = nn.Parameter(padded, requires_grad=False)
    parent = linear.rpartition(".")[0]
    state = model.get_submodule(parent).state_dict(prefix=parent and f"{parent}.")
    module.to("meta")
    hf_state = {}
    with contextlib.suppress(KeyError):  # some of Titan's adapters skip unknown names, others raise
        hf_state = names.to_hf({name: t for name, t in state.items() if not t.is_meta})
    if not hf_state:
        raise ValueError(f"TorchTitan has no Hugging Face name for {linear}.")
    return {
        name.removesuffix(".weight"): rows[:, : up.shape[1]].contiguous()
        for name, rows in hf_state.items()
    }


def _targets(weights: Iterable[str], base_weights: Iterable[str]) -> dict[str, list[str]]:
    """The adapted modules as PEFT names them: ends of names.

    PEFT applies a name like ``gate_proj`` to the routed experts, also in
    ``shared_experts.gate_proj``. So such modules are given by their weights.
    """
    of_experts = {name.split(".")[-2] for name in base_weights if ".experts." in name}
    modules, parameters = set(), set()
    for weight in weights:
        module = weight.removeprefix(_PREFIX).rpartition(".lora_")[0]
        end = re.sub(r".*layers\.\d+\.", "", module)
        if end.split(".")[-1] in of_experts:
            parameters.add(f"{end}.weight")
        else:
            modules.add(end)
    return {"target_modules": sorted(modules), "target_parameters": sorted(parameters)}
