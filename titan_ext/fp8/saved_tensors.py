"""What autograd saves between forward and backward, kept in float8.

    store = SavedTensorStore(Codec(), modules=[block])
    with store.hooks("layers.3"):
        y = block(x)
    print(store.ledger)
    y.sum().backward()

Autograd hands every tensor that it saves to ``pack`` and keeps the result; when backward needs the
tensor it hands the result to ``unpack``. In between, this is what happens to a tensor:

1. A parameter or buffer of ``modules``, any other ``nn.Parameter``, or a view of their storage:
   kept by reference. It costs nothing, as the model owns it. A copy would be a disaster: FSDP
   empties the storage of a gathered weight after forward and fills it again for backward, and a
   copy of it, float8 or not, would be all the weights at once. The storage decides, as no type
   tells: a detached, transposed or localised weight is a plain tensor.
2. A tensor subclass that is neither DTensor nor AsyncCollectiveTensor, or a sparse tensor: kept by
   reference. Its bytes mean what its class says they mean. (Sparse ones are not in the ledger.)
3. What is not bf16, fp16 or fp32, what would not shrink, and whatever the ``policy`` names: kept
   exactly, by reference, as autograd would.
4. The rest: float8. A DTensor by its local shard. The axes of an expanded view are dropped first
   and expanded again after, so that it costs what its storage costs. A tensor whose axes are
   permuted is stored in the order in which it lies in memory and comes back with the same strides.

**A collective that is still running** has not written its bytes yet, and its output need not look
like it: inside selective checkpointing it is a plain tensor. So every tensor is waited for.

**Saved twice, stored once.** Two packs are of the same tensor if storage, offset, shape, strides,
dtype and version agree. The table of what is stored holds its entries weakly: autograd owns them,
and they go when it drops them. An entry holds its original's storage weakly: that keeps none of its
bytes but does keep its address from being given to another tensor, which would else be mistaken for
it.

**Modified in place after it was saved.** Autograd raises when it unpacks such a tensor, but not
under hooks: they may have made a copy. What is kept by reference is checked here and raises the
same error. What is float8 *is* a copy, of the value at the time of saving, which is the one that
the gradient asks for: backward goes on, with the right gradient.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from titan_ext.fp8.codec import SUPPORTED_DTYPES, Codec, Quantized, dequantize, quantize
from titan_ext.fp8.ledger import Ledger, storages_of
from titan_ext.fp8.local import Layout, local_tensor, plain_tensors, wait

__all__ = ["Policy", "SavedTensorStore", "keep_exact"]

Policy = Callable[[torch.Tensor], str | None]
"""Given a plain tensor (the local shard): why it must stay exact, or None to store it in float8."""

_PLAIN = (torch.Tensor, nn.Parameter)


def keep_exact(x: torch.Tensor, *, fp32: bool = True, min_numel: int = 4096) -> str | None:
    """The default policy: fp32 stays (log-sum-exps, router scores), and so does what is small.

    A policy sees shapes and dtypes, not values: attention masks with -inf, or anything else that
    float8 cannot hold, must be recognised by those.

    Args:
        x: The tensor, without expanded axes.
        fp32: Whether fp32 stays exact.
        min_numel: Fewer values than this stay exact.

    Returns:
        The reason, or None.
    """
    if fp32 and x.dtype == torch.float32:
        return "float32"
    if x.numel() < min_numel:
        return "small"
    return None


class SavedTensorStore:
    """Packs the tensors that autograd saves, and says what they cost.

    Best made once for each block, with the block as its module: every pack looks through the
    parameters and buffers of ``modules``.

    Args:
        codec: How float8 tensors are stored.
        modules: Whose parameters and buffers are never packed. Their modules must not be replaced
            afterwards; the parameters may be, as FSDP does.
        policy: What else stays exact, and why.
        compiled: Run the codec through torch.compile, one fused kernel each way. None: wherever the
            tensor is not on a CPU, and no compiler is tracing already.
    """

    def __init__(
        self,
        codec: Codec | None = None,
        *,
        modules: Iterable[nn.Module] = (),
        policy: Policy = keep_exact,
        compiled: bool | None = None,
    ) -> None:
        self.codec = codec or Codec()
        self._policy = policy
        self._compiled = compiled
        self._slots = [
            (tensors, name)
            for root in modules
            for module in root.modules()
            for tensors in (module._parameters, module._buffers)
            for name in tensors
        ]
        self._by_key: weakref.WeakValueDictionary[Any, _Entry] = weakref.WeakValueDictionary()
        self._entries: weakref.WeakSet[_Entry] = weakref.WeakSet()
        self._steps: dict[torch.device, torch.Tensor] = {}

    def hooks(self, name: str = "") -> torch.autograd.graph.saved_tensors_hooks:
        """A context: what is saved inside it goes through the store, as ``name`` in the ledger."""
        return torch.autograd.graph.saved_tensors_hooks(
            functools.partial(self.pack, name=name), self.unpack
        )

    @property
    def ledger(self) -> Ledger:
        """What is stored now."""
        return Ledger(self._entries)

    @torch.no_grad()
    def pack(self, x: torch.Tensor, *, name: str = "") -> "_Entry":
        """Store ``x``. The result is all that keeps it stored; give it to ``unpack``."""
        if isinstance(x, AsyncCollectiveTensor):
            x = local_tensor(x)
        if x.layout is not torch.strided:  # no storage to go by
            return _Kept(x, "passed through: sparse", owns_bytes=False)
        key = _key(x)
        entry = self._by_key.get(key)
        if entry is None:
            entry = self._store(x)
            entry.name = name
            entry.original = storages_of(x)
            entry.weak_storages = [StorageWeakRef(t.untyped_storage()) for t in plain_tensors(x)]
            self._by_key[key] = entry
            self._entries.add(entry)
        return entry

    @torch.no_grad()
    def unpack(self, entry: "_Entry") -> torch.Tensor:
        """What was packed: the same tensor, or what float8 kept of it, with its shape and dtype.

        Raises:
            RuntimeError: if it is kept by reference and was modified in place.
        """
        return entry.restore()

    def _store(self, x: torch.Tensor) -> "_Entry":
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):
            return _Kept(x, "passed through: parameter", owns_bytes=False)
        if self._is_module_state(x):
            return _Kept(x, "passed through: parameter or buffer", owns_bytes=False)
        if type(x) not in _PLAIN and not isinstance(x, DTensor):
            return _Kept(x, f"passed through: {type(x).__name__}")
        local = local_tensor(x)
        if type(local) not in _PLAIN:  # a DTensor of quantised weights, for example
            return _Kept(x, f"passed through: {type(x).__name__} of {type(local).__name__}")
        wait(local)
        if local.dtype not in SUPPORTED_DTYPES:
            return _Kept(x, f"exact: {str(local.dtype).removeprefix('torch.')}")
        dense, undo = _as_in_memory(local)
        if why := self._policy(dense):
            return _Kept(x, f"exact: {why}")
        if self.codec.nbytes(dense.shape) >= local.untyped_storage().nbytes():
            return _Kept(x, "exact: would not shrink")
        layout = Layout.of(x) if isinstance(x, DTensor) else None
        return self._to_float8(dense, undo, layout)

    def _to_float8(
        self,
        dense: torch.Tensor,
        undo: Callable[[torch.Tensor], torch.Tensor],
        layout: Layout | None,
    ) -> "_Float8":
        compiled = self._compiled
        if compiled is None:
            compiled = dense.device.type != "cpu" and not torch.compiler.is_compiling()
        encode, decode = _compiled_codec() if compiled else (quantize, dequantize)
        codec, dtype = self.codec, dense.dtype

        def restore(stored: Quantized) -> torch.Tensor:
            local = undo(decode(stored, codec, dtype))
            return layout.wrap(local.contiguous()) if layout is not None else local

        # Two dimensions, so that the compiled codec does not depend on their number.
        matrix = dense.reshape(-1, dense.shape[-1]) if dense.dim() else dense.reshape(1, 1)
        stored = encode(matrix, codec, step=self._next_step(dense.device))
        return _Float8(stored, restore, f"float8 {codec.dtype}")

    def _next_step(self, device: torch.device) -> torch.Tensor | int:
        """Other noise for each tensor: a counter on the device, which a CUDA graph advances."""
        if not self.codec.stochastic:
            return 0
        if device not in self._steps:
            self._steps[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._steps[device].add_(1)

    def _is_module_state(self, x: torch.Tensor) -> bool:
        # Looked up anew each time: FSDP puts other parameters in place before each forward.
        state = {
            part.untyped_storage()._cdata
            for tensors, name in self._slots
            if (tensor := tensors.get(name)) is not None
            for part in plain_tensors(tensor)
        }
        return any(part.untyped_storage()._cdata in state for part in plain_tensors(x))


def _as_in_memory(
    x: torch.Tensor,
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """``x`` as it lies in memory: without expanded axes, the others from outermost to innermost.

    Returns:
        That view, and the function that leads from its values back to the axes of ``x``. The
        function holds no tensor.
    """
    shape = x.shape
    expanded = [d for d in range(x.dim()) if x.stride(d) == 0 and shape[d] > 1]
    for d in reversed(expanded):
        x = x.select(d, 0)
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    inverse = sorted(range(x.dim()), key=order.__getitem__)
    dense = x.permute(order)
    dense_shape = dense.shape

    def undo(values: torch.Tensor) -> torch.Tensor:
        values = values.reshape(dense_shape).permute(inverse)
        for d in expanded:
            values = values.unsqueeze(d)
        return values.expand(shape)

    return dense, undo


class _Entry:
    """One stored tensor; alive as long as autograd holds it."""

    name = ""
    treatment = ""
    owns_bytes = True
    original: tuple[tuple[int, int], ...] = ()
    weak_storages: list[StorageWeakRef]

    def restore(self) -> torch.Tensor:
        raise NotImplementedError

    def tensors(self) -> Iterator[torch.Tensor]:
        """The plain tensors that it holds."""
        raise NotImplementedError


class _Float8(_Entry):
    def __init__(
        self, stored: Quantized, restore: Callable[[Quantized], torch.Tensor], treatment: str
    ) -> None:
        self.stored = stored
        self._restore = restore
        self.treatment = treatment

    def restore(self) -> torch.Tensor:
        return self._restore(self.stored)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.stored


class _Kept(_Entry):
    def __init__(self, x: torch.Tensor, treatment: str, *, owns_bytes: bool = True) -> None:
        # Without its graph, which may hold this entry. A subclass has its own idea of detach.
        self.tensor = x.detach() if type(x) in _PLAIN else x
        self.treatment = treatment
        self.owns_bytes = owns_bytes
        self.version = x._version

    def restore(self) -> torch.Tensor:
        if (now := self.tensor._version) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{self.tensor.type()} {list(self.tensor.shape)}] is at "
                f"version {now}; expected version {self.version} instead."
            )
        return self.tensor

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from plain_tensors(self.tensor)


def _key(x: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors of the same bytes, seen in the same way, at the same version."""
    parts = tuple(
        (p.untyped_storage()._cdata, p.storage_offset(), p.shape, p.stride(), p.dtype, p._version)
        for p in plain_tensors(x)
    )
    layout = Layout.of(x) if isinstance(x, DTensor) else None
    return (type(x), x.shape, x._version, x.is_conj(), x.is_neg(), layout, parts)


@functools.cache
def _compiled_codec() -> tuple[Callable[..., Quantized], Callable[..., torch.Tensor]]:
    return torch.compile(quantize, dynamic=True), torch.compile(dequantize, dynamic=True)
