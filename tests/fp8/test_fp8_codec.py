"""The codec against fp64 arithmetic, and against torchao's where both are defined."""

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from titan_ext.fp8.codec import SUPPORTED_DTYPES, Codec, dequantize, quantize

FORMATS = [
    Codec(dtype=dtype, block=block)  # pyrefly: ignore[bad-argument-type]
    for dtype in ("e4m3", "e5m2")
    for block in (64, 128, 256)
]
MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}
SMALLEST_STEP = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
SPECIAL = (0.0, -0.0, 1.0, -3e-39, 1e-45, 2.0**-127, 2.0**-126, 65504.0, 3.39e38, 1e30)
SPECIAL += (math.inf, -math.inf, math.nan)

shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 64, 100, 128, 130, 200, 300]), max_size=3).filter(
    lambda shape: math.prod(shape) <= 40_000
)


def round_trip(x: torch.Tensor, codec: Codec) -> torch.Tensor:
    return dequantize(quantize(x, codec), codec, x.dtype)


def heavy_tailed(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Student's t with 2 degrees of freedom: infinite variance, outliers in every row."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    return normal[0] / ((normal[1] ** 2 + normal[2] ** 2) / 2).sqrt()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def check(x: torch.Tensor, codec: Codec) -> None:
    """Layout and scales of what is stored, and every value that comes back, in fp64.

    A scale is the smallest power of two with which the block's largest finite value fits. Finite
    values are then as close as float8 allows; all others come back as NaN.
    """
    stored = quantize(x, codec)
    assert stored.data.dtype == codec.float8
    assert stored.scales.shape == codec.scales_shape(x.shape)
    assert stored.data.is_contiguous()
    assert sum(t.untyped_storage().nbytes() for t in stored) == codec.nbytes(x.shape)
    y = dequantize(stored, codec, x.dtype)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    if not x.numel():
        return
    finite = torch.where(x.isfinite(), x.double(), 0.0)
    exponents, scales = [], torch.empty_like(finite)
    width = x.shape[-1] if x.dim() else 1
    for row, scales_of_row in zip(finite.view(-1, width), scales.view(-1, width), strict=True):
        blocks = zip(row.split(codec.block), scales_of_row.split(codec.block), strict=True)
        for block, scale in blocks:
            mantissa, exponent = math.frexp(block.abs().max().item() / LARGEST[codec.dtype])
            exponents.append(max(1, exponent - (mantissa == 0.5) + 127) if mantissa else 1)
            scale.fill_(2.0 ** (exponents[-1] - 127))
    assert stored.scales.flatten().tolist() == exponents
    assert y.isnan().equal(~x.isfinite())
    relative = 2.0 ** -(MANTISSA_BITS[codec.dtype] + 1) * finite.abs()
    absolute = scales * SMALLEST_STEP[codec.dtype] / 2
    # fp32 arithmetic, denormals that may be flushed, and the last rounding to x.dtype.
    info = torch.finfo(x.dtype)
    slack = info.eps * finite.abs() + max(2.0**-126, info.smallest_normal * info.eps)
    error = (torch.where(x.isfinite(), y.double(), 0.0) - finite).abs()
    assert (error <= torch.maximum(relative, absolute) + slack).all()
    assert (y[x == 0] == 0).all()


def test_layout_scales_and_values():
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        codec=st.sampled_from(FORMATS),
        shape=shapes,
        dtype=st.sampled_from(SUPPORTED_DTYPES),
        seed=st.integers(0, 9),
        exponent=st.integers(-30, 30),
        special=st.lists(st.sampled_from(SPECIAL), max_size=9),
    )
    def run(
        codec: Codec,
        shape: list[int],
        dtype: torch.dtype,
        seed: int,
        exponent: int,
        special: list[float],
    ) -> None:
        scale = 2.0 ** (exponent if dtype != torch.float16 else exponent // 4)
        x = heavy_tailed(tuple(shape), seed) * scale
        for place, value in enumerate(special if x.numel() else ()):
            x.view(-1)[place * 7 % x.numel()] = value
        check(x.to(dtype), codec)

    run()


@pytest.mark.parametrize("codec", FORMATS, ids=str)
def test_the_ends_of_the_scales(codec: Codec):
    """Where float8 ends, below the smallest scale, without values, and where a dtype ends."""
    for largest in (*(448.0, 449.0, 447.0, 3.5, 3.5000002, 1.75 * 2**-20), *SPECIAL):
        x = torch.zeros(2, 300)
        x[0, 5] = x[1] = largest
        check(x, codec)
    for shape in ((0,), (3, 0), (0, 128), ()):
        check(torch.ones(shape), codec)
    for dtype in SUPPORTED_DTYPES:
        # It rounds up to the next power of two, which none of the dtypes has.
        x = torch.full((1, 128), torch.finfo(dtype).max, dtype=dtype)
        assert torch.equal(round_trip(x, codec), x)


# Layout, dtypes.


def test_non_contiguous_input_is_neither_changed_nor_kept():
    base = normal(4, 6, 400)
    for x in (base[:, 1:3, 7:300], base.transpose(0, 2), base[..., ::3], base.permute(2, 0, 1)):
        before = x.clone()
        stored = quantize(x, Codec())
        assert torch.equal(x, before)
        own = {t.untyped_storage().data_ptr() for t in stored}
        assert base.untyped_storage().data_ptr() not in own
        expected = round_trip(x.contiguous(), Codec())
        assert torch.equal(dequantize(stored, Codec(), x.dtype), expected)


def test_bad_settings_and_other_dtypes_are_told_what_is_expected():
    bad: tuple[tuple[Any, str], ...] = (
        ({"dtype": "e3m4"}, "e4m3, e5m2"),
        ({"block": 32}, "64, 128, 256"),
        ({"block": 128.0}, "64, 128, 256"),
    )
    for keys, named in bad:
        with pytest.raises(ValueError, match=named):
            Codec(**keys)
    for dtype in (torch.float64, torch.int64, torch.float8_e4m3fn, torch.bool):
        with pytest.raises(ValueError, match="expected one of bfloat16, float16, float32"):
            quantize(torch.zeros(4).to(dtype), Codec())


# Tracing and compiling.

COMPILED = [Codec(), Codec(dtype="e5m2"), Codec(block=256)]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _compile(function: Callable[..., Any], *args: Any) -> tuple[Any, int, int]:
    """The result, how many compiled functions run, and of how many fused nodes they are made."""
    nodes: list[int] = []

    def count(fused: list[Any]) -> list[Any]:
        nodes.append(len(fused))
        return fused

    torch._dynamo.reset()
    with inductor_config.patch(_post_fusion_custom_pass=count, force_disable_caches=True):
        result, code = run_and_get_code(torch.compile(function, fullgraph=True), *args)
    functions = sum(source.count("async_compile.cpp_pybinding(") for source in code)
    return result, functions, sum(nodes)


@pytest.mark.slow  # a C++ compiler; tests/fp8/test_codec_kernels.py counts kernels of a GPU
@pytest.mark.parametrize(
    ("codec", "last"), [(Codec(), 200), *((codec, 256) for codec in COMPILED)], ids=str
)
def test_compiled_is_the_same_to_the_bit(codec: Codec, last: int):
    """With short blocks, too: pytorch issue 195582 lost them."""
    x = heavy_tailed((32, last)).bfloat16()
    x[0, 0] = math.nan
    stored, functions, nodes = _compile(quantize, x, codec)
    back, functions_back, nodes_back = _compile(dequantize, stored, codec, x.dtype)
    eager = quantize(x, codec)
    assert _same(stored.data, eager.data)
    assert _same(stored.scales, eager.scales)
    assert _same(back, dequantize(eager, codec, x.dtype))
    assert (functions, functions_back) == (1, 1)
    # One fused node is one kernel on a GPU, too: see tests/fp8/test_codec_kernels.py.
    assert nodes_back == 1
    assert (nodes == 1) == (last % codec.block == 0)


def test_no_value_is_read_on_the_host():
    """On the meta device there are no values to read, and the shapes come out all the same."""
    for codec in COMPILED:
        x = torch.empty(3, 7, 200, device="meta", dtype=torch.bfloat16)
        stored = quantize(x, codec)
        assert stored.scales.shape == codec.scales_shape(x.shape)
        assert dequantize(stored, codec, x.dtype).shape == x.shape


# DTensor, and torchao.


def test_dtensor(one_rank: None):
    local = normal(6, 300)
    x = DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Shard(1)])
    stored = quantize(x, Codec())
    y = dequantize(stored, Codec(), x.dtype)
    for one in (stored.data, y):
        assert isinstance(one, DTensor)
        assert one.placements == (Shard(1),)
    assert torch.equal(cast(DTensor, y).to_local(), round_trip(local, Codec()))


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("block", [64, 128, 256])
def test_equals_torchao_where_both_are_defined(dtype: Any, block: Any):
    """to_mx with RCEIL: contiguous, whole blocks, finite."""
    codec = Codec(dtype=dtype, block=block)
    x = heavy_tailed((16, 512)).bfloat16()
    scales, data = to_mx(x, codec.float8, block, ScaleCalculationMode.RCEIL)
    ours = quantize(x, codec)
    assert torch.equal(scales.view(torch.uint8), ours.scales)
    assert torch.equal(data.float(), ours.data.float())


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES)
def test_the_exact_codec_changes_nothing(dtype: torch.dtype):
    """Not NaN, infinity or what is smaller than a scale, in rows of a larger tensor neither."""
    values = torch.tensor([float("nan"), float("-inf"), 1e-40, -0.0, 3.0e38, 1 / 3, 7.0, 0.1])
    for x in (values.to(dtype), values.view(4, 2).to(dtype).T, values[:0].to(dtype)):
        stored = quantize(x, Codec("exact"))
        before = x.clone()
        x.add_(1)  # what is stored is a copy
        back = dequantize(stored, Codec("exact"), dtype)
        assert back.shape == x.shape
        assert back.dtype == dtype
        assert torch.equal(back.view(torch.uint8), before.contiguous().view(torch.uint8))
