# SPDX-License-Identifier: BSD-3-Clause
"""What FSDP holds unsharded on this rank, measured while it trains, event by event.

This patches nothing in torch. FSDP2 lets a parameter group bring the object that allocates its
buffers. Modules take hooks before and after FSDP's own, and so do autograd nodes. Gathered
parameters appear only at a copy-out and disappear only at a reshard, so reading the storages there
is exact.

Some tensors live only inside one of FSDP's calls. Of these it counts the temporaries of a copy-out,
not the cast of the local shard before an all-gather.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_ext.fsdp.units import BLOCK_KINDS, Unit, param_groups

_POST_BACKWARD_NODE = "RegisterPostBackwardFunctionBackward"


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Live bytes on one rank, by class.

    Attributes:
        gathered: Storages of unsharded parameters; of parameters resharded to a smaller world, the
            part that stays.
        all_gather: Flat buffers that all-gathers write into, until they are copied out and freed,
            and what a copy-out allocates for itself.
        reduce_scatter: Flat buffers of unsharded gradients, the inputs of reduce-scatters.
        gradients: Outputs of reduce-scatters. If dtypes agree they are the sharded gradients and
            live until the next ``zero_grad``; else they are freed at once.
        logical: Gathered parameters between unshard and reshard, whether or not they have arrived;
            not extra storages.
    """

    gathered: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0
    gradients: int = 0
    logical: int = 0

    @property
    def unsharded(self) -> int:
        """Gathered parameters and their all-gather buffers."""
        return self.gathered + self.all_gather

    @property
    def total(self) -> int:
        """All that FSDP holds beyond sharded parameters and gradients."""
        return self.unsharded + self.reduce_scatter

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(**{name: getattr(self, name) + getattr(other, name) for name in CLASSES})


CLASSES = tuple(field.name for field in fields(Bytes))


@dataclass(frozen=True, kw_only=True)
class Event:
    """A change in live bytes.

    Attributes:
        action: Of an all-gather: "unshard" (issued), "copying" (its copy-out has a temporary) and
            "copied" (its buffer goes). Of a unit: "forward" and "backward" (ready to run), "after
            forward" and "after backward" (resharded, or staying). Of a reduce-scatter: "reduce"
            (input) and "reduced" (output). Also "step" and "after step". What changes without an
            action of its own (a reshard at the very end of backward) shows in the next event.
        unit: The unit concerned; "" for the model.
        live: By kind of unit, after the change.
        unsharded: The units between unshard and reshard, in forward order; a group with a
            collective of its own as "layers.1.moe/experts".
    """

    action: str
    unit: str
    live: Mapping[str, Bytes]
    unsharded: tuple[str, ...]

    def bytes_of(self, kinds: Iterable[str] | None = None) -> Bytes:
        """Live bytes of the units of ``kinds``; of all by default."""
        chosen = self.live if kinds is None else [k for k in kinds if k in self.live]
        return sum((self.live[kind] for kind in chosen), Bytes())


class GroupBytes(NamedTuple):
    """The live bytes of one parameter group; ``name`` is as in ``Event.unsharded``."""

    name: str
    kind: str
    live: Bytes
    is_unsharded: bool


class Timeline:
    """The events of one step on one rank."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, action: str, unit: str, groups: Iterable[GroupBytes]) -> None:
        """Append an event, from all groups in forward order, if the last one differs in bytes."""
        live: dict[str, Bytes] = {}
        unsharded = []
        for group in groups:
            live[group.kind] = live.get(group.kind, Bytes()) + group.live
            if group.is_unsharded:
                unsharded.append(group.name)
        event = Event(action=action, unit=unit, live=live, unsharded=tuple(unsharded))
        last = self.events[-1] if self.events else None
        if last is None or (last.live, last.unsharded) != (event.live, event.unsharded):
            self.events.append(event)

    def peak(self, measure: str, kinds: Iterable[str] | None = None) -> int:
        """The most bytes of one class ("gathered") or measure ("unsharded"), over ``kinds``."""
        chosen = tuple(kinds) if kinds is not None else None
        return max((getattr(event.bytes_of(chosen), measure) for event in self.events), default=0)

    def peaks(self) -> dict[str, int]:
        """Peaks by class (each at its own time), of all kinds of units, and of blocks alone."""
        of_all = {name: self.peak(name) for name in (*CLASSES, "unsharded", "total")}
        of_blocks = {
            f"blocks_{name}": self.peak(name, BLOCK_KINDS) for name in ("logical", "unsharded")
        }
        return of_all | of_blocks

    def unshards(self) -> dict[str, int]:
        """How often each group was unsharded, by name."""
        return self._count(lambda before, after: after - before)

    def reshards(self) -> dict[str, int]:
        """How often each group was resharded, by name."""
        return self._count(lambda before, after: before - after)

    def left_over(self) -> tuple[str, ...]:
        """What a step should have freed but did not: unsharded units, flat buffers."""
        if not self.events:
            return ()
        last = self.events[-1]
        live = last.bytes_of()
        buffers = [n for n in ("all_gather", "reduce_scatter") if getattr(live, n)]
        return (*last.unsharded, *(f"{name} buffers" for name in buffers))

    def _count(self, change: Callable[[set[str], set[str]], set[str]]) -> dict[str, int]:
        counts: Counter[str] = Counter()
        before: set[str] = set()
        for event in self.events:
            after = set(event.unsharded)
            counts.update(change(before, after))
            before = after
        return dict(sorted(counts.items()))


class MemoryTracker:
    """Follows every unshard and reshard of the units of a model on this rank.

    Args:
        models: Each FSDP root (one, or one for each stage of a pipeline that this rank has) with
            its units, in forward order. They have been sharded.
    """

    def __init__(self, models: Sequence[tuple[nn.Module, Sequence[Unit]]]) -> None:
        self._timeline = Timeline()
        self._groups = [
            _Group(group, unit, index)
            for root, units in models
            for unit in units
            for index, group in enumerate(param_groups([unit.fsdp_module(root)]))
        ]
        for group in self._groups:
            group.watch(self)
        for root, units in models:
            for unit in units:
                for module in unit.modules(root):
                    self._watch_module(module, unit.name)
            before = self._hook(lambda *_: self.sample("forward", ""))
            root.register_forward_pre_hook(before, prepend=True)
            self._watch_module(root, "")

    def begin_step(self) -> None:
        """Start a timeline, without what ran since the last step (a validation)."""
        self._timeline = Timeline()
        self.sample("step", "")

    def end_step(self) -> Timeline:
        """The timeline since ``begin_step``."""
        self.sample("after step", "")
        return self._timeline

    def sample(self, action: str, unit: str, issuing: "_Group | None" = None) -> None:
        """Read what is live now. ``issuing`` is the group whose all-gather is being issued."""
        groups = (group.live_bytes(group is issuing) for group in self._groups)
        self._timeline.record(action, unit, groups)

    def _watch_module(self, module: nn.Module, unit: str) -> None:
        def ready(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self.sample("forward", unit)
            for node in _post_backward_nodes((args, kwargs)):
                node.register_hook(lambda *_: self.sample("after backward", unit))

        def done(_module: nn.Module, _args: Any, output: Any) -> None:
            self.sample("after forward", unit)
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self.sample("backward", unit))

        module.register_forward_pre_hook(self._hook(ready), with_kwargs=True)
        module.register_forward_hook(self._hook(done))

    @staticmethod
    def _hook(function: Callable[..., None]) -> Callable[..., None]:
        return torch._dynamo.disable(function)  # as FSDP's own hooks are


class _Group:
    """One of FSDP2's parameter groups, with its live buffers."""

    def __init__(self, group: FSDPParamGroup, unit: Unit, index: int) -> None:
        self.unit = unit.name
        self.name = f"{unit.name}/experts" if index else unit.name
        self.kind = unit.kind.value
        self._group = group
        self._buffers = dict.fromkeys(("all_gather", "reduce_scatter", "gradients"), 0)

    def watch(self, tracker: MemoryTracker) -> None:
        # What FSDPModule.set_custom_all_gather does; that refuses a unit with two groups, for which
        # one object would be ambiguous. Here each group gets its own.
        group = self._group
        group._all_gather_comm = _WatchedAllGather(group._all_gather_comm, self, tracker)
        reduce_scatter = group._reduce_scatter_comm
        group._reduce_scatter_comm = _WatchedReduceScatter(reduce_scatter, self, tracker)
        copy_out = getattr(group, "_all_gather_output_fn", None)  # torch 2.14 has none
        if copy_out and any(param.fsdp_placement.dim != 0 for param in group.fsdp_params):
            watched = _WatchedCopyOut(copy_out, self, tracker)
            group._all_gather_output_fn = watched  # pyrefly: ignore[missing-attribute]

    def add_buffer(
        self, name: str, buffer: torch.Tensor, on_free: Callable[[], None] | None = None
    ) -> None:
        """Count ``buffer`` until FSDP frees it; for gradients, until the storage is freed.

        A process group's thread may hold a buffer for an instant after its collective is over. So
        collectives get other tensors of the same storage (``_lend``).
        """
        storage = buffer.untyped_storage()
        nbytes = storage.nbytes()
        self._buffers[name] += nbytes

        def freed() -> None:
            if on_free is not None:
                on_free()  # the buffer still counts: it is being freed
            self._buffers[name] -= nbytes

        lifetime = storage if name == "gradients" else buffer
        finalizer = weakref.finalize(lifetime, freed)
        finalizer.atexit = False  # pyrefly: ignore[missing-attribute]

    def sample_with(self, temporaries: Iterable[torch.Tensor], tracker: MemoryTracker) -> None:
        """Read what is live, and those of ``temporaries`` that are not gathered parameters."""
        gathered = {t.data_ptr() for p in self._group.fsdp_params for t in p.all_gather_outputs}
        others = (t for t in temporaries if t.data_ptr() not in gathered)
        if extra := sum(t.untyped_storage().nbytes() for t in others):
            self._buffers["all_gather"] += extra
            tracker.sample("copying", self.unit)
            self._buffers["all_gather"] -= extra

    def live_bytes(self, is_issuing: bool) -> GroupBytes:
        # Between unshard and reshard, whether or not the parameters have arrived.
        is_unsharded = (
            is_issuing or self._group.is_unsharded or self._group._all_gather_result is not None
        )
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for param in self._group.fsdp_params
            for tensor in _gathered_tensors(param)
        }
        live = Bytes(
            gathered=sum(storages.values()),
            logical=self._nbytes_when_gathered if is_unsharded else 0,
            **self._buffers,
        )
        return GroupBytes(self.name, self.kind, live, is_unsharded)

    @functools.cached_property
    def _nbytes_when_gathered(self) -> int:
        mesh_info = self._group.mesh_info
        assert isinstance(mesh_info, FSDPMeshInfo), "fully_shard shards"
        return mesh_info.shard_mesh_size * sum(
            p.padded_sharded_param_size.numel() * (p.param_dtype or p.orig_dtype).itemsize
            for p in self._group.fsdp_params
        )


class _Watched:
    """A group's collective, with its buffers counted."""

    def __init__(self, inner: Any, owner: _Group, tracker: MemoryTracker) -> None:
        self.inner = inner
        self._owner = owner
        self._tracker = tracker

    def __call__(self, *args: Any, **kwargs: Any):
        return self.inner(*map(_lend, args), **{k: _lend(v) for k, v in kwargs.items()})


class _WatchedAllGather(_Watched, AllGather):
    def allocate(self, size, *, dtype, device) -> torch.Tensor:
        buffer = self.inner.allocate(size, dtype=dtype, device=device)
        tracker, owner = self._tracker, self._owner
        owner.add_buffer("all_gather", buffer, lambda: tracker.sample("copied", owner.unit))
        tracker.sample("unshard", owner.unit, issuing=owner)
        return buffer


class _WatchedReduceScatter(_Watched, ReduceScatter):
    _next_is_output = False  # FSDP2 allocates the input first

    def allocate(self, size, *, dtype, device) -> torch.Tensor:
        buffer = self.inner.allocate(size, dtype=dtype, device=device)
        name, action = "reduce_scatter", "reduce"
        if self._next_is_output:
            name, action = "gradients", "reduced"
        self._next_is_output = not self._next_is_output
        self._owner.add_buffer(name, buffer)
        self._tracker.sample(action, self._owner.unit)
        return buffer


class _WatchedCopyOut(_Watched, TorchDispatchMode):
    """A group's copy-out; counts as all-gather buffers the tensors that it makes for itself."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        TorchDispatchMode.__init__(self)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._made: list[weakref.ref[torch.Tensor]] = []
        with self:
            self.inner(*args, **kwargs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func._schema.name.startswith("aten::empty"):
            self._made.append(weakref.ref(output))
            return output
        live = {t for t in (made() for made in self._made) if t is not None}
        self._owner.sample_with(live, self._tracker)
        return output


def _lend(value: Any) -> Any:
    """Another tensor of the same storage; it keeps neither the first nor its base alive."""
    return value.data if isinstance(value, torch.Tensor) else value


def _gathered_tensors(param: Any) -> list[torch.Tensor]:
    """The tensors that hold (or held) a parameter of FSDP2's unsharded, or part of it."""
    tensors = [*param.all_gather_outputs, *getattr(param, "_unsharded_inner_tensors", ())]
    kept = getattr(param, "_sharded_post_forward_param_data", None)
    return tensors if kept is None else [*tensors, kept]


def _post_backward_nodes(inputs: Any) -> list[Any]:
    """The autograd nodes that end a unit's backward, one for each of its groups, last first."""
    nodes: list[Any] = []
    for tensor in tree_leaves(inputs):
        node = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
        while node is not None and node.name() == _POST_BACKWARD_NODE and node not in nodes:
            nodes.append(node)
            node = next((n for n, _ in node.next_functions if n is not None), None)
    return nodes
