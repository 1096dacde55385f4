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

**Alternatives.** torchao 0.18's ``to_mx`` with RCEIL scales gives the same bits (a test compares
them), but refuses a short last block and non-contiguous input. There a NaN turns its block into
NaN, and an infinity its neighbours into zeros. FLOOR scales saturate the largest values of a block.
Scales in fp32 take the error of normal values from 2.66 to 2.57 % only. docs/float8.md has what
users see: special values and errors.
"""

import contextlib
import functools
import logging
import math
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from titan_ext.base.tensors import Sharding, local_tensor

_logger = logging.getLogger(__name__)

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that can be quantized. fp64 cannot: its range is not that of the scales."""

_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "exact": torch.uint8}
_VALUES: dict[str, tuple[object, ...]] = {"dtype": tuple(_FLOAT8), "block": (64, 128, 256)}

# fp32: sign, 8 bits of exponent (biased by 127), 23 bits of mantissa.
_MANTISSA_BITS = 23
_CARRY_ABOVE_1_75 = (1 << _MANTISSA_BITS) - 1 - (3 << (_MANTISSA_BITS - 2))


@dataclass(frozen=True)
class Codec:
    """The form in which a tensor is stored. Immutable and hashable."""

    dtype: Literal["e4m3", "e5m2", "exact"] = "e4m3"
    """With "e4m3" 3 bits of mantissa, with "e5m2" 2 and more range. "exact" changes nothing:
    ``data`` has the bytes of each row, and there are no scales. With it whatever stores and sends
    float8 can be held bit for bit against what does not (titan_ext verify)."""
    block: Literal[64, 128, 256] = 128
    """How many neighbours along the last dimension share a scale: 64, 128 or 256. It confines an
    outlier. The last of a row may be short."""

    def __post_init__(self) -> None:
        for key, expected in _VALUES.items():
            value = getattr(self, key)
            # type() too: 128.0 == 128
            if not any(value == e and type(value) is type(e) for e in expected):
                names = ", ".join(map(str, expected))
                raise ValueError(f"Codec.{key} is {value!r}; expected one of {names}.")

    @property
    def float8(self) -> torch.dtype:
        """The torch dtype of ``Quantized.data``."""
        return _FLOAT8[self.dtype]

    def block_size(self, shape: torch.Size) -> int:
        """Number of values of a tensor of ``shape`` that share a scale."""
        return min(self.block, shape[-1] if shape else 1)

    def scales_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """The shape of the scales of a tensor of ``shape``."""
        last = 0 if self.dtype == "exact" else shape[-1] if shape else 1
        return (*shape[:-1], -(-last // max(self.block_size(shape), 1)))

    def width(self, values: int, dtype: torch.dtype) -> int:
        """Elements of ``data`` that a row of so many values of ``dtype`` has."""
        return values * dtype.itemsize if self.dtype == "exact" else values

    def nbytes(self, shape: torch.Size) -> int:
        """Bytes that a stored tensor of ``shape`` takes; of an exact one as if it were float8."""
        return shape.numel() + torch.Size(self.scales_shape(shape)).numel()


_default = [Codec()]  # e4m3 by 128: e5m2 has twice the error (docs/float8.md)


def default_codec() -> Codec:
    """The codec of saved tensors, of tokens between ranks, and of weights that are gathered."""
    return _default[-1]


@contextlib.contextmanager
def use_codec(codec: Codec) -> Iterator[None]:
    """Let ``default_codec`` be ``codec``, on all threads: models are built and trained inside."""
    _default.append(codec)
    try:
        yield
    finally:
        _default.pop()


class Quantized(NamedTuple):
    """A stored tensor, contiguous, in storages of its own."""

    data: torch.Tensor
    """``Codec.float8``, of the shape of the original. A DTensor if that was one."""
    scales: torch.Tensor
    """uint8, of ``Codec.scales_shape``, always plain (of this rank's shard of a DTensor). A scale
    is 2^(byte - 127), readable as ``torch.float8_e8m0fnu``."""


def quantize(x: torch.Tensor, codec: Codec) -> Quantized:
    """Store ``x`` in float8. Not differentiable.

    ``x`` is bfloat16, float16 or float32 (else ValueError), of any shape and strides. Of a DTensor,
    this rank's shard is stored: blocks end where the shard ends.
    """
    if x.dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUPPORTED_DTYPES)
        raise ValueError(f"quantize: x is {x.dtype}; expected one of {names}.")
    if isinstance(x, DTensor):
        dense: Any = x.contiguous()
        data, scales = quantize(local_tensor(dense), codec)
        return Quantized(Sharding.of(dense).wrap(data), scales)

    x = x.detach()
    scales_shape = codec.scales_shape(x.shape)
    if codec.dtype == "exact":
        # A copy, as float8 is one: what is stored must not change with ``x``.
        copy = x.clone(memory_format=torch.contiguous_format)
        return Quantized(copy.view(codec.float8), copy.new_empty(scales_shape, dtype=torch.uint8))
    if _is_empty(x):
        empty = torch.zeros(scales_shape, dtype=torch.uint8, device=x.device)
        return Quantized(torch.empty(x.shape, dtype=codec.float8, device=x.device), empty)

    stored = [_quantize_blocks(values, codec) for values in _parts(x.float(), codec)]
    data, scales = (_join(parts) for parts in zip(*stored, strict=True))
    return Quantized(data.reshape(x.shape).contiguous(), scales.reshape(scales_shape))


def _quantize_blocks(values: torch.Tensor, codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    magnitude = values.abs()
    finite = magnitude < float("inf")  # False for NaN, too
    largest = torch.where(finite, magnitude, 0.0).amax(-1, keepdim=True)

    # The float8 maximum is 1.75 * 2^k, and k is found here once for both formats.
    k = {"e4m3": 8, "e5m2": 15}[codec.dtype]
    exponent = (largest.view(torch.int32) + _CARRY_ABOVE_1_75) >> _MANTISSA_BITS
    exponent = (exponent - k).clamp(min=1)  # 2^-126: scale and reciprocal are normal numbers
    scaled = values * _power_of_two(254 - exponent)
    data = torch.where(finite, scaled, float("nan")).to(codec.float8)
    return data, exponent.to(torch.uint8)


def dequantize(quantized: Quantized, codec: Codec, dtype: torch.dtype) -> torch.Tensor:
    """The tensor that ``quantize(x, codec)`` stored, contiguous, in ``dtype`` (that of ``x``)."""
    data, scales = quantized
    if isinstance(data, DTensor):
        local = dequantize(Quantized(local_tensor(data), scales), codec, dtype)
        return Sharding.of(data).wrap(local)
    if codec.dtype == "exact":
        return data.view(dtype).clone(memory_format=torch.contiguous_format)
    if _is_empty(data):
        return torch.empty(data.shape, dtype=dtype, device=data.device)

    scale = _power_of_two(scales.to(torch.int32))
    values = data.float()
    if data.dim():
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


# One kernel each way: the same as operations of torch. Dispatch modes (checkpointing's,
# FlopCounterMode, memory trackers) see one operation and its outputs. Inside it no mode is active;
# under one, torch.compile would silently leave the codec uncompiled.

_BACKEND = "inductor"
_warned: list[str] = []
_not_compiled: set[Callable[..., Any]] = set()
# Not measured; a block of DeepSeek-V3 16B has tensors of six widths: 128 to 3072.
_MOST_KINDS = 32
ALIGNMENT = 16
"""Bytes that a thread reads at once, where a tensor, and each of its rows, begins at a multiple."""
_kinds: dict[Callable[..., Any], set[Any]] = defaultdict(set)


def codec_name(codec: Codec) -> str:
    """``codec`` as an argument of the operations."""
    return f"{codec.dtype} {codec.block}"


@functools.cache
def _codec_called(name: str) -> Codec:
    dtype, block = name.split()
    return Codec(dtype, int(block))  # type: ignore[arg-type]


def compiles_for(device: torch.device) -> bool:
    """True if the codec is compiled for ``device``: not for a CPU, which may lack a compiler."""
    return device.type != "cpu"


def _quantize(x: torch.Tensor, codec: str) -> tuple[torch.Tensor, torch.Tensor]:
    settings = _codec_called(codec)
    if settings.dtype == "exact" or not compiles_for(x.device) or x.numel() == 0:
        return tuple(quantize(x, settings))
    blocks = _whole_blocks(x, settings)
    data, scales = _compile_and_run(_encode, [x.view(blocks, -1) if blocks else x], settings)
    return data.view(x.shape), scales.view(settings.scales_shape(x.shape))


def _dequantize(
    data: torch.Tensor, scales: torch.Tensor, codec: str, dtype: torch.dtype
) -> torch.Tensor:
    settings = _codec_called(codec)
    scales = scales[..., : settings.scales_shape(data.shape)[-1]]  # behind them may be padding
    if settings.dtype == "exact" or not compiles_for(data.device) or data.numel() == 0:
        return dequantize(Quantized(data, scales), settings, dtype)
    if blocks := _whole_blocks(data, settings):
        tensors = [data.view(blocks, -1), scales.reshape(blocks, 1)]
        return _compile_and_run(_decode, tensors, settings, dtype).view(data.shape)
    if packed := _rows(data, scales):
        rows, columns = packed
        return _compile_and_run(_decode_rows, [rows], columns, settings, dtype)
    return _compile_and_run(_decode, [data, scales], settings, dtype)


def _rows(data: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]] | None:
    """The rows that both are columns of, contiguous, and where in them both begin and end.

    Alone, a part of rows has a stride that is no product of its sizes. torch.compile makes that a
    variable, of which kernels do not know that they may read more than a byte at a time.
    """
    storage, width = data.untyped_storage(), data.stride(0)
    scales_begin = scales.storage_offset() - data.storage_offset()
    scales_end = scales_begin + scales.shape[-1]
    # What is before ``data`` in a row; 0 in a row that begins with it.
    first = (width - scales_end) // ALIGNMENT * ALIGNMENT
    begin = data.storage_offset() - first
    if (
        not data.stride() == scales.stride() == (width, 1)
        or storage._cdata != scales.untyped_storage()._cdata
        or not data.shape[1] <= scales_begin < scales_end <= width
        or not 0 <= begin <= storage.nbytes() - len(data) * width
    ):
        return None
    rows = data.view(torch.uint8).as_strided((len(data), width), (width, 1), begin)
    columns = 0, data.shape[1], scales_begin, scales_end
    return rows, tuple(first + column for column in columns)


def _whole_blocks(x: torch.Tensor, codec: Codec) -> int:
    """The number of blocks of ``x``, if all are whole and contiguous; else 0.

    As [blocks, block size] all shapes share a kernel.
    """
    size = codec.block_size(x.shape)
    if x.shape[-1] % size or not x.is_contiguous():
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
        # "Maybe": ``mark_dynamic`` raises where the compiler settles on one number of rows.
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    constant = tuple((t.shape[1:], t.stride(), t.dtype) for t in tensors), settings
    kinds = _kinds[function]
    if constant not in kinds and len(kinds) < _MOST_KINDS:
        kinds.add(constant)
    try:
        compiled = _compiled(function, constant if constant in kinds else None)
        return compiled(*tensors, *settings)
    except torch.OutOfMemoryError:
        raise
    # Dynamo's on an A100, where Triton does not convert to or from e4m3. Others come when a kernel
    # is first run: a cache that cannot be written, or too few registers.
    except Exception as error:
        _not_compiled.add(function)
        _warn_of_eager(str(error))
        return function(*tensors, *settings)


@functools.cache
def _compiled(function: Callable[..., Any], constant: Any) -> Callable[..., Any]:
    """``function`` for tensors of which ``constant`` is true; None: for all tensors.

    A copy: torch.compile stops after 8 kinds of inputs of the same code.
    """
    copy = types.FunctionType(function.__code__.replace(), function.__globals__)
    options: Any = {"assume_aligned_inputs": True}  # a copy is made of those that are not
    return torch.compile(copy, backend=_BACKEND, dynamic=constant is None, options=options)


def _encode(x: torch.Tensor, codec: Codec) -> Any:
    if not torch.compiler.is_dynamo_compiling():
        _warn_of_eager("torch.compile is switched off, or has reached its recompile limit")
    return tuple(quantize(x, codec))


def _decode(data: torch.Tensor, scales: torch.Tensor, codec: Codec, dtype: torch.dtype) -> Any:
    if not torch.compiler.is_dynamo_compiling():
        _warn_of_eager("torch.compile is switched off, or has reached its recompile limit")
    return dequantize(Quantized(data, scales), codec, dtype)


def _decode_rows(
    rows: torch.Tensor, columns: tuple[int, ...], codec: Codec, dtype: torch.dtype
) -> Any:
    begin, end, scales_begin, scales_end = columns
    data = rows[:, begin:end].view(codec.float8)
    return _decode(data, rows[:, scales_begin:scales_end], codec, dtype)


def _warn_of_eager(reason: str) -> None:
    if not _warned:
        _warned.append(reason)
        _logger.warning("The float8 codec runs as a dozen kernels instead of one: %s", reason)


torch.library.define("titan_ext::float8_quantize", "(Tensor x, str codec) -> (Tensor, Tensor)")
torch.library.define(
    "titan_ext::float8_dequantize",
    "(Tensor data, Tensor scales, str codec, ScalarType dtype) -> Tensor",
)
torch.library.impl("titan_ext::float8_quantize", "default", _quantize)
torch.library.impl("titan_ext::float8_dequantize", "default", _dequantize)


@torch.library.register_fake("titan_ext::float8_quantize")
def _(x: Any, codec: str) -> tuple[torch.Tensor, torch.Tensor]:
    settings = _codec_called(codec)
    scales = x.new_empty(settings.scales_shape(x.shape), dtype=torch.uint8)
    shape = (*x.shape[:-1], settings.width(x.shape[-1], x.dtype)) if x.dim() else x.shape
    return x.new_empty(shape, dtype=settings.float8), scales


@torch.library.register_fake("titan_ext::float8_dequantize")
def _(data: Any, scales: Any, codec: str, dtype: torch.dtype) -> torch.Tensor:
    is_exact = _codec_called(codec).dtype == "exact"
    return data.new_empty(data.view(dtype).shape if is_exact else data.shape, dtype=dtype)
