"""The search that ``make search`` runs: what it draws, and how it makes a failure small."""

import random
import re

import tomli

from tests.verify.search import VALUES, Job, draw, shrink, toml_of


def test_jobs_fit_their_ranks_and_cover_all_values():
    generator, covered = random.Random(0), set()
    for _ in range(120):
        job = draw(generator, covered)
        table = tomli.loads(toml_of(job))
        degrees = {k: v for k, v in table["parallelism"].items() if k.endswith("_degree")}
        expert = degrees.pop("expert_parallel_degree")
        product = 1
        for degree in degrees.values():
            product *= degree
        assert int(job["ranks"]) % product == 0
        shards = int(job["ranks"]) // degrees["data_parallel_replicate_degree"]
        assert shards // degrees["pipeline_parallel_degree"] % expert == 0
        assert re.search(r"^# world size: \d$", toml_of(job), re.M)
    drawn = {item for pair in covered for item in pair}
    assert {(key, value) for key, values in VALUES.items() for value in values} == drawn


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
