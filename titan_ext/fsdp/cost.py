# SPDX-License-Identifier: BSD-3-Clause
"""How long a training step takes with a plan of FSDP units, before anything runs.

A model, not a measurement: FSDP2's order of events (``fsdp.memory.simulate``) on a clock for each
stream and each communicator. A communicator runs its collectives one after the other, in the order
in which FSDP2 issues them; two communicators share a link. Times of computations come from the
sizes of parameters. ``fsdp.auto`` compares plans with it; ``python -m benchmarks.fsdp_cost`` prints
such comparisons.

Rules of streams and events: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (torch 2.15).
"""

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from titan_ext.fsdp.memory.predict import Step, StepOrder
from titan_ext.fsdp.memory.simulate import FSDPSimulation, Group, SimulatedUnit
from titan_ext.fsdp.plan import GroupPlan, UnitPlan
from titan_ext.fsdp.units import UnitKind
from titan_ext.op_cost import Machine

_LAUNCH_MS = 0.015  # of a collective
_HOP_IN_NODE_MS, _HOP_MS = 0.001, 0.005  # of a step of a ring
_TREE_STEP_MS = 0.010  # of a step of NCCL's logarithmic algorithm, for one rank a node
SYNC_MS = 0.05  # the host reads how many tokens each expert gets
_ROUTER_MS = 0.1  # small operations of a router


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


@dataclass(frozen=True)
class Span:
    """Something on a stream, from ``start`` to ``end`` in ms."""

    stream: str
    what: str
    start: float
    end: float


@dataclass
class Estimate:
    """One step.

    Attributes:
        ms: From the start of forward to the end of the last reduction.
        compute_ms: Of that, computation and the exchanges of tokens.
        exposed_ms: Time that computation waits for FSDP, by unit.
        spans: What ran when, by stream.
    """

    ms: float
    compute_ms: float
    exposed_ms: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

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
    clock = _Clock(job, machine, own_reduce_group=order.reduce_scatter_buffers > 1)
    step = Step(units, order, lambda *args: _TimedSimulation(clock, *args))
    step.run()
    clock.start_again()
    step.run()
    return clock.result()


class _TimedSimulation(FSDPSimulation):
    """FSDP2's bookkeeping, with a clock; bytes are not recorded."""

    def __init__(self, clock: "_Clock", *args: object) -> None:
        self._clock = clock
        super().__init__(*args)  # type: ignore[arg-type]

    def sample(self, action: str, unit: str, issuing: Group | None = None) -> None:
        pass

    def run(self, unit: SimulatedUnit, phase: str, part: str = "all") -> None:
        self._clock.compute(unit.plan, phase, part)

    def end_backward(self, finalizes: bool = True) -> None:
        super().end_backward(finalizes)
        self._clock.join()

    def _unshard(self, group: Group) -> None:
        if not group.is_logical and group.plan.shard_world > 1:
            self._clock.gather(group)
        super()._unshard(group)

    def _wait(self, group: Group) -> None:
        if group.pending is not None:
            self._clock.copy_out(group)
        super()._wait(group)

    def _reclaim_reduce_input(self) -> None:
        self._clock.wait_for_reduction()
        super()._reclaim_reduce_input()

    def _reduce(self, group: Group) -> None:
        self._clock.reduce(group)
        super()._reduce(group)


class Links:
    """When each link between ranks is taken, in ms."""

    def __init__(self) -> None:
        self._taken: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def take(self, link: str, start: float, ms: float) -> float:
        """The first time from ``start`` on at which ``link`` is free for ``ms``; takes it."""
        taken = self._taken[link]
        index = bisect.bisect_left(taken, (start, start))
        if index and taken[index - 1][1] > start:
            start = taken[index - 1][1]
        while index < len(taken) and taken[index][0] < start + ms:
            start = max(start, taken[index][1])
            index += 1
        bisect.insort(taken, (start, start + ms))
        return start


def collective_ms(
    machine: Machine, nbytes: int, world: int, per_node: int, *, is_exchange: bool = False
) -> tuple[float, str]:
    """Time of a collective, and the link that it takes: "node" or "network".

    Args:
        machine: Whose links.
        nbytes: Of the whole buffer.
        world: Ranks that take part.
        per_node: Of them, on a node.
        is_exchange: Whether it is an all-to-all, where no rank of a node adds for others.
    """
    nodes = max(1, world // per_node)
    share = nbytes * (world - 1) / world if per_node > 1 else 0
    in_node_ms = share / machine.in_node * 1e3
    if nodes == 1:
        return _LAUNCH_MS + (world - 1) * _HOP_IN_NODE_MS + in_node_ms, "node"
    sharing = 1 if is_exchange else per_node
    network_ms = nbytes * (nodes - 1) / nodes / sharing / machine.network * 1e3
    latency = nodes * _HOP_MS + (world - nodes) * _HOP_IN_NODE_MS
    if per_node == 1:
        latency = math.log2(world) * _TREE_STEP_MS
    if is_exchange:  # no ring: all messages are on their way at once
        latency = _HOP_MS + (world - 1) * _HOP_IN_NODE_MS
    return _LAUNCH_MS + latency + max(in_node_ms, network_ms), "network"


class _Clock:
    """The time at which each stream, communicator and link is free, in ms."""

    def __init__(self, job: Job, machine: Machine, *, own_reduce_group: bool) -> None:
        self._job, self._machine = job, machine
        self._reduce_suffix = " reduce" if own_reduce_group else ""
        self._host = self._compute = 0.0
        self._free: dict[str, float] = defaultdict(float)
        self._links = Links()
        self._gathered: dict[int, float] = {}
        self._reductions: list[float] = []
        self._last_copy_out = 0.0
        self.start_again()

    def start_again(self) -> None:
        """Count from here: the first step gathers as no later one does."""
        self._links = Links()
        self._started = self._compute
        self._busy = 0.0
        self._exposed: dict[str, float] = defaultdict(float)
        self._spans: list[Span] = []

    def result(self) -> Estimate:
        spans = [
            Span(s.stream, s.what, s.start - self._started, s.end - self._started)
            for s in self._spans
        ]
        return Estimate(self._compute - self._started, self._busy, dict(self._exposed), spans)

    # FSDP

    def gather(self, group: Group) -> None:
        plan = group.plan
        copy_in = plan.gathered_nbytes / plan.shard_world * 4 / self._machine.memory * 1e3
        start = max(self._host, self._free["gathers"]) + copy_in
        end = self._communicate("gather", group, plan.all_gather_nbytes, start, plan.kind)
        if plan.all_gather is not None:  # decoded on the gathers' stream, then copied
            moved = plan.all_gather_nbytes + 3 * plan.gathered_nbytes
            end += moved / self._machine.memory * 1e3
        self._free["gathers"] = end
        self._gathered[id(group)] = end

    def copy_out(self, group: Group) -> None:
        arrived = self._gathered.pop(id(group), self._compute)
        self._wait_until(arrived, group.unit.plan.name)
        in_forward = group.phase.name == "FORWARD"
        if in_forward:  # the buffer of the gather before is freed now: the next may use it
            self._free["gathers"] = max(self._free["gathers"], self._last_copy_out)
        if not group.plan.in_place:
            self._compute += 2 * group.plan.gathered_nbytes / self._machine.memory * 1e3
        self._last_copy_out = self._compute
        if not in_forward:
            self._free["gathers"] = max(self._free["gathers"], self._compute)

    def wait_for_reduction(self) -> None:
        self._wait_until(self._reductions.pop(0), "reduce-scatter")

    def reduce(self, group: Group) -> None:
        plan, world = group.plan, group.plan.shard_world
        numel = sum(p.padded_numel(world) for p in plan.params if p.requires_grad)
        nbytes = numel * plan.params[0].reduce_dtype.itemsize
        sent = plan.reduce_scatter_nbytes(p for p in plan.params if p.requires_grad)
        self._compute += (2 * numel + sent) / self._machine.memory * 1e3  # into one buffer
        end = self._compute
        if world > 1:
            start = max(self._compute, self._free["reduces"])
            communicator = f"{plan.kind}{self._reduce_suffix}"
            end = self._communicate("reduce-scatter", group, sent, start, communicator)
            if plan.reduce_scatter is not None:  # summed by the rank itself
                end += (sent + nbytes / world) / self._machine.memory * 1e3
            self._free["reduces"] = end
        self._reductions.append(end)
        replicas = self._job.replicas
        if replicas > 1:
            ms = _LAUNCH_MS + 2 * math.log2(replicas) * _TREE_STEP_MS
            shard = 2 * nbytes / world * (replicas - 1) / replicas
            ms += shard / self._machine.network * 1e3
            start = self._links.take("network", max(end, self._free["all-reduces"]), ms)
            self._free["all-reduces"] = start + ms

    def join(self) -> None:
        """The end of a step: everything has finished."""
        self._compute = max(self._compute, *self._free.values())
        self._reductions.clear()
        self._host = self._compute

    def _communicate(
        self, kind: str, group: Group, nbytes: int, start: float, communicator: str
    ) -> float:
        """Put a collective over ``nbytes`` of full buffer on its communicator; returns its end."""
        is_exchange = kind == "reduce-scatter" and group.plan.reduce_scatter is not None
        ms, link = self._collective_ms(group.plan, nbytes, is_exchange)
        start = self._links.take(link, max(start, self._free[communicator]), ms)
        self._free[communicator] = start + ms
        self._spans.append(Span(f"{communicator}: {kind}", group.name, start, start + ms))
        return start + ms

    def _collective_ms(self, plan: GroupPlan, nbytes: int, is_exchange: bool) -> tuple[float, str]:
        job, world = self._job, plan.shard_world
        stride = job.ep if plan.kind == "experts" else job.tp
        per_node = max(1, min(job.ranks_per_node // stride, world))
        return collective_ms(self._machine, nbytes, world, per_node, is_exchange=is_exchange)

    def _wait_until(self, time: float, unit: str) -> None:
        if time > self._compute:
            self._exposed[unit] += time - self._compute
            self._compute = time

    # Computation

    def compute(self, unit: UnitPlan, phase: str, part: str) -> None:
        """Run a unit, or the part of a block before or after its experts, a unit of their own.

        Args:
            unit: The unit.
            phase: "forward", "recompute", "backward", or "loss" (forward and backward of a head).
            part: "all", "before" or "after".
        """
        job = self._job
        again = phase != "recompute" or job.exchanges_again
        work = _forward_ms(unit, job, self._machine)
        shares = {
            "forward": (1.0, 1.0),
            "recompute": (job.recompute, job.recompute_attention),
            "backward": (2.0, 2.2),  # attention computes its scores again
            "loss": (3.0, 0.0),
        }
        share, of_attention = shares[phase]
        before = ("attention", "dense", "router")
        classes = {"before": before, "after": ("shared",), "all": tuple(work)}[part]
        ms = sum(work[c] * (of_attention if c == "attention" else share) for c in classes)
        has_exchange = part != "all" or (work["experts"] and unit.kind is not UnitKind.EXPERTS)
        if job.ep > 1 and has_exchange and again:
            if phase != "backward" and part != "after":  # the host waits for the counts
                self._host = self._compute = max(self._host, self._compute + SYNC_MS)
            one_ms = _exchange_ms(job, self._machine)
            ms += one_ms * (2 if part == "all" else 1)
            if job.overlaps_shared and part != "before":
                ms -= min(one_ms, work["shared"] * share)
        self._run(unit.name, ms)

    def _run(self, what: str, ms: float) -> None:
        start = max(self._compute, self._host)
        self._compute = start + ms
        self._busy += ms
        self._spans.append(Span("compute", what, start, self._compute))


def _forward_ms(unit: UnitPlan, job: Job, machine: Machine) -> dict[str, float]:
    """The time of a unit's forward, by class of its parameters."""
    numel: dict[str, int] = dict.fromkeys(("attention", "dense", "router", "shared", "experts"), 0)
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


def _exchange_ms(job: Job, machine: Machine) -> float:
    """One all-to-all of the tokens and their copies."""
    nodes = max(1, job.ep // job.ranks_per_node)
    nbytes = job.tokens * job.top_k * job.dim * 2
    if nodes == 1:
        share, rate = (job.ep - 1) / job.ep, machine.in_node
    else:
        share, rate = (nodes - 1) / nodes, machine.network
    return nbytes * share / rate * 1e3 + 2 * _LAUNCH_MS
