# SPDX-License-Identifier: BSD-3-Clause
"""One training of the small job on this rank: ours or stock TorchTitan's, in fp32 or its dtypes.

The trainer is the job's own. Its batches, its first weights and what is kept of each step are
verify's. Nothing of the job is patched: a dispatch mode keeps fp32 what the model would cast.
"""

import contextlib
import copy
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchao.quantization import NF4Tensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import MoE
from torchtitan.trainer import Trainer as TitanTrainer

import titan_ext
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.memory_report import kept_tensors
from titan_ext.base import no_accelerator
from titan_ext.base.messages import checks_later
from titan_ext.base.tensors import local_tensor, optimizer_states, plain_tensors, wrapping
from titan_ext.base.titan.batch import tokens_of_microbatch
from titan_ext.base.titan.parallelism import data_rank, keep_frozen, load_groups
from titan_ext.fp8.codec import Codec, use_codec
from titan_ext.fsdp.collectives import Float8AllGather
from titan_ext.fsdp.units import decoder_blocks, param_groups
from titan_ext.parallelize.keys import FACTS
from titan_ext.parallelize.limits import value_of
from titan_ext.plan.stand_ins import RankOrder, as_rank, as_stock, in_full_precision
from titan_ext.run.trainer import Trainer
from titan_ext.verify.buffered import run_on_a_cpu
from titan_ext.verify.small import RESHARD, STEPS, SmallJob, resumes, set_key
from titan_ext.verify.tape import PastCompilers, Replayed

POLICY = "activation_checkpoint.policy"
_EXACTLY = {key: facts.off for key, facts in FACTS.items() if facts.narrow}
"""Keys that have fewer bits without the codec, and exact values. Others have an exact codec."""
_TORCH, _OURS = (Path(module.__file__).parent for module in (torch, titan_ext))
_NO_MODEL = {"distributed", "optim", "optimizer", "torchao"}
"""Folders of torch and Titan, and a package, in which dtypes are those of the config."""
_IN_A_BLOCK = re.compile(r"(mtp_)?layers\.[^.]+\.[^.]+")
_DISPATCHER = "token_dispatcher"
_FAR = 64.0
"""A bias of an expert that no score can make up for."""
_FORCE = 2.0
"""One that scores below 1 cannot, and that costs them one bit."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A training of the small job."""

    stock: bool = False
    """Titan's own parallelize function and trainer, without titan_ext's keys."""
    fp32: bool = True
    """All in fp32; else in the job's dtypes."""
    exact: bool = True
    """Nothing in fewer bits than the job's dtypes: what stores or sends float8 does so with a codec
    that changes nothing."""
    table: bool = True
    """With the job's ``op_policies``. They name operations, which other dtypes and other keys do
    not have."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Keys that differ from the job's."""
    seed: int = 0
    """Of weights and tokens."""
    steps: int = STEPS
    """How many it trains: a fault that is in the first needs no second."""
    graphs: str = ""
    """Either "replayed" as CUDA graphs would, "python" as they are held against, or ""."""

    def config_of(self, job: SmallJob, *, masks: bool = True, documents: bool = False) -> Any:
        """The trainer's config of this arm; that of ``job`` stays as it is.

        In fp32 attention has its ``masks``, or ``documents`` in their place. Elsewhere the tables
        of ``op_policies`` name the operations of plain attention.
        """
        config = copy.deepcopy(job.config)
        changes = dict(self.changes)
        if self.exact:
            changes |= {key: value for key, value in _EXACTLY.items() if key not in changes}
        for key, value in changes.items():
            set_key(config, key, value)
        if self.fp32:
            config.training.dtype = config.training.mixed_precision_param = "float32"
            in_full_precision(config.model_spec, emulates=False)
        policy = config.activation_checkpoint
        if isinstance(policy, FP8AC.Config):
            changed: dict[str, Any] = {"exempt": ["*"]} if self.fp32 else {}  # fp32 stays exact
            if self.fp32 or not self.table:
                changed |= {"op_policies": {}, "offload_limit": ""}
            with checks_later():  # "nothing would be stored in float8" is what is wanted here
                config.activation_checkpoint = replace(policy, **changed)
        if not self.saves(job):
            config.checkpoint = replace(config.checkpoint, enable=False)
        if (self.fp32 and masks) or job.large_layout.cp > 1:
            no_accelerator.keep_masks(config.model_spec, documents=documents)
        no_accelerator.adapt_config(config)
        if self.stock:
            if isinstance(value_of(config, RESHARD), int):  # ours; Titan has three words
                set_key(config, RESHARD, "default")
            config.training.enable_cpu_offload = False  # Titan's pins memory, which no CPU can
            as_stock(config)
        run_on_a_cpu(config, drops=bool(self.graphs))
        return config

    def saves(self, job: SmallJob) -> bool:
        """True if this arm ends with a checkpoint from which a job goes on."""
        return self.fp32 and self.steps == STEPS and resumes(job.config)


class KeepDtype(PastCompilers):
    """Leaves tensors in fp32 where anything asks for bfloat16; the job's own dtypes see the rest.

    Titan's experts call ``Tensor.bfloat16`` (torchtitan/models/common/moe.py), whatever the job's
    dtype is. A torch function mode would see that call, but not the one of a recompute: torch takes
    it away around ``backward`` (torch/_tensor.py). ``rounded`` gets the places in a model that
    round for no kernel's sake. They do so here, too.
    """

    def __init__(self, rounded: set[str] | None = None) -> None:
        super().__init__()
        self._rounded = rounded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
            rounded = self._rounded
            if rounded is not None and (place := _place_in_a_model(sys._getframe(1))):
                rounded.add(place)
            else:
                kwargs = kwargs | {"dtype": args[0].dtype}
        return func(*args, **kwargs)


def _place_in_a_model(frame: Any) -> str:
    """Line and function of a model that a frame is called from; "" in what dtypes are for.

    That is FSDP, optimizers, torchao, compiled code, and modules with a ``_grouped_mm``, whose
    kernel takes bfloat16 alone.
    """
    while frame is not None:
        code, file = frame.f_code, Path(frame.f_code.co_filename)
        is_meant = not _NO_MODEL.isdisjoint(file.parts)
        of_experts = hasattr(frame.f_locals.get("self"), "_grouped_mm")
        if is_meant or of_experts or code.co_filename.startswith("<"):
            return ""
        if not any(file.is_relative_to(folder) for folder in (_TORCH, _OURS)):  # modes, and torch
            return f"{file}:{frame.f_lineno} ({code.co_qualname})"
        frame = frame.f_back
    return ""


def fill(name: str, tensor: torch.Tensor, seed: int) -> None:
    """Give a parameter or buffer, sharded or not, random values that its name decides."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    shape = tensor.shape
    is_scale = len(shape) == 1 and "norm" in name and not name.endswith("bias")
    std = 0.1 if len(shape) < 2 else min(shape[-1] ** -0.5, 0.3)
    values = torch.randn(shape, generator=generator, dtype=torch.float32) * std + is_scale
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            no_accelerator.fill_whole(tensor, lambda whole: whole.copy_(values))
        else:
            tensor.copy_(values)


def fill_model(parts: list[Any], seed: int, routing: str) -> None:
    """``fill`` all that a model learns: biases, norms and experts' biases too.

    With ``routing`` "idle" no token goes to the first expert, and with "skewed" all do.
    """
    first = {"idle": -_FAR, "skewed": _FAR}.get(routing)
    for part in parts:
        for name, param in part.named_parameters():
            fill(canonical_fqn(name), param, seed)
        for name, buffer in part.named_buffers():
            if name.endswith("expert_bias_E"):
                fill(canonical_fqn(name), buffer, seed)
                if first is not None:
                    with torch.no_grad():
                        buffer[0] = first


def force_routing(parts: list[Any], job: SmallJob, step: int) -> None:
    """Give experts the biases of a step: in the second all tokens go to the first rank's experts.

    In the third the last rank's get none. Of a job that does not spread its experts it is one.
    """
    if job.routing != "balanced":
        return
    for part in parts:
        for name, buffer in part.named_buffers():
            if name.endswith("expert_bias_E"):
                bias_E = local_tensor(buffer)
                own = -(-len(bias_E) // job.expert_ranks) if job.expert_ranks > 1 else 1
                if step in (2, 3):
                    bias_E[:own] += _FORCE if step == 2 else -_FORCE
                if step in (3, 4):
                    bias_E[-own:] += -_FORCE if step == 3 else _FORCE


def sample(
    number: int, job: SmallJob, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and labels ``(L,)`` of one sample: packed documents, some tokens ignored.

    The number of the sample decides how many tokens count, so that ranks and microbatches have
    unequally many; of the second step's last microbatch, and of a rank in the third step, none do.
    """
    samples, words = job.samples, job.config.model_spec.model.vocab_size
    length = samples.length
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + number)
    tokens = torch.randint(0, words, (length + 1,), generator=generator)
    tokens[:2] = torch.tensor([0, words - 1])
    inner = 1 + torch.randperm(length - 1, generator=generator)
    first = sorted([0, *inner[: (0, 1, 3)[number % 3]].tolist()])  # of each document
    positions = torch.arange(length)
    for start in first:
        positions[start:] = torch.arange(length - start)
    labels = tokens[1:].clone()
    counted = torch.rand(length, generator=generator) < 0.3 + 0.1 * (number % 7)
    counted[0] = True
    step, of_step = divmod(number, samples.step)
    is_last = of_step // (samples.step // samples.passes) == samples.passes - 1
    is_first_rank = samples.ranks > 1 and number // samples.microbatch % samples.ranks == 0
    if (step % 3 == 1 and is_last) or (step % 3 == 2 and is_first_rank):
        counted[:] = False
    return tokens[:-1], positions, labels.masked_fill(~counted, IGNORE_INDEX)


def batch(numbers: range, job: SmallJob, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Samples as Titan's loaders give them."""
    tokens, positions, labels = zip(*(sample(n, job, seed) for n in numbers), strict=True)
    return {"input": torch.stack(tokens), "positions": torch.stack(positions)}, torch.stack(labels)


def max_norm(job: SmallJob, step: int) -> float:
    """The norm at which a step clips, which it does not where it is even."""
    return job.max_norms[1 - step % 2]


def samples_of_step(job: SmallJob, step: int) -> range:
    """Numbers of the samples of a step of all ranks; steps count from 1."""
    return range((step - 1) * job.samples.step, step * job.samples.step)


_dims: list[ParallelDims] = []
"""The meshes of this process: Titan and FSDP2 find them by identity."""


class _Watched:
    """A trainer with verify's batches and first weights, of which each step's tensors are kept."""

    config: Any
    model_parts: list[Any]
    optimizers: Any
    lr_schedulers: Any
    step: int

    def __init__(
        self, config: Any, job: SmallJob, arm: Arm, folder: Path, saved: Path | None
    ) -> None:
        self.job, self.arm, self.folder = job, arm, folder
        self.counts: dict[str, torch.Tensor] = {}
        self.kept: dict[str, Any] = {}
        config.dump_folder = str(saved or folder)
        spec = config.model_spec

        def parallelize(model: nn.Module, **arguments: Any) -> Any:
            # What is frozen stays frozen: TorchTitan 0.3 trains it under ``spmd_types``.
            with keep_frozen(model) if arm.stock else contextlib.nullcontext():
                result = spec.parallelize_fn(model, **arguments)
            sum_in_order(result)
            return result

        config.model_spec = replace(
            spec,
            parallelize_fn=parallelize,
            post_optimizer_build_fn=self._count_first(spec.post_optimizer_build_fn),
        )
        super().__init__(config)  # type: ignore[call-arg]
        if saved is None:  # else all of it is loaded
            fill_model(self.model_parts, arm.seed, job.routing)

    def init_distributed(self) -> ParallelDims:
        if not _dims:
            _dims.append(super().init_distributed())  # type: ignore[misc]
        return _dims[0]

    def _count_first(self, build: Callable[..., None] | None) -> Callable[..., None]:
        """Read the experts' loads before Titan's hook on the optimizer clears them."""

        def built(optimizers: Any, parts: Any, dims: ParallelDims) -> None:
            self.kept["balances"] = build is not None
            optimizers.register_step_pre_hook(lambda *_: self._count(parts, dims))
            if build is not None:
                build(optimizers, parts, dims)

        return built

    def _count(self, parts: Any, dims: ParallelDims) -> None:
        """Tokens of each expert over all ranks, summed over the axes that Titan's hook sums."""
        for part in parts:
            for block_name, block in decoder_blocks(part):
                for name, module in block.named_modules():
                    if not isinstance(module, MoE):
                        continue
                    counts = module.tokens_per_expert_E.detach().clone()
                    if isinstance(counts, DTensor):  # partial over the axes that are summed below
                        counts = counts.to_local()
                    if getattr(block, "checkpoint_impl", None) is CheckpointImpl.NO_REENTRANT:
                        counts //= 2  # as Titan's hook does
                    for group in load_groups(dims):
                        dist.all_reduce(counts, group=group)
                    self.counts[f"load:{canonical_fqn(f'{block_name}.{name}')}"] = counts
                    if not self.kept["balances"]:  # nobody clears them
                        module.tokens_per_expert_E.zero_()

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
        ranks, config = self.job.layout.data_ranks, self.config
        tokens, length = tokens_of_microbatch(config.training, config.parallelism)
        size = tokens // length
        before = samples_of_step(self.job, self.step).start  # of the first that asks
        first = before + data_rank(_dims[0]) * size
        while True:
            yield batch(range(first, first + size), self.job, self.arm.seed)
            first += ranks * size

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        self.config.training.max_norm = max_norm(self.job, self.step)
        with torch.no_grad():
            force_routing(self.model_parts, self.job, self.step)
        super().train_step(data_iterator)  # type: ignore[misc]
        self.keep(self.step, dict(self.counts), grads=True)

    def keep(self, step: int, tensors: dict[str, torch.Tensor], *, grads: bool) -> None:
        """Write ``tensors`` and those of the model, and what the optimizer knows at a save.

        Ranks call it together. Each writes its shards; of those of a stage one writes the rest.
        """
        found: dict[str, torch.Tensor | None] = {}
        saves = step == STEPS and self.arm.saves(self.job)
        for part in self.model_parts:
            for name, param in part.named_parameters():
                name = canonical_fqn(name)
                found |= {f"grad:{name}": param.grad if grads else None, f"param:{name}": param}
            for name, buffer in part.named_buffers():
                kind = "bias" if name.endswith("expert_bias_E") else "buffer"
                if kind == "bias" or self.arm.graphs or saves:
                    tensors[f"{kind}:{canonical_fqn(name)}"] = whole(buffer).clone()
            for name, module in part.named_modules() if self.arm.graphs else ():
                if (rows := getattr(getattr(module, _DISPATCHER, None), "rows", None)) is not None:
                    tensors[f"buffer:{canonical_fqn(name)}.{_DISPATCHER}.rows"] = rows.clone()
        if saves:
            found |= self._states()
        digests = self.kept.setdefault("digests", {})
        writes = dist.get_rank() % (dist.get_world_size() // _dims[0].pp) == 0  # one of a stage
        kept: dict[str, Any] = {**tensors} if writes else {}
        for name, tensor in found.items():
            if tensor is not None:
                values, start, is_first = shard_of(tensor, writes)
                digests[f"{name} of step {step}", start] = _digest(values)
                if is_first:
                    kept[name] = values.clone(), start, tuple(tensor.shape)
        torch.save(kept, self.folder / f"step{step}_rank{dist.get_rank()}.pt")

    def _states(self) -> dict[str, torch.Tensor]:
        """The optimizer's states and rates, by name of parameter, and those of the schedule."""
        counts = self.lr_schedulers.state_dict()
        found = {f"state:{key} of the schedule": torch.as_tensor(counts[key]) for key in counts}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for name, param in zip(group["param_names"], group["params"], strict=True):
                    states = {**optimizer.state.get(param, {}), "lr": torch.as_tensor(group["lr"])}
                    for key, state in states.items():
                        found[f"state:{key} of {canonical_fqn(name)}"] = state
        return found

    def dtypes(self) -> dict[str, str]:
        """Dtypes of what is trained, of what FSDP sends, and of what the optimizer keeps."""
        params = [param for part in self.model_parts for param in part.parameters()]
        # Of parameters: torch 2.15's groups have none.
        policies = [p.mp_policy for group in self._groups() for p in group.fsdp_params]
        states = optimizer_states(self.optimizers)
        found = {
            "parameters": [param.dtype for param in params],
            "gathered in": [policy.param_dtype for policy in policies],
            "gradients": [param.grad.dtype for param in params if param.grad is not None],
            "reduced in": [policy.reduce_dtype for policy in policies],
            "optimizer": [state.dtype for state in states if state.ndim],
        }
        said = {
            name: sorted({str(d).removeprefix("torch.") for d in found[name]}) for name in found
        }
        return {name: ", ".join(dtypes) for name, dtypes in said.items() if dtypes}

    def engaged(self) -> dict[str, int]:
        """In how many places of this rank there is what a key asks for, by its name."""
        modules = [module for part in self.model_parts for module in part.modules()]
        moes = [module for module in modules if isinstance(module, MoE)]
        ways = [moe.routed_experts.token_dispatcher for moe in moes]
        gathers = [isinstance(group._all_gather_comm, Float8AllGather) for group in self._groups()]
        kept = kept_tensors(self.model_parts)
        return {
            "parallelism.exchange_dtype": sum(getattr(way, "sends_float8", False) for way in ways),
            "parallelism.fsdp_float8_all_gather": sum(gathers),
            POLICY: sum(count for kind, count in kept.items() if kind.startswith("float8")),
        }

    def _groups(self) -> list[Any]:
        return [group for part in self.model_parts for group in param_groups(part.modules())]


def _digest(tensor: torch.Tensor) -> int:
    """A checksum of the bytes: equal on all ranks that have the whole tensor."""
    return zlib.crc32(tensor.flatten().view(torch.uint8).numpy().tobytes())


class OurTrainer(_Watched, Trainer):
    """titan_ext's trainer, without the checks of a run."""

    run_checks = ()


class StockTrainer(_Watched, TitanTrainer):
    """TorchTitan's own."""


def shard_of(
    tensor: torch.Tensor, is_first: bool
) -> tuple[torch.Tensor, tuple[int, ...] | None, bool]:
    """This rank's part of a tensor, where that begins, and if it is the first that has it.

    Of a tensor without plain shards, such as one that FSDP shards over TP, it is all, and
    ``is_first`` as given. Ranks call it together.
    """
    places: Any = getattr(tensor, "placements", (None,))
    if not all(type(place) in (Shard, Replicate) for place in places):
        return whole(tensor), None, is_first
    mesh = cast(DTensor, tensor).device_mesh
    _, start = compute_local_shape_and_global_offset(tensor.shape, mesh, places)
    at = zip(mesh.get_coordinate() or (), places, strict=True)
    is_first = not any(index for index, place in at if place.is_replicate())
    return whole(local_tensor(tensor)), tuple(start), is_first


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of a sharded one, without its graph; ranks call it together.

    Plain, too: a shard that is whole already has the class in which FSDP gathers it in float8, and
    one in NF4 is what it stands for.
    """
    tensor = tensor.detach()
    local = local_tensor(tensor)
    if isinstance(local, NF4Tensor):
        tensor = wrapping(tensor)(local.get_original_weight())
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    parts = plain_tensors(tensor)
    return parts[0] if len(parts) == 1 else tensor


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole gradients of a model, by name; ranks call it together."""
    named = model.named_parameters()
    return {canonical_fqn(name): whole(p.grad) for name, p in named if p.grad is not None}


def sum_in_order(model: nn.Module) -> None:
    """Let gradients be summed in one order, whatever FSDP's units are, and over gloo, in place.

    Where a unit begins, FSDP's hook adds up what its operations send their input before that of a
    residual. A CPU has no kernel of RMSNorm, and attention may read what it gets several times. So
    all norms add theirs up, and all children of blocks.
    """
    no_accelerator.reduce_without_premul_sum(model)
    for path, module in model.named_modules():
        if isinstance(module, nn.RMSNorm) or _IN_A_BLOCK.fullmatch(canonical_fqn(path)):
            module.register_forward_pre_hook(_as_one_node)
    for group in param_groups(model.modules()):
        if type(group._reduce_scatter_comm) is DefaultReduceScatter:
            group._reduce_scatter_comm = RankOrder()


def _as_one_node(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    if not args or torch.compiler.is_compiling():  # which orders sums by itself
        return args
    x, *others = args
    return x.view_as(x), *others


def run_arm(
    job: SmallJob, arm: Arm, rank: int, folder: Path, saved: Path | None = None
) -> dict[str, Any]:
    """Train the arm's steps and save; the whole tensors of each are files in ``folder``.

    ``saved`` is the folder of an arm that has done this, to resume from instead. What was loaded is
    in the files of its last step, and one step more is trained.

    Returns what was seen beside them: losses (those of a rank that ``has_loss`` count) and gradient
    norms by step, checksums of tensors, dtypes, and the step that was ``loaded``.
    """
    no_accelerator.enable()
    config = arm.config_of(job)
    kind: Any = StockTrainer if arm.stock else OurTrainer
    nodes, world = job.layout.nodes, job.layout.world
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_rank(world, rank, nodes.ranks, nodes.nvlink_domain))
        torch._dynamo.reset()  # else what the arm before compiled counts as recompiled
        stack.enter_context(no_accelerator.eager_masks())
        stack.enter_context(no_accelerator.list_all_to_all())  # Titan's dispatcher may be ours, too
        if arm.exact:
            stack.enter_context(use_codec(Codec("exact")))
        rounded: set[str] = set()
        if arm.fp32:
            stack.enter_context(KeepDtype(rounded))
        with no_accelerator.layout_independent_init():
            trainer = kind(config, job, arm, folder, saved)
        seen = trainer.kept
        seen["loss"], seen["norm"] = [], []

        def log(step: int, loss: float, max_loss: float, norm: float, **_: Any) -> None:
            seen["loss"].append(loss)
            seen["norm"].append(norm)

        if arm.graphs:
            trainer.config.training.disable_cuda_graphs = False  # gradients keep their storages
            graph = Replayed(trainer.fwd_bwd_fn, trainer.model_parts, arm.graphs == "replayed")
            trainer.fwd_bwd_fn, seen["graph"] = graph, graph.seen
        trainer.metrics_processor.log = log
        trainer.metrics_processor.should_log = lambda step: True
        steps = range(1, arm.steps + 1)
        if saved is not None:
            trainer.checkpointer.load()
            seen["loaded"] = trainer.step
            trainer.step = STEPS
            trainer.keep(STEPS, {}, grads=False)
            steps = range(STEPS + 1, STEPS + 2)
        batches = trainer.batch_generator(None)
        for trainer.step in steps:  # Titan's train() sleeps two seconds at its end
            trainer.train_step(batches)
            if saved is None:
                trainer.checkpointer.save(trainer.step)
        trainer.checkpointer.maybe_wait_for_saving()
        trainer.checkpointer.close()
    assert trainer.gradient_accumulation_steps == job.samples.passes
    seen["rounded"] = sorted(rounded)
    seen["has_loss"] = getattr(trainer, "pp_has_last_stage", True)
    seen["keeps"] = bool(kept_tensors(trainer.model_parts))
    return seen | {"dtypes": trainer.dtypes(), "engaged": trainer.engaged()}
