"""The machine code of the codec that runs: what the store compiles, for GPUs that are not here."""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch.utils._pytree import tree_map
from triton.compiler.errors import CompilationError

from tests.helpers.gpu_kernels import GpuCompiler, Kernel
from titan_ext.components import early_scores, exchange
from titan_ext.fp8 import Codec, SavedTensorStore, codec
from titan_ext.fsdp import collectives

# An H100's 132 multiprocessors start 128 instructions of a thread in each of 1.76e9 cycles a
# second, and its memory moves 3.35e12 bytes; the codec moves 3 a value.
INSTRUCTIONS_UNTIL_BOUND_BY_ARITHMETIC = 132 * 128 * 1.76e9 / (3.35e12 / (3 + 1 / 128))

WIDTHS = (2048, 640)


def stored(x: torch.Tensor, settings: Codec) -> tuple[list[Kernel], list[Kernel]]:
    """The kernels with which the store packs ``x`` and unpacks it; [] where it has them already."""
    compiler = codec._BACKEND
    assert isinstance(compiler, GpuCompiler)
    store = SavedTensorStore(settings, policy=lambda x: None)
    before = len(compiler.graphs)
    store.unpack(store.pack(x))
    assert codec._warned == []
    new = compiler.graphs[before:]
    return (new[0], new[1]) if new else ([], [])


def with_compiler(function: Callable[[], Any]) -> Any:
    codec._compiled.cache_clear()
    torch._dynamo.reset()
    try:
        state: dict[str, Any] = {"_warned": [], "_not_compiled": set(), "_kinds": defaultdict(set)}
        state |= {"_BACKEND": GpuCompiler(), "compiles_for": lambda device: True}
        with mock.patch.multiple(codec, **state):
            return function()
    finally:
        codec._compiled.cache_clear()
        torch._dynamo.reset()


@functools.cache
def kernels(
    dtype: Any = "e4m3", widths: tuple[int, ...] = WIDTHS
) -> dict[int, tuple[list[Kernel], list[Kernel]]]:
    """By width, all in one process, as in a run."""

    def run() -> dict[int, tuple[list[Kernel], list[Kernel]]]:
        shapes = {width: torch.randn(8192, width).bfloat16() for width in widths}
        return {width: stored(x, Codec(dtype=dtype)) for width, x in shapes.items()}

    return with_compiler(run)


def check(
    kernel: Kernel,
    compute_capability: int = 90,
    *,
    most: float = INSTRUCTIONS_UNTIL_BOUND_BY_ARITHMETIC,
) -> None:
    """Memory is the limit, in that configuration that the autotuner would find the fastest."""
    configurations = kernel.machine_code(compute_capability)
    assert not any(code.spills for code in configurations)
    code = min(configurations, key=lambda code: code.instructions_per_value)
    assert code.instructions_per_value < most
    # bf16 by 16 bytes a thread, float8 by 8 or 16; a scale for 8 values or more.
    accesses = [op for op in code.opcodes.elements() if op.startswith(("LDG", "STG"))]
    wide = [op for op in accesses if op.endswith((".128", ".64"))]
    assert any(op.endswith(".128") for op in wide)
    assert (len(accesses) - len(wide)) * 8 <= code.values_per_thread


@pytest.mark.parametrize(
    "width", [2048, *(pytest.param(n, marks=pytest.mark.slow) for n in (64, 576))]
)
def test_memory_is_the_limit(width: int):
    """The last block of a row of 576, as latent attention has it, is short."""
    store, load = kernels(widths=WIDTHS if width in WIDTHS else (width,))[width]
    short = width > 128 and width % 128
    assert len(store) == (2 if short else 1), "whole blocks, and the short ones"
    assert len(load) == 1
    for kernel in store + load:
        check(kernel)
        assert "ks0" not in kernel.source, "only the number of rows may vary"
    if width in WIDTHS:
        assert kernels()[640] == ([], []), "whole blocks of any width share kernels"


def new_kernels(function: Callable[[], Any]) -> list[Kernel]:
    compiler = codec._BACKEND
    assert isinstance(compiler, GpuCompiler)
    before = len(compiler.graphs)
    function()
    assert codec._warned == []
    return [kernel for graph in compiler.graphs[before:] for kernel in graph]


@pytest.mark.parametrize("width", [7168, pytest.param(2880, marks=pytest.mark.slow)])
def test_rows_that_are_exchanged(width: int):
    """What arrives is decoded out of packed rows."""

    def run() -> None:
        packed_RW = exchange.pack(torch.randn(512, width).bfloat16())
        # Else torch copies rows a byte at a time: fast_gather_kernel_eligible in
        # ATen/native/cuda/IndexKernelUtils.h, CatArrayBatchedCopy_vectorized in Shape.cu.
        assert packed_RW.shape[1] % 16 == width % 16 == 0
        sorted_RW = packed_RW.index_select(0, torch.arange(512).flip(0))
        exchange.unpack(sorted_RW, width, torch.bfloat16)

    kernels = with_compiler(lambda: new_kernels(run))
    assert len(kernels) == (3 if width % 128 else 2)
    check(kernels[-1])


@pytest.mark.parametrize("ranks", [16, pytest.param(8, marks=pytest.mark.slow)])
def test_weights_that_are_gathered(ranks: int):
    """Of 16 ranks two are decoded at once, out of rows; of 8 one. A norm is between matrices."""
    shard = [(2047 * 128, True), (72, False), (577 * 128, True)]

    def run() -> None:
        gather = collectives.Float8AllGather(shard)
        output = torch.randn(ranks * sum(n for n, _ in shard)).bfloat16()
        mine = output[-len(output) // ranks :]
        with mock.patch.object(dist, "all_gather_into_tensor"):
            gather(output, mine, mock.MagicMock(size=lambda: ranks))

    kernels = with_compiler(lambda: new_kernels(run))
    assert len(kernels) == (3 if ranks > 8 else 2), "one decoder for each width of rows"
    for kernel in kernels[1:] if ranks > 8 else kernels:
        check(kernel)


def test_early_scores_in_a_compiled_block():
    """One kernel from the GEMMs of tokens to the last: the product with scores costs no other."""

    def hidden(gate_RF: torch.Tensor, up_RF: torch.Tensor, scores_R: torch.Tensor) -> torch.Tensor:
        return early_scores.scaled(nnf.silu(gate_RF) * up_RF, scores_R)

    compiler = GpuCompiler()
    gate_RF, up_RF = torch.randn(2, 4096, 1408, dtype=torch.bfloat16)
    torch._dynamo.reset()
    torch.compile(hidden, backend=compiler)(gate_RF, up_RF, torch.rand(4096))
    torch._dynamo.reset()
    ((kernel,),) = compiler.graphs
    check(kernel, most=2 * INSTRUCTIONS_UNTIL_BOUND_BY_ARITHMETIC)  # it moves 6 bytes a value


@pytest.mark.slow
def test_blackwell_and_an_a100():
    """An A100 converts to e5m2 only. With e4m3 the codec runs there as eager operations."""
    for kernel in (*kernels("e5m2", WIDTHS[:1])[2048][0], *kernels("e5m2", WIDTHS[:1])[2048][1]):
        check(kernel, 80)
    for kernel in (*kernels()[2048][0], *kernels()[2048][1]):
        check(kernel, 100)
        with pytest.raises(CompilationError, match="fp8e4nv not supported in this architecture"):
            kernel.machine_code(80)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "converts", "most"), [("gfx942", False, 60), ("gfx950", True, 12.5)]
)
def test_amd(arch: str, converts: bool, most: float):
    """The MI300's float8 has another bias (fnuz), so its conversions are of no use: software.

    About 23 instructions a value are free there, so 53 take 2 to 3 times the time of a copy.
    """
    for kernel in (*kernels()[2048][0], *kernels()[2048][1]):
        configurations = kernel.amd_code(arch)
        assert not any(code.spills for code in configurations)
        for code in configurations:
            assert any("_fp8" in opcode for opcode in code.opcodes) == converts
        code = min(configurations, key=lambda code: code.instructions_per_value)
        assert code.instructions_per_value < most
        assert any(op.startswith("global_") and "dwordx" in op for op in code.opcodes), "wide"


class _OnlyWrites(GpuCompiler):
    """A graph's results have shapes and no values, so that tensors of gigabytes are never read."""

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: Any, options: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        super().__call__(graph, inputs, options)

        def run(*arguments: Any) -> Any:
            shapes = graph(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments))
            return tree_map(lambda x: torch.empty(x.shape, dtype=x.dtype), shapes)

        return run


def test_indices_beyond_2_31():
    """A kernel for small tensors has int32 indices, and is not the one that large tensors get.

    16 x 4096 tokens of 7168 for 8 experts are 3.8e9 values. What arrives packed lies in rows of
    values and scales: there, offsets pass 2^31 before the number of values does.
    """
    width, packed = 2048, 2048 + 16
    counts = [512, 2**31 // packed + 1, 2**31 // width + 1]
    assert counts[1] * width < 2**31 < counts[1] * packed
    name = codec.codec_name(Codec())

    def of_rows(rows: int) -> list[list[Kernel]]:
        compiler = codec._BACKEND
        assert isinstance(compiler, GpuCompiler)
        before = len(compiler.graphs)
        x = torch.empty(rows, width, dtype=torch.bfloat16)
        stored = torch.ops.titan_ext.float8_quantize(x, name)
        torch.ops.titan_ext.float8_dequantize(*stored, name, x.dtype)
        arrived = torch.empty(rows, packed, dtype=torch.uint8)
        rows_of_it = arrived[:, :width].view(torch.float8_e4m3fn), arrived[:, width:]
        torch.ops.titan_ext.float8_dequantize(*rows_of_it, name, x.dtype)
        return compiler.graphs[before:]

    with (
        mock.patch(f"{__name__}.GpuCompiler", _OnlyWrites),
        # Eager operations would fill gigabytes.
        mock.patch.object(codec, "_warn_of_eager", side_effect=AssertionError),
    ):
        small, between, large = with_compiler(lambda: [of_rows(rows) for rows in counts])

    def are_long(graphs: list[list[Kernel]]) -> list[bool]:
        return [any(".to(tl.int64) * XBLOCK" in k.source for k in graph) for graph in graphs]

    assert are_long(small) == [False, False, False]
    assert are_long(between) == [True], "of packed rows alone"
    assert are_long(large) == [True, True], "the last has its kernel"
