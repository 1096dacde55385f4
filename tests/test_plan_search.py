"""What a plan suggests; test_dry_run.py has one suggestion from end to end."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.toml_files import DEBUG, Loader
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.config_registry.resolve import resolve
from titan_ext.plan import search as plan_search
from titan_ext.plan.report import file_name
from titan_ext.plan.search import CHANGES, suggest
from titan_ext.toml.values import dump, identity

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
    budget = {"activation_checkpoint.policy": "fp8", "activation_checkpoint.budget": "fit"}
    assert changes[:2] == [plan_search._float8("balanced"), budget]
    table = _now(config(DEBUG + _TABLE))
    assert plan_search._best_that_fits(table) == {}


def test_scores_first_is_tried_with_expert_parallelism(config: Loader):
    section = "[parallelism]\nexpert_parallel_degree = "
    changes = plan_search._changes(_now(config(DEBUG + section + "2\n")), 3)
    *_, fit, early = [change for change, _ in changes]
    assert early == fit | {"activation_checkpoint.score_before_last_gemm": True}
    assert plan_search._scores_first(_now(config(DEBUG + section + "1\n"))) == {}


_TABLE = "[activation_checkpoint]\npolicy = 'fp8'\nop_policies = {'*' = 'recompute'}\n"


def test_the_change_to_a_budget_is_a_file_that_loads_over_any_policy(config: Loader, folder: Path):
    for keys in ("mode = 'full'", "preset = 'speed'", "budget = '1GiB'"):
        now = config(DEBUG + f"[activation_checkpoint]\npolicy = 'fp8'\n{keys}\n")
        (folder / "config.toml").write_text(dump(now))
        change = plan_search._best_that_fits(_now(now))
        lines = [f"{key} = {plan_search.to_toml(value)}" for key, value in change.items()]
        (folder / "changed.toml").write_text("\n".join(['extends = "config.toml"', *lines]))
        policy: Any = resolve("changed.toml").config.activation_checkpoint
        assert policy == FP8AC.Config(budget="fit")


@pytest.mark.parametrize("timed", [False, True])
def test_the_best_comes_first_and_a_failure_says_why(
    timed: bool, config: Loader, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """By bytes, or by milliseconds among those that fit."""
    now = config(DEBUG + "[training]\nlocal_batch_size = 8\n")
    plan = {"config": identity(now), "ranks": 8, "rank": 4, "spare": -2 * GIB}
    found = iter([(-1, 500.0), (1, 900.0), (3, 1200.4), (-3, 400.0), None])
    commands = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        if (result := next(found)) is not None:
            spare, ms = result
            time = {"step_ms": ms} if timed else None
            planned = {"spare": spare * GIB, "time": time}
            (folder / file_name(4)).write_text(json.dumps(planned))
            return SimpleNamespace(returncode=3, stderr="")
        return SimpleNamespace(returncode=1, stderr=f"{folder / 'changed.toml'}: no\nmore\n")

    monkeypatch.setattr(subprocess, "run", run)
    lines = list(suggest(folder / "config.toml", plan, ["--memory", "8GiB"], 5, {}))
    assert [line.split()[0] for line in lines[1:6]] == ["trying"] * 5
    *planned, failed, last = lines[6:]
    ms = ", {} ms a step" if timed else ""
    batch = f"fits, saves 5.0 GiB{ms.format(1200)}: training.local_batch_size = 4, "
    batch += "training.global_batch_size = 64 (the same global batch in twice the passes)"
    fit = f'fits, saves 3.0 GiB{ms.format(900)}: activation_checkpoint.policy = "fp8", '
    fit += 'activation_checkpoint.budget = "fit" (the fastest checkpointing for what is left)'
    assert planned[:2] == ([fit, batch] if timed else [batch, fit])
    policy = "activation_checkpoint.policy"
    assert planned[2].startswith(f'does not fit, saves 1.0 GiB{ms.format(500)}: {policy} = "fp8"')
    assert planned[3].startswith(f'does not fit, needs 1.0 GiB{ms.format(400)}: {policy} = "full"')
    assert failed.startswith("does not start: parallelism.expert_parallel_degree = 2 (")
    assert failed.endswith("ranks): no")
    assert last.startswith("5 tried, ")
    words = ["--memory", "8GiB", "--rank", "4", "--out", str(folder)]
    assert all(command[-len(words) :] == words for command in commands)
