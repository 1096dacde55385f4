# SPDX-License-Identifier: BSD-3-Clause
"""Titan's trainer on a machine with no accelerator: CPU tensors, gloo collectives.

TorchTitan 0.3 takes "cuda" for granted where torch sees no accelerator. ``enable`` rebinds names in
torchtitan's modules. Of torch it overrides four kernels by ``torch.library``, on CPUs that multiply
bfloat16 slowly. Where an accelerator exists nothing here takes effect.

=================================================  ===============================================
rebound name                                       why
=================================================  ===============================================
``torchtitan.tools.utils.device_type``             is "cuda" without an accelerator
``torchtitan.tools.utils.device_module``           is then ``torch.cuda``, which raises; and
                                                   ``torch.cpu`` has no memory statistics
the same two in the modules ``_HOLDERS_OF_A_COPY`` copied them at import
``torchtitan.tools.utils.get_peak_flops``          takes a CPU for an A100, and invents the MFU
``torchtitan.distributed.utils.init_distributed``  asks for gloo twice with CPU offload
``has_cuda_capability``, ``has_rocm_capability``   ask this machine where the job of a dry run has
of ``tools.utils`` and ``_ASK_THE_DEVICE``         another (``as_with_an_accelerator``, meanwhile)
``aten::mm``, ``bmm``, ``addmm``, ``baddbmm``      take 100 times as long without AVX-512 (bf16)
``_compiled_create_block_mask`` of Titan, torch    takes seconds to compile on a CPU
                                                   (``eager_masks``, meanwhile)
``torch.distributed.all_to_all``                   gloo has none of uneven lists, as stock Titan
                                                   sends tokens (``list_all_to_all``, meanwhile)
=================================================  ===============================================

No other module of titan_ext rebinds a name of torch's or Titan's. Elsewhere titan_ext sets only
attributes of single objects. ``fsdp`` gives FSDP parameter groups collectives and a copy-out of
ours. ``run.stop`` sets the checkpointer's interval, and ``dry_run`` tells pipeline stages their
shapes.

Other differences need no patch:

- DTensor's random numbers do not support CPUs: every rank would draw the same values for its shard.
    Expert-parallel ranks would start with the same experts. ``layout_independent_init`` fixes that.
- FlexAttention has no CPU backward: the model config gets ``ScaledDotProductAttention`` instead, or
    ``PlainFlexAttention`` where masks must stay.
- CUDA graphs are switched off in the config.
- gloo has no PREMUL_SUM: FSDP is told to use SUM (``reduce_without_premul_sum``).
- gloo has no all-to-all of uneven lists: ``titan_ext.components.dispatch`` uses another.
- oneDNN keeps 1,024 kernels, one for each shape of a GEMM. Experts get another number of tokens in
    each step, and a process would grow by 50 to 100 MiB a step. An environment variable says 16.
"""

import contextlib
import functools
import importlib
import itertools
import os
import platform
import re
import resource
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._utils import _get_available_device_type
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.config import CommConfig, derive
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common import attention
from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
    VarlenMetadata,
)
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils as titan_utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

_HOLDERS_OF_A_COPY = (
    "torchtitan.components.metrics",
    "torchtitan.distributed.utils",
    "torchtitan.distributed.parallel_dims",
    "torchtitan.models.common.token_dispatcher",
    "torchtitan.tools.profiler",
)

_QUANTIZATION = "torchtitan.components.quantization"
_ASK_THE_DEVICE = tuple(f"{_QUANTIZATION}.{name}" for name in ("float8", "mx", "nvfp4"))

# A library's kernels are gone once it is collected (torch/library.py).
_overrides: list[torch.library.Library] = []

_EXPECTED_WARNINGS = (
    "DTensor (random operators|manual_seed\\(\\)) may not have complete support on cpu",
    "In CPU autocast, but the target dtype is not supported",  # the gate stays in its dtype
    "'set_vital' is deprecated",  # torchdata, in every run
)


def fast_bfloat16_matmul() -> None:
    """Multiply bfloat16 matrices on the CPU in float32, and round once, from now on.

    Without AVX-512 torch's own kernel takes up to a hundred times as long; with its bfloat16
    instructions it takes a quarter, and stays. Dispatch modes, autograd and profilers see the same
    operations as before.
    """
    if _overrides or torch.cpu._is_avx512_bf16_supported():
        return
    library = torch.library.Library("aten", "IMPL")
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        # Taken before ours are in their place, which would otherwise call themselves.
        functional = torch.library.get_kernel(f"aten::{name}", "CPU")
        into = torch.library.get_kernel(f"aten::{name}.out", "CPU")

        def multiply(keys, *tensors, functional=functional, **factors):
            if tensors[-1].dtype is torch.bfloat16:
                wide = [tensor.float() for tensor in tensors]
                return functional.call_boxed(keys, *wide, **factors).bfloat16()
            return functional.call_boxed(keys, *tensors, **factors)

        def multiply_into(keys, *tensors, out, multiply=multiply, into=into, **factors):
            if tensors[-1].dtype is torch.bfloat16:
                product = multiply(keys, *tensors, **factors)
                return out.resize_(product.shape).copy_(product)
            return into.call_boxed(keys, *tensors, out=out, **factors)

        library.impl(name, multiply, "CPU", with_keyset=True, allow_override=True)
        library.impl(f"{name}.out", multiply_into, "CPU", with_keyset=True, allow_override=True)
    _overrides.append(library)


def needed() -> bool:
    """True if this machine has no accelerator, by the test that Titan itself uses."""
    return _get_available_device_type() is None


def enable() -> bool:
    """Let Titan run on this machine's CPU if it has no accelerator, and return whether it has none.

    Safe to repeat.
    """
    if not needed():
        return False
    if titan_utils.device_type == "cpu":
        return True
    for expected in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=expected)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")  # read by the first GEMM
    fast_bfloat16_matmul()
    device_module = CPUDeviceModule()
    titan_utils.get_peak_flops = lambda device_name: float("nan")
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


_adapts: ContextVar[bool] = ContextVar("adapts", default=True)


@contextlib.contextmanager
def as_with_an_accelerator(capability: tuple[str, int, int] | None = None) -> Iterator[None]:
    """Configs that are made in this context stay as on a machine that has one.

    So they are checked as there. Call ``adapt_config`` before one is used here. ``capability`` is
    of that accelerator, as ``machines.Machine`` has it. Titan's converters ask for theirs; without
    it they find what they want.
    """
    kind, *version = capability or ("", 0, 0)

    def found(asked: str) -> Callable[[int, int], bool]:
        return lambda *least: not kind or (kind == asked and tuple(version) >= least)

    answers = {"has_cuda_capability": found("sm"), "has_rocm_capability": found("gfx")}
    modules = [importlib.import_module(name) for name in (titan_utils.__name__, *_ASK_THE_DEVICE)]
    with contextlib.ExitStack() as stack:
        stack.callback(_adapts.reset, _adapts.set(False))
        for module, name in itertools.product(modules, answers):
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, answers[name]))
        yield


def adapts() -> bool:
    """True if ``adapt_config`` changes what a CPU cannot do."""
    return needed() and _adapts.get()


def adapt_config(config: Trainer.Config) -> None:
    """Replace, in place, what a CPU cannot do in a config, and log each change once.

    FlexAttention and varlen attention become ScaledDotProductAttention, or CausalAttention where a
    model needs more. These are causal over the packed documents of a sequence: they attend across
    documents. CUDA graphs are switched off, and asynchronous saves do not pin memory. Nothing
    changes where an accelerator exists, and nothing the second time.
    """
    if not adapts():
        return
    if not config.training.disable_cuda_graphs:
        config.training.disable_cuda_graphs = True
        logger.info("No accelerator: CUDA graphs are off.")
    if getattr(config.checkpoint, "async_mode", "") == "async_with_pinned_mem":
        config.checkpoint.async_mode = "async"  # type: ignore[attr-defined]
        logger.info(
            'No accelerator: checkpoint.async_mode is "async"; there is no memory to pin, and '
            "torch asserts at the first save that there is."
        )
    if config.model_spec is not None:
        adapt_spec(config.model_spec)


def adapt_spec(spec: ModelSpec) -> None:
    """The model's part of ``adapt_config``: attention that a CPU can train."""
    if not adapts():
        return
    for kind in (FlexAttention, VarlenAttention):
        found = _of_titan(spec, kind)
        for _, _, parent, key in found:
            setattr(parent, key, _cpu_attention(parent))
        if found:
            name = type(_cpu_attention(found[0][2])).__qualname__.split(".")[0]
            logger.info(
                f"No accelerator: {kind.__name__} has no CPU backward; {name} runs instead, "
                "causal over packed documents."
            )


def _of_titan(spec: ModelSpec, kind: Any) -> list[tuple[str, Any, Any, str]]:
    """Configs of attention of a kind, as ``traverse`` has them.

    A subclass with a forward of its own stays (a dry run's); LoRA's has none.
    """
    # _owner is the class of the module that a config of Titan's builds.
    configs = cast(Any, list(spec.traverse(kind.Config)))
    return [at for at in configs if at[1]._owner.forward is kind.forward]


def keep_masks(spec: ModelSpec, *, documents: bool = False) -> None:
    """Let attention in plain operations with the model's own masks stand in a spec, in place.

    ``adapt_spec`` then leaves it, so that documents and context parallelism stay. Its masks are
    made by compiled functions of torch and Titan: ``eager_masks`` makes them eager. With
    ``documents`` it is ``CausalAttention``, which gets the number of each token's document in place
    of masks.
    """
    if not adapts():
        return
    plain: Any = {FlexAttention: PlainFlexAttention, VarlenAttention: PlainVarlenAttention}
    for kind, with_masks in plain.items():
        for _, own, parent, key in _of_titan(spec, kind):
            window = getattr(parent, "sliding_window_size", None)
            its = CausalAttention.Config(window=window) if documents else None
            setattr(parent, key, its or derive(own, with_masks.Config))


def _cpu_attention(parent: Any) -> ScaledDotProductAttention.Config:
    """The replacement for an attention config's inner attention."""
    if hasattr(parent, "sliding_window_size"):  # gpt_oss (its sinks need the lse), muse_glimmer
        return CausalAttention.Config(window=parent.sliding_window_size)
    return ScaledDotProductAttention.Config()


class _InPlainOps:
    """Attention in plain torch operations; classes say what it ``_hides``.

    Sharding and exchanges remain Titan's own. Memory is quadratic in the sequence: B x N x L x S
    scores.

    Shape suffixes: B = batch, L = sequence of queries, S = of keys, on all context ranks, N =
    heads, H = head dimension. Sharding finds the arguments by these names.
    """

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend: ``(B, L, N, H)`` in the dtype of ``v``.

        Key and value heads are repeated where there are fewer of them than queries'. ``scale`` is
        the factor of the scores; 1 / sqrt(H) if None. ``out_transform`` is called with the output
        and the log-sum-exp of the scores ``(B, L, N)`` in fp32.
        """
        assert kwargs.get("score_mod") is None
        hidden = self._hides(q_BLNH, k_BLNH, attention_masks)
        q_BNLH, k_BNSH, v_BNSH = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        queries_per_key = q_BNLH.size(1) // k_BNSH.size(1)
        k_BNSH = k_BNSH.repeat_interleave(queries_per_key, dim=1)
        v_BNSH = v_BNSH.repeat_interleave(queries_per_key, dim=1)

        scale = q_BNLH.size(-1) ** -0.5 if scale is None else scale
        scores_BNLS = (q_BNLH.float() @ k_BNSH.float().transpose(-2, -1)) * scale
        scores_BNLS = scores_BNLS.masked_fill(hidden, float("-inf"))

        lse_BNL = torch.logsumexp(scores_BNLS, dim=-1)
        weights_BNLS = torch.exp(scores_BNLS - lse_BNL.unsqueeze(-1)).to(v_BNSH.dtype)
        out_BLNH = (weights_BNLS @ v_BNSH).transpose(1, 2)
        if out_transform is None:
            return out_BLNH
        return out_transform(out_BLNH, lse_BNL.transpose(1, 2))

    def _hides(self, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, masks: Any) -> torch.Tensor:
        """The scores that do not count, of a shape that scores ``(B, N, L, S)`` take."""
        raise NotImplementedError


class CausalAttention(_InPlainOps, ScaledDotProductAttention):
    """Causal attention, where a model needs more than SDPA gives.

    gpt_oss rescales its attention output by learned sinks, for which it needs the log-sum-exp of
    the scores and its gradient. Half of its layers see a sliding window only. SDPA runs on a CPU
    and would leave both out silently. Its masks are the number ``(B, L)`` of each token's document,
    if those are apart.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        window: int | None = None
        """Number of positions that a query sees, itself included; None for all before it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.window = config.window

    def _hides(self, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, masks: Any) -> torch.Tensor:
        position = torch.arange(q_BLNH.size(1), device=q_BLNH.device)
        distance_LL = position[:, None] - position[None, :]
        hidden_LL = distance_LL < 0
        if self.window is not None:
            hidden_LL |= distance_LL >= self.window
        if masks is None:
            return hidden_LL
        of_B1L = masks[:, None]
        return hidden_LL | (of_B1L[..., None] != of_B1L[..., None, :])


class PlainFlexAttention(_InPlainOps, FlexAttention):
    """FlexAttention with its masks, which a context axis splits.

    Titan's context parallelism needs FlexAttention under ``spmd_types``, and torch has no backward
    of it on a CPU.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def _hides(self, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, masks: BlockMask) -> torch.Tensor:
        # It is pointwise, as its kernel asks, so it takes all scores at once: Dynamo would trace
        # the four vmaps of torch's create_mask in each block. Indices broadcast, and take no room.
        b, h, q, k = (
            torch.arange(size, device=q_BLNH.device)
            for size in (len(q_BLNH), 1, q_BLNH.shape[1], k_BLNH.shape[1])
        )
        return ~masks.mask_mod(b[:, None, None, None], h[:, None, None], q[:, None], k)


class PlainVarlenAttention(_InPlainOps, VarlenAttention):
    """VarlenAttention: a document is what its metadata delimit, with the window before a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def _hides(
        self, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, masks: VarlenMetadata
    ) -> torch.Tensor:
        at_BL = torch.arange(q_BLNH[..., 0, 0].numel()).view(q_BLNH.shape[:2])
        document_BL = torch.bucketize(at_BL, masks.cu_seq_q, right=True)
        distance_BLL = at_BL[:, :, None] - at_BL[:, None]
        hidden_BLL = (distance_BLL < 0) | (document_BL[:, :, None] != document_BL[:, None])
        before, after = self.window_size
        assert after == 0
        if before >= 0:
            hidden_BLL |= distance_BLL > before
        return hidden_BLL[:, None]


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
        return fill_whole(target, lambda full: func(full, *args[1:], **kwargs))


def fill_whole(target: DTensor, fill: Callable[[torch.Tensor], object]) -> DTensor:
    """Let every rank ``fill`` a whole tensor, all alike, and keep its shard of it in ``target``."""
    full = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    fill(full)
    # Nothing is sent (src_data_rank=None).
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


@contextlib.contextmanager
def eager_masks() -> Iterator[None]:
    """A context in which FlexAttention's masks are not made by compiled functions."""
    made = {"_compiled_create_block_mask": create_block_mask}
    with mock.patch.multiple(attention, **made), mock.patch.multiple(context_parallel, **made):
        yield


def list_all_to_all() -> contextlib.AbstractContextManager[Any]:
    """A context in which ``dist.all_to_all`` takes uneven lists over gloo, by one flat exchange.

    For stock TorchTitan beside ours: the dispatcher of ours uses another collective.
    """
    replaced = mock.patch.object(dist, "all_to_all", _flat_all_to_all)
    return replaced if needed() else contextlib.nullcontext()


def _flat_all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> None:
    assert not async_op
    sent = torch.cat([chunk.reshape(-1) for chunk in input_tensor_list])
    sizes = [chunk.numel() for chunk in output_tensor_list]
    received = sent.new_empty(sum(sizes))
    given = [chunk.numel() for chunk in input_tensor_list]
    dist.all_to_all_single(received, sent, sizes, given, group=group)
    for chunk, values in zip(output_tensor_list, received.split(sizes), strict=True):
        chunk.copy_(values.view_as(chunk))


def _with_one_backend(init_distributed: Callable[..., int]) -> Callable[..., int]:
    """CPU offload adds gloo for host tensors; without an accelerator it is the backend already."""

    @functools.wraps(init_distributed)
    def init(comm_config: CommConfig, enable_cpu_backend: bool = False, **kwargs: Any) -> int:
        return init_distributed(comm_config, enable_cpu_backend=False, **kwargs)

    return init


class CPUDeviceModule:
    """The functions of ``torch.cuda`` that Titan uses, for this process: ``torch.cpu`` and more.

    Memory is the peak resident set size of the process, in bytes: the only figure here that
    includes everything. Any other name that Titan uses raises an error.
    """

    def current_device(self) -> int:
        return 0

    def empty_cache(self) -> None:
        pass

    def get_device_name(self, device: Any = None) -> str:
        return f"{platform.machine()} CPU (no accelerator; memory is process RSS)"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return SimpleNamespace(name=self.get_device_name(), total_memory=total_bytes)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        # VmHWM can be reset, ru_maxrss cannot; some sandboxes lack the former.
        match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        usage = resource.getrusage(resource.RUSAGE_SELF)
        peak = 1024 * (int(match[1]) if match else usage.ru_maxrss)
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        with contextlib.suppress(OSError):  # the figure is then the peak since the process started
            # "5" resets the peak resident set size, VmHWM (proc(5)).
            Path("/proc/self/clear_refs").write_text("5")

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        raise AttributeError(
            f"this machine has no accelerator: base.no_accelerator has no {name!r} for Titan"
        )
