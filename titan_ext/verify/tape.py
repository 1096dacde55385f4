# SPDX-License-Identifier: BSD-3-Clause
"""A pass of a CPU rank, recorded and replayed on the next batches, as a CUDA graph would.

A graph replays operations on addresses, and no Python. So this keeps each operation of forward and
backward with its tensors, and runs it again on the same storages: what a graph would do wrong, the
replay does wrong. Warm-up, capture and static inputs are those of Titan's
``torchtitan/distributed/cudagraph.py``.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch._C._distributed_c10d import FakeWork, Work
from torch._library.opaque_object import CustomClassBase
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.distributed.cudagraph import CUDAGraphInputSpec

from titan_ext.activation_checkpoint.op_effects import written
from titan_ext.base.issuer import issuer
from titan_ext.base.tensors import local_tensor, tensors_in
from titan_ext.verify.judge import Verdict, judge_equal, read_step, try_canary

_WARM_UP = 1  # passes before the one that is recorded, as Titan's _warmup_remaining
_AGAIN = 4  # is compared with that one: of three passes a step, the first of the second
_READS = ("tolist", "numpy", "cpu")
"""Methods that copy to the host; of a CPU's tensor they dispatch no operation."""
_aten = torch.ops.aten
_INDEXED = (_aten.index.Tensor, _aten._unsafe_index.Tensor)
_WRITTEN_AT = (_aten.index_put.default, _aten.index_put_.default, _aten._unsafe_index_put.default)
_WRITTEN_AT += (_aten._index_put_impl_.default,)
_DISPATCHERS = "; MinimalAsyncEP, and HybridEP with non_blocking_capacity_factor, read none"


class _Op(NamedTuple):
    """One operation of a pass."""

    function: Any
    args: Any
    kwargs: Any
    out: list[Any]
    writes: set[int]  # keys of storages
    where: str  # the line that issues it, and the module
    sizes: list[tuple[Any, int]]  # storages of its tensors, and how many bytes they had
    random: list[tuple[Any, Any]]  # generators of its own and their states: no graph advances them

    def replay(self) -> None:
        for storage, nbytes in self.sizes:
            if storage.nbytes() < nbytes:  # FSDP frees by resizing; a graph's pool keeps all
                storage.resize_(nbytes)
        for generator, state in self.random:
            generator.set_state(state)
        new = _leaves(_call(self.function, self.args, self.kwargs))
        for old, found in zip(self.out, new, strict=True):
            if isinstance(old, torch.Tensor) and _key(old) != _key(found) and old.numel():
                old.copy_(found)


class _Reads(TorchFunctionMode):
    """Dynamo traces it with what it compiles, and guards what it asks: so it asks nothing."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        to_host = name == "to" and any(str(x) == "cpu" for x in (*args[1:], *kwargs.values()))
        if name in _READS or to_host:
            self._note(name)
        return func(*args, **kwargs)


class PastCompilers(TorchDispatchMode):
    """A mode without which torch compiles, and in which it runs what that gave."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class Tape(PastCompilers):
    """Records what is computed inside of it, if it ``listens``.

    What is compiled in its modes is compiled again outside of them, so all passes run in a tape.
    """

    def __init__(
        self, parts: Sequence[nn.Module] = (), *, keeps: bool = False, listens: bool = True
    ) -> None:
        super().__init__()
        self._keeps, self.listens = keeps, listens
        self._names = {m: canonical_fqn(n) for part in parts for n, m in part.named_modules()}
        self.ops: list[_Op] = []  # with their tensors, if the tape keeps them
        self.calls: list[tuple[str, str]] = []
        """Names of all operations, with numbers that Python gave them, and their lines."""
        self.reads: dict[str, None] = {}
        """Where the host reads a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.listens:
            return func(*args, **kwargs)
        if any(kind not in (torch.Tensor, nn.Parameter, nn.Buffer) for kind in types):
            return NotImplemented  # DTensor and its like first become plain tensors
        given = tree_leaves((args, kwargs))
        random = [(x, x.get_state()) for x in given if isinstance(x, torch.Generator)]
        result = _call(func, args, kwargs)
        out, where = _leaves(result), self._where(sys._getframe(1))
        if _reads_values(func, given):
            self.note_read(str(func), where)
        numbers = [x for x in given if isinstance(x, bool | int | float)]
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor of something in Python
            numbers = args[0].flatten()[:9].tolist()
        self.calls.append((f"{func}{numbers}", where))
        changed = written(func, args, kwargs)
        made = {_key(x) for x in tensors_in(out)} - {_key(x) for x in tensors_in(given)}
        writes = made | {_key(x) for x in changed}
        # What writes nothing makes a view; a collective returns what it was given, too.
        if self._keeps and (writes or func.namespace not in ("aten", "prims", "profiler")):
            storages = [x.untyped_storage() for x in tensors_in([*given, *out])]
            sizes = [(storage, storage.nbytes()) for storage in storages]
            self.ops.append(_Op(func, args, kwargs, out, writes, where, sizes, random))
        if func.namespace != "c10d":
            return result
        # It has come: gloo would copy again, from a buffer of its own, when FSDP waits.
        done = Work.boxed(FakeWork())
        return (*result[:-1], done) if isinstance(result, tuple | list) else done

    def note_read(self, what: str, where: str = "") -> None:
        if not self.listens:
            return
        where = where or self._where(sys._getframe(2))
        said = f"{where}: the host reads a value ({what})"
        self.reads[said + (_DISPATCHERS if "Dispatcher" in where else "")] = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        with _Reads(self.note_read), self:
            return function(*args)

    def replay(self) -> None:
        # As the recorded operations were, below autograd: views and leaves are written in place.
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for op in self.ops:
                op.replay()

    def _where(self, frame: Any) -> str:
        module, site = issuer(frame, self._names, besides=__file__)
        line = ""
        if site is not None:
            path = Path(site.f_code.co_filename)
            line = f"{site.f_code.co_qualname} ({path.parent.name}/{path.name}:{site.f_lineno})"
        return " in ".join(filter(None, [line, module]))


def _leaves(result: Any) -> list[Any]:
    """What an operation returns; for the handle of a dispatcher's what that holds."""
    found = tree_leaves(result)
    return tree_leaves([x.value if isinstance(x, CustomClassBase) else x for x in found])  # type: ignore[attr-defined]


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation, and wait for it if it is a collective."""
    out = func(*args, **kwargs)
    for x in tree_leaves(out):
        if func.namespace == "_c10d_functional":
            torch.ops._c10d_functional.wait_tensor(x)
        elif func.namespace == "c10d" and hasattr(x, "wait"):
            x.wait()
    return out


def _reads_values(func: Any, given: Sequence[Any]) -> bool:
    """True if the host waits for a value of a tensor: to have it, or to know a size."""
    tensors = tensors_in(given)
    if func in _INDEXED or func in _WRITTEN_AT:
        # Masks become indices, of which the host asks the number; but torch writes one value by
        # masked_fill (TensorAdvancedIndexing.cpp).
        is_filled = func in _WRITTEN_AT and tensors[-1].numel() == 1
        indices = tensors[1:-1] if func in _WRITTEN_AT else tensors[1:]
        return not is_filled and any(x.dtype in (torch.bool, torch.uint8) for x in indices)
    if func is _aten.repeat_interleave.Tensor and any(type(x) is int for x in given):
        return False  # of ``output_size``, as TorchTitan's gpt_oss gives it
    sized = torch.Tag.dynamic_output_shape in func.tags
    return sized or torch.Tag.data_dependent_output in func.tags


@dataclass
class Replayed:
    """Titan's ``fwd_bwd_fn`` under CUDA graphs, for a rank without a GPU."""

    function: Callable[..., torch.Tensor]
    parts: Sequence[nn.Module]
    replays: bool
    """False runs each pass, and notes what Python does otherwise in a later one."""
    seen: dict[str, Any] = field(default_factory=lambda: {"passes": 0, "change": ""})
    _tape: Tape | None = None

    def __call__(self, inputs: Any, labels: Any, tokens: Any, extra: dict[str, Any]) -> Any:
        self.seen["passes"] += 1
        arguments = inputs, labels, tokens, extra
        if self.seen["passes"] <= _WARM_UP:
            self._spec = CUDAGraphInputSpec(extra)
            return Tape(listens=False).run(self.function, *arguments)
        flat = [inputs, labels, tokens, *self._spec.flatten(extra)]
        if self._tape is None:
            self._tape, self._inputs = Tape(self.parts, keeps=self.replays), flat
            self._loss = self._tape.run(self.function, *arguments)
            self.seen |= {"reads": list(self._tape.reads), "ops": len(self._tape.ops)}
            self.seen["writers"] = self._writers(self._tape)
        elif self.replays and not self._tape.reads:
            for old, new in zip(self._inputs, flat, strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)
            self._tape.replay()
        else:
            tape = Tape(self.parts, listens=self.seen["passes"] == _AGAIN)
            loss = tape.run(self.function, *arguments)
            if tape.listens:
                self.seen["change"] = _change(self._tape.calls, tape.calls)
            return loss
        return self._loss

    def _writers(self, tape: Tape) -> dict[str, tuple[int, str]]:
        """For each gradient and buffer the operation that writes it last, by its number."""
        found, last = {}, {key: i for i, op in enumerate(tape.ops) for key in op.writes}
        for part in self.parts if self.replays else ():
            tensors = [(name, param.grad) for name, param in part.named_parameters()]
            for name, tensor in (*tensors, *part.named_buffers()):
                if tensor is not None:
                    i = last.get(_key(local_tensor(tensor)), -1)
                    said = f"{tape.ops[i].function}, {tape.ops[i].where}" if i >= 0 else "nothing"
                    found[canonical_fqn(name)] = i, said
        return found


def _change(first: Sequence[tuple[str, str]], later: Sequence[tuple[str, str]]) -> str:
    """The first line at which Python computes otherwise in a later pass; "" if none does."""
    for (call, where), (other, there) in zip(first, later, strict=False):
        if (call, where) != (other, there):
            return f"{where}: {call}; in a later pass {there}: {other}"
    return "" if len(first) == len(later) else "one of two passes computes more at its end"


def judge_replay(folders: Sequence[Path], seen: Sequence[Mapping[str, Any]], steps: int) -> Verdict:
    """Hold a job whose passes are replayed against the same one in Python, bit for bit."""
    verdict, (graph, python) = Verdict(step=1), (each["graph"] for each in seen)
    found: dict[str, torch.Tensor] = {}
    if reads := graph["reads"]:
        verdict.note("host", *reads)
        return verdict
    for verdict.step in range(1, steps + 1):
        found, right = (read_step(folder, verdict.step) for folder in folders)
        judge_equal(verdict, found, right)
        loss, expected = (torch.tensor(each["loss"][verdict.step - 1]) for each in seen)
        verdict.judge("loss", f"of step {verdict.step}", loss, expected, 0.0)
        if not verdict.is_right:
            break
        try_canary(lambda verdict, x, right=right: judge_equal(verdict, x, right), found, 0)
    if counted := [rows for name, rows in found.items() if name.endswith(".rows")]:
        came, dropped, _ = torch.stack(counted).sum(0).tolist()
        said = f"{100 * dropped / came:.1f}% of the tokens that came, with the copy's routing"
        verdict.notes.append(f"{'dropped':10}{said}")
    off = {wrong.name for of_kind in verdict.wrong.values() for wrong in of_kind}
    known = [(*graph["writers"][name], name) for name in off & graph["writers"].keys()]
    for _, writer, name in sorted(known)[:1]:
        verdict.notes.append(f"{'first':10}{name}, which {writer} wrote last")
    if off and python["change"]:
        verdict.notes.append(f"{'Python':10}{python['change']}")
    more = graph["passes"] - _WARM_UP - 1
    verdict.notes.append(f"{'replayed':10}{graph['ops']:,} operations in {more} more passes")
    return verdict
