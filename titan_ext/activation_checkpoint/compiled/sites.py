"""Which module an operation belongs to, and on which parameter it works, while it is traced.

The eager policy learns the module from hooks. Those would be traced too, so here it is read from
what the tracer knows: the modules that it is in, and the fake tensors that stand in for the block's
parameters.
"""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import traceback as fx_traceback
from torch.utils._pytree import tree_leaves

from titan_ext.activation_checkpoint.verdicts import Site
from titan_ext.fp8.local import plain_tensors

__all__ = ["TracedSites", "is_state"]

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


_STATE: weakref.WeakKeyDictionary[FakeTensorMode, set[int]] = weakref.WeakKeyDictionary()
"""By compilation: the storages that stand in for parameters and buffers."""


def is_state(value: FakeTensor) -> bool:
    """Whether ``value`` stands in for a parameter or buffer of a block that was traced.

    Whoever asks the compiler is told wrong (2.15): with DTensor parameters it mistakes the indices
    of the inputs that are always at the same address.
    """
    return value.untyped_storage()._cdata in _STATE.get(value.fake_mode, ())


class TracedSites:
    """Names the operations of a block, or of a part of one, while it is traced.

    Args:
        modules: What is traced, by name in the block; "" is the block itself.
        root: Which of them has the operations that are in no other module.
    """

    def __init__(self, modules: Mapping[str, nn.Module], root: str) -> None:
        self._root = root
        self._modules = {
            str(id(module)): _join(top, _public(name))
            for top, part in modules.items()
            for name, module in part.named_modules()
        }
        self._operands = {
            storage: _join(top, _public(name))
            for top, part in modules.items()
            for name, param in part.named_parameters()
            for storage in _stand_ins(param)
        }
        buffers = [s for part in modules.values() for b in part.buffers() for s in _stand_ins(b)]
        _STATE.setdefault(_fake_mode(), set()).update(self._operands, buffers)

    def site(self, func: Any, args: tuple[Any, ...], out: Any) -> Site:
        """The site of a call of ``func``."""
        operand = self._operand(args)
        if operand and func is torch.ops.aten._to_copy.default:
            # The parameter in another dtype is still the parameter.
            self._operands |= dict.fromkeys(_storages(out), operand)
        module = self._module()
        return Site(module, str(_packet(func)), operand.removeprefix(module).lstrip("."))

    def _module(self) -> str:
        # Dynamo writes the ids of the modules that it is in, from the outermost, on every node.
        stack = fx_traceback.get_current_meta().get("nn_module_stack", {})
        return next(
            (self._modules[key] for key in reversed(stack) if key in self._modules), self._root
        )

    def _operand(self, args: tuple[Any, ...]) -> str:
        found = (self._operands.get(storage) for storage in _storages(args))
        return next((name for name in found if name), "")


def _stand_ins(param: torch.Tensor) -> Iterator[int]:
    for part in plain_tensors(param):
        # The tracer has met the parameter before: this is the same fake tensor, not a new one.
        yield _fake_mode().from_tensor(part).untyped_storage()._cdata


def _fake_mode() -> FakeTensorMode:
    mode = detect_fake_mode()
    assert mode is not None, "a traced site is asked for outside of torch.compile"
    return mode


def _storages(values: Any) -> Iterator[int]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            for part in plain_tensors(leaf):
                if isinstance(part, FunctionalTensor):
                    part = torch._from_functional_tensor(part.elem)
                yield part.untyped_storage()._cdata


def _packet(func: Any) -> Any:
    return getattr(func, "overloadpacket", None) or getattr(func, "__name__", func)


def _public(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _join(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)
