"""Kept tensors on the host: the same gradients, bytes as said, and copies in order."""

import logging
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from tests.activation_checkpoint.test_fp8_ac import _block, _forward, _gradients, _input
from tests.helpers.fp8_activations import debug_model, tokens
from titan_ext.activation_checkpoint import FP8AC, measure_block, memory_report_of
from titan_ext.fp8 import SavedTensorStore
from titan_ext.fp8 import offload as host
from titan_ext.fp8.offload import SLAB, HostMemory, Offload
from titan_ext.plan.live import LiveBytes
from titan_ext.plan.memory import MemoryPlan

Config = FP8AC.Config
MIB = 2**20
_LIMIT = "activation_checkpoint.offload_limit"


class LateLane:
    """A stream as slow as can be: a copy is made when it is waited for, and those before it.

    What was freed too early holds NaN, as if something else had been written there.
    """

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.waits = True

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> int:
        alive = StorageWeakRef(source.untyped_storage())
        there, size = source.untyped_storage()._weak_ref(), source.size()
        place = StorageWeakRef(target.untyped_storage())
        offset, dtype = target.storage_offset(), target.dtype
        target.fill_(torch.nan) if dtype.is_floating_point else target.fill_(77)

        def late() -> None:
            assert not place.expired(), "a copy into memory that was freed"
            memory = torch.UntypedStorage._new_with_weak_ptr(place.cdata)
            to = torch.empty(0, dtype=dtype).set_(memory, offset, size, (1,))
            if alive.expired():
                to.fill_(torch.nan)
                return
            storage = torch.UntypedStorage._new_with_weak_ptr(there)
            to.copy_(torch.empty(0, dtype=dtype).set_(storage, from_offset, size, (1,)))

        from_offset = source.storage_offset()
        self.queue.append(late)
        self.made = getattr(self, "made", 0)
        return self.made + len(self.queue)

    def join(self, event: int) -> None:
        while self.waits and self.made < event:
            self.queue.pop(0)()
            self.made += 1


class _Blocks(nn.Module):
    """Blocks whose backward reads views, transposed and expanded tensors."""

    def __init__(self, store: SavedTensorStore, offload: Offload | None, count: int = 5) -> None:
        super().__init__()
        self.store, self.offload, self.count = store, offload, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(self.count):
            group = self.offload.begin(str(i)) if self.offload is not None else None

            def pack(x: torch.Tensor, name: str = str(i), group: Any = group) -> Any:
                return self.store.pack(x, name=name, exact="asked for", host=group)

            with torch.autograd.graph.saved_tensors_hooks(pack, self.store.unpack):
                y = (x.t() * 1.5).sin()
                x = (y * y[:, :1].expand_as(y)).t().exp() / x[:, 64:128].sum()
        return x


def _x() -> torch.Tensor:
    return torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).requires_grad_()


def _gradient(offload: Offload | None, forwards: int = 1, backwards: int = 1) -> torch.Tensor:
    model, x = _Blocks(SavedTensorStore(), offload), _x()
    losses = [model(x).sum() for _ in range(forwards)]
    for again in range(backwards):
        for loss in losses:
            loss.backward(retain_graph=again + 1 < backwards)
    assert x.grad is not None
    return x.grad


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostMemory]:
    """The process's host memory, empty, with copies as late as can be."""
    late: Any = HostMemory(torch.device("cpu"))
    late.out, late.back = LateLane(), LateLane()
    monkeypatch.setattr(host, "host_memory", lambda device: late)
    yield late
    assert all(slab.regions == slab.end == 0 for slab in late._slabs), "a region is never freed"


@pytest.mark.parametrize(("forwards", "backwards"), [(1, 1), (3, 1), (1, 2)])
def test_copies_that_are_late_change_nothing(memory: HostMemory, forwards: int, backwards: int):
    """Several forwards before a backward, as a pipeline's, and a second backward."""
    expected = _gradient(None, forwards, backwards)
    offload = Offload()
    assert torch.equal(_gradient(offload, forwards, backwards), expected)
    reserved = memory.reserved
    assert torch.equal(_gradient(offload, forwards, backwards), expected)
    assert memory.reserved == reserved == SLAB, "buffers are used again"


def test_a_pass_ends_before_its_last_copies(memory: HostMemory):
    """Backward takes the last two blocks from the device. So no CUDA graph holds a pass: a capture
    ends in an error where a stream is not joined. ``run.trainer`` refuses the two together."""
    _gradient(Offload())
    assert memory.out.queue  # pyrefly: ignore[missing-attribute]
    assert not memory.back.queue  # pyrefly: ignore[missing-attribute]


def test_backward_fetches_one_block_ahead(memory: HostMemory):
    """Blocks 4 and 3 are still on the device; the first tensor of 3 brings 2, and so on."""
    fetched: list[tuple[str, str]] = []
    current = [""]
    start_back, get = host._Copy.start_back, host._Copy.get

    def starting(copy: Any) -> None:
        was_away = copy.state == "away"
        start_back(copy)
        if was_away and copy.state == "coming":
            fetched.append((current[0], copy.group.block))

    def getting(copy: Any) -> torch.Tensor:
        current[0] = copy.group.block
        return get(copy)

    with (
        unittest.mock.patch.object(host._Copy, "start_back", starting),
        unittest.mock.patch.object(host._Copy, "get", getting),
    ):
        _gradient(Offload())
    assert list(dict.fromkeys(fetched)) == [("3", "2"), ("2", "1"), ("1", "0")]


def test_device_memory_is_held_for_two_blocks():
    model, x = _Blocks(SavedTensorStore(), Offload()), _x()
    out = model(x)
    entries = [e for e in model.store._by_key.values() if e.on_host]
    sources = {e.name for e in entries if any(h.copy.state == "source" for h in e.on_host)}
    assert {e.name for e in entries} == {"0", "1", "2", "3", "4"}
    assert sources == {"3", "4"}
    report = model.store.memory_report
    assert report.nbytes < 4096, "what is small stays on the device"
    assert report.host_nbytes == sum(row.original_nbytes for row in report) - report.nbytes
    del out


def test_a_change_in_place_during_the_copy_is_an_error(memory: HostMemory):
    offload = Offload()
    x = torch.randn(8192)
    kept = offload.begin("layers.0").put(x)
    x.add_(1)
    offload.begin("layers.1")
    with pytest.raises(RuntimeError, match=r"inplace operation.*layers\.0, is at version 1"):
        offload.begin("layers.2")
    assert kept is not None


def test_what_came_back_is_used_again_until_it_is_written_to_or_another_block_runs(
    memory: HostMemory,
):
    offload, x = Offload(), torch.randn(8192)
    kept = offload.begin("0").put(x)
    assert kept is not None
    for block in "12":
        offload.begin(block)
    assert kept.copy.state == "away"
    back = kept.get()
    assert torch.equal(back, x)
    assert kept.get().data_ptr() == back.data_ptr()
    back.zero_()  # as a recompute may
    assert torch.equal(kept.get(), x)
    assert kept.copy.state == "back"
    offload.begin("3")
    assert kept.copy.state == "away"


def test_a_region_that_is_freed_while_another_is_taken_is_no_part_of_it():
    slab: Any = host._Slab(4096, pinned=False)
    slab.take(256)
    memory, views = slab._memory, []

    class Collecting:
        def __getitem__(self, part: slice) -> torch.Tensor:
            slab.give_back()  # as garbage does that is collected now
            views.append(part)
            return memory[part]

    slab._memory = Collecting()
    slab.take(512)
    slab._memory = memory
    assert slab.end >= views[0].stop
    slab.give_back()
    assert slab.regions == slab.end == 0


def test_the_limit(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    small = HostMemory(torch.device("cpu"))
    monkeypatch.setattr(host, "host_memory", lambda device: small)
    limit = 3 * 2**18
    offload = Offload(limit, _LIMIT)
    model, x = _Blocks(SavedTensorStore(), offload), _x()
    with caplog.at_level(logging.WARNING):
        loss = model(x).sum()
    (message,) = [r.getMessage() for r in caplog.records if _LIMIT in r.getMessage()]
    assert f"{_LIMIT} is reached: {limit} bytes. 131072 bytes of 2" in message
    rows = model.store.memory_report
    assert sum(row.host_nbytes for row in rows) == small.reserved == limit
    assert any(row.nbytes and row.treatment.endswith("no room on the host") for row in rows)
    assert sum(row.nbytes for row in rows) == sum(row.original_nbytes for row in rows) - limit
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, _gradient(None))


def test_a_rank_that_is_out_of_host_memory_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "SLAB", 2**60)  # torch really asks for that
    monkeypatch.setattr(host, "host_memory", lambda device: HostMemory(device))
    config = Config(preset="stock", op_policies={"input": "offload"})
    with pytest.raises(
        RuntimeError, match=rf"^rank 0 is out of host memory: .*layers\.0.*{_LIMIT}"
    ):
        measure_block(_block(), _input(), None, None, config=config)


def test_a_plan_counts_the_host_apart():
    """Fake tensors, as in a dry run."""
    with FakeTensorMode(), LiveBytes([nn.Identity()], []) as live:
        x = torch.zeros(2**28)  # 1 GiB
        offload = Offload()
        kept = [offload.begin(str(i)).put(x * i) for i in range(6)]
        plan = MemoryPlan.of(live, 0, ranks_per_node=8)
        assert live.peak.nbytes == 3 * 2**30, "x, and what the last two blocks keep"
        back = [entry.get() for entry in reversed(kept) if entry is not None]
    assert all(isinstance(y, FakeTensor) for y in back)
    line = list(plan.table())[-1]
    assert line.startswith("    6.00  host: offloaded activations of this rank at most")
    assert line.endswith("; 48.00 a node of 8 such ranks")


# Under the policy.


def _all(policy: str) -> dict[str, str]:
    return {"input": policy, "*": policy}


@pytest.mark.parametrize(
    ("config", "policy"),
    [({"preset": "stock"}, "save_float8"), ({"mode": "no_recompute"}, "save")],
    ids=["stock", "no_recompute"],
)
def test_gradients_are_those_of_the_device(config: Any, policy: str, memory: HostMemory):
    there = policy.replace("save", "offload")
    table = _all if config.get("preset") else lambda policy: {"*": policy}
    kept = _gradients(Config(**config, op_policies=table(policy)), 2, interleaved=True)
    moved = _gradients(Config(**config, op_policies=table(there)), 2, interleaved=True)
    assert kept.keys() == moved.keys()
    for name, gradient in kept.items():
        assert torch.equal(gradient, moved[name]), name
    assert memory.reserved


def test_bytes_of_a_block():
    """Those of the same policies without the host, where they say; small tensors stay."""
    for policy in ("save", "save_float8"):
        there = policy.replace("save", "offload")
        tables = (_all(policy), _all(there))
        kept, moved = (
            measure_block(_block(), _input(), None, None, config=Config(op_policies=table))
            for table in tables
        )
        on_host = [row for row in moved.stored if row.host_nbytes]
        assert kept.nbytes == moved.nbytes + moved.stored.host_nbytes
        assert moved.stored.host_nbytes > 0.9 * kept.nbytes
        assert all(row.treatment.endswith(", on the host") for row in on_host)
        assert all(row.nbytes == 0 for row in on_host)
        assert moved.recomputed_flops == kept.recomputed_flops


def test_the_report_of_a_model_has_the_host():
    model = debug_model(layers=3)
    Config(preset="stock", op_policies={"input": "offload"}).build(dump_folder="").apply(model)
    _forward(model, tokens()).backward()
    report = memory_report_of([model])
    expected = 3 * 2 * 64 * 256 * 2 / MIB
    assert report.metrics()["activation_checkpoint/host(MiB)"] == expected
    assert "exact: by policy, on the host, input" in str(report)


def test_exempt_modules_use_no_float8_on_the_host():
    config = Config(op_policies=_all("offload_float8"), exempt=["layers.0.attention"])
    report = measure_block(_block(), _input(), None, None, config=config)
    treatments = {row.treatment for row in report.stored if row.name.startswith("attention")}
    assert treatments == {"exact: attention, on the host"}


@pytest.mark.parametrize("first", [0, 1])
def test_views_with_a_sign_or_conjugate_bit_come_back_with_it(first: int):
    """A copy of the storage has no such bit, and what is kept of one view serves the others."""
    z = torch.randn(64, 128, dtype=torch.complex64)
    store, group = SavedTensorStore(), Offload().begin("0")
    for views in ((z, z.conj()), (z.real, torch._neg_view(z.real)), (z.imag, z.conj().imag)):
        entries = [store.pack(x, exact="asked for", host=group) for x in (views[first], *views)]
        for x, entry in zip((views[first], *views), entries, strict=True):
            assert torch.equal(store.unpack(entry).clone(), x.clone())
