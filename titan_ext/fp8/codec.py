# SPDX-License-Identifier: BSD-3-Clause
"""A float8 codec for activations that wait for backward: one byte a value, and a few for scales.

    x        [..., n]            bf16, fp16 or fp32
    data     [..., n]            float8
    scales   [..., ceil(n / B)]  one scale for a block of B neighbours along the last dimension

    quantize:    data = float8(x / scale)      dequantize:    x' = data * scale

**Scales** are powers of two, stored as one byte (e8m0, of the microscaling standard). The only
error is then the rounding to float8, and quantizing again changes nothing. Each is the smallest
with max(abs(block)) / scale <= the largest float8, 448 or 57344. Both are 1.75 * 2^k, so the scale
comes from integer arithmetic on the bits of an fp32: add the distance from mantissa 1.75 to the
next power of two, which carries into the exponent exactly when the mantissa is above 1.75. There is
no logarithm and no rounding mode, so every device computes the same byte.

**Tracing.** ``quantize`` and ``dequantize`` read no value on the host, branch on shapes and the
codec only, and output shapes do not depend on values. In eager mode each is a dozen kernels;
``torch.ops.titan_ext.float8_quantize`` and ``float8_dequantize``, at the end of this file, run one.

docs/fp8_codec.md has special values, errors, and a comparison with torchao's codecs; a test
compares ``to_mx`` with RCEIL scales bit for bit.
"""

import functools
import logging
import math
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from titan_ext.base.tensors import Layout, local_tensor

_logger = logging.getLogger(__name__)

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What can be quantised. fp64 cannot: its range is not that of the scales."""

_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_VALUES: dict[str, tuple[object, ...]] = {
    "dtype": tuple(_FLOAT8),
    "block": (64, 128, 256, "row", "tensor"),
    "scale": ("e8m0", "fp32"),
    "stochastic": (False, True),
}

# fp32: sign, 8 bits of exponent (biased by 127), 23 bits of mantissa.
_MANTISSA_BITS = 23
_CARRY_ABOVE_1_75 = (1 << _MANTISSA_BITS) - 1 - (3 << (_MANTISSA_BITS - 2))
_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Codec:
    """How a tensor is stored. Immutable and hashable.

    Attributes:
        dtype: "e4m3" (3 bits of mantissa) or "e5m2" (2 bits, more range).
        block: How many neighbours along the last dimension share a scale: 64, 128, 256, "row" (the
            last dimension) or "tensor". It confines an outlier. The last of a row may be short.
        scale: "e8m0": one byte, a power of two. "fp32": four bytes, so that the largest value of a
            block is exactly the largest of float8.
        stochastic: Round up with the probability of the remainder, so that the error is zero on
            average, instead of to nearest. Larger errors, no bias.
        seed: Seed of the stochastic rounding. The same seed, step and position round alike.
    """

    dtype: Literal["e4m3", "e5m2"] = "e4m3"
    block: Literal[64, 128, 256, "row", "tensor"] = 128
    scale: Literal["e8m0", "fp32"] = "e8m0"
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for key, expected in _VALUES.items():
            value = getattr(self, key)
            # type() too: 128.0 == 128 and 1 == True
            if not any(value == e and type(value) is type(e) for e in expected):
                names = ", ".join(map(str, expected))
                raise ValueError(f"Codec.{key} is {value!r}; expected one of {names}.")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 31:
            raise ValueError(f"Codec.seed is {self.seed!r}; expected an int from 0 to 2**31 - 1.")

    @property
    def float8(self) -> torch.dtype:
        """The torch dtype of ``Quantized.data``."""
        return _FLOAT8[self.dtype]

    def block_size(self, shape: torch.Size) -> int:
        """How many values of a tensor of ``shape`` share a scale."""
        if self.block == "tensor":
            return shape.numel()
        last = shape[-1] if shape else 1
        return last if self.block == "row" else min(self.block, last)

    def scales_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """The shape of the scales of a tensor of ``shape``."""
        if self.block == "tensor":
            return (1,)
        last = shape[-1] if shape else 1
        return (*shape[:-1], -(-last // max(self.block_size(shape), 1)))

    def nbytes(self, shape: torch.Size) -> int:
        """Bytes that a stored tensor of ``shape`` takes."""
        scales = torch.Size(self.scales_shape(shape)).numel()
        return shape.numel() + scales * (1 if self.scale == "e8m0" else 4)


class Quantized(NamedTuple):
    """A stored tensor, contiguous, in storages of its own.

    Attributes:
        data: float8, of the shape of the original. A DTensor if that was one.
        scales: ``Codec.scales_shape``, always plain (of this rank's shard of a DTensor). uint8 with
            scale = 2^(byte - 127), readable as ``torch.float8_e8m0fnu``; or float32.
    """

    data: torch.Tensor
    scales: torch.Tensor


def quantize(x: torch.Tensor, codec: Codec, *, step: int | torch.Tensor = 0) -> Quantized:
    """Store ``x`` in float8. Not differentiable.

    Args:
        x: bfloat16, float16 or float32 (else ValueError), of any shape and strides. Of a DTensor,
            this rank's shard is stored: blocks, rows and the whole end where the shard ends.
        codec: How.
        step: For stochastic rounding: another step is other noise. As a tensor (int64, 0-d, on the
            device of ``x``) it may advance inside a CUDA graph.
    """
    if x.dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUPPORTED_DTYPES)
        raise ValueError(f"quantize: x is {x.dtype}; expected one of {names}.")
    if isinstance(x, DTensor):
        dense: Any = x.contiguous()
        data, scales = quantize(local_tensor(dense), codec, step=step)
        return Quantized(Layout.of(dense).wrap(data), scales)

    x = x.detach()
    scales_shape = codec.scales_shape(x.shape)
    if _is_empty(x):
        scale_dtype = torch.uint8 if codec.scale == "e8m0" else torch.float32
        empty = torch.zeros(scales_shape, dtype=scale_dtype, device=x.device)
        return Quantized(torch.empty(x.shape, dtype=codec.float8, device=x.device), empty)

    values = _parts(x.float(), codec)
    noise = _parts(_noise(x, codec.seed, step), codec) if codec.stochastic else values
    stored = [_quantize_blocks(v, n, codec) for v, n in zip(values, noise, strict=True)]
    data, scales = (_join(parts) for parts in zip(*stored, strict=True))
    return Quantized(data.reshape(x.shape).contiguous(), scales.reshape(scales_shape))


def _quantize_blocks(
    values: torch.Tensor, noise: torch.Tensor, codec: Codec
) -> tuple[torch.Tensor, torch.Tensor]:
    magnitude = values.abs()
    finite = magnitude < float("inf")  # False for NaN, too
    largest = torch.where(finite, magnitude, 0.0).amax(-1, keepdim=True)

    float8_max = torch.finfo(codec.float8).max
    if codec.scale == "e8m0":
        # The float8 maximum is 1.75 * 2^k, and k is found here once for both formats.
        k = {"e4m3": 8, "e5m2": 15}[codec.dtype]
        exponent = (largest.view(torch.int32) + _CARRY_ABOVE_1_75) >> _MANTISSA_BITS
        exponent = (exponent - k).clamp(min=1)  # 2^-126: scale and reciprocal are normal numbers
        inverse = _power_of_two(254 - exponent)
        scales = exponent.to(torch.uint8)
    else:
        scales = largest.clamp(min=float8_max * _SMALLEST_NORMAL) / float8_max
        inverse = 1.0 / scales

    scaled = values * inverse
    if codec.stochastic:
        scaled = _round_stochastically(scaled, codec, noise)
    # Does nothing to power-of-two scales; an fp32 scale may have been rounded down.
    scaled = scaled.clamp(-float8_max, float8_max)
    return torch.where(finite, scaled, float("nan")).to(codec.float8), scales


def dequantize(quantized: Quantized, codec: Codec, dtype: torch.dtype) -> torch.Tensor:
    """The tensor that ``quantize(x, codec)`` stored, contiguous, in ``dtype`` (that of ``x``)."""
    data, scales = quantized
    if isinstance(data, DTensor):
        local = dequantize(Quantized(local_tensor(data), scales), codec, dtype)
        return Layout.of(data).wrap(local)
    if _is_empty(data):
        return torch.empty(data.shape, dtype=dtype, device=data.device)

    scale = _power_of_two(scales.to(torch.int32)) if codec.scale == "e8m0" else scales
    values = data.float()
    if codec.block != "tensor" and data.dim():
        width, size = data.shape[-1], codec.block_size(data.shape)
        # Neighbours that surely share a scale, so that a kernel loads it once for all of them.
        run = math.gcd(width, size)
        scale = scale.unsqueeze(-1).expand(*scale.shape, size // run).flatten(-2)
        scale = scale[..., : width // run].unsqueeze(-1)
        values = values.reshape(*data.shape[:-1], width // run, run)
    values = values * scale
    # The largest value of a block may have been rounded up to 2^128 (2^16 in fp16).
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype).reshape(data.shape).contiguous()


_decoded: dict[int, tuple[weakref.ref, int, Quantized, Codec]] = {}


def note_decoded(x: torch.Tensor, quantized: Quantized, codec: Codec) -> None:
    """Remember that the values of ``x`` are those of ``quantized``, while its storage lives.

    Whoever stores ``x`` by ``codec`` then takes these, and quantizes nothing (``stored_as``).
    """
    storage = x.untyped_storage()
    key = storage._cdata
    ref = weakref.ref(storage, lambda _: _decoded.pop(key, None))
    _decoded[key] = ref, x._version, quantized, codec


def stored_as(x: torch.Tensor, codec: Codec) -> Quantized | None:
    """What ``x``, contiguous, was decoded from by ``codec``; None if it was not, or has changed."""
    _, version, quantized, its_codec = _decoded.get(x.untyped_storage()._cdata, _NOT_DECODED)
    if quantized is None or version != x._version or its_codec != codec:
        return None
    return quantized if quantized.data.shape == x.shape else None


_NOT_DECODED = None, 0, None, None


def _is_empty(x: torch.Tensor) -> bool:
    """False for a traced tensor of unknown size; the general code handles it, too."""
    return guard_or_false(x.numel() == 0)


def _power_of_two(biased_exponent: torch.Tensor) -> torch.Tensor:
    """fp32 2^(biased_exponent - 127) from int32, 1 to 254, by its bits: exact on every device."""
    return (biased_exponent << _MANTISSA_BITS).view(torch.float32)


def _parts(x: torch.Tensor, codec: Codec) -> list[torch.Tensor]:
    """``x`` as [rows, blocks, block size]; the short blocks at the ends of its rows, if any, apart.

    Each is one kernel of its own, with a constant block size.
    """
    size = codec.block_size(x.shape)
    if codec.block == "tensor":
        return [x.reshape(1, 1, size)]
    x = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    short = x.shape[-1] % size
    if not short:
        return [_split(x, size)]
    whole = x.shape[-1] - short
    return [_split(x[:, :whole], size), _split(x[:, whole:], short)]


def _split(x: torch.Tensor, size: int) -> torch.Tensor:
    # No -1: in a traced graph there may be no rows, and then it has no meaning.
    return x.reshape(x.shape[0], x.shape[-1] // size, size)


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([part.flatten(1) for part in parts], -1)


def _round_stochastically(scaled: torch.Tensor, codec: Codec, noise: torch.Tensor) -> torch.Tensor:
    """Round to a float8 value next to ``scaled``: up with the probability of the remainder.

    They lie 2^(exponent - mantissa bits) apart, below the smallest normal number as just above it.
    """
    mantissa_bits, smallest_exponent = {"e4m3": (3, -6), "e5m2": (2, -14)}[codec.dtype]
    exponent = (scaled.view(torch.int32) >> _MANTISSA_BITS) & 0xFF
    spacing = exponent.clamp(min=127 + smallest_exponent) - mantissa_bits
    steps = scaled * _power_of_two(254 - spacing)
    return torch.floor(steps + noise) * _power_of_two(spacing)


def _noise(like: torch.Tensor, seed: int, step: int | torch.Tensor) -> torch.Tensor:
    """Uniform numbers k / 2^20 in [0, 1): a hash of position, step and seed, so no generator state.

    20 bits, so that adding one to a multiple of the spacing is exact in fp32. int64 for 32 bits:
    integers of torch are signed, and overflow is not defined everywhere.
    """
    position = torch.arange(like.numel(), device=like.device).reshape(like.shape)
    # Mixed once before step and seed are added: else position p at step s would be p + 1 at s - 1.
    state = _mix(_mix(position) + step * 0x1E3779B1 + seed * 0x2545F491)
    return (state >> 12).to(torch.float32) * 2.0**-20


def _mix(state: torch.Tensor) -> torch.Tensor:
    """A 32-bit finaliser (xor-shift and multiply, twice); multipliers below 2^31 fit int64."""
    state = state & 0xFFFFFFFF
    for shift, multiplier in ((16, 0x21F0AAAD), (15, 0x35A2D97B)):
        state = ((state ^ (state >> shift)) * multiplier) & 0xFFFFFFFF
    return state ^ (state >> 15)


# One kernel each way: the same as operations of torch. Dispatch modes (checkpointing's,
# FlopCounterMode, memory trackers) see one operation and its outputs. Inside it no mode is active;
# under one, torch.compile would silently leave the codec uncompiled.

_BACKEND = "inductor"
_codecs: dict[str, Codec] = {}
_warned: list[str] = []
_not_compiled: set[Callable[..., Any]] = set()
_MOST_KINDS = 32
_kinds: dict[Callable[..., Any], set[Any]] = defaultdict(set)


@functools.cache
def codec_name(codec: Codec) -> str:
    """``codec`` as an argument of the operations."""
    _codecs[str(codec)] = codec
    return str(codec)


def _quantize(
    x: torch.Tensor, codec: str, step: torch.Tensor | None, one_kernel: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    settings = _codecs[codec]
    noise = 0 if step is None else step
    if not one_kernel or x.numel() == 0:
        return tuple(quantize(x, settings, step=noise))
    blocks = _whole_blocks(x, settings)
    data, scales = _compile_and_run(_encode, [x.view(blocks, -1) if blocks else x], settings, noise)
    return data.view(x.shape), scales.view(settings.scales_shape(x.shape))


def _dequantize(
    data: torch.Tensor, scales: torch.Tensor, codec: str, dtype: torch.dtype, one_kernel: bool
) -> torch.Tensor:
    settings = _codecs[codec]
    if not one_kernel or data.numel() == 0:
        return dequantize(Quantized(data, scales), settings, dtype)
    blocks = _whole_blocks(data, settings)
    tensors = [data.view(blocks, -1), scales.view(blocks, 1)] if blocks else [data, scales]
    return _compile_and_run(_decode, tensors, settings, dtype).view(data.shape)


def _whole_blocks(x: torch.Tensor, codec: Codec) -> int:
    """The number of blocks of ``x``, if all are whole and contiguous; else 0.

    As [blocks, block size] all shapes share a kernel.
    """
    size = codec.block_size(x.shape)
    if isinstance(codec.block, str) or x.shape[-1] % size or not x.is_contiguous():
        return 0
    return x.numel() // size


def _compile_and_run(
    function: Callable[..., Any], tensors: list[torch.Tensor], *settings: Any
) -> Any:
    """Run ``function`` compiled for any number of rows; all else is constant in its kernels.

    With a width that varies, a kernel divides by it for every value, and reads one byte at a time.
    So only a tensor whose width is new at every step gets such a kernel.
    """
    if function in _not_compiled:
        return function(*tensors, *settings)
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    constant = tuple((t.shape[1:], t.stride(), t.dtype) for t in tensors)
    kinds = _kinds[function]
    if constant not in kinds and len(kinds) < _MOST_KINDS:
        kinds.add(constant)
    try:
        compiled = _compiled(function, constant if constant in kinds else None)
        return compiled(*tensors, *settings)
    except torch._dynamo.exc.TorchDynamoException as error:
        _not_compiled.add(function)
        _warn_of_eager(str(error))
        return function(*tensors, *settings)


@functools.cache
def _compiled(function: Callable[..., Any], constant: Any) -> Callable[..., Any]:
    """``function`` for tensors of which ``constant`` is true; None: for all tensors.

    A copy: torch.compile stops after 8 kinds of inputs of the same code.
    """
    copy = types.FunctionType(function.__code__.replace(), function.__globals__)
    return torch.compile(copy, backend=_BACKEND, dynamic=constant is None)


def _encode(x: torch.Tensor, codec: Codec, step: int | torch.Tensor) -> Any:
    if not torch.compiler.is_dynamo_compiling():
        _warn_of_eager("torch.compile is switched off, or was asked for too many kinds of shapes")
    return tuple(quantize(x, codec, step=step))


def _decode(data: torch.Tensor, scales: torch.Tensor, codec: Codec, dtype: torch.dtype) -> Any:
    if not torch.compiler.is_dynamo_compiling():
        _warn_of_eager("torch.compile is switched off, or was asked for too many kinds of shapes")
    return dequantize(Quantized(data, scales), codec, dtype)


def _warn_of_eager(reason: str) -> None:
    if not _warned:
        _warned.append(reason)
        _logger.warning("The float8 codec runs as a dozen kernels instead of one: %s", reason)


torch.library.define(
    "titan_ext::float8_quantize",
    "(Tensor x, str codec, Tensor? step, bool one_kernel) -> (Tensor, Tensor)",
)
torch.library.define(
    "titan_ext::float8_dequantize",
    "(Tensor data, Tensor scales, str codec, ScalarType dtype, bool one_kernel) -> Tensor",
)
torch.library.impl("titan_ext::float8_quantize", "default", _quantize)
torch.library.impl("titan_ext::float8_dequantize", "default", _dequantize)


@torch.library.register_fake("titan_ext::float8_quantize")
def _(x: Any, codec: str, step: Any, one_kernel: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantize(x, codec, step, False)


@torch.library.register_fake("titan_ext::float8_dequantize")
def _(data: Any, scales: Any, codec: str, dtype: torch.dtype, one_kernel: bool) -> torch.Tensor:
    return _dequantize(data, scales, codec, dtype, False)
