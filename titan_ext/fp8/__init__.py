"""Storing activations in float8: the codec, and the store that autograd's saved tensors go through.

``codec`` turns a tensor into float8 and back, ``local`` finds the bytes behind a distributed
tensor, ``saved_tensors`` decides what is stored how, ``ledger`` says what that costs. The package
needs torch only: nothing of TorchTitan, nothing else of titan_ext.
"""

from titan_ext.fp8.codec import Codec, Quantized, dequantize, quantize
from titan_ext.fp8.ledger import Ledger, Row
from titan_ext.fp8.saved_tensors import SavedTensorStore, keep_exact

__all__ = [
    "Codec",
    "Ledger",
    "Quantized",
    "Row",
    "SavedTensorStore",
    "dequantize",
    "keep_exact",
    "quantize",
]
