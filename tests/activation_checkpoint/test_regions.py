"""The treatments of kept tensors under ``torch_remat``, which names regions of model code.

Titan's next release checkpoints with it. What a region keeps comes to the same store, through hooks
of the same form.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn

from benchmarks.moe_blocks import BlockRun, Layout
from titan_ext.activation_checkpoint.op_rules import OpPolicy
from titan_ext.activation_checkpoint.regions import PRESETS, RegionPolicy
from titan_ext.fp8 import Codec, SavedTensorStore, TreatedStorage, dequantize, quantize
from titan_ext.fp8.offload import Offload
from titan_ext.fp8.saved_tensors import MemoryRows

remat = pytest.importorskip("torch_remat", reason="pip install torch_remat==0.2.2")

_BLOCKS = 4
_EXACT = {"input": OpPolicy.SAVE, "w1": OpPolicy.SAVE, "w2": OpPolicy.RECOMPUTE}


class _Block(nn.Module):
    """Two regions and an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: torch.Tensor, enter: Any, policies: dict[str, OpPolicy]) -> torch.Tensor:
        y = x
        for name in ("w1", "w2"):
            with enter(name):
                save = policies[name].keeps
                y = remat.region(getattr(self, name), name, recompute=not save)(y)
            if save:
                remat.recompute_needs_tensor(y)
            y = torch.sin(y)
        return x + y


def _run(policies: dict[str, OpPolicy]) -> tuple[dict[str, torch.Tensor], SavedTensorStore, int]:
    """Gradients, the store, and the bytes on the host after the forward."""
    torch.manual_seed(0)
    model = nn.ModuleList(_Block() for _ in range(_BLOCKS)).bfloat16()
    store, offload = SavedTensorStore(modules=[model]), Offload()
    x = torch.randn(64, 256).bfloat16().requires_grad_()
    h = x
    for i, block in enumerate(model):
        group = offload.begin(f"layers.{i}")

        def enter(name: str, group: Any = group) -> Any:
            policy = policies[name]

            def pack(x: torch.Tensor) -> Any:
                exact = None if policy.is_float8 else "by policy"
                host = group if policy.on_host else None
                return store.pack(x, name=name, exact=exact, host=host)

            return remat.saved_tensors_hooks(pack, store.unpack)

        with enter("input"):
            h = remat.checkpoint(region_name=f"layers.{i}")(block)(h, enter, policies)
    on_host = store.memory_report.host_nbytes
    h.float().sum().backward()
    assert x.grad is not None
    gradients: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    return {"x": x.grad, **gradients}, store, on_host


def _moved(policies: dict[str, OpPolicy]) -> dict[str, OpPolicy]:
    there = {OpPolicy.SAVE: OpPolicy.OFFLOAD, OpPolicy.SAVE_FLOAT8: OpPolicy.OFFLOAD_FLOAT8}
    return {name: there.get(policy, policy) for name, policy in policies.items()}


@pytest.mark.parametrize("kept", [OpPolicy.SAVE, OpPolicy.SAVE_FLOAT8])
def test_regions_are_treated_as_operations_are(kept: OpPolicy):
    policies = {**_EXACT, "w1": kept}
    on_device, store, _ = _run(policies)
    on_host, moved_store, nbytes = _run(_moved(policies))
    for name, gradient in on_device.items():
        assert torch.equal(gradient, on_host[name]), name
    assert nbytes >= _BLOCKS * (64 * 256 * 2 + 64 * 512), "inputs, and what w1 keeps"
    assert not store.memory_report
    assert not moved_store.memory_report, "freed by backward"


def test_float8_in_a_region_changes_gradients_a_little():
    exact, _, _ = _run(_EXACT)
    float8, _, _ = _run({**_EXACT, "w1": OpPolicy.SAVE_FLOAT8})
    assert not all(torch.equal(g, float8[name]) for name, g in exact.items())
    for name, g in exact.items():
        cosine = torch.cosine_similarity(g.double().flatten(), float8[name].double().flatten(), 0)
        assert cosine > 0.995, name


class _Routed:
    """A stand-in of ``ActivationStorage`` (Titan's main, commit 0b434485): its calls of a backend.

    What a forward saves is put when the forward ends. Backward gets each tensor once, into memory
    of its own, and frees what was put.
    """

    def __init__(self, backend: TreatedStorage) -> None:
        self._backend = backend
        self._saved: dict[int, dict[str, Any]] = {}
        self.kept = self.moved = 0

    def _pack(self, x: torch.Tensor) -> Any:
        is_view = x.untyped_storage().nbytes() != x.nbytes or not x.is_contiguous()
        if is_view or x.numel() < 1024 or isinstance(x, nn.Parameter):
            return x
        return self._saved.setdefault(id(x), {"tensor": x})

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, dict):
            return packed
        if packed["tensor"] is None:
            packed["tensor"] = torch.empty(packed["shape"], dtype=packed["dtype"])
            self._backend.get(packed["payload"], packed["tensor"], None)
            self._backend.free(packed["payload"])
        return packed["tensor"]

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        with remat.saved_tensors_hooks(self._pack, self._unpack):
            yield
        for saved in self._saved.values():
            x = saved["tensor"]
            if (payload := self._backend.put(x, None)) is None:
                self.kept += 1
                continue
            self.moved += 1
            saved |= {"payload": payload, "shape": x.shape, "dtype": x.dtype, "tensor": None}
        self._saved = {}


def _train_routed(backend: TreatedStorage | None) -> tuple[dict[str, torch.Tensor], Any, float]:
    """Gradients, the stand-in, and the share of their bytes that tensors wait in."""
    torch.manual_seed(0)
    model = nn.ModuleList(_Block() for _ in range(_BLOCKS)).bfloat16()
    h = x = torch.randn(64, 256).bfloat16().requires_grad_()
    storage = None if backend is None else _Routed(backend)
    with contextlib.nullcontext() if storage is None else storage.forward():
        for i, block in enumerate(model):
            checkpointed = remat.checkpoint(region_name=f"layers.{i}")(block)
            h = checkpointed(h, lambda name: contextlib.nullcontext(), _EXACT)
    share = 1.0 if backend is None else backend.held / max(backend.original, 1)
    h.float().sum().backward()
    assert x.grad is not None
    return {"x": x.grad} | {n: _grad(p) for n, p in model.named_parameters()}, storage, share


def _grad(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("codec", [None, Codec()], ids=["exact", "float8"])
@pytest.mark.parametrize("on_host", [True, False])
def test_a_storage_backend_of_the_next_titan(codec: Codec | None, on_host: bool):
    if codec is None and not on_host:
        with pytest.raises(ValueError, match="would do nothing"):
            TreatedStorage()
        return
    want, _, _ = _train_routed(None)
    backend = TreatedStorage(codec, on_host=on_host)
    got, storage, share = _train_routed(backend)
    assert storage.moved >= 2 * _BLOCKS
    assert backend.held == backend.original == 0, "freed by backward"
    assert share == (1.0 if codec is None else pytest.approx(0.504, abs=1e-3))
    for name, gradient in want.items():
        if codec is None:
            assert torch.equal(gradient, got[name]), name
        else:
            pair = (gradient.double().flatten(), got[name].double().flatten(), 0)
            assert 0.995 < torch.cosine_similarity(*pair) < 1, name


def test_a_storage_backend_leaves_what_it_cannot_take():
    x = torch.randn(64, 256)
    float8, host = TreatedStorage(Codec()), TreatedStorage(on_host=True, limit=0)
    large = torch.empty(2**25)  # more than a slab that another test may have left
    for backend, tensor in ((float8, x.double()), (float8, x.long()), (host, large)):
        assert backend.put(tensor, None) is None
        assert backend.held == backend.original == 0
    out = torch.empty_like(x)
    payload: Any = float8.put(x, None)
    float8.get(payload, out, None)
    assert torch.equal(out, _through_float8(x))
    with pytest.raises(ValueError, match="would do nothing"):
        TreatedStorage()


def _through_float8(x: torch.Tensor) -> torch.Tensor:
    return dequantize(quantize(x, Codec()), Codec(), x.dtype)


_EXPERTS = "moe.routed_experts.inner_experts"
_LINEARS = [f"attention.{name}" for name in ("wq", "wkv_a", "wkv_b", "wo")]
_LINEARS += [f"moe.shared_experts.{name}" for name in ("w1", "w3", "w2")]
_REGION_OF = {
    **{name: f"{name}.linear" for name in _LINEARS},
    "attention.inner_attention": "attention.inner_attention",
    "moe.router": "moe.routing_decision",
    _EXPERTS: "moe.routed_experts.w13.grouped_mm",  # and w2: one module has both here
}
"""Modules of a block of 0.3, and main's names of what they are."""


def _declare_regions(
    block: nn.Module, store: SavedTensorStore, policy: RegionPolicy, kept: OpPolicy
) -> None:
    """As a model of Titan's next release does for itself; ``kept`` is its input's policy."""

    def hooks(policy: OpPolicy) -> Any:
        exact = None if policy.is_float8 else "by policy"
        return remat.saved_tensors_hooks(lambda x: store.pack(x, exact=exact), store.unpack)

    def region(function: Any, name: str, policy: OpPolicy) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with hooks(policy):
                out = remat.region(function, name, recompute=not policy.keeps)(*args, **kwargs)
            if policy.keeps:
                remat.recompute_needs_tensor(*(out if isinstance(out, tuple) else (out,)))
            return out

        return call

    for name, named in _REGION_OF.items():
        module = block.get_submodule(name)
        module.forward = region(module.forward, named, policy.answer(named))
    forward = remat.checkpoint(region_name="layers.0")(block.forward)

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        with hooks(kept):
            return forward(*args, **kwargs)

    block.forward = checkpointed


def _by_hand(kept: OpPolicy, recompute: bool) -> RegionPolicy:
    """All but q, k and v kept alike; the experts perhaps not."""
    always = ("*inner_attention", "*routing_decision")
    patterns = ("attention.w[qk]*", *(("*routed_experts.*",) if recompute else ()))
    exact = ("*",) if kept is OpPolicy.SAVE else always
    return RegionPolicy(save_regions=exact, float8_regions=("*",), recompute_regions=patterns)


def _train_titan_block(
    policy: RegionPolicy | None, kept: OpPolicy = OpPolicy.SAVE
) -> tuple[dict[str, torch.Tensor], MemoryRows]:
    """Gradients of a DeepSeek-V3 block of experts, and what its regions hold.

    Without checkpointing and regions if ``policy`` is None.
    """
    run = BlockRun("debug", Layout(), 256)
    model = run.build(None, stock=True)
    store = SavedTensorStore(modules=[model])
    if policy is not None:
        _declare_regions(model.layers["0"], store, policy, kept)
    leaf_BLD = run.input_BLD.clone().requires_grad_()
    loss = run.forward(model, leaf_BLD)
    rows = store.memory_report
    loss.backward()
    assert not store.memory_report
    assert leaf_BLD.grad is not None
    gradients: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    return {"input": leaf_BLD.grad, **gradients}, rows


@pytest.mark.parametrize("recompute", [True, False])
def test_a_block_of_titans_that_declares_regions_trains_in_float8(recompute: bool):
    plain, _ = _train_titan_block(None)
    exact, exact_rows = _train_titan_block(_by_hand(OpPolicy.SAVE, recompute))
    in_float8 = _by_hand(OpPolicy.SAVE_FLOAT8, recompute)
    float8, rows = _train_titan_block(in_float8, OpPolicy.SAVE_FLOAT8)
    for name, g in plain.items():
        assert torch.equal(g, exact[name]), name
        cosine = torch.cosine_similarity(g.double().flatten(), float8[name].double().flatten(), 0)
        assert cosine > 0.99, name
    treated = [row.entries for row in rows if row.treatment.startswith("float8")]
    assert sum(treated) > (4 if recompute else 6)
    assert rows.nbytes < (0.78 if recompute else 0.65) * exact_rows.nbytes


def test_the_presets_as_regions():
    """Their bytes are in the order of the presets, and stock's are exact."""
    plain, _ = _train_titan_block(None)
    nbytes = {}
    for name, policy in PRESETS.items():
        gradients, rows = _train_titan_block(policy)
        nbytes[name] = rows.nbytes
        for key, g in plain.items():
            if name == "stock":
                assert torch.equal(g, gradients[key]), key
            pair = (g.double().flatten(), gradients[key].double().flatten(), 0)
            assert torch.cosine_similarity(*pair) > 0.99, (name, key)
    everything, rows = _train_titan_block(RegionPolicy(save_regions=("*",)))
    assert all(torch.equal(g, everything[key]) for key, g in plain.items())
    in_order = [nbytes[name] for name in ("memory", "balanced", "speed", "gemms")]
    assert in_order == sorted(set(in_order))
    assert nbytes["gemms"] < rows.nbytes
    assert nbytes["memory"] < nbytes["stock"] < rows.nbytes


def test_the_strongest_answer_of_a_region_wins():
    policy = PRESETS["memory"]
    assert policy.answer("moe.routed_experts.w13.grouped_mm") is OpPolicy.RECOMPUTE
    assert policy.answer("moe.routed_experts.token_dispatcher.combine") is OpPolicy.SAVE
    assert policy.answer("moe.shared_experts.w2.linear") is OpPolicy.SAVE_FLOAT8
    assert policy.answer("attention.inner_attention") is OpPolicy.SAVE
    assert PRESETS["gemms"].answer("attention.inner_attention") is OpPolicy.SAVE
    assert PRESETS["gemms"].answer("attention.wq.linear") is OpPolicy.SAVE_FLOAT8
    assert RegionPolicy().answer("attention.wo.linear") is OpPolicy.RECOMPUTE
