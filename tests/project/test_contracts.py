"""What titan_ext leans on in torch and TorchTitan beyond their public functions, by name.

A release that changes one of these fails the test that names it, before anything breaks quietly.
What can be read is in ``tests/data/contracts.txt``; what has to run is here.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import os
import re
import textwrap
import warnings
from collections import Counter
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast, get_args
from unittest.mock import MagicMock

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn as nn
import torchtitan.trainer
import tyro
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from torch import _utils, overrides
from torch._C._distributed_c10d import _get_work_registry_size
from torch._functorch import partitioners
from torch._guards import detect_fake_mode
from torch.distributed import distributed_c10d
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
    FSDPParamGroup,
)
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    get_schedule_class,
)
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
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import (
    BaseCheckpointManager,
)
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.quantization import float8 as titan_float8
from torchtitan.config import ConfigManager
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.flex_shard import build_dist_muon
from torchtitan.experiments import _supported_experiments
from torchtitan.models import _supported_models
from torchtitan.models.deepseek_v3.mtp import MTPTransformerBlock
from torchtitan.ops.scatter_add import deterministic_scatter_add

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.components import optim
from titan_ext.components.float8_linears import GatheredWeight
from titan_ext.config_registry.terminal import _NOISE
from titan_ext.debug import watchdog
from titan_ext.fsdp import units
from titan_ext.parallelize import limits
from titan_ext.plan import live as memory_plan

LIST = Path(__file__).parents[1] / "data" / "contracts.txt"


def _parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def _is_name(node: ast.expr, name: str = "model") -> bool:
    return isinstance(node, ast.Name) and node.id == name


class _Code:
    """What a function, a class or a module says, whatever its layout and its comments."""

    def __init__(self, subject: Any) -> None:
        tree = ast.parse(textwrap.dedent(inspect.getsource(subject)))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)]
        nodes.sort(key=lambda node: (node.lineno, node.col_offset))
        self.pieces = [ast.unparse(node) for node in nodes]
        self.calls = Counter(ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call))

    def place(self, piece: str) -> int:
        """Where it begins, or -1; an ``if`` or a loop goes on after its piece, as a call may."""
        with contextlib.suppress(SyntaxError):
            (statement,) = ast.parse(piece).body
            piece = ast.unparse(statement.value if isinstance(statement, ast.Expr) else statement)
            found = (i for i, p in enumerate(self.pieces) if f"{p}\n".startswith(f"{piece}\n"))
            return next(found, -1)
        return next((i for i, p in enumerate(self.pieces) if p.startswith(piece)), -1)


def _numbers(version: str) -> list[int]:
    """The first two of a version, or none."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


class Contract(NamedTuple):
    """A name, and what it has to be for the file of ours that leans on it."""

    needed_by: str
    name: str
    since: str
    """The first release of torch that has it; "" for any."""
    checks: list[str]

    def wrong(self) -> list[str]:
        """What is not as it was, in words."""
        if _numbers(self.since) > _numbers(torch.__version__):
            return []
        try:
            subject = _resolve(self.name)
            wrong = [check for check in self.checks if not _holds(subject, check)]
        except (ImportError, AttributeError, TypeError) as error:
            wrong = [str(error)]
        return [f"titan_ext.{self.needed_by} needs {self.name}: {words}" for words in wrong]


def _resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    subject: Any = importlib.import_module(module)
    for part in path.split("."):
        owner, subject = subject, getattr(subject, part)
        static = inspect.getattr_static(owner, part, None)
        subject = static.fget if isinstance(static, property) else subject
    return subject


def _names(subject: Any) -> list[str]:
    if dataclasses.is_dataclass(subject):
        return [field.name for field in dataclasses.fields(subject)]
    return [*getattr(subject, "_fields", dir(subject))]


def _holds(subject: Any, check: str) -> bool:
    kind, _, rest = check.partition(" ")
    if kind[0] in "({":
        names = _names(subject) if kind[0] == "{" else [*inspect.signature(subject).parameters]
        wanted = check[1:-1].split(", ")
        if kind[0] == "{":
            return set(wanted) - {"..."} <= set(names) if "..." in wanted else wanted == names
        pattern = "".join(r"(\w+,)*" if name == "..." else f"{name}," for name in wanted)
        return bool(re.fullmatch(pattern, "".join(f"{name}," for name in names)))
    if kind == "is":
        return subject == eval(rest)
    if kind == "under":
        return issubclass(subject, _resolve(rest))
    code = _Code(subject)
    if kind == "calls":
        name, _, count = rest.partition(" ")
        return code.calls[name] == int(count) if count else name in code.calls
    if kind == "order":
        places = [code.place(piece) for piece in rest.split(" < ")]
        return places == sorted(set(places)) and places[0] >= 0
    assert kind == "says", check
    is_there = code.place(rest.removeprefix("not ").replace("\\n", "\n")) >= 0
    return is_there != rest.startswith("not ")


def _read() -> tuple[dict[str, str], list[Contract]]:
    """The versions that the list was read with, and what it has."""
    versions: dict[str, str] = {}
    found: list[Contract] = []
    needed_by = since = module = ""
    for line in LIST.read_text().splitlines():
        if line.startswith("versions "):
            versions = dict(pair.split() for pair in line[9:].split(", "))
        elif line.startswith("["):
            needed_by, _, since = line[1:-1].partition(": torch ")
        elif line.startswith("  "):
            found[-1].checks.append(line.strip())
        elif line and line[0] != "#":
            module = line.partition(":")[0] if ":" in line else module
            name = line if ":" in line else f"{module}:{line}"
            found.append(Contract(needed_by, name, since, []))
    return versions, found


def test_what_we_lean_on_is_as_it_was():
    """Read where a version is not the recorded one, or where CONTRACTS is set: 2 CPU seconds."""
    versions, contracts = _read()
    installed = {name: metadata.version(name).partition("+")[0] for name in versions}
    others = [name for name in versions if versions[name] != installed[name]]
    read = others or "CONTRACTS" in os.environ
    wrong = [words for contract in contracts if read for words in contract.wrong()]
    said = "; ".join(f"installed {n} {installed[n]}, recorded {versions[n]}" for n in others)
    assert not wrong, "\n".join([said, *wrong])
    if others:
        warnings.warn(f"{said}: all that {LIST.name} names is as it was; record it", stacklevel=1)


@pytest.mark.parametrize(
    "check",
    [
        "(self, other)",
        "(..., self)",
        "{encode}",
        "{..., code, ...}",
        "says return other",
        "says not o.__class__",
        "calls TypeError 2",
        "calls KeyError",
        "order raise TypeError( < def default(self, o):",
        "is None",
        "under json:JSONDecoder",
    ],
)
def test_what_is_not_as_it_was_is_told(check: str):
    name = "json:JSONEncoder" if check[0] in "{u" else "json:JSONEncoder.default"
    (wrong,) = Contract("toml", name, "", [check]).wrong()
    assert wrong == f"titan_ext.toml needs {name}: {check}"
    assert Contract("toml", "json:JSONEncoder.gone", "", []).wrong()


def _private_names() -> set[str]:
    """Those of other packages in titan_ext: imported, or attributes that it does not define."""
    own, used = set(), set()
    for path in (Path(__file__).parents[2] / "titan_ext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ImportFrom(module=str(module)) if not module.startswith("titan_ext"):
                    used |= {alias.name for alias in node.names} | {*module.split(".")}
                case ast.Attribute(ctx=ast.Store(), value=ast.Name("self" | "cls")):
                    own.add(node.attr)
                case ast.Attribute(value=ast.Name("sys" | "os")):
                    pass  # Python's own
                case ast.Attribute():
                    used.add(node.attr)
                case ast.FunctionDef() | ast.ClassDef():
                    own.add(node.name)
                case ast.arg() | ast.Name(ctx=ast.Store()):
                    own.add(node.arg if isinstance(node, ast.arg) else node.id)
    return {name for name in used - own if re.match(r"_[^_]", name)}


def test_every_private_name_has_a_contract():
    """In the list, or in a test below that runs it."""
    named = set(re.findall(r"\w+", LIST.read_text() + Path(__file__).read_text()))
    assert len(_private_names()) > 80
    assert _private_names() <= named, sorted(_private_names() - named)


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


def test_torch_frames_and_ops_that_the_collective_recorder_knows():
    for code in (*watchdog._UNIT_METHODS, watchdog._MODULE_CALL):
        assert code.co_varnames[0] == "self"
    assert torch._C._current_graph_task_id() == -1
    for code in watchdog._SPLIT_FUNCTIONS:
        assert {"input_split_sizes", "output_split_sizes"} <= set(code.co_varnames)


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


def test_torch_sees_no_accelerator_the_way_titan_asks():
    assert _utils._get_available_device_type() is None or torch.accelerator.is_available()


def test_fsdp2_separates_no_reduce_scatters_of_replicated_groups():
    """fsdp.shard calls it for each sharded group, with one dict of process groups."""
    separate = FSDPParamGroup._set_separate_reduce_scatter_group
    replicated = SimpleNamespace(mesh_info=object())
    with pytest.raises(AssertionError, match="Expected mesh_info to be FSDPMeshInfo"):
        separate(cast(Any, replicated), True, {})


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
    tree = ast.parse(textwrap.dedent(inspect.getsource(OptimizersContainer._build_param_groups)))
    used = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _is_name(n.value)]
    assert used == ["named_parameters"], "of the model, which our container wraps"
    for name, optimizer in optim._OPTIMIZERS.items():
        expected = build_dist_muon if name == optim.MUON else optimizer
        assert OptimizersContainer._resolve_optimizer_factory(name) is expected


def test_torch_ignores_unknown_keys_of_a_parameter_group():
    """Why optim compares them with the optimizer's own keys."""
    group = {"params": [nn.Parameter(torch.ones(1))], "wieght_decay": 0.5}
    (seen,) = torch.optim.AdamW([group]).param_groups
    assert (seen["wieght_decay"], seen["weight_decay"]) == (0.5, 0.01)


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
    assert len(memory_plan._MAKERS) == 5 + 1  # and ours, of copies on the host
    ops = [torch.ops.fsdp.chunk_cat]
    if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype"):  # from torch 2.15 on
        ops.append(torch.ops.fsdp.chunk_cat_mixed_dtype)
    assert all(op.default._schema.name.startswith(memory_plan._TAKES_GRADIENTS) for op in ops)
    for name in (*memory_plan._MADE_BY, "_c10d_functional::wait_tensor"):
        namespace, op = name.split("::")
        assert getattr(getattr(torch.ops, namespace), op).default._schema.name == name


def test_torch_names_by_which_a_steps_clock_tells_streams_and_stages_apart():
    stream = torch.cpu.Stream()
    with torch.cpu.stream(stream):
        assert torch.cpu.current_stream() is stream
    assert torch.cpu.current_stream() is not stream
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
    monkeypatch.setattr(logging.getLogger(), "filters", [])  # hide_noise's, of an earlier test
    with caplog.at_level(logging.WARNING):
        CheckpointManager.Config(initial_load_model_only=True)
    assert [(r.name, r.funcName) for r in caplog.records] == [("root", "__post_init__")]


def test_pydantic_errors_that_toml_messages_are_made_of():
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(list[int], config=ConfigDict(strict=True)).validate_json("[1, true]")
    (error,) = refused.value.errors(include_url=False)
    assert (error["loc"], error["msg"]) == ((1,), "Input should be a valid integer")
    with pytest.raises(PydanticUserError):
        TypeAdapter(torch.dtype)


def test_titans_warnings_that_are_never_shown():
    sources = {
        "__post_init__": inspect.getsource(BaseCheckpointManager.Config.__post_init__),
        "_validate_config": inspect.getsource(ConfigManager._validate_config),
        "__init__": inspect.getsource(torchtitan.trainer.Trainer.__init__),
        "get_peak_flops": inspect.getsource(torchtitan.tools.utils),
    }
    for function, words in _NOISE:
        assert f'"{words.removesuffix("nan")}' in sources[function]
