"""Every configuration key of TorchTitan v0.1.0, v0.2.0, v0.2.1 and v0.2.2, by section.

Read from ``torchtitan/config_manager.py`` and ``torchtitan/config/job_config.py`` at those tags.
"""

__all__ = ["OLD_TITAN_KEYS"]

OLD_TITAN_KEYS = {
    "activation_checkpoint": """
        debug determinism_check early_stop memory_budget mode
        per_op_sac_force_recompute_mm_shapes_by_fqns preserve_rng_state selective_ac_option
        visualize_memory_budget_pareto
    """,
    "checkpoint": """
        async_mode create_seed_checkpoint enable enable_checkpoint enable_first_step_checkpoint
        enable_ft_dataloader_checkpoints exclude_from_loading export_dtype folder
        initial_load_in_hf initial_load_in_hf_quantized initial_load_model_only
        initial_load_model_weights_only initial_load_path interval keep_latest_k
        last_save_in_hf last_save_model_only last_save_model_weights_only load_only load_step
    """,
    "comm": """
        init_timeout_seconds mode save_traces_file_prefix save_traces_folder trace_buf_size
        train_timeout_seconds
    """,
    "compile": """
        backend components enable
    """,
    "debug": """
        deterministic deterministic_warn_only moe_force_load_balance seed
    """,
    "experimental": """
        custom_args_module custom_import
    """,
    "fault_tolerance": """
        enable fragment_sync_delay fragment_update_alpha group_size min_replica_size
        process_group process_group_timeout_ms replica_id semi_sync_method should_quantize
        sync_steps
    """,
    "float8": """
        emulate enable_fsdp_float8_all_gather filter_fqns force_recompute_fp8_weight_in_bwd
        precompute_float8_dynamic_scale_for_fsdp recipe_name
    """,
    "job": """
        config_file custom_config_module description dump_folder print_args print_config
        save_config_file use_for_integration_test
    """,
    "lr_scheduler": """
        decay_ratio decay_type lr_min min_lr_factor total_steps warmup_steps
    """,
    "memory_estimation": """
        disable_fake_mode enable enabled
    """,
    "metrics": """
        disable_color_printing enable_tensorboard enable_wandb log_freq save_for_all_ranks
        save_tb_folder
    """,
    "model": """
        converters flavor hf_assets_path name print_after_conversion tokenizer_path
    """,
    "mx": """
        filter_fqns recipe_name use_fp8_dim1_cast_triton_kernel
    """,
    "optimizer": """
        beta1 beta2 early_step_in_backward eps implementation lr name weight_decay
    """,
    "parallelism": """
        context_parallel_degree context_parallel_load_balancer context_parallel_rotate_method
        data_parallel_replicate_degree data_parallel_shard_degree disable_loss_parallel
        enable_async_tensor_parallel enable_compiled_autograd expert_parallel_comm_backend
        expert_parallel_degree expert_tensor_parallel_degree fsdp_reshard_after_forward
        module_fqns_per_model_part pipeline_parallel_degree
        pipeline_parallel_expert_parallel_overlap pipeline_parallel_first_stage_less_layers
        pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage
        pipeline_parallel_microbatch_size pipeline_parallel_schedule
        pipeline_parallel_schedule_csv pipeline_parallel_split_points tensor_parallel_degree
    """,
    "profiling": """
        enable_memory_snapshot enable_profiling profile_freq profiler_active profiler_warmup
        save_memory_snapshot_folder save_traces_folder
    """,
    "quantize.grouped_mm.float8": """
        fqns
    """,
    "quantize.grouped_mm.mx": """
        fqns recipe_name
    """,
    "quantize.linear.float8": """
        emulate enable_fsdp_float8_all_gather filter_fqns
        precompute_float8_dynamic_scale_for_fsdp recipe_name
    """,
    "quantize.linear.mx": """
        filter_fqns mxfp8_dim1_cast_kernel_choice recipe_name
    """,
    "training": """
        compile dataset dataset_path debug_moe_force_load_balance deterministic dtype
        enable_cpu_offload gc_debug gc_freq global_batch_size local_batch_size max_norm
        mixed_precision_param mixed_precision_reduce seed seq_len steps
    """,
    "training.dataloader": """
        num_workers persistent_workers pin_memory prefetch_factor
    """,
    "validation.dataloader": """
        num_workers persistent_workers pin_memory prefetch_factor
    """,
    "validation": """
        dataset dataset_path enable freq local_batch_size seq_len steps
    """,
}
