"""What a plan suggests; test_dry_run.py has one suggestion from end to end."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.toml_files import DEBUG, Loader
from titan_ext import plan_search
from titan_ext.plan_report import file_name
from titan_ext.plan_search import CHANGES, suggest
from titan_ext.toml_config import resolve
from titan_ext.toml_config.dump import dump, identity

GIB = 2**30


def _now(config: Any, ranks: int = 8) -> dict[str, Any]:
    return {**identity(config), "ranks": ranks}


def test_every_change_is_a_file_that_loads(config: Loader, folder: Path):
    """Beside the whole config, whose own values of a section that changes are no mistake."""
    now = config(DEBUG + "[activation_checkpoint]\npolicy = 'full'\n")
    (folder / "config.toml").write_text(dump(now))
    for change, _ in plan_search._changes(_now(now), len(CHANGES)):
        lines = [f"{key} = {plan_search.to_toml(value)}" for key, value in change.items()]
        (folder / "changed.toml").write_text("\n".join(['extends = "config.toml"', *lines]))
        values = resolve("changed.toml").values
        assert {key: values[key] for key in change} == change


def test_half_the_batch_keeps_the_global_one(config: Loader):
    text = DEBUG + "[parallelism]\ntensor_parallel_degree = 2\n[training]\nlocal_batch_size = 6\n"
    half = plan_search._half_the_batch
    expected = {"training.local_batch_size": 3, "training.global_batch_size": 6 * 8 // 2}
    assert half(_now(config(text))) == expected
    expected["training.global_batch_size"] = 48
    assert half(_now(config(text + "global_batch_size = 48\n"))) == expected
    assert half(_now(config(text.replace("6", "5")))) == {}


def test_what_is_so_already_is_not_tried(config: Loader):
    now = _now(config(DEBUG + "[activation_checkpoint]\npolicy = 'full'\n"))
    changes = [change for change, _ in plan_search._changes(now, 3)]
    assert len(changes) == 3
    assert {"activation_checkpoint.policy": "full"} not in changes
    assert changes[0] == plan_search._float8("balanced")


def test_the_best_comes_first_and_a_failure_says_why(
    config: Loader, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    now = config(DEBUG + "[training]\nlocal_batch_size = 8\n")
    plan = {"config": identity(now), "ranks": 8, "rank": 4, "spare": -2 * GIB}
    spares = iter([-1 * GIB, 3 * GIB, -3 * GIB, None])
    commands = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        if (spare := next(spares)) is not None:
            (folder / file_name(4)).write_text(json.dumps({"spare": spare}))
            return SimpleNamespace(returncode=3, stderr="")
        return SimpleNamespace(returncode=1, stderr=f"{folder / 'changed.toml'}: no\nmore\n")

    monkeypatch.setattr(subprocess, "run", run)
    lines = list(suggest(folder / "config.toml", plan, ["--memory", "8GiB"], 4))
    assert [line.split()[0] for line in lines[1:5]] == ["trying"] * 4
    best, second, third, failed, last = lines[5:]
    batch = "training.local_batch_size = 4, training.global_batch_size = 64"
    assert best == f"fits, saves 5.0 GiB: {batch} (the same global batch in twice the passes)"
    assert second.startswith('does not fit, saves 1.0 GiB: activation_checkpoint.policy = "fp8"')
    assert third.startswith('does not fit, needs 1.0 GiB: activation_checkpoint.policy = "full"')
    assert failed.startswith("does not start: parallelism.expert_parallel_degree = 2 (")
    assert failed.endswith("ranks): no")
    assert last.startswith("4 tried, ")
    words = ["--memory", "8GiB", "--rank", "4", "--out", str(folder)]
    assert all(command[-len(words) :] == words for command in commands)
