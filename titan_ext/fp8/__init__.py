# SPDX-License-Identifier: BSD-3-Clause
"""Activations in float8: the codec, and the store for autograd's saved tensors.

The package needs torch only, neither TorchTitan nor the rest of titan_ext.
"""

from titan_ext.fp8.codec import Codec, Quantized, dequantize, quantize
from titan_ext.fp8.saved_tensors import (
    MemoryRow,
    MemoryRows,
    SavedTensorStore,
    keep_exact,
    memory_rows,
)

__all__ = [
    "Codec",
    "MemoryRow",
    "MemoryRows",
    "Quantized",
    "SavedTensorStore",
    "dequantize",
    "keep_exact",
    "memory_rows",
    "quantize",
]
