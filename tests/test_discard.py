"""Discarded outputs: whatever reads one is found, whatever way it reads, and gets true values."""

import logging
import threading
import time
import unittest.mock
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._functional_collectives import all_to_all_single

from titan_ext.activation_checkpoint import (
    FP8AC,
    BlockMemoryReport,
    OpPolicy,
    Rule,
    measure_block,
    presets,
)

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


def _attribute(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    block.seen = o
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
    "a Function that returns its input": lambda block, x, o: (
        x + _SavesAndReturns.apply(o, lambda y: y)
    ),
    "a Function that returns a clone": lambda block, x, o: (
        x + _SavesAndReturns.apply(o, torch.clone)
    ),
    "a Function that saves what a view became": lambda block, x, o: (
        x + _SavesAndReturns.apply((o + 1).view(-1), torch.clone).view(x.shape)
    ),
    "a kernel": lambda block, x, o: x + _Kernel.apply(o),
    "a kernel's result, multiplied": lambda block, x, o: x * _KernelWithoutSaving.apply(o),
    "a product with its detached values": lambda block, x, o: x * o.detach(),
    "a product with a kernel's detached result": lambda block, x, o: (
        x * _KernelWithoutSaving.apply(o.detach())
    ),
    "a sum added to a buffer": _sum_into_buffer,
    "a copy into a buffer": _copy_into_buffer,
    "an attribute": _attribute,
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
        with unittest.mock.patch.object(FP8AC, "_wants_float8", return_value=False):
            report = measure_block(block, x, config=config, loss=lambda out: out.square().sum())
    grads = [t.grad for t in (x, *block.parameters()) if t.grad is not None]
    kept = [block.stat, block.last]
    if block.seen is not None:
        kept += [t.detach() for t in torch.utils._pytree.tree_leaves(block.seen)]
    return grads, kept, report


def _w2(report: BlockMemoryReport | None) -> list[str]:
    assert report is not None
    return [row.treatment for row in report.stored if row.name.startswith("feed_forward.w2")]


@pytest.mark.parametrize("use", READERS.values(), ids=READERS.keys())
def test_what_reads_a_discarded_output_gets_it(use):
    grads, kept, _ = _run(use)
    ours, ours_kept, report = _run(use, _config())
    assert _w2(report)[0].startswith("exact: read by")
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
    grads, _, _ = _run(use)
    ours, _, report = _run(use, _config(**{"feed_forward.w2": "discard"}))
    assert _w2(report) == ["discarded"]
    assert all(torch.equal(a, b) for a, b in zip(ours, grads, strict=True))


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


@pytest.mark.parametrize("op", ["sigmoid", "tanh", "exp", "softmax"])
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
    assert _w2(report)[0].startswith("exact: read by the forward hook")
    assert seen[0] == seen[1]


def test_a_hook_on_another_module_reads_nothing():
    def prepare(block: Block) -> None:
        block.feed_forward.w1.register_forward_hook(lambda module, args, out: None)

    _, _, report = _run(SOUND["added"], _config(), prepare)
    assert _w2(report) == ["discarded"]


def test_a_backward_hook_reads_no_output():
    def prepare(block: Block) -> None:
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
            with unittest.mock.patch.object(FP8AC, "_wants_float8", return_value=False):
                measure_block(block, x, config=config, loss=_sum_of_x)
        assert x.grad is not None
        return x.grad

    assert torch.equal(run(_config(**{"feed_forward.w2": "discard"})), run(None))


def test_a_block_without_gradients_discards_nothing_and_says_nothing():
    block = Block(lambda block, x, o: (x + o).detach())
    config = _config(**{"feed_forward.w2": "discard"})
    with unittest.mock.patch.object(FP8AC, "_wants_float8", return_value=False):
        policy = FP8AC(config)
        holder = nn.Module()
        holder.layers = nn.ModuleDict({"0": block})
        policy.apply(holder)
        out = holder.get_submodule("layers.0")(torch.randn(4, WIDTH))
    assert out.isfinite().all()


def test_a_discard_that_is_refused_is_not_tried_again(caplog):
    torch.manual_seed(0)
    holder = nn.Module()
    holder.layers = nn.ModuleDict({"0": Block(READERS["an operation"])})
    x = torch.randn(4, WIDTH, requires_grad=True)
    with (
        unittest.mock.patch.object(FP8AC, "_wants_float8", return_value=False),
        caplog.at_level(logging.INFO),
    ):
        FP8AC(_config()).apply(holder)
        for _ in range(3):
            holder.get_submodule("layers.0")(x).sum().backward()
    said = [r.message for r in caplog.records if "is not discarded" in r.message]
    assert len(said) == 1


def test_both_of_two_discarded_outputs_are_read_by_what_reads_their_sum():
    def use(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        total = o + block.feed_forward(x + 1)
        return x + total * total

    grads, _, _ = _run(use)
    ours, _, report = _run(use, _config(**{"(block):aten.add": "recompute"}))
    assert all(torch.equal(a, b) for a, b in zip(ours, grads, strict=True))
    assert _w2(report) == ["exact: read by aten.mul in the block"]


def test_a_discarded_output_of_a_discarded_one_is_read_alone():
    """In the recompute its value takes the place of what would be computed."""

    def use(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        total = o.sum(0)
        return x + total * total

    grads, _, _ = _run(use)
    rules = (Rule(OpPolicy.DISCARD, "feed_forward.w2"), Rule(OpPolicy.DISCARD, "*", "aten.sum"))
    with unittest.mock.patch.object(presets, "_preset_rules", return_value=rules):
        ours, _, report = _run(use, _config())
    assert all(torch.equal(a, b) for a, b in zip(ours, grads, strict=True))
    assert _w2(report) == ["discarded"]
    assert report is not None
    kept = {row.name: row.treatment for row in report.stored}
    assert kept["(block):aten.sum"] == "exact: read by aten.mul in the block"


def test_a_value_that_is_changed_in_place_and_read_is_an_error():
    with pytest.raises(RuntimeError, match=r"w2.* aten\.mul.* reads it.*modified in place"):
        _run(lambda block, x, o: x * o.add_(1), _config())


def test_a_stand_in_has_the_strides_of_what_it_stands_for():
    def use(block: Block, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        y = torch.bmm(x.view(2, 2, WIDTH), x.view(2, WIDTH, 2)).transpose(1, 2)
        return x + o + y.contiguous().sum()

    grads, _, _ = _run(use)
    config = _config(**{"*:aten.bmm": "discard", "*:aten.transpose": "recompute"})
    ours, _, _ = _run(use, config)
    assert all(torch.equal(a, b) for a, b in zip(ours, grads, strict=True))


def test_a_hook_that_comes_later_is_seen():
    """Every forward is judged by itself."""
    torch.manual_seed(0)
    holder = nn.Module()
    holder.layers = nn.ModuleDict({"0": Block(SOUND["added"])})
    policy = FP8AC(_config())
    with unittest.mock.patch.object(FP8AC, "_wants_float8", return_value=False):
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
        with unittest.mock.patch.object(FP8AC, "_wants_float8", return_value=False):
            report = measure_block(
                block, x, config=config, loss=lambda out: out.float().square().sum()
            )
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
