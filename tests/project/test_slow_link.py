"""What benchmarks/slow_link.py does without a network: it refuses, cleans up, and adds up."""

import subprocess

import pytest

from benchmarks import slow_link
from benchmarks.slow_link import OURS, STOCK, Plan, Step


def test_namespaces_go_when_making_them_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []

    def run(words: tuple[str, ...], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(tuple(words))
        failed = "addr" in words
        return subprocess.CompletedProcess(words, int(failed), stderr="no such device")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match=r"addr add .*: no such device"):
        slow_link.linked_namespaces().__enter__()
    made, gone = ({w[3] for w in ran if w[:3] == ("ip", "netns", x)} for x in ("add", "del"))
    assert len(made) == 2
    assert made == gone


def test_ratios_are_of_one_round_and_bytes_of_the_link() -> None:
    steps = {
        STOCK: [Step(9.0, 1.0, 6e6, 8.0), Step(2.0, 1.0, 6e6, 7.0), Step(4.0, 1.0, 6e6, 6.0)],
        OURS: [Step(9.0, 1.0, 4e6, 8.0), Step(1.0, 1.0, 4e6, 7.0), Step(1.0, 1.0, 4e6, 6.0)],
        "float8": [Step(3.0, 3.0, 3e6, 8.0), Step(1.0, 3.0, 3e6, 6.5), Step(2.0, 3.0, 3e6, 6.1)],
    }
    plans = {STOCK: Plan(4.0, 6e6), OURS: Plan(2.0, 4e6), "float8": Plan(1.0, 3e6)}
    rows = slow_link.summary(steps, plans)
    assert list(slow_link.table(rows))[-1] == (
        "| float8 | 2.00 (1.00 to 3.00) | 1.000 (0.333 to 2.000) | 0.500 | 0.500 (0.333 to 0.500) "
        "| 0.250 | 3.00 | 3.00 | 3.00 | 0.5 | 6.1000 | -5.0e-01 |"
    )
    assert rows[OURS]["breaks even"] is None
    assert rows[OURS]["of stock"] == [0.25, 0.5, 1.0]
    lines = "face |bytes packets\n lo: 5 0 0 0 0 0 0 0 6 0\n wire: 90 1 0 0 0 0 0 0 77 3 0"
    assert slow_link.sent_bytes(lines) == 77
