# SPDX-License-Identifier: BSD-3-Clause
"""State that torch and Titan keep for a thread: the contexts that it is in.

A function that pauses inside of a context takes it along, and finds it again. Nothing public of
torch reads or writes these stacks: ``tests/project/test_contracts.py`` names what is used here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from spmd_types._state import _tls as _spmd_thread
from torch import overrides
from torch._C import _autograd
from torch.utils import _python_dispatch
from torchtitan.distributed.spmd_types import _spmd_mesh_stack
from torchtitan.tools import utils


def _saved_tensors_hooks() -> list[Any]:
    """All pairs; torch shows the innermost alone."""
    hooks: list[Any] = []
    while (top := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    for pair in reversed(hooks):
        _autograd._push_saved_tensors_default_hooks(*pair)
    return hooks[::-1]


_STACKS: tuple[tuple[Callable[[], list[Any]], Callable[[Any], Any], Callable[[], Any]], ...] = (
    (overrides._get_current_function_mode_stack, overrides._push_mode, overrides._pop_mode),
    (
        _python_dispatch._get_current_dispatch_mode_stack,
        _python_dispatch._push_mode,
        _python_dispatch._pop_mode,
    ),
    (
        _saved_tensors_hooks,
        lambda pair: _autograd._push_saved_tensors_default_hooks(*pair),
        _autograd._pop_saved_tensors_default_hooks,
    ),
)
"""Functions that read, push and pop: modes of ``torch.overrides``, dispatch modes, hooks that pack
and unpack what autograd saves."""


class ThreadState(NamedTuple):
    """The contexts of this thread, the innermost last."""

    grad: bool
    """Whether autograd records."""
    autocast: list[Any]
    """Of the CPU and the accelerator, and whether casts are kept."""
    stream: torch.Stream | None
    """The accelerator's current one; None without an accelerator."""
    stacks: list[list[Any]]
    """One for each of ``_STACKS``."""
    meshes: list[Any]
    typed_meshes: list[Any]
    """Titan's and spmd_types'."""

    @classmethod
    def read(cls) -> "ThreadState":
        autocast: list[Any] = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", utils.device_type)
        ]
        return cls(
            torch.is_grad_enabled(),
            [*autocast, torch.is_autocast_cache_enabled()],
            torch.accelerator.current_stream() if torch.accelerator.is_available() else None,
            [read() for read, _, _ in _STACKS],
            list(_spmd_mesh_stack()),
            list(getattr(_spmd_thread, "mesh_stack", ())),
        )

    def write(self) -> None:
        """Put the thread into these contexts, and out of others."""
        now = ThreadState.read()
        if now == self:
            return
        torch.set_grad_enabled(self.grad)
        *autocast, keeps_casts = self.autocast
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(keeps_casts)
        if self.stream is not None:
            torch.accelerator.set_stream(self.stream)
        for then, stack, (_, push, pop) in zip(self.stacks, now.stacks, _STACKS, strict=True):
            same = 0  # what they begin with in common stays
            while same < min(len(then), len(stack)) and then[same] == stack[same]:
                same += 1
            for _ in stack[same:]:
                pop()
            for item in then[same:]:
                push(item)
        # In place: these are the lists that Titan and spmd_types read, one for each thread.
        _spmd_mesh_stack()[:] = self.meshes
        _spmd_thread.__dict__.setdefault("mesh_stack", [])[:] = self.typed_meshes
