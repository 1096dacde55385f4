"""docs/support.md: it says what the matrix checks, and what it says is refused is refused."""

import dataclasses
import re
from pathlib import Path

import pytest

from tests.helpers.training import Run
from tests.matrix.check import config_error, wrong_refusals
from tests.matrix.dry import compare, dry_differences, shards
from tests.matrix.features import describe
from tests.matrix.refused import REFUSALS, Refusal
from tests.matrix.rows import DRY, ROWS, reference_of
from tests.matrix.table import DOCUMENT, counts, document, share_that_fails

_BOUNDS_AND_OBSERVERS = ("steps", "seq_len", "global_batch", "layers", "narrow", "exact_sums")


def test_the_document_is_up_to_date():
    assert DOCUMENT.read_text() == document(), "run python -m tests.matrix.table"


def test_at_most_15_percent_do_not_run():
    assert sum(counts().values()) == len(ROWS) + len(DRY) + len(REFUSALS)
    assert share_that_fails() <= 0.15


def test_every_layout_is_in_the_table_once():
    names = [str(each) for each in [*ROWS, *DRY, *REFUSALS]]
    assert sorted(names) == sorted(set(names))


def test_runs_of_one_line_differ_in_nothing_else():
    """Or a line of the table would say less than the runs were told to do."""
    lines: dict[object, set[Run]] = {}
    for run in [*ROWS, *DRY, *(refusal.run for refusal in REFUSALS)]:
        columns = (run.model, run.world, run.backend, run.parallelize)
        same = {name: getattr(Run(), name) for name in _BOUNDS_AND_OBSERVERS}
        line = lines.setdefault((describe(run), columns), set())
        line.add(dataclasses.replace(run, **same))
    assert [runs for runs in lines.values() if len(runs) > 1] == []


def test_refused_configs_are_refused_in_those_words(tmp_path: Path):
    """Those that no process group is started for; the others are in ``make matrix``."""
    checked = 0
    for refusal in REFUSALS:
        runs = {refusal.run: refusal.message}
        if refusal.stock_message is not None:
            runs[reference_of(refusal.run)] = refusal.stock_message
        for run, message in runs.items():
            if error := config_error(run, tmp_path):
                assert re.search(message, error), run
                checked += 1
    assert checked >= 20


def test_a_refusal_that_no_longer_holds_is_reported(tmp_path: Path):
    refusal = next(each for each in REFUSALS if each.run.converters == ("mxfp8_linear",))
    assert wrong_refusals(refusal, tmp_path) == []
    other = dataclasses.replace(refusal, message="other words", stock_message="others again")
    assert len(wrong_refusals(other, tmp_path)) == 2
    assert len(wrong_refusals(dataclasses.replace(refusal, stock_message=None), tmp_path)) == 1


_BY_TORCH = [each for each in REFUSALS if each.by == "torch" and each.stock_message]


@pytest.mark.slow
@pytest.mark.parametrize("refusal", _BY_TORCH[:2], ids=str)
def test_a_refusal_by_ranks(refusal: Refusal, tmp_path: Path):
    assert wrong_refusals(refusal, tmp_path) == []


@pytest.mark.parametrize(
    "run", [run for run in DRY if run.parallelize == "submodule"][::4], ids=str
)
def test_dry_runs_are_sharded_as_under_stock(run: Run, tmp_path: Path):
    assert dry_differences(run, tmp_path) == []


@pytest.mark.slow
def test_a_dry_run_sees_another_layout(tmp_path: Path):
    """The comparison above can fail."""
    layout = Run(world=8, ep=4, cp=2, attention="flex", parallelize="submodule")
    other = dataclasses.replace(layout, ep=2)
    found = compare(shards(layout, tmp_path / "layout"), shards(other, tmp_path / "other"))
    assert found
    assert all("inner_experts" in words for words in found)
