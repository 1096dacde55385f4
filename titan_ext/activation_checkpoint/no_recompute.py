# SPDX-License-Identifier: BSD-3-Clause
"""Mode "no_recompute": ``SavedTensorStore`` keeps what autograd saves in a block.

Some fp32 tensors are copies of bf16 values, and we keep them as bf16, without loss. For example,
Titan multiplies the routed experts' outputs by their scores in fp32, and autograd saves the fp32
copy. A dispatch mode notes such copies during the forward; it compares no values.

A copy may have changed unnoticed: a kernel that writes to its address leaves no trace. So we trust
a copy only if one function of Titan's or ours makes it and has it saved, with no other module in
between. Then no user code has run on it. All other copies stay in fp32.
"""

import sys
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from titan_ext.activation_checkpoint.blocks import (
    EagerBlock,
    restore,
)
from titan_ext.activation_checkpoint.locator import OpLocator
from titan_ext.activation_checkpoint.op_rules import ROOT
from titan_ext.base.tensors import is_plain, storages_of
from titan_ext.fp8.offload import HostGroup
from titan_ext.fp8.saved_tensors import StoredEntry

_KNOWN = ("titan_ext", "torchtitan")


class NoRecomputeBlock(ActivationWrapper):
    """A block that recomputes nothing.

    It lacks ``checkpoint_impl``, by which Titan recognises blocks that count their tokens twice.
    """

    def __init__(self, block: nn.Module, hooks: "NoRecompute") -> None:
        super().__init__(block)
        self._hooks = hooks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._hooks(self._checkpoint_wrapped_module, *args, **kwargs)


@dataclass(eq=False, kw_only=True)
class NoRecompute(EagerBlock):
    """Calls a block; what autograd saves in it goes through the store."""

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return module(*args, **kwargs)
        entries: list[Any] = []
        self.locator.begin(with_operands=False)
        values = _SavedValues(self.locator)
        group = self.host_group()

        def pack(x: torch.Tensor) -> Any:
            name = self.locator.module
            policy, reason = self.policies.module_policy(name)
            host = group if policy.on_host else None
            narrow = values.source_dtype(x)
            if narrow is not None:
                entry: Any = _narrowed(x, narrow, name or ROOT, host)
            else:
                entry = self.store.pack(x, name=name or ROOT, exact=reason or None, host=host)
            if not self.is_reported:
                entries.append(entry)
            return entry

        with values, torch.autograd.graph.saved_tensors_hooks(pack, restore):
            out = module(*args, **kwargs)
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

    def __init__(self, locator: OpLocator) -> None:
        super().__init__()
        self._locator = locator
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
        if (
            func is torch.ops.aten._to_copy.default
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


def _narrowed(
    x: torch.Tensor, dtype: torch.dtype, name: str, host: HostGroup | None
) -> StoredEntry:
    """``x`` in fp32, kept in the dtype that it was copied from; it comes back bit for bit."""
    treatment, wide = f"exact: as {str(dtype).removeprefix('torch.')}", x.dtype
    entry = StoredEntry.of(treatment, (x.detach().to(dtype),), lambda value: value.to(wide), host)
    entry.name, entry.original = name, storages_of(x)
    return entry


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
