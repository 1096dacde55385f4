# SPDX-License-Identifier: BSD-3-Clause
"""Mode "no_recompute": what autograd saves in a block goes through the store.

Some of it is an fp32 copy of bf16 values. For example, Titan multiplies the routed experts' outputs
by their scores in fp32, and autograd saves the copy. As bf16 it takes half of the bytes, without
loss, unless somebody has changed it since. A kernel that writes to its address leaves no trace in
torch. So the Python stack has to say that no code of a user's has run in between::

    the running function          innermost module        have returned
    RoutedExperts.forward         moe.routed_experts      7
      wide = outputs.float()      a copy is noted, with these three
      wide * scores_in_fp32       autograd packs it: the same three, kept as bf16
      self.inner_experts(...)     a module runs, and 8 have returned
      wide + 1.0 * wide.exp()     autograd packs it: 8 and not 7, kept in fp32

A function counts only if it is Titan's or ours, and none between it and torch is another's. A
dispatch mode notes copies as they are made; it compares no values.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from titan_ext.activation_checkpoint.blocks import EagerBlock, refuse_inner_checkpoint, restore
from titan_ext.activation_checkpoint.op_effects import TO_COPY, looks_up
from titan_ext.activation_checkpoint.op_rules import ROOT, OpPolicy
from titan_ext.base.tensors import is_plain, local_tensor, plain_tensors, storage_ids, storages_of
from titan_ext.fp8.saved_tensors import StoredEntry

_KNOWN = ("titan_ext", "torchtitan")


# torch's base class takes the wrapper's name out of the names of parameters and of state dicts.
class NoRecomputeBlock(ActivationWrapper):
    """A block in mode "no_recompute".

    It lacks ``checkpoint_impl``, by which Titan recognises blocks that count their tokens twice.
    """

    def __init__(self, module: nn.Module, block: "NoRecompute") -> None:
        super().__init__(module)
        self._block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._block(self._checkpoint_wrapped_module, *args, **kwargs)


@dataclass(eq=False, kw_only=True)
class NoRecompute(EagerBlock):
    """Runs a block, or a part of one, and stores what autograd saves in it."""

    # Casts of weights, by storage, in one autocast context: it caches them over forwards.
    _casts: dict[int, StorageWeakRef] = field(default_factory=dict, init=False)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        entries: list[Any] = []
        self.locator.begin(with_operands=False, inside=self.inside)
        for storage in [key for key, ref in self._casts.items() if ref.expired()]:
            del self._casts[storage]
        values = _SavedValues(self, self._casts)
        group = self.host_group()

        def pack(x: torch.Tensor) -> Any:
            name = self.locator.module
            policy, reason = self.policies.module_policy(name)
            if not self._casts.keys().isdisjoint(storage_ids(x)):
                policy, reason = OpPolicy.SAVE, "cast weight"
            host = group if policy.on_host else None
            narrow = values.source_dtype(x)
            if narrow is not None:
                # In the dtype that it was copied from; it comes back bit for bit.
                kind, wide = f"exact: as {str(narrow).removeprefix('torch.')}", x.dtype
                values_in = (x.detach().to(narrow),)
                entry = StoredEntry.of(kind, values_in, lambda value: value.to(wide), host)
                entry.name, entry.original = name or ROOT, storages_of(x)
            else:
                entry = self.store.pack(x, name=name or ROOT, exact=reason or None, host=host)
            if not self.is_reported:
                entries.append(entry)
            return entry

        with values, torch.autograd.graph.saved_tensors_hooks(pack, restore):
            out = function(*args, **kwargs)
        if not self.is_reported:
            self.report(entries)
        return out


@dataclass(frozen=True)
class _Copy:
    """An fp32 copy as it was made; the weak reference stops torch from reusing its address."""

    storage: StorageWeakRef
    view: tuple[Any, ...]
    source_dtype: torch.dtype
    made_by: tuple[Any, ...]


class _SavedValues(TorchDispatchMode):
    """Active during a forward; knows copies of narrower tensors."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, as of torch's modes of checkpoints: under any other mode Dynamo compiles nothing.

        FlexAttention would then make all its scores.
        """
        return True

    def __init__(self, block: EagerBlock, casts: dict[int, StorageWeakRef]) -> None:
        super().__init__()
        self._locator, self._policies, self._store = block.locator, block.policies, block.store
        self._casts = casts
        self._copies: dict[int, _Copy] = {}

    def source_dtype(self, x: torch.Tensor) -> torch.dtype | None:
        """The narrower dtype of ``x`` if it surely is an unchanged copy.

        Only the hook that packs ``x`` may call this, directly.
        """
        if not is_plain(x) or x.dtype is not torch.float32 or x._version:
            return None
        copy = self._copies.get(x.untyped_storage()._cdata)
        if copy is None or copy.view != _view(x) or copy.made_by != self._who(sys._getframe(2)):
            return None
        return copy.source_dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._policies.keeps_choice(func, args, kwargs or {}, out):
            refuse_inner_checkpoint(0, str(func), self._policies.name)
        if looks_up(func, args, out) and self._store.float8_nbytes(local_tensor(args[0])):
            self._policies.check_looked_up(self._locator.locate(func, args))
        if func is TO_COPY and self._store.is_module_state(args[0]):
            refs = (StorageWeakRef(part.untyped_storage()) for part in plain_tensors(out))
            self._casts |= {ref.cdata: ref for ref in refs}
        if (
            func is TO_COPY
            and is_plain(out)
            and out.dtype is torch.float32
            and args[0].dtype in (torch.bfloat16, torch.float16)
            and (made_by := self._who(sys._getframe(1))) is not None
        ):
            storage = out.untyped_storage()
            weak = StorageWeakRef(storage)
            self._copies[storage._cdata] = _Copy(weak, _view(out), args[0].dtype, made_by)
        return out

    def _who(self, frame: FrameType | None) -> tuple[Any, ...] | None:
        """The running function and its position between modules; None if the code is not known."""
        code = _code(frame)
        return code and (code, self._locator.module, len(self._locator.left))


def _view(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset()


def _code(frame: FrameType | None) -> CodeType | None:
    """The innermost function outside torch from ``frame`` on, if it is Titan's or ours."""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package != "torch" and frame.f_code.co_name != "__torch_dispatch__":
            return frame.f_code if package in _KNOWN else None
        frame = frame.f_back
    return None
