"""Faults that make ranks wait, planted in a short run of four: no rank fails of them."""

import os
import time
import unittest.mock
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools.logging import init_logger

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, make_config
from titan_ext.components.dispatch import FunctionalAllToAllTokenDispatcher
from titan_ext.run.pace import PaceCheck, PaceMonitor

RUN = Run(
    parallelize="submodule", world=4, ep=2, layers=3, narrow=True, seq_len=256, steps=5, ac="full"
)
LATE_RANK, LATE_S = 2, 0.8


def train_slowed(run: Run, folder: Path, fault: str) -> list[str]:
    """One rank of a run with ``fault``: "late rank", "uneven experts" or "none".

    Returns what its check of the pace has said.
    """
    init_logger()
    PaceMonitor.trained_after = 0
    rank = int(os.environ["RANK"])
    config: Any = make_config(run, folder)
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
    return check.monitor.warnings


def train(folder: Path, fault: str) -> str:
    """Train with a fault; return the warnings of rank 0, one a line."""
    results = run_ranks(train_slowed, 4, RUN, folder, fault, log_folder=folder / "logs")
    return "\n".join(results[0])
