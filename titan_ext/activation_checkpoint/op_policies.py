# SPDX-License-Identifier: BSD-3-Clause
"""Policies for the outputs of each operation of a block, and the rules that choose them.

The user's rules (the table ``op_policies``) come first, then the preset's; the first that matches
decides. If none matches, the block saves what stock selective checkpointing saves, or what is
expensive. Eager and compiled code ask the same ``Resolver``. Nothing here touches autograd.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import spmd_types as spmd
from torch.utils.checkpoint import CheckpointPolicy

from titan_ext.activation_checkpoint.op_effects import (
    TO_COPY,
    chooses,
    fixes_routing,
    has_no_effects,
    is_copy_to_host,
    is_exchange,
    looks_up,
    makes_views,
    may_look_up,
    op_name,
)
from titan_ext.activation_checkpoint.op_rules import (
    GROUPED_GEMMS,
    INPUT,
    ROOT,
    OpLocation,
    OpPolicy,
    Rule,
    is_exempt,
)
from titan_ext.components.overlap import current_half

# Titan's list of what to save (_get_default_save_ops) lacks the kernel of CPUs.
_CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class _Candidates(NamedTuple):
    user_rules: tuple[Rule, ...]
    preset_rules: tuple[Rule, ...]
    is_exempt: bool


@dataclass(frozen=True, kw_only=True)
class BlockRecipe:
    """The tensors that a kind of block keeps for backward."""

    user_rules: tuple[Rule, ...]
    """Rules of the configuration. They come first; an unsound "discard" is an error."""
    preset_rules: tuple[Rule, ...]
    """Come next; an unsound "discard" is skipped."""
    base: Literal["stock", "expensive", "routing", "autograd"]
    """What to save where no rule matches: "stock" (what stock selective saves), "expensive" (GEMMs,
    attention, exchanges) or "routing" (only what fixes the routing). With "autograd" nothing runs
    again, and ``module_policy`` decides."""
    saved: OpPolicy
    """The policy for what the base saves; ``input``: for the inputs of the block."""
    input: OpPolicy
    saves_all_to_all: bool
    """Whether what an exchange of tokens delivers may be saved."""
    exempt: tuple[str, ...]

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All rules, in the order in which they decide."""
        return (*self.user_rules, *self.preset_rules)


@dataclass(frozen=True)
class BlockPolicies:
    """The policies for the operations of one block."""

    name: str
    """Of the block, in the model ("layers.3")."""
    recipe: BlockRecipe
    stock_policy: Callable[[], Callable[..., CheckpointPolicy]]
    """Makes Titan's policy for one forward, to be called for each operation, in order; it may save
    ``stock_ops``."""
    stock_ops: frozenset[str]
    # Answers that were given: these are asked for each operation, on the host.
    _by_location: dict[OpLocation, _Candidates] = field(default_factory=dict, init=False)
    _by_module: dict[str, tuple[OpPolicy, str]] = field(default_factory=dict, init=False)
    _fixed: dict[tuple[int, str], tuple[CheckpointPolicy | None, bool]] = field(
        default_factory=dict, init=False
    )

    @functools.cached_property
    def rounds(self) -> bool:
        """True if float8 may change what a recompute sees, so that choices have to be kept."""
        recipe = self.recipe
        policies = (recipe.saved, recipe.input, *(rule.policy for rule in recipe.rules))
        is_exempted = is_exempt(recipe.exempt, self.name, "")
        return any(policy.is_float8 for policy in policies) and not is_exempted

    @property
    def names_operands(self) -> bool:
        """True if a rule or a message needs the parameter of an operation."""
        rules = self.recipe.rules
        return any(r.operand != "*" or r.policy is OpPolicy.DISCARD for r in rules)

    def base_policy(self, location: OpLocation, out: Any, *, stock_saves: bool) -> OpPolicy:
        """The policy where no rule matches."""
        if fixes_routing(location.op, out):
            return OpPolicy.SAVE
        recipe = self.recipe
        if recipe.base == "routing" or (is_exchange(location.op) and not recipe.saves_all_to_all):
            return OpPolicy.RECOMPUTE
        saves = stock_saves if recipe.base == "stock" else self.is_expensive(location.op)
        if not saves:
            return OpPolicy.RECOMPUTE
        # What attention's own backward reads (q, k, v, its output) stays exact: rounding it is what
        # costs its gradient the most.
        return OpPolicy.SAVE if "inner_attention" in location.module.split(".") else recipe.saved

    def is_expensive(self, op: str) -> bool:
        """True if a rule without an operation applies to ``op``."""
        # Titan saves these for their values (a scale, the experts' choice), not for what they cost.
        if op in ("aten.max", "aten.topk"):
            return False
        return op in self.stock_ops or op in GROUPED_GEMMS or op == _CPU_ATTENTION

    def fixed(self, func: Any, module: str) -> tuple[CheckpointPolicy | None, bool]:
        """The answer for an operation of ``module`` that is always recomputed, as most are; but see
        ``is_copy_to_host`` and ``keeps_choice``. None for one that may be saved, or that a rule
        counts.

        Also whether there is one, and nothing else to ask: the operation ``has_no_effects``.
        """
        key = id(func), module  # operations are never freed, and slow to hash
        known = self._fixed.get(key)
        if known is None:
            op = op_name(func)
            is_expensive = self.is_expensive(op)
            may_be_saved = (
                op == "aten.topk"
                or is_exchange(op)
                or (self.rounds and may_look_up(func))
                or (self.recipe.base != "routing" and (is_expensive or op in self.stock_ops))
                or any(
                    (is_expensive if rule.op == "*" else fnmatchcase(op, rule.op))
                    and rule.matches_module(module, self.name)
                    for rule in self.recipe.rules
                )
            ) and not makes_views(func)
            # "Must" spares torch (2.15) a search for side effects, a tenth of the host's time.
            plain = op.startswith("aten.")
            again = CheckpointPolicy.MUST_RECOMPUTE if plain else CheckpointPolicy.PREFER_RECOMPUTE
            answer = None if may_be_saved else again
            known = self._fixed[key] = answer, not may_be_saved and has_no_effects(func)
        return known

    def keeps_choice(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> bool:
        """True if an operation chooses by values that a recompute may see rounded."""
        return self.rounds and chooses(func, args, kwargs, out)

    def check_looked_up(self, location: OpLocation) -> None:
        """Check that float8 rounds nothing for an operation that ``looks_up``, or may do so.

        Raises ValueError: derivatives would go to other values than those that the forward found.
        """
        is_asked_for = any(
            rule.op != "*" and rule.policy is OpPolicy.RECOMPUTE
            for rule in self.candidates(location).user_rules
        )
        is_exact = not self.module_policy(location.module)[0].is_float8
        if not is_asked_for and not (is_exact and self.recipe.base == "autograd"):
            raise ValueError(
                f"activation_checkpoint: the derivative of {location} of {self.name} looks for its "
                "result among values that float8 may have rounded, and would find others. Expected "
                f'{self.name} in activation_checkpoint.exempt, or op_policies."'
                f'{location.module or ROOT}:{location.op}" = "recompute" if that does not matter.'
            )

    def candidates(self, location: OpLocation) -> _Candidates:
        """The rules that match ``location``, occurrences apart; looked up once."""
        known = self._by_location.get(location)
        if known is None:
            expensive = self.is_expensive(location.op)
            user_rules, preset_rules = (
                tuple(r for r in rules if r.matches(location, self.name, expensive=expensive))
                for rules in (self.recipe.user_rules, self.recipe.preset_rules)
            )
            exempt = is_exempt(self.recipe.exempt, self.name, location.module)
            known = self._by_location[location] = _Candidates(user_rules, preset_rules, exempt)
        return known

    def module_policy(self, module: str) -> tuple[OpPolicy, str]:
        """The policy of what a module saves under base "autograd", and why if it is exact."""
        known = self._by_module.get(module)
        if known is None:
            parts, why = module.split("."), ""
            rules = self.recipe.user_rules
            rule = next((r for r in rules if r.matches_module(module, self.name)), None)
            if rule is not None:
                why = "" if rule.policy.is_float8 else "by op_policies"
            elif "inner_attention" in parts:
                why = "attention"
            elif "router" in parts:
                why = "routing"
            policy = rule.policy if rule else OpPolicy.SAVE if why else OpPolicy.SAVE_FLOAT8
            if is_exempt(self.recipe.exempt, self.name, module):
                policy, why = policy.exact, "exempt"
            known = self._by_module[module] = policy, why
        return known

    def key(self, modules: Sequence[str]) -> str:
        """Equal for two blocks, or parts of them, with such modules only if they decide alike."""
        exempted = [name for name in modules if is_exempt(self.recipe.exempt, self.name, name)]
        ruled = [
            (rule, named)
            for rule in self.recipe.rules
            if (named := [name for name in modules if rule.matches_module(name, self.name)])
        ]
        base = (self.recipe.base, self.recipe.saved, self.recipe.saves_all_to_all)
        return f"{base} {exempted} {ruled}"


class Resolver:
    """Decides for one forward of a block. Ask in the order of its operations: some rules count.

    Where the batch runs as two halves, each is counted by itself (``components.overlap``).
    ``used_rules`` collects the user's rules that decided an operation. A preset discards nothing at
    ``refused_discards``, which are read, nor under SPMD type checking, whose nodes hide readers.
    """

    def __init__(
        self,
        policies: BlockPolicies,
        used_rules: set[Rule] | None = None,
        refused_discards: set[OpLocation] | frozenset[OpLocation] = frozenset(),
    ) -> None:
        self._policies = policies
        self._stock_policies = policies.stock_policy(), policies.stock_policy()
        self._used_rules = used_rules if used_rules is not None else set()
        self._refused_discards = refused_discards
        self._refuses_discards = spmd.is_type_checking()
        self._matches: Counter[tuple[Rule, int]] = Counter()

    def resolve_input(self, arrives: str = "") -> OpPolicy:
        """The policy of the block's inputs, or of the tokens that the module ``arrives`` brings."""
        recipe = self._policies.recipe
        if recipe.base == "autograd":
            return self._policies.module_policy(arrives)[0]
        if not arrives:
            return self._decide(OpLocation("", INPUT), recipe.input)
        exchange = OpLocation(arrives, "_c10d_functional.all_to_all_single")
        policy = self._decide(exchange, recipe.saved)
        return policy if policy.keeps else recipe.saved  # it is kept in any case

    def resolve(
        self, location: OpLocation, ctx: Any, func: Any, args: Any, kwargs: dict[str, Any], out: Any
    ) -> OpPolicy:
        """The policy of an operation's outputs; the arguments after ``location`` are torch's.

        Callers may skip operations for which ``BlockPolicies.fixed`` has an answer.
        """
        is_choice = self._policies.keeps_choice(func, args, kwargs, out)
        if self._policies.rounds and looks_up(func, args, out):
            self._policies.check_looked_up(location)
        if self._policies.recipe.base == "autograd":
            policy = self._policies.module_policy(location.module)[0]
            return policy.exact if is_choice else policy
        # It counts the operations that it is asked about.
        stock_policy = self._stock_policies[current_half()]
        stock_saves = (
            self._policies.recipe.base == "stock"
            and stock_policy(ctx, func, *args, **kwargs) in _SAVES
        )
        if func is TO_COPY and is_copy_to_host(args, kwargs):
            return OpPolicy.SAVE
        if makes_views(func):
            return OpPolicy.RECOMPUTE
        base = self._policies.base_policy(location, out, stock_saves=stock_saves)
        if fixes_routing(location.op, out):
            return self._decide(location, base, keeps_base=True)
        return self._decide(location, OpPolicy.SAVE if is_choice else base, is_choice=is_choice)

    def _decide(
        self,
        location: OpLocation,
        base: OpPolicy,
        *,
        keeps_base: bool = False,
        is_choice: bool = False,
    ) -> OpPolicy:
        user_rules, preset_rules, is_exempt = self._policies.candidates(location)
        if not user_rules and not preset_rules:
            return base.exact if is_exempt else base
        # Every rule counts its matches, so each is asked, whatever an earlier one decides.
        by_user = [rule for rule in user_rules if self._applies(rule)]
        by_preset = [rule for rule in preset_rules if self._applies(rule)]
        if keeps_base:
            return base
        if is_choice:  # the user's, if a rule names operations and not just modules
            by_preset = []
            by_user = [r for r in by_user if r.op != "*" and r.policy is not OpPolicy.DISCARD]
        if by_user:
            self._used_rules.add(by_user[0])
            policy = by_user[0].policy
        else:
            if self._refuses_discards or location in self._refused_discards:
                kept = [rule for rule in by_preset if rule.policy is not OpPolicy.DISCARD]
                if by_preset != kept and is_exchange(location.op) and not base.keeps:
                    base = OpPolicy.SAVE  # ranks that disagree must not exchange alone
                by_preset = kept
            policy = by_preset[0].policy if by_preset else base
        return policy.exact if is_exempt or is_choice else policy

    def _applies(self, rule: Rule) -> bool:
        if not rule.occurrence:
            return True
        self._matches[rule, current_half()] += 1
        return self._matches[rule, current_half()] == rule.occurrence
