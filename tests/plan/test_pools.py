"""What a step makes torch's allocator reserve, and what of it compiled modules never make."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy, silu

from titan_ext.activation_checkpoint.compile import CompiledPart
from titan_ext.plan.live import LiveBytes
from titan_ext.plan.pools import Event, Fusion, Pools, is_fusible

MIB = 2**20
COMPUTE, GATHER = 0, 1


def _reserved(*events: tuple[int, int, float]) -> dict[int, int]:
    """MiB by stream."""
    pools = Pools()
    pools.replay(Event(storage, stream, int(mib * MIB)) for storage, stream, mib in events)
    return {stream: nbytes // MIB for stream, nbytes in pools.reserved.items()}


def test_each_stream_has_a_pool_that_grows_and_never_shrinks():
    # Pages of 20 MiB; the second stream cannot have what the first one has freed.
    assert _reserved((1, COMPUTE, 30), (1, COMPUTE, 0), (2, GATHER, 30)) == {
        COMPUTE: 40,
        GATHER: 40,
    }


def test_small_storages_have_pages_of_their_own():
    assert _reserved((1, COMPUTE, 1), (2, COMPUTE, 1)) == {COMPUTE: 2}
    assert _reserved((1, COMPUTE, 1), (2, COMPUTE, 1), (3, COMPUTE, 0.5)) == {COMPUTE: 4}


def test_a_hole_is_used_by_what_fits_best_and_joined_with_its_neighbours():
    held = [(at, COMPUTE, 10) for at in range(6)]
    # Two holes of 10 MiB apart hold no 20.
    assert _reserved(*held, (1, 0, 0), (3, 0, 0), (9, COMPUTE, 20)) == {COMPUTE: 80}
    # Side by side they do, in either order.
    for first, second in ((1, 2), (2, 1)):
        events = *held, (first, 0, 0), (second, 0, 0), (9, COMPUTE, 20)
        assert _reserved(*events) == {COMPUTE: 60}
    # The smaller of two holes is taken, so that the larger one still holds 20.
    holes = [(1, 0, 0), (2, 0, 0), (4, 0, 0)]
    assert _reserved(*held, *holes, (8, 0, 10), (9, 0, 20)) == {COMPUTE: 60}


def test_what_is_freed_at_the_end_of_a_pool_can_grow():
    assert _reserved((1, 0, 20), (2, 0, 20), (2, 0, 0), (3, 0, 40)) == {COMPUTE: 60}


def test_blocks_do_not_overlap():
    """Whatever is taken and given: a block's bytes are its own."""
    torch.manual_seed(0)
    pools, live = Pools(), {}
    for at in range(2000):
        if live and torch.rand(()) < 0.5:
            gone = list(live)[int(torch.randint(len(live), ()))]
            del live[gone]
            pools.replay([Event(gone, 0, 0)])
            continue
        pools.replay([Event(at, 0, int(torch.randint(2 * MIB, 50 * MIB, ())))])
        _, size, start = pools._blocks[at]
        assert all(start + size <= a or a + n <= start for n, a in live.values())
        live[at] = size, start
    top = max(size + start for size, start in live.values())
    assert top <= pools.reserved[0]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": _Block()})
        self.lm_head = nn.Linear(1024, 4096, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(x)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (
            nn.Linear(1024, 2048, bias=False, dtype=torch.bfloat16) for _ in range(2)
        )
        self.w2 = nn.Linear(2048, 1024, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.w2(silu(self.w1(x)) * self.w3(x))


def _live(compiled: Sequence[str], piece: str = "") -> LiveBytes:
    """A forward and backward of 4,096 tokens in bf16; of the block one ``piece`` is compiled."""
    with FakeTensorMode():
        model = _Model()
        if piece:
            block = model.layers["0"]
            modules = {piece: block.get_submodule(piece)}
            CompiledPart(block, "layers.0", modules, piece, is_piece=True).checkpoint(None)
        x = torch.empty(4096, 1024, dtype=torch.bfloat16)
        with LiveBytes([model], [], compiled=compiled) as live:
            logits = model(x)
            loss = cross_entropy(logits.float(), torch.zeros(4096, dtype=torch.int64))
            loss.backward()
            del logits, loss
    return live


def _left_of(live: LiveBytes, compiled: Sequence[str]) -> list[Event]:
    return [event for _, event in live._fusion.apply(live.events, compiled)]


@pytest.mark.parametrize(
    ("compiled", "mib"),
    # Of 4,096 x 2,048 in bf16, 16 MiB: silu's output, since backward has its input, and its
    # gradient. Of 4,096 x 4,096 logits four fp32 tensors of 64 MiB: their copy, its log-softmax,
    # and the gradients of both.
    [(["model"], 32), (["loss"], 256), (["model", "loss"], 32 + 256)],
)
def test_what_is_fused_is_not_made(compiled: Sequence[str], mib: int):
    live = _live(compiled)
    sizes = {event.storage: event.nbytes for event in live.events if event.nbytes}
    left = _left_of(live, compiled)
    at = [event for event in left if event.nbytes]
    never = set(sizes) - {event.storage for event in at}
    assert never <= live.never_made(), "of a job that compiles all"
    assert (never == live.never_made()) == (len(compiled) == 2)
    assert live.peak.nbytes == _most(left) <= _most(live.events)
    assert sum(sizes[storage] for storage in never) // MIB == mib
    assert _left_of(live, []) == live.events


def test_what_runs_between_pieces_is_made():
    live = _live(["model"], piece="w2")
    assert _left_of(live, ["model"]) == live.events


def test_a_peak_has_what_its_own_operation_made():
    with FakeTensorMode(), LiveBytes([nn.Identity()], []) as live:
        kept = torch.ones(MIB)
    assert sum(live.peak.by_kind.values()) == live.peak.nbytes == kept.nbytes


def _most(events: Sequence[Event]) -> int:
    now, most, sizes = 0, 0, {}
    for event in events:
        now += event.nbytes - sizes.pop(event.storage, 0) * (not event.nbytes)
        sizes.update({event.storage: event.nbytes} if event.nbytes else {})
        most = max(most, now)
    return most


def test_products_and_exchanges_are_not_fusible():
    ops = torch.ops.aten
    assert all(is_fusible(op) for op in (ops.silu.default, ops._to_copy.default, ops.sum.default))
    assert not any(is_fusible(op) for op in (ops.mm.default, ops._grouped_mm.default))


_Op = tuple[object, str, bool, Sequence[int], Sequence[int]]


def _edited(*ops: _Op) -> list[Event]:
    """Events that are left, of operations on storages 1, 2, ... of 1 byte each."""
    fusion, events = Fusion(), []
    for func, region, in_backward, read, made in ops:
        fusion.see(func, region, len(events), in_backward=in_backward, read=read, made=made)
        events += [Event(storage, 0, 1) for storage in made]
    events += [Event(storage, 0, 0) for storage in sorted({e.storage for e in events})]
    return [event for _, event in fusion.apply(events, ["model", "loss"])]


def _fused(*ops: _Op) -> list[int]:
    return [event.storage for event in _edited(*ops) if event.nbytes]


MM, ADD = torch.ops.aten.mm.default, torch.ops.aten.add.Tensor


def test_what_another_block_reads_is_made():
    assert _fused((ADD, "layers.0", False, [], [1]), (ADD, "layers.0", False, [1], [2])) == []
    seen = (ADD, "layers.0", False, [], [1]), (ADD, "layers.1", False, [1], [2])
    assert _fused(*seen) == [1]


def test_what_a_product_of_backward_reads_is_kept():
    """torch's partitioner does not make again what has to be in memory then."""
    kept = (ADD, "layers.0", False, [], [1]), (MM, "layers.0", False, [1], [2])
    assert 1 in _fused(*kept, (MM, "layers.0", True, [1], [3]))


def test_what_backward_does_not_read_is_not_kept():
    """An eager checkpoint keeps what its policy saves, whoever reads it."""
    made, used = (MM, "layers.0", False, [], [1]), (MM, "layers.0", False, [1], [2])
    then = (MM, "layers.0", False, [2], [3])
    assert _edited(made, used, then)[2] == Event(1, 0, 0)
    assert _edited(made, used, then, (MM, "layers.0", True, [1], [4]))[2] == Event(3, 0, 1)


def test_what_backward_makes_again_is_held_until_its_last_product():
    block = "layers.0"
    made, again = (ADD, block, False, [], [1]), (ADD, block, True, [1], [4])
    products = (MM, block, False, [1], [2]), (MM, block, False, [1], [3])
    assert _edited(made, *products, again)[2:4] == [Event(3, 0, 1), Event(1, 0, 0)]
