# SPDX-License-Identifier: BSD-3-Clause
"""The policy ``fp8``: activation checkpointing that can also store in float8, or discard.

Titan builds it from its config and applies it to a model, like its own policies.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, SelectiveAC
from torchtitan.tools.logging import logger

from titan_ext.activation_checkpoint.blocks import BlockCheckpoint
from titan_ext.activation_checkpoint.locator import OpLocator
from titan_ext.activation_checkpoint.memory_report import BlockMemoryReport, PolicyReport
from titan_ext.activation_checkpoint.no_recompute import NoRecompute, NoRecomputeBlock
from titan_ext.activation_checkpoint.op_policies import BlockPolicies, BlockRecipe
from titan_ext.activation_checkpoint.op_rules import (
    KEY,
    Budget,
    Rule,
    check_modules,
    check_releases,
    is_exempt,
    join,
    parse_rules,
)
from titan_ext.activation_checkpoint.presets import Preset, block_policies, block_recipe
from titan_ext.base.facts import LOSSY, ROUNDING, KeyFacts
from titan_ext.base.messages import BYTES, check_choice, parse_bytes, table_flag
from titan_ext.components.early_scores import has_early_scores
from titan_ext.components.exchange_policy import Exchanges
from titan_ext.fp8 import SavedTensorStore
from titan_ext.fp8.codec import default_codec
from titan_ext.fp8.offload import Offload
from titan_ext.fsdp.units import vision_modules

Mode = Literal["selective", "full", "no_recompute"]


class FP8AC(ActivationCheckpointing):
    """Saves, recomputes, saves in float8 or discards, operation by operation."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        mode: Annotated[Mode, KeyFacts(LOSSY)] = "selective"
        """
        "selective": by operation, as ``preset`` and ``op_policies`` say. "full": keep only the
        blocks' inputs, in float8, and what fixes the routing. "no_recompute": recompute nothing,
        and keep what autograd saves in float8.
        """

        preset: Annotated[Preset, KeyFacts(LOSSY)] = "memory"
        """
        With mode "selective". "memory": attention and shared experts, at about half of stock
        selective's bytes. "balanced": attention, and w3 of all experts and feed-forwards.
        "speed": also w1, at about stock's bytes. "gemms": also q, k and v, so that few
        GEMMs run again. "stock": what stock selective saves, exactly, for ``op_policies`` to start
        from.
        """

        op_policies: Annotated[dict[str, str], table_flag(), KeyFacts(LOSSY)] = field(
            default_factory=dict
        )
        """
        "module[:op[:operand[:occurrence]]]" -> save, save_float8, offload, offload_float8,
        recompute or discard. These are globs; the module is named within the block or in the model.
        The first that matches decides, before the preset. "input" names the blocks' inputs,
        "(block)" a block without its modules.
        """

        offload_limit: Annotated[str, KeyFacts()] = ""
        """
        Most pinned host memory of a rank for "offload" and "offload_float8" ("64GiB"). What does
        not fit stays on the device. "": no limit.
        """

        budget: Annotated[str, KeyFacts(LOSSY)] = ""
        """
        Bytes that a rank's blocks may hold for backward: "20GiB", or "fit" for what its memory
        leaves ("fit 80GiB": a device of that). Before it starts, the run finds the ``op_policies``
        that take the least time within it (docs/float8.md).
        """

        solved_with: Annotated[dict[str, str], table_flag(), KeyFacts()] = field(
            default_factory=dict
        )
        """
        The releases of torch and torchtitan that a solved ``op_policies`` was found with. dry-run
        writes this; other releases are refused. Empty: not checked.
        """

        score_before_last_gemm: Annotated[bool, KeyFacts(ROUNDING, off=False)] = False
        """
        Multiply by the routing scores before the last expert GEMM, so that its output need not be
        kept or computed again, nor sent again with expert parallelism. Changes the rounding of the
        forward.
        """

        exempt: Annotated[list[str], KeyFacts()] = field(default_factory=list)
        """
        Globs for modules, named in the model, that use no float8 ("layers.0", "*.attention").
        """

        def __post_init__(self) -> None:
            for key, literal in {"mode": Mode, "preset": Preset}.items():
                check_choice(f"{KEY}.{key}", getattr(self, key), get_args(literal))
            check_releases(self.solved_with)
            for wrong in (*self._wrong_with_budget(), *self._wrong_together()):
                raise ValueError(f"{KEY}.{wrong}")

        def _wrong_with_budget(self) -> Iterator[str]:
            """A message for each key that a budget refuses, without the section."""
            if not self.budget:
                return
            Budget.parse(self.budget)
            for key, free, expected in (
                ("mode", "selective", 'mode = "selective"'),
                ("op_policies", {}, "no op_policies"),
                ("preset", "memory", "no preset"),
            ):
                if (value := getattr(self, key)) != free:
                    yield (
                        f"budget is {self.budget!r}, for which the run finds {KEY}.op_policies; "
                        f"{KEY}.{key} is {value!r}. Expected {expected}, or no budget."
                    )

        def _wrong_together(self) -> Iterator[str]:
            """A message for keys that do not go together, without the section."""
            recomputes, limit = self.mode != "no_recompute", self.offload_limit
            if self.mode != "selective" and self.preset != "memory":
                yield f'preset is {self.preset!r}; it has no meaning with mode "{self.mode}".'
            if self.debug and recomputes:
                yield (
                    "debug is on; torch has no debug mode for selective checkpoints. Expected "
                    'false, or policy "full".'
                )
            for rule in self.rules():
                if not recomputes and (not rule.policy.keeps or rule.op != "*"):
                    yield (
                        'op_policies: with mode "no_recompute" autograd decides what is saved; '
                        "expected modules with save, save_float8, offload or offload_float8, got "
                        f"{rule.module}:{rule.op} = {rule.policy.value!r}."
                    )
            if limit and parse_bytes(limit) is None:
                yield (
                    f'offload_limit is {limit!r}; expected a size such as "64GiB" (units: '
                    f'{", ".join(BYTES)}), or "" for no limit.'
                )
            if limit and not self.offloads():
                yield (
                    f"offload_limit is {limit!r}, but nothing is offloaded: expected offload or "
                    f"offload_float8 in {KEY}.op_policies, or a budget."
                )

        def rules(self) -> tuple[Rule, ...]:
            """``op_policies``, parsed."""
            return parse_rules(self.op_policies)

        def policies_of(
            self, block: nn.Module, name: str, exchanges: Exchanges | None = None
        ) -> BlockPolicies:
            """The policies of the block called ``name`` (``presets.block_recipe``)."""
            return block_policies(block, name, block_recipe(block, self, exchanges))

        def offloads(self) -> bool:
            """True if a rule keeps anything on the host, or a budget may."""
            solves = bool(self.budget and self.offload_limit)
            return solves or any(rule.policy.on_host for rule in self.rules())

        def wrong_exempt(self, blocks: int) -> Iterator[str]:
            """A message if the policy asks for float8 and exempts every block of a model."""
            names = [f"layers.{index}" for index in range(blocks)]
            if self.wants_float8() and all(is_exempt(self.exempt, name, "") for name in names):
                yield (
                    f"{KEY}.exempt is {self.exempt}, which takes all {blocks} blocks: nothing "
                    'would be stored in float8. Expected fewer, or policy "selective".'
                )

        def wants_float8(self) -> bool:
            """True if the policy stores anything in float8, apart from exemptions."""
            if self.budget:
                return False  # it may
            if self.mode == "selective" and self.preset == "stock":
                return any(rule.policy.is_float8 for rule in self.rules())
            return True

    def __init__(
        self,
        config: "FP8AC.Config",
        dump_folder: str = "",
        *,
        decided: "Checkpointing | None" = None,
    ) -> None:
        """``decided``: what a recipe has; without one ``prepare`` decides by the blocks alone."""
        super().__init__(config, dump_folder)
        self._config, self._decided = config, decided
        self.codec = default_codec()
        self.used_rules: set[Rule] = set()
        self.memory_report = PolicyReport(self.codec, dump_folder)
        """What the first forward of each block stored; complete after the first step."""
        self._locators: dict[nn.Module, OpLocator] = {}
        limit = parse_bytes(config.offload_limit)
        self._offload = Offload(limit, f"{KEY}.offload_limit") if config.offloads() else None
        self._names: dict[nn.Module, str] = {}

    def apply(self, model: nn.Module) -> None:
        """Wrap every transformer block of ``model``, in place: the decoder first, then towers."""
        self.prepare(model)
        super().apply(model)

    def prepare(self, model: nn.Module) -> None:
        """Decide for ``model``, unless a recipe has; see ``resolve_checkpointing``."""
        self._decided = self._decided or resolve_checkpointing(model, self._config)
        self._names = {block: name for name, block in checkpointed_blocks(model)}
        model.__dict__["_memory_report"] = self.memory_report

    def compiled_policies(self, block: nn.Module, name: str) -> BlockPolicies:
        """The policies for a block that is compiled (see ``compile``)."""
        self.memory_report.is_compiled = True
        return self._policies_of(block, name)

    def _policies_of(self, block: nn.Module, name: str) -> BlockPolicies:
        decided = self._decided.blocks if self._decided else {}
        recipe = decided.get(name) or block_recipe(block, self._config)
        policies = block_policies(block, name, recipe)
        self.memory_report.policies.append(policies)
        return policies

    # Private in Titan, but what its ``apply`` calls for each block, and its policies override.
    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        name = self._names.get(module) or base_fqn or "block"
        self.memory_report.names.append(name)
        block = self.eager(module, self._policies_of(module, name))
        if isinstance(block, NoRecompute):
            return NoRecomputeBlock(module, block)
        # By the ``checkpoint_impl`` of torch's wrapper Titan's optimizer.py knows that the block
        # counts its tokens twice.
        return checkpoint_wrapper(module, checkpoint_fn=block)

    def eager(
        self, module: nn.Module, policies: BlockPolicies, inside: str = "", arrives: str = ""
    ) -> NoRecompute | BlockCheckpoint:
        """What runs a block eagerly, or a part in its module ``inside``, and keeps what
        ``policies`` say; ``arrives`` as in ``compile.CompiledPart``.
        """
        config, locator = self._config, self._locators.get(module) or OpLocator(module)
        self._locators[module] = locator
        common: dict[str, Any] = {
            "policies": policies,
            "store": SavedTensorStore(self.codec, modules=[module]),
            "locator": locator,
            "offload": self._offload,
            "on_report": self._take_report,
            "is_compiled": self.memory_report.is_compiled,
            "is_reported": self.memory_report.is_compiled,
            "inside": inside,
        }
        if policies.recipe.base == "autograd":
            return NoRecompute(**common)
        options = {
            "preserve_rng_state": config.preserve_rng_state,
            "determinism_check": config.determinism_check,
        }
        common |= {"options": options, "used_rules": self.used_rules, "arrives": arrives}
        return BlockCheckpoint(**common)

    def _take_report(self, report: BlockMemoryReport) -> None:
        config = self._config
        if not self.memory_report.add(report):
            return
        for pattern, rule in zip(config.op_policies, config.rules(), strict=True):
            if rule not in self.used_rules and config.mode != "no_recompute":
                logger.warning(
                    f"{KEY}.op_policies: {pattern!r} has no effect in these blocks: no operation "
                    "matches it, or an earlier pattern decides."
                )
        self.memory_report.check(self.memory_report.rows())


class SelectiveACWithoutAllToAll(SelectiveAC):
    """Stock's policy, but the recompute sends the tokens of expert parallelism again."""

    def get_save_ops(self) -> set:
        return super().get_save_ops() - {torch.ops._c10d_functional.all_to_all_single.default}


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """The tensors that the blocks of a model keep for backward."""

    policy: ActivationCheckpointing.Config | None = None
    """Titan's, ours or the user's, which its pass builds; None for no checkpointing."""
    resends: bool = False
    """Whether the recompute of Titan's selective policy sends tokens again."""
    blocks: Mapping[str, BlockRecipe] = field(default_factory=dict)
    """With policy "fp8", what each block keeps, by its name."""

    def build(self, dump_folder: str) -> ActivationCheckpointing | None:
        """The policy, for one model. Its reports go to ``dump_folder``, if that is not ""."""
        if self.policy is None:
            return None
        if isinstance(self.policy, FP8AC.Config):
            return self.policy.build(dump_folder=dump_folder, decided=self)
        if self.resends:
            return SelectiveACWithoutAllToAll(self.policy, dump_folder)
        return self.policy.build(dump_folder=dump_folder)


def resolve_checkpointing(
    model: nn.Module,
    config: ActivationCheckpointing.Config | None,
    exchanges: Exchanges | None = None,
) -> Checkpointing:
    """Decide what the blocks of ``model`` keep; it stays as it is.

    ``exchanges`` are as ``presets.block_recipe`` takes them. Raises ValueError for what a block
    cannot do, a budget that nobody has solved for, and names that are not in ``model``.
    """
    blocks: dict[str, BlockRecipe] = {}
    if isinstance(config, FP8AC.Config):
        if config.budget:
            raise ValueError(
                f"{KEY}.budget is {config.budget!r}; only a run of titan_ext's trainer solves for "
                f"one. Expected the {KEY}.op_policies that titan_ext dry-run --activations finds "
                "for it."
            )
        if config.score_before_last_gemm and not has_early_scores(model):
            raise ValueError(
                f"{KEY}.score_before_last_gemm: this model was not built for it; call "
                "titan_ext.components.early_scores.use_early_scores on its spec first."
            )
        check_modules(config.rules(), config.exempt, model)
        blocks = {
            name: block_recipe(block, config, exchanges)
            for name, block in checkpointed_blocks(model)
        }
    # A subclass of Titan's decides by itself, and the recipes of ours have decided.
    resends = type(config) is SelectiveAC.Config and bool(exchanges and not exchanges.saved)
    return Checkpointing(policy=config, resends=resends, blocks=blocks)


def checkpointed_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of the blocks that a policy wraps: of the decoder, and of vision towers.

    As in Titan, blocks of multi-token prediction are not among them.
    """
    for tower in ("", *vision_modules(model)):
        layers = getattr(model.get_submodule(tower), "layers", None)
        for name, block in layers.named_children() if isinstance(layers, nn.Module) else ():
            yield join(tower, f"layers.{name}"), block


def enable_fp8_activation_checkpointing(
    model: nn.Module, config: FP8AC.Config | None = None, *, dump_folder: str = ""
) -> FP8AC:
    """Checkpoint the blocks of a model in place, without Titan's trainer; return the policy.

    Call it after sharding over the model-parallel axes and before FSDP. The blocks are the children
    of ``model.layers``. The memory report goes to ``dump_folder``, as JSON, if it is not "".
    """
    policy = FP8AC(config or FP8AC.Config(), dump_folder)
    policy.apply(model)
    return policy


def measure_block(
    block: nn.Module,
    *args: Any,
    config: FP8AC.Config | None = None,
    loss: Callable[[torch.Tensor], torch.Tensor] | None = None,
    **kwargs: Any,
) -> BlockMemoryReport:
    """Run one block forward and backward under a policy; report what was stored and recomputed.

    ``args`` and ``kwargs`` are its inputs, ``loss`` makes a scalar of its output (None: the sum).
    The block stays as it was; gradients accumulate in its parameters and inputs.
    """
    policy = FP8AC(config or FP8AC.Config())
    holder = nn.Module()
    holder.layers = nn.ModuleDict({"0": block})
    policy.apply(holder)
    (locator,) = policy._locators.values()
    try:
        out = holder.get_submodule("layers.0")(*args, **kwargs)
        (loss(out) if loss is not None else out.float().sum()).backward()
    finally:
        locator.remove()
    (report,) = policy.memory_report.blocks
    return report
