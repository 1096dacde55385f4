# SPDX-License-Identifier: BSD-3-Clause
"""Chooses FSDP units, prefetch and reduce-scatter buffers by their cost, where a key is "auto".

Smaller units hold less and gather more often. Whether that costs time depends on the network. If
the experts' shards lie on one node, or whole on a rank, their gathers hide behind computation;
across nodes they may not. There ``choose`` compares the settings that the user left open, by the
model of ``fsdp.cost``. It takes the least memory among those as fast as the fastest, also if
computation were faster than modelled. All ranks compute the same from the same numbers.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.logging import logger

from titan_ext.fsdp.cost import Job, estimate
from titan_ext.fsdp.make_plan import make_plan
from titan_ext.fsdp.memory.predict import StepOrder, predict
from titan_ext.fsdp.plan import FSDPPlan, GroupPlan, ShardSizes, UnitPlan
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.fsdp.units import Wrap, decoder_blocks, plan_units, resolve_wrap
from titan_ext.op_cost import MACHINES, Machine, ranks_per_node
from titan_ext.titan import tokens_of_microbatch

_AS_FAST = 1.005  # times the fastest
_FASTER = 1.2  # what computation may be, whose times are estimates; then it hides less
_LARGE_WORLD = 1024
_BLOCKS = 6  # the last ones: their bytes count, for a step's peak is where backward begins


@dataclass(frozen=True)
class Choice:
    """A candidate: the values of fsdp_wrap, fsdp_prefetch_backward, fsdp_reduce_scatter_buffers."""

    wrap: Wrap
    prefetch_backward: int | str
    buffers: int


STOCK = Choice("block", 1, 1)
# Two buffers beside the unit of experts are the bytes that stock has in flight too: its unit has
# two groups, each with a buffer.
CANDIDATES = (
    Choice("submodule", "auto", 1),
    Choice("submodule", "auto", 3),
    Choice("experts", 1, 1),
    Choice("experts", 1, 2),
    Choice("experts", 2, 2),
    STOCK,
)


def choose(
    model: Decoder,
    settings: FSDPSettings,
    parallel_dims: ParallelDims,
    *,
    training: TrainingConfig | None = None,
    parallelism: ParallelismConfig | None = None,
    compiled: bool = False,
    **work: Any,
) -> FSDPSettings:
    """``settings`` with values in place of "auto", said in the log with the reason.

    Args:
        model: The decoder or pipeline chunk on the meta device, before any parallelism.
        settings: The user's.
        parallel_dims: Sizes of the axes.
        training: For the tokens of a microbatch; 4096 if None.
        parallelism: For the microbatches of a pipeline.
        compiled: Whether the model is compiled.
        work: What else ``job_of`` wants to know.
    """
    if "auto" not in (settings.wrap, settings.reduce_scatter_buffers):
        return settings
    ep, shards = parallel_dims.ep, parallel_dims.dp_shard * parallel_dims.cp * parallel_dims.tp
    if resolve_wrap("auto", ep, model.config) == "block":  # EP splits no experts
        wrap = resolve_wrap(settings.wrap, ep, model.config)
        return with_choice(settings, Choice(wrap, "auto", 1))
    candidates = [
        choice
        for choice in _allowed(settings, no_experts=compiled)
        if parallel_dims.pp_enabled or _has_named_units(model, settings, choice.wrap)
    ] or [STOCK]
    per_node = ranks_per_node()
    if shards == ep or shards <= per_node:
        where = "whole on a rank" if shards == ep else "on one node"
        return _chosen(settings, candidates[0], f"EP {ep}, experts' shards {where}")
    tokens = seq_len = 4096
    if training is not None:
        pipeline = parallelism if parallel_dims.pp_enabled else None
        tokens, seq_len = tokens_of_microbatch(training, pipeline)
    job = job_of(
        model,
        tokens=tokens // parallel_dims.cp,
        seq_len=seq_len,
        ep=ep,
        tp=parallel_dims.tp,
        replicas=parallel_dims.dp_replicate,
        ranks_per_node=per_node,
        **work,
    )
    sizes = ShardSizes(
        dense=parallel_dims.dp_shard * parallel_dims.cp, experts=shards // ep, expert_ranks=shards
    )
    name = _machine()
    try:
        choice, why = PlanComparison(model, settings, sizes, job, MACHINES[name]).cheapest(
            candidates
        )
    except ValueError as error:  # an order that the model of a step does not know
        choice, why = candidates[0], f"cost not modelled: {error}"
    if sizes.dense > _LARGE_WORLD:
        logger.warning(
            f"FSDP shards over {sizes.dense} ranks, so its collectives have much latency. With "
            f"parallelism.data_parallel_replicate_degree = {sizes.dense // 64} (HSDP) they have 64 "
            "ranks."
        )
    return _chosen(settings, choice, f"EP {ep}, {shards} ranks on {name}: {why}")


@dataclass(frozen=True)
class PlanComparison:
    """What candidates cost for one job: ``settings`` where they are not "auto", on ``machine``."""

    model: Decoder
    settings: FSDPSettings
    sizes: ShardSizes
    job: Job
    machine: Machine

    def cheapest(self, candidates: Sequence[Choice]) -> tuple[Choice, str]:
        """The candidate with the least peak of bytes among those as fast as the fastest, and why.

        Raises ValueError for a model whose order of units is not known.
        """
        plans = {choice: (self.units(choice), self._order(choice)) for choice in candidates}
        quick = replace(self.machine, block=self.machine.block * _FASTER)
        times = {
            choice: [estimate(*plan, self.job, machine).ms for machine in (self.machine, quick)]
            for choice, plan in plans.items()
        }
        fastest = [min(column) for column in zip(*times.values(), strict=True)]
        fast = [
            choice
            for choice, both in times.items()
            if all(ms <= least * _AS_FAST for ms, least in zip(both, fastest, strict=True))
        ] or [min(times, key=times.__getitem__)]
        nbytes = {choice: self._nbytes(*plans[choice]) for choice in fast}
        best = min(fast, key=nbytes.__getitem__)
        stock_ms, stock_nbytes = self.cost(STOCK, as_stock=True)
        return best, (
            f"modelled at {times[best][0] / stock_ms:.3f} of whole blocks' time, "
            f"{nbytes[best] / stock_nbytes:.2f} of bytes"
        )

    def cost(self, choice: Choice, *, as_stock: bool = False) -> tuple[float, int]:
        """Milliseconds of a step, and the peak of what FSDP holds in the last blocks, in bytes.

        ``as_stock``: with buffers of all-gathers held as FSDP2 does by itself, and norm and head as
        one unit.
        """
        units = self.units(choice, as_stock=as_stock)
        order = self._order(choice, as_stock=as_stock)
        return estimate(units, order, self.job, self.machine).ms, self._nbytes(units, order)

    def units(self, choice: Choice, *, as_stock: bool = False) -> list[UnitPlan]:
        """FSDP's units with ``choice``."""
        settings = with_choice(self.settings, choice)
        return local_plan(
            self.model, settings, self.sizes, self.job.ep, as_stock=as_stock
        ).decoder_units

    def _order(self, choice: Choice, *, as_stock: bool = False) -> StepOrder:
        return StepOrder(
            recomputes=self.job.recompute > 0,
            reduce_scatter_buffers=choice.buffers,
            copies_out_directly=not as_stock,
            frees_buffers=not as_stock,
        )

    def _nbytes(self, units: Sequence[UnitPlan], order: StepOrder) -> int:
        names = {name for name, _ in decoder_blocks(self.model)[-_BLOCKS:]}
        return predict([u for u in units if u.block in names], order).peak("total")


def local_plan(
    model: Decoder, settings: FSDPSettings, sizes: ShardSizes, ep: int, *, as_stock: bool = False
) -> FSDPPlan:
    """The plan of a model that expert parallelism has yet to split over ``ep`` ranks."""

    def local(group: GroupPlan) -> GroupPlan:
        if group.kind != "experts":
            return group
        params = tuple(replace(p, shape=(p.shape[0] // ep, *p.shape[1:])) for p in group.params)
        return replace(group, params=params)

    units = plan_units(model, settings.resolved_wrap)
    if any(isinstance(p, DTensor) for p in model.parameters()):
        ep = 1  # it has been split
    settings = replace(settings, reshard_groups={}) if settings.wrap == "block" else settings
    plan = make_plan(model, units, settings, sizes, as_stock=as_stock)
    units = tuple(replace(u, groups=tuple(map(local, u.groups))) for u in plan.units)
    return replace(plan, units=units)


def job_of(
    model: Decoder,
    *,
    tokens: int,
    seq_len: int,
    ac_config: Any = None,
    exchanges_again: bool = False,
    overlaps_shared: bool = False,
    **sizes: int,
) -> Job:
    """What a rank computes.

    Args:
        model: The decoder or pipeline chunk.
        tokens: Of a microbatch on this rank.
        seq_len: Of a sequence.
        ac_config: The activation checkpointing policy's config, or None.
        exchanges_again: Whether selective activation checkpointing sends tokens again.
        overlaps_shared: Whether shared experts run while tokens travel back.
        sizes: The fields of ``Job`` with numbers of ranks.
    """
    config = cast(Any, model.config)
    moe = next((layer.moe for layer in config.layers if layer.moe is not None), None)
    attention = 0.0
    if hasattr(config, "get_nparams_and_flops"):
        level = logger.level
        logger.setLevel(logging.WARNING)  # Titan logs parameter counts whenever it counts FLOPs
        lengths = (seq_len, 2 * seq_len)
        once, twice = (config.get_nparams_and_flops(model, length)[1] for length in lengths)
        logger.setLevel(level)
        # Linear in the length: forward is a third of it, and a causal mask leaves half.
        attention = (twice - once) * tokens / 6 / len(config.layers)
    full = isinstance(ac_config, FullAC.Config)
    share = 1.0 if full else 0.65
    return Job(
        tokens=tokens,
        dim=config.dim,
        num_experts=moe.num_experts if moe is not None else 1,
        top_k=moe.router.top_k if moe is not None else 1,
        attention_flops=attention,
        recompute=0.0 if ac_config is None else share,
        recompute_attention=0.0 if ac_config is None else (1.0 if full else 0.3),
        exchanges_again=full or exchanges_again,
        overlaps_shared=overlaps_shared,
        **sizes,
    )


def _allowed(settings: FSDPSettings, *, no_experts: bool) -> list[Choice]:
    """The candidates that the user's settings leave, the simplest first."""
    has_buffers = hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers")
    if not has_buffers and settings.reduce_scatter_buffers == "auto":
        logger.warning(
            f"torch {torch.__version__} has one reduce-scatter buffer; from 2.15 on a group of "
            "their own for reduce-scatters makes small units as fast as whole blocks."
        )
    found = [
        choice
        for choice in CANDIDATES
        if settings.wrap in ("auto", choice.wrap)
        and settings.reduce_scatter_buffers in ("auto", choice.buffers)
        and not (choice.wrap == "experts" and no_experts)
        and not (choice.buffers > 1 and (settings.symm_mem or not has_buffers))
    ]
    if settings.wrap == "auto":
        return found or [STOCK]
    return found or [Choice(cast(Wrap, settings.wrap), "auto", 1)]


def _has_named_units(model: Decoder, settings: FSDPSettings, wrap: Wrap) -> bool:
    """Whether all names in fsdp_reshard_groups are of units that ``wrap`` makes."""
    try:
        settings.check_reshard_groups(plan_units(model, wrap))
    except ValueError:
        return False
    return True


def with_choice(settings: FSDPSettings, choice: Choice) -> FSDPSettings:
    """``settings`` with the values of ``choice`` where they are "auto"."""
    given: dict[str, Any] = {}
    if settings.wrap == "auto":
        given["wrap"] = choice.wrap
    if settings.reduce_scatter_buffers == "auto":
        given["reduce_scatter_buffers"] = choice.buffers
    if settings.prefetch == "auto" and settings.prefetch_backward in (None, "auto"):
        given["prefetch_backward"] = choice.prefetch_backward
    return replace(settings, **given)


def _machine() -> str:
    """The one of ``MACHINES`` that this process has; without an accelerator an H100."""
    name = ""
    if torch.accelerator.is_available():
        module = torch.get_device_module()
        name = getattr(module, "get_device_name", lambda: "")().lower()
    return next((machine for machine in MACHINES if machine in name), "h100")


def _chosen(settings: FSDPSettings, choice: Choice, why: str) -> FSDPSettings:
    buffers = f", {choice.buffers} reduce-scatter buffers" if choice.buffers > 1 else ""
    chosen = f'auto is "{choice.wrap}"{buffers} ({why})'
    logger.info(f"FSDP units: {chosen}")
    return replace(with_choice(settings, choice), chosen=chosen)
