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
from tests.helpers.planted import RUN, reads, train_watched
from titan_ext.base.run_folder import LOSS, read_scalar
from titan_ext.base.stdlib_corpus import make_corpus
from titan_ext.debug.hang_report import KEPT, Note, report
from titan_ext.debug.watchdog import CollectiveWatchdog


def _report_of(folder: Path, *wanted: str) -> str:
    """What a user reads when the run has died."""
    (records,) = folder.glob("collectives/*")
    text = report(records)
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
    said = _report_of(tmp_path, "rank 0: all_gather", "rank 1: all_gather")
    assert re.search(r"differ at or before collective \d+ of group .*:\n", said)
    assert "by layers.0.attention, layers.0.attention_norm, step 1" in said
    assert "by layers.0, step 1" in said


def test_a_rank_that_stops(fails, tmp_path: Path):
    fails("stopped")
    said = _report_of(tmp_path)
    assert re.search(r"rank 0 waits in collective \d+ of group .*: all_to_all .*_dispatch_", said)
    assert re.search(r"rank 1 has not issued it; the last that it issued is .*_token_count", said)


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
    assert report(records) == ""
    words = (records / "rank_0.notes").read_text()
    assert " of int64[] in _dist_reduce_tensor, step 3 " in words


def test_nothing_of_it_is_imported_when_it_is_off(tmp_path: Path):
    """A rank's process begins with all that a trainer imports."""
    modules = "[name for name in __import__('sys').modules if name.startswith('titan_ext.')]"
    (imported,) = run_ranks(eval, 1, modules, log_folder=tmp_path)
    assert "titan_ext.run.trainer" in imported
    assert not [name for name in imported if name.startswith("titan_ext.debug")]


def _issue(folder: Path, rank: int, *issued: tuple[str, str], groups: Sequence[str] = ("g",)):
    """Writes the notes of a rank that has issued what follows: groups, and what on each."""
    file = os.open(folder / f"rank_{rank}.notes", os.O_WRONLY | os.O_CREAT)
    position, order = Counter[str](), Counter[str]()
    for slot, group in enumerate(groups):
        Note(group, -1).write(file, slot)
    for index, (group, words) in enumerate(issued):
        order[group] = hash((order[group], words))
        note = Note(group, position[group], order[group], index, words)
        note.write(file, groups.index(group))
        position[group] += 1
    os.close(file)


def test_a_note_is_of_one_size(tmp_path: Path):
    _issue(tmp_path, 0, ("g", "x" * 1000), ("h", "short"), groups=("g", "h"))
    path = tmp_path / "rank_0.notes"
    assert path.stat().st_size == 2 * KEPT * 256
    assert [note.words[:5] for note in Note.read_all(path)] == ["xxxxx", "", "short", ""]


@pytest.mark.parametrize("position", [0, 5, 300])
def test_a_difference_is_found_later(position: int, tmp_path: Path):
    """Of four ranks on two groups, whose orders between groups differ and may."""
    for rank in range(4):
        issued = [("g", f"op {i}") for i in range(301)]
        if rank == 2:
            issued[position] = ("g", "another")
        other = [("h", "side")]
        _issue(tmp_path, rank, *(issued + other if rank else other + issued), groups=("g", "h"))
    theirs = "another" if position == 300 else "op 300"
    assert report(tmp_path) == (
        "the ranks differ at or before collective 300 of group g:\n"
        f"  ranks 0-1, 3: op 300\n  rank 2: {theirs}"
    )


def test_a_report_does_not_grow_with_the_job(tmp_path: Path):
    """Of 128 and of 512 ranks, as many lines are written; rank 5 of each 64 is late."""
    for ranks in (128, 512):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        for rank in range(ranks):
            groups = ("world/0", f"fsdp/{rank // 64}", f"ep/{rank // 8}")
            issued = [(groups[i % 3], f"op by layers.{i}") for i in range(50 - (rank % 64 == 5))]
            _issue(folder, rank, *issued, groups=groups)
        said = report(folder)
        assert said.startswith(
            "ranks 0-4, 6-63 wait in collective 16 of group fsdp/0: op by layers.49\n"
            "  rank 5 has not issued it; the last that it issued is collective 16 of group "
            "world/0: op by layers.48"
        )
        assert len(said.splitlines()) == min(2 * ranks // 64, 10)


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
        if compares:
            recorder.compare(trainer.device)
    return [*found, *((path.name, path.stat().st_size) for path in folder.rglob("*.notes"))]


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
    return told


def test_equal_sizes_in_another_order_are_found_while_all_live(tmp_path: Path):
    """On every group for itself, as in a pipeline, where stages differ."""
    for before, after in run_ranks(_orders, 4, tmp_path, log_folder=tmp_path / "logs"):
        assert before == ""
        assert "the ranks differ" in after
    (records,) = tmp_path.glob("collectives/*")
    assert "the ranks differ at or before collective " in report(records)


def test_a_difference_that_the_backend_accepts_ends_the_run(fails, tmp_path: Path):
    """At the next logged one."""
    fails("other site")
    _report_of(tmp_path, "the ranks differ at or before", "step 2")
