# SPDX-License-Identifier: BSD-3-Clause
"""The checks of a run, in the order in which the trainer calls them.

To add one, write a subclass of ``RunCheck`` and add it to ``RUN_CHECKS``.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from titan_ext.activation_checkpoint.memory_report import log_memory_report
from titan_ext.fsdp.memory.log import MemoryLog
from titan_ext.guards import ONE_PROCESS_MODES, RunCheck
from titan_ext.guards.agreement import RanksAgree
from titan_ext.guards.checkpoints import Checkpoints
from titan_ext.guards.finite import FiniteGradients
from titan_ext.guards.folder import Folder
from titan_ext.guards.paths import Paths
from titan_ext.guards.progress import Progress
from titan_ext.guards.stop import StopOnSignal
from titan_ext.hf_export import HuggingFaceExport
from titan_ext.lora import check_lora_targets
from titan_ext.run_record import RunRecord


class LoRATargets(RunCheck):
    """Checks that LoRA's target modules exist."""

    def before_start(self, config: Any) -> None:
        if config.model_spec is not None:
            check_lora_targets(config.model_spec.model, config)


class Collectives(RunCheck):
    """``debug.record_collectives``; ``titan_ext.debug`` is imported only when it is on."""

    _watchdog: Any = None

    def before_build(self, config: Any) -> None:
        if not getattr(config.debug, "record_collectives", False):
            return
        if config.comm.mode in ONE_PROCESS_MODES:
            raise ValueError(
                f"debug.record_collectives compares the ranks of a run; comm.mode is "
                f"{config.comm.mode!r}, which has one process. Expected 'default'."
            )
        from titan_ext.debug.watchdog import CollectiveWatchdog

        self._watchdog = CollectiveWatchdog(
            config.dump_folder,
            timeout_s=config.comm.train_timeout_seconds,
            is_pipelined=config.parallelism.pipeline_parallel_degree > 1,
        )

    def after_build(self, trainer: Any) -> None:
        if self._watchdog is None:
            return
        self._watchdog.name_modules(trainer.model_parts)

        def check(*_) -> None:
            if self._watchdog:
                self._watchdog.check_gradients(trainer.device)

        trainer.optimizers.register_step_pre_hook(check)

    def around_run(self, trainer: Any) -> AbstractContextManager[None]:
        return self._watchdog.run() if self._watchdog else nullcontext()

    def around_step(self, trainer: Any) -> AbstractContextManager[None]:
        return self._watchdog.step(trainer.step) if self._watchdog else nullcontext()


class FSDPMemory(RunCheck):
    """``parallelism.fsdp_track_memory``."""

    log: MemoryLog | None = None

    def after_build(self, trainer: Any) -> None:
        if trainer.config.parallelism.fsdp_track_memory:
            self.log = MemoryLog(trainer)

    def around_step(self, trainer: Any) -> AbstractContextManager[None]:
        return self.log.step() if self.log else nullcontext()

    @contextmanager
    def around_run(self, trainer: Any) -> Iterator[None]:
        yield
        if self.log:
            self.log.finish()


class ActivationMemory(RunCheck):
    """Logs, after the first step, what float8 activation checkpointing stored."""

    _is_due = True

    @contextmanager
    def around_step(self, trainer: Any) -> Iterator[None]:
        yield
        if self._is_due:
            self._is_due = False
            log_memory_report(trainer)


# Contexts are entered in this order: the collectives of all others are recorded.
RUN_CHECKS: tuple[type[RunCheck], ...] = (
    RunRecord,
    RanksAgree,
    Collectives,
    StopOnSignal,
    LoRATargets,
    Folder,
    Paths,
    Checkpoints,
    HuggingFaceExport,
    FiniteGradients,
    FSDPMemory,
    ActivationMemory,
    Progress,
)
