"""docs/support.md says what the table of ``make matrix`` has, and each row of it is a job."""

from pathlib import Path

import pytest

from tests.matrix.exact import RUNS
from tests.matrix.rows import REFUSED, rows
from tests.matrix.table import DOCUMENT, document
from tests.verify.search import toml_of
from titan_ext.config_registry.resolve import resolve


def test_the_document_is_up_to_date():
    assert DOCUMENT.read_text() == document(), "run python -m tests.matrix.table"


_LATER = ("tied weights with PP", "gpt_oss with TP and no EP")
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
            resolve(str(file), ())
        except ValueError as error:
            said[name] = str(error)
    assert said.keys() == REFUSED.keys() - set(_LATER)
    assert [name for name, message in said.items() if REFUSED[name] not in message] == []
