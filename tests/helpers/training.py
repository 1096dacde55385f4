"""Short, deterministic training runs under Titan's trainer: the stock parallelize function or ours.

The reference is TorchTitan itself: its trainer, its config, its model spec. It is changed only as
far as a CPU needs: see ``_stock_config``.
"""

import contextlib
import fcntl
import functools
import hashlib
import math
import os
import pickle
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import fsdp as titan_fsdp
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE
from torchtitan.models.deepseek_v3 import _build_dsv3_layers
from torchtitan.tools.logging import init_logger

from tests.helpers import muon
from tests.helpers.cluster import PATIENCE_S, run_ranks
from tests.helpers.collectives import (
    Collective,
    CollectiveTrace,
    PlannedStep,
    planned_steps,
    recorded_as,
)
from tests.helpers.compiled_op_policies import OP_POLICIES
from tests.helpers.converters import convert
from tests.helpers.on_cpu import flex_on_cpu, quick_initialisation
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.base import no_accelerator
from titan_ext.base.run_folder import LOSS, read_scalar
from titan_ext.base.stdlib_corpus import (
    STDLIB_CORPUS,
    default_tokenizer_path,
    make_corpus,
    register_stdlib_corpus,
)
from titan_ext.base.tensors import in_backward
from titan_ext.fsdp import auto, collectives, prefetch, resolve
from titan_ext.parallelize.model_spec import balance_all_blocks
from titan_ext.plan.stand_ins import RankOrder
from titan_ext.run.checkpoints import CheckpointManager
from titan_ext.run.trainer import extend_config


def _key(name: str, default: Any) -> Any:
    """A field that is the value of a key of the config; of ours only, if Titan has none."""
    return field(default=default, metadata={"key": name})


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    model: str = "deepseek_v3"
    """A debug model: see ``titan_config``. qwen3 is dense, with tied embeddings and head."""
    parallelize: str = "stock"
    """"stock" (Titan's own function) or a ``fsdp_wrap`` of ours."""
    world: int = 1
    ep: int = _key("parallelism.expert_parallel_degree", 1)
    pp: int = _key("parallelism.pipeline_parallel_degree", 1)
    tp: int = _key("parallelism.tensor_parallel_degree", 1)
    cp: int = _key("parallelism.context_parallel_degree", 1)
    lora: int = 0
    """The rank of Titan's LoRA on the attention's query and output projections; all else frozen."""
    experts: int = 0
    """Routed experts of a layer instead of the model's number: with 5 of them on 4 ranks, or 6 with
    EP 2, the last rank holds no row of the router; with 5 no expert either."""
    converters: tuple[str, ...] = ()
    """Titan's quantising converters of the model config, in order (``helpers.converters``)."""
    attention: str = "cpu"
    """"cpu": what a CPU gets instead of FlexAttention. "flex": see ``tests.helpers.on_cpu``."""
    sequence_parallel: bool = _key("parallelism.enable_sequence_parallel", True)
    cpu_offload: bool = _key("training.enable_cpu_offload", False)
    dp_replicate: int = _key("parallelism.data_parallel_replicate_degree", 1)
    """HSDP: copies of the shards; FSDP shards over the rest of the data-parallel ranks."""
    accumulate: int = 1
    """Microbatches of a step whose gradients add up."""
    backend: str = _key("parallelism.spmd_backend", "spmd_types")
    ac: Any = "selective"
    """selective, full, none, op_policies (``compiled_op_policies``), or the config of a policy.

    fp8 is our float8 policy; fp8_full and fp8_no_recompute are its modes, fp8_speed is its preset.
    fp8_early applies the routing scores before the last expert GEMM.
    on_host is selective, and on_host_all is none, with what they keep on the host, exactly.
    """
    compiled: bool = _key("compile.enable", False)
    compile_backend: str = _key("compile.backend", "inductor")
    param_dtype: str = _key("training.mixed_precision_param", "bfloat16")
    max_norm: float = _key("training.max_norm", 1.0)
    """Of gradients. A large one clips nothing: the norm is then logged, and changes no bit."""
    global_batch: int = _key("training.global_batch_size", 4)
    seq_len: int = _key("training.seq_len", 64)
    layers: int = 3
    narrow: bool = False
    """Half the parameters, where the model is deepseek_v3: see ``narrow_attention``."""
    steps: int = _key("training.steps", 10)
    traced_step: int = 0
    """The step whose collectives are recorded; 0 for none."""
    profiled_step: int = 0
    """The step whose operations are counted, in compiled code too; 0 for none."""
    exact_sums: bool = False
    """Sum in an order that does not depend on what else is in a bucket, or in the graph.

    gloo (NCCL too) adds the ranks' values in an order that depends on where in the bucket they
    lie. That shows in the last bit from 3 ranks on. And torch's RMSNorm on CPU in fp32 sends its
    input three gradients, not one; where a unit begins they are added in another order. HSDP's
    all-reduce is left alone: over two copies it adds two numbers, which has one order.
    Both sides of a comparison get it, or neither.
    """
    reshard: str | int = _key("parallelism.fsdp_reshard_after_forward", "default")
    reshard_groups: tuple[tuple[str, str | int], ...] = ()
    """``parallelism.fsdp_reshard_groups``; of ours only."""
    save_all_to_all: str = _key("parallelism.save_all_to_all", "auto")
    overlap_exchanges: str = _key("parallelism.overlap_exchanges", "shared_experts")
    exchange_dtype: str | None = _key("parallelism.exchange_dtype", None)
    exchange_rows: str = _key("parallelism.exchange_rows", "expert")
    replicate: tuple[str, ...] = _key("parallelism.fsdp_replicate", ())
    prefetch: int | str = _key("parallelism.fsdp_prefetch", 1)
    reduce_scatter_buffers: int = 1
    """More: what "auto" takes across nodes, with two units ahead in backward; of ours only."""
    stock_copy_out: bool = False
    """As FSDP2 by itself: such experts in a temporary, buffers freed with the next copy-out."""
    float8_all_gather: str = _key("parallelism.fsdp_float8_all_gather", "none")
    expert_reduce_scatter: str | None = _key("parallelism.fsdp_expert_reduce_scatter", None)
    schedule: str = _key("parallelism.pipeline_parallel_schedule", "1F1B")
    chunked_loss: bool = True
    """Titan's loss runs the head in pieces of the sequence; False: plain cross-entropy."""
    microbatch_size: int = _key("parallelism.pipeline_parallel_microbatch_size", 1)
    """Samples of a microbatch of the pipeline."""
    typechecked: bool = _key("debug.spmd_typechecking", False)
    recorded: bool = _key("debug.record_collectives", False)
    nodes: tuple[int, ...] = ()
    """How many ranks each node has, as torchrun tells them; () for no torchrun."""
    watch_routing: bool = False
    """Record the expert ids of every router call, in forward and in recompute."""
    optimizer: str = "default"
    """The model's own (Titan's fused AdamW), foreach, for-loop or muon (``tests.helpers.muon``)."""
    keep_gradients: bool = False
    """Return the (clipped) gradients of the last step, unsharded, from rank 0."""

    def __str__(self) -> str:
        first = [self.model, f"{self.world}r", f"ep{self.ep}", self.backend, self.parallelize]
        others = [
            _in_a_name(field.name, value)
            for field in fields(self)
            if field.name not in ("model", "world", "ep", "backend", "parallelize", *_OF_TESTS)
            and (value := getattr(self, field.name)) != field.default
        ]
        return "-".join(first + others)


KEYS: dict[str, str] = {f.metadata["key"]: f.name for f in fields(Run) if f.metadata}
"""The fields of a run that are keys of the config."""
_OF_TESTS = ("narrow", "seq_len", "steps", "traced_step", "profiled_step")
_OF_TESTS += ("watch_routing", "keep_gradients")
"""What a run's name leaves out: how long it is, and what a test looks at."""


def _in_a_name(key: str, value: Any) -> str:
    """``compiled``, ``pp2``, ``schedule_ZBVZeroBubble``."""
    if value is True:
        return key
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{key}{value}"
    if isinstance(value, FP8AC.Config):
        value = f"{value.mode}_{value.preset}"
    parts = np.ravel(value) if isinstance(value, tuple) else [value]
    return "_".join([key, *map(str, parts)])


@dataclass
class RankResult:
    """What one rank reports of a run."""

    state_hash: str
    """SHA-256 over every parameter, buffer and optimizer state that the rank holds."""
    grad_norms: list[float] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    routing: list[tuple[str, bool, np.ndarray]] = field(default_factory=list)
    """Router, whether in backward (a recompute), expert ids: one item for each call."""
    operations: Counter[str] = field(default_factory=Counter)
    """Calls in the profiled step, by name as the profiler has it ("aten::mm")."""
    graphs: int = 0
    """How many graphs Dynamo compiled in the whole run."""


@dataclass
class Result:
    losses: list[float]
    """By step, as TensorBoard has them (float32)."""
    grad_norms: list[float]
    ranks: list[RankResult]


def train(run: Run, folder: Path, timeout_s: float = PATIENCE_S) -> Result:
    """Train ``run.steps`` steps in ``run.world`` processes; files and logs go to ``folder``."""
    make_corpus()  # once, not once a rank
    ranks = run_ranks(
        _train_rank, run.world, run, folder, log_folder=folder / "logs", timeout_s=timeout_s
    )
    return Result(
        losses=list(read_scalar(folder, LOSS).values()),
        grad_norms=list(read_scalar(folder, "grad_norm").values()),
        ranks=ranks,
    )


def observed(run: Run) -> Run:
    """``run`` as tests share it: short, narrow, its last step's collectives recorded, its sums in
    order.

    gloo leaves the order of sums open from 3 ranks on, torch's RMSNorm in float32.
    """
    exact_sums = run.world > 2 or run.param_dtype == "float32"
    return replace(run, narrow=True, steps=2, traced_step=2, exact_sums=exact_sums)


class Runs:
    """Runs that are made once, for all tests and processes that have the same ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def folder(self, run: Run) -> Path:
        """Where ``run`` leaves its files and logs."""
        return self._folder / f"{run}-{hashlib.sha256(repr(run).encode()).hexdigest()[:12]}"

    def get(self, run: Run) -> Result:
        """Train ``run``, with time for a compiler, unless that has been done."""
        timeout_s = (2 if run.compiled else 1) * PATIENCE_S
        return self._once(self.folder(run), lambda folder: train(run, folder, timeout_s=timeout_s))

    def planned(self, *runs: Run, rank: int = 0) -> list[PlannedStep]:
        """What ``planned_steps`` finds, unless that has been done."""
        name = hashlib.sha256(repr((runs, rank)).encode()).hexdigest()[:12]
        return self._once(
            self._folder / f"planned-{name}",
            lambda folder: planned_steps(folder, *runs, rank=rank),
        )

    def _once(self, folder: Path, make: Callable[[Path], Any]) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "result.pickle"
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                file.write_bytes(pickle.dumps(make(folder)))
            return pickle.loads(file.read_bytes())


def make_config(run: Run, folder: Path) -> Any:
    """The trainer config of ``run``: Titan's own class for "stock", ours otherwise."""
    config = titan_config(run.model)
    model_config = config.model_spec.model
    model_config.layers = model_config.layers[: run.layers]
    if run.narrow and run.model == "deepseek_v3":
        narrow_attention(model_config)
    if run.experts:
        set_num_experts(model_config, run.experts)
    model_config = convert(model_config, run.converters, compiled=run.compiled)
    config.model_spec.model = model_config
    if run.lora:
        converter = LoRAConverter.Config(rank=run.lora, target_modules=["wq", "wo"]).build()
        config.model_spec.model = converter.convert(model_config)
        config.model_spec.post_optimizer_build_fn = None  # ours freezes the routers' bias too
    config.hf_assets_path = str(default_tokenizer_path())
    if run.optimizer == "muon":
        config.optimizer = muon.config(run.model, spelt_out=run.parallelize == "stock")
    elif run.optimizer != "default":
        config.optimizer.implementation = run.optimizer
    config.dump_folder = str(folder)
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset=STDLIB_CORPUS)
    ranks_of_data = run.world // (run.pp * run.tp * run.cp)
    local_batch = max(1, run.global_batch // (ranks_of_data * run.accumulate))
    config.training = TrainingConfig(local_batch_size=local_batch, disable_cuda_graphs=True)
    policies: dict[str, Any] = {
        "selective": SelectiveAC.Config(),
        "full": FullAC.Config(),
        "none": None,
        "op_policies": OP_POLICIES,
        "fp8": FP8AC.Config(),
        "fp8_full": FP8AC.Config(mode="full"),
        "fp8_no_recompute": FP8AC.Config(mode="no_recompute"),
        "fp8_speed": FP8AC.Config(preset="speed"),
        "fp8_early": FP8AC.Config(score_before_last_gemm=True),
        "on_host": FP8AC.Config(preset="stock", op_policies={"input": "offload", "*": "offload"}),
        "on_host_all": FP8AC.Config(mode="no_recompute", op_policies={"*": "offload"}),
    }
    config.activation_checkpoint = policies[run.ac] if isinstance(run.ac, str) else run.ac
    config.compile.components = ["model"]
    config.metrics = MetricsProcessor.Config(log_freq=1, enable_tensorboard=True)
    config.checkpoint = CheckpointManager.Config(enable=False)
    if not run.chunked_loss:
        config.loss = CrossEntropyLoss.Config()
    config.debug.seed = 42
    config.debug.deterministic = True
    config.debug.enable_structured_logging = False
    _set_keys(config, run)
    if run.parallelize == "stock":
        return _stock_config(config)
    ours: Any = extend_config(config)
    _set_keys(ours, run)
    ours.parallelism.fsdp_wrap = run.parallelize
    ours.parallelism.fsdp_reshard_groups = dict(run.reshard_groups)
    # As when a file or the command line gives these values.
    ours.parallelism.__post_init__()
    ours.__post_init__()
    return ours


def _set_keys(config: Any, run: Run) -> None:
    """Those that ``config`` has."""
    for key, field_name in KEYS.items():
        section, name = key.split(".")
        if hasattr(of := getattr(config, section), name):
            value = getattr(run, field_name)
            setattr(of, name, list(value) if isinstance(value, tuple) else value)


def degrees(backend: Any = "spmd_types", **sizes: int) -> ParallelDims:
    """A job's degrees, without meshes."""
    usual = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
    given: Any = usual | sizes
    world = math.prod(size for axis, size in given.items() if axis != "ep")
    return ParallelDims(**given, world_size=world, spmd_backend=backend)


def deepseek_v3_layers(dim: int, **changes: Any) -> list[Any]:
    """671B's in small: query LoRA, sigmoid routing in groups, one shared expert, a dense layer."""
    small: dict[str, Any] = {
        "n_layers": 2,
        "n_dense_layers": 1,
        "n_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mscale": 1.0,
        "dense_hidden_dim": 128,
        "moe_hidden_dim": 64,
        "num_experts": 8,
        "num_shared_experts": 1,
        "router_top_k": 3,
        "router_score_func": "sigmoid",
        "router_num_expert_groups": 4,
        "router_num_limited_groups": 2,
        "router_route_scale": 2.5,
        "router_route_norm": True,
        "attn_backend": "flex",
        "moe_comm_backend": "standard",
        "non_blocking_capacity_factor": None,
        "rope": ComplexRoPE.Config(dim=16, max_seq_len=4096, theta=10000.0),
    }
    return _build_dsv3_layers(dim=dim, **(small | changes))


def titan_config(model: str) -> Any:
    from torchtitan.models.deepseek_v3 import config_registry as deepseek_v3
    from torchtitan.models.gpt_oss import config_registry as gpt_oss
    from torchtitan.models.llama3 import config_registry as llama3
    from torchtitan.models.muse_glimmer import config_registry as muse_glimmer
    from torchtitan.models.qwen3 import config_registry as qwen3

    return {
        "deepseek_v3": deepseek_v3.deepseek_v3_debugmodel,
        "deepseek_v3_16b": deepseek_v3.deepseek_v3_16b,
        "deepseek_v3_mtp": deepseek_v3.deepseek_v3_debugmodel_mtp,
        "qwen3": qwen3.qwen3_debugmodel,
        "qwen3_moe": qwen3.qwen3_moe_debug,
        "llama3": llama3.llama3_debugmodel,
        "gpt_oss": gpt_oss.gpt_oss_debugmodel,
        "muse_glimmer": muse_glimmer.muse_glimmer_debugmodel,
        "kimi_text": _kimi_text,
    }[model]()


def small_spec(layers: int, name: str = "deepseek_v3") -> Any:
    """The model spec of the first layers of a debug model; of DeepSeek-V3's with fewer heads."""
    spec = titan_config(name).model_spec
    spec.model.layers = spec.model.layers[:layers]
    if name == "deepseek_v3":
        narrow_attention(spec.model)
    return spec


def meta_model(name: str = "deepseek_v3", layers: int | None = None) -> Any:
    """A debug model, or its first layers, on the meta device."""
    config = titan_config(name).model_spec.model
    config.layers = config.layers[:layers]
    with torch.device("meta"):
        return config.build()


def narrow_attention(config: Decoder.Config) -> None:
    """Give DeepSeek-V3's debug model 4 heads for its 16, which have most of its parameters."""
    for layer in config.layers:
        attention: Any = layer.attention
        attention.n_heads //= 4
        for linear, name in (
            (attention.wq, "out_features"),
            (attention.wkv_b, "out_features"),
            (attention.wo, "in_features"),
        ):
            setattr(linear, name, getattr(linear, name) // 4)


def set_num_experts(config: Decoder.Config, experts: int) -> None:
    """Give every MoE layer of a model so many routed experts."""
    for _, found, _, _ in config.traverse(MoE.Config):
        moe: Any = found
        moe.router.gate.out_features = experts
        parts = (moe, moe.router, moe.routed_experts.inner_experts)
        for part in (*parts, moe.routed_experts.token_dispatcher):
            part.num_experts = experts


def _kimi_text() -> Any:
    """Kimi's debug model without its vision tower, on text, with AdamW for its sharded Muon."""
    from torchtitan.models.kimi_k2_7 import config_registry as kimi

    config: Any = kimi.kimi_k2_5_debugmodel()
    config.model_spec.model.vision_encoder = None
    config.tokenizer = HuggingFaceTokenizer.Config()
    config.optimizer = default_adamw(lr=8e-4)
    return config


def _stock_config(config: Any) -> Any:
    """Titan's config and spec, with what a CPU needs: SDPA for Flex, and SUM for PREMUL_SUM."""
    no_accelerator.adapt_config(config)
    spec = config.model_spec
    titan_parallelize = spec.parallelize_fn

    def parallelize_for_gloo(model: nn.Module, **kwargs: Any) -> nn.Module:
        model = titan_parallelize(model, **kwargs)
        if dist.get_backend() != "nccl":
            no_accelerator.reduce_without_premul_sum(model)
        return model

    spec.parallelize_fn = parallelize_for_gloo
    if getattr(spec.model, "mtp_layers", None) and spec.post_optimizer_build_fn is not None:
        spec.post_optimizer_build_fn = balance_all_blocks  # Titan's leaves blocks of MTP out
    return config


def _reduce_scatter_in_rank_order(self, *args: Any, **kwargs: Any) -> None:
    with recorded_as("reduce_scatter"):
        RankOrder.__call__(self, *args, **kwargs)


def planned_config(run: Run, folder: Path) -> Any:
    """The config of ``run`` as a dry run takes it: balanced routing, nothing written."""
    config: Any = make_config(run, folder)
    config.debug.moe_force_load_balance = True
    config.metrics.enable_tensorboard = False
    return config


def start_as_planned(run: Run, folder: Path) -> tuple[Any, Any]:
    """A real trainer of ``planned_config`` before its first step, and its batches."""
    no_accelerator.enable()
    register_stdlib_corpus()
    with patched(run), no_accelerator.layout_independent_init(), quick_initialisation():
        trainer = planned_config(run, folder).build()
    trainer.step = 1
    return trainer, trainer.batch_generator(trainer.dataloader)


def _choose_buffers(run: Run) -> Any:
    """What "auto" takes across nodes, where a test has one."""
    ahead = auto.PrefetchLimit(units=2)

    def choose(*args: Any, **kwargs: Any) -> auto.Choice:
        choice = auto.choose(*args, **kwargs)
        return replace(choice, buffers=run.reduce_scatter_buffers, backward=ahead)

    return choose


@contextlib.contextmanager
def patched(run: Run) -> Iterator[None]:
    """What a CPU lacks for stock Titan, and the order of sums if the run asks for it.

    gloo has no uneven list all-to-all, and no accelerator could pin memory for CPU offload.
    """
    patch = unittest.mock.patch.object
    with contextlib.ExitStack() as stack:
        if run.parallelize == "stock":
            stack.enter_context(no_accelerator.list_all_to_all())
            unpinned = functools.partial(CPUOffloadPolicy, pin_memory=False)
            stack.enter_context(patch(titan_fsdp, "CPUOffloadPolicy", unpinned))
        if run.attention == "flex":
            stack.enter_context(flex_on_cpu())
        if run.stock_copy_out:
            stack.enter_context(patch(collectives, "copies_out_directly", lambda: False))
            stack.enter_context(patch(prefetch, "_freeing", lambda *_: set()))
        if run.reduce_scatter_buffers > 1:
            stack.enter_context(patch(resolve, "choose", _choose_buffers(run)))
        if run.exact_sums:
            stack.enter_context(
                patch(DefaultReduceScatter, "__call__", _reduce_scatter_in_rank_order)
            )
            forward = nn.RMSNorm.forward
            as_one_node = lambda self, x: forward(self, x.view_as(x))  # noqa: E731
            stack.enter_context(patch(nn.RMSNorm, "forward", as_one_node))
        if run.optimizer == "muon":
            stack.enter_context(muon.on_a_cpu())
        yield


def _train_rank(run: Run, folder: Path) -> RankResult:
    init_logger()
    if run.nodes:
        node_sizes = [size for size in run.nodes for _ in range(size)]
        os.environ["LOCAL_WORLD_SIZE"] = str(node_sizes[int(os.environ["RANK"])])
    no_accelerator.enable()
    register_stdlib_corpus()
    trace = CollectiveTrace()
    operations = profile(activities=[ProfilerActivity.CPU])
    norms: list[float] = []
    # From the start: Titan binds each module's forward when it parallelizes.
    with patched(run):
        with no_accelerator.layout_independent_init(), quick_initialisation():
            trainer = make_config(run, folder).build()
        if run.compiled and run.parallelize == "stock":
            _count_experts_once(trainer)
        routing = _watch_routing(trainer) if run.watch_routing else []
        _observe_steps(trainer, run, trace, operations, norms)
        trainer.train()
    result = RankResult(
        state_hash=state_hash(trainer),
        grad_norms=norms,
        collectives=trace.events,
        gradients=_full_gradients(trainer) if run.keep_gradients else {},
        routing=routing,
        operations=operations_in(operations) if run.profiled_step else Counter(),
        graphs=counters["stats"]["unique_graphs"],
    )
    trainer.close()
    dist.barrier()
    return result


def operations_in(profiler: profile) -> Counter[str]:
    """Calls by name. ``profiler.events()`` would make an object for each, for seconds."""
    return Counter(e.name() for e in cast(Any, profiler.profiler).kineto_results.events())


def _watch_routing(trainer) -> list[tuple[str, bool, np.ndarray]]:
    calls: list[tuple[str, bool, np.ndarray]] = []
    for part in trainer.model_parts:
        for name, module in part.named_modules():
            if type(module).__name__ == "TokenChoiceTopKRouter":

                def note(module, args, output, name=name) -> None:
                    ids = output[1]
                    local = ids.to_local() if isinstance(ids, DTensor) else ids
                    calls.append(
                        (canonical_fqn(name), in_backward(), local.detach().clone().numpy())
                    )

                module.register_forward_hook(note)
    return calls


def _observe_steps(
    trainer, run: Run, trace: CollectiveTrace, operations: profile, norms: list[float]
) -> None:
    step = trainer.train_step
    log = trainer.metrics_processor.log

    def observed_step(data_iterator) -> None:
        with contextlib.ExitStack() as observers:
            if trainer.step == run.traced_step:
                observers.enter_context(trace)
            if trainer.step == run.profiled_step:
                observers.enter_context(operations)
            step(data_iterator)
        if run.keep_gradients and trainer.step == run.steps:
            trainer.kept = {
                canonical_fqn(name): param.grad
                for part in trainer.model_parts
                for name, param in part.named_parameters()
            }

    def observed_log(step: int, loss: float, max_loss: float, grad_norm: float, **kwargs) -> None:
        norms.append(grad_norm)
        log(step, loss, max_loss, grad_norm, **kwargs)

    trainer.train_step = observed_step
    trainer.metrics_processor.log = observed_log


def _full_gradients(trainer) -> dict[str, np.ndarray]:
    full = {
        # numpy: a tensor sent through a pipe lives in the memory of the process that sent it
        name: (grad.full_tensor() if isinstance(grad, DTensor) else grad).numpy()
        for name, grad in trainer.kept.items()
        if grad is not None
    }
    return full if dist.get_rank() == 0 else {}


def _count_experts_once(trainer) -> None:
    """Titan halves the load of checkpointed blocks, but compiled ones count it in forward alone."""
    for part in trainer.model_parts:
        for block in part.layers.values():
            block.checkpoint_impl = None


def state_hash(trainer) -> str:
    """SHA-256 over every parameter, buffer and optimizer state of this rank, by name."""
    digest = hashlib.sha256()
    names: dict[nn.Parameter, str] = {}
    tensors: dict[str, Any] = {}
    for index, part in enumerate(trainer.model_parts):
        for name, param in part.named_parameters():
            names[param] = f"{index}.{canonical_fqn(name)}"
            tensors[names[param]] = param
        for name, buffer in part.named_buffers():
            tensors[f"{index}.{canonical_fqn(name)}"] = buffer
    for optimizer in trainer.optimizers.optimizers:
        for param, state in optimizer.state.items():
            for key, value in state.items():
                tensors[f"{names[param]}.{key}"] = value
    for name in sorted(tensors):
        tensor = tensors[name]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(f"{name}{tuple(local.shape)}{local.dtype}".encode())
        digest.update(
            local.detach().contiguous().view(torch.uint8).numpy().tobytes()
            if local.dim()
            else str(local.item()).encode()
        )
    return digest.hexdigest()
