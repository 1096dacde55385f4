# SPDX-License-Identifier: BSD-3-Clause
"""How long one step takes on one rank of a machine, by what the step really runs.

A dispatch mode sees each operation of a dry run's step, with the stream on which FSDP2 puts it. It
keeps a clock for each stream, communicator and link: an operation starts when its stream is free
and what it reads is there, and takes what ``op_cost`` says. So it times every policy, layout and
schedule that trains, and no formula repeats what they do. Kernels are ideal: nothing here knows of
gaps between them, of a slow host, or of neighbours that are late. One rank is all that a dry run
sees: every stage of a pipeline is taken to be as long as its own, and sending to take no time.

``titan_ext dry-run --machine h100`` prints ``StepTime.table``. At the start of a run there is no
time for a dry run: ``fsdp.cost`` is a coarser model.
"""

import itertools
import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleGPipe,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.tools.utils import get_peak_flops

from titan_ext.fp8.tensors import tensors_in
from titan_ext.fsdp.memory.predict import Pipeline
from titan_ext.memory_plan import PLAIN_TYPES, LiveBytes, MemoryKind, in_backward
from titan_ext.op_cost import SYNC_MS, Links, Machine, group_ms, groups_of, moves_nothing, op_cost


class Part(StrEnum):
    """Where the time of the compute stream goes."""

    FORWARD = "forward"
    LOSS = "loss and output layer, forward and backward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    CODEC = "float8 codec"
    COPIES = "FSDP's copies into and out of buffers"
    OPTIMIZER = "clipping and optimizer"
    EXCHANGES = "waits for exchanges of tokens"
    HOST = "waits for the host, which reads token counts"
    GATHERS = "waits for FSDP's all-gathers"
    REDUCTIONS = "waits for FSDP's reductions"
    COLLECTIVES = "waits for other collectives"
    OFFLOAD = "waits for offloaded activations"
    BUBBLE = "waits for other stages"


WAITS = (Part.EXCHANGES, Part.HOST, Part.GATHERS, Part.REDUCTIONS, Part.COLLECTIVES, Part.OFFLOAD)
"""Parts in which the compute stream of this rank waits for its links or its host."""
_KINDS = ("alltoall", "allgather", "reducescatter", "allreduce")
_CODEC = ("titan_ext::float8_quantize", "titan_ext::float8_dequantize")


@dataclass(eq=False, slots=True)
class _Buffer:
    """A storage that more than one stream uses."""

    made_on: Any
    ref: weakref.ref
    ready: float = 0.0
    why: Part = Part.GATHERS
    used: dict[Any, float] = field(default_factory=dict)
    """When each stream has done with it."""


@dataclass(eq=False)
class Pass:
    """One forward and backward (all microbatches of a pipeline), or what follows the last one."""

    ms: dict[Part, float] = field(default_factory=lambda: defaultdict(float))
    flops: Counter[Part] = field(default_factory=Counter)
    nbytes: Counter[Part] = field(default_factory=Counter)


class StepClock(TorchDispatchMode):
    """Times a steady step: enter it inside of ``live``, and run the step.

    Streams depend on each other through storages. Who reads one waits until it is written. When one
    is freed, the stream that made it waits until the others have done with it, as FSDP2 does before
    it lets go of a buffer.

    Args:
        parts: The models of this rank.
        live: Says at which moment of the step the operations are.
        machine: Whose rates.
        slower: Factor on the time of every kernel, for a calibration.

    ``passes`` are in the order in which they ran.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        live: LiveBytes,
        machine: Machine,
        *,
        slower: float = 1.0,
    ) -> None:
        super().__init__()
        self.passes: list[Pass] = []
        self._parts, self._live, self._machine = parts, live, machine
        self.slower = slower
        self._compute = torch.cpu.current_stream()
        self._free: dict[Any, float] = defaultdict(float)
        """When each stream and each communicator is free."""
        self._host = 0.0
        self._links = Links()
        self._buffers: dict[int, _Buffer] = {}
        self._depth = 0
        self._moment = ""
        self._handles: list[Any] = []

    def __enter__(self) -> "StepClock":
        def enter(*_: Any) -> None:
            self._depth += 1

        def leave(*_: Any) -> None:
            self._depth -= 1

        for module in (module for part in self._parts for module in part.modules()):
            self._handles += [
                module.register_forward_pre_hook(enter, prepend=True),
                module.register_forward_hook(leave, always_call=True),
            ]
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._buffers.clear()

    def __torch_dispatch__(self, func, types, args: Any = (), kwargs: Any = None):
        if not PLAIN_TYPES.issuperset(types):
            return NotImplemented  # the class then runs its own operations, which come here
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        moment = self._live.moments[-1].moment
        if moment != self._moment:
            if moment in ("start", "clip") or not self.passes:
                self.passes.append(Pass())
            self._moment = moment
        name, stream = func._schema.name, torch.cpu.current_stream()
        if name.endswith("wait_tensor"):
            self._wait_for(stream, tensors_in(args))
        elif "c10d" in name:
            self._communicate(name, stream, args, out)
        elif func is torch.ops.aten.copy_.default and self._crosses(*args[:2]):
            self._offload(*args[:2])
        elif not moves_nothing(func):
            self._run(func, stream, args, kwargs, out)
        elif stream is not self._compute and "empty" in name:
            for tensor in tensors_in(out):
                self._buffer(tensor, made_on=stream)
        return out

    # -- what runs

    def _run(self, func: Any, stream: Any, args: Any, kwargs: Any, out: Any) -> None:
        used = tensors_in((args, kwargs))
        self._wait_for(stream, used)
        cost = op_cost(func, args, kwargs, out, self._machine)
        ms = cost.ms * self.slower
        end = self._free[stream] = self._free[stream] + ms
        if stream is self._compute:
            part, now = self._part(func._schema.name), self.passes[-1]
            now.ms[part] += ms
            now.flops[part] += cost.flops
            now.nbytes[part] += cost.nbytes
        self._use(stream, used, end)
        if stream is not self._compute or func._schema.name.startswith("fsdp::"):
            for tensor in (*tensors_in(out), *tensors_in(kwargs.get("out"))):
                buffer = self._buffer(tensor, made_on=stream)
                buffer.ready = max(buffer.ready, end)

    def _crosses(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether a copy is to or from the host."""
        return len({self._live.kind_of(x) is MemoryKind.OFFLOADED for x in (target, source)}) == 2

    def _offload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy to or from the host runs beside the computation."""
        to_host = self._live.kind_of(target) is MemoryKind.OFFLOADED
        lane, ms = (Part.OFFLOAD, to_host), target.nbytes / self._machine.host * 1e3
        end = self._free[lane] = max(self._free[lane], self._free[self._compute]) + ms
        buffer = self._buffer(source if to_host else target, made_on=self._compute)
        buffer.why, buffer.used[lane] = Part.OFFLOAD, end  # it is not free before
        if not to_host:
            buffer.ready = end

    def _communicate(self, name: str, stream: Any, args: Any, out: Any) -> None:
        """A collective of c10d runs on its stream, a functional one beside it."""
        plain_name = name.split("::")[1].replace("_", "")
        kind = next((kind for kind in _KINDS if kind in plain_name), None)
        group = next(groups_of(args), None)
        if kind is None or group is None:
            return  # of one rank, or between the stages of a pipeline
        sent, is_functional = tensors_in(args), "functional" in name
        self._wait_for(stream, sent)
        nbytes = max(x.numel() * x.element_size() for x in (*sent, *tensors_in(out)))
        ranks, is_exchange = dist.get_process_group_ranks(group), kind == "alltoall"
        ms, link = group_ms(self._machine, nbytes, ranks, is_exchange=is_exchange)
        ms *= 2 if kind == "allreduce" else 1
        start = max(self._host, self._free[stream], self._free[group.group_name])
        if not is_functional and not all(self._known(x) for x in sent):
            start = max(start, self._free[self._compute])  # which made what is sent
        if not is_functional:  # exchanges do not slow FSDP down, nor it them: at best
            start = self._links.take(link, start, ms)
        end = self._free[group.group_name] = start + ms
        why = Part.EXCHANGES if is_functional and is_exchange else Part.COLLECTIVES
        if not is_functional and (kind == "allgather" or stream is not self._compute):
            why = Part.GATHERS if kind == "allgather" else Part.REDUCTIONS
        for tensor in tensors_in(out) if is_functional else sent:
            buffer = self._buffer(tensor, made_on=self._compute)
            buffer.ready, buffer.why = end, why
        if not is_functional:
            self._wait_until(stream, end, why)
            self._use(stream, sent, end)
        elif why is Part.EXCHANGES and not sent[0].is_floating_point():
            self._wait_until(stream, end + SYNC_MS, Part.HOST)  # the host reads the counts
            self._host = self._free[stream]

    def _part(self, name: str) -> Part:
        if name in _CODEC:
            return Part.CODEC
        if name.startswith("fsdp::"):
            return Part.COPIES
        if self._moment in ("clip", "optimizer"):
            return Part.OPTIMIZER
        if self._moment == "loss":
            return Part.LOSS
        if not in_backward():
            return Part.FORWARD
        # Backward runs without gradients, but for the recompute.
        return Part.RECOMPUTE if self._depth or torch.is_grad_enabled() else Part.BACKWARD

    # -- streams and what they share

    def _wait_for(self, stream: Any, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if (buffer := self._known(tensor)) is not None:
                self._wait_until(stream, buffer.ready, buffer.why)

    def _wait_until(self, stream: Any, time: float, why: Part) -> None:
        late = time - self._free[stream]
        if late > 0:
            self._free[stream] = time
            if stream is self._compute and self.passes:
                self.passes[-1].ms[why] += late

    def _use(self, stream: Any, tensors: Sequence[torch.Tensor], end: float) -> None:
        for tensor in tensors:
            if (buffer := self._known(tensor)) is not None:
                buffer.used[stream] = end
                if stream is not self._compute:
                    buffer.ready = max(buffer.ready, end)

    def _known(self, tensor: torch.Tensor) -> _Buffer | None:
        return self._buffers.get(tensor.untyped_storage()._cdata)

    def _buffer(self, tensor: torch.Tensor, made_on: Any) -> _Buffer:
        if (buffer := self._known(tensor)) is None:
            untyped = tensor.untyped_storage()
            key = untyped._cdata
            ref = weakref.ref(untyped, partial(self._freed, key))
            buffer = self._buffers[key] = _Buffer(made_on, ref)
        return buffer

    def _freed(self, key: int, _: object) -> None:
        if (buffer := self._buffers.pop(key, None)) is None:
            return
        for stream, end in buffer.used.items():
            if stream is not buffer.made_on:
                self._wait_until(buffer.made_on, end, buffer.why)


@dataclass(frozen=True)
class StepTime:
    """One step of a rank.

    Attributes:
        machine: Name of the machine.
        ms: Of the compute stream, by what it does; their sum is the step's.
        flops: Of its kernels, likewise; of a causal mask both halves.
        nbytes: That they read and write.
        tokens: Of a step, for each GPU.
        flops_per_token: By Titan's formula; None where Titan reports no MFU either.
        slower: Factor on the ideal time of kernels.
    """

    machine: str
    ms: Mapping[Part, float]
    flops: Mapping[Part, int]
    nbytes: Mapping[Part, int]
    tokens: float
    flops_per_token: int | None
    slower: float = 1.0

    @classmethod
    def of(
        cls, passes: Sequence[Pass], *, accumulation: int, idle: float, **others: Any
    ) -> "StepTime":
        """From the passes of a step with two accumulation steps, or one if there is no more;
        ``idle`` is a pipeline rank's time over that in which it is busy."""
        *forward_backward, last = passes
        repeated = [*forward_backward[:1], *forward_backward[1:] * (accumulation - 1), last]
        ms = {part: math.fsum(one.ms.get(part, 0.0) for one in repeated) for part in Part}
        ms[Part.BUBBLE] = idle * (sum(ms.values()) - sum(last.ms.values()))
        return cls(
            ms=ms,
            flops=sum((one.flops for one in repeated), Counter()),
            nbytes=sum((one.nbytes for one in repeated), Counter()),
            **others,
        )

    @property
    def step_ms(self) -> float:
        return sum(self.ms.values())

    @property
    def tokens_per_second(self) -> float:
        """Of each GPU, as Titan counts them."""
        return self.tokens / self.step_ms * 1e3

    @property
    def mfu(self) -> float | None:
        """Of the peak that Titan takes for this machine, up to 1."""
        if self.flops_per_token is None:
            return None
        return self.flops_per_token * self.tokens_per_second / self.peak

    @property
    def peak(self) -> float:
        return get_peak_flops(self.machine.upper())

    def verdict(self) -> str:
        mfu = f", MFU {self.mfu:.1%} of {self.peak / 1e12:.0f} TFLOP/s" if self.mfu else ""
        bound = "at most " if self.slower == 1 else ""
        return (
            f"{bound}{self.tokens_per_second:,.0f} tokens/s a GPU{mfu}: {self.step_ms:.1f} ms a "
            f"step on {self.machine}"
        )

    def table(self) -> Iterator[str]:
        """A line for each part, in ms, and what the sum assumes."""
        for part in Part:
            if (ms := f"{self.ms.get(part, 0.0):.1f}") != "0.0":
                yield f"{ms:>8}  {part}"
        rates = "ideal: at the rates of single kernels"
        if self.slower != 1:
            rates = f"kernels take {self.slower:.2f} times the ideal"
        yield f"{self.step_ms:>8.1f}  sum, {rates}"


class Action(NamedTuple):
    """A forward (F), backward (B), or one half of it (I: of inputs, W: of weights)."""

    kind: str
    stage: int
    microbatch: int


def actions_of(schedule: Any) -> dict[int, list[Action]]:
    """What each rank of a schedule of torch does, in order; ValueError for an unknown one."""
    if isinstance(schedule, PipelineScheduleMulti):
        return {
            rank: [
                Action(one.computation_type.value, one.stage_index, one.microbatch_index or 0)
                for action in order
                if action is not None
                for one in action.sub_actions or (action,)
                if one.computation_type.value in ("F", "B", "I", "W")
            ]
            for rank, order in schedule.pipeline_order.items()
        }
    if not isinstance(schedule, Schedule1F1B | ScheduleGPipe):
        name = type(schedule).__name__
        raise ValueError(f"pipeline schedule {name}: how long its stages wait is not known.")
    # torch 2.15 has the order of these two for display; 1F1B's last rank starts at microbatch 1.
    return one_stage_actions(
        "GPipe" if isinstance(schedule, ScheduleGPipe) else "1F1B",
        schedule._stage.num_stages,
        schedule._n_microbatches,
    )


def one_stage_actions(schedule: str, stages: int, microbatches: int) -> dict[int, list[Action]]:
    """Those of "1F1B" or "GPipe", with one stage a rank."""
    orders: dict[int, list[Action]] = {}
    for stage in range(stages):
        one = Pipeline(stage=stage, stages=stages, microbatches=microbatches, schedule=schedule)
        batches = {"F": itertools.count(), "B": itertools.count()}
        kinds = one.forwards_and_backwards()
        orders[stage] = [Action(kind, stage, next(batches[kind])) for kind in kinds]
    return orders


def idle_share(orders: Mapping[int, Sequence[Action]], forward: float) -> float:
    """How long a rank is idle, over how long the busiest one is busy. ``forward`` is its share of a
    microbatch's time in a stage. Raises ValueError for actions that wait for each other."""
    backward = 1 - forward
    cost = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    queues = {rank: list(order) for rank, order in orders.items()}
    last = max(action.stage for queue in queues.values() for action in queue)
    now = dict.fromkeys(queues, 0.0)
    done: dict[tuple[bool, int, int], float] = {}
    """When the forwards (True) and backwards of stages and microbatches have ended."""

    def ready(action: Action) -> float | None:
        is_forward = action.kind == "F"
        if is_forward and action.stage == 0:
            return 0.0
        if not is_forward and action.stage == last:
            return done.get((True, last, action.microbatch))
        neighbour = action.stage + (-1 if is_forward else 1)
        return done.get((is_forward, neighbour, action.microbatch))

    progresses = True
    while progresses:
        progresses = False
        for rank, queue in queues.items():
            while queue and (at := ready(queue[0])) is not None:
                action = queue.pop(0)
                now[rank] = max(now[rank], at) + cost[action.kind]
                if action.kind != "W":
                    done[action.kind == "F", action.stage, action.microbatch] = now[rank]
                progresses = True
    if any(queues.values()):
        raise ValueError("the stages of this pipeline schedule wait for each other.")
    busiest = max(sum(cost[action.kind] for action in order) for order in orders.values())
    return max(now.values()) / busiest - 1
