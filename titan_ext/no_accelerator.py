"""Titan's trainer on a machine with no accelerator: CPU tensors, gloo collectives.

TorchTitan 0.3 takes "cuda" for granted where torch sees no accelerator. This file is the one place
that says otherwise, and the only one in titan_ext that patches anything. Where an accelerator
exists ``enable`` returns at once and nothing here takes effect.

Every patch rebinds a name in a torchtitan module; torch is left alone:

======================================================  ==========================================
patched name                                            why
======================================================  ==========================================
``torchtitan.tools.utils.device_type``                  falls back to "cuda" without an accelerator
``torchtitan.tools.utils.device_module``                is then ``torch.cuda``, which raises; and
                                                        ``torch.cpu`` lacks the memory statistics
                                                        and returns a string as current device
the same two names in ``components.metrics``,           copied them at import, so that the patch
``distributed.utils``, ``distributed.parallel_dims``,   above does not reach them
``models.common.token_dispatcher``, ``tools.profiler``
``torchtitan.tools.utils.get_peak_flops``               takes an unknown device for an A100, and so
                                                        would invent the MFU
``torchtitan.distributed.utils.init_distributed``       with CPU offload it asks for gloo twice
======================================================  ==========================================

Four more differences need no patch. DTensor's random numbers know of no CPU: every rank would draw
the same values for its shard, so that expert-parallel ranks would start with the same experts; a
dispatch mode around the initialisation draws whole tensors and keeps the shard
(``layout_independent_init``). FlexAttention has no CPU backward, so the model config gets
Titan's ``ScaledDotProductAttention``; CUDA graphs are switched off in the config; and gloo has no
PREMUL_SUM, so FSDP is told to use SUM (``reduce_without_premul_sum``). gloo's missing uneven list
all-to-all is dealt with in ``titan_ext.dispatch``.
"""

import contextlib
import functools
import importlib
import os
import platform
import re
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
from torch._utils import _get_available_device_type
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.config import CommConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils as titan_utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_ext.cpu_attention import CausalAttention

__all__ = [
    "CPUDeviceModule",
    "adapt_config",
    "adapt_spec",
    "enable",
    "layout_independent_init",
    "needed",
    "reduce_without_premul_sum",
]

_HOLDERS_OF_A_COPY = (
    "torchtitan.components.metrics",
    "torchtitan.distributed.utils",
    "torchtitan.distributed.parallel_dims",
    "torchtitan.models.common.token_dispatcher",
    "torchtitan.tools.profiler",
)


def needed() -> bool:
    """Whether this machine has no accelerator, by the test that Titan itself uses."""
    return _get_available_device_type() is None


def enable() -> bool:
    """Let Titan run on this machine's CPU if it has no accelerator; safe to repeat.

    Returns:
        Whether there is no accelerator.
    """
    if not needed():
        return False
    if titan_utils.device_type == "cpu":
        return True
    device_module = CPUDeviceModule()
    titan_utils.get_peak_flops = _unknown_peak_flops
    dist_utils.init_distributed = _with_one_backend(dist_utils.init_distributed)
    for name in (titan_utils.__name__, *_HOLDERS_OF_A_COPY):
        module = importlib.import_module(name)
        for attribute, value in (("device_type", "cpu"), ("device_module", device_module)):
            if hasattr(module, attribute):
                setattr(module, attribute, value)
    logger.info(
        "No accelerator: training on CPU with gloo. The memory figures are the resident set size "
        "(RSS) of this process, in % of the machine's memory; MFU is left out."
    )
    return True


def adapt_config(config: Trainer.Config) -> None:
    """Change what a config asks for and a CPU cannot do, in place, saying each change once.

    FlexAttention and varlen attention become ScaledDotProductAttention (CausalAttention where a
    model needs more), which is causal over the packed documents of a sequence: it attends across
    their borders. CUDA graphs are switched off. Nothing changes where an accelerator exists, and
    nothing the second time.
    """
    if not needed():
        return
    if not config.training.disable_cuda_graphs:
        config.training.disable_cuda_graphs = True
        logger.info("No accelerator: CUDA graphs are off.")
    if config.model_spec is not None:
        adapt_spec(config.model_spec)


def adapt_spec(spec: ModelSpec) -> None:
    """The part of ``adapt_config`` that is about the model: attention that a CPU can train."""
    if not needed():
        return
    for kind in (FlexAttention, VarlenAttention):
        found = list(spec.traverse(kind.Config))
        for _, _, attention, key in found:
            setattr(attention, str(key), _cpu_attention(attention))
        if found:
            name = type(_cpu_attention(found[0][2])).__qualname__.split(".")[0]
            logger.info(
                f"No accelerator: {kind.__name__} has no CPU backward; {name} runs instead, "
                "causal over packed documents."
            )


def _cpu_attention(attention: Any) -> ScaledDotProductAttention.Config:
    """What replaces the inner attention of an attention config."""
    if hasattr(attention, "sliding_window_size"):  # gpt_oss (its sinks need the lse), muse_glimmer
        return CausalAttention.Config(window=attention.sliding_window_size)
    return ScaledDotProductAttention.Config()


def layout_independent_init() -> contextlib.AbstractContextManager[Any]:
    """A context in which sharded CPU parameters are initialised as an unsharded model's would be.

    The values depend on the seed and on nothing else: not on the number of ranks, nor on how they
    are arranged. A null context where an accelerator exists: DTensor does the same there.
    """
    return _FullTensorRandom() if needed() else contextlib.nullcontext()


class _FullTensorRandom(TorchDispatchMode):
    """Draws random numbers for the whole of a DTensor on every rank, and keeps the local shard."""

    _IN_PLACE_RANDOM = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = args[0] if args else None
        if func not in self._IN_PLACE_RANDOM or not isinstance(target, DTensor):
            return func(*args, **kwargs)
        full = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        func(full, *args[1:], **kwargs)
        # Every rank drew the same: nothing is sent (src_data_rank=None).
        shard = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(shard.to_local())
        return target


def reduce_without_premul_sum(model: nn.Module) -> None:
    """Make every FSDP module of ``model`` reduce gradients with SUM.

    A gradient divide factor, which Titan sets to 1.0 on every module, makes FSDP2 use PREMUL_SUM;
    gloo has no such reduction. Multiplying by 1.0 first changes nothing.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def _with_one_backend(init_distributed: Callable[..., int]) -> Callable[..., int]:
    """CPU offload adds gloo for host tensors; without an accelerator it is the backend already."""

    @functools.wraps(init_distributed)
    def init(comm_config: CommConfig, enable_cpu_backend: bool = False, **kwargs: Any) -> int:
        return init_distributed(comm_config, enable_cpu_backend=False, **kwargs)

    return init


def _unknown_peak_flops(device_name: str) -> float:
    return float("nan")


class CPUDeviceModule:
    """What Titan asks of ``torch.cuda``, answered for this process on a CPU.

    Memory is the peak resident set size of the process, in bytes: the only figure here that
    includes everything. Anything else that Titan asks for raises with the name of it.
    """

    def device_count(self) -> int:
        return 1

    def set_device(self, device: torch.device | int | str) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def synchronize(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_name(self, device: Any = None) -> str:
        return f"{platform.machine()} CPU (no accelerator; memory is process RSS)"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return SimpleNamespace(name=self.get_device_name(), total_memory=total_bytes)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        peak = _peak_rss_bytes()
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        _reset_peak_rss()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"this machine has no accelerator: titan_ext.no_accelerator has no {name!r} for Titan"
        )


def _peak_rss_bytes() -> int:
    # VmHWM can be reset, ru_maxrss cannot; the former is Linux only.
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    if match := re.search(r"VmHWM:\s+(\d+) kB", status):
        return int(match[1]) * 1024
    scale = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _reset_peak_rss() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the figure is then the peak since the process started
