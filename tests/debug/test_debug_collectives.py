"""Ranks that leave the common order of collectives are found, and named, whatever ends them.

Each fault is planted in rank 1 of two gloo ranks, in the second step of a real training run. gloo
may abort the process, wait for its timeout, or (where the bytes happen to match) notice nothing.
"""

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.cluster import RankError, run_ranks
from tests.helpers.planted import RUN, reads, train_and_count_reads, train_watched
from titan_ext.base.run_folder import LOSS, read_scalar
from titan_ext.base.stdlib_corpus import make_corpus
from titan_ext.debug import hang_report
from titan_ext.debug.hang_report import (
    Comparison,
    RankInfo,
    Record,
    kind_of,
    newest_record,
    read_trace,
)
from titan_ext.debug.watchdog import PART_RECORDS, CollectiveWatchdog, TraceWriter


def _report_of(folder: Path, *wanted: str) -> str:
    """What a user reads when the run has died."""
    (records,) = folder.glob("collectives/*")
    text = "\n".join(Comparison(records).parts())
    assert all(piece in text for piece in wanted), text
    return text


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
    report = _report_of(tmp_path)
    assert re.search(r"rank 0 waits in collective \d+ of group .*: all_to_all .*_dispatch_", report)
    assert re.search(r"rank 1 has not issued it; the last that it issued is .*_token_count", report)


STOCK_READS = {
    "AllToAllTokenDispatcher._sync_token_count_exchange",  # how many tokens go where
    "Trainer.train_step",  # Titan's metrics
    "_dist_reduce",
    "_StatefulBaseDataLoaderIter.__init__",  # once
}


def test_a_step_never_waits_for_the_device(tmp_path: Path):
    """Units, float8 activations, dispatcher, recorder, checks: they read twice in a logged step.

    Just before the optimizer's step, for which Titan's own reads have waited already.
    """
    make_corpus()
    run = dataclasses.replace(RUN, ac="fp8")  # which logs every step
    for found in run_ranks(train_and_count_reads, 2, run, tmp_path, log_folder=tmp_path / "logs"):
        assert {name: n for name, n in found.items() if name not in STOCK_READS} == {
            "CollectiveWatchdog.compare": RUN.steps,
            "are_finite": RUN.steps,
        }
        assert found.keys() >= STOCK_READS, "Titan reads less than it did: shorten the list"


def test_a_read_is_counted():
    for backward in (False, True):
        for read in (
            lambda x: x.sum().item(),
            lambda x: x.cpu(),
            lambda x: x[x > 0],
            lambda x: x if x.isnan().any() else -x,
            lambda x: torch.equal(x, -x),
        ):
            found: Counter[str] = Counter()
            x = torch.randn(4, requires_grad=backward)
            with reads(found):
                if backward:
                    x.register_hook(lambda gradient, read=read: (read(gradient), gradient)[1])
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
    assert not (tmp_path / "off" / "collectives").exists()
    (records,) = (tmp_path / "none").glob("collectives/*")
    found = Comparison(records)
    assert found.parts() == ["", "", "ranks 0-1: finished"]
    trace = read_trace(found.infos[0].folder(records), 0)
    units = {record.unit for record in trace}
    assert "layers.1.ffn_norm, layers.1.moe" in units
    assert not any("_checkpoint_wrapped_module" in unit for unit in units)
    assert "_dist_reduce_tensor" in {record.site for record in trace}


def test_nothing_of_it_is_imported_when_it_is_off(tmp_path: Path):
    """A rank's process begins with all that a trainer imports."""
    modules = "[name for name in __import__('sys').modules if name.startswith('titan_ext.')]"
    (imported,) = run_ranks(eval, 1, modules, log_folder=tmp_path)
    assert "titan_ext.run.trainer" in imported
    assert not [name for name in imported if name.startswith("titan_ext.debug")]


def _members(group: str, ranks: int) -> list[int]:
    """All ranks; a pair's two; of "fsdp/3" the fourth 64, of "ep/3" the fourth 8."""
    if "->" in group:
        return [int(rank) for rank in group.split(" ")[1].split("->")]
    kind, _, index = group.partition("/")
    size = {"fsdp": 64, "ep": 8}.get(kind, ranks)
    return list(range(int(index or 0) * size, (int(index or 0) + 1) * size))


class _Rank(TraceWriter):
    """Writes the records of a rank, with the history that the recorder would add up."""

    def __init__(self, folder: Path, rank: int, groups: Sequence[str], ranks: int, host: str):
        info = RankInfo(rank=rank, host=host)
        info.groups = {group: _members(group, ranks) for group in groups}
        info.write(folder)
        self._history = 0
        super().__init__(info.folder(folder), rank)

    def write(self, record: Record) -> None:
        self._history += hash((kind_of(record.group), record.signature()))
        record.history = self._history
        super().write(record)


def _ranks(folder: Path, ranks: int = 2, groups: Sequence[str] = ("g",)) -> list[_Rank]:
    return [_Rank(folder, rank, groups, ranks, "here") for rank in range(ranks)]


def _record(index: int, op: str = "all_reduce", **values: Any) -> Record:
    values = {"group": "g", "position": index, "step": 1, "inputs": [[4]], "outputs": [], **values}
    return Record(index=index, op=op, **values)


def test_a_trace_keeps_the_newest_records(tmp_path: Path):
    (writer,) = _ranks(tmp_path, 1)
    end = 3 * PART_RECORDS + 10
    for index in range(end):
        writer.write(_record(index))
    folder = tmp_path / "here"
    newest = list(range(2 * PART_RECORDS, end))
    assert [record.index for record in read_trace(folder, 0)] == newest
    assert newest_record(folder, 0) == read_trace(folder, 0)[-1]
    assert sum(path.stat().st_size for path in folder.glob("*.trace")) < 5 << 20


def test_a_record_that_was_cut_off_is_not_read(tmp_path: Path):
    (writer,) = _ranks(tmp_path, 1)
    folder = tmp_path / "here"
    assert newest_record(folder, 0) is None
    writer.write(_record(0))
    writer.write(_record(1))
    (trace,) = folder.glob("*.trace")
    trace.write_bytes(trace.read_bytes()[:-5])
    (whole,) = read_trace(folder, 0)
    assert newest_record(folder, 0) == whole
    assert whole.index == 0


def test_a_record_of_a_large_group_keeps_its_splits(tmp_path: Path):
    (writer,) = _ranks(tmp_path, 1)
    for index in range(2):
        writer.write(_record(index, "all_to_all", splits=([10000] * 2000, [10000] * 2000)))
    found = newest_record(tmp_path / "here", 0)
    assert found is not None
    assert found.splits == [[10000] * 2000, [10000] * 2000]


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
    ours, other = _ranks(tmp_path)
    ours.write(_record(0, op))
    other.write(_record(0, op, **theirs))
    for rank in (ours, other):
        rank.write(_record(1))
    found = Comparison(tmp_path).difference
    assert found.startswith("the ranks differ at collective 0 of group g:\n  rank 0: ")


def test_rows_that_do_not_fit_are_found_among_ranks_of_one_history(tmp_path: Path):
    splits = ([1, 2], [1, 3]), ([4, 1], [2, 1])
    for rank, mine in zip(_ranks(tmp_path), splits, strict=True):
        rank.write(_record(0, "all_to_all", splits=mine))
        rank.write(_record(1))
    found = Comparison(tmp_path).difference
    assert "rank 1 sends 4 rows to rank 0, which expects 3: all_to_all" in found


def test_what_may_differ(tmp_path: Path):
    """The order between groups, the rows of an all-to-all, the modules at a pipeline's ends."""
    ours, other = _ranks(tmp_path, groups=("a", "b", "p 0->1"))
    first = _record(
        0, "all_to_all", group="a", inputs=[[3]], outputs=[[4]], splits=([1, 2], [1, 3])
    )
    second = _record(1, group="b", position=0)
    ours.write(first)
    ours.write(second)
    ours.write(_record(2, "send", group="p 0->1", position=0, unit="layers.1"))
    other.write(dataclasses.replace(second, index=0))
    theirs = dataclasses.replace(
        first, index=1, inputs=[[4]], outputs=[[3]], splits=([3, 1], [2, 1])
    )
    other.write(theirs)
    other.write(_record(2, "recv", group="p 0->1", position=0, inputs=[], outputs=[[4]]))
    assert Comparison(tmp_path).parts()[:2] == ["", ""]


def _job(folder: Path, ranks: int, *, behind: Sequence[int], records: int = 50) -> None:
    """Nodes of 8; a world, pairs of FSDP and groups of EP; ``behind`` stop one collective early."""
    for rank in range(ranks):
        groups = ("world/0", f"fsdp/{rank // 64}", f"ep/{rank // 8}")
        writer = _Rank(folder, rank, groups, ranks, f"node{rank // 8}")
        for index in range(records - (rank in behind)):
            group, op = groups[index % 3], ("all_reduce", "all_gather", "all_to_all")[index % 3]
            writer.write(_record(index, op, group=group, position=index // 3, unit="layers.1"))


def test_a_report_does_not_grow_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of 128 and of 512 ranks, as many traces are read and as many lines written."""
    read: Counter[int] = Counter()

    def counted(folder: Path, rank: int) -> list[Record]:
        read[rank] += 1
        return read_trace(folder, rank)

    monkeypatch.setattr(hang_report, "read_trace", counted)
    found = []
    for ranks in (128, 512):
        _job(tmp_path / str(ranks), ranks, behind=range(5, ranks, 64))  # one in each group of FSDP
        read.clear()
        parts = Comparison(tmp_path / str(ranks)).parts()
        found.append((read.total(), len("\n".join(parts).splitlines())))
        assert parts[0] == ""
        assert "ranks 0-4, 6-63 wait in collective 16 of group fsdp/0: all_gather" in parts[1]
        assert "rank 5 has not issued it; the last that it issued is" in parts[1]
        assert parts[2] == f"ranks 0-{ranks - 1}: no end recorded: running, or killed"
    assert found[0] == found[1]


def _sent(world: int, folder: Path) -> list[tuple[str, int]]:
    """What the recorder itself issues on one of ``world`` ranks, from its start, in three steps."""
    dist.init_process_group("fake", rank=0, world_size=world)
    config: Any = SimpleNamespace(
        dump_folder=str(folder),
    )
    trainer: Any = SimpleNamespace(
        step=1,
        device=torch.device("cpu"),
        metrics_processor=SimpleNamespace(should_log=lambda step: True),
    )
    found: list[tuple[str, int]] = []
    assert dist.group.WORLD is not None
    dist.group.WORLD.register_pre_hook(
        1,
        lambda args: found.append(
            (args.name.name, sum(t.nbytes for t in [*args.input_tensors, *args.output_tensors]))
        ),
    )
    recorder = CollectiveWatchdog(config)
    for compares in (True, False, True):
        recorder._orders.clear()  # fake ranks add nothing
        with recorder.around_step(trainer):
            if compares:
                recorder.compare(trainer.device)
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [*found, ("files", len(files))]


def test_what_the_recorder_sends_and_writes_does_not_grow_with_the_job(tmp_path: Path):
    """A gather from all ranks would be 512 times as large."""
    few, many = (
        run_ranks(_sent, 1, world, tmp_path / str(world), log_folder=tmp_path / f"{world}.logs")[0]
        for world in (8, 4096)
    )
    assert few == many
    assert [nbytes for name, nbytes in many if "REDUCE" in name.upper()] == 2 * [8]


def _orders(folder: Path) -> list[str]:
    """What a rank of two stages is told: where all keep one order, and where rank 3 does not."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    stages: Any = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    trainer: Any = SimpleNamespace(dump_folder=str(folder))
    recorder = CollectiveWatchdog(trainer)
    x, y = torch.ones(4), torch.ones(2, 2)  # of equal bytes
    told = []
    for odd in (-1, 3):
        for _ in range(1 + rank // 2):  # the second stage issues more
            for tensor in (y, x) if rank == odd else (x, y):
                dist.all_reduce(tensor, group=stages[rank // 2])
        if rank in (1, 2):  # its ends are of two stages
            (dist.send if rank == 1 else dist.recv)(x, 3 - rank)
        try:
            recorder.compare(torch.device("cpu"))
            told.append("")
        except RuntimeError as error:
            told.append(str(error))
    dist.destroy_process_group()
    return told


def test_equal_sizes_in_another_order_are_found_while_all_live(tmp_path: Path):
    """On every group for itself, as in a pipeline, where stages differ."""
    for before, after in run_ranks(_orders, 4, tmp_path, log_folder=tmp_path / "logs"):
        assert before == ""
        assert "the ranks differ" in after
    (records,) = tmp_path.glob("collectives/*")
    assert "the ranks differ at collective 4 of group" in Comparison(records).difference


def test_a_difference_that_the_backend_accepts_ends_the_run(fails, tmp_path: Path):
    """At the next logged one; the words are in the report."""
    fails("other site")
    report = _report_of(tmp_path, "the ranks differ at", "failed: RuntimeError: the ranks differ")
    assert re.search(r"rank 1: all_reduce .* in _all_reduce_elsewhere, step 2", report)
