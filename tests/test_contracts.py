"""What titan_ext leans on in torch and TorchTitan beyond their public functions, by name.

A release that changes one of these fails the test that names it, before anything breaks quietly.
"""

import dataclasses
import functools
import inspect
from typing import Any, cast

import pytest
import torch
import torch.nn as nn
import torchtitan.distributed.compile
import torchtitan.trainer
from torch import _utils
from torch._functorch import partitioners
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx, custom_graph_pass
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common, _fsdp_init
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
    FSDPParamGroup,
    RegisterPostBackwardFunction,
)
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.fx import traceback as fx_traceback
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry
from torchao.quantization import NF4Tensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed import fsdp as titan_fsdp
from torchtitan.distributed import full_dtensor
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common import token_dispatcher
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.moe import MoE, RoutedExperts
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention
from torchtitan.models.deepseek_v3.mtp import MTPTransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module as TitanModule

from titan_ext.activation_checkpoint.presets import make_plan
from titan_ext.debug import recorder
from titan_ext.fsdp import shard, units


def _parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_fsdp2_mesh_info_and_placement():
    assert _parameters(_fsdp_init._get_mesh_info) == ["mesh", "dp_mesh_dims"]
    assert [f.name for f in dataclasses.fields(_fsdp_common.ShardPlacementResult)] == [
        "placement",
        "mesh_info",
    ]
    assert _fsdp_common.FSDPMeshInfo
    assert [f.name for f in dataclasses.fields(DataParallelMeshDims)] == ["shard", "replicate"]


def test_fsdp2_uses_premul_sum_for_a_divide_factor_unless_told_not_to():
    """no_accelerator.reduce_without_premul_sum: gloo has no PREMUL_SUM."""
    source = inspect.getsource(_fsdp_collectives._get_gradient_divide_factors)
    assert "force_sum_reduction_for_comms" in source
    assert "PreMulSum" in source or "PREMUL_SUM" in source
    assert FSDPModule.set_force_sum_reduction_for_comms


def test_fsdp2_does_not_reshard_in_a_recompute():
    """Why activation checkpointing around sub-module units gathers nothing twice."""
    assert "is_bw()" in inspect.getsource(FSDPParamGroup.post_forward)


def test_fsdp2_names_used_by_the_collective_trace():
    assert {"unshard", "post_backward"} <= set(dir(FSDPParamGroup))
    assert "_module_fqn" in inspect.getsource(FSDPParamGroup.__init__)


def test_fsdp2_reduces_through_a_class_that_the_matrix_replaces():
    assert _parameters(_fsdp_collectives.DefaultReduceScatter.__call__) == [
        "self",
        "output_tensor",
        "input_tensor",
        "group",
        "op",
        "async_op",
    ]


def test_torch_tells_hooks_of_a_process_group_what_the_collective_recorder_reads():
    """debug.recorder; in torch.distributed's stub, for C++ says nothing to inspect."""
    assert {"register_pre_hook", "unregister_pre_hook"} <= set(dir(ProcessGroup))
    fields = {"name", "input_tensors", "output_tensors", "root"}
    assert fields <= set(dir(torch._C._distributed_c10d.PreHookArgs))
    assert distributed_c10d._world.pg_map is distributed_c10d._pg_map


def test_torch_frames_and_ops_that_the_collective_recorder_knows():
    for code in (*recorder._UNIT_METHODS, recorder._MODULE_CALL):
        assert code.co_varnames[0] == "self"
    assert torch._C._current_graph_task_id() == -1
    assert TorchDispatchMode.ignore_compile_internals() is False
    for op in ("c10d::alltoall_base_", "_c10d_functional::all_to_all_single"):
        (schema,) = torch._C._jit_get_schemas_for_operator(op)
        arguments = {argument.name for argument in schema.arguments}
        assert {"input_split_sizes", "output_split_sizes"} <= arguments


def test_titan_saves_every_step_when_its_interval_is_one():
    """guards.stop sets CheckpointManager.interval; guards.finite repeats when Titan saves."""
    source = inspect.getsource(CheckpointManager._should_save)
    assert "curr_step % self.interval == 0" in source
    assert "curr_step == 1 and self.enable_first_step_checkpoint" in source


def test_titan_trains_in_the_order_that_stopping_relies_on():
    source = inspect.getsource(torchtitan.trainer.Trainer.train)
    order = ["while self.should_continue_training()", "self.train_step(", "self.checkpointer.save("]
    places = [source.index(call) for call in order]
    assert places == sorted(places)


def test_ours_takes_what_titans_fsdp_function_takes():
    titan = _parameters(titan_fsdp.apply_fsdp_to_decoder)
    assert _parameters(shard.apply_fsdp_to_decoder) == [
        *titan,
        "wrap",
        "reshard_groups",
        "prefetch",
        "prefetch_backward",
        "keep_replicated",
        "frozen_nf4",
        "ignored",
    ]


def test_titan_resolves_spmd_meshes():
    assert _parameters(full_dtensor.resolve_fsdp_mesh) == ["parallel_dims"]
    assert _parameters(full_dtensor.resolve_sparse_fsdp_mesh) == ["parallel_dims"]


def test_titan_calls_a_parallelize_function_with_these():
    source = inspect.getsource(torchtitan.trainer.Trainer.__init__)
    call = source[source.index("model_spec.parallelize_fn(") :]
    call = call[: call.index("\n                    )")]
    for keyword in (
        "parallel_dims",
        "training",
        "parallelism",
        "compile_config",
        "ac_config",
        "dump_folder",
    ):
        assert f"{keyword}=" in call


def test_titan_model_spec_fields():
    assert [f.name for f in dataclasses.fields(ModelSpec)] == [
        "name",
        "flavor",
        "model",
        "parallelize_fn",
        "pipelining_fn",
        "post_optimizer_build_fn",
        "state_dict_adapter",
    ]


def test_titan_compiles_the_children_of_layers():
    """compile._UnitsAsLayers shows it the modules of the units under that name."""
    source = inspect.getsource(torchtitan.distributed.compile.apply_compile)
    assert "model.layers.named_children()" in source


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("_token_count_exchange", ["self", "num_local_tokens_per_expert_E", "pg", "ep_size"]),
        (
            "_dispatch_token_exchange",
            ["self", "routed_input_ND", "pg", "output_splits", "input_splits"],
        ),
        (
            "_combine_token_exchange",
            ["self", "routed_output_RD", "pg", "input_splits", "output_splits"],
        ),
    ],
)
def test_titan_dispatcher_exchanges(method: str, parameters: list[str]):
    stock = token_dispatcher.AllToAllTokenDispatcher
    assert _parameters(getattr(stock, method)) == parameters
    assert f"self.{method}(" in inspect.getsource(stock)


def test_torch_partitioner_seam():
    """activation_checkpoint.partition: who calls it, with what, and what it calls."""
    assert torch._inductor.config.custom_partitioner_fn is None
    source = inspect.getsource(compile_fx.partition_fn)
    assert "config.custom_partitioner_fn(" in source
    assert _parameters(partitioners.min_cut_rematerialization_partition) == [
        "joint_module",
        "_joint_inputs",
        "compiler",
        "num_fwd_outputs",
        "static_lifetime_input_indices",
    ]
    assert custom_graph_pass.CustomPartitionerFn.__abstractmethods__ == {"__call__", "uuid"}


def test_torch_compile_takes_a_checkpoint_policy_literally():
    """PREFER_SAVE, which we read as float8, reaches the partitioner and means nothing to it."""
    source = inspect.getsource(torch_checkpoint._CachingTorchDispatchMode.__torch_dispatch__)
    assert 'node.meta["recompute"] = policy' in source
    assert "PREFER_SAVE" not in inspect.getsource(partitioners)
    assert "== CheckpointPolicy.MUST_SAVE" in inspect.getsource(partitioners.solve_min_cut)


def test_torch_traces_with_module_ids_and_one_fake_tensor_for_a_parameter():
    """activation_checkpoint.traced_sites names operations by them."""
    seen = {}
    linear = torch.nn.Linear(4, 4)

    def policy(ctx, func, *args, **kwargs):
        mode = detect_fake_mode()
        assert mode is not None
        keys = set(fx_traceback.get_current_meta()["nn_module_stack"])
        stands_in = mode.from_tensor(linear.weight)
        again = mode.from_tensor(linear.weight)
        seen[str(func)] = str(id(linear)) in keys and stands_in is again
        return torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    def context_fn():
        return torch_checkpoint.create_selective_checkpoint_contexts(policy)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x):
        return torch_checkpoint.checkpoint(linear, x, use_reentrant=False, context_fn=context_fn)

    run(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert seen["aten.addmm.default"]


def test_titan_policies_wrap_a_module_in_a_checkpoint_function():
    """activation_checkpoint.units puts the function of Titan's wrapper inside compiled modules."""
    assert _parameters(SelectiveAC._wrap_block) == ["self", "module", "base_fqn"]
    module = torch.nn.Linear(4, 4)
    config = SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=[])
    wrapper = cast(Any, SelectiveAC(config)._wrap_block(module))
    x = torch.randn(2, 4)
    assert torch.equal(wrapper.checkpoint_fn(module.forward, x), module(x))
    assert "forward" not in vars(module)


def test_titan_mtp_block_children():
    """fsdp.units knows them by name."""
    children = {f.name for f in dataclasses.fields(MTPTransformerBlock.Config)}
    known = {*units._ATTENTION_CHILDREN, *units._FFN_CHILDREN}
    assert {"enorm", "hnorm", "eh_proj", "mtp_norm", "attention", "moe"} <= children & known


def test_titan_leaves_the_mfu_out_for_quantised_models():
    """trainer.Trainer: the one switch for 'no MFU'."""
    source = inspect.getsource(MetricsProcessor.log)
    assert "if self.has_quantization:\n            mfu = None" in source


def test_titan_data_set_registry():
    assert all(isinstance(config, DatasetConfig) for config in DATASETS.values())
    assert [f.name for f in dataclasses.fields(DatasetConfig)] == [
        "path",
        "loader",
        "sample_processor",
    ]


def test_torch_sees_no_accelerator_the_way_titan_asks():
    assert _utils._get_available_device_type() is None or torch.accelerator.is_available()


def test_fsdp2_names_used_by_the_memory_tracker():
    """fsdp.tracker reads storages through them, and gives each group its own communication."""
    group = inspect.getsource(FSDPParamGroup.__init__)
    for name in ("fsdp_params", "_all_gather_comm", "_reduce_scatter_comm", "_all_gather_result"):
        assert f"self.{name}" in group
    assert isinstance(FSDPParamGroup.is_unsharded, property)
    param = inspect.getsource(FSDPParam)
    for name in (
        "all_gather_outputs",
        "_unsharded_inner_tensors",
        "_sharded_post_forward_param_data",
        "padded_sharded_param_size",
        "param_dtype",
        "orig_dtype",
    ):
        assert f"self.{name}" in param
    assert "shard_mesh_size" in inspect.getsource(_fsdp_common.FSDPMeshInfo)
    assert RegisterPostBackwardFunction.__name__ == "RegisterPostBackwardFunction"


def test_fsdp2_names_the_places_of_its_parameters():
    """late_parameters: which attribute of which module FSDP2 swaps, tied parameters too."""
    assert {"module", "param_name", "shared_modules", "shared_param_names"} <= {
        f.name for f in dataclasses.fields(ParamModuleInfo)
    }
    param = inspect.getsource(FSDPParam.__init__)
    assert "self._module_info: ParamModuleInfo = module_info" in param
    assert "self.fsdp_params" in inspect.getsource(FSDPParamGroup.__init__)
    assert "self._fsdp_param_groups" in inspect.getsource(FSDPState.__init__)
    assert FSDPModule._get_fsdp_state


def test_fsdp2_custom_communication_is_one_attribute_of_a_group():
    """fsdp.tracker sets it for the groups of a unit apart; the public setters refuse two."""
    for method, attribute in (
        (FSDPModule.set_custom_all_gather, "_all_gather_comm"),
        (FSDPModule.set_custom_reduce_scatter, "_reduce_scatter_comm"),
    ):
        source = inspect.getsource(method)
        assert f"fsdp_param_group.{attribute} = comm" in source
        assert "len(state._fsdp_param_groups) > 1" in source


def test_fsdp2_allocates_a_reduce_scatter_input_before_its_output():
    """fsdp.tracker tells them apart by that."""
    source = inspect.getsource(_fsdp_collectives.foreach_reduce)
    assert source.count("reduce_scatter_comm.allocate(") == 2
    first, second = (
        source.index(f"{name} = reduce_scatter_comm.allocate(")
        for name in ("reduce_scatter_input", "reduce_output")
    )
    assert first < second


def test_titan_logs_metrics_through_a_public_logger():
    """fsdp.memory_log adds its own."""
    assert "self.logger.log(metrics, step)" in inspect.getsource(MetricsProcessor.log_validation)


def test_titan_selective_checkpointing_shows_its_policy():
    """activation_checkpoint.presets asks it what stock would save."""
    block = nn.Sequential(nn.Linear(4, 4))
    policy = SelectiveAC(SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=[]))
    wrapper = policy._wrap_block(block, base_fqn="layers.0")
    assert isinstance(wrapper, CheckpointWrapper)
    forward, _ = wrapper.checkpoint_fn.keywords["context_fn"]()
    context = SelectiveCheckpointContext(is_recompute=False, op_output=None)
    x, w = torch.zeros(2, 4), torch.zeros(4, 4)
    answers = [forward.policy_fn(context, torch.ops.aten.mm.default, x, w) for _ in range(2)]
    assert answers == [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE]
    plan = make_plan(
        block,
        "layers.0",
        mode="selective",
        preset="stock",
        attention="auto",
        user_rules=(),
        exempt=lambda module: False,
    )
    assert plan.stock_policy() is not plan.stock_policy(), "counts start anew in each forward"


def test_torch_gives_saved_outputs_to_the_hooks_around_a_checkpoint():
    """activation_checkpoint.blocks: the input first, then each output that the policy saves."""
    seen: list[tuple[int, ...]] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return x.detach()

    def policy(ctx, func, *args, **kwargs) -> CheckpointPolicy:
        assert not ctx.is_recompute
        assert ctx.op_output is not None
        saves = func is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = checkpoint(
            lambda x: torch.mm(x, w).sin(),
            x,
            use_reentrant=False,
            respect_saved_tensors_hooks=True,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
    y.sum().backward()
    assert seen == [(2, 3), (2, 5)]


def test_titan_halves_the_token_counts_of_checkpointed_blocks():
    """uncheckpointed.UncheckpointedBlock has no ``checkpoint_impl`` and so is not halved."""
    source = inspect.getsource(register_moe_load_balancing_hook)
    assert 'getattr(module, "checkpoint_impl", None) is CheckpointImpl.NO_REENTRANT' in source


def test_titan_names_that_presets_go_by():
    assert {"inner_experts", "token_dispatcher"} <= {
        f.name for f in dataclasses.fields(RoutedExperts.Config)
    }
    assert {"routed_experts", "router", "shared_experts"} <= {
        f.name for f in dataclasses.fields(MoE.Config)
    }
    latent = {f.name for f in dataclasses.fields(LatentAttention.Config)}
    assert {"wq", "wq_a", "wq_b", "wkv_a", "wkv_b", "wo", "inner_attention"} <= latent
    assert {"qkv_linear", "wo", "inner_attention"} <= {
        f.name for f in dataclasses.fields(GQAttention.Config)
    }


def test_torch_has_no_flop_formula_for_grouped_gemms():
    """activation_checkpoint.receipts counts them itself."""
    assert torch.ops.aten._grouped_mm not in flop_registry


def test_torch_tells_a_backward_and_can_leave_a_checkpoints_mode():
    """fsdp.prefetch asks whether a forward is a recompute, and gathers out of its sight."""
    assert torch._C._current_graph_task_id() == -1
    seen: list[tuple[bool, Any]] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        mode = _get_current_dispatch_mode()
        seen.append((torch._C._current_graph_task_id() != -1, type(mode)))
        if torch._C._current_graph_task_id() != -1:
            with _pop_mode_temporarily():
                torch.ones(1)  # an operation that the forward did not have
        return x.sin().sin()

    contexts = functools.partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE
    )
    x = torch.ones(2, requires_grad=True)
    checkpoint(body, x, use_reentrant=False, context_fn=contexts).sum().backward()
    in_forward, in_recompute = seen
    assert not in_forward[0]
    assert in_recompute == (True, torch_checkpoint._CachedTorchDispatchMode)


def test_torch_replicates_modules_inside_of_sharded_ones():
    """fsdp.replicated: a state of FSDP2's own, that fully_shard leaves alone, on one axis."""
    assert issubclass(replicate_with_fsdp.ReplicateModule, FSDPModule)
    assert issubclass(replicate_with_fsdp._ReplicateState, FSDPState)
    assert {"mesh", "mp_policy", "offload_policy", "ignored_params"} <= set(
        _parameters(replicate_with_fsdp.replicate)
    )
    assert "mesh.ndim != 1" in inspect.getsource(replicate_with_fsdp._validate_mesh)
    assert '"replicate" not in registry' in inspect.getsource(_fsdp_common._is_composable_with_fsdp)
    # Why the head cannot be kept: the chunked loss calls it.
    assert "isinstance(fsdp_param_group.mesh_info, FSDPMeshInfo)" in inspect.getsource(
        FSDPModule.set_reshard_after_forward
    )


def test_fsdp2_takes_new_units_until_the_model_runs():
    """fsdp.late: the first forward finds every unit, whenever it was made."""
    assert "root_module.named_modules()" in inspect.getsource(FSDPState._lazy_init)
    assert "self._is_root: bool | None = None" in inspect.getsource(FSDPState.__init__)
    assert nn.Linear(1, 1)._compiled_call_impl is None
    assert TitanModule._parallelized is False
    assert TitanModule._sharding_config is None


def test_fsdp2_takes_a_quantized_shard_at_the_first_forward():
    """fsdp.quantized: a parameter swapped before it; the freed one is not compared with NF4."""
    lazy_init = inspect.getsource(FSDPParamGroup.lazy_init)
    assert "fsdp_param.reset_sharded_param()" in lazy_init
    assert "fsdp_param._init_extensions()" in lazy_init
    reset = " ".join(inspect.getsource(FSDPParam.reset_sharded_param).split())
    assert "self._sharded_param_data.untyped_storage().data_ptr() > 0 and" in reset
    assert "fsdp_param.all_gather_inputs[0]" in inspect.getsource(FSDPParamGroup.wait_for_unshard)
    for method in ("fsdp_pre_all_gather", "fsdp_post_all_gather", "get_original_weight"):
        assert hasattr(NF4Tensor, method)


def test_titan_checkpointer_replaces_tensors_of_another_dtype():
    """fsdp.quantized gives it the dequantised weight; the old one has no storage any more."""
    assert "or cached.dtype != value.dtype" in inspect.getsource(ModelWrapper.state_dict)
