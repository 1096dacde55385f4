"""What became of the keys of TorchTitan 0.1 and 0.2, which were configured in TOML.

Someone who still has such a file gets today's name for each key, one at a time. The table holds
every key of v0.1.0, v0.2.0, v0.2.1 and v0.2.2 that TorchTitan 0.3 does not have under the same
name; ``tests/old_titan_keys.py`` lists them all, and a test goes through that list.
"""

from typing import Any

__all__ = ["LEGACY", "LEGACY_SECTIONS", "legacy_advice"]

_PARAM_GROUP = "optimizer.param_groups.0.optimizer_kwargs"
_CONVERTERS = "[[model.converters]] with component = "
_FLOAT8_LINEAR = f'{_CONVERTERS}"torchtitan.components.quantization.Float8LinearConverter"'
_FLOAT8_EXPERTS = f'{_CONVERTERS}"torchtitan.components.quantization.Float8GroupedExpertsConverter"'
_MXFP8_LINEAR = f'{_CONVERTERS}"torchtitan.components.quantization.MXFP8LinearConverter"'
_MXFP8_EXPERTS = f'{_CONVERTERS}"torchtitan.components.quantization.MXFP8GroupedExpertsConverter"'
_NO_FLOAT8_GATHER = "nothing; TorchTitan has removed the float8 all-gather"
_POLICY = 'activation_checkpoint.policy = "selective", "full", "memory_budget" or "none"'

LEGACY = {
    "activation_checkpoint.early_stop": "nothing; it is always off",
    "activation_checkpoint.mode": _POLICY,
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        "activation_checkpoint.force_recompute_mm_shapes_by_fqns"
    ),
    "activation_checkpoint.selective_ac_option": (
        'nothing; policy = "selective" chooses by operation (was "op"), and every n-th layer is '
        "no longer offered"
    ),
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.enable_ft_dataloader_checkpoints": "nothing; TorchFT left TorchTitan's trainer",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "float8.enable_fsdp_float8_all_gather": _NO_FLOAT8_GATHER,
    "float8.force_recompute_fp8_weight_in_bwd": "nothing; TorchTitan has removed it",
    "float8.precompute_float8_dynamic_scale_for_fsdp": _NO_FLOAT8_GATHER,
    "job.config_file": "extends",
    "job.custom_config_module": "extends, with the path of a Python module's config function",
    "job.description": "nothing; write a comment",
    "job.dump_folder": "dump_folder, a top-level key (before the first section)",
    "job.print_args": "debug.print_config",
    "job.print_config": "debug.print_config",
    "job.save_config_file": "debug.save_config_file",
    "job.use_for_integration_test": "nothing",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "model.converters": f'{_CONVERTERS}"..." each, the path of the converter\'s class',
    "model.hf_assets_path": "hf_assets_path, a top-level key (before the first section)",
    "model.name": 'extends = "MODULE.CONFIG_FUNCTION", for example "llama3.llama3_8b"',
    "model.print_after_conversion": "debug.print_config",
    "model.tokenizer_path": (
        "hf_assets_path, a top-level key (before the first section): the folder of tokenizer.json"
    ),
    "optimizer.beta1": f"{_PARAM_GROUP}.betas, both in one list",
    "optimizer.beta2": f"{_PARAM_GROUP}.betas, both in one list",
    "optimizer.early_step_in_backward": "nothing; TorchTitan has removed it",
    "optimizer.eps": f"{_PARAM_GROUP}.eps",
    "optimizer.lr": f"{_PARAM_GROUP}.lr",
    "optimizer.name": "optimizer.param_groups.0.optimizer_name",
    "optimizer.weight_decay": f"{_PARAM_GROUP}.weight_decay",
    "parallelism.context_parallel_rotate_method": "nothing; TorchTitan has removed it",
    "parallelism.disable_loss_parallel": "nothing; TorchTitan has removed it",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "parallelism.enable_compiled_autograd": "nothing; TorchTitan has removed it",
    "parallelism.expert_parallel_comm_backend": "model.moe_comm_backend",
    "parallelism.expert_tensor_parallel_degree": "nothing; TorchTitan has removed it",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "nothing; TorchTitan has removed it",
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
"""Key of TorchTitan 0.1 or 0.2, to what says it today."""

LEGACY_SECTIONS = {
    "experimental": "Python: extends takes the path of any Python module's config function",
    "fault_tolerance": "nothing; TorchFT left TorchTitan's trainer",
    "float8": _FLOAT8_LINEAR,
    "job": "the top-level keys (before the first section) and [debug]",
    "memory_estimation": "nothing; COMM_MODE=fake_backend of run_train.sh makes a dry run",
    "mx": _MXFP8_LINEAR,
    "profiling": "[profiler], with the same keys",
    "quantize.grouped_mm.float8": _FLOAT8_EXPERTS,
    "quantize.grouped_mm.mx": _MXFP8_EXPERTS,
    "quantize.linear.float8": _FLOAT8_LINEAR,
    "quantize.linear.mx": _MXFP8_LINEAR,
    "training.dataloader": "[dataloader], with the same keys",
    "validation": "[validator], with the same keys",
    "validation.dataloader": "[validator.dataloader], with the same keys",
}
"""Section of TorchTitan 0.1 or 0.2, to what says today those of its keys not in ``LEGACY``."""


def legacy_advice(key: str, value: Any) -> tuple[str, str] | None:
    """Today's name for an old key; for an old section, for the first of its keys.

    Returns:
        The old key that is meant, which may be below ``key``, and the advice. None if this was no
        key of TorchTitan 0.1 or 0.2.
    """
    if isinstance(value, dict):
        for name, below in value.items():
            found = legacy_advice(f"{key}.{name}", below)
            if found:
                return found
        return (key, LEGACY_SECTIONS[key]) if key in LEGACY_SECTIONS else None
    if key in LEGACY:
        return key, LEGACY[key]
    section = key.rpartition(".")[0]
    while section:
        if section in LEGACY_SECTIONS:
            return key, LEGACY_SECTIONS[section]
        section = section.rpartition(".")[0]
    return None
