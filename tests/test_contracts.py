"""What titan_ext leans on in torch and TorchTitan beyond their public functions, by name.

A release that changes one of these fails the test that names it, before anything breaks quietly.
"""

import dataclasses
import inspect

import pytest
import torch
import torchtitan.distributed.compile
import torchtitan.trainer
from torch import _utils
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common, _fsdp_init
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import fsdp as titan_fsdp
from torchtitan.distributed import full_dtensor
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common import token_dispatcher
from torchtitan.models.deepseek_v3.mtp import MTPTransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

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
    """stop.StopOnSignal sets CheckpointManager.interval; finite.py repeats when Titan saves."""
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
    assert _parameters(shard.apply_fsdp_to_decoder) == [*titan, "wrap"]


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
