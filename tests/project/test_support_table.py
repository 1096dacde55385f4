"""benchmarks/support.md says what the table of ``make matrix`` has, and each row of it is a job."""

from pathlib import Path

import pytest

from tests.matrix.exact import RUNS
from tests.matrix.rows import AXES, FEATURES, REFUSED, rows
from tests.matrix.table import DOCUMENT, document
from tests.verify.search import toml_of
from titan_ext.base import no_accelerator
from titan_ext.base.nodes import Nodes
from titan_ext.config_registry.resolve import resolve
from titan_ext.verify.small import decisions, differences, layout_of, make_small, why_not


def test_the_document_is_up_to_date():
    assert DOCUMENT.read_text() == document(), "run python -m tests.matrix.table"


_LATER = {"tied weights with PP"} | {
    f"{feature}, EP 2, TP 2, no sequence parallelism"
    for feature in ("float8 gathers", "everything sent")
}
"""Refused where the model is built."""


def test_each_row_is_a_job_of_its_own_or_is_refused(
    tmp_path: Path, accelerator: None, monkeypatch: pytest.MonkeyPatch
):
    assert len(set(RUNS)) == len(RUNS)
    texts = {toml_of(job) + job.get("routing", "") for job in rows().values()}
    assert len(texts) == len(rows())
    said = {}
    for name, job in rows().items():
        (file := tmp_path / "job.toml").write_text(toml_of(job))
        monkeypatch.setenv("WORLD_SIZE", job["ranks"])
        try:
            with no_accelerator.as_with_an_accelerator():
                resolve(str(file), ())
        except ValueError as error:
            said[name] = str(error)
    assert said.keys() == REFUSED.keys() - _LATER
    assert [name for name, message in said.items() if REFUSED[name] not in message] == []


def test_a_small_copy_decides_as_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of each feature one row; ``make matrix`` makes the copies of all."""
    for name, job in rows().items():
        of_an_axis = name in {f"{f}, {a}" for f in FEATURES for a in AXES}
        if name in REFUSED or (of_an_axis and not name.endswith("EP 2")):
            continue
        (file := tmp_path / "job.toml").write_text(toml_of(job))
        monkeypatch.setenv("WORLD_SIZE", job["ranks"])
        with no_accelerator.as_with_an_accelerator():
            config = resolve(str(file), ()).config
        small = make_small(config, layout_of(config, int(job["ranks"]), Nodes(8, 8)))
        assert differences(small.decisions, decisions(small.config, small.layout)) == [], name
        assert why_not(config) == "", name
