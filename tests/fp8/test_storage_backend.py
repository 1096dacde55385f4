"""The float8 storage backend that upstream/titan_activation_storage.md proposes, as it is there."""

from pathlib import Path
from typing import Any

import torch

from titan_ext.fp8 import Codec, dequantize, quantize

_PAGE = Path(__file__).parents[2] / "upstream" / "titan_activation_storage.md"


def test_a_float8_backend_of_the_next_titan():
    """It gives back what the codec does, holds its bytes meanwhile, and leaves other dtypes."""
    code = _PAGE.read_text().partition("```python\n")[2].partition("\nbackends = ")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    backend, x = names["Float8Backend"](), torch.randn(64, 256)
    for tensor in (x.double(), x.long()):
        assert backend.put(tensor, None) is None
    assert backend.held == 0
    payload, out = backend.put(x, None), torch.empty_like(x)
    assert backend.held == Codec().nbytes(x.shape)
    backend.get(payload, out, None)
    assert torch.equal(out, dequantize(quantize(x, Codec()), Codec(), x.dtype))
    backend.free(payload)
    assert backend.held == 0
