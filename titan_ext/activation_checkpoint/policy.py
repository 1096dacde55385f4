"""The policy ``fp8``: Titan's activation checkpointing with a fourth way to keep an activation.

Titan builds it from its config and applies it to a model, as it does its own policies.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.tools.logging import logger

from titan_ext.activation_checkpoint.blocks import BlockCheckpoint, BlockStore
from titan_ext.activation_checkpoint.checks import (
    KEY,
    check_compiled,
    check_config,
    check_names,
    check_rules,
)
from titan_ext.activation_checkpoint.compiled.codec import Saved
from titan_ext.activation_checkpoint.compiled.decisions import (
    Decisions,
    none_decisions,
    plan_decisions,
)
from titan_ext.activation_checkpoint.compiled.receipts import graph_rows, write_graphs
from titan_ext.activation_checkpoint.early_scores import EarlyScoreRoutedExperts
from titan_ext.activation_checkpoint.exemptions import is_exempt, number_of_layers
from titan_ext.activation_checkpoint.presets import Attention, BlockPlan, Preset, make_plan
from titan_ext.activation_checkpoint.receipts import BlockReceipt, RunReceipt
from titan_ext.activation_checkpoint.sites import BlockSites
from titan_ext.activation_checkpoint.uncheckpointed import UncheckpointedBlock, why_exact
from titan_ext.activation_checkpoint.verdicts import Rule, Verdict, parse_rules
from titan_ext.flag_tables import table_flag
from titan_ext.fp8 import Codec

__all__ = ["FP8AC", "check_stored", "receipt_of"]

Mode = Literal["selective", "full", "none"]

_POLICIES: WeakKeyDictionary[nn.Module, "FP8AC"] = WeakKeyDictionary()


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

        verdicts: Annotated[dict[str, str], table_flag()] = field(default_factory=dict)
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

        score_before_last_gemm: bool = False
        """
        Multiply by the routing scores before the last expert GEMM, so that its output need not be
        kept or computed again. Changes the rounding of the forward. Without EP and TP only.
        """

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
            check_config(self)
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

        def check_compiled(self) -> None:
            """Refuse what compiled code cannot do.

            Raises:
                ValueError: naming the key.
            """
            check_compiled(self)

    def __init__(self, config: "FP8AC.Config", dump_folder: str = "") -> None:
        super().__init__(config, dump_folder)
        self.graphs: list[list[Saved]] = []
        self.blocks: dict[str, BlockReceipt | None] = {}
        self.used_rules: set[Rule] = set()
        self._sites: list[BlockSites] = []
        self._total_layers = 0
        self._is_compiled = False
        self._prefix = ""

    @property
    def receipt(self) -> RunReceipt:
        return RunReceipt([receipt for receipt in self.blocks.values() if receipt is not None])

    def apply(self, model: nn.Module) -> None:
        """Wrap every transformer block of ``model``, in place: the decoder first, then any towers.

        Raises:
            ValueError: if a name in ``verdicts`` or ``exempt`` is of no module.
        """
        if not self._total_layers:
            self.prepare(model)
        elif self.blocks or self._is_compiled:
            self._prefix = f"{type(model).__name__}."
        super().apply(model)

    def prepare(self, model: nn.Module) -> None:
        """Check the names of ``config`` against the blocks of ``model``.

        Raises:
            ValueError: if a name in ``verdicts`` or ``exempt`` is of no module.
        """
        config = cast("FP8AC.Config", self.config)
        self._total_layers = number_of_layers(model)
        early = [isinstance(module, EarlyScoreRoutedExperts) for module in model.modules()]
        if config.score_before_last_gemm and not any(early):
            raise ValueError(
                f"{KEY}.score_before_last_gemm: this model was not built for it; call "
                "titan_ext.activation_checkpoint.early_scores.use_early_scores on its spec first."
            )
        check_names(config.rules(), config.exempt, model, self._total_layers)
        _POLICIES[model] = self

    def compiled_codec(self) -> Codec:
        """How float8 tensors are stored."""
        return cast("FP8AC.Config", self.config).codec()

    def compiled_decisions(self, block: nn.Module, name: str) -> Decisions | None:
        """The verdicts for a block that is compiled (see ``activation_checkpoint.units``).

        Raises:
            ValueError: for what compiled code cannot do.
        """
        config = cast("FP8AC.Config", self.config)
        config.check_compiled()
        self._is_compiled = True
        exempt = functools.partial(self._is_exempt, name)
        exempted = sorted(module for module, _ in block.named_modules() if exempt(module))
        if config.mode == "none":
            is_exact = functools.partial(
                why_exact, rules=config.rules(), attention=config.attention, exempt=exempt
            )
            return none_decisions(is_exact, key=f"{config} {exempted}")
        plan = self._plan(block, name, exempt)
        return plan_decisions(plan, self.used_rules, key=f"{config} {plan.attention} {exempted}")

    def take_graph(self, saved: list[Saved]) -> None:
        """Note what a compiled graph saves, say it, and write it to the run's folder."""
        self.graphs.append(saved)
        graphs = [graph_rows(graph, self.compiled_codec()) for graph in self.graphs]
        lines = [
            f"{row.tensors:4} {row.nbytes:12,} B {row.nbytes_a_token:8,} B a token  "
            f"{row.source}: {row.treatment}"
            for row in graphs[-1]
        ]
        logger.info("\n".join([f"Compiled graph {len(graphs)} saves for backward:", *lines]))
        if self.dump_folder:
            rank = dist.get_rank() if dist.is_initialized() else 0
            write_graphs(graphs, Path(self.dump_folder) / KEY / f"graphs_rank{rank}.json")

    def check_stored(self) -> None:
        """After a step: float8 must have been stored, if it was asked for.

        Raises:
            RuntimeError: if nothing was.
        """
        stored = {tensor.treatment for graph in self.graphs for tensor in graph}
        if self._is_compiled and self._wants_float8():
            self._refuse_empty(stored, any(kept.startswith("float8") for kept in stored))

    def _refuse_empty(self, kept: Iterable[str], has_float8: bool) -> None:
        if not has_float8:
            raise RuntimeError(
                f"{KEY}: float8 was asked for and nothing was stored in it. What was kept: "
                f"{', '.join(sorted(kept)) or 'nothing'}. fp32 activations need {KEY}.fp32 = "
                "'float8'; else choose policy 'selective', 'full' or 'none'."
            )

    def _plan(self, block: nn.Module, name: str, exempt: Callable[[str], bool]) -> BlockPlan:
        config = cast("FP8AC.Config", self.config)
        return make_plan(
            block,
            name,
            mode=config.mode,
            preset=config.preset,
            attention=config.attention,
            user_rules=config.rules(),
            exempt=exempt,
        )

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
        plan = self._plan(module, name, exempt)
        options = {
            "preserve_rng_state": config.preserve_rng_state,
            "determinism_check": config.determinism_check,
        }
        checkpoint = BlockCheckpoint(name, plan, store, sites, options, self._take_receipt)
        checkpoint.used_rules = self.used_rules
        return checkpoint_wrapper(module, checkpoint_fn=checkpoint)

    def _is_exempt(self, block: str, module: str) -> bool:
        config = cast("FP8AC.Config", self.config)
        layers = self._total_layers if not self._prefix else None
        return is_exempt(config, block, module, layers)

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
        if self._wants_float8():
            kept = {row.treatment for row in run.rows()}
            self._refuse_empty(kept, any(block.float8_tensors for block in run.blocks))

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
        if self.blocks and all(self._is_exempt(name, "") for name in self.blocks):
            return False
        if config.mode == "selective" and config.preset == "stock":
            return any(rule.verdict is Verdict.FLOAT8 for rule in config.rules())
        return True


def check_stored(model_parts: Iterable[nn.Module]) -> None:
    """``FP8AC.check_stored`` for the policies of ``model_parts``."""
    for part in model_parts:
        if part in _POLICIES:
            _POLICIES[part].check_stored()


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
