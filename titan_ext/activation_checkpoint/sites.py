"""Which module is running, and which parameter an operation works on, seen from below autograd.

A dispatch mode sees ``aten.mm`` and two tensors. The module is known from forward hooks on the
modules of the block, the parameter from the storage of the operands.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from titan_ext.activation_checkpoint.verdicts import Site
from titan_ext.fp8.local import plain_tensors

__all__ = ["BlockSites", "op_name", "storage_ids"]


class BlockSites:
    """Names the operations of one block while it runs, in forward and in recompute.

    Args:
        block: Its modules get a hook before and one after their forward.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._stack = [""]
        self._handles = []
        for name, module in block.named_modules():
            if name:
                enter, leave = self._hooks(_public(name))
                self._handles += [
                    module.register_forward_pre_hook(enter),
                    module.register_forward_hook(leave, always_call=True),
                ]
        self._casts: dict[int, str] = {}
        self._cast_storages: list[StorageWeakRef] = []

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for handle in self._handles:
            handle.remove()

    @property
    def module(self) -> str:
        """The innermost module that runs, named within the block; "" for the block itself."""
        return self._stack[-1]

    def begin(self) -> None:
        """Start of a forward."""
        self._casts.clear()
        self._cast_storages.clear()

    def site(self, func: Any, args: tuple[Any, ...], *, with_operand: bool) -> Site:
        """The site of a call of ``func``; the operand is looked up only if it is asked for."""
        operand = self._operand(args) if with_operand else ""
        return Site(self.module, op_name(func), operand.removeprefix(self.module).lstrip("."))

    def see_cast(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Note that ``out`` is a parameter in another dtype, if it is."""
        if func is torch.ops.aten._to_copy.default and (name := self._operand(args)):
            for part in plain_tensors(out):
                storage = part.untyped_storage()
                self._casts[storage._cdata] = name
                # A weak reference keeps no bytes, but no later storage gets this one's id.
                self._cast_storages.append(StorageWeakRef(storage))

    def _operand(self, args: tuple[Any, ...]) -> str:
        # Looked up anew: FSDP puts other parameters in place before each forward.
        names = {
            part.untyped_storage()._cdata: _public(name)
            for name, param in self._block.named_parameters()
            for part in plain_tensors(param)
        }
        for storage in storage_ids(args):
            if name := names.get(storage) or self._casts.get(storage):
                return name
        return ""

    def _hooks(self, name: str):
        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(name)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._stack.pop()

        return enter, leave


def op_name(func: Any) -> str:
    """``aten.mm`` for ``aten.mm.default``; higher-order operators have a name only."""
    packet = getattr(func, "overloadpacket", None)
    return str(packet) if packet is not None else str(getattr(func, "__name__", func))


def storage_ids(values: Any) -> Iterable[int]:
    """The storages behind the tensors in a nest of arguments or results."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            for part in plain_tensors(leaf):
                yield part.untyped_storage()._cdata


def _public(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
