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

from tests.helpers.fp8_activations import block_activations
from titan_ext.fp8.codec import SUPPORTED_DTYPES, Codec, dequantize, quantize

FORMATS = [
    Codec(dtype=dtype, block=block)  # pyrefly: ignore[bad-argument-type]
    for dtype in ("e4m3", "e5m2")
    for block in (64, 128, 256)
]
MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}
SMALLEST_STEP = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}

codecs = st.sampled_from(FORMATS)
dtypes = st.sampled_from(SUPPORTED_DTYPES)
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 64, 100, 128, 130, 200, 300]), max_size=3).filter(
    lambda shape: math.prod(shape) <= 40_000
)
quick = settings(max_examples=40, deadline=None, derandomize=True)


def round_trip(x: torch.Tensor, codec: Codec) -> torch.Tensor:
    return dequantize(quantize(x, codec), codec, x.dtype)


def heavy_tailed(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Student's t with 2 degrees of freedom: infinite variance, outliers in every row."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    return normal[0] / ((normal[1] ** 2 + normal[2] ** 2) / 2).sqrt()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_rms(y: torch.Tensor, x: torch.Tensor) -> float:
    return ((y.double() - x.double()).norm() / x.double().norm()).item()


def largest_of_block(x: torch.Tensor, codec: Codec) -> torch.Tensor:
    """For each value of ``x``, the largest finite magnitude of its block: loops, in fp64."""
    magnitude = torch.where(x.isfinite(), x.double().abs(), 0.0)
    rows = magnitude.reshape(-1, x.shape[-1] if x.dim() else 1)
    for piece in rows.split(codec.block, dim=-1):
        piece.copy_(piece.amax(-1, keepdim=True).expand_as(piece))
    return rows.reshape(x.shape)


def check_error_bound(x: torch.Tensor, codec: Codec) -> None:
    """No value is further off than float8 with the right scale of its own block allows."""
    y = round_trip(x, codec)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    relative = 2.0 ** -(MANTISSA_BITS[codec.dtype] + 1) * x.double().abs()
    # A scale of twice the smallest possible is the coarsest power of two.
    scale = largest_of_block(x, codec) / LARGEST[codec.dtype] * 2
    absolute = scale.clamp(min=2.0**-126) * SMALLEST_STEP[codec.dtype] / 2
    # fp32 arithmetic, denormals that may be flushed, and the last rounding to x.dtype.
    slack = torch.finfo(x.dtype).eps * x.double().abs() + max(2.0**-126, _tiny(x.dtype))
    assert ((y.double() - x.double()).abs() <= torch.maximum(relative, absolute) + slack).all()


def _tiny(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def check_scale_bytes(x: torch.Tensor, codec: Codec) -> None:
    """The smallest power of two that the block's largest value, so divided, does not exceed."""
    stored = quantize(x, codec).scales
    exponents = []
    for row in x.double().reshape(-1, x.shape[-1]):
        for block in row.split(codec.block_size(x.shape)):
            mantissa, exponent = math.frexp(block.abs().max().item() / LARGEST[codec.dtype])
            exponents.append(exponent - (mantissa == 0.5) + 127)
    assert stored.flatten().tolist() == exponents


def test_the_round_trip_error_is_bounded():
    @quick
    @given(codec=codecs, shape=shapes, dtype=dtypes, seed=st.integers(0, 9), e=st.integers(-30, 30))
    def check(codec: Codec, shape: list[int], dtype: torch.dtype, seed: int, e: int) -> None:
        x = (
            heavy_tailed(tuple(shape), seed) * 2.0 ** (e if dtype != torch.float16 else e // 4)
        ).to(dtype)
        if x.numel():
            check_error_bound(x, codec)
        else:
            assert round_trip(x, codec).shape == x.shape

    check()


def test_special_values_anywhere():
    """Finite stays finite, zero stays zero, everything else becomes NaN."""
    infinite = (math.inf, -math.inf, math.nan)
    finite = (0.0, -0.0, 1.0, -3e-39, 1e-45, 2.0**-126, 65504.0, 3.39e38, 1e30)
    values = st.sampled_from((*finite, *infinite))

    @quick
    @given(codec=codecs, dtype=dtypes, values=st.lists(values, min_size=1, max_size=200))
    def check(codec: Codec, dtype: torch.dtype, values: list[float]) -> None:
        x = torch.tensor(values, dtype=torch.float64).to(dtype)
        y = round_trip(x, codec)
        assert y.isnan().equal(~x.isfinite())
        assert y[x.isfinite()].isfinite().all()
        assert (y[x == 0] == 0).all()

    check()


@pytest.mark.parametrize("codec", FORMATS, ids=str)
def test_nan_and_infinity(codec: Codec):
    """What is not finite comes back as NaN, and its neighbours as if it were not there."""
    x = normal(4, 256)
    x[0, 3], x[1, 200], x[2, 7] = math.nan, math.inf, -math.inf
    y = round_trip(x, codec)
    assert y.isnan().equal(~x.isfinite())
    without = torch.where(x.isfinite(), x, 0.0)
    clean = round_trip(without, codec)
    assert torch.equal(y[x.isfinite()], clean[x.isfinite()])


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_the_largest_value_of_a_dtype_comes_back_finite(dtype: torch.dtype):
    """It rounds up to the next power of two, which none of the dtypes has."""
    x = torch.full((1, 128), torch.finfo(dtype).max, dtype=dtype)
    assert torch.equal(round_trip(x, Codec()), x)


@pytest.mark.parametrize("codec", FORMATS, ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-45, -3e-39, 2.0**-127, 2.0**-126, 2.0**-120])
def test_zeros_denormals_and_the_smallest_scale(codec: Codec, value: float):
    x = torch.full((2, 128), value)
    stored = quantize(x, codec)
    assert stored.scales.unique().tolist() == [1]  # 2^-126
    y = dequantize(stored, codec, x.dtype)
    assert ((y - x).double().abs() <= x.double().abs().clamp(max=2.0**-126)).all()
    assert (y[x == 0] == 0).all()


@pytest.mark.parametrize("codec", FORMATS, ids=str)
def test_scale_bytes_and_error_of_heavy_tails(codec: Codec):
    x = heavy_tailed((6, 300)).bfloat16()
    check_error_bound(x, codec)
    check_scale_bytes(x, codec)


@pytest.mark.parametrize("largest", [448.0, 449.0, 447.0, 3.5, 3.5000002, 1.75 * 2**-20])
def test_the_scale_turns_over_exactly_where_float8_ends(largest: float):
    x = torch.zeros(1, 128)
    x[0, 5] = largest
    check_scale_bytes(x, Codec())


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_storing_twice_changes_nothing(dtype: Any):
    codec = Codec(dtype=dtype)
    once = round_trip(heavy_tailed((8, 500)).float(), codec)
    assert torch.equal(round_trip(once, codec), once)


# Accuracy, as docs/float8.md has it.


@pytest.mark.parametrize(
    ("dtype", "expected"), [("e4m3", 0.0266), ("e5m2", 0.0530)], ids=["e4m3", "e5m2"]
)
@pytest.mark.parametrize("tails", ["normal", "heavy"])
def test_relative_rms_of_random_values(dtype: Any, expected: float, tails: str):
    """By block: in the norm of a heavy-tailed tensor a few values are all that counts."""
    x = normal(256, 2048) if tails == "normal" else heavy_tailed((256, 2048)).bfloat16()
    y = round_trip(x, Codec(dtype=dtype))
    error, size = ((t.double().reshape(-1, 128)).norm(dim=-1) for t in (y - x, x))
    assert (error / size).mean().item() == pytest.approx(expected, rel=0.1)


def test_relative_rms_of_real_activations():
    """Of everything that the MoE blocks of the debug model save."""
    activations = block_activations()
    assert len(activations) >= 8
    for name, x in activations.items():
        check_error_bound(x, Codec())
        assert relative_rms(round_trip(x, Codec()), x) < 0.032, name
        assert relative_rms(round_trip(x, Codec(dtype="e5m2")), x) < 0.064, name


@pytest.mark.parametrize(
    ("outlier", "e4m3", "e5m2"), [(1e3, 0.03, 0.06), (1e5, 0.15, 0.06), (1e6, 1.01, 0.06)]
)
def test_neighbours_of_an_outlier(outlier: float, e4m3: float, e5m2: float):
    x = normal(512, 128, dtype=torch.float32)
    x[:, 17] = outlier
    keep = torch.arange(128) != 17
    for codec, most in ((Codec(), e4m3), (Codec(dtype="e5m2"), e5m2)):
        assert relative_rms(round_trip(x, codec)[:, keep], x[:, keep]) <= most


# Bytes, layout, dtypes.


def test_stored_bytes_are_counted_right():
    @quick
    @given(codec=codecs, shape=shapes)
    def check(codec: Codec, shape: list[int]) -> None:
        x = torch.ones(shape)
        stored = quantize(x, codec)
        assert stored.data.dtype == codec.float8
        assert stored.scales.shape == codec.scales_shape(x.shape)
        assert stored.data.is_contiguous()
        assert sum(t.untyped_storage().nbytes() for t in stored) == codec.nbytes(x.shape)

    check()


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


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"dtype": "e3m4"}, "e4m3, e5m2"),
        ({"block": 32}, "64, 128, 256"),
        ({"block": 128.0}, "64, 128, 256"),
    ],
)
def test_a_bad_setting_is_told_what_is_expected(kwargs: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=named):
        Codec(**kwargs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float8_e4m3fn, torch.bool])
def test_other_dtypes_are_refused(dtype: torch.dtype):
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
