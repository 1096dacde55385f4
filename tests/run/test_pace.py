"""Warnings of a late rank, uneven experts and a pace that drops; and of nothing."""

import json
import os
import random
import time
import unittest.mock
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchtitan.tools.logging import init_logger

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, make_config
from titan_ext.base.stdlib_corpus import make_corpus
from titan_ext.components.dispatch import FunctionalAllToAllTokenDispatcher
from titan_ext.run.pace import Meter, PaceCheck, PaceMonitor, RankStep, Routing, faults_of

STEP_MS, RANKS, GROUP = 1000.0, 16, 4
_Change = Callable[[int, int], dict[str, Any]]


def _rows(chance: random.Random, step: int, change: _Change) -> list[RankStep]:
    """What 16 ranks in groups of 4 say: some 20 ms of waits, experts within a third of the mean."""
    rows = []
    for rank in range(RANKS):
        said: dict[str, Any] = {
            "wait_ms": chance.uniform(5, 40),
            "step_ms": STEP_MS * chance.uniform(0.97, 1.03),
            "tokens": {str(i): int(1000 * chance.uniform(0.7, 1.3)) for i in (1, 2, 3)},
        }
        said |= change(step, rank)
        rows.append(RankStep(step, rank, rank // GROUP * GROUP, **said))
    return rows


def _monitored(
    steps: int, change: _Change, pace: Callable[[int], float] = lambda _: 1.0
) -> PaceMonitor:
    monitor, chance = PaceMonitor(), random.Random(7)
    for step in range(1, steps + 1):
        monitor.take(step, faults_of(_rows(chance, step, change)))
        # One step in ten is saved, or collects garbage, and takes twice as long.
        saved = 2.0 if step % 10 == 0 else 1.0
        monitor.pace(step, STEP_MS * saved * chance.uniform(0.97, 1.03) * pace(step))
    return monitor


def _nothing(step: int, rank: int) -> dict[str, Any]:
    return {}


def test_a_quiet_run_warns_of_nothing_in_500_steps():
    """Nor if now and then a rank comes late for two steps, or a layer is uneven."""

    def now_and_then(step: int, rank: int) -> dict[str, Any]:
        if step % 50 in (1, 2) and rank // GROUP == 1:
            tokens = {"1": 9000 * (rank == 6), "2": 1, "3": 1}
            return {"wait_ms": 0.0 if rank == 6 else 400.0, "tokens": tokens}
        return {}

    assert _monitored(500, now_and_then).warnings == []


def test_a_late_rank_is_named_once():
    def late(step: int, rank: int) -> dict[str, Any]:
        waits = step >= 100 and rank // GROUP == 2
        return {"wait_ms": 5.0 if rank == 9 else 305.0} if waits else {}

    (warning,) = _monitored(150, late).warnings
    assert warning == (
        "step 102: rank 9 is late: the others wait 300.0 ms a step for it before they exchange "
        "tokens"
    )


def test_uneven_experts_are_named_with_their_layer():
    def uneven(step: int, rank: int) -> dict[str, Any]:
        if rank // GROUP != 1:
            return {"tokens": {"1": 100, "2": 100}}
        return {"tokens": {"1": 100, "2": 220 if rank == 5 else 60}}

    (warning,) = _monitored(120, uneven).warnings
    assert warning.startswith("step 103: experts are uneven"), "not of an untrained router"
    assert warning.endswith("those of rank 5 got 2.20 times the mean tokens in layer 2")


@pytest.mark.parametrize(("most", "is_uneven"), [(150, True), (140, False)])
def test_of_two_ranks_one_can_have_twice_the_mean_at_most(most: int, is_uneven: bool):
    rows = [
        RankStep(1, rank, 0, 1.0, 10.0, {"7": tokens})
        for rank, tokens in enumerate((most, 200 - most))
    ]
    assert bool(faults_of(rows)) == is_uneven


def test_a_drop_that_lasts_is_one_warning():
    pace = {True: 1.3, False: 1.0}
    (drop,) = _monitored(300, _nothing, lambda step: pace[step >= 200]).warnings
    assert drop.startswith("step 204: tokens/s are 2")
    assert "since step 200: a step takes 1" in drop
    assert _monitored(200, _nothing, lambda step: 1.5 if step % 40 < 4 else 1.0).warnings == []


def test_ranks_without_experts_or_partners_tell_nothing():
    """Such as those of a pipeline's stage without experts, beside a group that rank 0 is in."""
    alone = [RankStep(1, rank, rank, 500.0 * rank, 1000.0, {}) for rank in range(2, 4)]
    group = [RankStep(1, rank, 0, 300.0, 1000.0, {"1": 0}) for rank in range(2)]
    for rows in ([], alone, [*group, *alone]):
        assert faults_of(rows) == {}


class _Store:
    """A job's store that counts what is asked of it."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.values: dict[str, str] = {}

    def append(self, key: str, value: str) -> None:
        self.calls["append"] += 1
        self.values[key] = self.values.get(key, "") + value

    def get(self, key: str) -> bytes:
        self.calls["get"] += 1
        return self.values[key].encode()

    def delete_key(self, key: str) -> None:
        del self.values[key]


def _trainer(every: int, logged: list[tuple[int, dict[str, float]]]) -> Any:
    """One that has ``logged`` each step of so many."""
    metrics_processor = SimpleNamespace(
        should_log=lambda step: step % every == 0,
        logger=SimpleNamespace(log=lambda metrics, step: logged.append((step, metrics))),
    )
    device = torch.device("cpu")
    return SimpleNamespace(step=0, device=device, metrics_processor=metrics_processor)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_logged_step_is_one_word_to_the_store_and_others_are_none(
    rank: int, monkeypatch: pytest.MonkeyPatch
):
    logged: list[tuple[int, dict[str, float]]] = []
    trainer = _trainer(5, logged)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    check = PaceCheck()
    check._store = store = _Store()
    told = json.dumps([5, 1, 0, 7.0, 100.0, {"1": 9}])
    if rank == 0:  # as another rank of its group would
        store.values |= {f"step {count}": f"{told}\n" for count in (5, 10, 15, 20)}
    check._thread = ThreadPoolExecutor(1)
    dispatcher: Any = SimpleNamespace(meter=None)
    check._dispatchers = {"1": dispatcher}
    with check.around_run(trainer):
        for trainer.step in range(1, 21):
            with check.around_step(trainer):
                assert (dispatcher.meter is not None) == (trainer.step % 5 == 0)
                if dispatcher.meter is not None:
                    with dispatcher.meter.timing("wait"):
                        pass
                    dispatcher.meter.tokens = 40 + trainer.step
            assert dispatcher.meter is None
            if check._told is not None:
                check._told.result()
    assert store.calls["append"] == 4
    assert [step for step, _ in logged] == [5, 10, 15, 20]
    assert all(metrics["titan_ext/waits for token counts(ms)"] > 0 for _, metrics in logged)
    if rank == 0:
        assert store.calls["get"] == 4
        assert store.values == {}
    else:
        assert store.calls["get"] == 0
        assert store.values.keys() == {"step 5", "step 10", "step 15", "step 20"}
        step, who, *_, tokens, _, _ = json.loads(store.values["step 20"])
        assert (step, who, tokens) == (20, 3, {"1": 60})


def test_what_hybridep_drops_is_logged_warned_of_once_and_recorded(
    monkeypatch: pytest.MonkeyPatch,
):
    """And a dry run says which factor is enough, from a record that went through JSON."""
    logged: list[tuple[int, dict[str, float]]] = []
    trainer = _trainer(2, logged)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    check = PaceCheck()
    check._store, check._thread, check._ep = _Store(), ThreadPoolExecutor(1), 4
    layers = [SimpleNamespace(rows=torch.zeros(3, dtype=torch.int64), worst=1000) for _ in "12"]
    check._counted = dict(zip("12", layers, strict=True))  # type: ignore[arg-type]
    with check.around_run(trainer):
        for trainer.step in range(1, 7):
            with check.around_step(trainer):
                lost = 15 * (trainer.step > 2)
                layers[0].rows += torch.tensor([200, 0, 0])
                layers[1].rows += torch.tensor([300, lost, 0])
                for layer, most in zip(layers, (101, 286 + lost), strict=True):
                    layer.rows[2:].clamp_(min=most)
            if check._told is not None:
                check._told.result()  # what is told while the store is slow is left out
    assert [round(each["titan_ext/tokens dropped(%)"], 6) for _, each in logged] == [0, 3, 3]
    (warning,) = check.monitor.warnings
    assert warning.startswith("step 4: HybridEP dropped 3% of the tokens that came to rank 0")
    assert warning.endswith("non_blocking_capacity_factor 0.301 or more")
    records = [json.loads(json.dumps(check.receipts()["routing"]))] * 2
    assert records[0]["ep"] == 4
    assert list(Routing.verdict(records, [0.25, 0.301])) == [
        "non_blocking_capacity_factor = 0.301 would have dropped nothing of 12 passes of a rank "
        "through a layer",
        "0.25, as configured, would have dropped in 6 of 12 passes of a rank through a layer",
        "0.301, as configured, would have dropped in 0 of 12 passes of a rank through a layer",
    ]
    assert not list(Routing.verdict([], [0.25]))


def test_a_step_may_be_done_again(monkeypatch: pytest.MonkeyPatch):
    """At once, or after a step back to a checkpoint."""
    trainer = _trainer(1, [])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    clock = iter(range(100))
    check = PaceCheck(clock=lambda: float(next(clock)))
    check._store = store = _Store()
    check._thread = ThreadPoolExecutor(1)
    taken: list[int] = []
    paces: list[float] = []
    monkeypatch.setattr(check.monitor, "take", lambda step, faults: taken.append(step))
    monkeypatch.setattr(check.monitor, "pace", lambda step, ms: paces.append(ms))
    with check.around_run(trainer):
        for trainer.step in (1, 2, 2, 3, 2, 3, 4):
            with check.around_step(trainer):
                pass
            assert check._told is not None
            check._told.result()
    assert taken == [1, 2, 2, 3, 2, 3, 4]
    assert not store.values
    assert paces == [2000.0] * 6  # the clock is asked twice a step


def test_a_meter_adds_up_the_waits_of_a_step(monkeypatch: pytest.MonkeyPatch):
    times = iter([1.0, 1.5, 3.0, 3.25, 4.0, 4.125])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    meter = Meter(torch.device("cpu"))
    for what in ("wait", "wait", "travel"):
        with meter.timing(what):
            pass
    assert meter.ms() == {"wait": 750.0, "travel": 125.0}


RUN = Run(
    parallelize="submodule", world=4, ep=2, layers=3, narrow=True, seq_len=256, steps=5, ac="full"
)
LATE_RANK, LATE_S = 2, 0.8


def _train_slowed(run: Run, folder: Path, fault: str) -> list[str]:
    """One rank of a run with ``fault``: "late rank", "uneven experts" or "none".

    Returns what its check of the pace has said.
    """
    init_logger()
    PaceMonitor.trained_after = 0
    rank = int(os.environ["RANK"])
    config: Any = make_config(run, folder)
    trainer = config.build()
    exchange = FunctionalAllToAllTokenDispatcher._token_count_exchange

    def late(self: Any, *args: Any) -> torch.Tensor:
        time.sleep(LATE_S)
        return exchange(self, *args)

    if fault == "uneven experts":
        for part in trainer.model_parts:
            for name, buffer in part.named_buffers():
                if name.endswith("expert_bias_E"):
                    buffer[: buffer.numel() // 2] = 1e4
    is_late = fault == "late rank" and rank == LATE_RANK
    with unittest.mock.patch.object(
        FunctionalAllToAllTokenDispatcher, "_token_count_exchange", late if is_late else exchange
    ):
        trainer.train()
    check = next(check for check in trainer.checks if isinstance(check, PaceCheck))
    trainer.close()
    return check.monitor.warnings


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["late rank", "uneven experts"])
def test_a_planted_fault_is_named_in_the_run(fault: str, tmp_path: Path):
    """No rank fails of it."""
    make_corpus()
    said, *_ = run_ranks(_train_slowed, 4, RUN, tmp_path, fault, log_folder=tmp_path / "logs")
    named = "got 2.00 times the mean tokens in layer"
    named = f"rank {LATE_RANK} is late" if fault == "late rank" else named
    assert named in "\n".join(said)
