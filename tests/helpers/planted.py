"""Faults for one rank of a short training run whose collectives are recorded."""

import contextlib
import os
import signal
import sys
import unittest.mock
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.tools.logging import init_logger

from tests.helpers.training import Run, make_config
from titan_ext.components.dispatch import FunctionalAllToAllTokenDispatcher
from titan_ext.debug.watchdog import CollectiveWatchdog
from titan_ext.fsdp import auto, resolve

RUN = Run(parallelize="submodule", world=2, ep=2, layers=2, narrow=True, steps=3, ac="none")
PLANTED_STEP = 2
TIMEOUT_S = 6


def train_watched(run: Run, folder: Path, fault: str) -> None:
    """One rank of a watched run; rank 1 has the fault."""
    init_logger()
    config: Any = make_config(run, folder)
    config.debug.record_collectives = fault != "off"
    # gloo does not notice it by itself.
    config.comm.train_timeout_seconds = TIMEOUT_S if fault == "stopped" else 200
    is_faulty = os.environ["RANK"] == "1"
    with contextlib.ExitStack() as stack:
        if is_faulty and fault == "other units":
            stack.enter_context(_whole_blocks())
        trainer = config.build()
        if fault in _FAULTS and (is_faulty or fault == "other site"):
            stack.enter_context(_from_step(trainer, _FAULTS[fault]))
        trainer.train()
    trainer.close()


@contextlib.contextmanager
def reads(found: Counter[str]) -> Iterator[None]:
    """Counts reads of tensors' values, in forward and backward, by the function that reads.

    At each of them a GPU's host would wait, and a CUDA graph could not be captured.
    """
    with contextlib.ExitStack() as stack:
        for name in ("tolist", "numpy", "cpu"):  # which no dispatch mode sees on a CPU
            counted = _counted(getattr(torch.Tensor, name), found)
            stack.enter_context(unittest.mock.patch.object(torch.Tensor, name, counted))
        stack.enter_context(_Reads(found))
        yield


_READ = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2")
_TORCH = os.path.dirname(torch.__file__) + os.sep


class _Reads(TorchDispatchMode):
    """item(), bool(), if and shapes that depend on values."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._opname
        by_mask = name.startswith("index") and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in tree_leaves(args[1:])
        )
        repeats = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in _READ or repeats or by_mask:
            self.found[_caller()] += 1
        return func(*args, **kwargs)


def _counted(read: Any, found: Counter[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        found[_caller()] += 1
        return read(*args, **kwargs)

    return call


def _caller() -> str:
    """The innermost function outside of torch and this file."""
    frame = sys._getframe(2)
    while (code := frame.f_code).co_filename.startswith(_TORCH) or code.co_filename == __file__:
        assert frame.f_back is not None
        frame = frame.f_back
    return code.co_qualname


def _whole_blocks():
    """What no key says, so that no comparison of configs can find it."""
    whole = auto.Choice("block")
    return unittest.mock.patch.object(resolve, "choose", return_value=whole)


@contextlib.contextmanager
def _from_step(trainer, fault):
    step = trainer.train_step

    def faulty_step(data_iterator) -> None:
        with fault() if trainer.step == PLANTED_STEP else contextlib.nullcontext():
            step(data_iterator)

    trainer.train_step = faulty_step
    yield


def _exchanges(which, function):
    return unittest.mock.patch.object(
        FunctionalAllToAllTokenDispatcher, f"{which}_token_exchange", function
    )


def _stop_in_the_step():
    dispatch = FunctionalAllToAllTokenDispatcher._dispatch_token_exchange

    def stopping(self, *args):
        os.kill(os.getpid(), signal.SIGSTOP)
        return dispatch(self, *args)

    return _exchanges("_dispatch", stopping)


def _all_reduce_elsewhere(*args, **kwargs):
    return dist.all_reduce(*args, **kwargs)


def _other_site():
    """The same collective by another function: no backend minds."""

    def reduce(self, device):
        _all_reduce_elsewhere(torch.zeros((), device=device))
        return compare(self, device)

    def extra(self, device):
        dist.all_reduce(torch.zeros((), device=device))
        return compare(self, device)

    compare = CollectiveWatchdog.compare
    is_faulty = os.environ["RANK"] == "1"
    return unittest.mock.patch.object(CollectiveWatchdog, "compare", reduce if is_faulty else extra)


def nan_gradient():
    combine = FunctionalAllToAllTokenDispatcher._combine_token_exchange

    def poisoned(self, routed_output_RD, *args):
        routed_output_RD.register_hook(lambda gradient: gradient * float("nan"))
        return combine(self, routed_output_RD, *args)

    return _exchanges("_combine", poisoned)


_FAULTS = {
    "stopped": _stop_in_the_step,
    "other site": _other_site,
}
