"""Float8 and the host as a storage backend of Titan's next activation storage."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn

from titan_ext.fp8 import Codec, TreatedStorage, dequantize, quantize

_LINEARS = 8


class _Routed:
    """A stand-in of ``ActivationStorage`` (Titan's main, commit 0b434485): its calls of a backend.

    What a forward saves is put when the forward ends. Backward gets each tensor once, into memory
    of its own, and frees what was put.
    """

    def __init__(self, backend: TreatedStorage) -> None:
        self._backend = backend
        self._saved: dict[int, dict[str, Any]] = {}
        self.moved = 0

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
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        for saved in self._saved.values():
            x = saved["tensor"]
            if (payload := self._backend.put(x, None)) is None:
                continue
            self.moved += 1
            saved |= {"payload": payload, "shape": x.shape, "dtype": x.dtype, "tensor": None}
        self._saved = {}


def _train(backend: TreatedStorage | None) -> tuple[dict[str, torch.Tensor], Any, float]:
    """Gradients, the stand-in, and the share of their bytes that tensors wait in."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(256, 256) for _ in range(_LINEARS)).bfloat16()
    h = x = torch.randn(64, 256).bfloat16().requires_grad_()
    storage = None if backend is None else _Routed(backend)
    with contextlib.nullcontext() if storage is None else storage.forward():
        for linear in model:
            h = h + torch.sin(linear(h))
    share = 1.0 if backend is None else backend.held / max(backend.original, 1)
    h.float().sum().backward()
    gradients: dict[str, Any] = {"x": x.grad} | {n: p.grad for n, p in model.named_parameters()}
    return gradients, storage, share


@pytest.mark.parametrize(
    ("codec", "on_host"), [(None, True), (Codec(), True), (Codec(), False)], ids=str
)
def test_a_storage_backend_of_the_next_titan(codec: Codec | None, on_host: bool):
    want, _, _ = _train(None)
    backend = TreatedStorage(codec, on_host=on_host)
    got, storage, share = _train(backend)
    assert storage.moved >= 2 * _LINEARS - 1
    assert backend.held == backend.original == 0, "freed by backward"
    assert share == (1.0 if codec is None else pytest.approx(0.504, abs=1e-3))
    for name, gradient in want.items():
        if codec is None:
            assert torch.equal(gradient, got[name]), name
        else:
            pair = (gradient.double().flatten(), got[name].double().flatten(), 0)
            assert 0.995 < torch.cosine_similarity(*pair) <= 1, name
    assert (codec is None) == all(torch.equal(g, got[name]) for name, g in want.items())


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
    assert torch.equal(out, dequantize(quantize(x, Codec()), Codec(), x.dtype))
    with pytest.raises(ValueError, match="would do nothing"):
        TreatedStorage()
