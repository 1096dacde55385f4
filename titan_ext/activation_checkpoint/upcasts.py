"""fp32 tensors that are nothing but bf16 values: kept as those, without a loss.

Titan multiplies the routed experts' outputs by their scores in fp32, and autograd keeps the fp32
copy, with twice the bytes of what it was copied from. A dispatch mode notes such copies while the
forward runs; nothing is compared, so no device is waited for.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from titan_ext.fp8.ledger import storages_of

__all__ = ["Narrowed", "UpcastWatch"]


class UpcastWatch(TorchDispatchMode):
    """Active around a forward; knows which plain tensors are copies of narrower ones."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, torch.dtype] = {}
        # Held weakly: no bytes, but no other storage gets the address.
        self._storages: list[StorageWeakRef] = []

    def source_dtype(self, x: torch.Tensor) -> torch.dtype | None:
        """The dtype that holds the values of ``x`` exactly, if ``x`` is an unchanged copy."""
        if type(x) is not torch.Tensor or x._version:
            return None
        return self._sources.get(x.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            func is torch.ops.aten._to_copy.default
            and type(out) is torch.Tensor
            and out.dtype is torch.float32
            and args[0].dtype in (torch.bfloat16, torch.float16)
        ):
            self._sources[out.untyped_storage()._cdata] = args[0].dtype
            self._storages.append(StorageWeakRef(out.untyped_storage()))
        return out


class Narrowed:
    """An fp32 tensor kept in the dtype that it came from: a ``StoredEntry`` for the ledger."""

    owns_bytes = True

    def __init__(self, x: torch.Tensor, dtype: torch.dtype, name: str) -> None:
        self.name = name
        self.treatment = f"exact: as {str(dtype).removeprefix('torch.')}"
        self.original = storages_of(x)
        self._dtype = x.dtype
        self._value = x.detach().to(dtype)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self._value

    def restore(self) -> torch.Tensor:
        """The original, bit for bit."""
        return self._value.to(self._dtype)
