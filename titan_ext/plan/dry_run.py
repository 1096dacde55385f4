# SPDX-License-Identifier: BSD-3-Clause
"""One training step as one rank of a large job, on a laptop, with nothing of its size.

Titan's own trainer builds the real model on the meta device and our ``parallelize`` shards it over
a fake process group. From there on tensors are fake (shapes without data), so that forward, loss,
backward, clipping and the optimizer run at any size. Nothing is allocated, loaded or written. What
would stop the job at its start stops here, with the same message.

``titan_ext dry-run FILE --ranks 512`` prints ``DryRun.report``. Those of one process have the same
degrees.
"""

import contextlib
import copy
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.distributed_c10d import get_pg_count
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.stage import PipelineStage
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.token_dispatcher import HybridEPTokenDispatcher

from titan_ext.activation_checkpoint.compile import pieces_in
from titan_ext.activation_checkpoint.op_rules import has_budget
from titan_ext.activation_checkpoint.policy import FP8AC
from titan_ext.base import no_accelerator
from titan_ext.base.machines import machine_of
from titan_ext.base.messages import format_bytes, format_count
from titan_ext.base.nodes import nvlink_domain, ranks_per_node
from titan_ext.base.run_folder import RECORD
from titan_ext.base.tensors import optimizer_states, plain_tensors
from titan_ext.base.titan.batch import microbatches_of_pass, tokens_of_microbatch
from titan_ext.base.titan.parallelism import pipeline_mesh
from titan_ext.components.early_scores import with_early_scores
from titan_ext.components.hf_export import HuggingFaceExport
from titan_ext.fsdp.plan import count_units, plan_of
from titan_ext.plan.budget import BudgetPlan, TracedBlocks, settings_of, without_checkpointing
from titan_ext.plan.live import LASTING, LiveBytes
from titan_ext.plan.memory import JobClass, MemoryPlan
from titan_ext.plan.pools import COMPONENTS
from titan_ext.plan.schedules import actions_of, idle_share
from titan_ext.plan.solver import BudgetTooSmallError
from titan_ext.plan.stand_ins import Buffer, NoDataLoader, NoTokenizer, use_stand_ins
from titan_ext.plan.time import EAGER, POLICIES, Category, How, StepClock, StepTime
from titan_ext.run.checks import LoRATargets
from titan_ext.run.pace import Routing
from titan_ext.run.trainer import Trainer
from titan_ext.run.weights import check_weights

_AT_ONCE = 128
"""Parameters in a call of clipping and optimizer: torch's time grows with the square of the list.

A foreach optimizer gets all, since it makes temporaries for all."""
_LESS = 0.98
"""The next budget of blocks that hold too much, at most, over the last one."""
_OF_A_GPU = "triton", "rht_sign_vector is not materialized"
"""Text in errors of torchao's kernels, and of TorchTitan's NVFP4, whose buffer is theirs."""


class DryRun(Trainer):
    """The trainer of one rank of ``ranks``, up to and including one step on fake tensors.

    ``forward_backward``, ``clip`` and ``optimize`` are the parts of ``run_step``.
    """

    run_checks = (LoRATargets,)

    def __init__(self, config: Trainer.Config, ranks: int, rank: int = 0) -> None:
        self.ranks, self.rank = ranks, rank
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.model_parameters = 0
        """Parameter count of the whole, unsharded model."""
        self.memory: MemoryPlan | None = None
        self.time: StepTime | None = None
        self.clock: StepClock | None = None
        self.imbalance = 1.0
        self.dispatchers: Sequence[str] = ()
        """Names of the dispatchers that are planned as Titan's all-to-all."""
        self.how, self.remedies = EAGER, tuple[How, ...]()
        self.weights = ""
        with contextlib.ExitStack() as self._building:
            super().__init__(self._without_side_effects(config))
        self.process_groups = get_pg_count()
        if self.parallel_dims.pp_enabled:
            self._tell_stages_their_shapes()

    def _without_side_effects(self, config: Trainer.Config) -> Trainer.Config:
        """``config`` without what reads or writes files, with fake tensors once it is sharded."""
        spec = config.model_spec
        assert spec is not None
        is_pipelined = config.parallelism.pipeline_parallel_degree > 1 and spec.pipelining_fn
        name = "pipelining_fn" if is_pipelined else "parallelize_fn"  # one calls the other
        parallelize: Callable[..., Any] = getattr(spec, name)

        def then_fake(model: nn.Module, **arguments: Any) -> Any:
            # Before it nothing has a size: the model is on the meta device. Meshes need real
            # tensors. After it no weight is initialised.
            self.model_parameters = sum(p.numel() for p in model.parameters())
            result = parallelize(model, **{**arguments, "dump_folder": ""})  # policies write there
            for part in result[1] if isinstance(result, tuple) else [result]:
                part.init_weights = lambda **_: None  # torch's initialisers look at values
            self._building.enter_context(self.fake)
            return result

        functions: dict[str, Any] = {name: then_fake}
        return replace(
            config,
            model_spec=replace(spec, **functions),
            dataloader=NoDataLoader.Config(),
            tokenizer=NoTokenizer.Config(),
            checkpoint=replace(config.checkpoint, enable=False),
            metrics=replace(config.metrics, enable_tensorboard=False, enable_wandb=False),
            validator=replace(config.validator, enable=False),
            debug=replace(config.debug, print_config=False, save_config_file=None),
        )

    def init_distributed(self) -> ParallelDims:
        self.device = torch.device("cpu")  # not "cpu:0": to a fake tensor that is another device
        # As Titan does, for every mode: a thread of autograd's would not find the meshes of
        # spmd_types in a recompute (torchtitan/distributed/utils.py).
        torch.autograd.set_multithreading_enabled(False)
        dims = ParallelDims.from_config(self.config.parallelism, self.ranks)
        names = (field.name for field in fields(dims))
        return _layout(self.rank, **{x: getattr(dims, x) for x in names if not x.startswith("_")})

    def _tell_stages_their_shapes(self) -> None:
        """Give stages the shapes that they would first tell each other, of what they send."""
        config, dims = self.config, self.parallel_dims
        in_sequence = dims.tp if config.parallelism.enable_sequence_parallel else 1
        count, length = self._microbatch
        sequences, here = count // length, length // dims.cp  # tokens of a sequence, on this rank
        model: Any = self.model_config
        dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
        hidden = torch.empty(
            *(sequences, here // in_sequence, model.dim),
            dtype=dtype,
            device="meta",
            requires_grad=True,
        )
        tokens = torch.empty(sequences, here, dtype=torch.int64, device="meta")
        is_chunked = isinstance(self.loss_fn, ChunkedLossWrapper)
        logits = tokens.new_empty(*tokens.shape, model.vocab_size, dtype=dtype)
        for stage in self.stages:
            is_head = stage.is_last and not is_chunked
            told = PipelineStage(
                nn.Identity(),
                stage.stage_index,
                stage.num_stages,
                stage.device,
                input_args=tokens if stage.is_first else hidden,
                output_args=logits.requires_grad_() if is_head else hidden,
                group=stage.group,
            )
            # torch takes shapes as a stage is made, and Titan makes its stages without them
            # (torchtitan/distributed/pipeline_parallel.py).
            stage._user_meta = told._user_meta

    @property
    def _microbatch(self) -> tuple[int, int]:
        """Tokens of a microbatch and of a sequence."""
        return tokens_of_microbatch(self.config.training, self.config.parallelism)

    @property
    def _microbatches(self) -> int:
        return microbatches_of_pass(self.config.training, self.config.parallelism)

    @property
    def stages(self) -> Sequence[Any]:
        """The pipeline stages of this rank."""
        if not self.parallel_dims.pp_enabled:
            return ()
        schedule: Any = self.pp_schedule
        # Schedules of several stages a rank have a list, the others one; neither name is public.
        return getattr(schedule, "_stages", None) or [schedule._stage]

    def run_step(self, at: Callable[[str], None] = lambda phase: None) -> None:
        """One training step; ``at`` is told of what no module shows. Later accumulation steps than
        the second do as that does. Raises ValueError if a part of it needs values, which fake
        tensors do not have, or kernels that torch lacks on a CPU.
        """
        try:
            for _ in range(min(self.gradient_accumulation_steps, 2)):
                at("start")
                self.forward_backward()
            at("clip")
            self.clip()
            at("optimizer")
            self.optimize()
        except DataDependentOutputException as error:
            raise ValueError(
                f"this model cannot be dry-run: a part of its step needs values ({error.func}), "
                "and a dry run has shapes only."
            ) from error
        except (AssertionError, NotImplementedError, RuntimeError) as error:
            if not any(words in str(error) for words in _OF_A_GPU):
                raise
            raise ValueError(
                f"this model cannot be dry-run: {error}. Float8 linears can be planned. MXFP8, "
                "NVFP4 and float8 experts need Triton, which torch lacks where it sees no GPU."
            ) from error

    def plan(self, memory: int | None, machine: str = "") -> None:
        """Run a step, steady as any but a run's first; count what it holds, or its time."""
        self._start_as_second_step()
        on_host = LASTING if self.config.training.enable_cpu_offload else ()
        live = LiveBytes(
            self.model_parts, self.optimizers, on_host=on_host, compiled=self.how.compiled
        )
        clock, buffer = None, Buffer.of(self.model_parts)
        if machine:
            rates = machine_of(machine)
            self.clock = clock = StepClock(
                self.model_parts, live, rates, self.how, self.remedies, buffer
            )
        with live, clock or contextlib.nullcontext():
            self.run_step(live.begin)
        if memory is not None:
            self.memory = MemoryPlan.of(
                live,
                memory,
                ranks_per_node=ranks_per_node(),
                job=JobClass.of(self.how.compiled, self.parallel_dims.ep),
                unplanned=self.dispatchers,
                symmetric=buffer.symmetric,
            )
        if clock is not None:
            self.time = self._step_time(clock, machine)

    def _start_as_second_step(self) -> None:
        """Make the optimizer's states, and leave FSDP as the chunked loss of a step leaves it."""
        with self.fake:
            for parameter in (p for part in self.model_parts for p in part.parameters()):
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        self.clip()
        self.optimize()
        self.optimizers.zero_grad()
        head = getattr(self.loss_fn, "lm_head", None)
        if isinstance(head, FSDPModule):
            # ChunkedLossWrapper switches it off before its chunks and on behind them.
            head.set_reshard_after_forward(True)

    def _step_time(self, clock: StepClock, machine: str) -> StepTime:
        spec = self.config.model_spec
        assert spec is not None
        flops = self.metrics_processor.num_flops_per_token
        one = clock.passes[0].ms[self.how]
        forward = one[Category.FORWARD] / sum(
            one[category]
            for category in (Category.FORWARD, Category.LOSS, Category.RECOMPUTE, Category.BACKWARD)
        )
        idle = idle_share(actions_of(self.pp_schedule), forward) if self.stages else 0.0
        steps, dims = self.gradient_accumulation_steps, self.parallel_dims
        rates = machine_of(machine)
        tokens = self._microbatch[0] * self._microbatches * steps
        return StepTime.of(
            clock.passes,
            self.how,
            accumulation=steps,
            idle=idle,
            machine=machine,
            tokens=tokens / dims.non_data_parallel_size,
            flops_per_token=flops if rates.name and not has_quantization(spec.model) else None,
            is_measured=rates.is_measured,
            host_is_ahead_ms=clock.host_is_ahead_ms,
        )

    def forward_backward(self) -> None:
        """Forward, loss and backward of one batch, with Titan's own function."""
        count, length = self._microbatch
        shape = (count // length, length)
        with self.fake:
            tokens = torch.zeros(shape, dtype=torch.int64, device=self.device)
            position = torch.arange(length, device=self.device)
            inputs = [
                {
                    "input": tokens.clone(),
                    "positions": position.repeat(count // length).view(shape),
                }
                for _ in range(self._microbatches)
            ]
            labels = [tokens.clone() for _ in inputs]
            is_pipelined = self.parallel_dims.pp_enabled
            self.forward_backward_step(
                input_dict=inputs if is_pipelined else inputs[0],
                labels=labels if is_pipelined else labels[0],
                global_valid_tokens=torch.ones((), device=self.device),
            )

    def clip(self) -> None:
        with self.fake:
            for some in _batches([p for part in self.model_parts for p in part.parameters()]):
                dist_utils.clip_grad_norm_(
                    some,
                    self.config.training.max_norm,
                    foreach=True,
                    pp_mesh=pipeline_mesh(self.parallel_dims),
                    ep_enabled=self.parallel_dims.ep_enabled,
                )

    def optimize(self) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups = [
                {**group, "params": some}
                for group in optimizer.param_groups
                for some in _batches(group["params"], everything=group.get("foreach"))
            ]
        with self.fake:
            self.optimizers.step()

    def _indices(self) -> str:
        return " and ".join(str(stage.stage_index) for stage in self.stages)

    def name(self) -> str:
        """The rank, and in a pipeline its stages."""
        return f"rank {self.rank}" + (f" (stage {self._indices()})" if self.stages else "")

    def report(self) -> str:
        """Text of the command: what was checked, and this rank's figures."""
        return "\n".join(f"{name:12}{text}" for name, text in self._facts())

    def _facts(self) -> Iterator[tuple[str, str]]:
        config, dims, spec = self.config, self.parallel_dims, self.config.model_spec
        assert spec is not None
        if self.memory is not None:
            yield "memory", self.memory.verdict(self.name())
            yield from (("", line) for line in self.memory.table())
        if self.time is not None:
            yield "time", self.time.verdict()
            yield "host", self.time.host
            yield from (("", line) for line in self.time.table())
        yield (
            "model",
            f"{spec.name} {spec.flavor}, {format_count(self.model_parameters)} parameters",
        )
        if self.weights:
            yield "weights", self.weights
        axes = {"replicated": dims.dp_replicate, "FSDP": dims.dp_shard, "CP": dims.cp}
        axes |= {"TP": dims.tp, "PP": dims.pp, "EP": dims.ep}
        shown = ", ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
        yield "nodes", f"{ranks_per_node()} ranks each, NVLink among {nvlink_domain()}"
        backend = config.parallelism.spmd_backend
        yield "layout", f"rank {self.rank} of {self.ranks}: {shown or 'one rank'} ({backend})"
        if self.stages:
            schedule = config.parallelism.pipeline_parallel_schedule
            count = self._microbatches
            stages = self.stages[0].num_stages
            found = f"{self._indices()} of {stages}, counted from 0; {schedule}"
            yield "stage", f"{found}, {count} microbatches"
            yield "groups", f"{self.process_groups} made at the start, all ranks together"
        (tokens, length), steps = self._microbatch, self.gradient_accumulation_steps
        tokens *= self._microbatches
        total = tokens * steps * dims.dp_replicate * dims.dp_shard
        yield (
            "batch",
            f"{tokens // length} x {length} tokens a rank, {total // length} sequences "
            f"({total:,} tokens) a step" + (f" in {steps} accumulation steps" if steps > 1 else ""),
        )
        if self.imbalance != 1:
            yield "", f"this rank's experts get {self.imbalance:g} times the balanced tokens"
        yield from (("capacity", said) for said in _capacity(config, dims.ep))
        plans = [plan for part in self.model_parts if (plan := plan_of(part))]
        units = [unit for plan in plans for unit in plan.decoder_units]
        yield "FSDP units", count_units(units) if plans else "stock TorchTitan's: whole blocks"
        for chosen in dict.fromkeys(plan.why for plan in plans if plan.why):
            yield "", chosen
        parameters = [p for part in self.model_parts for p in part.parameters()]
        mine = sum(part.numel() for p in parameters for part in plain_tensors(p))
        yield (
            "this rank",
            f"{format_count(mine)} parameters: {_nbytes(parameters)}, gradients "
            f"{_nbytes([p.grad for p in parameters if p.grad is not None])}, optimizer states "
            f"{_nbytes(optimizer_states(self.optimizers))}",
        )
        if self.memory is not None:
            most = format_bytes(self.memory.unsharded)
            yield "unsharded", f"at most {most}, all-gather buffers included"
        yield "ran", "forward, loss, backward, gradient clipping, optimizer, on fake tensors"
        eager = "torch.compile (ran eagerly), " if config.compile.enable else ""
        eager += "".join(f"{name} (ran as an all-to-all), " for name in self.dispatchers)
        unplanned = "" if self.memory is not None else "memory for activations (--memory), "
        yield ("not tried", f"{eager}kernels, {unplanned}data, tokenizer, checkpoints, the network")


def dry_run(
    config: Trainer.Config,
    ranks: int,
    rank: int = 0,
    *,
    memory: int | None = None,
    machine: str = "",
    as_on_a_gpu: bool = True,
    imbalance: float = 1.0,
    step: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> DryRun:
    """Build the trainer of ``rank`` of ``ranks`` and run one step of it.

    Args:
        config: It is changed.
        memory: Plan the memory, too, and hold it against these bytes of a device.
        machine: Time the step, too, on this one, as ``machine_of`` takes it.
        as_on_a_gpu: With the kernels of a GPU; a CPU's otherwise.
        imbalance: Tokens that this rank's experts get, for one if routing were balanced.
        step: Whether to run one, where nothing is planned.
        say: Is told what it does next.

    Raises ValueError for a config that would not start, or a machine whose accelerator is visible.
    """
    if not no_accelerator.needed():
        raise ValueError(
            "a dry run needs the accelerator hidden: set CUDA_VISIBLE_DEVICES= (empty)."
        )
    HuggingFaceExport().before_start(config)
    weights = check_weights(config, may_be_elsewhere=True)
    config = with_early_scores(config)  # the trainer's part, of experts that have no stand-ins yet
    dispatchers = use_stand_ins(config, as_on_a_gpu=as_on_a_gpu, imbalance=imbalance)
    how = _how(config)
    others = tuple(dict.fromkeys(_others(config))) if machine else ()
    no_accelerator.adapt_config(config)
    # What a compiler would fuse is taken out by rule (plan.pools).
    torch.compiler.set_stance("force_eager")
    say("building the model and its parallelism")
    run = DryRun(config, ranks, rank)
    run.how, run.remedies = how, tuple(other for other in others if other != how)
    run.imbalance, run.dispatchers, run.weights = imbalance, dispatchers, weights
    say("running a step on tensors without data")
    if memory is not None or machine:
        run.plan(memory, machine)
    elif step:
        run.run_step()
    return run


def _capacity(config: Any, ep: int) -> Iterator[str]:
    """What runs in this dump_folder say of the room that HybridEP needs, with as many ranks."""
    record = Path(config.dump_folder) / RECORD
    starts = json.loads(record.read_text())["starts"] if record.exists() else []
    found = [start.get("receipts", {}).get("routing", {}) for start in starts]
    dispatchers = config.model_spec.traverse(HybridEPTokenDispatcher.Config)
    factors = {factor for _, of, *_ in dispatchers if (factor := of.non_blocking_capacity_factor)}
    yield from Routing.verdict((each for each in found if each.get("ep") == ep), factors)


def _how(config: Trainer.Config) -> How:
    compiler = config.compile
    compiled = tuple(x for x in COMPONENTS if compiler.enable and x in compiler.components)
    asked, graphs = config.activation_checkpoint, not config.training.disable_cuda_graphs
    if not isinstance(asked, FP8AC.Config):
        return How(compiled, graphs)
    is_stock = asked.preset == "stock" and not asked.op_policies
    return How(compiled, graphs, policy=POLICIES["stock" if is_stock else asked.mode])


def _others(config: Trainer.Config) -> Iterator[How]:
    """Other ways to run a job that it may have, by the checks of its config."""
    sections: dict[str, Any] = {
        "compile": replace(config.compile, enable=True, components=[*COMPONENTS]),
        "training": replace(config.training, disable_cuda_graphs=False),
    }
    for names in (("compile",), ("training",), ("compile", "training")):
        with contextlib.suppress(ValueError), no_accelerator.as_with_an_accelerator():
            yield _how(replace(config, **{name: sections[name] for name in names}))


def plan_activations(
    config: Trainer.Config,
    ranks: int,
    rank: int = 0,
    *,
    budget: int | None,
    memory: int | None = None,
    imbalance: float = 1.0,
    machine: str = "h100",
    as_on_a_gpu: bool = True,
) -> BudgetPlan:
    """Solve for the blocks of one rank of a job, in a dry run without checkpointing.

    ``budget`` is what they may hold, None for what is left of ``memory``. The other arguments are
    those of ``dry_run``. Raises ValueError if it cannot be met, or the config has a table already.
    """
    asked: Any = config.activation_checkpoint
    settings_of(asked)  # raises
    unchanged = copy.deepcopy(config)
    run = dry_run(
        without_checkpointing(config),
        ranks,
        rank,
        memory=memory if budget is None else None,
        imbalance=imbalance,
        as_on_a_gpu=as_on_a_gpu,
        step=False,
    )
    traced = TracedBlocks(run, asked, machine, asked.offload_limit if has_budget(config) else "")
    largest = max(kind.graph.none_nbytes for kind in traced.kinds)
    if budget is None:
        assert run.memory is not None, "without a budget there is a memory to fill"
        budget = run.memory.left_for_blocks(traced.none_nbytes, largest)
    solution = None if traced.none_nbytes <= budget else traced.solve(budget)
    if solution is None or not any(pieces_in(blocks.first) for blocks in traced.blocks):
        return BudgetPlan(budget, traced, solution)
    # Blocks in compiled pieces keep what passes between them, of which the solver does not know.
    room = budget
    while True:
        tried = copy.deepcopy(unchanged)
        table = traced.table(solution)
        tried.activation_checkpoint = replace(traced.settings, op_policies=table)
        step = dry_run(tried, ranks, rank, memory=0, imbalance=imbalance, as_on_a_gpu=as_on_a_gpu)
        assert step.memory is not None
        held = step.memory.held_by_blocks(largest)
        if held <= budget:
            return BudgetPlan(budget, traced, solution, held)
        room = min(room - (held - budget), int(_LESS * room))
        try:
            solution = traced.solve(room)
        except BudgetTooSmallError as error:
            raise BudgetTooSmallError(budget, error.least + budget - room) from None


@functools.cache
def _layout(rank: int, **degrees: Any) -> ParallelDims:
    """The groups and meshes of all dry runs of this process.

    DTensor's caches keep a mesh, and FSDP takes no equal one for it (torch's _fsdp_param.py).
    """
    dist.init_process_group("fake", rank=rank, world_size=degrees["world_size"])
    return ParallelDims(**degrees)


def _batches(items: Sequence[Any], everything: bool | None = False) -> Iterator[Sequence[Any]]:
    at_once = len(items) if everything else _AT_ONCE
    return (items[start : start + at_once] for start in range(0, len(items), at_once or 1))


def _nbytes(tensors: Sequence[torch.Tensor]) -> str:
    return format_bytes(sum(part.nbytes for x in tensors for part in plain_tensors(x)))
