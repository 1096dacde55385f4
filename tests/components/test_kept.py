"""What two halves of a batch keep as attributes: each finds its own, the block leaves both."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

from titan_ext.components.overlap import Kept, _Masks

ROWS, LENGTH = [2, 1], 4


class _Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scores", torch.zeros(3))
        self.kept: Any = None
        self.aux: dict[str, Any] = {}
        self.all: list[Any] = []


def _run(values: tuple[Any, Any], router: Any, name: str = "kept") -> Any:
    """A and B set ``values`` and pause; each then sees what it has set."""
    kept = Kept("layers.1", nn.ModuleDict({"router": router}))
    owner = router.aux if name == "z" else router.__dict__
    owner = router._buffers if name == "scores" else owner
    kept.begin()
    for half, value in enumerate(values):
        kept.give(half)
        owner[name] = value
        router.all.append(half)
        kept.take(half)
    for half, value in enumerate(values):
        kept.give(half)
        assert owner[name] is value
        kept.take(half)
    try:
        kept.put_together(ROWS, LENGTH)
    finally:
        kept.end()
    assert router.all == [0, 1]
    return owner[name]


@pytest.mark.parametrize("name", ["kept", "z", "scores"])
@pytest.mark.parametrize("per_row", [(), (1, 5)])
def test_tensors_of_sequences_or_tokens_are_of_the_batch(name: str, per_row: tuple[int, ...]):
    for sizes in (ROWS, [n * LENGTH for n in ROWS]):
        a, b = (torch.randn(n, *per_row, requires_grad=True) for n in sizes)
        whole = _run((a, b), _Router(), name)
        assert torch.equal(whole, torch.cat((a, b)))
        whole.sum().backward()
        assert a.grad is not None


def test_nests_of_them_are_too():
    a, b = ({"z": [torch.ones(n), None], "how": "mine"} for n in ROWS)
    whole = _run((a, b), _Router())
    assert torch.equal(whole["z"][0], torch.ones(3))
    assert whole["how"] == "mine"


@pytest.mark.parametrize(
    ("values", "whole"), [((1, 2), 2), ((7, 7), 7), ((True, True), True), (("x", "x"), "x")]
)
def test_counts_and_what_is_the_same_are_bs(values: Any, whole: Any):
    assert _run(values, _Router()) == whole


def test_a_table_that_both_make_is_one():
    assert torch.equal(_run((torch.ones(5), torch.ones(5)), _Router()), torch.ones(5))


REFUSED: list[tuple[Any, Any]] = [
    (torch.ones(()), torch.zeros(())),
    (torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)),
    (torch.ones(2, 3), torch.ones(1, 4)),
    (0.5, 0.25),
    (LENGTH, LENGTH),
    (torch.Size([2, 4]), torch.Size([1, 4])),
    ([torch.ones(2)], []),
    (object(), object()),
]


@pytest.mark.parametrize("name", ["kept", "z", "scores"])
def test_what_nobody_can_put_together_is_refused_by_name(name: str):
    where = r"layers\.1\.router\.aux" if name == "z" else r"layers\.1\.router"
    for values in REFUSED:
        with pytest.raises(ValueError, match=f'"halves": {where} keeps .{name}.'):
            _run(values, _Router(), name)


def test_what_one_half_alone_sets_stays():
    kept = Kept("layers.1", router := _Router())
    kept.begin()
    kept.give(0)
    router.kept = table = torch.ones(2)
    kept.take(0)
    kept.give(1)
    assert router.kept is table  # as a second microbatch would find it
    kept.take(1)
    kept.put_together(ROWS, LENGTH)
    assert router.kept is table


def test_each_half_has_the_masks_of_its_own_positions():
    model: Any = SimpleNamespace(get_attention_masks=lambda positions: positions)
    halves = slice(0, 2), slice(2, 3)
    first, second = _Masks(model)(torch.arange(3), torch.arange(3), halves)
    assert (first.tolist(), second.tolist()) == ([0, 1], [2])
