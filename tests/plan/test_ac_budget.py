"""Activation checkpointing by budget: traced blocks, the solver, and the tables it writes."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.components.checkpointer.utils import canonical_fqn

from benchmarks.kept_bytes import KeptBytes, kept_total
from benchmarks.moe_blocks import BlockLayout, BlockRun
from tests.helpers.cluster import run_ranks
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.op_rules import OpPolicy, parse_rules
from titan_ext.base.machines import MACHINES
from titan_ext.base.tensors import local_tensor
from titan_ext.plan import solver
from titan_ext.plan.block_graph import CHOICES, BlockGraph, Node, trace
from titan_ext.plan.solver import BlockKind, BudgetTooSmallError, Host, Solution, solve, table_of

SAVE, FLOAT8, RECOMPUTE, DISCARD = CHOICES
OFFLOAD, OFFLOAD_FLOAT8 = OpPolicy.OFFLOAD, OpPolicy.OFFLOAD_FLOAT8
KIB = 2**10
CPU_STATE = 5200
"""Bytes of torch's random state on a CPU, which a checkpoint keeps, and of the loss."""


def _some_nodes(seed: int, count: int = 6) -> tuple[Node, ...]:
    """The input of a block and ``count`` operations, at random."""
    draw = random.Random(seed)
    nodes = [
        Node(
            nbytes=100 * KIB,
            float8_nbytes=51 * KIB,
            codec_ms=0.3,
            policies=frozenset({SAVE, FLOAT8}),
        )
    ]
    for index in range(1, count + 1):
        nbytes = draw.randrange(20, 200) * KIB
        nodes.append(
            Node(
                ms=draw.random(),
                nbytes=nbytes,
                float8_nbytes=nbytes // 2,
                codec_ms=draw.random() / 4,
                policies=frozenset(CHOICES) - ({DISCARD} if draw.random() < 0.2 else set()),
                reads=frozenset(draw.sample(range(index), k=min(index, draw.choice([1, 2])))),
                passes=draw.random() < 0.6,
                is_read=draw.random() < 0.4,
                is_attention=index == 3,
            )
        )
    return tuple(nodes)


def _exact(kinds: list[BlockKind]) -> list[BlockKind]:
    """The same, but nothing may be stored in float8."""
    of = [tuple(replace(n, policies=n.policies - {FLOAT8}) for n in k.graph.nodes) for k in kinds]
    return [replace(k, graph=replace(k.graph, nodes=n)) for k, n in zip(kinds, of, strict=True)]


def _is_right(nodes: tuple[Node, ...], chosen: tuple[OpPolicy, ...]) -> bool:
    """By what the recompute would have: values that are right, float8's, or NaN."""
    values: list[str] = []
    for node, policy in zip(nodes, chosen, strict=True):
        read = [values[i] for i in node.reads]
        if "nan" in read and not node.passes:
            return False
        again = "nan" if "nan" in read else "float8" if "float8" in read else "right"
        kept = "float8" if policy.is_float8 else "right"
        values.append({RECOMPUTE: again, DISCARD: "nan"}.get(policy, kept))
        if node.is_read and values[-1] == "nan":
            return False
        if node.is_attention and "float8" in [*read, values[-1]]:
            return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_the_solution_is_the_best_of_all(seed: int):
    graph = BlockGraph(_some_nodes(seed), (), 0)
    prices = [
        graph.price(list(chosen))
        for chosen in itertools.product(*(node.policies for node in graph.nodes))
        if _is_right(graph.nodes, chosen)
    ]
    least, most = (limit(nbytes for nbytes, _ in prices) for limit in (min, max))
    for budget in range(least, most + 40 * KIB, (most - least) // 4):
        best = min(ms for nbytes, ms in prices if nbytes <= budget)
        found = solve([BlockKind(graph)], budget)
        assert found.nbytes <= budget
        assert _is_right(graph.nodes, tuple(found.chosen[0]))
        assert found.ms == pytest.approx(best, rel=1e-3)
    with pytest.raises(BudgetTooSmallError) as error:
        solve([BlockKind(graph)], least - KIB)
    assert error.value.least == least


@pytest.mark.parametrize("budget", range(600 * KIB, 1400 * KIB, 200 * KIB))
def test_kinds_share_a_budget_and_what_one_rule_names(budget):
    graphs = [BlockGraph(_some_nodes(seed, count=3), (), 0) for seed in (1, 2)]
    kinds = [BlockKind(graph, count) for graph, count in zip(graphs, (3, 1), strict=True)]
    every = [
        [list(c) for c in itertools.product(*(n.policies for n in graph.nodes))] for graph in graphs
    ]
    possible = (
        Solution.of(kinds, [*both])
        for both in itertools.product(*every)
        if both[0][0] is both[1][0]  # the inputs of both
        and all(_is_right(graph.nodes, tuple(c)) for graph, c in zip(graphs, both, strict=True))
    )
    best = min(one.ms for one in possible if one.nbytes <= budget)
    found = solve(kinds, budget)
    assert found.nbytes <= budget
    assert found.ms == pytest.approx(best, rel=1e-3)
    assert found.chosen[0][0] is found.chosen[1][0]


@pytest.mark.parametrize("seed", range(4))
def test_the_best_with_a_host(seed: int):
    """Six blocks. Of what they offload, the device has that of two; link and room are short."""
    nodes = _some_nodes(seed, count=4)
    graph = BlockGraph(nodes, (), 0)
    kinds = [BlockKind(graph, 6)]
    forward_s = sum(node.ms for node in nodes) / 1e3
    host = Host(limit=6 * 70 * KIB, rate=110 * KIB / forward_s)
    policies = [node.policies | {OFFLOAD, OFFLOAD_FLOAT8} for node in nodes]
    priced = [
        Solution.of(kinds, [list(chosen)])
        for chosen in itertools.product(*policies)
        if _is_right(nodes, chosen)
    ]
    for limit in (host.limit, None):
        most = min(host.rate * forward_s, math.inf if limit is None else limit / 6)
        possible = [s for s in priced if s.host_nbytes <= 6 * most]
        least = min(s.nbytes for s in possible)
        for budget in (least, 2 * least, 4 * least):
            best = min(s.ms for s in possible if s.nbytes <= budget)
            found = solve(kinds, budget, host=replace(host, limit=limit))
            assert found.nbytes <= budget
            assert found.host_nbytes <= 6 * most
            assert found.ms == pytest.approx(best, rel=1e-3)


class Block:
    """The debug model's MoE block, traced and run; with expert parallelism on this rank."""

    def __init__(self, layout: BlockLayout) -> None:
        self.run = BlockRun("debug", layout, 256)
        self.is_sharded = layout.ep > 1
        model = self.run.build(None, stock=False)
        ((name, self.module),) = model.get_submodule("layers").named_children()
        self.name = f"layers.{name}"
        leaf = self.run.input_BLD.clone().requires_grad_()
        # At this size every kernel would take the same time: that of its launch.
        rates = replace(MACHINES["h100"], launch=1e-9)
        with self.run.context():
            if self.is_sharded:
                self.run.forward(model, leaf).backward()
            with trace(self.module, rates) as graphs:
                self.run.forward(model, leaf).backward()
        (self.graph,) = graphs
        self.kinds = [BlockKind(self.graph)]
        self.nbytes, self.gradients = self.measure(None)

    def measure(self, config) -> tuple[int, dict[str, torch.Tensor]]:
        """Bytes held after a real forward, and gradients."""
        model = self.run.build(config, stock=False)
        leaf = self.run.input_BLD.clone().requires_grad_()
        with self.run.context():
            if self.is_sharded:  # FSDP makes its buffers
                self.run.forward(model, leaf).backward()
                model.zero_grad()
                leaf.grad = None
            kept = KeptBytes(model, self.name)
            with kept:
                loss = self.run.forward(model, leaf)
            nbytes = kept_total(kept.classes())
            loss.backward()
        found = {
            canonical_fqn(n): p.grad for n, p in [*model.named_parameters(), ("(input)", leaf)]
        }
        return nbytes, {n: local_tensor(g) for n, g in found.items() if g is not None}

    def plan(self, **keys):
        return FP8AC.Config(**keys).policies_of(self.module, self.name)

    def config(self, budget: int, *, float8: bool = True) -> tuple[FP8AC.Config, int]:
        found = solve(self.kinds if float8 else _exact(self.kinds), budget)
        table = table_of(self.kinds, found.chosen, [self.plan(preset="stock")])
        return FP8AC.Config(preset="stock", op_policies=table), found.nbytes


@pytest.fixture(scope="module")
def block() -> Block:
    return Block(BlockLayout())


def test_what_a_block_keeps_without_checkpointing(block):
    assert block.nbytes == pytest.approx(block.graph.none_nbytes, abs=CPU_STATE)


@pytest.mark.parametrize("preset", ["stock", "memory", "speed"])
def test_a_preset_is_priced_as_it_runs(block, preset):
    nbytes, _ = block.graph.price(block.graph.chosen_by(block.plan(preset=preset)))
    assert block.measure(FP8AC.Config(preset=preset))[0] == pytest.approx(nbytes, abs=CPU_STATE)


@pytest.mark.parametrize("part", [0.06, 0.3])
def test_the_real_block_keeps_what_was_solved_and_its_gradients_are_exact(block, part):
    budget = int(part * block.nbytes)
    config, solved = block.config(budget, float8=False)
    nbytes, gradients = block.measure(config)
    assert solved <= budget
    assert nbytes == pytest.approx(solved, rel=0.01)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, block.gradients[name]), name


def test_what_was_solved_to_wait_on_the_host_gives_exact_gradients(block):
    host = Host(None, 1e12)
    found = solve(_exact([BlockKind(block.graph, 8)]), block.nbytes, host=host)
    assert found.nbytes <= block.nbytes < found.host_nbytes
    table = table_of(block.kinds, found.chosen, [block.plan(preset="stock")])
    assert "offload" in table.values()
    _, gradients = block.measure(FP8AC.Config(preset="stock", op_policies=table))
    for name, gradient in gradients.items():
        assert torch.equal(gradient, block.gradients[name]), name


def _order_of_exchanges(graph: BlockGraph) -> list[str]:
    """The exchanges of floats and the experts' GEMMs, found by rules as users write them."""
    exchange = "(moe.routed_experts):*all_to_all_single:*"
    gemm = "moe.routed_experts.inner_experts:aten.*grouped_mm*"
    rules = {
        "dispatch": f"{exchange}:2",  # the first exchanges counts
        "w1 or w3": f"{gemm}:[wm]*[13]*",
        "w2": f"{gemm}:[wm]*2*",
        "combine": f"{exchange}:3",
    }
    found = []
    for name, pattern in rules.items():
        (rule,) = parse_rules({pattern: "save"})
        calls = [i for i, c in enumerate(graph.calls) if rule.matches(c.location)]
        calls = [calls[rule.occurrence - 1]] if rule.occurrence else calls
        assert all(graph.calls[i].out.is_floating_point() for i in calls), name
        found += [(i, name) for i in calls]
    return [name for _, name in sorted(found)]


def _with_experts_on_two_ranks() -> tuple[dict[str, str], int, int, float, list[str], list[str]]:
    """A table solved from rank 0's block, its bytes solved and held there, how much slower the
    worst preset is than the best table for its bytes, the order of exchanges, wrong gradients."""
    block = Block(BlockLayout(ep=2))
    found = solve(_exact(block.kinds), block.graph.none_nbytes // 3)
    slower = 0.0
    for preset in ("memory", "gemms"):
        held, ms = block.graph.price(block.graph.chosen_by(block.plan(preset=preset)))
        slower = max(slower, ms / solve(block.kinds, held).ms)
    tables = [table_of(block.kinds, found.chosen, [block.plan(preset="stock")])]
    dist.broadcast_object_list(tables)  # ranks have other tokens, but need one table
    nbytes, gradients = block.measure(FP8AC.Config(preset="stock", op_policies=tables[0]))
    wrong = [
        n for n, gradient in gradients.items() if not torch.equal(gradient, block.gradients[n])
    ]
    dist.barrier()
    order = _order_of_exchanges(block.graph)
    return tables[0], found.nbytes, nbytes, slower, order, wrong


def test_discarded_exchanges_and_what_is_written_in_place(tmp_path):
    first, second = run_ranks(_with_experts_on_two_ranks, 2, log_folder=tmp_path)
    table, solved, nbytes, slower, order, wrong = first
    assert order == ["dispatch", "w1 or w3", "w1 or w3", "w2", "combine"]
    assert table["moe.routed_experts:aten.index_put_"] == "discard"
    exchanges = [policy for pattern, policy in table.items() if "all_to_all" in pattern]
    assert "discard" in exchanges
    assert nbytes == pytest.approx(solved, rel=0.01)
    assert 1 <= slower < 1.2
    assert wrong == second[-1] == []


def test_float8_where_it_pays(block):
    config, solved = block.config(int(0.05 * block.nbytes))
    assert "save_float8" in config.op_policies.values()
    nbytes, gradients = block.measure(config)
    assert nbytes == pytest.approx(solved, rel=0.01)
    for name, gradient in gradients.items():
        a, b = (x.double().flatten() for x in (gradient, block.gradients[name]))
        close = torch.cosine_similarity(a, b, 0)
        assert close > 0.998, name


@pytest.mark.parametrize("preset", ["stock", "memory", "balanced", "speed", "gemms"])
def test_no_preset_is_faster_at_its_bytes_nor_much_slower(block, preset):
    nbytes, ms = block.graph.price(block.graph.chosen_by(block.plan(preset=preset)))
    best = solve(block.kinds, nbytes).ms
    assert best <= ms
    assert ms <= 1.2 * best or preset == "stock"


def test_norms_and_routing_are_not_up_for_choice(block):
    names = {call.node: call.location for call in block.graph.calls}
    for index, node in enumerate(block.graph.nodes[1:], start=1):
        if "norm" in names[index].module:
            assert node.policies == {RECOMPUTE}
        if names[index].op == "aten.topk":
            assert node.policies == {SAVE}


def test_a_result_that_its_own_backward_reads_is_not_discarded():
    """That of a sigmoid, which is only added."""

    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.sigmoid(x)

    gate = Gate()
    with trace(gate, MACHINES["h100"]) as graphs:
        gate(torch.ones(64, 128, requires_grad=True)).sum().backward()
    (graph,) = graphs
    names = [call.location.op for call in graph.calls if call.node > 0]
    assert names == ["aten.sigmoid", "aten.add"]
    (_, sigmoid, add) = solve([BlockKind(graph)], graph.none_nbytes).chosen[0]
    assert (sigmoid, add) == (RECOMPUTE, DISCARD)


def test_a_solver_that_runs_out_of_time_calls_no_budget_too_small(monkeypatch):
    kinds = [BlockKind(BlockGraph(_some_nodes(1, count=200), (), 0))]
    with pytest.raises(BudgetTooSmallError) as error:
        solve(kinds, 0)
    budget = 2 * error.value.least
    assert solve(kinds, budget).nbytes <= budget
    monkeypatch.setattr(solver, "_TIME_LIMIT_S", 0.0)
    why = r"stopped before .* Time limit reached.* not prove"
    with pytest.raises(ValueError, match=why) as late:
        solve(kinds, budget)
    assert not isinstance(late.value, BudgetTooSmallError)
