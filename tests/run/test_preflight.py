"""`titan_ext check`: links between ranks, versions and the layout."""

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torchtitan.config import ParallelismConfig

from tests.helpers.cluster import RankError, run_ranks
from titan_ext.base.nodes import NVLINK_DOMAIN
from titan_ext.run import preflight
from titan_ext.run.preflight import Link, check, judge_links, layout_warnings, pairs


def _layout(**degrees: Any) -> Any:
    return SimpleNamespace(parallelism=ParallelismConfig(**degrees))


def _check(differ: bool) -> list[str]:
    if differ:
        found = preflight.versions
        rank = preflight.os.environ["RANK"]
        preflight.versions = lambda: found() | ({"torch": "1.0"} if rank == "1" else {})
    return check(_layout(expert_parallel_degree=2), mib=1)


def test_four_ranks_on_gloo_are_measured(tmp_path: Path):
    first, *others = run_ranks(_check, 4, False, log_folder=tmp_path)
    assert others == [[], [], []]
    assert first[0].startswith("4 ranks alike: titan_ext ")
    assert first[0].endswith(", backend gloo")
    # run_ranks says nothing of nodes: all are on one. 0-1, 2-3, 0-2, 1-3.
    assert first[1].startswith("links in a node: 4, ")
    assert first[-1].startswith("layout: stays in NVLink domains of")


def test_ranks_with_other_versions_are_named(tmp_path: Path):
    with pytest.raises(RankError, match=r"disagree.*\n  torch: .* on rank 0; 1\.0 on rank 1"):
        run_ranks(_check, 2, True, log_folder=tmp_path)


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 1), (12, 4), (6, 6)])
def test_every_rank_has_one_partner_in_a_round(ranks: int, per_node: int):
    rounds = pairs(ranks)
    for at_once in rounds:
        used = list(chain(*at_once))
        assert len(used) == len(set(used))
        assert all(0 <= rank < ranks for rank in used)
    every = list(chain(*rounds))
    assert len(every) == len(set(every))
    assert {rank for pair in every for rank in pair} == set(range(ranks))
    across = [(a, b) for a, b in every if a // per_node != b // per_node]
    assert bool(across) == (ranks > per_node)
    assert all(a % per_node == b % per_node for a, b in across)


def test_a_slow_link_and_a_slow_machine_are_named():
    links = [Link(0, 1, 300e9, True), Link(2, 3, 310e9, True), Link(1, 3, 100e9, True)]
    links += [Link(0, 8, 3e9, False)]
    assert judge_links(links, "h100") == [
        "links in a node: 3, 300.00 GB/s each way (median), 360.00 GB/s in the plan for h100",
        "warning: ranks 1, 3 have 100.00 GB/s: less than half",
        "links across nodes: 1, 3.00 GB/s each way (median), 45.00 GB/s in the plan for h100",
        "warning: links across nodes have 7% of that",
    ]
    assert judge_links(links[:2]) == ["links in a node: 2, 305.00 GB/s each way (median)"]


def test_layouts_that_leave_the_nvlink_domain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv(NVLINK_DOMAIN, "0")
    assert layout_warnings(_layout(expert_parallel_degree=4), 64) == [
        "layout: stays in NVLink domains of 4"
    ]
    assert layout_warnings(_layout(expert_parallel_degree=8), 64) == [
        "warning: parallelism.expert_parallel_degree: its 8 ranks leave an NVLink domain of 4"
    ]
    hsdp = _layout(data_parallel_replicate_degree=2, data_parallel_shard_degree=32)
    (line,) = layout_warnings(hsdp, 64)
    assert "data_parallel_shard_degree: its 32 ranks leave" in line
    assert layout_warnings(_layout(), 64) == ["layout: stays in NVLink domains of 4"]
    monkeypatch.setenv(NVLINK_DOMAIN, "72")  # GB200: a rack
    assert layout_warnings(_layout(expert_parallel_degree=8), 144) == [
        "layout: stays in NVLink domains of 72"
    ]
    (line,) = layout_warnings(_layout(expert_parallel_degree=16), 144)
    assert line.endswith(
        "groups of 16 do not fill an NVLink domain of 72, so that some lie across two"
    )
