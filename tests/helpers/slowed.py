"""Faults that make ranks wait, planted in a short run of four: no rank fails of them.

``python -m tests.helpers.slowed FOLDER FAULT``
"""

import os
import re
import subprocess
import sys
import time
import unittest.mock
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.tools.logging import init_logger

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, make_config
from titan_ext.components.dispatch import FunctionalAllToAllTokenDispatcher
from titan_ext.run.pace import Judge, PaceCheck

RUN = Run(
    parallelize="submodule", world=4, ep=2, layers=3, narrow=True, seq_len=256, steps=5, ac="full"
)
LATE_RANK, LATE_S = 2, 0.8
_SLOW_RANKS = (2, 3)
_NETWORK = """set -e
ip link set lo up
tc qdisc add dev lo root handle 1: htb
tc class add dev lo parent 1: classid 1:3 htb rate 20mbit burst 2kb
"""
"""A network of its own, with a class for what is sent at 2.5 MB/s; nothing is in it yet."""


def can_slow_a_link() -> bool:
    """Whether this system lets us have such a network."""
    command = ["unshare", "-Urn", "bash", "-c", _NETWORK]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def train_slowed(run: Run, folder: Path, fault: str) -> dict[str, Any]:
    """One rank of a run with ``fault``: "late rank", "uneven experts", "slow link" or "none".

    Returns what its check of the pace has said.
    """
    init_logger()
    Judge.trained_after = 0
    rank = int(os.environ["RANK"])
    if fault == "slow link":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    config: Any = make_config(run, folder)
    trainer = config.build()
    if fault == "slow link":
        _slow_a_link(rank)
    exchange = FunctionalAllToAllTokenDispatcher._token_count_exchange

    def late(self: Any, *args: Any) -> torch.Tensor:
        time.sleep(LATE_S)
        return exchange(self, *args)

    if fault == "uneven experts":
        for part in trainer.model_parts:
            for name, buffer in part.named_buffers():
                if name.endswith("expert_bias_E"):
                    buffer[: buffer.numel() // 2] = 1e4
    is_late = fault == "late rank" and rank == LATE_RANK
    with unittest.mock.patch.object(
        FunctionalAllToAllTokenDispatcher, "_token_count_exchange", late if is_late else exchange
    ):
        trainer.train()
    check = next(check for check in trainer.checks if isinstance(check, PaceCheck))
    trainer.close()
    return {"said": check.judge.said, "summary": check.summary()}


def _slow_a_link(rank: int) -> None:
    """Put all connections between two ranks into the slow class."""
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if rank != _SLOW_RANKS[0]:
        return
    listed = subprocess.run(["ss", "-Htnp"], check=True, capture_output=True, text=True).stdout
    rows = [(line.split(), re.search(r"pid=(\d+)", line)) for line in listed.splitlines()]
    owner = {row[3]: int(pid[1]) for row, pid in rows if pid}
    ends = {pids[rank] for rank in _SLOW_RANKS}
    between = [(a, b) for (_, _, _, a, b, *_), _ in rows if {owner.get(a), owner.get(b)} == ends]
    assert between, listed
    for ports in ([end.rpartition(":")[2] for end in both] for both in between):
        match = f"match ip sport {ports[0]} 0xffff match ip dport {ports[1]} 0xffff"
        command = f"tc filter add dev lo parent 1: protocol ip u32 {match} flowid 1:3"
        subprocess.run(command.split(), check=True)


def train(folder: Path, fault: str) -> str:
    """Train with a fault; return the warnings of rank 0, one a line."""
    if fault == "slow link":
        script = f'{_NETWORK}exec "$@"'
        command = [sys.executable, "-m", "tests.helpers.slowed", str(folder), "in its network"]
        done = subprocess.run(
            ["unshare", "-Urn", "bash", "-c", script, "bash", *command],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return done.stdout
    fault = "slow link" if fault == "in its network" else fault
    results = run_ranks(train_slowed, 4, RUN, folder, fault, log_folder=folder / "logs")
    return "\n".join([*results[0]["said"], *results[0]["summary"]])


if __name__ == "__main__":
    print(train(Path(sys.argv[1]), sys.argv[2]))
