"""The search that ``make search`` runs: what it draws, and how it makes a failure small."""

import math
import random
import tomllib
from pathlib import Path

import pytest

from tests.verify import search
from tests.verify.search import VALUES, Job, Verified, draw, shrink, toml_of


def test_jobs_fit_their_ranks_and_cover_all_values():
    generator, covered = random.Random(0), set()
    for _ in range(120):
        job = draw(generator, covered)
        table = tomllib.loads(toml_of(job))
        degrees = {k: v for k, v in table["parallelism"].items() if k.endswith("_degree")}
        expert = degrees.pop("expert_parallel_degree")
        assert int(job["ranks"]) % math.prod(degrees.values()) == 0
        shards = int(job["ranks"]) // degrees["data_parallel_replicate_degree"]
        assert shards // degrees["pipeline_parallel_degree"] % expert == 0
        assert table["world_size"] == int(job["ranks"])
        if job["accumulated"] == "2":
            names = (
                "tensor_parallel_degree",
                "context_parallel_degree",
                "pipeline_parallel_degree",
            )
            data_ranks = int(job["ranks"]) // math.prod(degrees[name] for name in names)
            batches = table["training"]["local_batch_size"] * data_ranks
            assert table["training"]["global_batch_size"] == 2 * batches
    drawn = {item for pair in covered for item in pair}
    assert {(key, value) for key, values in VALUES.items() for value in values} == drawn


def test_a_folder_is_made_where_jobs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def verify(job: Job, folder: Path) -> Verified:
        monkeypatch.chdir(folder)
        (folder / "job.toml").write_text(toml_of(job))
        return Verified(0, "RIGHT\n")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search, "verify", verify)
    first, *_, last = search.search(0.5, 7, Path("outputs/search"))
    assert first.startswith("   1  ")
    assert first.endswith(": RIGHT")
    assert last.endswith("0 WRONG, 0 refused or not verified (seed 7)")
    assert (tmp_path / "outputs/search/job.toml").exists()


def test_a_failure_is_made_small():
    job = draw(random.Random(1), set())
    job |= {"parallelism.fsdp_wrap": '"block"', "parallelism.exchange_rows": '"rank"'}
    job |= {"ranks": "8"}

    def is_wrong(job: Job) -> bool:
        rows, wrap = (job.get(f"parallelism.{key}") for key in ("exchange_rows", "fsdp_wrap"))
        return rows == '"rank"' and wrap == '"block"' and int(job["ranks"]) >= 4

    assert shrink(job, is_wrong) == {
        "extends": job["extends"],
        "ranks": "4",
        "parallelism.fsdp_wrap": '"block"',
        "parallelism.exchange_rows": '"rank"',
    }
