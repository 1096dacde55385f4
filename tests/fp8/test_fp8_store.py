"""The saved-tensor store: what it holds, what it lets go, and what backward gets back."""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch._C._distributed_c10d import Work, _register_work
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.fp8_activations import debug_model, tokens
from titan_ext.base.tensors import local_tensor, plain_tensors
from titan_ext.fp8 import Codec, MemoryRow, SavedTensorStore, codec, dequantize, quantize
from titan_ext.fp8.offload import Offload
from titan_ext.fp8.saved_tensors import keep_exact

N = 2048


def everything(x: torch.Tensor) -> str | None:
    """A policy: nothing stays exact."""
    return None


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def gradient(x: torch.Tensor) -> Any:
    assert x.grad is not None
    return x.grad


def rows(store: SavedTensorStore) -> dict[str, MemoryRow]:
    return {row.treatment: row for row in store.memory_report}


def quantized(x: torch.Tensor, codec: Codec | None = None) -> torch.Tensor:
    codec = codec or Codec()
    return dequantize(quantize(x, codec), codec, x.dtype)


def live_storages(but: Iterable[int] = ()) -> dict[int, int]:
    """Every storage that a Python tensor reaches, by address, and its bytes: asked of the GC."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    parts = [part for t in tensors if t.layout is torch.strided for part in plain_tensors(t)]
    storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in parts}
    return {key: size for key, size in storages.items() if key not in set(but)}


# What backward gets.


def test_what_backward_gets_and_what_the_report_says():
    x = normal(16, N).requires_grad_()
    store = SavedTensorStore()
    with store.hooks("square"):
        y = x * x
    (row,) = store.memory_report
    assert row == MemoryRow("square", "float8 e4m3", 1, 16 * (N + N // 128), 16 * N * 2)
    assert "float8 e4m3, square" in str(store.memory_report)
    y.sum().backward()
    assert torch.equal(gradient(x), 2 * quantized(x.detach()))
    assert not store.memory_report, "freed by backward"


# The report against the storages that are really there.


def test_the_memory_report_equals_the_live_storages_of_a_model():
    """The debug model, forward: what the graph holds beyond the model is what the report says."""
    model, inputs = debug_model(), tokens()
    store = SavedTensorStore(modules=[model])
    leaf = model.tok_embeddings(inputs).detach().requires_grad_()
    before = live_storages()
    h = leaf
    for name, block in model.layers.items():
        with store.hooks(name):
            h = block(h, None, None)
    graph = h.grad_fn
    del h
    report = store.memory_report
    assert sum(live_storages(but=before).values()) == report.nbytes > 0

    moe = {row.treatment: row for row in report if row.name == "1"}
    assert moe["float8 e4m3"].nbytes < 0.51 * moe["float8 e4m3"].original_nbytes
    assert {"exact: int64", "exact: float32", "passed through: parameter or buffer"} <= set(moe)
    assert moe["passed through: parameter"].nbytes == 0
    assert moe["passed through: parameter"].entries > 10

    del graph
    assert store.memory_report.nbytes == 0
    assert live_storages(but=before) == {}


# Parameters.


def test_parameters_buffers_and_views_of_them_are_never_packed():
    layer = nn.Linear(128, 128, bias=False).bfloat16()
    layer.register_buffer("rope", rope := normal(64, 128))
    store = SavedTensorStore(modules=[layer], policy=everything)
    w = layer.weight
    views = [w, w.t(), w.detach(), w.detach().t(), w.detach()[3:], w.data.view(-1), rope[:32]]
    entries = [store.pack(view) for view in views]
    assert store.memory_report.nbytes == 0
    for view, entry in zip(views, entries, strict=True):
        back = store.unpack(entry)
        assert back.data_ptr() == view.data_ptr()
        assert torch.equal(back, view)


def test_a_parameter_put_in_place_later_is_known():
    """As FSDP does, before each forward."""
    layer = nn.Linear(128, 128, bias=False).bfloat16()
    store = SavedTensorStore(modules=[layer], policy=everything)
    store.pack(normal(8, 128))
    layer.weight = nn.Parameter(normal(128, 128))
    entry = store.pack(layer.weight.detach().t())
    assert entry.treatment == "passed through: parameter or buffer"


# Expanded views, other strides, duplicates.


@pytest.mark.parametrize(
    ("x", "treatment", "nbytes"),
    [
        (normal(64, 128).unsqueeze(1).expand(64, 50, 128), "float8 e4m3", 64 * 129),
        # Along another dimension.
        (normal(256).unsqueeze(-1).expand(256, 64), "float8 e4m3", 256 + 2),
        # Windows that overlap.
        (normal(1000).unfold(0, 128, 8), "exact: would not shrink", 2 * 1000),
    ],
    ids=["rows", "columns", "windows"],
)
def test_an_expanded_view_costs_its_storage(x: torch.Tensor, treatment: str, nbytes: int):
    store = SavedTensorStore(policy=everything)
    entry = store.pack(x)
    assert (entry.treatment, store.memory_report.nbytes) == (treatment, nbytes)
    back = store.unpack(entry)
    assert back.stride() == x.stride()
    assert (back - x).norm() <= (0.03 * x.norm() if "float8" in treatment else 0)


@pytest.mark.parametrize(
    "view",
    [
        lambda b: b.transpose(0, 2),
        lambda b: b.permute(1, 2, 0),
        lambda b: b[:, 1:3],
        lambda b: b[..., 5:133],
        lambda b: b[..., ::2],
        lambda b: b[0, 0],
        lambda b: b.unsqueeze(1),
    ],
)
def test_a_view_comes_back_and_does_not_keep_its_base(view: Any):
    base = normal(6, 8, 256)
    expected, stride = view(base).clone(), view(base).stride()
    store = SavedTensorStore(policy=everything)
    storage = StorageWeakRef(base.untyped_storage())
    entry = store.pack(view(base))
    dense = view(base).numel() == base.numel()
    del base
    assert storage.expired(), "the store keeps the base alive"
    back = store.unpack(entry)
    assert back.shape == expected.shape
    assert (back - expected).float().norm() < 0.03 * expected.float().norm()
    if dense:
        assert back.stride() == stride


def test_a_duplicate_is_decoded_once():
    """For a backward; the next one, of a graph that is kept, decodes it again."""
    store, x = SavedTensorStore(), normal(16, N)
    entry = store.pack(x)
    assert store.pack(x.detach()) is entry
    for _ in range(2):
        first = store.unpack(entry)
        storage = StorageWeakRef(first.untyped_storage())
        held = rows(store)["float8 e4m3"].nbytes
        assert held == Codec().nbytes(x.shape) + first.nbytes
        assert store.unpack(entry).data_ptr() == first.data_ptr()
        del first
        assert storage.expired(), "the last unpack lets go of it"


def test_a_duplicate_that_was_written_to_is_decoded_again():
    store, x = SavedTensorStore(), normal(16, N)
    entry = store.pack(x)
    store.pack(x)
    store.unpack(entry).zero_()
    assert torch.equal(store.unpack(entry), quantized(x))


def test_views_share_one_copy():
    store = SavedTensorStore(policy=everything)
    x = normal(128, 256)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[1:],
        lambda x: x.view(-1)[3:],
        lambda x: x.view(4, 32, 2, 128).transpose(1, 2),
        lambda x: x[:, 5:133],
        lambda x: x.unsqueeze(0).expand(3, 128, 256),
    ]
    entries = [store.pack(view(x)) for view in views]
    assert len(set(map(id, entries))) == len(entries)
    assert rows(store)["float8 e4m3"].entries == 1
    assert store.memory_report.nbytes == Codec().nbytes(x.shape)
    values = quantized(x)
    for view, entry in zip(views, entries, strict=True):
        assert torch.equal(store.unpack(entry), view(values))
    del entries[0], entry
    assert store.memory_report.nbytes == Codec().nbytes(x.shape), "decoded values are freed"
    entries.clear()
    assert not store.memory_report


def test_what_does_not_share():
    """Another dtype or version of a storage; more of it than is stored; a view with gaps."""
    store = SavedTensorStore(policy=everything)
    x = normal(128, 256)
    entries = [store.pack(v) for v in (x[:, :128], x[:64], x, x.view(torch.float16))]
    x.mul_(2)
    entries.append(store.pack(x))
    assert rows(store)["float8 e4m3"].entries == len(entries)
    assert torch.equal(store.unpack(entries[-1]), quantized(x))


def test_a_view_that_negates_does_not_share():
    store = SavedTensorStore(policy=everything)
    x = normal(128, 256, dtype=torch.float32)
    y = torch.complex(x, x)
    kept = store.pack(torch.view_as_real(y))
    entry = store.pack(y.conj().imag)
    assert (store.unpack(entry) + x).norm() < 0.03 * x.norm()
    assert (store.unpack(kept)[..., 1] - x).norm() < 0.03 * x.norm()


def test_what_is_kept_anyhow_is_not_stored_again():
    store = SavedTensorStore()
    x = normal(128, 256)
    entries = [store.pack(x, exact="attention"), store.pack(x.t())]
    assert store.memory_report.nbytes == x.nbytes
    assert torch.equal(store.unpack(entries[1]), x.t())
    entries.clear()
    entries.append(store.pack(x))
    assert store.memory_report.nbytes == Codec().nbytes(x.shape)


def test_a_new_tensor_at_an_old_address_is_not_a_duplicate():
    """The allocator reuses memory at once; the entry of the old tensor is still alive."""
    store = SavedTensorStore()
    entries, addresses = [], set()
    for value in range(50):
        x = torch.full((16, N), value % 15 + 1.0, dtype=torch.bfloat16)
        addresses.add((x.untyped_storage()._cdata, x.data_ptr()))
        entries.append(store.pack(x))
        del x
    for value, entry in enumerate(entries):
        assert (store.unpack(entry) == value % 15 + 1).all()
    assert len({data for _, data in addresses}) < 50, "memory was never reused: proves nothing"


# In-place changes.


@pytest.mark.parametrize("is_dtensor", [False, True])
def test_in_place_after_save_raises_for_what_is_kept_by_reference(is_dtensor: bool, one_rank: None):
    x = normal(16, 64, dtype=torch.float32)
    if is_dtensor:
        x = DTensor.from_local(x, init_device_mesh("cpu", (1,)), [Shard(0)])
    store = SavedTensorStore()
    with store.hooks():
        y = x.requires_grad_().exp()
    # As autograd says it.
    why = r"modified by an inplace operation: .* is at version 1; expected version 0 instead"
    for saved in (x.exp(), y):
        with pytest.raises(RuntimeError, match=why):
            _mul_in_place_then_backward(saved)


def test_in_place_after_save_does_not_reach_float8():
    """Documented: the copy is of the value at the time of saving, so the gradient is right."""
    x = normal(16, N).requires_grad_()
    store = SavedTensorStore()
    with store.hooks():
        y = x.exp()
    saved = quantized(y.detach())
    _mul_in_place_then_backward(y)
    assert torch.equal(gradient(x), 2 * saved)


def _mul_in_place_then_backward(y: torch.Tensor) -> None:
    y.mul_(2)
    y.sum().backward()


def test_a_stored_output_is_no_reference_cycle():
    x = normal(64, dtype=torch.float32).requires_grad_()
    store = SavedTensorStore()
    gc.disable()
    try:
        with store.hooks():
            y = x.exp()
        assert store.memory_report.nbytes == 256
        del y
        assert store.memory_report.nbytes == 0, "only the garbage collector would free it"
    finally:
        gc.enable()


# One kernel each way.


class _Compiler:
    """A backend of torch.compile that compiles nothing and counts."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: Any, options: Any
    ) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Compiler]:
    """Compiles the codec, for a CPU too."""
    compiler = _Compiler()
    monkeypatch.setattr(codec, "_BACKEND", compiler)
    monkeypatch.setattr(codec, "_warned", [])
    monkeypatch.setattr(codec, "_not_compiled", set())
    monkeypatch.setattr(codec, "_kinds", defaultdict(set))
    monkeypatch.setattr(codec, "compiles_for", lambda device: True)
    codec._compiled.cache_clear()
    torch._dynamo.reset()
    yield compiler
    codec._compiled.cache_clear()
    torch._dynamo.reset()


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_one_kernel_each_way_under_a_dispatch_mode(compiler: _Compiler):
    """A memory tracker, for example, sees one operation each way."""
    x = normal(16, N).requires_grad_()
    store = SavedTensorStore()
    with _Operations() as active, store.hooks():
        x.exp().sum().backward()
    assert codec._warned == []
    assert (compiler.graphs, compiler.runs) == (2, 2)
    assert torch.equal(gradient(x), quantized(x.detach().exp()))
    ours = [name for name in active.names if "float8" in name]
    assert ours == ["titan_ext.float8_quantize.default", "titan_ext.float8_dequantize.default"]


def test_shapes_share_kernels(compiler: _Compiler):
    """A kernel each way for whole blocks, and one for each other width and row stride."""
    store = SavedTensorStore(policy=everything)
    whole = normal(64, 128), normal(1, 128), normal(2, 4096), normal(0, 128)
    others = normal(64, 576), normal(9, 576), normal(64, 128)[:, 1:], normal(9, 128)[:, 1:]
    for x in (*whole, *others):
        assert torch.equal(store.unpack(store.pack(x)), quantized(x)), x.shape
    assert codec._warned == []
    assert compiler.graphs == 2 * (3 + 1)  # whole blocks, 576, slices of 127; one row apart


@pytest.mark.slow
def test_a_width_that_is_new_at_every_step_does_not_compile_at_every_step(
    compiler: _Compiler, monkeypatch: pytest.MonkeyPatch
):
    """Tokens along the last axis, for example, where the router decides how many."""
    monkeypatch.setattr(codec, "_MOST_KINDS", 2)
    store = SavedTensorStore(policy=everything)
    for width in range(130, 138):
        x = normal(16, width)
        assert torch.equal(store.unpack(store.pack(x)), quantized(x))
    assert codec._warned == []
    assert 6 <= compiler.graphs <= 10


@pytest.mark.parametrize(
    "reason", ["torch.compile is switched off", "no compiler here", "no cache to write to"]
)
def test_an_eager_codec_says_why(
    reason: str, compiler: _Compiler, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    def refuse(graph: Any, inputs: Any, options: Any) -> Any:
        if "cache" in reason:
            return run  # and no error of Dynamo's
        raise RuntimeError(reason)

    def run(*_: Any) -> Any:
        raise OSError(reason)

    monkeypatch.setattr(codec, "_BACKEND", refuse)
    x = normal(16, N)
    store = SavedTensorStore()
    with torch.compiler.set_stance("force_eager" if "off" in reason else "default"):
        for factor in (1, 2):
            assert torch.equal(store.unpack(store.pack(x * factor)), quantized(x * factor))
    warnings = [record.getMessage() for record in caplog.records if "float8" in record.msg]
    assert len(warnings) == 1
    assert "a dozen kernels instead of one" in warnings[0]
    assert reason in warnings[0]


@pytest.mark.parametrize(
    "x",
    [normal(N, 16).t(), normal(8, 300)[:, :200], normal(0, N)],
    ids=lambda x: str(tuple(x.shape)),
)
def test_fake_tensors_have_the_shapes_of_real_ones(compiler: _Compiler, x: torch.Tensor):
    ops = torch.ops.titan_ext
    name = codec.codec_name(Codec())

    def stored(x: torch.Tensor) -> list[Any]:
        data, scales = ops.float8_quantize(x, name)
        back = ops.float8_dequantize(data, scales, name, x.dtype)
        return [(t.shape, t.stride(), t.dtype) for t in (data, scales, back)]

    with FakeTensorMode() as mode:
        fake = stored(mode.from_tensor(x))
    assert compiler.graphs == 0
    assert fake == stored(x)


# Policy and dtypes.


@pytest.mark.parametrize(
    ("x", "treatment"),
    [
        (normal(16, N), "float8 e4m3"),
        (normal(16, N, dtype=torch.float16), "float8 e4m3"),
        (normal(16, N, dtype=torch.float32), "exact: float32"),
        (normal(16, N, dtype=torch.float64), "exact: float64"),
        (normal(64, 64), "float8 e4m3"),
        (normal(64, 63), "exact: small"),
        (torch.arange(10_000), "exact: int64"),
        (torch.zeros(10_000, dtype=torch.bool), "exact: bool"),
        (torch.zeros(10_000, dtype=torch.complex64), "exact: complex64"),
        (torch.zeros(0, 128, dtype=torch.bfloat16), "exact: small"),
        (torch.zeros((), dtype=torch.bfloat16), "exact: small"),
        (torch.eye(8).to_sparse(), "passed through: sparse"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_treatment_by_dtype_and_size(x: torch.Tensor, treatment: str):
    store = SavedTensorStore()
    entry = store.pack(x)
    assert entry.treatment == treatment
    back = store.unpack(entry)
    assert back.dtype == x.dtype
    assert back.shape == x.shape
    if treatment != "float8 e4m3":
        assert x.is_sparse or back.data_ptr() == x.data_ptr()


def test_a_policy_of_ones_own():
    store = SavedTensorStore(
        Codec(dtype="e5m2"), policy=lambda x: "wide" if x.shape[-1] > 1000 else None
    )
    kept, packed = store.pack(normal(2, 2000)), store.pack(normal(2, 500, dtype=torch.float32))
    assert kept.treatment == "exact: wide"
    assert packed.treatment == "float8 e5m2"


# Subclasses and collectives.


class _Tagged(torch.Tensor):
    """A subclass whose bytes nobody else should touch."""


def test_other_subclasses_pass_through():
    store = SavedTensorStore(policy=everything)
    x = normal(16, N).as_subclass(_Tagged)
    entry = store.pack(x)
    assert store.unpack(entry) is x
    assert rows(store)["passed through: _Tagged"].nbytes == x.untyped_storage().nbytes()


class _Arrives(Work):
    """A collective that writes its result when it is waited for."""

    def __init__(self, target: torch.Tensor, value: torch.Tensor) -> None:
        super().__init__()
        self.target, self.value, self.waits = target, value, 0

    def wait(self, timeout: Any = None) -> bool:
        self.waits += 1
        self.target.copy_(self.value)
        return True


@pytest.mark.parametrize("kind", ["plain", "async", "async in a DTensor"])
def test_a_collective_in_flight_is_waited_for(kind: str, one_rank: None):
    """Selective checkpointing sees a plain tensor: nothing says that it is not there yet."""
    value = normal(16, N)
    target = torch.full_like(value, float("nan"))
    work = _Arrives(target, value)
    _register_work(target, work)
    x = target if kind == "plain" else AsyncCollectiveTensor(target)
    if kind == "async in a DTensor":
        x = DTensor.from_local(x, init_device_mesh("cpu", (1,)), [Replicate()])
    store = SavedTensorStore()
    entry = store.pack(x)
    back = store.unpack(entry)
    assert entry.treatment == "float8 e4m3"
    assert type(back) is (DTensor if isinstance(x, DTensor) else torch.Tensor)
    assert torch.equal(local_tensor(back), quantized(value))
    assert work.waits == 1


def test_an_uneven_shard_comes_back_as_part_of_the_same_whole():
    """The last of three ranks of 8 rows has 2. The group is fake: nothing is ever sent."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    try:
        mesh = init_device_mesh("cpu", (3,))
        local = normal(N, 2).t()
        whole: Any = {"shape": torch.Size((8, N)), "stride": (1, 8)}
        x: Any = DTensor.from_local(local, mesh, [Shard(0)], **whole).requires_grad_()
        store = SavedTensorStore()
        with store.hooks():
            y = x * x
        assert store.memory_report.nbytes == 2 * N + 2 * N // 2
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert isinstance(grad, DTensor)
        assert (grad.shape, grad.placements) == (x.shape, x.placements)
        assert torch.equal(grad.to_local(), 2 * quantized(local.t()).t())
    finally:
        torch.distributed.destroy_process_group()


def test_a_dtensor_parameter_and_its_local_view_pass_through(one_rank: None):
    mesh = init_device_mesh("cpu", (1,))
    layer = nn.Module()
    weight: Any = nn.Parameter(DTensor.from_local(normal(64, 128), mesh, [Shard(0)]))
    layer.weight = weight
    store = SavedTensorStore(modules=[layer], policy=everything)
    for x in (weight, weight.to_local(), weight.to_local().t().bfloat16()):
        assert store.pack(x).treatment.startswith("passed through: parameter")
    assert store.memory_report.nbytes == 0


@pytest.mark.parametrize("policy", [keep_exact, everything])
def test_an_empty_tensor_is_kept_by_reference(policy: Any):
    """Of experts without tokens; in any layout, where it can wait on the host, too."""
    for x in (
        torch.ones(1, 8).expand(0, 8),
        torch.ones(1, 1).expand(0, 1),
        torch.ones(8, 1).expand(8, 0),
        normal(8, 0),
        normal(0, 8),
        normal(64, N)[:, :0],
    ):
        store = SavedTensorStore(policy=policy)
        assert store.float8_nbytes(x) is None
        entry = store.pack(x, host=Offload().begin("layers.0"))
        assert store.unpack(entry).shape == x.shape
        assert entry.treatment.startswith("exact"), entry.treatment
