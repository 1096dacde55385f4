"""One block under checkpointing, eagerly: each operation asked for its verdict, outputs stored.

The checkpoint is torch's own, with torch's own selective contexts. What is added: the policy that
they ask reads our rules, and the saved-tensor hooks around the call, through which torch passes
the inputs of the block and every output that the policy saves, put them into the store in the form
that the verdict names. All state belongs to one call: a pipeline runs several forwards before the
first backward.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torchtitan.tools.logging import logger

from titan_ext.activation_checkpoint.drops import Dropped, DropTracker
from titan_ext.activation_checkpoint.presets import GEMMS, BlockPlan
from titan_ext.activation_checkpoint.receipts import BlockReceipt, count_flops, op_rows
from titan_ext.activation_checkpoint.sites import BlockSites, op_name
from titan_ext.activation_checkpoint.verdicts import INPUT, Rule, Site, Verdict
from titan_ext.fp8 import Codec, Ledger, SavedTensorStore, keep_exact

__all__ = ["BlockCheckpoint", "BlockStore", "restore"]

_CODEC_BLOCK = 128


class BlockStore:
    """The store of one block, told with each tensor why it must stay exact, if it must.

    Args:
        fp32: "exact", or "float8" for fp32 tensors whose rows are not shorter than 128: what is
            shorter is a statistic (a log-sum-exp, a routing score), never compressed.
    """

    def __init__(self, block: nn.Module, codec: Codec, fp32: str) -> None:
        self._store = SavedTensorStore(codec, modules=[block], policy=self._keep_exact)
        self.fp32 = fp32
        self._reason: str | None = None

    def pack(self, x: torch.Tensor, name: str, *, reason: str | None) -> Any:
        """Store ``x`` in float8, or exactly for ``reason``."""
        self._reason = reason
        try:
            return self._store.pack(x, name=name)
        finally:
            self._reason = None

    def _keep_exact(self, x: torch.Tensor) -> str | None:
        if self._reason is not None:
            return self._reason
        statistic = x.dtype == torch.float32 and (x.dim() == 0 or x.shape[-1] < _CODEC_BLOCK)
        return keep_exact(x, fp32=statistic or self.fp32 == "exact")


class BlockCheckpoint:
    """A ``checkpoint_fn`` for torch's ``CheckpointWrapper``.

    Args:
        name: Of the block, in the model.
        plan: Its verdicts.
        store: Where outputs go.
        sites: Names its operations.
        options: For ``torch.utils.checkpoint.checkpoint``.
        on_receipt: Called with the receipt of the first forward.
    """

    def __init__(
        self,
        name: str,
        plan: BlockPlan,
        store: BlockStore,
        sites: BlockSites,
        options: dict[str, Any],
        on_receipt: Callable[[BlockReceipt], None],
    ) -> None:
        self.name = name
        self.plan = plan
        self.store = store
        self.sites = sites
        self.refused_drops: set[Site] = set()
        self.used_rules: set[Rule] = set()
        self._options = options
        self.receipt: BlockReceipt | None = None
        self._on_receipt = on_receipt

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return module(*args, **kwargs)
        call = _Call(self, counting=self.receipt is None)
        with torch.autograd.graph.saved_tensors_hooks(call.pack, restore):
            out = checkpoint(
                module,
                *args,
                use_reentrant=False,
                early_stop=False,  # with it, full checkpointing under EP leaks (PR 1580 of Titan)
                respect_saved_tensors_hooks=True,
                context_fn=lambda: create_selective_checkpoint_contexts(call.decide),
                **self._options,
                **kwargs,
            )
        call.finish()
        if self.receipt is None:
            self.receipt = call.receipt()
            self._on_receipt(self.receipt)
        return out


class _Call:
    """One forward of one block."""

    def __init__(self, owner: BlockCheckpoint, *, counting: bool) -> None:
        self._owner = owner
        self._plan = owner.plan
        self._stock_policy = owner.plan.stock_policy()
        self._matches: dict[Rule, int] = {}
        self._drops = DropTracker()
        self._site = Site("", INPUT)
        self._verdict = self._input_verdict()
        self._strict_drops: dict[int, Site] = {}
        self._drop_sites: dict[int, Site] = {}
        self._counting = counting
        self._entries: list[Any] = []
        self._ops: list[tuple[str, Verdict, int]] = []
        self._packs = 0
        owner.sites.begin()

    def decide(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Torch asks in the forward only, after each operation."""
        sites, out = self._owner.sites, ctx.op_output
        sites.see_cast(func, args, out)
        site = sites.site(func, args, with_operand=op_name(func) in GEMMS)
        stock_saves = self._stock_policy(ctx, func, *args, **kwargs) in (
            CheckpointPolicy.MUST_SAVE,
            CheckpointPolicy.PREFER_SAVE,
        )
        verdict = self._verdict_of(site, func, args, kwargs, out, stock_saves)
        self._site, self._verdict = site, verdict
        stored = verdict in (Verdict.EXACT, Verdict.FLOAT8)
        self._drops.see(func, site.module, args, out, stored=stored)
        if self._counting:
            self._ops.append((str(site), verdict, count_flops(func, args, kwargs, out)))
        recompute = verdict is Verdict.RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE if recompute else CheckpointPolicy.MUST_SAVE

    def pack(self, x: torch.Tensor) -> Any:
        """Torch gives every input of the block and every output that is saved."""
        self._packs += 1
        name = str(self._site) if self._site.op != INPUT else INPUT
        if self._verdict is Verdict.DROP and x.is_floating_point():
            entry: Any = Dropped(x, name)
            self._drops.add(entry, x)
            self._drop_sites[id(entry)] = self._site
        else:
            float8 = self._verdict is Verdict.FLOAT8
            entry = self._owner.store.pack(x, name, reason=None if float8 else _reason(self._site))
        if self._counting:
            self._entries.append(entry)
        return entry

    def finish(self) -> None:
        """The forward has ended: let go of dropped values, unless something reads them."""
        for entry in self._drops.dropped:
            entry.finish()
            if entry.reader:
                self._refuse_drop(self._drop_sites[id(entry)], entry)
        self._drops = DropTracker()

    def receipt(self) -> BlockReceipt:
        ledger = Ledger(list({id(entry): entry for entry in self._entries}.values()))
        self._entries.clear()
        return BlockReceipt(self._owner.name, tuple(ledger.rows()), op_rows(self._ops), self._packs)

    def _refuse_drop(self, site: Site, entry: Dropped) -> None:
        name = self._owner.name
        if any(r.verdict is Verdict.DROP and r.matches(site) for r in self._plan.user_rules):
            raise ValueError(
                f"activation_checkpoint.verdicts: {site} of {name} cannot be dropped: backward "
                f"needs it, for {entry.reader}. Expected exact, float8 or recompute."
            )
        self._owner.refused_drops.add(site)
        logger.info(f"{name}: {site} is not dropped, as {entry.reader} reads it.")

    def _input_verdict(self) -> Verdict:
        site = Site("", INPUT)
        rule = next((r for r in self._plan.user_rules if r.matches(site)), None)
        if rule is not None:
            self._owner.used_rules.add(rule)
        return self._exempted(rule.verdict if rule else self._plan.input, site)

    def _verdict_of(
        self, site: Site, func: Any, args: Any, kwargs: Any, out: Any, stock_saves: bool
    ) -> Verdict:
        if _is_copy_to_host(func, args, kwargs):
            return Verdict.EXACT
        base = self._plan.base_verdict(site, out, stock_saves=stock_saves)
        if site.op == "aten.topk":
            return base
        for rule in self._plan.user_rules:
            if self._applies(rule, site):
                self._owner.used_rules.add(rule)
                return self._exempted(rule.verdict, site)
        for rule in self._plan.preset_rules:
            refused = rule.verdict is Verdict.DROP and site in self._owner.refused_drops
            if not refused and self._applies(rule, site):
                return self._exempted(rule.verdict, site)
        return self._exempted(base, site)

    def _applies(self, rule: Rule, site: Site) -> bool:
        if not rule.matches(site, expensive=site.op in self._plan.expensive_ops):
            return False
        if not rule.occurrence:
            return True
        self._matches[rule] = self._matches.get(rule, 0) + 1
        return self._matches[rule] == rule.occurrence

    def _exempted(self, verdict: Verdict, site: Site) -> Verdict:
        if verdict is Verdict.FLOAT8 and self._plan.exempt(site.module):
            return Verdict.EXACT
        return verdict


@torch.no_grad()
def restore(entry: Any) -> torch.Tensor:
    """What was packed."""
    return entry.restore()


def _reason(site: Site) -> str:
    if site.op == "aten.topk":
        return "routing"
    return "attention" if "attention" in site.module.split(".") else "as asked"


def _is_copy_to_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A copy of counts to the host, for the split lists of an exchange."""
    device = kwargs.get("device")
    return (
        func is torch.ops.aten._to_copy.default
        and device is not None
        and torch.device(device).type == "cpu"
        and args[0].device.type != "cpu"
    )
