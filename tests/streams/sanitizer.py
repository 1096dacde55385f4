"""Races of streams in a planned step, without a GPU.

A dry run's clock derives order from the storages that operations use, so a dropped wait changes
nothing there. Here each stream, each communicator and the host has a vector clock instead, which
only waits join. So an access of a storage that is not ordered behind another one is found, and the
reuse of memory that is still used elsewhere.

Streams are those of ``torch.cpu``, which FSDP2 enters without an accelerator; they do nothing, and
get methods here that note what waits for what. Collectives of c10d run on their communicator, and
the stream that calls one waits for it: whether it was asynchronous cannot be seen. Functional ones
run until ``wait_tensor``, which torch's registry of works also keeps what they read for
(ProcessGroupNCCL.cpp stashes it).
"""

import contextlib
import functools
import os
import traceback
import unittest.mock
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torchtitan
from torch.distributed.fsdp import _fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.utils._python_dispatch import TorchDispatchMode

import titan_ext
from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, patched, planned_config
from titan_ext.base.tensors import tensors_in
from titan_ext.fp8 import offload, saved_tensors
from titan_ext.plan.dry_run import dry_run
from titan_ext.plan.op_cost import groups_of, moves_nothing
from titan_ext.plan.stand_ins import as_rank

Clock = dict[Hashable, int]
"""How much of each queue has surely run."""
HOST = "host"
# By folder, not by name: a checkout may be called titan_ext, with torch in its .venv.
WATCHED = tuple(
    os.path.dirname(str(package.__file__)) + os.sep
    for package in (titan_ext, torchtitan, _fully_shard)
)
_PLAN = os.path.join(WATCHED[0], "plan", "")
patch = unittest.mock.patch.object


class Finding(NamedTuple):
    """Two accesses of a storage in no order."""

    kind: str
    """"read after write", "write after read", "write after write" or "reuse after free"."""
    what: str
    where: str


class _Use(NamedTuple):
    queue: Hashable
    at: int
    where: str


@dataclass(eq=False)
class _Storage:
    queue: Hashable
    """Whose pool of the allocator it lies in."""
    ref: weakref.ref
    written: _Use | None = None
    read: dict[Hashable, _Use] = field(default_factory=dict)


class LaneStream(torch.cpu.Stream):
    """A stream of ``fp8.offload``, which enters it as torch.Stream is entered."""

    def __enter__(self) -> None:
        self._context = torch.cpu.stream(self)
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


class Sanitizer(TorchDispatchMode):
    """Finds races of the step that runs while it is entered.

    Attributes:
        found: What was found, each once.
        collectives: Communicators and names of collectives, in order.
        groups: Ranks of each communicator.
        operations: Operations by name.
        unwaited: Functional collectives for whose result nobody has waited.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[Finding] = set()
        self.collectives: list[tuple[str, str]] = []
        self.groups: dict[str, list[int]] = {}
        self.operations: Counter[str] = Counter()
        self._clocks: defaultdict[Hashable, Clock] = defaultdict(dict)
        self._names: dict[int, tuple[Any, str]] = {}
        self._storages: dict[Hashable, _Storage] = {}
        self._freed: defaultdict[Hashable, list[_Use]] = defaultdict(list)
        self._pending: dict[int, tuple[Clock, Any, str]] = {}
        """By storage of the result: the clock at the end, what was sent, and from where."""
        self._slabs: set[int] = set()
        self._stack = contextlib.ExitStack()

    @property
    def unwaited(self) -> list[str]:
        return [where for _, _, where in self._pending.values()]

    def __enter__(self) -> "Sanitizer":
        for context in self._patches():
            self._stack.enter_context(context)
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._stack.close()

    # -- what waits for what

    def _patches(self) -> Iterator[contextlib.AbstractContextManager[Any]]:
        sanitizer = self
        stream: Any = torch.cpu.Stream
        event: Any = torch.cpu.Event

        def wait_stream(waits: Any, other: Any) -> None:
            sanitizer._join(waits, sanitizer._clocks[sanitizer._name(other)])

        def record_event(of: Any, into: Any = None) -> Any:
            into = event() if into is None else into
            into.clock = dict(sanitizer._clocks[sanitizer._name(of)])
            return into

        def wait_event(waits: Any, other: Any) -> None:
            sanitizer._join(waits, getattr(other, "clock", {}))

        def record(into: Any, of: Any = None) -> None:
            record_event(torch.cpu.current_stream() if of is None else of, into)

        def wait(other: Any, waits: Any = None) -> None:
            wait_event(torch.cpu.current_stream() if waits is None else waits, other)

        def synchronize(other: Any) -> None:
            sanitizer._join(HOST, getattr(other, "clock", {}))

        yield patch(stream, "wait_stream", wait_stream)
        yield patch(stream, "record_event", record_event)
        yield patch(stream, "wait_event", wait_event)
        yield patch(event, "record", record)
        yield patch(event, "wait", wait)
        yield patch(event, "synchronize", synchronize)

        # Storages that FSDP2 empties and fills again, which no operation shows.
        free, allocate = _fsdp_param.free_storage, _fsdp_param.alloc_storage

        def freed(tensor: torch.Tensor) -> None:
            if tensor.untyped_storage().nbytes():
                sanitizer._free(tensor.untyped_storage()._cdata, None)
            free(tensor)

        def allocated(tensor: torch.Tensor) -> None:
            is_new = not tensor.untyped_storage().nbytes()
            allocate(tensor)
            if is_new:
                sanitizer._storage(tensor, sanitizer._current(), is_new=True)

        yield patch(_fsdp_param, "free_storage", freed)
        yield patch(_fsdp_param, "alloc_storage", allocated)
        yield patch(_fsdp_param_group, "alloc_storage", allocated)

        # Lanes as on an accelerator, and host memory that is used again.
        def lane(self: Any, device: torch.device) -> None:
            self._device, self._stream = device, LaneStream()

        take = offload._Slab.take

        def taken(slab: Any, nbytes: int) -> torch.Tensor:
            sanitizer._slabs.add(slab._memory.untyped_storage()._cdata)
            return take(slab, nbytes)

        drop = offload._Copy.__del__

        def dropped(copy: Any) -> None:
            # It was on the device all the time: nobody reads what the lane may still be copying.
            if copy.state == "source" and (source := sanitizer._storages.get(copy.source)):
                source.read.pop(sanitizer._name(copy._memory.out._stream), None)
            drop(copy)

        init = offload._Copy.__init__

        def copied(copy: Any, group: Any, x: torch.Tensor, *others: Any) -> None:
            copy.source = x.untyped_storage()._cdata
            init(copy, group, x, *others)

        yield patch(offload._Copy, "__init__", copied)
        yield patch(offload._Copy, "__del__", dropped)
        yield patch(offload.Lane, "__init__", lane)
        yield patch(offload._Slab, "take", taken)
        memory = functools.cache(lambda device: offload.HostMemory(device))
        yield patch(offload, "_FakeMemory", memory)
        current = lambda device=None: torch.cpu.current_stream()  # noqa: E731
        yield patch(torch.accelerator, "current_stream", current)
        # torch's registry of functional collectives, of which a fake group makes no entries.
        yield patch(saved_tensors, "_get_work_registry_size", lambda: len(sanitizer._pending))

    def _name(self, stream: Any) -> Hashable:
        if isinstance(stream, str):
            return stream
        # The stream is kept, or another one would have its address.
        return self._names.setdefault(id(stream), (stream, f"stream {len(self._names)}"))[1]

    def _current(self) -> Hashable:
        return self._name(torch.cpu.current_stream())

    def _join(self, waits: Any, clock: Clock) -> None:
        mine = self._clocks[self._name(waits)]
        for queue, at in list(clock.items()):
            mine[queue] = max(mine.get(queue, 0), at)

    # -- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        if func.namespace == "prim":
            return func(*args, **kwargs)
        queue = self._current()
        if name == "_c10d_functional::wait_tensor":
            # As on real tensors; the fake one is new.
            clock, _, _ = self._pending.pop(args[0].untyped_storage()._cdata, ({}, None, ""))
            self._join(queue, clock)
            return args[0]
        out = func(*args, **kwargs)
        self.operations[name] += 1
        if "c10d" in name:
            self._communicate(name, queue, args, out)
        elif not moves_nothing(func):
            written = [*_written(func, args, kwargs), *tensors_in(out)]
            known = {id(x) for x in written}
            read = [x for x in tensors_in((args, kwargs)) if id(x) not in known]
            self._access(queue, read, written, name)
        return out

    def _communicate(self, name: str, queue: Hashable, args: Any, out: Any) -> None:
        if (group := next(groups_of(args), None)) is None:
            return  # between the stages of a pipeline
        communicator = f"communicator {group.group_name}"
        self.groups[communicator] = dist.get_process_group_ranks(group)
        self.collectives.append((communicator, name))
        # A collective starts behind what its stream has been given.
        self._join(communicator, self._clocks[queue])
        functional = "functional" in name
        sides = (args, out) if functional else (args[1:], args[:1])
        read, written = (list(tensors_in(side)) for side in sides)
        self._access(communicator, read, written, name, made_on=queue)
        clock = dict(self._clocks[communicator])
        if functional:
            for x in written:
                self._pending[x.untyped_storage()._cdata] = clock, read, _where()
        else:
            self._join(queue, clock)

    def _access(
        self,
        queue: Hashable,
        read: Iterable[torch.Tensor],
        written: Iterable[torch.Tensor],
        name: str,
        made_on: Hashable | None = None,
    ) -> None:
        clock = self._clocks[queue]
        self._join(queue, self._clocks[HOST])
        now = _Use(queue, clock.get(queue, 0) + 1, f"{name} at {_where()}")
        clock[queue] = now.at
        read, written = list(read), list(written)
        made = made_on or queue
        for x in read:
            storage = self._storage(x, made)
            self._ordered(now, storage.written, "read after write")
        for x in written:
            storage = self._storage(x, made)
            self._ordered(now, storage.written, "write after write")
            for use in storage.read.values():
                self._ordered(now, use, "write after read")
        for x in read:
            self._storage(x, made).read[queue] = now
        for x in written:
            storage = self._storage(x, made)
            storage.written, storage.read = now, {}

    def _ordered(self, now: _Use, before: _Use | None, kind: str) -> None:
        if before is not None and self._clocks[now.queue].get(before.queue, 0) < before.at:
            what = f"{now.where} on {now.queue}"
            self.found.add(Finding(kind, what, f"{before.where} on {before.queue}"))

    # -- storages

    def _key(self, x: torch.Tensor) -> Hashable:
        """Of a storage; of host memory that offloading gives out, of a region."""
        key = x.untyped_storage()._cdata
        return (key, x.storage_offset() * x.itemsize) if key in self._slabs else key

    def _storage(self, x: torch.Tensor, queue: Hashable, *, is_new: bool = False) -> _Storage:
        key = self._key(x)
        storage = self._storages.get(key)
        if storage is None or is_new:
            untyped = x.untyped_storage()
            ref = weakref.ref(untyped, functools.partial(self._free, key))
            storage = self._storages[key] = _Storage(queue, ref)
            self._reuse(queue)
        return storage

    def _free(self, key: Hashable, _: object) -> None:
        """Its memory is the next that this queue's pool gives out, at worst."""
        if (storage := self._storages.pop(key, None)) is None:
            return
        self._slabs.discard(key)  # type: ignore[arg-type]
        uses = [*storage.read.values(), *([storage.written] if storage.written else [])]
        self._freed[storage.queue] += [use for use in uses if use.queue != storage.queue]

    def _reuse(self, queue: Hashable) -> None:
        for use in self._freed.pop(queue, ()):
            if self._clocks[queue].get(use.queue, 0) < use.at:
                where = f"{use.where} on {use.queue}"
                self.found.add(Finding("reuse after free", f"a storage of {queue}", where))


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from tensors_in((value,))


def _where() -> str:
    """The innermost frame of FSDP2, TorchTitan or ours, but of the plan."""
    for frame, line in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        if path.startswith(WATCHED) and not path.startswith(_PLAN):
            return f"{os.path.basename(path)}:{line} {frame.f_code.co_name}"
    return ""


@dataclass(frozen=True)
class Step:
    """What a sanitized step says of itself, without its tensors."""

    found: set[Finding]
    unwaited: list[str]
    operations: Counter[str]
    collectives: list[tuple[tuple[int, ...], str]]
    """The ranks of a communicator, and what ran on it, in order."""
    communicators: int
    """Process groups that communicated, of more than one rank."""


Fault = Callable[[], contextlib.AbstractContextManager[Any]]


def sanitized(folder: Path, *runs: Run, rank: int = 0, faults: Sequence[Fault] = ()) -> list[Step]:
    """A steady step of one rank of each of ``runs``, which have the same degrees: in one process.

    ``faults`` are contexts, of each run one.
    """
    arguments = runs, rank, folder, faults or [contextlib.nullcontext] * len(runs)
    return run_ranks(_sanitized, 1, *arguments, log_folder=folder / f"sanitized_{rank}")[0]


def _sanitized(runs: Sequence[Run], rank: int, folder: Path, faults: Sequence[Fault]) -> list[Step]:
    steps = []
    for run, fault in zip(runs, faults, strict=True):
        with as_rank(run.world, rank), patched(run):
            done = dry_run(planned_config(run, folder), run.world, rank, step=False)
            done._start_as_second_step()
            with Sanitizer() as seen, fault():
                done.run_step()
        groups = {name: tuple(ranks) for name, ranks in seen.groups.items()}
        ran = [(groups[name], operation) for name, operation in seen.collectives]
        alive = sum(len(ranks) > 1 for ranks in groups.values())
        steps.append(Step(seen.found, seen.unwaited, seen.operations, ran, alive))
    return steps
