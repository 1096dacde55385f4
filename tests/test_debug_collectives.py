"""Ranks that leave the common order of collectives are found, and named, whatever ends them.

Each fault is planted in rank 1 of two gloo ranks, in the second step of a real training run. gloo
may abort the process, wait for its timeout, or (where the bytes happen to match) notice nothing.
"""

import dataclasses
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster import PATIENCE_S, RankError, run_ranks
from tests.planted import RUN, reads, train_and_count_reads, train_watched
from titan_ext.base.run_folder import LOSS, read_scalar
from titan_ext.base.stdlib_corpus import make_corpus
from titan_ext.debug import hang_report
from titan_ext.debug.hang_report import (
    PART_RECORDS,
    Comparison,
    RankInfo,
    Record,
    TraceReader,
    TraceWriter,
)


def _report_of(folder: Path, *wanted: str) -> str:
    """The observer's, which may be a moment behind the ranks."""
    deadline = time.monotonic() + PATIENCE_S
    text = ""
    while time.monotonic() < deadline:
        for report in folder.glob(f"collectives/*/{hang_report.REPORT}"):
            text = report.read_text()
        if text and all(piece in text for piece in wanted):
            return text
        time.sleep(0.1)
    raise AssertionError(f"no report with {wanted}:\n{text}")


@pytest.fixture
def fails(tmp_path: Path):
    """Trains with a fault in rank 1, which must end the run."""
    make_corpus()

    def train(fault: str, **changes: Any) -> None:
        run = dataclasses.replace(RUN, **changes)
        with pytest.raises(RankError) as caught:
            run_ranks(train_watched, 2, run, tmp_path, fault, log_folder=tmp_path / "logs")
        assert "did not end in time" not in str(caught.value), "ended by the test, not by itself"

    return train


def test_a_rank_with_other_units(fails, tmp_path: Path):
    fails("other units")
    report = _report_of(tmp_path, "rank 0: all_gather", "rank 1: all_gather")
    assert re.search(r"differ at collective \d+ of group .*:\n", report)
    assert "by layers.0.attention, layers.0.attention_norm, step 1" in report
    assert "by layers.0, step 1" in report


@pytest.mark.slow
def test_a_skipped_all_to_all(fails, tmp_path: Path):
    fails("skipped all-to-all")
    report = _report_of(tmp_path, "the ranks differ")
    unit = r"by layers\.1\.moe\.routed_experts in FunctionalAllToAllTokenDispatcher"
    assert re.search(rf"rank 0: all_to_all .* {unit}\._dispatch_token_exchange, step 2", report)
    assert re.search(r"rank 1: all_to_all .* in _CombineExchange\.start, step 2", report)


@pytest.mark.slow
def test_a_skipped_expert_backward(fails, tmp_path: Path):
    fails("skipped expert backward")
    report = _report_of(tmp_path, "the ranks differ")
    assert re.search(r"rank 0: all_to_all of .*, backward, step 2", report)
    assert re.search(r"rank 1: reduce_scatter of .* by layers\.1\..*moe, backward, step 2", report)


@pytest.mark.slow
def test_all_to_alls_whose_splits_do_not_fit(fails, tmp_path: Path):
    fails("wrong splits")
    report = _report_of(tmp_path, "the ranks differ")
    assert re.search(r"rank 0 sends \d+ rows to rank 1, which expects \d+: all_to_all", report)


def test_a_rank_that_stops(fails, tmp_path: Path):
    fails("stopped")
    report = _report_of(tmp_path, "stopped by a signal")
    assert re.search(r"rank 0 waits in collective \d+ of group .*: all_to_all .*_dispatch_", report)
    assert re.search(r"rank 1 has not issued it; the last that it issued is .*_token_count", report)


@pytest.mark.slow
def test_a_rank_that_dies(fails, tmp_path: Path):
    fails("killed")
    report = _report_of(tmp_path, "rank 1: died without an error")
    assert "rank 0 waits in collective" in report


def test_gradients_that_are_not_finite_name_their_rank(fails, tmp_path: Path):
    fails("nan")
    words = "rank 1 sent gradients that are not finite: all_to_all of bfloat16"
    report = _report_of(tmp_path, words)
    assert "backward, step 2, sends [" in report
    assert "rank 0 sent" not in report  # though it sends what rank 1's gradients made of its own


STOCK_READS = {
    "AllToAllTokenDispatcher._sync_token_count_exchange",  # how many tokens go where
    "Trainer.train_step",  # Titan's metrics
    "_dist_reduce",
    "_StatefulBaseDataLoaderIter.__init__",  # once
}


def test_a_step_never_waits_for_the_device(tmp_path: Path):
    """Units, float8 activations, dispatcher, recorder, checks: they read two values a step.

    Both just before the optimizer's step, for which Titan's own reads have waited already.
    """
    make_corpus()
    run = dataclasses.replace(RUN, ac="fp8")
    for found in run_ranks(train_and_count_reads, 2, run, tmp_path, log_folder=tmp_path / "logs"):
        assert {name: n for name, n in found.items() if name not in STOCK_READS} == {
            "CollectiveWatchdog.check_gradients": RUN.steps,
            "FiniteGradients.after_build.<locals>.check": RUN.steps,
        }
        assert found.keys() >= STOCK_READS, "Titan reads less than it did: shorten the list"


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.isfinite().all()),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x if x.isnan().any() else -x,
        lambda x: torch.equal(x, -x),
    ],
    ids=["item", "bool", "cpu", "tolist", "mask", "if", "equal"],
)
@pytest.mark.parametrize("backward", [False, True])
def test_a_read_is_counted(read: Any, backward: bool):
    found: Counter[str] = Counter()
    x = torch.randn(4, requires_grad=backward)
    with reads(found):
        if backward:
            x.register_hook(lambda gradient: (read(gradient), gradient)[1])
            x.sum().backward()
        else:
            read(x)
    assert found.total() == 1


def test_watching_changes_nothing(tmp_path: Path):
    """Compiled blocks, selective recompute, and the losses of a run that is not watched."""
    make_corpus()
    run = dataclasses.replace(RUN, ac="selective")
    for fault in ("none", "off"):
        folder = tmp_path / fault
        run_ranks(train_watched, 2, run, folder, fault, log_folder=folder / "logs")
    watched, plain = (read_scalar(tmp_path / name, LOSS) for name in ("none", "off"))
    assert watched == plain
    assert not list((tmp_path / "none").glob(f"collectives/*/{hang_report.REPORT}"))
    assert not (tmp_path / "off" / "collectives").exists()
    (records,) = (tmp_path / "none").glob("collectives/*")
    assert hang_report.report_once(records).splitlines() == ["rank 0: finished", "rank 1: finished"]
    units = {record.unit for record in TraceReader(records, 0)}
    assert "layers.1.ffn_norm, layers.1.moe" in units
    assert not any("_checkpoint_wrapped_module" in unit for unit in units)
    assert "_dist_reduce_tensor" in {record.site for record in TraceReader(records, 0)}


def test_nothing_of_it_is_imported_when_it_is_off(tmp_path: Path):
    """A rank's process begins with all that a trainer imports."""
    modules = "[name for name in __import__('sys').modules if name.startswith('titan_ext.')]"
    (imported,) = run_ranks(eval, 1, modules, log_folder=tmp_path)
    assert "titan_ext.run.trainer" in imported
    assert not [name for name in imported if name.startswith("titan_ext.debug")]


def _records(folder: Path, ranks: int = 2, **groups: list[int]) -> list[TraceWriter]:
    for rank in range(ranks):
        info = RankInfo(rank=rank, world_size=ranks, pid=os.getpid(), host="here", timeout_s=1)
        info.groups = groups or {"g": list(range(ranks))}
        info.write(folder)
    return [TraceWriter(folder, rank) for rank in range(ranks)]


def _record(index: int, op: str = "all_reduce", **values: Any) -> Record:
    values = {"group": "g", "position": index, "step": 1, "inputs": [[4]], "outputs": [], **values}
    return Record(index=index, op=op, **values)


def test_a_trace_keeps_the_newest_records(tmp_path: Path):
    (writer,) = _records(tmp_path, ranks=1)
    reader = TraceReader(tmp_path, 0)
    writer.write(_record(0))
    assert [record.index for record in reader] == [0]
    end = 3 * PART_RECORDS + 10
    for index in range(1, end):
        writer.write(_record(index))
    newest = list(range(2 * PART_RECORDS, end))
    assert [record.index for record in reader] == newest
    assert list(reader) == []
    assert [record.index for record in TraceReader(tmp_path, 0)] == newest
    assert sum(path.stat().st_size for path in tmp_path.glob("*.trace")) < 5 << 20


def test_a_record_that_was_cut_off_is_read_when_it_is_whole(tmp_path: Path):
    (writer,) = _records(tmp_path, ranks=1)
    reader = TraceReader(tmp_path, 0)
    writer.write(_record(0))
    (trace,) = tmp_path.glob("*.trace")
    whole = trace.read_bytes()
    trace.write_bytes(whole[:-5])
    assert list(reader) == []
    trace.write_bytes(whole)
    assert [record.index for record in reader] == [0]


def test_a_record_of_a_large_group_keeps_its_splits(tmp_path: Path):
    (writer,) = _records(tmp_path, ranks=1)
    writer.write(_record(0, "all_to_all", splits=([10000] * 2000, [10000] * 2000)))
    (record,) = TraceReader(tmp_path, 0)
    assert record.splits == [[10000] * 2000, [10000] * 2000]


@pytest.mark.parametrize(
    ("op", "theirs"),
    [
        ("all_reduce", {"inputs": [[5]]}),
        ("all_reduce", {"dtype": "float32"}),
        ("all_reduce", {"unit": "layers.1"}),
        ("all_reduce", {"backward": True}),
        ("broadcast", {"root": 1}),
        ("all_to_all", {"inputs": [[4, 2]]}),
    ],
)
def test_what_must_be_equal(op: str, theirs: dict, tmp_path: Path):
    ours, other = _records(tmp_path)
    ours.write(_record(0, op))
    other.write(_record(0, op, **theirs))
    comparison = Comparison(tmp_path)
    comparison.advance()
    assert comparison.difference.startswith("the ranks differ at collective 0 of group g:")


def test_what_may_differ(tmp_path: Path):
    """The order between groups, the rows of an all-to-all, the modules at a pipeline's ends."""
    ours, other = _records(tmp_path, a=[0, 1], b=[0, 1], p=[0, 1])
    first = _record(
        0, "all_to_all", group="a", inputs=[[3]], outputs=[[4]], splits=([1, 2], [1, 3])
    )
    second = _record(1, group="b", position=0)
    ours.write(first)
    ours.write(second)
    ours.write(_record(2, "send", group="p", position=0, unit="layers.1"))
    other.write(dataclasses.replace(second, index=0))
    theirs = dataclasses.replace(
        first, index=1, inputs=[[4]], outputs=[[3]], splits=([3, 1], [2, 1])
    )
    other.write(theirs)
    other.write(_record(2, "recv", group="p", position=0, inputs=[], outputs=[[4]]))
    comparison = Comparison(tmp_path)
    assert comparison.advance()
    assert comparison.difference == ""
    assert comparison.waiting() == ""
