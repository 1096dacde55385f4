"""The float8 storage backend that upstream/titan_activation_storage.md proposes, as it is there."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

from titan_ext.fp8 import Codec, dequantize, quantize

_LINEARS = 8
_PAGE = Path(__file__).parents[2] / "upstream" / "titan_activation_storage.md"


def _backend() -> Any:
    code = _PAGE.read_text().partition("```python\n")[2].partition("\nbackends = ")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    return names["Float8Backend"]()


class _Routed:
    """A stand-in of ``ActivationStorage`` (Titan's main, commit 0b434485): its calls of a backend.

    What a forward saves is put when the forward ends. Backward gets each tensor once, into memory
    of its own, and frees what was put.
    """

    def __init__(self, backend: Any) -> None:
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


def _train(backend: Any) -> tuple[dict[str, torch.Tensor], Any, float]:
    """Gradients, the stand-in, and the share of their bytes that tensors wait in."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(256, 256) for _ in range(_LINEARS)).bfloat16()
    h = x = torch.randn(64, 256).bfloat16().requires_grad_()
    storage: Any = None if backend is None else _Routed(backend)
    with contextlib.nullcontext() if storage is None else storage.forward():
        for linear in model:
            h = h + torch.sin(linear(h))
    share = 1.0 if backend is None else backend.held / (storage.moved * x.nbytes)
    h.float().sum().backward()
    gradients: dict[str, Any] = {"x": x.grad} | {n: p.grad for n, p in model.named_parameters()}
    return gradients, storage, share


def test_a_float8_backend_of_the_next_titan():
    want, _, _ = _train(None)
    backend = _backend()
    got, storage, share = _train(backend)
    assert storage.moved >= 2 * _LINEARS - 1
    assert backend.held == 0, "freed by backward"
    assert share == pytest.approx(0.504, abs=1e-3)
    for name, gradient in want.items():
        pair = (gradient.double().flatten(), got[name].double().flatten(), 0)
        assert 0.995 < torch.cosine_similarity(*pair) <= 1, name
    assert not all(torch.equal(gradient, got[name]) for name, gradient in want.items())


def test_a_float8_backend_leaves_what_it_cannot_take():
    x = torch.randn(64, 256)
    backend = _backend()
    for tensor in (x.double(), x.long()):
        assert backend.put(tensor, None) is None
        assert backend.held == 0
    out = torch.empty_like(x)
    backend.get(backend.put(x, None), out, None)
    assert torch.equal(out, dequantize(quantize(x, Codec()), Codec(), x.dtype))
