# SPDX-License-Identifier: BSD-3-Clause
"""Discarded outputs: neither kept nor recomputed, because nothing reads their values.

In the recompute a discarded output is NaN. That is sound, for example, for the last projection of a
feed-forward, which is only added to something. Each forward decides anew when it ends. It discards
the output only if all of this holds:

1. No dispatched operation on its values, or on anything computed from them, has a derivative that
    reads an operand, or makes integers or booleans of them: those may become indices and masks. Nor
    does its own derivative read its result, as a sigmoid's does. The tracker follows values by
    storage, through ``detach`` too.
2. No custom ``torch.autograd.Function`` ran after it in the block: it may save anything, and its
    kernels may bypass dispatch. Every autograd node has a sequence number, so each later number
    must belong to one of torch's own nodes, found from the block's outputs.
3. No user's forward hook runs on a module that encloses it or starts after it.
4. Nothing but the block's outputs holds these values after the forward, as storages' reference
    counts show.

Else the output is recomputed, and the reason reported. So is what was saved and then written to in
place: the value that was kept is lost. Exchanges are not repeated, since ranks might disagree.
docs/float8.md says what this cannot see.
"""

import functools
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef

from titan_ext.activation_checkpoint.op_effects import (
    READ_NO_VALUES,
    is_exchange,
    is_mutable,
    makes_node,
    op_name,
    passes_values,
    written,
)
from titan_ext.activation_checkpoint.op_rules import OpLocation
from titan_ext.base.hooks import user_hook
from titan_ext.base.tensors import (
    local_tensor,
    parts_in,
    plain_tensors,
    storage_ids,
    storages_of,
    tensors_in,
    wrapping,
)
from titan_ext.fp8.saved_tensors import StoredEntry

# Where custom Functions are defined that only relabel or exchange tensors, or whose operations are
# dispatched and so known by name (torch.library's).
_HARMLESS_FUNCTIONS = (
    "spmd_types.",
    "titan_ext.components.exchange.",
    "titan_ext.components.rows.",
    "torchtitan.models.gpt_oss.",
    "torch._library.autograd",
    "torch.distributed.fsdp._fully_shard.",
    "torch.distributed.tensor._api",
    "torch.distributed.tensor._redistribute",
    "torch.nn.modules._functions.BackwardHookFunction",
)
# And those that compute a GEMM inside and save its operands, not its result.
_GEMM_FUNCTIONS = ("torchao.", "torchtitan.distributed.linear")
# And those around an operation that only passes values on: torch.library's, and an exchange's.
_PASSING_FUNCTIONS = (
    "torch._library.autograd",
    "titan_ext.components.exchange.",
    "titan_ext.components.rows.",
)
# How torch calls what the node of an operation has saved of its own results (sigmoid, softmax).
_SAVED_OUTPUTS = ("_saved_result", "_saved_output", "_saved_out")
_NOT_FOUND = "a custom autograd Function that does not lead to the block's outputs"
_COLLECTIVE = "_c10d_functional."
# Not measured: a thread holds it for a moment. Who waits in vain refuses the discard, once.
_LETS_GO_S = 10.0
"""Seconds that a process group's own thread may hold what it has sent, once it has arrived."""
_UNREAD = "discarded"
_NANS = 2**16
"""Most values of a stand-in: no more than a kernel's launch takes."""


class Discarded(StoredEntry):
    """Keeps nothing, unless it is of an exchange and ``finish`` finds that something reads it.

    The operation at ``location`` has made it when ``modules_left`` of the block had returned.
    """

    def __init__(self, x: torch.Tensor, location: OpLocation, modules_left: int) -> None:
        super().__init__("")
        self.location, self.name = location, str(location)
        self.known_functions: tuple[str, ...] = _GEMM_FUNCTIONS
        if location.op in READ_NO_VALUES:  # nor does their backward read what they return
            self.known_functions += _PASSING_FUNCTIONS
        self.original = storages_of(x)
        self.sources: set[Discarded] = set()
        """The discarded outputs that this operation has read."""
        self.reader = ""
        """Who reads it; "" if nobody does."""
        self.in_graph = torch.is_grad_enabled()
        """Whether it was computed outside of custom Functions and ``no_grad``."""
        self.node = last_node()
        """The number of its own autograd node, or of the last one before it."""
        self.modules_left = modules_left
        self._stand_in = _stand_in(x)
        self.is_exchange = _is_exchange(location.op)  # which must not run again
        self._value = x if self.is_exchange else None

    def tensors(self) -> Iterator[torch.Tensor]:
        if self._value is not None:
            yield from plain_tensors(self._value)

    def finish(self, is_proved: bool) -> bool:
        """End of the forward: free the value, unless something reads it or it is not known.

        Returns whether the operation must run again.
        """
        if is_proved and not self.reader:
            self.treatment = _UNREAD
            self._value = None
            return False
        why = f"read by {self.reader}" if self.reader else "not known to be unread"
        self.treatment = f"{'exact' if self.is_exchange else 'recomputed'}: {why}"
        return not self.is_exchange

    def restore(self) -> torch.Tensor:
        """The value if something reads it, else a stand-in of the same shape and strides."""
        return self._stand_in() if self._value is None else self._value


@dataclass(eq=False)
class _Kept:
    """A saved output, and what writes to it; ``packed`` is what torch holds for it."""

    packed: Any
    location: OpLocation
    sources: set[Discarded]
    writer: str = ""

    def runs_again(self) -> bool:
        """True if it has to, once something has written to it.

        Raises RuntimeError for an exchange whose output is needed.
        """
        is_exchanged = _is_exchange(self.location.op)
        if is_exchanged and getattr(self.packed, "treatment", "") != _UNREAD:
            raise RuntimeError(
                f"{self.location} cannot be kept for backward: {self.writer} writes to it in "
                'place. Write to a copy, or give it the policy "recompute".'
            )
        return not is_exchanged


class DiscardTracker:
    """Follows the values of discarded and of saved outputs through one forward of a block."""

    def __init__(self) -> None:
        self.discarded: list[Discarded] = []
        # By storage. The weak reference keeps no bytes, but no other storage gets the address.
        self._holders: dict[int, tuple[StorageWeakRef, set[Discarded]]] = {}
        self._kept: dict[int, list[_Kept]] = {}
        self._sources: set[Discarded] = set()
        """The storages that the last operation has read."""
        self._nodes_of_ops: set[int] = set()
        self._sent: set[int] = set()
        """Storages of discarded values that a collective has read or written."""

    def add(self, x: torch.Tensor, location: OpLocation, modules_left: int) -> Discarded:
        """Discard ``x``, which the last operation has made; see ``Discarded``."""
        entry = Discarded(x, location, modules_left)
        entry.sources = self._sources
        self.discarded.append(entry)
        self._follow({entry}, x)
        if location.op.startswith(_COLLECTIVE):
            self._sent.update(storage_ids(x))
        if entry.is_exchange:
            self.keep(entry, x, location)
        return entry

    def keep(self, packed: Any, x: torch.Tensor, location: OpLocation) -> None:
        """``packed`` keeps ``x``, which the last operation has made, by reference."""
        kept = _Kept(packed, location, self._sources)
        for storage in storage_ids(x):
            self._kept.setdefault(storage, []).append(kept)

    def see(
        self, func: Any, module: str, args: Any, kwargs: Any, out: Any, *, recomputed: bool
    ) -> None:
        """An operation has run; ``recomputed``: it runs again, on the stand-ins."""
        if self._kept and is_mutable(func):
            for storage in storage_ids(written(func, args, kwargs)):
                for kept in self._kept.get(storage, ()):
                    kept.writer = f"{op_name(func)} in {module or 'the block'}"
        if not self._holders:
            return
        given = (*args, *kwargs.values()) if kwargs else args
        if torch.is_grad_enabled() and makes_node(func, given, out):
            self._nodes_of_ops.add(last_node())
        entries: set[Discarded] = set()
        for storage in storage_ids(given):
            if (holder := self._holders.get(storage)) is not None:
                entries |= holder[1]
        self._sources = entries
        if not entries:
            return
        name = op_name(func)
        if not passes_values(func, args, out):
            _blame(entries, f"{name} in {module or 'the block'}")
            return
        if name.startswith(_COLLECTIVE):
            self._sent.update(storage_ids((given, out)))
        if recomputed:
            self._follow(entries, out)

    def finish(self, modules_left: list[nn.Module], outputs: Any) -> list[Any]:
        """End of the forward: free what nothing reads.

        ``modules_left`` are the modules of the block that have returned, in order; ``outputs`` are
        its. Returns what is packed of operations that must run again.
        """
        has_backward = bool(_nodes_of(outputs))  # else there is none, or we cannot inspect outputs
        if self.discarded and has_backward:
            self._find_readers(modules_left, outputs)
        lost = [kept for kepts in self._kept.values() for kept in kepts if kept.writer]
        for kept in lost:
            if not _is_exchange(kept.location.op):
                _blame(kept.sources, f"{kept.location}, to which {kept.writer} writes,")
        # The last first: each passes its reader on to what it was made of.
        for entry in reversed(self.discarded):
            if entry.reader and not entry.is_exchange:
                _blame(entry.sources, entry.reader)
        again = [entry for entry in self.discarded if entry.finish(has_backward)]
        return again + [kept.packed for kept in lost if kept.runs_again()]

    def _find_readers(self, modules_left: list[nn.Module], outputs: Any) -> None:
        hooks = [user_hook(module) for module in modules_left]
        for entry in self.discarded:
            hooked = filter(None, hooks[entry.modules_left :])
            entry.reader = entry.reader or next(hooked, "")
        first = min(entry.node for entry in self.discarded)
        nodes = AutogradNodes(first, outputs, self._nodes_of_ops)
        for entry in self.discarded:
            entry.reader = entry.reader or nodes.reader(entry)
        self._blame_keepers(outputs)

    def _follow(self, entries: set[Discarded], values: Any) -> None:
        for part in parts_in(values):
            storage = part.untyped_storage()
            weak, known = self._holders.get(storage._cdata) or (StorageWeakRef(storage), set())
            self._holders[storage._cdata] = weak, known | entries

    def _blame_keepers(self, outputs: Any) -> None:
        if not self._kept_elsewhere(outputs):
            return
        gc.collect()  # garbage may still hold it; this runs before an error, or once
        # Ranks that see a thread's reference and ranks that do not would decide differently.
        give_up_at = time.monotonic() + _LETS_GO_S
        while (
            self._sent.intersection(self._kept_elsewhere(outputs)) and time.monotonic() < give_up_at
        ):
            time.sleep(1e-3)
        for entries in self._kept_elsewhere(outputs).values():
            _blame(entries, "code that keeps it after the forward (attribute, buffer, list)")

    def _kept_elsewhere(self, outputs: Any) -> dict[int, set[Discarded]]:
        expected: Counter[int] = Counter()
        parts = parts_in(outputs)
        tensors = [t for entry in self.discarded for t in entry.tensors()]
        # The base of a view holds the storage once more.
        tensors += parts + [part._base for part in parts if part._base is not None]
        for tensor in tensors:
            expected[tensor.untyped_storage()._cdata] += 1
        return {
            storage: entries
            for storage, (_, entries) in self._holders.items()
            if _references(storage) > expected[storage]
        }


def _is_exchange(op: str) -> bool:
    """True if an operation needs other ranks, which may decide differently."""
    return is_exchange(op) or op.startswith(_COLLECTIVE)


def _blame(entries: Iterable[Discarded], reader: str) -> None:
    for entry in entries:
        entry.reader = entry.reader or reader


def _stand_in(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that makes a tensor with the layout of ``x``, NaN at its start; it holds none.

    If our proof were wrong, a read would turn the gradients to NaN. To fill it all would take as
    long as the operation that was discarded, where that moves memory.
    """
    local, wrap = local_tensor(x), wrapping(x)
    size, stride, dtype, device = local.size(), local.stride(), local.dtype, local.device
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    numel = last + 1 if local.numel() else 0

    def make() -> torch.Tensor:
        flat = torch.empty(numel, dtype=dtype, device=device)
        flat[:_NANS].fill_(255 if dtype == torch.uint8 else torch.nan)  # 255 is NaN in e4m3
        return wrap(flat.as_strided(size, stride))

    return make


class AutogradNodes:
    """The autograd nodes since number ``first``.

    ``found`` are the nodes that lead to the block's outputs, and those directly before them, by
    number. ``of_ops`` are the numbers of other nodes, which belong to dispatched operations.
    ``readers`` are the numbers after ``first`` of nodes that may have saved anything, and why.
    """

    def __init__(self, first: int, outputs: Any, of_ops: set[int]) -> None:
        self.found: dict[int, Any] = {}
        last = last_node()
        waiting = _nodes_of(outputs)
        while waiting:
            node = waiting.pop()
            number = node._sequence_nr()
            # A node comes after those that it leads to; parameters' nodes have the largest number.
            if number in self.found or number > last:
                continue
            self.found[number] = node
            if number > first:
                waiting += [next_node for next_node, _ in node.next_functions if next_node]
        self.readers: dict[int, str] = {}
        for number in range(first + 1, last + 1):
            node = self.found.get(number)
            if node is not None:
                why = _custom_function(node, _HARMLESS_FUNCTIONS)
            else:
                why = "" if number in of_ops else _NOT_FOUND
            if why:
                self.readers[number] = why

    def reader(self, entry: Discarded) -> str:
        """A node that may have saved the values of ``entry``."""
        if entry.in_graph:
            if entry.node not in self.found:
                return "code outside the block's autograd graph"
            if _saves_its_output(type(self.found[entry.node])):
                return "the operation's own backward"
        else:
            before = max((number for number in self.found if number <= entry.node), default=-1)
            node = self.found.get(before)
            if not isinstance(node, BackwardCFunction):
                return "code that runs without autograd"
            if why := _custom_function(node, entry.known_functions):
                return why
        return next((why for number, why in self.readers.items() if number > entry.node), "")


@functools.cache
def _saves_its_output(kind: type) -> bool:
    """True if an operation's node, of type ``kind``, has saved what the operation returned."""
    return any(name.startswith(_SAVED_OUTPUTS) for name in dir(kind))


def last_node() -> int:
    """The number of autograd's newest node; inside a dispatched operation, that operation's."""
    # As torch/fx/proxy.py does. Python sees a node only if some output leads to it.
    return torch._C._autograd._get_sequence_nr() - 1


def _nodes_of(outputs: Any) -> list[Any]:
    return [x.grad_fn for x in tensors_in(outputs) if x.grad_fn is not None]


def _custom_function(node: Any, known: tuple[str, ...]) -> str:
    """The name of ``node`` if it is of a custom Function that is not defined in ``known``."""
    # One in C++ has no class in Python (CppNode, torch/csrc/autograd/custom_function.h).
    if "CppNode" in node.name():
        return f"{node.name()}, a custom autograd Function in C++"
    # Torch makes a class of nodes for each Function; this names the Function's own class.
    function = getattr(node, "_forward_cls", None)  # of Python's Functions
    if function is None or getattr(function, "is_stand_in", False):  # of a dry run, for a kernel
        return ""
    if f"{function.__module__}.{function.__qualname__}".startswith(known):
        return ""
    return f"{function.__name__}, a custom autograd Function"


def _references(storage: int) -> int:
    """Number of tensors that hold a storage, for one that Python has seen; 0 if it is gone."""
    # ``sys.getrefcount`` misses what C++ holds. CUDA graph trees count so, too
    # (torch/_inductor/cudagraph_trees.py).
    return torch._C._storage_Use_Count(storage) - _own_references()


@functools.cache
def _own_references() -> int:
    # What Python itself adds, seen on a storage that one tensor holds.
    x = torch.empty(1, device="cpu")
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) - 1
