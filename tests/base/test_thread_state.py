"""What a thread is in: left for other contexts, and found again."""

import contextlib
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.distributed.spmd_types import current_spmd_mesh, set_current_spmd_mesh

from titan_ext.base.thread_state import ThreadState


class _Functions(TorchFunctionMode):
    seen = 0

    def __torch_function__(self, func, types, args: Any = (), kwargs=None):
        _Functions.seen += 1
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func, types, args: Any = (), kwargs=None):
        _Operations.seen += 1
        return func(*args, **(kwargs or {}))


def _pack(x: torch.Tensor) -> list[torch.Tensor]:
    return [x]


def _in(mesh: DeviceMesh) -> list[contextlib.AbstractContextManager[Any]]:
    hooks = torch.autograd.graph.saved_tensors_hooks(_pack, lambda kept: kept[0])
    modes = [_Functions(), _Operations(), _Operations(), torch.autocast("cpu"), torch.no_grad()]
    return [*modes, hooks, set_current_spmd_mesh(mesh)]


def _runs_in() -> tuple[bool, ...]:
    """Whether each context is in force here."""
    functions, operations = _Functions.seen, _Operations.seen
    x = torch.ones(2, 2, requires_grad=True)
    out = x @ x
    saved = out.grad_fn is not None and getattr(out.grad_fn, "_raw_saved_self", None)
    return (
        _Functions.seen > functions,
        _Operations.seen > operations,
        out.dtype is torch.bfloat16,
        not torch.is_grad_enabled(),
        bool(saved) and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        current_spmd_mesh() is not None,
    )


def test_contexts_are_left_and_found_again(one_rank: None):
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("ep",))
    outside = ThreadState.read()
    hooks_alone = (False, False, False, False, True, False)
    with contextlib.ExitStack() as stack:
        for context in _in(mesh):
            stack.enter_context(context)
        inside, runs_in = ThreadState.read(), _runs_in()
        assert runs_in == (True, True, True, True, False, True)  # without grad nothing is saved
        outside.write()
        assert ThreadState.read() == outside != inside
        assert _runs_in() == (False,) * 6
        with torch.autograd.graph.saved_tensors_hooks(_pack, lambda kept: kept[0]):
            assert _runs_in() == hooks_alone
        inside.write()
        assert ThreadState.read() == inside
        assert _runs_in() == runs_in
    assert ThreadState.read() == outside


def test_contexts_of_one_depth_are_exchanged():
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(_pack, lambda kept: kept[0]):
        first = ThreadState.read()
    with hooks(_pack, lambda kept: kept[-1]):
        second = ThreadState.read()
        first.write()
        assert ThreadState.read() == first != second
        second.write()
        assert ThreadState.read() == second
