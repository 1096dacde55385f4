# SPDX-License-Identifier: BSD-3-Clause
"""Keys of TorchTitan 0.1, 0.2 and its main branch that 0.3 does not have.

0.1 and 0.2 were configured in TOML. For such a file the error gives today's name of each old key.
``LEGACY`` and ``LEGACY_SECTIONS`` cover every key of v0.1.0, v0.2.0, v0.2.1 and
v0.2.2 that 0.3 does not have under the same name; ``tests/old_titan_keys.py`` lists them all.
"""

from typing import Any

_CONVERTERS = "[[model.converters]] with component = "
_QUANTIZATION = f'{_CONVERTERS}"torchtitan.components.quantization.'
_NO_FLOAT8_GATHER = "nothing; TorchTitan has removed the float8 all-gather"
_NO_TORCHFT = "nothing; TorchFT left TorchTitan's trainer"
_PARAM_GROUP = "optimizer.param_groups.0"
_REMOVED = "nothing; TorchTitan has removed it"
_TOP_LEVEL = "a top-level key (before the first section)"

LEGACY = {
    "activation_checkpoint.early_stop": "nothing; it is always off",
    "activation_checkpoint.mode": (
        'activation_checkpoint.policy = "selective", "full", "memory_budget", "fp8" or "none"'
    ),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        "activation_checkpoint.force_recompute_mm_shapes_by_fqns"
    ),
    "activation_checkpoint.selective_ac_option": (
        'nothing; policy = "selective" chooses by operation (was "op"), and every n-th layer is '
        "no longer offered"
    ),
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.enable_ft_dataloader_checkpoints": _NO_TORCHFT,
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "float8.enable_fsdp_float8_all_gather": _NO_FLOAT8_GATHER,
    "float8.force_recompute_fp8_weight_in_bwd": _REMOVED,
    "float8.precompute_float8_dynamic_scale_for_fsdp": _NO_FLOAT8_GATHER,
    "job.config_file": "extends",
    "job.custom_config_module": "extends, with the path of a Python module's config function",
    "job.description": "nothing; write a comment",
    "job.dump_folder": f"dump_folder, {_TOP_LEVEL}",
    "job.print_args": "debug.print_config",
    "job.print_config": "debug.print_config",
    "job.save_config_file": "debug.save_config_file",
    "job.use_for_integration_test": "nothing",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "model.converters": f'{_CONVERTERS}"..." each, the path of the converter\'s class',
    "model.hf_assets_path": f"hf_assets_path, {_TOP_LEVEL}",
    "model.name": 'extends = "MODULE.CONFIG_FUNCTION", for example "llama3.llama3_8b"',
    "model.print_after_conversion": "debug.print_config",
    "model.tokenizer_path": f"hf_assets_path, {_TOP_LEVEL}: the folder of tokenizer.json",
    "optimizer.beta1": f"{_PARAM_GROUP}.optimizer_kwargs.betas, both in one list",
    "optimizer.beta2": f"{_PARAM_GROUP}.optimizer_kwargs.betas, both in one list",
    "optimizer.early_step_in_backward": _REMOVED,
    "optimizer.eps": f"{_PARAM_GROUP}.optimizer_kwargs.eps",
    "optimizer.lr": f"{_PARAM_GROUP}.optimizer_kwargs.lr",
    "optimizer.name": f"{_PARAM_GROUP}.optimizer_name",
    "optimizer.weight_decay": f"{_PARAM_GROUP}.optimizer_kwargs.weight_decay",
    "parallelism.context_parallel_rotate_method": _REMOVED,
    "parallelism.disable_loss_parallel": _REMOVED,
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "parallelism.enable_compiled_autograd": _REMOVED,
    "parallelism.expert_parallel_comm_backend": "model.moe_comm_backend",
    "parallelism.expert_tensor_parallel_degree": _REMOVED,
    "parallelism.pipeline_parallel_expert_parallel_overlap": _REMOVED,
    "parallelism.pipeline_parallel_split_points": "parallelism.module_fqns_per_model_part",
    "quantize.linear.float8.enable_fsdp_float8_all_gather": _NO_FLOAT8_GATHER,
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": _NO_FLOAT8_GATHER,
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.dataset": "dataloader.dataset",
    "training.dataset_path": "dataloader.dataset_path",
    "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
    "training.deterministic": "debug.deterministic",
    "training.seed": "debug.seed",
    "validation.dataset": "validator.dataloader.dataset",
    "validation.dataset_path": "validator.dataloader.dataset_path",
    "validation.local_batch_size": "nothing; validation uses training.local_batch_size",
    "validation.seq_len": "nothing; validation uses training.seq_len",
}
"""Key of TorchTitan 0.1 or 0.2 -> its replacement today."""

LEGACY_SECTIONS = {
    "experimental": "Python: extends takes the path of any Python module's config function",
    "fault_tolerance": _NO_TORCHFT,
    "float8": f'{_QUANTIZATION}Float8LinearConverter"',
    "job": "the top-level keys (before the first section) and [debug]",
    "memory_estimation": "nothing; `titan_ext dry-run FILE --ranks N` tries one step at full size",
    "mx": f'{_QUANTIZATION}MXFP8LinearConverter"',
    "profiling": "[profiler], with the same keys",
    "quantize.grouped_mm.float8": f'{_QUANTIZATION}Float8GroupedExpertsConverter"',
    "quantize.grouped_mm.mx": f'{_QUANTIZATION}MXFP8GroupedExpertsConverter"',
    "quantize.linear.float8": f'{_QUANTIZATION}Float8LinearConverter"',
    "quantize.linear.mx": f'{_QUANTIZATION}MXFP8LinearConverter"',
    "training.dataloader": "[dataloader], with the same keys",
    "validation": "[validator], with the same keys",
    "validation.dataloader": "[validator.dataloader], with the same keys",
}
"""Section of TorchTitan 0.1 or 0.2 -> what replaces those of its keys that ``LEGACY`` lacks."""

RENAMED_ON_MAIN = {"training.max_context_length": "training.seq_len"}
"""Key of TorchTitan's main branch -> the key of 0.3 with the same meaning and unit."""

_TOKENS = (
    "counts tokens; TorchTitan 0.3 has training.{}, which counts sequences: write the number of "
    "tokens divided by training.seq_len"
)
OTHER_UNIT_ON_MAIN = {
    "training.num_tokens_per_microbatch_per_dp_rank": _TOKENS.format("local_batch_size"),
    "training.num_tokens_per_train_step": _TOKENS.format("global_batch_size"),
    "parallelism.num_pp_microbatches": (
        "counts microbatches; TorchTitan 0.3 has parallelism.pipeline_parallel_microbatch_size, "
        "which counts sequences in one: write training.local_batch_size divided by the number of "
        "microbatches"
    ),
}
"""Key of TorchTitan's main branch -> how to convert its number, which is in another unit in 0.3."""


def legacy_advice(key: str, value: Any) -> tuple[str, str] | None:
    """The old key (``key``, or the first below it) and its replacement; None if it is none."""
    if isinstance(value, dict):
        found = (legacy_advice(f"{key}.{name}", below) for name, below in value.items())
        return next(filter(None, found), None)
    section = key
    while section and key not in LEGACY and section not in LEGACY_SECTIONS:
        section = section.rpartition(".")[0]
    advice = LEGACY.get(key) or LEGACY_SECTIONS.get(section)
    return (key, advice) if advice else None
