"""The collective watch of a training run: records, comparison at every step end, observer.

The trainer makes one when ``debug.record_collectives`` is on and calls it around each step.
"""

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.tools.logging import logger

from titan_ext.debug import observer
from titan_ext.debug.compare import Comparison
from titan_ext.debug.recorder import CollectiveRecorder
from titan_ext.debug.ring import Facts

__all__ = ["CollectiveWatch", "NoWatch"]

_KEPT_RUNS = 3


class NoWatch:
    """Nothing is recorded."""

    def name_modules(self, model_parts: list[nn.Module]) -> None:
        pass

    def step(self, number: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class CollectiveWatch:
    """Records this rank's collectives under ``dump_folder``; rank 0 compares at step ends."""

    def __init__(self, dump_folder: str, *, timeout_s: float, is_pipelined: bool) -> None:
        """On every rank, once the default process group exists.

        Args:
            dump_folder: The run's folder; records go to ``collectives/<time of start>`` in it.
            timeout_s: The process groups' timeout while training.
            is_pipelined: Whether the model is split into stages.
        """
        if not hasattr(dist.ProcessGroup, "register_pre_hook"):
            raise ValueError(
                "debug.record_collectives needs ProcessGroup.register_pre_hook, which torch "
                f"{torch.__version__} does not have; expected torch 2.15 or newer."
            )
        self._is_pipelined = is_pipelined
        self._has_stepped = False
        rank = dist.get_rank()
        self._folder = self._agree_on_folder(Path(dump_folder) / "collectives")
        facts = Facts(
            rank=rank,
            world_size=dist.get_world_size(),
            pid=os.getpid(),
            host=socket.gethostname(),
            timeout_s=timeout_s,
        )
        self._recorder = CollectiveRecorder(self._folder, facts)
        dist.barrier()  # every rank's files are there before anyone reads them
        self._comparison = Comparison(self._folder) if rank == 0 else None
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            observer.start(self._folder, of_all_machines=rank == 0)
        self._recorder.watch_groups()
        logger.info(f"Collectives are recorded in {self._folder}")

    @staticmethod
    def _agree_on_folder(parent: Path) -> Path:
        name = [time.strftime("%Y%m%d-%H%M%S")]
        dist.broadcast_object_list(name, src=0)
        folder = parent / name[0]
        folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            for old in sorted(path for path in parent.iterdir() if path.is_dir())[:-_KEPT_RUNS]:
                shutil.rmtree(old, ignore_errors=True)
        return folder

    def name_modules(self, model_parts: list[nn.Module]) -> None:
        """Once the model is built: records name its modules."""
        self._recorder.name_modules(model_parts)
        self._recorder.watch_groups()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around one training step.

        Raises:
            RuntimeError: on rank 0, at the end of the step, if the ranks' collectives differ.
        """
        self._recorder.step = number
        # The first time, torch's pipelining runs each stage on uninitialised memory, to learn its
        # shapes: those gradients are whatever was there.
        self._recorder.checks_gradients = self._has_stepped or not self._is_pipelined
        self._recorder.watch_groups()
        with self._recorder.splits_of_all_to_alls():
            yield
        self._has_stepped = True
        if self._comparison is not None:
            self._comparison.advance()
            if self._comparison.difference:
                raise RuntimeError(self._comparison.difference)

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Around the whole training: how it ended is part of the records."""
        try:
            yield
        except BaseException as error:
            self._recorder.close(f"failed: {type(error).__name__}: {error}"[:500])
            raise
        self._recorder.close("finished")
