# SPDX-License-Identifier: BSD-3-Clause
"""Names for the operations of one block while it runs."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torchtitan.components.checkpointer.utils import canonical_fqn

from titan_ext.activation_checkpoint.op_effects import op_name
from titan_ext.activation_checkpoint.op_rules import GEMMS, OpLocation
from titan_ext.base.tensors import is_plain, plain_tensors
from titan_ext.components.overlap import current_half
from titan_ext.fsdp.prefetch import hide_fsdp


class OpLocator:
    """Names the operations of one block while it runs, in forward and in recompute.

    A dispatch mode sees only ``aten.mm`` and two tensors. Hooks on the modules of the block tell
    the module, the storage of the operands tells the parameter.
    """

    def __init__(self, block: nn.Module) -> None:
        self.left: list[nn.Module] = []
        """The modules that have returned in this forward, in order."""
        self._block: nn.Module | None = block
        self._stacks = [""], [""]  # of the two halves of a batch, which pause inside of modules
        self._arguments: tuple[list[Any], list[Any]] = [()], [()]  # of these modules
        self._handles = []
        self._slots: list[tuple[dict[str, Any], str, str]] = []
        # By storage: parameters, and their copies in another dtype. A weak reference keeps no
        # bytes, but no later storage gets the address.
        self._with_operands = False
        self._names: dict[int, str] = {}
        self._storages: list[StorageWeakRef] = []
        for name, module in block.named_modules():
            # Rules name modules without the segments that torch's wrappers add.
            public = canonical_fqn(name)
            # The dictionary, not its tensors: FSDP puts other parameters into it before a forward.
            tensors = module._parameters
            slots = [(tensors, key, f"{public}.{key}".lstrip(".")) for key in tensors]
            self._slots += slots
            # The block itself has no hooks: the bottom of the stacks stands for it.
            if name:
                enter, leave = self._hooks(public, slots)
                self._handles += [
                    module.register_forward_pre_hook(enter),
                    # Also where a forward raises: what runs next would have this module's name.
                    module.register_forward_hook(leave, always_call=True),
                ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def module(self) -> str:
        """The innermost running module, named within the block; "" for the block itself."""
        return self._stacks[current_half()][-1]

    def begin(self, *, with_operands: bool, inside: str = "") -> None:
        """Start of a forward: of the block, or of a part that runs in its module ``inside``."""
        if self._block is not None:  # FSDP comes after checkpointing, and before the first forward
            hide_fsdp(self._block.modules())
            self._block = None
        self._stacks, self._arguments = ([inside], [inside]), ([()], [()])
        self.left.clear()
        self._names.clear()
        self._storages.clear()
        self._with_operands = with_operands
        self._name_parameters(self._slots)

    def locate(self, func: Any, args: tuple[Any, ...]) -> OpLocation:
        """The location of a call of ``func``; with a GEMM's operand if ``begin`` asked for it."""
        module, op = self.module, op_name(func)
        if not self._with_operands or op not in GEMMS:
            return OpLocation(module, op)
        names = (self._name_of(arg) for arg in args if isinstance(arg, torch.Tensor))
        operand = next(filter(None, names), "")
        return OpLocation(module, op, operand.removeprefix(module).lstrip("."))

    def given(self) -> list[torch.Tensor | None]:
        """This rank's part of each positional argument of the innermost running module."""
        parts = (
            x._local_tensor if isinstance(x, DTensor) else x
            for x in self._arguments[current_half()][-1]
        )
        return [x if isinstance(x, torch.Tensor) and is_plain(x) else None for x in parts]

    def see_cast(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """Note that ``out`` is ``source`` cast to another dtype: it gets its parameter name."""
        if self._with_operands and (name := self._name_of(source)):
            self._call(out, name)

    def _name_of(self, x: torch.Tensor) -> str:
        for part in plain_tensors(x):
            if name := self._names.get(part.untyped_storage()._cdata):
                return name
        return ""

    def _call(self, x: torch.Tensor | None, name: str) -> None:
        for part in plain_tensors(x) if x is not None else ():
            storage = part.untyped_storage()
            if storage._cdata not in self._names:
                self._names[storage._cdata] = name
                self._storages.append(StorageWeakRef(storage))

    def _name_parameters(self, slots: Iterable[tuple[dict[str, Any], str, str]]) -> None:
        for tensors, key, name in slots if self._with_operands else ():
            self._call(tensors.get(key), name)

    def _hooks(self, name: str, slots: list[tuple[dict[str, Any], str, str]]):
        def enter(module: nn.Module, args: Any) -> None:
            self._stacks[current_half()].append(name)
            self._arguments[current_half()].append(args)
            # FSDP may just have put other parameters in place.
            self._name_parameters(slots)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            # Else it encloses the part that has begun, or a hook before ``enter`` has raised.
            if len(self._stacks[current_half()]) > 1:
                self._stacks[current_half()].pop()
                self._arguments[current_half()].pop()
            self.left.append(module)

        return enter, leave
