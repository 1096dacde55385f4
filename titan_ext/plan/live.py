# SPDX-License-Identifier: BSD-3-Clause
"""Every storage of one step on one rank, added up while the step runs.

A dispatch mode sees each operation below autograd, in forward, backward and recompute, on fake
tensors (``dry_run``) and on real ones alike. It counts a storage from the operation that makes it
until it is freed, and keeps what lived at the peak. torch's own
``torch.distributed._tools.mem_tracker.MemTracker`` refuses a model that runs twice in a step
(accumulation, pipelines) and does not tell FSDP's buffers apart.
"""

import functools
import inspect
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode

from titan_ext.activation_checkpoint.compile import pieces_in
from titan_ext.base.tensors import in_backward, optimizer_states, plain_tensors, tensors_in
from titan_ext.fp8 import offload
from titan_ext.plan.op_cost import groups_of, moves_nothing
from titan_ext.plan.pools import COMPONENTS, Event, Fusion, Pools, component_of, is_fusible


class MemoryKind(StrEnum):
    """Use of a storage."""

    PARAMETERS = "parameters and buffers"
    GRADIENTS = "gradients"
    STATES = "optimizer states"
    EXACT = "activations kept exactly"
    FLOAT8 = "activations kept in float8"
    OFFLOADED = "offloaded activations"
    UNSHARDED = "unsharded units, all-gather buffers"
    REDUCE = "unsharded gradients, reduce-scatter buffers"
    ALL_TO_ALL = "all-to-all outputs"
    LOSS = "logits and loss"
    TEMPORARY = "recomputed, and other temporaries"


LASTING = (MemoryKind.PARAMETERS, MemoryKind.GRADIENTS, MemoryKind.STATES)
"""Kinds that live on between steps, or could."""


class Peak(NamedTuple):
    """The most that was live, in bytes, and when."""

    nbytes: int
    phase: str
    by_kind: dict[MemoryKind, int]

    @classmethod
    def of(cls, phases: Iterable["Peak"]) -> "Peak":
        """The first of the highest."""
        return max(phases, key=lambda phase: phase.nbytes)

    @property
    def held(self) -> int:
        """Bytes of activations, which wait for backward."""
        kinds = MemoryKind.EXACT, MemoryKind.FLOAT8, MemoryKind.ALL_TO_ALL
        return sum(self.by_kind.get(kind, 0) for kind in kinds)


@dataclass(eq=False, slots=True)
class _Storage:
    kind: MemoryKind
    nbytes: int
    ref: weakref.ref | None = None
    stream: int = 0
    """Whose pool of the allocator it lies in; 0 is the one that computes."""
    serial: int = -1
    """Its number in ``LiveBytes.events``, if it lies on the device."""


_MAKERS = {
    # FSDP2 has no hook where it allocates, so its functions are looked for on the stack. Decorators
    # such as torch.no_grad would otherwise stand for all that they wrap.
    # The cast of the local shards, which is copied into the buffer and freed.
    inspect.unwrap(_fsdp_collectives._get_param_all_gather_inputs).__code__: MemoryKind.TEMPORARY,
    inspect.unwrap(FSDPParamGroup.unshard).__code__: MemoryKind.UNSHARDED,
    inspect.unwrap(FSDPParamGroup.wait_for_unshard).__code__: MemoryKind.UNSHARDED,
    inspect.unwrap(FSDPParamGroup.reshard).__code__: MemoryKind.UNSHARDED,  # to a smaller world
    inspect.unwrap(FSDPParamGroup.post_backward).__code__: MemoryKind.REDUCE,
    offload.Offload.copy.__code__: MemoryKind.OFFLOADED,
}
"""Functions whose storages are of a kind."""

_ASKS_DEVICE = torch.ops.prim.device.default
"""More than half of what reaches a mode where tensors are fake, and no operation."""
_MADE_BY = {
    "titan_ext::float8_quantize": MemoryKind.FLOAT8,
    "_c10d_functional::all_to_all_single": MemoryKind.ALL_TO_ALL,
}
_PLAIN_TYPES = {torch.Tensor, nn.Parameter, FakeTensor}
_PASSING = (MemoryKind.TEMPORARY, MemoryKind.LOSS)
# FSDP2's copy of unsharded gradients into the reduce-scatter's input.
_TAKES_GRADIENTS = "fsdp::chunk_cat"


def fsdp_kind() -> MemoryKind | None:
    """Kind of the storage that FSDP is making, inside the operation that does; None for others."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _MAKERS:
            return _MAKERS[frame.f_code]
        frame = frame.f_back
    return None


class LiveBytes(TorchDispatchMode):
    """Counts live storages by kind: ``with`` it, run a step, and read ``peak``.

    Args:
        parts: The models of this rank. They have run a step: FSDP and the optimizers have made
            what they keep, and DTensor its shapes, which it computes at global size.
        optimizers: Those whose states to count.
        on_host: Kinds that do not lie on the device, beside offloaded activations; they are not in
            the sums.
        compiled: Titan's ``compile.components``, of which peaks and ``reserved`` leave out what is
            fused.

    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        on_host: Iterable[MemoryKind] = (),
        compiled: Iterable[str] = (),
    ) -> None:
        super().__init__()
        self.phase = ""
        self.groups: set[str] = set()
        """Names of the process groups that communicated."""
        self.then: Callable[[Any, Any, Any, Any], None] = lambda *operation: None
        """Called with each operation, its arguments and its result, after it is counted."""
        self._parts = parts
        self.on_host = frozenset(on_host) | {MemoryKind.OFFLOADED}
        self.most: Counter[MemoryKind] = Counter()
        """The most bytes of each kind that were live at once, on the host as well."""
        self._now: Counter[MemoryKind] = Counter()
        self._live: dict[int, _Storage] = {}
        self._full: set[int] = set()
        """Keys of storages that FSDP empties when it reshards, which no operation shows."""
        self._depth = 0
        self._handles: list[Any] = []
        self.events: list[Event] = []
        """Storages as they are made and freed; ``states_at`` and ``step_at`` are places in it."""
        self._storages: dict[int, _Storage] = {}
        """By their numbers in ``events``."""
        self._begun: list[tuple[int, str]] = []
        """Where each phase begins in ``events``."""
        self.compiled = frozenset(compiled)
        self._fusion = Fusion()
        self._split: set[str] = set()
        """Blocks that are compiled in pieces: what runs between those is not fused."""
        self._piece = ""
        # torch.cpu's streams, which FSDP2 enters here as it enters a GPU's.
        self._streams: dict[Any, int] = {torch.cpu.current_stream(): 0}
        for part in parts:
            self.own([*part.parameters(), *part.buffers()], MemoryKind.PARAMETERS)
        self.states_at = len(self.events)
        self.own(optimizer_states(optimizers), MemoryKind.STATES)
        self.step_at = len(self.events)
        self.begin("start")

    def begin(self, phase: str) -> None:
        """Say what runs from here on, for what follows the last backward.

        Before it phases are "forward of layers.3", "loss", "backward of layers.3" (with its
        recompute), and so on.
        """
        gradients = (p.grad for part in self._parts for p in part.parameters())
        self.own([x for x in gradients if x is not None], MemoryKind.GRADIENTS)
        if self.phase != phase:
            self._see_full()
            self.phase = phase
            self._begun.append((len(self.events), phase))

    @property
    def phases(self) -> list[Peak]:
        """Every phase of the step with its own peak, in order.

        By what each storage turned out to be.
        """
        now, by_kind = 0, Counter[MemoryKind]()
        found: list[Peak] = []
        begun = deque(self._begun)
        for at, (serial, _, nbytes) in self._fusion.apply(self.events, self.compiled):
            while begun and begun[0][0] <= at:
                found.append(Peak(now, begun.popleft()[1], dict(by_kind)))
            storage = self._storages[serial]
            change = nbytes or -storage.nbytes
            now += change
            by_kind[storage.kind] += change
            if found and now > found[-1].nbytes:
                found[-1] = Peak(now, found[-1].phase, dict(by_kind))
        return found + [Peak(now, phase, dict(by_kind)) for _, phase in begun]

    @property
    def peak(self) -> Peak:
        return Peak.of(self.phases)

    @property
    def reserved(self) -> dict[int, int]:
        """Bytes that torch's allocator reserves for each stream, after a job's first three steps.

        The first one runs before the optimizer has states: they then lie among its blocks.
        """
        pools, at = Pools(), self.step_at
        parameters, states = self.events[: self.states_at], self.events[self.states_at : at]
        edited = self._fusion.apply(self.events, self.compiled)
        step = [event for index, event in edited if index >= at]
        # What a step leaves is freed before the next: both have the same numbers for storages.
        left = {event.storage: event._replace(nbytes=0) for event in step}
        for events in (parameters, step, states, left.values(), step, left.values(), step):
            pools.replay(events)
        return pools.reserved

    def fused(self, func: Any, tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]] | None:
        """Events and bytes of an operation's storages; None where no compiler would fuse it.

        Of an eager job, too: a plan says what a compiler would save.
        """
        if not (self.region() and is_fusible(func)):
            return None
        found = {x.untyped_storage()._cdata: x.nbytes for x in tensors}
        at = ((self._live.get(key), nbytes) for key, nbytes in found.items())
        return [(storage.serial, nbytes) for storage, nbytes in at if storage is not None]

    def never_made(self) -> set[int]:
        """Events of the storages that fusing leaves out, if all is compiled that can be."""
        left = {event.storage for _, event in self._fusion.apply(self.events, COMPONENTS)}
        return {event.storage for event in self.events} - left

    def own(self, tensors: Iterable[torch.Tensor], kind: MemoryKind) -> None:
        """Say of which kind the storages of ``tensors`` are, whatever made them."""
        for tensor in tensors:
            for part in plain_tensors(tensor):
                self._turn_into(self._see(part, kind), kind)

    def kind_of(self, tensor: torch.Tensor) -> MemoryKind | None:
        """Kind of the storage of ``tensor``; None if it has not been seen."""
        storage = self._live.get(tensor.untyped_storage()._cdata)
        return None if storage is None else storage.kind

    def __enter__(self) -> "LiveBytes":
        for part in self._parts:
            self._watch(part)
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __torch_dispatch__(self, func, types, args: Any = (), kwargs: Any = None):
        if not _PLAIN_TYPES.issuperset(types):
            return NotImplemented  # the class then runs its own operations, which come here
        if func is _ASKS_DEVICE:
            return func(*args)
        kwargs, name = kwargs or {}, func._schema.name
        if name == "_c10d_functional::wait_tensor" and type(args[0]) is FakeTensor:
            out = args[0]  # as on real tensors; the fake one is new
        else:
            out = func(*args, **kwargs)
            self._count(func, name, args, kwargs, out)
        self.then(func, args, kwargs, out)
        return out

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        read = []
        for tensor in tensors_in((args, kwargs)):
            storage = self._live.get(tensor.untyped_storage()._cdata)
            if storage is not None:
                read.append(self._see(tensor, storage.kind).serial)
                if name.startswith(_TAKES_GRADIENTS) and storage.kind in _PASSING:
                    self._turn_into(storage, MemoryKind.REDUCE)
        kind, at = _MADE_BY.get(name), len(self.events)
        for tensor in tensors_in(out):
            if tensor.untyped_storage()._cdata not in self._live:
                kind = kind or self._kind_by_maker()
            self._see(tensor, kind or MemoryKind.TEMPORARY)
        if not moves_nothing(func):
            made = range(at, len(self.events))
            region, backward = self.region(), in_backward()
            self._fusion.see(func, region, at, in_backward=backward, read=read, made=made)
        if "c10d" in name:
            self.groups.update(group.group_name for group in groups_of(args))

    def region(self) -> str:
        """The module whose operations run, if it is one that a job can compile."""
        *_, name = self.phase.split(" of ")
        if not component_of(name) or (name in self._split and not self._piece):
            return ""
        return name + self._piece

    def _kind_by_maker(self) -> MemoryKind:
        if (kind := fsdp_kind()) is not None:
            return kind
        if self.phase == "loss":
            return MemoryKind.LOSS
        return MemoryKind.EXACT if self._depth and not in_backward() else MemoryKind.TEMPORARY

    def _see(self, tensor: torch.Tensor, kind: MemoryKind) -> _Storage:
        """The storage of ``tensor``, with its size now; a new one is of ``kind``."""
        untyped = tensor.untyped_storage()
        key, nbytes = untyped._cdata, untyped.nbytes()
        storage = self._live.get(key)
        if storage is None:
            self._see_full()
            # torch keeps a storage's Python object while it lives, so this tells of its end.
            ref = weakref.ref(untyped, lambda _: self._end(key))
            stream = self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))
            return self._begin(key, _Storage(kind, nbytes, ref, stream))
        return storage if storage.nbytes == nbytes else self._resize(key, nbytes)

    def _resize(self, key: int, nbytes: int) -> _Storage:
        old = self._end(key)
        return self._begin(key, _Storage(old.kind, nbytes, old.ref))

    def _begin(self, key: int, storage: _Storage) -> _Storage:
        self._live[key] = storage
        if storage.nbytes and storage.kind not in self.on_host:
            storage.serial = len(self.events)
            self._storages[storage.serial] = storage
            self.events.append(Event(storage.serial, storage.stream, storage.nbytes))
        self._add(storage.kind, storage.nbytes)
        if storage.kind is MemoryKind.UNSHARDED and storage.nbytes:
            self._full.add(key)
        return storage

    def _end(self, key: int) -> _Storage:
        storage = self._live.pop(key)
        self._full.discard(key)
        if storage.serial >= 0:
            self.events.append(Event(storage.serial, storage.stream, 0))
        self._add(storage.kind, -storage.nbytes)
        if storage.kind is MemoryKind.EXACT and not in_backward():
            storage.kind = MemoryKind.TEMPORARY  # forward was over with it: not kept
        return storage

    def _add(self, kind: MemoryKind, nbytes: int) -> None:
        self._now[kind] += nbytes
        self.most[kind] = max(self.most[kind], self._now[kind])

    def _turn_into(self, storage: _Storage, kind: MemoryKind) -> None:
        if kind in self.on_host and storage.serial >= 0:
            self.events.append(Event(storage.serial, storage.stream, 0))
            storage.serial = -1
        self._add(storage.kind, -storage.nbytes)
        self._add(kind, storage.nbytes)
        storage.kind = kind

    def _see_full(self) -> None:
        for key in list(self._full):
            ref = self._live[key].ref
            assert ref is not None
            if (untyped := ref()) is not None and untyped.nbytes() != self._live[key].nbytes:
                self._resize(key, untyped.nbytes())

    def _at_gradients(self, values: Any, then: Callable[[torch.Tensor], None]) -> None:
        for tensor in tensors_in(values):
            if tensor.requires_grad:
                tensor.register_hook(then)

    def _watch(self, part: nn.Module) -> None:
        def begin(name: str, *_: Any) -> None:
            # In backward a forward is a recompute. Titan's chunked loss calls the head outside of
            # the model's forward, once a chunk (torchtitan/components/loss.py).
            if not in_backward() and (self._depth or name != "lm_head"):
                self.begin("loss" if name == "lm_head" else f"forward of {name}")

        def end(name: str, _module: nn.Module, _args: Any, out: Any) -> None:
            if not in_backward() and name != "lm_head":
                self._at_gradients(out, lambda _: self.begin(f"backward of {name}"))

        def enter(*_: Any) -> None:
            self._depth += 1

        def leave(*_: Any) -> None:
            self._depth -= 1
            self.begin("loss" if getattr(part, "lm_head", None) is not None else "sending")

        def at(key: str, *_: Any) -> None:
            self._piece = key

        def enter_piece(key: str, _module: nn.Module, args: Any) -> None:
            at(key)
            self._at_gradients(args, functools.partial(at, ""))

        def leave_piece(key: str, _module: nn.Module, _args: Any, out: Any) -> None:
            at("")
            self._at_gradients(out, functools.partial(at, key))

        modules = {
            f"{name}.{key}" if is_list else name: module
            for name, child in part.named_children()
            for is_list in [isinstance(child, (nn.ModuleList, nn.ModuleDict))]
            for key, module in (child.named_children() if is_list else [("", child)])
        }
        self._handles += [
            part.register_forward_pre_hook(enter, prepend=True),
            part.register_forward_hook(leave),
        ]
        for name, module in modules.items():
            pieces = pieces_in(module)
            self._split.update({name} if pieces else ())
            for key, piece in pieces.items():
                self._handles += [
                    piece.register_forward_pre_hook(functools.partial(enter_piece, key)),
                    piece.register_forward_hook(functools.partial(leave_piece, key)),
                ]
            self._handles += [
                # Prepended after FSDP's, and so run before it: a unit is gathered in its own phase.
                module.register_forward_pre_hook(functools.partial(begin, name), prepend=True),
                module.register_forward_hook(functools.partial(end, name)),
            ]
