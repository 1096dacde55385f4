"""What titan_ext leans on in torch and TorchTitan beyond their public functions, by name.

A release that changes one of these fails the test that names it, before anything breaks quietly.
"""

import ast
import dataclasses
import functools
import inspect
import logging
import textwrap
from types import SimpleNamespace
from typing import Any, cast, get_args
from unittest.mock import MagicMock

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn as nn
import torchtitan.distributed.compile
import torchtitan.trainer
import tyro
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from torch import _utils, overrides
from torch._C._distributed_c10d import _get_work_registry_size
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import partitioners
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx, custom_graph_pass
from torch.distributed import ProcessGroup, _functional_collectives, distributed_c10d
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_common,
    _fsdp_init,
    _fsdp_state,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
    FSDPParamGroup,
)
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.pipelining import stage as pipeline_stage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _ComputationType,
    get_schedule_class,
)
from torch.distributed.tensor import Replicate
from torch.fx import traceback as fx_traceback
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch
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
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
from torchao.prototype.moe_training.config import Float8TrainingOpConfig
from torchao.prototype.moe_training.tensor import Float8TrainingWeightWrapperTensor
from torchao.quantization import NF4Tensor
from torchdata.stateful_dataloader import worker as torchdata_worker
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.optimizer import register_moe_load_balancing_hook
from torchtitan.components.quantization import float8 as titan_float8
from torchtitan.components.validate import Validator
from torchtitan.config import ConfigManager
from torchtitan.distributed import fsdp as titan_fsdp
from torchtitan.distributed import full_dtensor, spmd_types
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.flex_shard import build_dist_muon, dist_muon
from torchtitan.experiments import _supported_experiments
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.interleaved import InterleavedDataset
from torchtitan.hf_datasets.text_datasets import DATASETS, ChatDataset, HuggingFaceTextDataset
from torchtitan.models import _supported_models
from torchtitan.models.common import token_dispatcher
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE, RoutedExperts
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention
from torchtitan.models.deepseek_v3.mtp import MTPTransformerBlock
from torchtitan.models.utils import MoEStateDictAdapter
from torchtitan.observability.structured_logger import jsonl_handler, structured_logging
from torchtitan.ops.scatter_add import deterministic_scatter_add
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module as TitanModule

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.components import optim
from titan_ext.components.float8_linears import GatheredWeight
from titan_ext.config_registry.terminal import _NOISE
from titan_ext.debug import watchdog
from titan_ext.fsdp import units
from titan_ext.fsdp.resolve import copies_out_directly
from titan_ext.parallelize import limits
from titan_ext.plan import live as memory_plan
from titan_ext.run import start


def _parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def _unparsed(piece: str) -> str:
    (statement,) = ast.parse(piece).body
    return ast.unparse(statement.value if isinstance(statement, ast.Expr) else statement)


def _is_name(node: ast.expr, name: str = "model") -> bool:
    return isinstance(node, ast.Name) and node.id == name


class _Code:
    """What a function or a class says, however it is laid out and whatever its comments."""

    def __init__(self, subject: Any) -> None:
        tree = ast.parse(textwrap.dedent(inspect.getsource(subject)))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)]
        nodes.sort(key=lambda node: (node.lineno, node.col_offset))
        self._pieces = [ast.unparse(node) for node in nodes]
        self._calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]

    def has(self, *pieces: str) -> bool:
        """Whether each piece is in it; an ``if`` or a loop may go on after its piece."""
        wanted = [_unparsed(piece) for piece in pieces]
        return all(
            any(each == piece or each.startswith(f"{piece}\n") for each in self._pieces)
            for piece in wanted
        )

    def calls(self, name: str) -> int:
        """How many times it calls ``name``."""
        return self._calls.count(name)

    def place(self, piece: str) -> int:
        """The place of the first such piece, to compare with others."""
        return self._pieces.index(_unparsed(piece))


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
    divide_factors = _Code(_fsdp_collectives._get_gradient_divide_factors)
    assert divide_factors.has("force_sum_reduction_for_comms")
    assert divide_factors.calls("ReduceOp.PREMUL_SUM")
    assert FSDPModule.set_force_sum_reduction_for_comms


def test_fsdp2_does_not_reshard_in_a_recompute():
    """Why activation checkpointing around sub-module units gathers nothing twice."""
    assert _Code(FSDPParamGroup.post_forward).calls("is_bw")


def test_fsdp2_keeps_of_a_forward_what_halves_of_a_batch_have_of_their_own():
    """components.overlap swaps these at a pause. B begins where its groups are in the forward."""
    state, group = _Code(FSDPState), _Code(FSDPParamGroup.pre_forward)
    assert state.has("self._training_state: TrainingState = TrainingState.IDLE")
    assert state.has("self._modules_to_run_forward: set[nn.Module] = set()")
    assert state.has("self._fsdp_param_groups: list[FSDPParamGroup] = []")
    assert state.has("state_first_in_pass = self._training_state != TrainingState.FORWARD")
    hooks = _Code(_fsdp_state._register_group_forward_hooks)
    assert hooks.has("modules_to_run.update(modules_set)")  # the set itself, which stays
    assert group.has("entering_forward_pass = self._training_state != TrainingState.FORWARD")
    registers = "args, kwargs = self._register_post_backward_hook(args, kwargs)"
    assert group.has(registers)
    assert group.place("if entering_forward_pass:\n    " + registers) < group.place(registers)
    reshards = inspect.getattr_static(FSDPParamGroup, "_reshard_after_forward")
    assert _Code(reshards.fget).has("return self.post_forward_mesh_info is not None")


def test_torch_runs_a_modules_compiled_call_in_place_of_its_hooks_and_forward():
    """components.overlap: those that have run return what they returned."""
    call = _Code(nn.Module._wrapped_call_impl)
    assert call.has("return self._compiled_call_impl(*args, **kwargs)")
    assert call.has("return self._call_impl(*args, **kwargs)")
    assert nn.Module._compiled_call_impl is None
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


def test_torch_and_titan_keep_contexts_in_these_stacks_of_a_thread():
    """base.thread_state reads and writes them."""
    modes = (overrides._get_current_function_mode_stack, overrides._push_mode, overrides._pop_mode)
    assert [_parameters(function) for function in modes] == [[], ["mode"], []]
    assert _parameters(_python_dispatch._push_mode) == ["mode"]
    assert not _python_dispatch._get_current_dispatch_mode_stack()
    hooks = torch._C._autograd
    assert hooks._top_saved_tensors_default_hooks(True) is None
    with torch.autograd.graph.saved_tensors_hooks(torch.neg, torch.neg):
        assert hooks._top_saved_tensors_default_hooks(True) == (torch.neg, torch.neg)
        hooks._pop_saved_tensors_default_hooks()
        hooks._push_saved_tensors_default_hooks(torch.neg, torch.neg)
    assert _Code(spmd_types.set_current_spmd_mesh).has("stack = _spmd_mesh_stack()")
    assert _Code(spmd._state._push_mesh).calls("_tls.mesh_stack.append") == 1
    assert _Code(spmd._state._pop_mesh).has("return _tls.mesh_stack.pop()")


def test_fsdp2_names_used_by_the_collective_trace():
    assert {"unshard", "post_backward"} <= set(dir(FSDPParamGroup))
    assert _Code(FSDPParamGroup.__init__).has("self._module_fqn")


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
    """debug.watchdog; in torch.distributed's stub, for C++ says nothing to inspect."""
    assert {"register_pre_hook", "unregister_pre_hook"} <= set(dir(ProcessGroup))
    fields = {"name", "input_tensors", "output_tensors", "root"}
    assert fields <= set(dir(torch._C._distributed_c10d.PreHookArgs))
    assert distributed_c10d._world.pg_map is distributed_c10d._pg_map


def test_torch_frames_and_ops_that_the_collective_recorder_knows():
    for code in (*watchdog._UNIT_METHODS, watchdog._MODULE_CALL):
        assert code.co_varnames[0] == "self"
    assert torch._C._current_graph_task_id() == -1
    for code in watchdog._SPLIT_FUNCTIONS:
        assert {"input_split_sizes", "output_split_sizes"} <= set(code.co_varnames)
    assert _Code(_functional_collectives.all_to_all_single_backward).has(
        "torch.ops._c10d_functional.all_to_all_single("
        "grad_output.contiguous(), input_split_sizes, output_split_sizes, group_name)"
    )


@pytest.mark.skipif(not copies_out_directly(), reason="torch 2.14 has no such function")
def test_torch_copies_gathered_parameters_out_with_a_function_of_the_group():
    """fsdp.collectives sets it; torch has no public way to."""
    assert _Code(FSDPParamGroup.__init__).has(
        "self._all_gather_output_fn: Callable = _default_all_gather_output_fn"
    )
    assert _Code(FSDPParamGroup.wait_for_unshard).has(
        "foreach_all_gather_copy_out(self._all_gather_result, self.fsdp_params, "
        "self._all_gather_process_group, all_gather_output_fn=self._all_gather_output_fn)"
    )
    default = _fsdp_collectives._default_all_gather_output_fn  # pyrefly: ignore
    assert list(inspect.signature(default).parameters) == [
        "fsdp_params",
        "all_gather_result",
        "world_size",
    ]
    assert _fsdp_collectives.AllGatherResult._fields == (
        "all_gather_output",
        "all_gather_event",
        "all_gather_work",
        "param_all_gather_input_dtypes",
        "param_all_gather_input_numels",
        "all_gather_input_split_sizes",
    )
    copies = _Code(_fsdp_collectives._reassemble_all_gather_outputs)  # pyrefly: ignore
    assert copies.has("torch.cat(chunks, dim=shard_dim, out=cat_out)")


def test_titan_saves_every_step_when_its_interval_is_one():
    """run.stop sets CheckpointManager.interval; run.checkpoints repeats when Titan saves."""
    assert _Code(CheckpointManager._should_save).has(
        "curr_step % self.interval == 0",
        "curr_step == 1 and self.enable_first_step_checkpoint",
    )


def test_fsdp_gathers_from_tensors_of_its_own():
    """fsdp.reads swaps the class of shards."""
    assert _Code(FSDPParam.all_gather_inputs.fget).has("self._sharded_local_tensor")
    assert _Code(FSDPParam.to_sharded).has("self._setattr_on_modules(self.sharded_param)")
    assert _Code(FSDPParam.to_sharded_post_forward).has("self._sharded_post_forward_param")
    assert isinstance(FSDPParamGroup._use_post_forward_mesh, property)
    assert _Code(FSDPState._init_fqns).has("param_to_fsdp_param[param]._param_fqn = param_name")


def test_torch_names_process_groups_by_the_number_made():
    """fsdp.mesh and components.rows make equally many on all ranks; a dry run compares them."""
    assert _Code(distributed_c10d._process_group_name).has("str(_world.group_count)")
    assert _Code(distributed_c10d.get_pg_count).has("_world.group_count")


def test_titan_purges_after_each_save_that_is_not_the_last():
    """run.checkpoints overrides both, and takes the paths that are deleted from this queue."""
    save = _Code(CheckpointManager._save)
    assert save.has("self._purge_stale_checkpoints()", "self._should_save(curr_step, last_step)")
    assert _Code(CheckpointManager._should_purge).has("dist.get_rank() == 0")
    assert _Code(CheckpointManager._purge_stale_checkpoints).has("self.purge_queue.put(path)")


def test_titan_checkpoint_names_that_are_checked_before_loading():
    """run.checkpoints looks for these in a checkpoint, and repeats what Titan would load."""
    find = _Code(CheckpointManager._find_load_step)
    assert find.has("'.metadata'", "'model.safetensors.index.json'")
    assert _Code(ParallelAwareDataloader.__init__).has('f"dp_rank_{dp_rank}"')
    names = (DATALOADER, LR_SCHEDULER, OPTIMIZER, "train_state")
    assert names == ("dataloader", "lr_scheduler", "optimizer", "train_state")
    assert _Code(torchtitan.trainer.Trainer.__init__).has('{"train_state": self}')


def test_titan_exports_through_the_adapter_and_the_model_states_of_the_checkpointer():
    """hf_export does the same before training, and completes the mapping; checkpoints overrides."""
    assert _Code(CheckpointManager).has(
        "states = self.states[MODEL].state_dict()",
        "state_dict = self.sd_adapter.to_hf(state_dict)",
        "fqn_to_index_mapping = self.sd_adapter.fqn_to_index_mapping",
        "self._save_last_step(curr_step)",
        "os.path.join(checkpoint_id, 'sharded')",
    )
    assert _Code(CheckpointManager._save_last_step).has("self.last_save_in_hf")
    assert MODEL == "model"


def test_torch_pairs_weights_and_scales_by_these_names():
    """run.weights looks for the same in a folder, and for what torch takes for granted."""
    pairs = _Code(QuantizedHuggingFaceStorageReader._build_weight_scale_mapping)
    assert pairs.has("'.weight_scale_inv'", "'_scales'", "'_blocks'")
    assert QuantizedHuggingFaceStorageReader("", block_size=64).block_size == 64
    assert _Code(HuggingFaceStorageReader.read_metadata).has("self.fs.ls(self.path)")


def test_titan_adapter_fails_on_an_axis_that_replicates():
    """Why there is a components.hf_export. When this fails, look whether it is still needed."""
    calculate = _Code(MoEStateDictAdapter._caculate_indices_from_placements)
    assert calculate.has("placement = dtensor_placements[i]", "placement.dim == dim")
    assert not calculate.has("isinstance(placement, Shard)")
    assert not hasattr(Replicate(), "dim")


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_a_store_does_what_ranks_agree_by(kind: str):
    """base.agreement: a word is set once, and raised only from what was read."""
    tcp = kind == "tcp"
    plain = dist.TCPStore("127.0.0.1", 0, is_master=True) if tcp else dist.HashStore()
    store: Any = dist.PrefixStore("subject", plain)
    assert not store.check(["word"])
    assert store.compare_set("word", "", "7") == b"7"
    assert store.compare_set("word", "", "8") == b"7"
    assert store.compare_set("word", "7", "9") == b"9"
    store.append("list", "1 ")
    store.append("list", "2 ")
    assert store.get("list") == b"1 2 "
    assert (store.add("count", 1), store.add("count", 1), store.add("count", 0)) == (1, 2, 2)
    assert store.check(["word"])
    assert not dist.PrefixStore("other", plain).check(["word"])


def test_torch_keeps_the_store_of_the_default_group(one_rank: None):
    """base.agreement takes it."""
    store = distributed_c10d._get_default_store()
    assert isinstance(store, dist.Store)
    store.set("titan_ext", "here")
    assert store.get("titan_ext") == b"here"


def test_titan_trains_in_the_order_that_stopping_relies_on():
    train = _Code(torchtitan.trainer.Trainer.train)
    order = ["self.should_continue_training()", "self.train_step", "self.checkpointer.save"]
    places = [train.place(call) for call in order]
    assert places == sorted(places)


def test_titan_shards_a_vision_tower_with_these():
    """fsdp.shard calls it with them."""
    assert _parameters(titan_fsdp.apply_fsdp_to_vision_encoder) == [
        "vision_encoder",
        "dp_mesh",
        "param_dtype",
        "reduce_dtype",
        "reshard_after_forward_policy",
        "pp_enabled",
        "dp_mesh_dims",
    ]


def test_titan_resolves_spmd_meshes():
    assert _parameters(full_dtensor.resolve_fsdp_mesh) == ["parallel_dims"]
    assert _parameters(full_dtensor.resolve_sparse_fsdp_mesh) == ["parallel_dims"]


def test_titan_calls_a_parallelize_function_with_these():
    tree = ast.parse(textwrap.dedent(inspect.getsource(torchtitan.trainer.Trainer.__init__)))
    (call,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "model_spec.parallelize_fn"
    )
    assert {"training", "parallelism", "compile_config", "ac_config", "dump_folder"} | {
        "parallel_dims"
    } <= {keyword.arg for keyword in call.keywords}


def test_torchs_reader_of_archives_lists_records():
    reader = torch._C.PyTorchFileReader
    assert {"get_all_records", "get_record_offset"} <= set(dir(reader))


def test_titan_refuses_cuda_graphs_in_a_method_of_the_config():
    assert "disable_cuda_graphs" in inspect.getsource(
        torchtitan.trainer.Trainer.Config._validate_cuda_graphs
    )


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
    assert _Code(torchtitan.distributed.compile.apply_compile).has("model.layers.named_children()")


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
        ("_unpermute", ["self", "routed_output_RD", "input_shape", "permuted_indices"]),
    ],
)
def test_titan_dispatcher_exchanges(method: str, parameters: list[str]):
    stock = token_dispatcher.AllToAllTokenDispatcher
    assert _parameters(getattr(stock, method)) == parameters
    assert _Code(stock).calls(f"self.{method}")


def test_titan_dispatcher_metadata():
    """dispatch.send_scores and early scores read what ``dispatch`` returns."""
    assert {
        field.name for field in dataclasses.fields(token_dispatcher.AllToAllDispatchMetadata)
    } == {
        *("token_indices_experts_sorted_N", "topk_scores_experts_sorted_N"),
        *("input_shape", "permuted_indices", "input_splits", "output_splits"),
    }


def test_titan_tells_a_model_whose_head_the_chunked_loss_runs():
    """fsdp.prefetch reads it at the first forward; a dry run resets the head as the loss does."""
    assert Decoder._skip_lm_head is False
    building = _Code(torchtitan.trainer.Trainer.__init__)
    assert building.has("self.model_parts[0]._skip_lm_head = True")
    assert building.has("self.loss_fn.set_lm_head(lm_head)")
    loss = _Code(ChunkedLossWrapper.__call__)
    assert loss.has("lm_head.set_reshard_after_forward(True)")


def test_titan_calls_shared_experts_with_the_layers_tokens_after_the_routed_ones():
    """components.overlap runs them earlier, on what the routed ones get."""
    layer = inspect.getsource(MoE.forward)
    calls = [layer.index(f"self.{name}(") for name in ("routed_experts", "shared_experts")]
    assert calls == sorted(calls)
    routed = _Code(RoutedExperts.forward)
    assert routed.has("x_TD = x_BLD.view(T, D)")
    assert routed.has("self.token_dispatcher.combine(routed_output_RD, metadata, x_TD)")
    assert _Code(token_dispatcher.AllToAllTokenDispatcher.combine).calls(
        "self._combine_token_exchange"
    )
    waiting = torch.ones(2)
    assert _functional_collectives.AsyncCollectiveTensor(waiting).elem is waiting


def test_torch_partitioner_seam():
    """activation_checkpoint.partition: who calls it, with what, and what it calls."""
    assert torch._inductor.config.custom_partitioner_fn is None
    assert _Code(compile_fx.partition_fn).calls("config.custom_partitioner_fn")
    assert _parameters(partitioners.min_cut_rematerialization_partition) == [
        "joint_module",
        "_joint_inputs",
        "compiler",
        "num_fwd_outputs",
        "static_lifetime_input_indices",
    ]
    assert custom_graph_pass.CustomPartitionerFn.__abstractmethods__ == {"__call__", "uuid"}


def test_torch_compile_inside_an_operation():
    """fp8.codec: dispatch modes that have seen the operation do not keep it from being compiled."""
    assert torch._dynamo.config.inline_torch_dispatch_torch_compile
    assert callable(torch._dynamo.maybe_mark_dynamic)
    assert issubclass(BackendCompilerFailed, torch._dynamo.exc.TorchDynamoException)


def test_torch_compile_takes_a_checkpoint_policy_literally():
    """PREFER_SAVE, which we read as float8, reaches the partitioner and means nothing to it."""
    dispatch = _Code(torch_checkpoint._CachingTorchDispatchMode.__torch_dispatch__)
    assert dispatch.has('node.meta["recompute"] = policy')
    assert not _Code(partitioners).has("CheckpointPolicy.PREFER_SAVE")
    assert _Code(partitioners.solve_min_cut).has("CheckpointPolicy.MUST_SAVE")


def test_torch_checkpoints_count_operations_in_two_modes():
    """activation_checkpoint.blocks makes them for one block, without what FSDP's hooks run there;
    activation_checkpoint.locator knows these by where they are defined."""
    forward, recompute = (
        torch_checkpoint._CachingTorchDispatchMode,
        torch_checkpoint._CachedTorchDispatchMode,
    )
    assert _parameters(forward.__init__)[:3] == ["self", "policy_fn", "storage"]
    assert _parameters(recompute.__init__)[:3] == ["self", "policy_fn", "storage"]
    for contexts in (forward, recompute):
        assert _Code(torch_checkpoint.create_selective_checkpoint_contexts).has(contexts.__name__)
        assert _parameters(contexts.__torch_dispatch__) == [
            "self",
            "func",
            "types",
            "args",
            "kwargs",
        ]
    for hook in (FSDPState._pre_forward, FSDPState._post_forward):
        assert hook.__module__.startswith("torch.distributed.fsdp.")


def test_torch_traces_with_module_ids_and_one_fake_tensor_for_a_parameter():
    """activation_checkpoint.compiled.locator names operations by them."""
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
    """compile puts the function of Titan's wrapper inside compiled modules."""
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
    assert _Code(MetricsProcessor.log).has("if self.has_quantization:\n    mfu = None")


def test_titan_data_set_registry():
    assert all(isinstance(config, DatasetConfig) for config in DATASETS.values())
    assert [f.name for f in dataclasses.fields(DatasetConfig)] == [
        "path",
        "loader",
        "sample_processor",
    ]


def test_titan_text_that_is_split_among_workers():
    """base.titan.data: the documents of a data set, and those that it shuffles for an epoch."""
    for data in (HuggingFaceTextDataset, ChatDataset):
        assert _Code(data.__init__).has("self._data = self._original_data")
        assert _Code(data.reloop).has("self._original_data.shuffle(seed=42 + self._epoch)")
    assert _Code(InterleavedDataset.__init__).has("self._datasets = list(datasets)")
    loader = ParallelAwareDataloader(cast(Any, []), dp_rank=0, dp_world_size=1)
    assert loader.worker_init_fn is None
    loader.worker_init_fn = print  # torch lets it be set later
    restore = "dataset = try_to_deserialize(dataset, worker_state[_DATASET_STATE])"
    loop = _Code(torchdata_worker._worker_loop)
    assert loop.place("init_fn(worker_id)") < loop.place(restore)


def test_titan_validates_through_what_components_validate_replaces():
    assert _Code(Validator.validate).has(
        "validation_iterator = iter(validation_dataloader)",
        "loss_sum, _ = self.loss_fn(predictions, labels)",
    )
    assert _Code(Validator.validate).calls("self.dl_config.build") == 1


def test_titan_cancels_a_step_whose_data_end_and_saves_nothing():
    """run.trainer: it saves the step before."""
    train = _Code(torchtitan.trainer.Trainer.train)
    assert train.place("self.step += 1") < train.place("self.train_step(data_iterator)")
    assert train.calls("self.checkpointer.save") == 1


def test_torch_sees_no_accelerator_the_way_titan_asks():
    assert _utils._get_available_device_type() is None or torch.accelerator.is_available()


def test_fsdp2_names_of_gathered_parameters():
    """fsdp.collectives copies out into them; run.checks hooks the unsharded twin of each."""
    param = _Code(FSDPParam)
    names = ("all_gather_outputs", "padded_sharded_param_size", "_unsharded_param", "_param_fqn")
    for name in names:
        assert param.has(f"self.{name}")
    assert _Code(_fsdp_common.FSDPMeshInfo).has("self.shard_mesh_size")


def test_fsdp2_names_the_places_of_its_parameters():
    """fsdp.unmanaged: which attribute of which module FSDP2 swaps, tied parameters too."""
    assert {"module", "param_name", "shared_modules", "shared_param_names"} <= {
        f.name for f in dataclasses.fields(ParamModuleInfo)
    }
    assert _Code(FSDPParam.__init__).has("self._module_info: ParamModuleInfo = module_info")
    assert _Code(FSDPParamGroup.__init__).has("self.fsdp_params")
    assert _Code(FSDPState.__init__).has("self._fsdp_param_groups")
    assert FSDPModule._get_fsdp_state


def test_fsdp2_custom_communication_is_one_attribute_of_a_group():
    """fsdp.collectives sets it; the public setters refuse two groups."""
    for method, attribute in (
        (FSDPModule.set_custom_all_gather, "_all_gather_comm"),
        (FSDPModule.set_custom_reduce_scatter, "_reduce_scatter_comm"),
    ):
        setter = _Code(method)
        assert setter.has(f"fsdp_param_group.{attribute} = comm")
        assert setter.has("len(state._fsdp_param_groups) > 1")


def test_fsdp2_separates_reduce_scatters_group_by_group_and_refuses_replicated_ones():
    """fsdp.shard calls it for each sharded group, with one dict of process groups."""
    setter = _Code(FSDPModule.set_separate_reduce_scatter_group)
    assert setter.has("fsdp_param_group._set_separate_reduce_scatter_group(enable, new_groups)")
    separate = FSDPParamGroup._set_separate_reduce_scatter_group
    assert list(inspect.signature(separate).parameters) == ["self", "enable", "new_groups"]
    replicated = SimpleNamespace(mesh_info=object())
    with pytest.raises(AssertionError, match="Expected mesh_info to be FSDPMeshInfo"):
        separate(cast(Any, replicated), True, {})


def test_fsdp2_runs_a_groups_collectives_through_these_calls():
    """fsdp.collectives subclasses them; no handle from one means nothing to wait for."""
    gather = ["self", "output_tensor", "input_tensor", "group", "async_op"]
    assert _parameters(_fsdp_collectives.DefaultAllGather.__call__) == gather
    for default in (_fsdp_collectives.DefaultAllGather, _fsdp_collectives.DefaultReduceScatter):
        assert _parameters(default.allocate) == ["self", "size", "dtype", "device"]
    copy_out = _Code(_fsdp_collectives.foreach_all_gather_copy_out)
    assert copy_out.has("isinstance(all_gather_work, dist.distributed_c10d.Work)")


def test_fsdp2_allocates_a_reduce_scatter_input_before_its_output():
    """fsdp.collectives tells them apart by that."""
    tree = ast.parse(inspect.getsource(_fsdp_collectives.foreach_reduce))
    allocated = [
        (node.lineno, ast.unparse(node.targets[0]))
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "reduce_scatter_comm.allocate"
    ]
    assert [name for _, name in sorted(allocated)] == ["reduce_scatter_input", "reduce_output"]


def test_titan_logs_metrics_through_a_public_logger():
    """run.pace and run.record add theirs."""
    assert _Code(MetricsProcessor.log_validation).has("self.logger.log(metrics, step)")


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
    plan = FP8AC.Config(preset="stock").policies_of(block, "layers.0")
    assert plan.stock_policy() is not plan.stock_policy(), "counts start anew in each forward"


def test_torch_gives_saved_outputs_to_the_hooks_around_a_checkpoint(monkeypatch):
    """activation_checkpoint.blocks: the input first, then each output that the policy saves.

    Of what must be recomputed torch does not look up side effects, which takes long.
    """
    monkeypatch.delattr(torch.utils.checkpoint, "_is_cacheable_effect", raising=False)
    seen: list[tuple[int, ...]] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return x.detach()

    def policy(ctx, func, *args, **kwargs) -> CheckpointPolicy:
        assert not ctx.is_recompute
        assert ctx.op_output is not None
        saves = func is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.MUST_RECOMPUTE

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
    """blocks.NoRecomputeBlock has no ``checkpoint_impl`` and so is not halved."""
    assert _Code(register_moe_load_balancing_hook).has(
        'getattr(module, "checkpoint_impl", None) is CheckpointImpl.NO_REENTRANT'
    )


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
    """activation_checkpoint.memory_report counts them itself."""
    assert torch.ops.aten._grouped_mm not in flop_registry


def test_torch_tells_a_backward_and_can_leave_a_checkpoints_mode():
    """fsdp.prefetch asks whether a forward is a recompute, and gathers out of its sight."""
    assert torch._C._current_graph_task_id() == -1
    seen: list[tuple[bool, Any]] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        mode = _get_current_dispatch_mode()
        seen.append((torch._C._current_graph_task_id() != -1, type(mode)))
        with _pop_mode_temporarily():
            if torch._C._current_graph_task_id() != -1:
                torch.ones(1)  # an operation that the forward did not have
        return x.sin().sin()

    contexts = functools.partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE
    )
    x = torch.ones(2, requires_grad=True)
    checkpoint(body, x, use_reentrant=False, context_fn=contexts).sum().backward()
    in_forward, in_recompute = seen
    assert in_forward == (False, torch_checkpoint._CachingTorchDispatchMode)
    assert in_recompute == (True, torch_checkpoint._CachedTorchDispatchMode)


def test_titan_builds_parameter_groups_where_optim_overrides_it():
    """optim gives it other names, and knows its optimizers and their keys."""
    assert _Code(OptimizersContainer.__init__).calls("self._build_param_groups")
    assert _parameters(OptimizersContainer._build_param_groups) == [
        "model",
        "param_group_configs",
        "impl_kwargs",
    ]
    tree = ast.parse(textwrap.dedent(inspect.getsource(OptimizersContainer._build_param_groups)))
    used = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _is_name(n.value)]
    assert used == ["named_parameters"], "of the model, which our container wraps"
    for name, optimizer in optim._OPTIMIZERS.items():
        expected = build_dist_muon if name == optim.MUON else optimizer
        assert OptimizersContainer._resolve_optimizer_factory(name) is expected
    assert {"compute_sharding_by_fqn", "bucket_configs"} <= set(_parameters(dist_muon.DistMuon))


def test_torch_ignores_unknown_keys_of_a_parameter_group():
    """Why optim compares them with the optimizer's own keys."""
    group = {"params": [nn.Parameter(torch.ones(1))], "wieght_decay": 0.5}
    (seen,) = torch.optim.AdamW([group]).param_groups
    assert (seen["wieght_decay"], seen["weight_decay"]) == (0.5, 0.01)


def test_torch_replicates_modules_inside_of_sharded_ones():
    """fsdp.mesh replicates: a state of FSDP2's own, that fully_shard leaves alone, on one axis."""
    assert issubclass(replicate_with_fsdp.ReplicateModule, FSDPModule)
    assert issubclass(replicate_with_fsdp._ReplicateState, FSDPState)
    assert {"mesh", "mp_policy", "offload_policy", "ignored_params"} <= set(
        _parameters(replicate_with_fsdp.replicate)
    )
    assert _Code(replicate_with_fsdp._validate_mesh).has("mesh.ndim != 1")
    assert _Code(_fsdp_common._is_composable_with_fsdp).has('"replicate" not in registry')
    # Why the head cannot be replicated: the chunked loss calls it.
    assert _Code(FSDPModule.set_reshard_after_forward).has(
        "isinstance(fsdp_param_group.mesh_info, FSDPMeshInfo)"
    )


def test_fsdp2_takes_new_units_until_the_model_runs():
    """fsdp.unmanaged: the first forward finds every unit, whenever it was made."""
    assert _Code(FSDPState._lazy_init).has("root_module.named_modules()")
    assert _Code(FSDPState.__init__).has("self._is_root: bool | None = None")
    assert nn.Linear(1, 1)._compiled_call_impl is None
    assert TitanModule._parallelized is False
    assert TitanModule._sharding_config is None


def test_fsdp2_takes_a_quantized_shard_at_the_first_forward():
    """fsdp.nf4: a parameter swapped before it; the freed one is not compared with NF4."""
    assert _Code(FSDPParamGroup.lazy_init).has(
        "fsdp_param.reset_sharded_param()", "fsdp_param._init_extensions()"
    )
    assert _Code(FSDPParam.reset_sharded_param).has(
        "self._sharded_param_data.untyped_storage().data_ptr() > 0"
    )
    assert _Code(FSDPParamGroup.wait_for_unshard).has("fsdp_param.all_gather_inputs[0]")
    for method in ("fsdp_pre_all_gather", "fsdp_post_all_gather", "get_original_weight"):
        assert hasattr(NF4Tensor, method)


def test_torchao_casts_a_float8_weight_for_fsdp2():
    """components.float8_linears: a subclass of it, whose operations return torchao's class."""
    no_gemm: Any = None
    weight: Any = WeightWithDynamicFloat8CastTensor(torch.ones(2, 2), no_gemm, torch.float8_e4m3fn)
    assert type(GatheredWeight.detach(weight)) is WeightWithDynamicFloat8CastTensor
    assert vars(weight).keys() == {"_tensor", "_linear_mm_config", "_dtype", "_precomputed_scale"}
    assert _parameters(type(weight).fsdp_pre_all_gather) == ["self", "mesh"]
    ours = GatheredWeight(torch.ones(2, 2), no_gemm, torch.float8_e4m3fn)
    assert all(type(x) is GatheredWeight for x in (ours.detach(), ours[:1], ours.view(4)))


def test_spmd_types_shards_torchaos_experts_as_plain_tensors():
    """components.float8_linears refuses them; once a release keeps the class, it need not."""
    weight = Float8TrainingWeightWrapperTensor(torch.ones(4, 2, 2), Float8TrainingOpConfig())
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        shard = spmd.shard(weight, distributed_c10d._get_default_group(), src=spmd.I, dst=spmd.S(0))
    finally:
        dist.destroy_process_group()
    assert (type(shard), type(weight.chunk(2)[0])) == (torch.Tensor, type(weight))
    assert shard.shape == (2, 2, 2)
    assert isinstance(titan_float8._float8_experts_cache, dict)


def test_torch_names_by_which_memory_plan_tells_storages_apart():
    """plan.live: by the functions that make them, and by operations of FSDP2's."""
    made_in = _Code(FSDPParamGroup.post_backward)
    assert made_in.calls("foreach_reduce")
    assert _Code(FSDPParamGroup.unshard).calls("foreach_all_gather")
    assert _Code(FSDPParamGroup.wait_for_unshard).calls("foreach_all_gather_copy_out")
    assert _Code(FSDPParamGroup.reshard).calls("self._to_sharded_post_forward")
    gather = _Code(_fsdp_collectives.foreach_all_gather)
    assert gather.calls("_get_param_all_gather_inputs")
    assert len(memory_plan._MAKERS) == 5 + 1  # and ours, of copies on the host
    ops = [torch.ops.fsdp.chunk_cat]
    if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype"):  # from torch 2.15 on
        ops.append(torch.ops.fsdp.chunk_cat_mixed_dtype)
    assert all(op.default._schema.name.startswith(memory_plan._TAKES_GRADIENTS) for op in ops)
    for name in (*memory_plan._MADE_BY, "_c10d_functional::wait_tensor"):
        namespace, op = name.split("::")
        assert getattr(getattr(torch.ops, namespace), op).default._schema.name == name
    assert distributed_c10d._resolve_process_group


def test_torch_names_by_which_a_steps_clock_tells_streams_and_stages_apart():
    stream = torch.cpu.Stream()
    with torch.cpu.stream(stream):
        assert torch.cpu.current_stream() is stream
    assert torch.cpu.current_stream() is not stream
    assert "device_handle.stream(" in inspect.getsource(_fsdp_collectives.foreach_all_gather)
    assert "device_handle.stream(" in inspect.getsource(_fsdp_collectives.foreach_reduce)
    assert "self.pipeline_order" in inspect.getsource(PipelineScheduleMulti.__init__)
    fields = ("stage_index", "computation_type", "microbatch_index", "sub_actions")
    assert _Action._fields == fields
    assert {"F", "B", "I", "W"} <= {kind.value for kind in _ComputationType}


def test_torch_has_an_attention_of_one_operation_without_a_kernel():
    """stand_ins: its shapes, of heads of two sizes and of fewer keys than queries."""
    q, k, v = (torch.empty(2, n, 8, h, device="meta") for n, h in ((4, 16), (2, 16), (2, 12)))
    fused = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    out, lse, *_ = fused(q, k, v, None, 0.25, True)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 4, 8, 12), (2, 4, 8), torch.float32)
    for op in (fused, torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward):
        assert "dropout_p" in [argument.name for argument in op.default._schema.arguments]


def test_torchs_partitioner_lists_what_inductor_fuses():
    """plan.pools: as packets of operations, before and after they are decomposed."""
    listed = set(partitioners.get_default_op_list().fusible_ops)
    ops = torch.ops.aten
    assert {ops._to_copy, ops.add, ops.mul, ops.silu, ops.sum, ops.clone} <= listed
    assert not {ops.mm, ops._grouped_mm, ops._log_softmax} & listed
    assert torch.Tag.pointwise in ops.silu_backward.default.tags


def test_titan_checkpointer_replaces_tensors_of_another_dtype():
    """fsdp.nf4 gives it the dequantised weight; the old one has no storage any more."""
    assert _Code(ModelWrapper.state_dict).has("cached.dtype != value.dtype")


def test_storage_weak_ref_keeps_the_id_and_not_the_bytes():
    """torch.multiprocessing.reductions.StorageWeakRef, UntypedStorage._cdata."""
    storage = torch.empty(64).untyped_storage()
    address = storage._cdata
    reference = StorageWeakRef(storage)
    assert reference.cdata == address
    del storage
    assert reference.expired()
    others = [torch.empty(64).untyped_storage() for _ in range(100)]
    assert address not in {other._cdata for other in others}


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("Interleaved1F1B", False),
        ("LoopedBFS", False),
        ("InterleavedZeroBubble", True),
        ("ZBVZeroBubble", True),
        ("DualPipeV", True),
    ],
)
def test_torch_schedules_that_split_backward(name: str, splits: bool):
    """titan_ext.parallelize.limits knows them by their class."""
    stages: Any = [MagicMock(group_size=2, group_rank=0, num_stages=4) for _ in range(2)]
    for index, stage in zip((0, 3 if "V" in name else 2), stages, strict=True):
        stage.stage_index, stage.is_first, stage.is_last = index, index == 0, index == 3
    schedule = get_schedule_class(name)(stages, n_microbatches=4)
    actions = [a for order in cast(Any, schedule).pipeline_order.values() for a in order if a]
    kinds = {kind.computation_type for kind in actions}
    assert (_ComputationType.BACKWARD_WEIGHT in kinds) is splits
    assert (type(schedule) in limits._SPLIT_BACKWARD) is splits


def test_torch_looks_up_parameters_when_backward_begins():
    """titan_ext.parallelize.limits refuses what makes FSDP2 hold other parameters by then."""
    backward = _Code(pipeline_stage._PipelineStageBase.backward_maybe_with_nosync)
    assert backward.calls("self.submod.parameters") == 2


def test_torch_counts_the_functional_collectives_in_flight(one_rank: None):
    """titan_ext.fp8.saved_tensors waits only if there are any."""
    group = distributed_c10d._get_default_group().group_name
    sizes = [_get_work_registry_size()]
    x = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", group)
    sizes.append(_get_work_registry_size())
    torch.ops._c10d_functional.wait_tensor(x)
    sizes.append(_get_work_registry_size())
    assert [size - sizes[0] for size in sizes] == [0, 1, 0]


def test_operations_that_pass_values_on_save_none_for_backward():
    """titan_ext.activation_checkpoint.discards: neither operands nor results, in a Function of
    torch.library's."""
    x = torch.ones(4, 2, requires_grad=True)
    index = torch.zeros(4, 2, dtype=torch.int64)
    dist.init_process_group("fake", rank=0, world_size=1)
    try:
        group = distributed_c10d._get_default_group().group_name
        functional: Any = torch.ops._c10d_functional
        calls = {
            "all_to_all_single": lambda: functional.all_to_all_single(x, [4], [4], group),
            "_wrap_tensor_autograd": lambda: functional._wrap_tensor_autograd(x),
            "all_reduce": lambda: functional.all_reduce(x, "sum", group),
            "all_gather_into_tensor": lambda: functional.all_gather_into_tensor(x, 1, group),
            "reduce_scatter_tensor": lambda: functional.reduce_scatter_tensor(x, "sum", 1, group),
            "wait_tensor": lambda: functional.wait_tensor(x),
            "deterministic_scatter_add": lambda: deterministic_scatter_add(x, index, x),
        }
        for name, call in calls.items():
            saved: list[torch.Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: _):
                out = call()
            node = out.grad_fn
            functional.wait_tensor(out.detach())
            assert not any(tensor.is_floating_point() for tensor in saved), name
            assert node._forward_cls.__module__ == "torch._library.autograd", name
    finally:
        dist.destroy_process_group()


def test_what_a_selective_checkpoint_has_saved_can_be_recomputed_instead():
    """titan_ext.activation_checkpoint.blocks: also outputs in a tuple, with a hook on them."""
    contexts: list[Any] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        values, _ = x.sin().sort()
        return values.exp()

    def context_fn() -> Any:
        contexts.append(create_selective_checkpoint_contexts([torch.ops.aten.sort.default]))
        return contexts[0]

    x = torch.rand(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda y: [y], lambda packed: packed[0]):
        out = checkpoint(
            block,
            x,
            use_reentrant=False,
            context_fn=context_fn,
            respect_saved_tensors_hooks=True,
        )
    found = [
        leaf
        for calls in contexts[0][0].storage.values()
        for leaf in torch.utils._pytree.tree_leaves(list(calls.values()))
        if isinstance(leaf, torch_checkpoint._VersionWrapper)
    ]
    assert [type(leaf.val) for leaf in found] == [list, list]
    for calls in contexts[0][0].storage.values():
        calls.update(dict.fromkeys(calls, torch_checkpoint._RECOMPUTE))
    out.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, x.cos() * x.sin().exp())


def test_autograd_nodes_are_numbered():
    """Each node takes the next number, custom Functions too, before what they run is dispatched."""
    number = torch._C._autograd._get_sequence_nr

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, *grads):
            (grad,) = grads
            return 2 * grad

    class Numbers(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(number())
            return func(*args, **(kwargs or {}))

    seen: list[int] = []
    x = torch.randn(3, requires_grad=True)
    start = number()
    with Numbers():
        y = x + 1
        z = Double.apply(y)
        with torch.no_grad():
            Double.apply(y)
    assert cast(Any, y.grad_fn)._sequence_nr() == start
    assert cast(Any, z.grad_fn)._sequence_nr() == start + 1
    assert cast(Any, z.grad_fn)._forward_cls is Double
    assert isinstance(z.grad_fn, torch.autograd.function.BackwardCFunction)
    assert seen == [start + 1, start + 2, start + 3]
    assert number() == start + 3


def test_references_to_a_storage_are_counted():
    def count() -> int:
        return torch._C._storage_Use_Count(storage)

    x = torch.randn(3)
    weak = StorageWeakRef(x.untyped_storage())
    storage = weak.cdata
    alone = count()
    view = x.view(3)
    assert count() == alone + 1
    assert view._base is x
    del x, view
    assert weak.expired()
    assert count() == 0


def test_titan_names_that_toml_files_go_by():
    assert "deepseek_v3" in _supported_models
    assert "graph_trainer.llama3" in _supported_experiments
    assert CheckpointManager.Config._owner is CheckpointManager
    hint = torchtitan.trainer.Trainer.Config.__annotations__["activation_checkpoint"]
    mark: Any = type(tyro.conf.subcommand("name"))
    marks = [m for choice in get_args(hint) for m in choice.__metadata__ if isinstance(m, mark)]
    assert [m.name for m in marks] == ["selective", "full", "memory-budget", "none"]


def test_titan_configs_warn_through_the_root_logger(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger(), "filters", [])  # warn_once's, of an earlier test
    with caplog.at_level(logging.WARNING):
        CheckpointManager.Config(initial_load_model_only=True)
    assert [(r.name, r.funcName) for r in caplog.records] == [("root", "__post_init__")]


def test_pydantic_errors_that_toml_messages_are_made_of():
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(list[int], config=ConfigDict(strict=True)).validate_json("[1, true]")
    (error,) = refused.value.errors(include_url=False)
    assert (error["loc"], error["msg"]) == ((1,), "Input should be a valid integer")
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(list[int]).validate_json("3")
    assert refused.value.errors()[0]["type"] == "list_type"
    with pytest.raises(PydanticUserError):
        TypeAdapter(torch.dtype)


def test_titans_structured_log_takes_a_handler_of_ours():
    source = inspect.getsource(structured_logging.init_structured_logger)
    assert 'os.environ.get("TITAN_STRUCT_LOGGER_HANDLERS"' in source
    theirs = inspect.signature(jsonl_handler.register_jsonl_handler).parameters
    ours = inspect.signature(start.register_handler).parameters
    assert list(ours)[:-1] == list(theirs)[:-1]


def test_titans_warnings_that_are_never_shown():
    sources = {
        "__post_init__": inspect.getsource(BaseCheckpointManager.Config.__post_init__),
        "_validate_config": inspect.getsource(ConfigManager._validate_config),
        "__init__": inspect.getsource(torchtitan.trainer.Trainer.__init__),
        "get_peak_flops": inspect.getsource(torchtitan.tools.utils),
    }
    for function, words in _NOISE:
        assert f'"{words.removesuffix("nan")}' in sources[function]


def test_titans_dispatcher_reads_counts_where_we_measure():
    dispatcher = token_dispatcher.AllToAllTokenDispatcher
    signature = inspect.signature(dispatcher._sync_token_count_exchange)
    assert [*signature.parameters][-1] == "ep_size"
    source = inspect.getsource(dispatcher)
    assert source.count("self._sync_token_count_exchange(") == 1
    assert source.count("self._dispatch_token_exchange(") == 1
