"""Which outputs backward never reads, shown operation by operation while the forward runs.

A dropped output is a dummy in the recompute. That is sound if no derivative needs its values: the
last projection of a feed-forward is only added to something, for example. Where the values go is
followed through the operations whose derivatives read no operand (additions, copies, views,
exchanges), until the forward ends or a saved output takes their place. Any other operation counts
as a reader. So this never calls a drop sound that is not; it may refuse one that would be.

The dummy is NaN: were it read after all, the loss would show it.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from titan_ext.activation_checkpoint.sites import op_name, storage_ids
from titan_ext.fp8.local import Layout, local_tensor, plain_tensors

__all__ = ["DropTracker", "Dropped"]

_READ_NO_VALUES = frozenset(
    """
    aten._to_copy aten._unsafe_view aten.add aten.add_ aten.alias aten.as_strided aten.cat
    aten.clone aten.constant_pad_nd aten.copy_ aten.detach aten.empty_like aten.expand
    aten.flatten aten.index aten.index_put aten.index_put_ aten.narrow aten.neg aten.new_empty
    aten.new_zeros aten.permute aten.reshape aten.select aten.slice aten.split
    aten.split_with_sizes aten.squeeze aten.stack aten.sub aten.sub_ aten.sum aten.t
    aten.transpose aten.unsqueeze aten.view aten.zeros_like
    _c10d_functional.all_gather_into_tensor _c10d_functional.all_reduce
    _c10d_functional.all_to_all_single _c10d_functional.reduce_scatter_tensor
    _c10d_functional.wait_tensor torchtitan.deterministic_scatter_add
    """.split()  # noqa: SIM905  one name a line would be a page
)


class Dropped:
    """An output of which nothing is kept: a ``StoredEntry`` for the ledger.

    Until the forward of its block has ended the tensor itself is kept: only then is it known
    whether something reads it.
    """

    owns_bytes = True

    def __init__(self, x: torch.Tensor, name: str) -> None:
        local = local_tensor(x)
        self.name = name
        self.treatment = "dropped"
        self.original = tuple(
            (p.untyped_storage()._cdata, p.untyped_storage().nbytes()) for p in plain_tensors(x)
        )
        self.reader = ""
        self._shape, self._dtype, self._device = local.shape, local.dtype, local.device
        self._layout = Layout.of(x) if isinstance(x, DTensor) else None
        self._value: torch.Tensor | None = x.detach()

    def tensors(self):
        if self._value is not None:
            yield from plain_tensors(self._value)

    def finish(self) -> None:
        """The forward has ended: forget the value, unless something reads it."""
        if self.reader:
            self.treatment = f"exact: read by {self.reader}"
        else:
            self._value = None

    def restore(self) -> torch.Tensor:
        """The value if something reads it, else NaN of the same shape."""
        if self._value is not None:
            return self._value
        nan = torch.full((), float("nan"), dtype=self._dtype, device=self._device)
        dummy = nan.expand(self._shape)
        if self._layout is None:
            return dummy
        # A redistribution copies what is not contiguous, in an operation that the forward did not
        # have; torch counts the operations of a recompute.
        return self._layout.wrap(dummy.contiguous())


class DropTracker:
    """Follows the values of dropped outputs through one forward of a block."""

    def __init__(self) -> None:
        self._entries: dict[int, Dropped] = {}
        # Held weakly: no bytes, but no other storage gets the address.
        self._storages: list[StorageWeakRef] = []

    @property
    def dropped(self) -> list[Dropped]:
        return list({id(entry): entry for entry in self._entries.values()}.values())

    def add(self, entry: Dropped, out: Any) -> None:
        """``out`` holds values of ``entry``."""
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                for part in plain_tensors(leaf):
                    storage = part.untyped_storage()
                    self._entries[storage._cdata] = entry
                    self._storages.append(StorageWeakRef(storage))

    def see(self, func: Any, module: str, args: Any, out: Any, *, stored: bool) -> None:
        """An operation has run; ``stored``: the recompute takes its output from the store."""
        if not self._entries:
            return
        entries = [e for s in storage_ids(args) if (e := self._entries.get(s)) is not None]
        for entry in entries:
            if op_name(func) not in _READ_NO_VALUES:
                entry.reader = entry.reader or f"{op_name(func)} in {module or 'the block'}"
            elif not stored:
                self.add(entry, out)
