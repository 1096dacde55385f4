"""Mode "none": nothing is recomputed; what autograd saves in a block goes through the store."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from titan_ext.activation_checkpoint.blocks import BlockStore, restore
from titan_ext.activation_checkpoint.receipts import BlockReceipt
from titan_ext.activation_checkpoint.sites import BlockSites, storage_ids
from titan_ext.activation_checkpoint.upcasts import Narrowed, UpcastWatch
from titan_ext.activation_checkpoint.verdicts import Rule, Verdict, unknown_modules
from titan_ext.fp8 import Ledger

__all__ = ["UncheckpointedBlock", "why_exact"]


class UncheckpointedBlock(ActivationWrapper):
    """A block that recomputes nothing: what autograd saves in it goes through the store.

    No ``checkpoint_impl``, by which Titan tells that a block's tokens are counted twice.

    Args:
        is_exact: Why what a module saves stays exact, if it does; modules named within the block.
    """

    def __init__(
        self,
        block: nn.Module,
        name: str,
        store: BlockStore,
        sites: BlockSites,
        is_exact: Callable[[str], str | None],
        on_receipt: Callable[[BlockReceipt], None],
    ) -> None:
        super().__init__(block)
        self._name = name
        self._store = store
        self._sites = sites
        self._is_exact = is_exact
        self.receipt: BlockReceipt | None = None
        self._on_receipt = on_receipt

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        entries: list[Any] = []
        packs = 0
        exact_storages: set[int] = set()
        upcasts = UpcastWatch()

        def pack(x: torch.Tensor) -> Any:
            nonlocal packs
            packs += 1
            module = self._sites.module
            reason = self._is_exact(module)
            if reason is None and exact_storages.intersection(storage_ids(x)):
                reason = "kept by another"
            name = module or "(block)"
            narrow = upcasts.source_dtype(x) if self._store.fp32 == "exact" else None
            entry: Any
            if narrow is not None and x.numel() == x.untyped_storage().nbytes() // 4:
                entry = Narrowed(x, narrow, name)
            else:
                entry = self._store.pack(x, name, reason=reason)
            if entry.treatment.startswith("exact") and not isinstance(entry, Narrowed):
                exact_storages.update(storage_ids(x))
            if self.receipt is None:
                entries.append(entry)
            return entry

        with upcasts, torch.autograd.graph.saved_tensors_hooks(pack, restore):
            out = self._checkpoint_wrapped_module(*args, **kwargs)
        if self.receipt is None and torch.is_grad_enabled():
            ledger = Ledger(list({id(entry): entry for entry in entries}.values()))
            entries.clear()
            self.receipt = BlockReceipt(self._name, tuple(ledger.rows()), (), packs)
            self._on_receipt(self.receipt)
        return out


def why_exact(
    module: str, *, rules: tuple[Rule, ...], attention: str, exempt: Callable[[str], bool]
) -> str | None:
    """Why what ``module``, named within the block, saves stays exact, or None."""
    if exempt(module):
        return "exempt"
    for rule in rules:
        if rule.module == "*" or unknown_modules([rule], [module]) == []:
            return "as asked" if rule.verdict is Verdict.EXACT else None
    parts = module.split(".")
    if "inner_attention" in parts and attention != "float8":
        return "attention"
    return "routing" if "router" in parts else None
