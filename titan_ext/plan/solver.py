# SPDX-License-Identifier: BSD-3-Clause
"""The best policy for every operation of a block within a budget of bytes.

A mixed integer program over traced blocks (``block_graph``), which SciPy's HiGHS solves. It knows
the rules of our checkpoint. What is not saved runs again, read or not, unless it is discarded. A
discard is sound where its values only pass through operations that backward does not look into.
The solution becomes an ordinary ``op_policies`` table for ``preset = "stock"``.

With a host, a block may offload as much as the link takes during one forward of it. Then copies
cost no time, and bytes of the last blocks only.
"""

import contextlib
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from titan_ext.activation_checkpoint.op_effects import fixes_routing
from titan_ext.activation_checkpoint.op_policies import BlockPolicies
from titan_ext.activation_checkpoint.op_rules import INPUT, ROOT, OpPolicy, parse_rules
from titan_ext.base.messages import format_bytes
from titan_ext.plan.block_graph import CHOICES, BlockGraph, Node, blocks_on_device

SAVE, FLOAT8, RECOMPUTE, DISCARD = CHOICES
OFFLOAD, OFFLOAD_FLOAT8 = OpPolicy.OFFLOAD, OpPolicy.OFFLOAD_FLOAT8
_ORDER = (SAVE, FLOAT8, OFFLOAD, OFFLOAD_FLOAT8, RECOMPUTE, DISCARD)
"""Order of a node's columns: it decides between equal solutions."""
_US = 1e3
"""Microseconds a millisecond: the unit of the objective, so that tolerances suit it."""
_A_RULE_US = 1e-3
"""Least cost of a policy other than "recompute": no rules that gain nothing."""
# Not fitted. The best of all choices is met within 1e-3 in test_ac_budget.py.
_GAP = 1e-4
# Not measured: a solve takes seconds.
_TIME_LIMIT_S = 60.0
_INFEASIBLE = 2
"""SciPy's ``status`` of a proof that there is no solution."""


class BudgetTooSmallError(ValueError):
    """No choice holds as few bytes; ``least`` is the least possible."""

    def __init__(self, budget: int, least: int) -> None:
        super().__init__(
            f"{format_bytes(budget)} for activations cannot be met: the least possible is "
            f"{format_bytes(least)}. It keeps the blocks' inputs and what fixes the routing."
        )
        self.least = least


@dataclass(frozen=True)
class BlockKind:
    """Blocks of one kind; ``count`` forwards of them wait for their backward at once."""

    graph: BlockGraph
    count: int = 1


@dataclass(frozen=True)
class Solution:
    """Policies by kind and node, and their price over all blocks."""

    chosen: list[list[OpPolicy]]
    nbytes: int
    ms: float
    host_nbytes: int

    @classmethod
    def of(cls, kinds: Sequence[BlockKind], chosen: list[list[OpPolicy]]) -> "Solution":
        both = list(zip(kinds, chosen, strict=True))
        prices = [kind.graph.price(c, kind.count) for kind, c in both]
        host = sum(kind.count * kind.graph.host_nbytes(c) for kind, c in both)
        return cls(chosen, sum(n for n, _ in prices), sum(ms for _, ms in prices), host)


@dataclass(frozen=True)
class Host:
    """Memory for what is offloaded."""

    limit: int | None
    """Its bytes; None for no limit."""
    rate: float
    """Of the link to it, bytes/s each way."""


def solve(
    kinds: Sequence[BlockKind], budget: int, *, rule_ms: float = 0.0, host: Host | None = None
) -> Solution:
    """The policies with the least milliseconds of recompute and codec.

    Args:
        kinds: Of one model. Operations that one rule names have one policy in all of them.
        budget: Bytes held until backward, over all blocks.
        rule_ms: What an operation must save at least for a policy other than "recompute": so a
            table has no rules for tiny kernels.
        host: Where tensors may wait, too.

    Raises BudgetTooSmallError if nothing holds so little, and ValueError if the solver stops before
    it knows.
    """
    program = _Program(kinds, max(rule_ms * _US, _A_RULE_US), host)
    limit = budget
    while (found := program.minimum(limit)) is not None:
        solution = Solution.of(kinds, found)
        if solution.nbytes <= budget:
            return solution
        limit -= solution.nbytes - budget  # the solver's tolerance
    least = program.minimum(None)
    assert least is not None, "without a budget there is a solution"
    raise BudgetTooSmallError(budget, Solution.of(kinds, least).nbytes)


@dataclass
class _Program:
    """Columns: for each node its policies (0 or 1), whether its values may be NaN in the recompute
    (tainted), and whether they may differ from the forward's (inexact)."""

    kinds: Sequence[BlockKind]
    rule_us: float
    host: Host | None
    _costs: list[float] = field(default_factory=list)
    _nbytes: list[float] = field(default_factory=list)
    _upper: list[float] = field(default_factory=list)
    _integer: list[int] = field(default_factory=list)
    _rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._policies = [self._choices(kind) for kind in self.kinds]
        for kind, policies in zip(self.kinds, self._policies, strict=True):
            self._keep_discards_sound(kind.graph, policies)
            self._keep_attention_exact(kind.graph.nodes, policies)
        self._tie_what_one_rule_names()
        if self.host is not None:
            self._keep_to_the_host(self.host)

    def _column(self, cost: float = 0.0, nbytes: float = 0.0, *, most: int = 1, whole=0) -> int:
        self._costs.append(cost)
        self._nbytes.append(nbytes)
        self._upper.append(most)
        self._integer.append(whole)
        return len(self._costs) - 1

    def _row(self, columns: dict[int, float], low: float, high: float) -> None:
        self._rows.append((columns, low, high))

    def _choices(self, kind: BlockKind) -> list[dict[OpPolicy, int]]:
        """One policy for each node."""
        found = []
        for node in kind.graph.nodes:
            allowed = set(node.policies)
            if node.is_attention:
                allowed.discard(FLOAT8)
            if not node.ms and RECOMPUTE in allowed:
                allowed = {RECOMPUTE}
            if self.host is not None and len(allowed) > 1:
                on_host = {SAVE: OFFLOAD, FLOAT8: OFFLOAD_FLOAT8}
                allowed |= {on_host[policy] for policy in on_host.keys() & allowed}
            columns = {}
            for policy in (p for p in _ORDER if p in allowed):
                nbytes, ms = node.price(policy)
                us = ms * _US + (self.rule_us if policy is not RECOMPUTE else 0.0)
                held = blocks_on_device(policy, kind.count)
                columns[policy] = self._column(kind.count * us, held * nbytes, whole=1)
            self._row(dict.fromkeys(columns.values(), 1.0), 1, 1)
            found.append(columns)
        return found

    def _keep_to_the_host(self, host: Host) -> None:
        """Limit what blocks offload to what the link carries during a forward, and to the room."""
        everything: dict[int, float] = {}
        for kind, policies in zip(self.kinds, self._policies, strict=True):
            crosses: dict[int, float] = {
                column: node.price(policy)[0]
                for node, columns in zip(kind.graph.nodes, policies, strict=True)
                for policy, column in columns.items()
                if policy.on_host
            }
            forward_ms = sum(node.ms for node in kind.graph.nodes)
            self._row(crosses, 0, host.rate * forward_ms / 1e3)
            everything |= {column: kind.count * nbytes for column, nbytes in crosses.items()}
        if host.limit is not None:
            self._row(everything, 0, host.limit)

    def _keep_discards_sound(self, graph: BlockGraph, policies: Any) -> None:
        """``BlockGraph.unsound_discards`` finds none: no node that is read is tainted."""
        may_taint = [index not in graph.always_read for index in range(len(graph.nodes))]
        tainted = [self._column(most=int(may)) for may in may_taint]
        for index, node in enumerate(graph.nodes):
            if DISCARD in policies[index]:
                self._at_least(tainted[index], policies[index][DISCARD])
            for read in node.reads:
                if node.passes and may_taint[read] and RECOMPUTE in policies[index]:
                    self._at_least(tainted[index], tainted[read], policies[index][RECOMPUTE])

    def _keep_attention_exact(self, nodes: Sequence[Node], policies: Any) -> None:
        exact = {read for node in nodes if node.is_attention for read in node.reads}
        exact |= {index for index, node in enumerate(nodes) if node.is_attention}
        inexact = [self._column(most=int(index not in exact)) for index in range(len(nodes))]
        for index, node in enumerate(nodes):
            for policy in {FLOAT8, OFFLOAD_FLOAT8} & policies[index].keys():
                self._at_least(inexact[index], policies[index][policy])
            for read in node.reads if RECOMPUTE in policies[index] else ():
                self._at_least(inexact[index], inexact[read], policies[index][RECOMPUTE])

    def _at_least(self, column: int, *conditions: int) -> None:
        """``column`` is 1 if all of ``conditions`` are."""
        terms = {column: 1.0} | dict.fromkeys(conditions, -1.0)
        self._row(terms, 1 - len(conditions), math.inf)

    def _tie_what_one_rule_names(self) -> None:
        by_name: dict[str, list[dict[OpPolicy, int]]] = defaultdict(list)
        for kind, policies in zip(self.kinds, self._policies, strict=True):
            for index, name in {0: INPUT, **_names(kind.graph)}.items():
                choices = kind.graph.nodes[index].policies
                if index and choices == {SAVE, FLOAT8}:  # a piece's input has no number
                    name = name.rpartition(":")[0]
                by_name[name].append(policies[index])
        for first, *others in by_name.values():
            for other in others:
                for policy in first.keys() | other.keys():
                    signs = (first, 1.0), (other, -1.0)
                    self._row({p[policy]: sign for p, sign in signs if policy in p}, 0, 0)

    def minimum(self, budget: int | None) -> list[list[OpPolicy]] | None:
        """None if there is no solution; without ``budget`` the one with the fewest bytes.

        Raises ValueError if the solver stops without a solution and without a proof.
        """
        # Here, since a run imports this file for the key: SciPy takes each rank 0.2 s.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        unit = max(self._nbytes)  # so that the solver's tolerances suit the rows
        nbytes = np.array(self._nbytes) / unit
        costs = np.array(self._costs) if budget is not None else nbytes
        rows = list(self._rows)
        if budget is not None:
            rows.append((dict(enumerate(nbytes)), -math.inf, budget / unit))
        entries = [(r, c, v) for r, (terms, *_) in enumerate(rows) for c, v in terms.items()]
        row, column, value = zip(*entries, strict=True)
        matrix = coo_array((value, (row, column)), shape=(len(rows), len(costs))).tocsr()
        low, high = ([r[side] for r in rows] for side in (1, 2))
        with _silent():
            found = milp(
                costs,
                integrality=self._integer,
                bounds=Bounds(0, self._upper),
                constraints=LinearConstraint(matrix, low, high),
                options={"time_limit": _TIME_LIMIT_S, "mip_rel_gap": _GAP},
            )
        if found.status == _INFEASIBLE:
            return None
        if found.x is None:
            wanted = "the fewest bytes" if budget is None else format_bytes(budget)
            raise ValueError(
                f"activation_checkpoint: the solver stopped before it found policies for {wanted}: "
                f"{found.message} It did not prove that there are none. Expected another budget, "
                "or op_policies of your own."
            )
        return [
            [max(columns, key=lambda policy: found.x[columns[policy]]) for columns in policies]
            for policies in self._policies
        ]


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Close standard output: HiGHS prints a line there whatever its options are."""
    # By its descriptor: ``contextlib.redirect_stdout`` does not reach what C++ prints.
    sys.stdout.flush()
    before = os.dup(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)


def table_of(
    kinds: Sequence[BlockKind], chosen: Sequence[list[OpPolicy]], plans: Sequence[BlockPolicies]
) -> dict[str, str]:
    """The ``op_policies`` that choose so, in the order of the operations.

    ``plans`` are of each kind, for the config to which the table is added.
    """
    (input_policy,) = {policies[0] for policies in chosen}
    ends = {INPUT: str(input_policy)}, {"*": str(RECOMPUTE)}
    default = _rules_as_user(plans, ends[0] | ends[1])
    without = [k.graph.chosen_by(p) for k, p in zip(kinds, default, strict=True)]
    names = [_names(kind.graph) for kind in kinds]
    calls = [
        (call, index, plans[index].is_expensive(call.location.op))
        for index, kind in enumerate(kinds)
        for call in kind.graph.calls
    ]
    policies = [chosen[index][call.node] if call.node >= 0 else None for call, index, _ in calls]
    middle: dict[str, str] = {}
    for (call, index, is_expensive), policy in zip(calls, policies, strict=True):
        if policy is None or policy is without[index][call.node]:
            continue
        for pattern in _patterns(names[index][call.node], is_expensive):
            (rule,) = parse_rules({pattern: str(policy)})
            if rule.occurrence or all(
                p is policy
                for (other, _, expensive), p in zip(calls, policies, strict=True)
                if rule.matches(other.location, expensive=expensive)
                and not fixes_routing(other.location.op, other.out)  # kept whatever rules say
            ):
                middle[pattern] = str(policy)
                break
    table = ends[0] | middle | ends[1]
    for kind, wanted, plan in zip(kinds, chosen, _rules_as_user(plans, table), strict=True):
        assert kind.graph.chosen_by(plan) == wanted, "the table says what was solved"
    return table


def _rules_as_user(plans: Sequence[BlockPolicies], table: Mapping[str, str]) -> list[BlockPolicies]:
    rules = parse_rules(table)
    return [replace(plan, recipe=replace(plan.recipe, user_rules=rules)) for plan in plans]


def _patterns(full: str, is_expensive: bool) -> Iterator[str]:
    """Patterns for an operation, the shortest first."""
    module, op, operand, _ = full.split(":")
    if is_expensive:
        yield module
    yield f"{module}:{op}"
    if operand != "*":
        yield f"{module}:{op}:{operand}"
    yield full


def _names(graph: BlockGraph) -> dict[int, str]:
    """Nodes by the pattern that matches nothing else of the block."""
    names, by_op = {}, defaultdict(list)
    for call in graph.calls:
        module, op, operand = call.location
        by_op[op].append(call.location)
        if call.node < 0:
            continue
        pattern = f"{module or ROOT}:{op}:{operand or '*'}"
        (rule,) = parse_rules({pattern: SAVE.value})
        names[call.node] = f"{pattern}:{sum(map(rule.matches, by_op[op]))}"
    return names
