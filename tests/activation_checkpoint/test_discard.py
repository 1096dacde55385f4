"""Discarded outputs: whatever reads one is found, whatever way it reads, and gets true values."""

import logging
import threading
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torchgen
from torch.distributed._functional_collectives import all_to_all_single
from torchgen.packaged.autograd.load_derivatives import load_derivatives

from titan_ext.activation_checkpoint import (
    FP8AC,
    BlockMemoryReport,
    OpPolicy,
    Rule,
    measure_block,
    presets,
)
from titan_ext.activation_checkpoint.locator import OpLocator
from titan_ext.activation_checkpoint.memory_report import PolicyReport
from titan_ext.activation_checkpoint.op_effects import READ_NO_VALUES
from titan_ext.base.machines import MACHINES
from titan_ext.components import overlap
from titan_ext.plan import block_graph

WIDTH = 8


class FeedForward(nn.Module):
    """Its ``w2`` is the output that the presets discard."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, WIDTH, bias=False)
        self.w2 = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(torch.relu(self.w1(x)))


class Block(nn.Module):
    """A block whose ``use`` gets itself, its input and the discarded output."""

    stat: torch.Tensor
    last: torch.Tensor

    def __init__(self, use: Callable[["Block", torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.feed_forward = FeedForward()
        self.identity = nn.Identity()
        self.register_buffer("stat", torch.zeros(()))
        self.table = nn.Parameter(torch.arange(3.0 * WIDTH).view(3, WIDTH) / WIDTH)
        self.register_buffer("last", torch.zeros(4, WIDTH))
        self.use = use
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, x, self.feed_forward(x))


class _SavesAndReturns(torch.autograd.Function):
    """Squares; what it returns has the storage of ``x``, or the values."""

    @staticmethod
    def forward(ctx, x, returned):
        ctx.save_for_backward(x)
        return returned(x)

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads
        (x,) = ctx.saved_tensors
        return 2 * x * grad, None


class _Kernel(torch.autograd.Function):
    """Squares in a kernel that is not dispatched, and saves what another one has computed."""

    @staticmethod
    def forward(ctx, x):
        out, twice = torch.empty(x.shape), torch.empty(x.shape)
        out.numpy()[:] = x.detach().numpy() ** 2
        twice.numpy()[:] = x.detach().numpy() * 2
        ctx.save_for_backward(twice)
        return out

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads
        (twice,) = ctx.saved_tensors
        return twice * grad


class _KernelWithoutSaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty(x.shape)
        out.numpy()[:] = x.detach().numpy() * 2
        return out

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads
        return 2 * grad


def _sum_into_buffer(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        block.stat.add_(o.sum())
    return x + o


def _copy_into_buffer(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    block.last.copy_(o.detach())
    return x + o


def _attribute_of_a_sum(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    block.seen = [{"sum": (o + 1).detach()}]
    return x + o


def _attribute_of_the_output(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    out = x + o
    block.seen = out.detach()
    return out


def _buffer_by_a_kernel(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        block.last.copy_(_KernelWithoutSaving.apply(o))
    return x + o


def _attribute_by_a_function(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    block.seen = _KernelWithoutSaving.apply(o)
    return x + o


READERS: dict[str, Callable[[Block, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "an operation": lambda block, x, o: x + o * o,
    "a Function that returns a view": lambda block, x, o: (
        x + _SavesAndReturns.apply(o, lambda y: y.view(y.shape))
    ),
    "a Function that returns a clone": lambda block, x, o: (
        x + _SavesAndReturns.apply(o, torch.clone)
    ),
    "a kernel": lambda block, x, o: x + _Kernel.apply(o),
    "a sparse matrix": lambda block, x, o: (
        x + o + torch.sparse.mm(o.detach().to_sparse(), block.feed_forward.w1.weight)
    ),
    "a product with its detached values": lambda block, x, o: x * o.detach(),
    "a product with a kernel's detached result": lambda block, x, o: (
        x * _KernelWithoutSaving.apply(o.detach())
    ),
    "a sum added to a buffer": _sum_into_buffer,
    "a copy into a buffer": _copy_into_buffer,
    "an attribute computed from it": _attribute_of_a_sum,
    "an attribute that is the output": _attribute_of_the_output,
    "a kernel into a buffer": _buffer_by_a_kernel,
    "a kernel into an attribute": _attribute_by_a_function,
}
SOUND: dict[str, Callable[[Block, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "added": lambda block, x, o: x + o,
    "added in place": lambda block, x, o: o.add_(x),
    "made contiguous": lambda block, x, o: x + o.contiguous(),
    "reshaped": lambda block, x, o: (x.reshape(-1) + o.t().reshape(-1)).view(x.shape),
}


def _chosen(o: torch.Tensor) -> torch.Tensor:
    """Indices from -2 to 2, by operations that pass on the values of floating-point tensors."""
    return o.sum(-1).to(torch.int8).long()


def _is_large(o: torch.Tensor) -> torch.Tensor:
    return o.to(torch.int8).to(torch.bool)


def _set_by_mask(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[_is_large(o)] = x.sum()
    return y + o


def _filled(o: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.zeros(o.shape[:-1], dtype=torch.int64).copy_(o.sum(-1).to(torch.int8))


def _looks_up(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        block.table[o[..., 0].long()]
    return x + o


def _times(x: torch.Tensor, *, factor: torch.Tensor) -> torch.Tensor:
    return x * factor


def _add_into(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


_LIBRARY = torch.library.Library("test_discard", "DEF")
_LIBRARY.define("times(Tensor x, *, Tensor factor) -> Tensor")
_LIBRARY.impl("times", _times, "CPU")
_LIBRARY.define("add_into(Tensor(a!) x, Tensor y) -> ()")
_LIBRARY.impl("add_into", _add_into, "CPU")
_OURS: Any = torch.ops.test_discard


def _by_keyword(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        factor = _OURS.times(torch.ones_like(x), factor=o)
    return x * factor + o


_Use = Callable[[Block, torch.Tensor, torch.Tensor], torch.Tensor]
INDICES: dict[str, _Use] = {
    "indices of a parameter": lambda block, x, o: x + o + block.table[_chosen(o)],
    "indices of one column": lambda block, x, o: x + o + block.table[o[..., 0].long()],
    "indices copied into a tensor": lambda block, x, o: x + o + block.table[_filled(o)],
    "indices of detached values": lambda block, x, o: x + o + block.table[_chosen(o.detach())],
    "indices under no_grad": _looks_up,
    "where to put in place": lambda block, x, o: (
        x + o + block.table.clone().index_put_((_chosen(o),), 2 * x).sum(0)
    ),
    "where to scatter": lambda block, x, o: (
        x
        + o
        + torch.ops.torchtitan.deterministic_scatter_add(
            block.table, _is_large(o).long().view(-1, WIDTH), x.view(-1, WIDTH)
        )[0]
    ),
    "a mask that puts": _set_by_mask,
    "a keyword": _by_keyword,
    "gather": lambda block, x, o: x + o + x.gather(-1, o.argsort(-1)),
    "where": lambda block, x, o: x + o + torch.where(_is_large(o), x, x * x),
    "topk": lambda block, x, o: x + o.topk(2, -1).values.sum(-1, keepdim=True),
}


def _written(write: Callable[[torch.Tensor, torch.Tensor], Any]) -> _Use:
    """``write`` changes its first argument, the discarded output; then that is read."""

    def use(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        write(o, x)
        return x + o**2

    return use


def _no_grad(write: Callable[[torch.Tensor, torch.Tensor], Any]) -> _Use:
    return _written(torch.no_grad()(write))


def _view_taken_before(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    view = o.view(-1, WIDTH)
    o.add_(x)
    return x + (view**2).view(x.shape)


WRITES: dict[str, _Use] = {
    "added": _written(lambda o, x: o.add_(x)),
    "halved and not read": lambda block, x, o: x + o.mul_(0.5),
    "multiplied": lambda block, x, o: x + o.mul_(x),
    "its own backward": lambda block, x, o: x + o.exp_(),
    "overwritten": lambda block, x, o: (x + o) * o.copy_(x),
    "through a view": _written(lambda o, x: o.view(-1, WIDTH).add_(x.view(-1, WIDTH))),
    "through a row": _written(lambda o, x: o[0].add_(x[0])),
    "a view taken before": _view_taken_before,
    "through detach": _written(lambda o, x: o.detach().add_(1)),
    "under no_grad": _no_grad(lambda o, x: o.add_(x)),
    "foreach under no_grad": _no_grad(lambda o, x: torch._foreach_mul_([o], 2.0)),
    "out=": _no_grad(lambda o, x: torch.add(o, x, out=o)),
    "an operation of a library": _no_grad(lambda o, x: _OURS.add_into(o, x)),
}


@pytest.fixture(autouse=True)
def _float8_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a report that has none is an error."""
    monkeypatch.setattr(PolicyReport, "check", lambda self, rows: None)


def _config(**policies: str) -> FP8AC.Config:
    return FP8AC.Config(op_policies={"input": "save", "feed_forward.w1": "save", **policies})


def _run(
    use: Callable[[Block, torch.Tensor, torch.Tensor], torch.Tensor],
    config: FP8AC.Config | None = None,
    prepare: Callable[[Block], None] = lambda block: None,
) -> tuple[list[torch.Tensor], list[torch.Tensor], BlockMemoryReport | None]:
    """Gradients, what the block keeps after the backward, and the report."""
    torch.manual_seed(0)
    block = Block(use)
    prepare(block)
    x = torch.randn(4, WIDTH, requires_grad=True)
    report = None
    if config is None:
        block(x).square().sum().backward()
    else:
        report = measure_block(block, x, config=config, loss=lambda out: out.square().sum())
    grads = [t.grad for t in (x, *block.parameters()) if t.grad is not None]
    kept = [block.stat, block.last]
    if block.seen is not None:
        kept += [t.detach() for t in torch.utils._pytree.tree_leaves(block.seen)]
    return grads, kept, report


_KEPT = {"input": "save", "feed_forward.w1": "save"}
_POLICIES = {
    "memory": FP8AC.Config(preset="memory", op_policies=_KEPT),
    "gemms": FP8AC.Config(preset="gemms", op_policies=_KEPT),
    "saved": FP8AC.Config(op_policies={**_KEPT, "feed_forward.w2": "save"}),
    "offloaded": FP8AC.Config(op_policies={**_KEPT, "feed_forward.w2": "offload"}),
    "all of the block saved": FP8AC.Config(op_policies={**_KEPT, "(block):aten.*": "save"}),
}


def _steps(use: _Use, config: Any) -> list[list[torch.Tensor]]:
    """The gradients of two steps, with three dimensions: a linear layer's output is then a view
    that does not share the version of the matrix product."""
    torch.manual_seed(0)
    holder = nn.Module()
    block = Block(use)
    with torch.no_grad():
        block.feed_forward.w2.weight.mul_(4)
    holder.layers = nn.ModuleDict({"0": block})
    if config is not None:
        config.build(dump_folder="").apply(holder)
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    wanted = (x, *holder.parameters())
    return [
        [
            torch.zeros(()) if grad is None else grad
            for grad in torch.autograd.grad(
                holder.get_submodule("layers.0")(x).square().sum(), wanted, allow_unused=True
            )
        ]
        for _ in range(2)
    ]


@pytest.mark.parametrize(
    "use", [*INDICES.values(), *WRITES.values()], ids=[*INDICES.keys(), *WRITES.keys()]
)
def test_indices_and_writes_leave_gradients_as_they_are(use):
    plain = _steps(use, None)
    for name, config in _POLICIES.items():
        for ours, grads in zip(_steps(use, config), plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, grads, strict=True)), name


def _run_as_plain(use: _Use, config: FP8AC.Config) -> BlockMemoryReport:
    """The report of a run whose gradients are those without a policy, to the bit."""
    grads, _, _ = _run(use)
    ours, _, report = _run(use, config)
    assert all(torch.equal(a, b) for a, b in zip(ours, grads, strict=True))
    assert report is not None
    return report


def _w2(report: BlockMemoryReport | None) -> list[str]:
    assert report is not None
    return [row.treatment for row in report.stored if row.name.startswith("feed_forward.w2")]


@pytest.mark.parametrize("use", READERS.values(), ids=READERS.keys())
def test_what_reads_a_discarded_output_gets_it(use):
    grads, kept, _ = _run(use)
    ours, ours_kept, report = _run(use, _config())
    assert _w2(report)[0].startswith("recomputed: read by")
    assert len(grads) == len(ours)
    for ours_grad, grad in zip(ours, grads, strict=True):
        assert torch.equal(ours_grad, grad)
    for ours_value in ours_kept:
        assert ours_value.isfinite().all()
    for ours_value, value in zip(ours_kept[1:], kept[1:], strict=True):
        assert torch.equal(ours_value, value)
    # Of a discard that the user asks for, it is said.
    with pytest.raises(ValueError, match=r"feed_forward\.w2:aten\.mm:weight .*cannot be discarded"):
        _run(use, _config(**{"feed_forward.w2": "discard"}))


@pytest.mark.parametrize("use", SOUND.values(), ids=SOUND.keys())
def test_what_nothing_reads_is_discarded(use):
    report = _run_as_plain(use, _config(**{"feed_forward.w2": "discard"}))
    assert _w2(report) == ["discarded"]


def test_a_process_group_lets_go_late(one_rank: None):
    """Its thread may hold what it has sent for a moment after the wait, on one rank only."""

    waited, sleep = threading.Event(), time.sleep

    def hold(sent: torch.Tensor) -> None:
        waited.wait(5)
        del sent

    def wait(seconds: float) -> None:
        waited.set()
        sleep(seconds)

    def use(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        received = all_to_all_single(o, None, None, cast(Any, dist.group.WORLD))
        threading.Thread(target=hold, args=(o.detach(),)).start()
        return x + received

    with unittest.mock.patch.object(time, "sleep", wait):
        _, _, report = _run(use, _config(**{"feed_forward.w2": "discard"}))
    assert _w2(report) == ["discarded"]
    assert waited.is_set()


def _exchanged(o: torch.Tensor) -> torch.Tensor:
    return all_to_all_single(o, None, None, cast(Any, dist.group.WORLD))


_EXCHANGE = "(block):_c10d_functional.all_to_all_single"


def test_an_exchange_that_is_read_does_not_run_again(one_rank: None):
    """Another rank might not; so its output stays, and it reads nothing in the recompute."""

    def use(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return x + _exchanged(o) ** 2

    discards = (Rule(OpPolicy.DISCARD, "feed_forward.w2"), Rule(OpPolicy.DISCARD, "*", "*_single"))
    with unittest.mock.patch.object(presets, "_preset_rules", return_value=discards):
        report = _run_as_plain(use, _config())
    assert _w2(report) == ["discarded"]
    treatments = {row.name: row.treatment for row in report.stored}
    assert treatments[_EXCHANGE] == "exact: read by aten.pow in the block"


@pytest.mark.parametrize("policy", ["save", "discard"])
def test_an_exchange_that_is_written_to_and_read_is_an_error(one_rank: None, policy: str):
    def use(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return x + _exchanged(o).add_(x) ** 2

    with pytest.raises(RuntimeError, match=r"all_to_all_single cannot be kept.* aten\.add_ in the"):
        _run(use, _config(**{_EXCHANGE: policy}))


def test_an_exchange_that_is_written_to_and_not_read_is_discarded(one_rank: None):
    def use(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return x + _exchanged(o).add_(x)

    _run_as_plain(use, _config(**{_EXCHANGE: "discard"}))


def test_a_saved_output_that_is_written_to_is_reported_as_recomputed():
    def use(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return x * o.add_(x)

    _, _, report = _run(use, _config(**{"feed_forward.w2": "save"}))
    assert report is not None
    assert not _w2(report)
    policies = {row.name: row.policy for row in report.ops}
    assert policies["feed_forward.w2:aten.mm:weight"] is OpPolicy.RECOMPUTE


def test_a_budget_knows_that_indices_are_read():
    """Under ``no_grad`` nothing is saved for backward, but the recompute would look them up."""
    block = Block(_looks_up)
    with block_graph.trace(block, MACHINES["h100"]) as graphs:
        block(torch.randn(2, 4, WIDTH, requires_grad=True))
    passes = {str(c.location): graphs[0].nodes[c.node].passes for c in graphs[0].calls}
    assert passes["(block):aten._to_copy"] is False
    assert passes["(block):aten.add"] is True


def test_a_budget_keeps_nothing_that_is_written_to():
    block = Block(lambda block, x, o: x * o.add_(x))
    with block_graph.trace(block, MACHINES["h100"]) as graphs:
        block(torch.randn(2, 4, WIDTH, requires_grad=True))
    nodes = {str(c.location): graphs[0].nodes[c.node] for c in graphs[0].calls if c.node > 0}
    assert nodes["feed_forward.w2:aten.mm:weight"].policies == {OpPolicy.RECOMPUTE}


@pytest.mark.parametrize("op", ["sigmoid", "exp", "softmax"])
def test_an_operation_whose_backward_reads_its_own_output_is_no_discard(op: str):
    def use(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return x + (o.softmax(-1) if op == "softmax" else getattr(o, op)())

    name = "_softmax" if op == "softmax" else op
    with pytest.raises(ValueError, match=rf"aten\.{name} .*cannot be discarded.*own backward"):
        _run(use, _config(**{f"*:aten.{name}": "discard"}))


@pytest.mark.parametrize("where", ["feed_forward.w2", "feed_forward", "identity", ""])
def test_a_forward_hook_reads_what_it_may_see(where):
    seen: list[float] = []

    def prepare(block: Block) -> None:
        def watch(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            seen.append(float(out.detach().numpy().sum()))

        block.get_submodule(where).register_forward_hook(watch)

    _, _, report = _run(lambda block, x, o: x + block.identity(o), _config(), prepare)
    assert _w2(report)[0].startswith("recomputed: read by the forward hook")
    assert seen[0] == seen[1]


def test_a_hook_on_another_module_and_a_backward_hook_read_no_output():
    def prepare(block: Block) -> None:
        block.feed_forward.w1.register_forward_hook(lambda module, args, out: None)
        block.feed_forward.register_full_backward_hook(lambda module, grads, out_grads: None)

    _, _, report = _run(SOUND["added"], _config(), prepare)
    assert _w2(report) == ["discarded"]


def _sum_of_x(out: Any) -> torch.Tensor:
    return out.x.sum()


def test_outputs_that_cannot_be_looked_into_prove_nothing():
    class Output:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    def run(config: FP8AC.Config | None) -> torch.Tensor:
        torch.manual_seed(0)
        block = Block(lambda block, x, o: Output(x + _Kernel.apply(o)))  # type: ignore[arg-type]
        x = torch.randn(4, WIDTH, requires_grad=True)
        if config is None:
            block(x).x.sum().backward()
        else:
            measure_block(block, x, config=config, loss=_sum_of_x)
        assert x.grad is not None
        return x.grad

    assert torch.equal(run(_config(**{"feed_forward.w2": "discard"})), run(None))


def test_a_block_without_gradients_discards_nothing_and_says_nothing():
    block = Block(lambda block, x, o: (x + o).detach())
    holder = nn.Module()
    holder.layers = nn.ModuleDict({"0": block})
    FP8AC(_config(**{"feed_forward.w2": "discard"})).apply(holder)
    out = holder.get_submodule("layers.0")(torch.randn(4, WIDTH))
    assert out.isfinite().all()


def test_a_discard_that_is_refused_is_not_tried_again(caplog):
    torch.manual_seed(0)
    holder = nn.Module()
    holder.layers = nn.ModuleDict({"0": Block(READERS["an operation"])})
    x = torch.randn(4, WIDTH, requires_grad=True)
    with caplog.at_level(logging.INFO):
        FP8AC(_config()).apply(holder)
        for _ in range(3):
            holder.get_submodule("layers.0")(x).sum().backward()
    said = [r.message for r in caplog.records if "is not discarded" in r.message]
    assert len(said) == 1


def test_both_of_two_discarded_outputs_are_read_by_what_reads_their_sum():
    def use(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        total = o + block.feed_forward(x + 1)
        return x + total * total

    report = _run_as_plain(use, _config(**{"(block):aten.add": "recompute"}))
    assert _w2(report) == ["recomputed: read by aten.mul in the block"]


def test_what_reads_the_output_of_a_discarded_operation_reads_its_operand():
    """The operation runs again, on it."""

    def use(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        total = o.sum(0)
        return x + total * total

    rules = (Rule(OpPolicy.DISCARD, "feed_forward.w2"), Rule(OpPolicy.DISCARD, "*", "aten.sum"))
    with unittest.mock.patch.object(presets, "_preset_rules", return_value=rules):
        report = _run_as_plain(use, _config())
    treatments = {row.name: row.treatment for row in report.stored}
    why = "recomputed: read by aten.mul in the block"
    assert treatments["(block):aten.sum"] == why
    assert _w2(report) == [why]


def test_a_stand_in_has_the_strides_of_what_it_stands_for():
    def use(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        y = torch.bmm(x.view(2, 2, WIDTH), x.view(2, WIDTH, 2)).transpose(1, 2)
        return x + o + y.contiguous().sum()

    _run_as_plain(use, _config(**{"*:aten.bmm": "discard", "*:aten.transpose": "recompute"}))


def test_each_half_of_a_batch_is_in_its_own_module():
    """Where one half is paused, the other's operations are not those of the first's module."""
    block = nn.Sequential(nn.Identity(), nn.Identity())
    locator, seen = OpLocator(block), []

    def pause(*_: Any) -> None:
        overlap.pause()
        seen.append(locator.module)

    for module in block:
        module.register_forward_pre_hook(pause)
    overlap._take_turns([lambda: block(torch.ones(1))] * 2, ())
    assert seen == ["0", "0", "1", "1"]


def test_a_hook_that_comes_later_is_seen():
    """Every forward is judged by itself."""
    torch.manual_seed(0)
    holder = nn.Module()
    holder.layers = nn.ModuleDict({"0": Block(SOUND["added"])})
    policy = FP8AC(_config())
    policy.apply(holder)
    x = torch.randn(4, WIDTH, requires_grad=True)
    block = holder.get_submodule("layers.0")
    block(x).sum().backward()
    assert _w2(policy.memory_report.blocks[0]) == ["discarded"]
    seen: list[torch.Tensor] = []
    w2 = block.get_submodule("_checkpoint_wrapped_module.feed_forward.w2")
    w2.register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    block(x).sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])


class _Scaled(nn.Module):
    """Multiplies an fp32 copy of bf16 values; ``change`` gets the copy first."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(64))
        self.inner = nn.Identity()
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.change(x.to(torch.float32)) * self.scale).to(x.dtype)


class _SavesBits(torch.autograd.Function):
    """Squares, and reads the bits that it has saved as integers."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.view(torch.int32))
        return x * x

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads
        (bits,) = ctx.saved_tensors
        return 2 * grad * bits.view(torch.float32)


def _written_by_a_kernel(x: torch.Tensor) -> torch.Tensor:
    x.detach().numpy()[:] += 2.001
    return x


def _scale(
    block: _Scaled, config: FP8AC.Config | None
) -> tuple[list[torch.Tensor], BlockMemoryReport | None]:
    torch.manual_seed(0)
    x = torch.randn(96, 64, dtype=torch.bfloat16).requires_grad_()
    report = None
    if config is None:
        block(x).float().square().sum().backward()
    else:
        report = measure_block(block, x, config=config, loss=lambda out: out.float().square().sum())
    grads = [x.grad, block.scale.grad]
    block.zero_grad()
    return [grad.clone() for grad in grads if grad is not None], report


_NO_RECOMPUTE = FP8AC.Config(mode="no_recompute", op_policies={"*": "save"})


@pytest.mark.parametrize(
    "change",
    [_written_by_a_kernel, _SavesBits.apply, lambda x: x.add_(0.001), lambda x: x],
    ids=["written by a kernel", "seen as int32", "written in place", "as it is"],
)
def test_without_recompute_an_fp32_copy_comes_back_as_it_was(change):
    block = _Scaled(change)
    reference, _ = _scale(block, None)
    ours, _ = _scale(block, _NO_RECOMPUTE)
    assert all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True))


@pytest.mark.parametrize("through_a_module", [False, True])
def test_only_what_titans_code_copies_and_saves_is_narrowed(through_a_module):
    """What a module gets in between, a hook of the user's may have written to."""
    titans: dict[str, Any] = {"__name__": "torchtitan.models.some", "torch": torch}
    exec(
        "def plain(block, x):\n"
        "    return (x.to(torch.float32) * block.scale).to(x.dtype)\n"
        "def through(block, x):\n"
        "    return (block.inner(x.to(torch.float32)) * block.scale).to(x.dtype)\n",
        titans,
    )
    block = _Scaled(lambda x: x)
    forward = titans["through" if through_a_module else "plain"]
    block.forward = lambda x: forward(block, x)
    if through_a_module:
        block.inner.register_forward_pre_hook(lambda module, args: (_written_by_a_kernel(args[0]),))
    reference, _ = _scale(block, None)
    ours, report = _scale(block, _NO_RECOMPUTE)
    assert all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True))
    assert report is not None
    treatments = {row.treatment for row in report.stored}
    assert ("exact: as bfloat16" in treatments) is not through_a_module


def test_a_derivative_that_is_passed_by_reads_no_operand_but_indices():
    """``READ_NO_VALUES`` against torch's derivatives; indices and masks are never floats."""
    packaged = Path(torchgen.__file__).parent / "packaged"
    native = packaged / "ATen" / "native"
    infos, _ = load_derivatives(
        str(packaged / "autograd" / "derivatives.yaml"),
        str(native / "native_functions.yaml"),
        str(native / "tags.yaml"),
    )
    found: dict[str, set[str]] = {}
    for schema, by_key in infos.items():
        reads = found.setdefault(f"aten.{schema.name.name}", set())
        for key, info in by_key.items():
            if key != "AutogradNestedTensor":
                saved = (*info.all_saved_inputs, *info.all_saved_outputs)
                reads |= {str(x.nctype.name) for x in saved if "'Tensor'" in str(x.nctype.type)}
    native_names = {name for name in READ_NO_VALUES if name.startswith("aten.")}
    known = native_names.intersection(found)
    assert {name: found[name] for name in known if found[name]} == {
        "aten.index": {"indices"},
        "aten.index_put": {"indices"},
        "aten.index_select": {"index"},
    }
    # In place they have the same derivative. The others make nodes of those above, or none.
    assert {name.removesuffix("_") for name in native_names} - known == {
        "aten.copy",
        *("aten.detach", "aten.flatten", "aten.narrow", "aten.reshape"),
        *("aten.empty_like", "aten.new_empty", "aten.new_zeros", "aten.zeros_like"),
    }
    x, copied = torch.ones(2, requires_grad=True), torch.zeros(2)
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda _: _):
        copied.copy_(x)
    assert copied.requires_grad
    assert not packed
    for index in (torch.zeros(1), torch.zeros(1, dtype=torch.complex64)):
        for call in (lambda at: torch.ones(2)[at], lambda at: torch.ones(2).index_put((at,), at)):
            with pytest.raises(IndexError, match="tensors used as indices must be"):
                call(index)


def test_what_is_passed_by_runs_on_any_values():
    """No error, shape or number on the host depends on floats that these operations get."""
    reads = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    found = {
        name
        for name in READ_NO_VALUES
        for namespace, op in [name.split(".")]
        if (packet := getattr(getattr(torch.ops, namespace), op, None)) is not None
        for overload in packet.overloads()
        if reads.intersection(getattr(packet, overload).tags)
    }
    assert found == {"aten.index"}  # of masks
