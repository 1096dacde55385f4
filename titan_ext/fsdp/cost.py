# SPDX-License-Identifier: BSD-3-Clause
"""How long a training step takes with a plan of FSDP units, before anything runs.

A model, not a measurement: FSDP2's order of events (``fsdp.memory.simulate``) on a clock for each
stream and each communicator. A communicator runs its collectives one after the other, in the order
in which FSDP2 issues them; two communicators share a link. Times of computations come from the
sizes of parameters. ``fsdp.auto`` compares plans with it at the start of a run; ``python -m
benchmarks.fsdp_cost`` prints such comparisons. ``step_time`` models a step from its operations.

Rules of streams and events: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (torch 2.15).
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from titan_ext.fsdp.memory.predict import Step, StepOrder
from titan_ext.fsdp.memory.simulate import Group, Phase, SimulatedUnit
from titan_ext.fsdp.plan import UnitPlan
from titan_ext.fsdp.units import UnitKind
from titan_ext.op_cost import LAUNCH_MS, SYNC_MS, TREE_STEP_MS, Links, Machine, collective_ms

_ROUTER_MS = 0.1  # small operations of a router
_CLASSES = ("attention", "dense", "router", "shared", "experts")
_SHARES = {"forward": (1.0, 1.0), "backward": (2.0, 2.2), "loss": (3.0, 0.0)}
"""Times the forward, for a phase and its attention; backward computes attention's scores again."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank computes in one forward and backward, and where its neighbours are.

    Attributes:
        tokens: Of a microbatch on this rank.
        dim: Width of the model.
        num_experts: Routed experts of a layer.
        top_k: Experts that a token goes to.
        attention_flops: Of attention's scores and values in one block's forward, without linears.
        ep: Ranks that exchange tokens.
        tp: Ranks of tensor parallelism.
        replicas: Of HSDP.
        ranks_per_node: Ranks of a machine.
        recompute: The share of a block's forward that backward computes again, attention aside.
        recompute_attention: The share of attention.
        exchanges_again: Whether the recompute sends tokens again.
        overlaps_shared: Whether shared experts run while tokens travel back.
    """

    tokens: int
    dim: int
    num_experts: int = 1
    top_k: int = 1
    attention_flops: float = 0.0
    ep: int = 1
    tp: int = 1
    replicas: int = 1
    ranks_per_node: int = 8
    recompute: float = 0.65
    recompute_attention: float = 0.3
    exchanges_again: bool = False
    overlaps_shared: bool = False


class Span(NamedTuple):
    """Something on a stream, from ``start`` to ``end`` in ms."""

    stream: str
    what: str
    start: float
    end: float


class Estimate(NamedTuple):
    """One step.

    Attributes:
        ms: From the start of forward to the end of the last reduction.
        exposed_ms: Time that computation waits for FSDP, by unit.
        spans: What ran when, by stream.
    """

    ms: float
    exposed_ms: dict[str, float]
    spans: list[Span]

    @property
    def collectives(self) -> list[tuple[str, str]]:
        """Kind and group of FSDP's collectives in the order in which it issues them."""
        return [(s.stream.split(": ")[1], s.what) for s in self.spans if ": " in s.stream]


def estimate(units: Sequence[UnitPlan], order: StepOrder, job: Job, machine: Machine) -> Estimate:
    """Model a steady step with one forward and backward.

    Args:
        units: FSDP's plan for each unit, in forward order.
        order: As for ``predict``; ``reduce_scatter_buffers > 1`` means a process group of their own
            for reduce-scatters.

    Raises:
        ValueError: for a unit whose order is not known (``predict``).
    """
    step = _TimedStep(units, order, job, machine)
    step.run()
    step.start_again()
    step.run()
    return step.result()


class _TimedStep(Step):
    """A step with the time at which each stream, communicator and link is free, in ms."""

    def __init__(
        self, units: Sequence[UnitPlan], order: StepOrder, job: Job, machine: Machine
    ) -> None:
        super().__init__(units, order)
        self.records = False  # no bytes
        self._job, self._machine = job, machine
        self._host = self._compute = 0.0
        self._free: dict[str, float] = defaultdict(float)
        self._gathered: dict[Group, float] = {}
        self._reductions: list[float] = []
        self._last_copy_out = 0.0
        self.start_again()

    def start_again(self) -> None:
        """Count from here: the first step gathers as no later one does."""
        self._links = Links()
        self._started = self._compute
        self._exposed: dict[str, float] = defaultdict(float)
        self._spans: list[Span] = []

    def result(self) -> Estimate:
        begin = self._started
        spans = [s._replace(start=s.start - begin, end=s.end - begin) for s in self._spans]
        return Estimate(self._compute - begin, dict(self._exposed), spans)

    # FSDP

    def _unshard(self, group: Group) -> None:
        if not group.is_logical and group.plan.shard_world > 1:
            self._gather(group)
        super()._unshard(group)

    def _gather(self, group: Group) -> None:
        plan = group.plan
        copy_in = plan.gathered_nbytes / plan.shard_world * 4 / self._machine.memory * 1e3
        start = max(self._host, self._free["gathers"]) + copy_in
        end = self._communicate("gather", group, plan.all_gather_nbytes, start, plan.kind)
        if plan.all_gather is not None:  # decoded on the gathers' stream, then copied
            moved = plan.all_gather_nbytes + 3 * plan.gathered_nbytes
            end += moved / self._machine.memory * 1e3
        self._free["gathers"] = end
        self._gathered[group] = end

    def _wait(self, group: Group) -> None:
        if group.is_pending:
            self._copy_out(group)
        super()._wait(group)

    def _copy_out(self, group: Group) -> None:
        self._wait_until(self._gathered.pop(group, self._compute), group.unit.plan.name)
        in_forward = group.phase is Phase.FORWARD
        if in_forward:  # the buffer of the gather before is freed now: the next may use it
            self._free["gathers"] = max(self._free["gathers"], self._last_copy_out)
        self._compute += 2 * group.plan.gathered_nbytes / self._machine.memory * 1e3
        self._last_copy_out = self._compute
        if not in_forward:
            self._free["gathers"] = max(self._free["gathers"], self._compute)

    def _reclaim_reduce_input(self) -> None:
        self._wait_until(self._reductions.pop(0), "reduce-scatter")
        super()._reclaim_reduce_input()

    def _reduce(self, group: Group) -> None:
        plan, world = group.plan, group.plan.shard_world
        params = [p for p in plan.params if p.requires_grad]
        numel = sum(p.padded_numel(world) for p in params)
        nbytes = numel * plan.params[0].reduce_dtype.itemsize
        sent = plan.reduce_scatter_nbytes(params)
        self._compute += (2 * numel + sent) / self._machine.memory * 1e3  # into one buffer
        end = self._compute
        if world > 1:
            start = max(self._compute, self._free["reduces"])
            has_own_group = self.order.reduce_scatter_buffers > 1
            communicator = f"{plan.kind} reduce" if has_own_group else plan.kind
            end = self._communicate("reduce-scatter", group, sent, start, communicator)
            if plan.reduce_scatter is not None:  # summed by the rank itself
                end += (sent + nbytes / world) / self._machine.memory * 1e3
            self._free["reduces"] = end
        self._reductions.append(end)
        replicas = self._job.replicas
        if replicas > 1:
            ms = LAUNCH_MS + 2 * math.log2(replicas) * TREE_STEP_MS
            shard = 2 * nbytes / world * (replicas - 1) / replicas
            ms += shard / self._machine.network * 1e3
            start = self._links.take("network", max(end, self._free["all-reduces"]), ms)
            self._free["all-reduces"] = start + ms
        super()._reduce(group)

    def end_backward(self, finalizes: bool = True) -> None:
        super().end_backward(finalizes)
        self._host = self._compute = max(self._compute, *self._free.values())
        self._reductions.clear()

    def _communicate(
        self, kind: str, group: Group, nbytes: int, start: float, communicator: str
    ) -> float:
        """Put a collective over ``nbytes`` of full buffer on its communicator; returns its end."""
        plan, job = group.plan, self._job
        stride = job.ep if plan.kind == "experts" else job.tp
        per_node = max(1, min(job.ranks_per_node // stride, plan.shard_world))
        is_exchange = kind == "reduce-scatter" and plan.reduce_scatter is not None
        ms, link = collective_ms(
            self._machine, nbytes, plan.shard_world, per_node, is_exchange=is_exchange
        )
        start = self._links.take(link, max(start, self._free[communicator]), ms)
        self._free[communicator] = start + ms
        self._spans.append(Span(f"{communicator}: {kind}", group.name, start, start + ms))
        return start + ms

    def _wait_until(self, time: float, unit: str) -> None:
        if time > self._compute:
            self._exposed[unit] += time - self._compute
            self._compute = time

    # Computation

    def compute(self, unit: SimulatedUnit, phase: str, part: str = "all") -> None:
        """Run a unit, or the part of a block before or after its experts, a unit of their own.

        ``phase`` is "forward", "recompute", "backward", or "loss" (forward and backward of a
        head); ``part`` is "all", "before" or "after".
        """
        job = self._job
        work = _forward_ms(unit.plan, job, self._machine)
        of_recompute = (job.recompute, job.recompute_attention)
        share, of_attention = of_recompute if phase == "recompute" else _SHARES[phase]
        classes = {"before": _CLASSES[:3], "after": ("shared",), "all": _CLASSES}[part]
        ms = sum(work[c] * (of_attention if c == "attention" else share) for c in classes)
        exchanges = part != "all" or (work["experts"] and unit.plan.kind is not UnitKind.EXPERTS)
        if job.ep > 1 and exchanges and (phase != "recompute" or job.exchanges_again):
            if phase != "backward" and part != "after":  # the host waits for the counts
                self._host = self._compute = max(self._host, self._compute + SYNC_MS)
            nbytes, per_node = job.tokens * job.top_k * job.dim * 2, min(job.ep, job.ranks_per_node)
            one_ms, _ = collective_ms(self._machine, nbytes, job.ep, per_node, is_exchange=True)
            ms += one_ms * (2 if part == "all" else 1)
            if job.overlaps_shared and part != "before":
                ms -= min(one_ms, work["shared"] * share)
        start = max(self._compute, self._host)
        self._compute = start + ms
        self._spans.append(Span("compute", unit.plan.name, start, self._compute))


def _forward_ms(unit: UnitPlan, job: Job, machine: Machine) -> dict[str, float]:
    """The time of a unit's forward, by class of its parameters."""
    numel = dict.fromkeys(_CLASSES, 0)
    for param in (p for group in unit.groups for p in group.params):
        path = param.name.split(".")
        if "routed_experts" in path and "inner_experts" in path:
            name = "experts"
        elif "router" in path:
            name = "router"
        elif "moe" in path:
            name = "shared"
        elif "attention" not in path and "attn" not in path:  # norms too
            name = "dense"
        else:
            name = "attention"
        numel[name] += math.prod(param.shape)
    flops = {name: 2.0 * n * job.tokens for name, n in numel.items()}
    # A rank's experts get the tokens that its neighbours send: on average its own, top_k times.
    flops["experts"] *= job.top_k * job.ep / job.num_experts
    if numel["attention"]:
        flops["attention"] += job.attention_flops * 1.4  # slower than matrix products
    ms = {name: f / machine.block * 1e3 for name, f in flops.items()}
    activation = job.tokens * job.dim * 2 / machine.memory * 1e3
    if numel["attention"]:
        ms["attention"] += 8 * activation  # norms, rotary embeddings, residual adds
    if numel["experts"]:
        ms["experts"] += 12 * job.top_k * activation  # permutations, activation function, scores
    if numel["router"]:
        ms["router"] += _ROUTER_MS
    if unit.kind is UnitKind.EMBEDDING:
        ms["dense"] = activation
    return ms
