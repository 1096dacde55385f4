"""What titan_ext adds to a job of 512 or 4,096 ranks: start, agree, resume and stop, in seconds.

The ranks are threads, or objects that take turns, over a store in this process that counts. A few
tests have real ranks. Counts are asserted: what a rank sends, receives and opens does not depend on
the number of ranks. ``python -m tests.run.test_scale`` prints the table of docs/running.md.

Records and reports of ``debug.record_collectives`` have their tests in test_debug_collectives.
"""

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import CheckpointManager

from tests.helpers.checkpointing import flip_a_bit
from tests.helpers.cluster import run_ranks
from tests.helpers.collectives import CollectiveTrace
from tests.helpers.training import Run, make_config, titan_config
from titan_ext.base import agreement
from titan_ext.base.agreement import Job, LastStep, leaves_files
from titan_ext.base.stdlib_corpus import make_corpus
from titan_ext.run import checkpoints
from titan_ext.run.checkpoints import verify_checksums
from titan_ext.run.start import describe, ranks_differ
from titan_ext.run.stop import StopOnSignal
from titan_ext.run.trainer import extend_config

SIZES = (64, 512, 4096)
_SMALL = SIZES[0]
_LARGE = 512
_STACK_NBYTES = 512 * 2**10


class CountingStore(dist.Store):
    """A store of threads: counts calls and bytes of each; ``before_call`` runs in between."""

    def __init__(self) -> None:
        super().__init__()
        self._store: Any = dist.HashStore()
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.before_call: Callable[[], None] = lambda: None

    def _count(self, key: str, value: bytes | str = b"") -> None:
        self.before_call()
        with self._lock:
            who = threading.current_thread().name
            self.calls[who] += 1
            self.nbytes[who] += len(key) + len(value)

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._count(key, value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._count(key, value := self._store.get(key))
        return value

    def add(self, key: str, amount: int) -> int:  # type: ignore[override]
        self._count(key)
        return self._store.add(key, amount)

    def append(self, key: str, value: bytes) -> None:
        self._count(key, value)
        self._store.append(key, value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:  # type: ignore[override]
        self._count(key, desired)
        return self._store.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        self._count(keys[0])
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:  # type: ignore[override]
        self._count(keys[0])
        self._store.wait(keys, timedelta(seconds=300))


def on_threads(ranks: int, work: Callable[[Job], Any], store: Any) -> list[Any]:
    """``work`` of each rank of a job in a thread; what it returns or raises, by rank."""
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(Job(store, rank, ranks))
        except Exception as error:
            results[rank] = error

    before = threading.stack_size(_STACK_NBYTES)
    try:
        threads = [
            threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(ranks)
        ]
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(before)
    for thread in threads:
        thread.join()
    return results


def start(ranks: int, *, odd: int | None = None) -> tuple[list[str], CountingStore]:
    """All ranks compare what they run."""
    word = json.dumps(_DESCRIPTION, sort_keys=True)
    odd_word = json.dumps({**_DESCRIPTION, "training.seq_len": "128"}, sort_keys=True)
    store = CountingStore()

    def work(job: Job) -> str:
        return job.compare("what to run", odd_word if job.rank == odd else word, ranks_differ)

    return on_threads(ranks, work, store), store


def stop(ranks: int, seed: int, *, ahead: int = 2) -> tuple[set[int], int, CountingStore]:
    """Steps of all ranks in random order, one of which asks for an end: where they end, and when.

    Before each call of the store another rank may take its turn, so all orders of calls can occur.
    No rank is more than ``ahead`` steps before the last, as collectives have it. Returns the last
    steps of the ranks, the latest that was possible when all had looked, and the store.
    """
    order = random.Random(seed)
    store = CountingStore()
    jobs = [Job(store, rank, ranks) for rank in range(ranks)]
    lasts = [LastStep(job) for job in jobs]
    steps, ended, busy = [0] * ranks, [False] * ranks, set[int]()
    slowest: Counter[int] = Counter({0: ranks})

    def take_turn(rank: int) -> None:
        if rank in busy:
            return
        busy.add(rank)
        if order.random() < 0.3:
            lasts[rank].look()
        elif not ended[rank] and steps[rank] - min(slowest) < ahead:
            if lasts[rank].may_begin(steps[rank] + 1):
                slowest[steps[rank]] -= 1
                slowest[steps[rank] + 1] += 1
                if not slowest[steps[rank]]:
                    del slowest[steps[rank]]
                steps[rank] += 1
            else:
                ended[rank] = True
        busy.discard(rank)

    def between() -> None:
        if len(busy) < 5 and order.random() < 0.2:
            take_turn(order.randrange(ranks))

    store.before_call = between
    for _ in range(3 * ranks):
        take_turn(order.randrange(ranks))
    for rank in order.sample(range(ranks), min(ranks, 2)):  # two at once are one request
        busy.add(rank)
        lasts[rank].ask(15)
        busy.discard(rank)
    for rank in order.sample(range(ranks), ranks):
        busy.add(rank)
        lasts[rank].look()
        busy.discard(rank)
    # A rank that has not come to its first step holds the others up, but for ``ahead`` steps.
    latest = max(steps) + (0 if min(steps) else ahead)
    for _ in range(1000):
        if all(ended):
            break
        for rank in order.sample(range(ranks), ranks):
            take_turn(rank)
    assert all(ended), "a rank does not end"
    assert {last.reason() for last in reversed(lasts)} == {15}  # rank 0 waits for the others
    return set(steps), latest, store


_DESCRIPTION = describe(extend_config(titan_config("deepseek_v3")))


def _most(counted: Counter[str]) -> int:
    """Of a rank; one of them, the last to come, reads and decides for all."""
    return sorted(counted.values())[-2]


def test_a_start_costs_a_rank_the_same_in_any_job():
    (few, small), (said, large) = start(_SMALL), start(_LARGE)
    assert set(few) == set(said) == {""}
    assert _most(large.calls) <= _most(small.calls)
    # A rank's number has more digits; the first of a class gives its word.
    assert _most(large.nbytes) <= _most(small.nbytes) + 8
    assert max(large.nbytes.values()) <= 2 * max(small.nbytes.values())


def test_ranks_that_disagree_are_named_by_class():
    said, store = start(512, odd=509)
    assert set(said) == {
        "the ranks disagree on what to run:\n"
        "  training.seq_len: 2048 on ranks 0-508, 510-511; 128 on rank 509"
    }
    word = len(json.dumps(_DESCRIPTION))
    assert sum(store.nbytes.values()) < 5 * word + 2000 * 512, "one example of each class"


def test_where_each_rank_differs_a_few_are_kept():
    store = CountingStore()
    classes: list[Any] = []

    def work(job: Job) -> str:
        def verdict_of(words: list[tuple[str, list[int]]]) -> str:
            classes.extend(words)
            return "differ"

        return job.compare("hosts", f"host {job.rank}", verdict_of)

    assert set(on_threads(512, work, store)) == {"differ"}
    assert len(classes) == 8
    assert all(ranks == [int(word.split()[1])] for word, ranks in classes)


def test_all_ranks_stop_after_the_same_step():
    for seed in range(300):
        few = random.Random(seed)
        ranks, ahead = few.choice([1, 2, 3, 4, 7, 16]), few.choice([1, 2, 30])
        stopped, latest, _ = stop(ranks, seed, ahead=ahead)
        assert len(stopped) == 1, seed
        assert stopped.pop() <= latest, f"{seed}: a step begins when all have heard of it"


def test_rank_0_ends_when_all_know_that_the_run_ends():
    """Its process may have the store."""
    store = CountingStore()
    first, other = (LastStep(Job(store, rank, 2)) for rank in range(2))
    other.ask(15)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(first.reason()))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert other.reason() == 15
    thread.join(30)
    assert found == [15]


def test_a_stop_costs_a_rank_the_same_in_any_job():
    stopped, latest, store = stop(_LARGE, seed=0)
    assert len(stopped) == 1
    assert stopped.pop() <= latest
    # Looks included; a word of one rank for each other would be more.
    assert sum(store.calls.values()) < 40 * _LARGE
    assert sum(store.nbytes.values()) < 2000 * _LARGE


def _resume(
    config: Any, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[str]]:
    """What all ranks find out about the checkpoint, and who has looked for it."""
    readers: list[str] = []
    look = checkpoints.checkpoint_to_load
    jobs = threading.local()

    def counted(*args: Any) -> Any:
        readers.append(threading.current_thread().name)
        return look(*args)

    def work(job: Job) -> None:
        jobs.here = job
        verify_checksums(config)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "checkpoint_to_load", counted)
        patch.setattr(checkpoints, "this_job", lambda: jobs.here)
        return on_threads(ranks, work, CountingStore()), readers


def test_rank_0_decides_what_is_verified_and_what_one_finds_is_an_error_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = extend_config(titan_config("qwen3"))
    config.dump_folder = str(tmp_path)
    config.checkpoint = CheckpointManager.Config(enable=True)
    weights = {f"w{i}": torch.arange(100.0) for i in range(20)}
    step = tmp_path / "checkpoint" / "step-4"
    dcp.save(weights, storage_writer=dcp.FileSystemWriter(step, thread_count=4))
    results, readers = _resume(config, 64, monkeypatch)
    assert set(results) == {None}
    assert readers == ["rank 0"]
    names = sorted(path.name for path in step.glob("*.distcp"))
    assert len(names) == 4
    for name in names[1:3]:
        flip_a_bit(step / name)
    for ranks in (2, 64):  # fewer than files, and more
        results, _ = _resume(config, ranks, monkeypatch)
        assert {type(error) for error in results} == {ValueError}
        (words,) = {str(error) for error in results}
        assert all((name in words) == (name in names[1:3]) for name in names)


def test_an_error_of_rank_0_is_one_of_all():
    def refuse() -> None:
        raise OSError("no such disk")

    results = on_threads(64, lambda job: job.broadcast("disk", refuse), CountingStore())
    assert type(results[0]) is OSError
    assert {(type(e), str(e)) for e in results[1:]} == {
        (RuntimeError, "rank 0: OSError: no such disk")
    }


def test_a_few_ranks_of_a_job_leave_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agreement.dist, "is_initialized", lambda: True)
    for pipeline in (1, 8):
        layout: Any = SimpleNamespace(world_size=4096, pp=pipeline)
        files = 0
        for rank in range(4096):
            monkeypatch.setattr(agreement.dist, "get_rank", lambda rank=rank: rank)
            files += leaves_files(layout)
        assert files == 8 * pipeline


def _descriptors() -> tuple[int, int]:
    """What waiting for signals opens in a rank: file descriptors and process groups."""
    dist.init_process_group("gloo")
    dist.barrier()
    before = len(os.listdir("/proc/self/fd")), dist.get_pg_count()
    trainer: Any = SimpleNamespace(checkpointer=SimpleNamespace(enable=False))
    StopOnSignal().after_build(trainer)
    dist.barrier()
    return len(os.listdir("/proc/self/fd")) - before[0], dist.get_pg_count() - before[1]


def test_waiting_for_signals_opens_two_files_and_no_group(tmp_path: Path):
    assert run_ranks(_descriptors, 3, log_folder=tmp_path) == [(2, 0)] * 3


def _collectives(folder: Path, checked: bool) -> list[Counter[str]]:
    """Of each step of a small run, from the end of the one before; all but the third are logged."""
    run = Run(parallelize="submodule", world=2, ep=2, layers=1, seq_len=32, ac="none", steps=4)
    config: Any = make_config(run, folder)
    config.metrics.log_freq = 2
    config.debug.record_collectives = checked
    config.checkpoint = CheckpointManager.Config(enable=False)
    trainer = config.build()
    if not checked:
        trainer.checks = []
    steps: list[Counter[str]] = []
    trace = CollectiveTrace()
    train_step = trainer.train_step

    def counted(data_iterator: Any) -> None:
        train_step(data_iterator)
        steps.append(Counter(event.kind for event in trace.events))
        trace.events.clear()

    trainer.train_step = counted
    with trace:
        trainer.train()
    trainer.close()
    return steps


def test_a_step_has_no_collective_of_ours(tmp_path: Path):
    """Beside those of a run without our checks, a step that is logged has the one with which ranks
    compare the collectives that they recorded, and no other step has any."""
    make_corpus()
    ours, bare = (
        run_ranks(_collectives, 2, tmp_path / name, name == "ours", log_folder=tmp_path / name)[0]
        for name in ("ours", "bare")
    )
    assert len(bare) == 4
    for step in bare:
        assert step
    more = [mine - its for mine, its in zip(ours[1:], bare[1:], strict=True)]
    assert more == [{"all_reduce": 1}, {}, {"all_reduce": 1}]


def main() -> None:
    """Print seconds, and bytes of a rank, for start and stop by number of ranks."""
    for ranks in SIZES:
        for name, run in (("start", lambda r: start(r)[1]), ("stop", lambda r: stop(r, 0)[2])):
            since_s = time.monotonic()
            store = run(ranks)
            seconds = time.monotonic() - since_s
            total = sum(store.nbytes.values())
            print(f"{name} {ranks}: {seconds:.2f} s, {total / ranks:.0f} B a rank", end="; ")
            print(f"{sum(store.calls.values()) / ranks:.1f} calls a rank")


if __name__ == "__main__":
    main()
