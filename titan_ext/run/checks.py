# SPDX-License-Identifier: BSD-3-Clause
"""The checks of a run, in the order in which the trainer calls them; the small ones are here.

To add one, write a subclass of ``RunCheck`` and add it to ``RUN_CHECKS``.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.trainer import Trainer

from titan_ext.activation_checkpoint.memory_report import log_memory_report
from titan_ext.base.agreement import this_job
from titan_ext.base.messages import Mistakes
from titan_ext.base.run_check import ONE_PROCESS_MODES, RunCheck, is_logged_or_saved
from titan_ext.base.tensors import are_finite
from titan_ext.components.hf_export import HuggingFaceExport
from titan_ext.components.lora import wrong_adapters
from titan_ext.fsdp.units import param_groups
from titan_ext.run.budget import ActivationBudget
from titan_ext.run.checkpoints import Checkpoints
from titan_ext.run.pace import PaceCheck
from titan_ext.run.record import Receipts, RunRecord
from titan_ext.run.start import Folder, Paths, RanksAgree
from titan_ext.run.stop import StopOnSignal
from titan_ext.run.weights import Weights

_TOGETHER = timedelta(seconds=20)
_NEVER = 1 << 30
"""More gradients than a rank has."""


class Collectives(RunCheck):
    """``debug.record_collectives``; ``titan_ext.debug`` is imported only when it is on."""

    _watchdog = RunCheck()

    def before_build(self, config: Trainer.Config) -> None:
        if not getattr(config.debug, "record_collectives", False):
            return
        if config.comm.mode in ONE_PROCESS_MODES:
            raise ValueError(
                f"debug.record_collectives compares the ranks of a run; comm.mode is "
                f"{config.comm.mode!r}, which has one process. Expected 'default'."
            )
        from titan_ext.debug.watchdog import CollectiveWatchdog

        self._watchdog = CollectiveWatchdog(config)

    def after_build(self, trainer: Trainer) -> None:
        self._watchdog.after_build(trainer)


class LoRATargets(RunCheck):
    """Checks that LoRA's target modules exist."""

    def before_start(self, config: Trainer.Config) -> None:
        if config.model_spec is not None:
            Mistakes(wrong_adapters(config.model_spec.model, config)).raise_all()


class FiniteGradients(RunCheck):
    """Stops a run before it applies or saves gradients that are not finite, and says whose.

    The reduction spreads one rank's NaN to all ranks, and the step to every weight. Titan checks
    only the loss, when it logs: too late if it saves a checkpoint first. This check waits for the
    device, so it runs only on steps that are logged or saved anyway. Nothing escapes it: weights
    that became NaN in between make the next gradients NaN as well.

    Once reduced, they are all alike. So the ranks run the step again and look at each parameter's
    gradient before FSDP reduces it. A good step pays nothing for it: only its tokens are kept until
    the optimizer's step.

    Raises RuntimeError in the step, on the ranks that hold gradients that are not finite. Clipping
    by a norm that is NaN makes that all of them.
    """

    def after_build(self, trainer: Any) -> None:
        def check(*_) -> None:
            if not is_logged_or_saved(trainer):
                return
            labels = [p["global_valid_tokens"] for p in (trainer.passes or [])[:1]]
            grads = (p.grad for p in _parameters(trainer) if p.grad is not None)
            if are_finite([*grads, *(1 / number for number in labels)]):
                return
            if not all(labels):
                raise RuntimeError(
                    f"step {trainer.step}: no label is valid on any data-parallel rank, so the "
                    f"loss is 0 / 0: all are {IGNORE_INDEX}. Expected a label to train on in each "
                    "step: look at the documents of dataloader.dataset and at what masks their "
                    "labels, or raise training.global_batch_size."
                )
            try:
                trainer.checkpointer.maybe_wait_for_saving()  # it may be the last good one
            finally:
                source = self._source(trainer)
                raise RuntimeError(
                    f"step {trainer.step}: gradients are not finite. The optimizer's step was not "
                    f"taken and nothing was saved since the last checkpoint.{source}"
                )

        # Once gradients are reduced and clipped, and the last place before weights change.
        trainer.optimizers.register_step_pre_hook(check)

    @contextmanager
    def around_step(self, trainer: Any) -> Iterator[None]:
        trainer.passes = [] if is_logged_or_saved(trainer) else None
        try:
            yield
        finally:
            trainer.passes = None

    def _source(self, trainer: Any) -> str:
        """The rank and parameter that they come from, "" where that cannot be told."""
        config, passes = trainer.config, trainer.passes
        graphs = not config.training.disable_cuda_graphs  # they run no hook
        if graphs or not passes or config.comm.mode in ONE_PROCESS_MODES:
            return ""
        if not this_job().all_come("not finite", _TOGETHER):  # an infinite norm may leave some NaN
            return ""
        trainer.passes = None
        first = _first_that_is_not_finite(trainer, passes)
        if not are_finite(_parameters(trainer)):
            first = " Weights are not finite either: an earlier step made them so."
        return first or " When the step ran again, its gradients were finite."


def _parameters(trainer: Trainer) -> Iterator[torch.nn.Parameter]:
    return (param for part in trainer.model_parts for param in part.parameters())


def _first_that_is_not_finite(trainer: Trainer, passes: Sequence[Mapping[str, Any]]) -> str:
    """Run forward and backward of a step again, on all ranks; its gradients are lost.

    ``passes`` are the arguments of its ``forward_backward_step``. A NaN travels from rank to rank
    with tokens, and from the last stage of a pipeline to the first. So the first rank is the one in
    the latest stage that has met one after the fewest gradients of its own.
    """
    seen, found = 0, (_NEVER, "")

    def look(name: str, param: torch.Tensor) -> None:
        nonlocal seen, found
        seen += 1
        if not found[1] and param.grad is not None and not are_finite([param.grad]):
            found = seen, name

    # FSDP2 gives a parameter's gradient to its unsharded twin, and reduces it from there
    # (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
    twins = {
        canonical_fqn(param._param_fqn or "a parameter"): param._unsharded_param
        for part in trainer.model_parts
        for group in param_groups(part.modules())
        for param in group.fsdp_params
        if hasattr(param, "_unsharded_param") and param._unsharded_param.requires_grad
    }
    hooks = [
        twin.register_post_accumulate_grad_hook(functools.partial(look, name))
        for name, twin in twins.items()
    ]
    trainer.optimizers.zero_grad()
    for arguments in passes:
        trainer.forward_backward_step(**arguments)
    for hook in hooks:
        hook.remove()
    rank, ranks, stages = dist.get_rank(), dist.get_world_size(), trainer.parallel_dims.pp
    stages_after = stages - 1 - rank * stages // ranks
    # Stage, count and rank in one number, so that one MIN finds the first on all ranks.
    order = (stages_after * _NEVER + found[0]) * ranks + rank
    first = torch.tensor(order if found[1] else _NEVER**2, device=trainer.device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    if first.item() == _NEVER**2:
        return ""
    culprit = int(first.item()) % ranks
    names = [found[1]]
    dist.broadcast_object_list(names, src=culprit)
    return f" The first is of {names[0]}, on rank {culprit}, before the ranks sum it."


class Schedule(RunCheck):
    """Has the first step take the rate that is logged, which the config's schedule gives.

    A checkpoint brings the optimizers' rates along, and Titan's schedulers compute theirs anew, but
    hand them on only after a step (torchtitan/components/optimizer/lr_scheduler.py).
    """

    _is_due = True

    @contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        for scheduler in trainer.lr_schedulers if self._is_due else ():
            groups = scheduler.optimizer.param_groups
            for group, rate in zip(groups, scheduler.get_last_lr(), strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
        self._is_due = False
        yield


class ActivationMemory(RunCheck):
    """Logs, after the first step, what float8 activation checkpointing stored."""

    _is_due = True

    @contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        yield
        if self._is_due:
            self._is_due = False
            log_memory_report(trainer)


# The record is the outermost: errors of all others end up in it.
# Contexts are entered in this order: the collectives of all others are recorded.
RUN_CHECKS: tuple[type[RunCheck], ...] = (
    RunRecord,
    RanksAgree,
    Collectives,
    StopOnSignal,
    LoRATargets,
    Folder,
    Paths,
    ActivationBudget,
    Checkpoints,
    HuggingFaceExport,
    Weights,
    FiniteGradients,
    Schedule,
    ActivationMemory,
    Receipts,
    PaceCheck,
)
