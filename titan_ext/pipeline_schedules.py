# SPDX-License-Identifier: BSD-3-Clause
"""Refuses what does not work with pipeline schedules that split backward.

Zero-bubble schedules take the gradients of a stage's inputs first and those of its weights later.
For that torch (``torch.distributed.pipelining._backward``) looks up the parameters that the stage
holds when backward begins. FSDP2 swaps parameters: if it has resharded a unit by then, they are not
those of the graph, and torch silently skips them. Stock TorchTitan 0.3 then trains without their
gradients.
"""

import re
from pathlib import Path
from typing import Any

from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.fsdp.settings import FSDPSettings

_OTHERS = "another schedule (1F1B, Interleaved1F1B)"
_WEIGHTS = re.compile(r"\d+W\d+")  # stage, gradients of weights, microbatch
_SPLIT_BACKWARD = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV)


def check_schedule(
    parallelism: ParallelismConfig, *, loss: Any, activation_checkpoint: Any, compiled: bool
) -> None:
    """Refuse what a schedule that splits backward cannot do, or would silently do wrong.

    Args:
        loss: Config of the loss; None where it is not known.
        activation_checkpoint: Config of the policy, or None.
        compiled: Whether the model is.

    Raises:
        ValueError: naming the key.
    """
    key = _splitting_key(parallelism)
    if key is None:
        return
    why = f"parallelism.{key} is {getattr(parallelism, key)!r}, which splits backward"
    if compiled:
        raise ValueError(
            f"{why}: torch.compile makes code that runs backward once. Expected compile.enable = "
            f"false, or {_OTHERS}."
        )
    if policy := _one_backward(activation_checkpoint):
        raise ValueError(
            f"{why}; activation_checkpoint policy {policy} allows one backward only. Expected "
            f'policy "full" or "none", policy "fp8" with mode "no_recompute", or {_OTHERS}.'
        )
    if isinstance(loss, ChunkedLossWrapper.Config):
        raise ValueError(
            f"{why}: with the chunked loss the last norm would get no gradient. Expected another "
            f"loss (torchtitan.components.loss.CrossEntropyLoss), or {_OTHERS}."
        )
    for reshard_key, value in FSDPSettings.from_config(parallelism).reshard_by_key.items():
        if value not in ("default", "never"):
            raise ValueError(
                f"{why}, and {reshard_key} is {value!r}: parameters that are freed after forward "
                'would get no gradient. Expected "never", or "default", which keeps them gathered '
                "in a pipeline."
            )


def _splitting_key(parallelism: ParallelismConfig) -> str | None:
    """The key that chooses a schedule that splits backward; None if no key does."""
    if parallelism.pipeline_parallel_degree == 1:
        return None
    file = Path(parallelism.pipeline_parallel_schedule_csv or "")
    if file.is_file():  # Titan says so if it is missing
        return "pipeline_parallel_schedule_csv" if _WEIGHTS.search(file.read_text()) else None
    schedule = get_schedule_class(parallelism.pipeline_parallel_schedule)
    return "pipeline_parallel_schedule" if schedule in _SPLIT_BACKWARD else None


def _one_backward(policy: Any) -> str:
    """The name of a policy built on torch's selective checkpoints; "" for any other."""
    if isinstance(policy, SelectiveAC.Config):
        return '"selective"'
    if isinstance(policy, FP8AC.Config) and policy.mode != "no_recompute":
        return f'"fp8" with mode "{policy.mode}"'
    return ""
