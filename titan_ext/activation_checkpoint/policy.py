"""The policy ``fp8``: Titan's activation checkpointing with a fourth way to keep an activation.

Titan builds it from its config and applies it to a model, as it does its own policies.
"""

import fnmatch
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.tools.logging import logger

from titan_ext.activation_checkpoint.blocks import BlockCheckpoint, BlockStore
from titan_ext.activation_checkpoint.checks import KEY, check_choice, check_names, check_rules
from titan_ext.activation_checkpoint.presets import PRESETS, Attention, Preset, make_plan
from titan_ext.activation_checkpoint.receipts import BlockReceipt, RunReceipt
from titan_ext.activation_checkpoint.sites import BlockSites
from titan_ext.activation_checkpoint.uncheckpointed import UncheckpointedBlock, why_exact
from titan_ext.activation_checkpoint.verdicts import Rule, Verdict, parse_rules
from titan_ext.fp8 import Codec

__all__ = ["FP8AC", "receipt_of"]

Mode = Literal["selective", "full", "none"]


class FP8AC(ActivationCheckpointing):
    """Saves, recomputes, saves in float8 or drops, operation by operation.

    Attributes:
        receipt: What the first forward of each block stored; complete after the first step.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        mode: Mode = "selective"
        """
        "selective": what ``preset`` and ``verdicts`` say. "full": only the inputs of the blocks are
        kept, in float8, and what fixes the routing. "none": nothing is recomputed, and what
        autograd saves is kept in float8.
        """

        preset: Preset = "memory"
        """
        With mode "selective": "memory" (what stock selective saves, in float8), "speed" (few FLOPs
        recomputed at about stock's bytes), "attention" (recompute attention only) or "stock" (what
        stock selective saves, exactly: for ``verdicts`` to start from).
        """

        verdicts: dict[str, str] = field(default_factory=dict)
        """
        "module[:op[:operand[:occurrence]]]" to exact, float8, recompute or drop; globs; the first
        that matches decides, before the preset. "input" names the inputs of the blocks.
        """

        attention: Attention = "auto"
        """
        What attention's own backward reads (q, k, v, its output): "exact"; "float8"; or, with mode
        "selective", "recompute" the attention operation. Its gradient is exact only with the
        first. "auto" is "exact", except for preset "speed" (docs/fp8_ac.md).
        """

        fp32: Literal["exact", "float8"] = "exact"
        """Whether fp32 tensors may be compressed; statistics (short rows) never are."""

        exempt_first: int = 0
        """The first so many layers keep exactly what the others keep in float8."""

        exempt_last: int = 0
        """The last so many layers."""

        exempt: list[str] = field(default_factory=list)
        """Globs for the names of modules in the model that keep it exactly ("*.attention")."""

        dtype: Literal["e4m3", "e5m2"] = "e4m3"
        """The float8 format: 3 bits of mantissa, or 2 and more range."""

        block: Literal[64, 128, 256, "row", "tensor"] = 128
        """How many neighbours share a scale."""

        scale: Literal["e8m0", "fp32"] = "e8m0"
        """Scales of one byte, powers of two; or of four."""

        stochastic: bool = False
        """Round at random, without bias."""

        seed: int = 0
        """Of the stochastic rounding."""

        def __post_init__(self) -> None:
            check_choice("mode", self.mode, ("selective", "full", "none"))
            check_choice("preset", self.preset, PRESETS)
            check_choice("attention", self.attention, ("auto", "exact", "float8", "recompute"))
            check_choice("fp32", self.fp32, ("exact", "float8"))
            for key in ("exempt_first", "exempt_last"):
                value = getattr(self, key)
                if not isinstance(value, int) or value < 0:
                    raise ValueError(f"{KEY}.{key} is {value!r}; expected 0 or more layers.")
            if self.mode != "selective" and self.preset != "memory":
                raise ValueError(
                    f'{KEY}.preset is {self.preset!r}; it has no meaning with mode "{self.mode}".'
                )
            if self.mode == "full" and self.attention != "auto":
                raise ValueError(
                    f'{KEY}.attention is {self.attention!r}; it has no meaning with mode "full", '
                    "which recomputes attention."
                )
            if self.mode == "none" and self.attention == "recompute":
                raise ValueError(
                    f'{KEY}.attention is "recompute", but mode "none" recomputes nothing; '
                    'expected "exact" or "float8".'
                )
            if self.debug and self.mode != "none":
                raise ValueError(
                    f"{KEY}.debug is on; torch has no debug mode for selective checkpoints. "
                    'Expected false, or policy "full".'
                )
            check_rules(self.rules(), self.mode)
            try:
                self.codec()
            except ValueError as error:
                raise ValueError(str(error).replace("Codec.", f"{KEY}.")) from None

        def codec(self) -> Codec:
            """The codec that the keys describe."""
            return Codec(self.dtype, self.block, self.scale, self.stochastic, self.seed)

        def rules(self) -> tuple[Rule, ...]:
            """``verdicts``, parsed."""
            return parse_rules(self.verdicts, f"{KEY}.verdicts")

    def __init__(self, config: "FP8AC.Config", dump_folder: str = "") -> None:
        super().__init__(config, dump_folder)
        self.blocks: dict[str, BlockReceipt | None] = {}
        self.used_rules: set[Rule] = set()
        self._sites: list[BlockSites] = []
        self._total_layers = 0
        self._prefix = ""

    @property
    def receipt(self) -> RunReceipt:
        return RunReceipt([receipt for receipt in self.blocks.values() if receipt is not None])

    def apply(self, model: nn.Module) -> None:
        """Wrap every transformer block of ``model``, in place: the decoder first, then any towers.

        Raises:
            ValueError: if a name in ``verdicts`` or ``exempt`` is of no module.
        """
        if not self.blocks:
            config = cast("FP8AC.Config", self.config)
            self._total_layers = _number_of_layers(model)
            check_names(config.rules(), config.exempt, model, self._total_layers)
        else:
            self._prefix = f"{type(model).__name__}."
        super().apply(model)

    def remove_hooks(self) -> None:
        """Take our hooks off the modules again; the wrappers around the blocks stay."""
        for sites in self._sites:
            sites.remove()

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        name = f"{self._prefix}{base_fqn or 'block'}"
        self.blocks[name] = None
        config = cast("FP8AC.Config", self.config)
        store = BlockStore(module, config.codec(), config.fp32)
        exempt = functools.partial(self._is_exempt, name)
        sites = BlockSites(module)
        self._sites.append(sites)
        if config.mode == "none":
            is_exact = functools.partial(
                why_exact, rules=config.rules(), attention=config.attention, exempt=exempt
            )
            return UncheckpointedBlock(module, name, store, sites, is_exact, self._take_receipt)
        plan = make_plan(
            module,
            name,
            mode=config.mode,
            preset=config.preset,
            attention=config.attention,
            user_rules=config.rules(),
            exempt=exempt,
        )
        options = {
            "preserve_rng_state": config.preserve_rng_state,
            "determinism_check": config.determinism_check,
        }
        checkpoint = BlockCheckpoint(name, plan, store, sites, options, self._take_receipt)
        checkpoint.used_rules = self.used_rules
        return checkpoint_wrapper(module, checkpoint_fn=checkpoint)

    def _is_exempt(self, block: str, module: str) -> bool:
        config = cast("FP8AC.Config", self.config)
        layer = block.rpartition(".")[2]
        if layer.isdecimal() and not self._prefix:
            if int(layer) < config.exempt_first:
                return True
            if int(layer) >= self._total_layers - config.exempt_last:
                return True
        name = f"{block}.{module}" if module else block
        parts = name.split(".")
        names = [".".join(parts[: n + 1]) for n in range(len(parts))]
        return any(fnmatch.fnmatchcase(n, glob) for glob in config.exempt for n in names)

    def _take_receipt(self, receipt: BlockReceipt) -> None:
        self.blocks[receipt.block] = receipt
        if any(waiting is None for waiting in self.blocks.values()):
            return
        run = self.receipt
        logger.info(f"What waits for backward ({len(run.blocks)} blocks, one forward):\n{run}")
        self._warn_of_idle_rules()
        if self.dump_folder:
            rank = dist.get_rank() if dist.is_initialized() else 0
            first = run.blocks[0].block.replace(".", "_")
            run.write(Path(self.dump_folder) / KEY / f"rank{rank}_{first}.json")
        if self._wants_float8() and not any(block.float8_tensors for block in run.blocks):
            kept = sorted({row.treatment for row in run.rows()})
            raise RuntimeError(
                f"{KEY}: float8 was asked for and nothing was stored in it. What was kept: "
                f"{', '.join(kept) or 'nothing'}. fp32 activations need {KEY}.fp32 = 'float8'; "
                "else choose policy 'selective', 'full' or 'none'."
            )

    def _warn_of_idle_rules(self) -> None:
        config = cast("FP8AC.Config", self.config)
        if config.mode == "none":
            return
        for pattern, rule in zip(config.verdicts, config.rules(), strict=True):
            if rule not in self.used_rules:
                logger.warning(
                    f"{KEY}.verdicts: {pattern!r} decided nothing in these blocks: no operation "
                    "matches it, or an earlier verdict does."
                )

    def _wants_float8(self) -> bool:
        config = cast("FP8AC.Config", self.config)
        if all(self._is_exempt(name, "") for name in self.blocks):
            return False
        if config.mode == "selective" and config.preset == "stock":
            return any(rule.verdict is Verdict.FLOAT8 for rule in config.rules())
        return True


def receipt_of(model_parts: Iterable[nn.Module]) -> RunReceipt:
    """What the first forward of each wrapped block in ``model_parts`` stored, as far as it ran."""
    receipts = []
    for part in model_parts:
        for module in part.modules():
            owner: Any = module
            if isinstance(module, CheckpointWrapper):
                owner = module.checkpoint_fn.func
            if isinstance(owner, BlockCheckpoint | UncheckpointedBlock) and owner.receipt:
                receipts.append(owner.receipt)
    return RunReceipt(receipts)


def _number_of_layers(model: nn.Module) -> int:
    """Of the whole model, of which ``model`` may be a pipeline stage."""
    config = getattr(model, "config", None)
    layers = getattr(config, "layers", None)
    return len(layers) if layers else len(list(model.get_submodule("layers").children()))
