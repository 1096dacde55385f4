"""Faults that make ranks wait, planted in a short run of four: no rank fails of them.

``python -m tests.slowed FOLDER FAULT``
"""

import os
import subprocess
import sys
import time
import unittest.mock
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools.logging import init_logger

from tests.cluster import run_ranks
from tests.training import Run, make_config
from titan_ext.components.dispatch import FunctionalAllToAllTokenDispatcher
from titan_ext.run.meter import PaceCheck

RUN = Run(parallelize="submodule", world=4, ep=2, layers=3, narrow=True, steps=5, ac="full")
LATE_RANK, LATE_S = 2, 0.8
_SLOW_LINK = """set -e
ip link set lo up
for rank in 0 1 2 3; do ip addr add 10.9.0.$rank/32 dev lo label lo:$rank; done
tc qdisc add dev lo root handle 1: htb
tc class add dev lo parent 1: classid 1:3 htb rate 8mbit burst 2kb
for ends in "2 3" "3 2"; do
    tc filter add dev lo parent 1: protocol ip u32 \\
        match ip src 10.9.0.${ends% *}/32 match ip dst 10.9.0.${ends#* }/32 flowid 1:3
done
"""
"""A network of its own, where each rank has an address, and one link is a thousand times slower."""


def can_slow_a_link() -> bool:
    """Whether this system lets us have such a network."""
    command = ["unshare", "-Urn", "bash", "-c", _SLOW_LINK]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def train_slowed(run: Run, folder: Path, fault: str) -> dict[str, Any]:
    """One rank of a run with ``fault``: "late rank", "uneven experts", "slow link" or "none".

    Its last step is profiled. Returns what its check of the pace has said.
    """
    init_logger()
    rank = int(os.environ["RANK"])
    if fault == "slow link":
        os.environ["GLOO_SOCKET_IFNAME"] = f"lo:{rank}"
    config: Any = make_config(run, folder)
    config.profiler.enable_profiling = True
    config.profiler.profile_freq = run.steps
    config.profiler.profiler_warmup = 1
    trainer = config.build()
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


def train(folder: Path, fault: str) -> str:
    """Train with a fault; return the warnings of rank 0, one a line."""
    if fault == "slow link":
        script = f'{_SLOW_LINK}exec "$@"'
        command = [sys.executable, "-m", "tests.slowed", str(folder), "in its network"]
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
