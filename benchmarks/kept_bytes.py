"""What is alive between forward and backward, whoever holds it: every storage, by its class.

Asking the holders (autograd, the cache of selective checkpointing, the store of float8 tensors)
would miss the one not asked, and asking autograd unpacks. So every storage that an operation makes
is followed by a weak reference, and what is alive after the forward is what is kept. Its class is
its dtype, the operation that made it and the module that ran it. Parameters, buffers and whatever
else existed before do not count.
"""

import gc
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_ext.base.tensors import plain_tensors

__all__ = ["KeptBytes", "KeptClass", "kept_total"]

_WRAPPER = "_checkpoint_wrapped_module"


@dataclass(frozen=True)
class KeptClass:
    """Storages of one class: ``nbytes`` together, ``tensors`` of them."""

    dtype: str
    op: str
    module: str
    tensors: int
    nbytes: int

    @property
    def name(self) -> str:
        return f"{self.module or '(block)'}: {self.op} {self.dtype}"


def kept_total(classes: Iterable[KeptClass]) -> int:
    return sum(c.nbytes for c in classes)


@dataclass(frozen=True)
class _Origin:
    reference: StorageWeakRef
    dtype: str
    op: str
    module: str


class KeptBytes(TorchDispatchMode):
    """Follows the storages that are made while it is active.

    Args:
        model: Its modules name the classes; its parameters and buffers are not counted.
        root: The module whose name is left out of theirs ("layers.0").
    """

    def __init__(self, model: nn.Module, root: str = "") -> None:
        super().__init__()
        self._names = {
            module: ".".join(
                part for part in name.removeprefix(root).split(".") if part not in ("", _WRAPPER)
            )
            for name, module in model.named_modules()
        }
        self._model = model
        self._origins: dict[int, _Origin] = {}
        self._modules: list[str] = []
        self._hooks = []

    def __enter__(self):
        # What exists now does not count.
        self._before = {ref.cdata: ref for x in _live_tensors() for ref in _references(x)}

        def enter(module: nn.Module, _args: Any) -> None:
            self._enter_module(module)

        def leave(module: nn.Module, _args: Any, _out: Any) -> None:
            self._leave_module(module)

        # They read no values; a hook of a user's would keep outputs from being discarded.
        enter.__module__ = leave.__module__ = "titan_ext.benchmarks"
        self._hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, exc_type, exc_val, exc_tb):
        for hook in self._hooks:
            hook.remove()
        return super().__exit__(exc_type, exc_val, exc_tb)

    def _enter_module(self, module: nn.Module) -> None:
        if module in self._names:
            self._modules.append(self._names[module])

    def _leave_module(self, module: nn.Module) -> None:
        if module in self._names:
            self._modules.pop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._follow(x, func._schema.name.split("::")[-1])
        return out

    def _follow(self, x: torch.Tensor, op: str) -> None:
        module = self._modules[-1] if self._modules else ""
        for part in plain_tensors(x):
            for ref in _references(part):
                known = self._origins.get(ref.cdata)
                if ref.cdata not in self._before and (known is None or known.reference.expired()):
                    dtype = str(part.dtype).removeprefix("torch.")
                    self._origins[ref.cdata] = _Origin(ref, dtype, op, module)

    def classes(self) -> list[KeptClass]:
        """What is alive now, largest first. Call it when only autograd still needs it."""
        gc.collect()
        state = {
            ref.cdata
            for x in (*self._model.parameters(), *self._model.buffers())
            for ref in _references(x)
        }
        found: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        seen = set(self._before) | state
        for cdata, origin in self._origins.items():
            if cdata in state or origin.reference.expired():
                continue
            seen.add(cdata)
            nbytes = torch.UntypedStorage._new_with_weak_ptr(cdata).nbytes()
            if nbytes:  # 0: FSDP freed it
                found[origin.dtype, origin.op, origin.module].append(nbytes)
        for x in _live_tensors():  # made where no dispatch mode looks: a compiled function
            for ref in _references(x):
                if ref.cdata not in seen and (nbytes := x.untyped_storage().nbytes()):
                    seen.add(ref.cdata)
                    found[str(x.dtype).removeprefix("torch."), "(unseen)", ""].append(nbytes)
        rows = [KeptClass(*key, len(sizes), sum(sizes)) for key, sizes in found.items()]
        return sorted(rows, key=lambda row: (-row.nbytes, row.name))


def _live_tensors() -> list[torch.Tensor]:
    # By type(): isinstance() asks the object, and a weak proxy of something dead raises.
    return [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]


def _references(x: torch.Tensor) -> list[StorageWeakRef]:
    if x.layout != torch.strided or x.device.type == "meta":
        return []
    return [
        StorageWeakRef(part.untyped_storage())
        for part in plain_tensors(x)
        if not torch._C._functorch.is_functorch_wrapped_tensor(part)
    ]
