# SPDX-License-Identifier: BSD-3-Clause
"""``titan_ext.api.verify``: the first comparison for people with their own training loop.

``titan_ext verify`` trains a small copy with Titan's trainer. Whoever has another loop brings the
model, the loss and the batches, on ranks that exist. What judges is the same.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.distributed import utils as dist_utils

from titan_ext.base import no_accelerator
from titan_ext.fp8.codec import Codec, use_codec
from titan_ext.verify.arm import KeepDtype, fill_model, gradients, sum_in_order
from titan_ext.verify.judge import DRAWS, Verdict, judge_gradients
from titan_ext.verify.reference import OneProcess

Loss = Callable[[nn.Module, Any], torch.Tensor]


def verify(
    build: Callable[[], nn.Module],
    loss: Loss,
    batches: Sequence[Any],
    *,
    plain: Callable[[], nn.Module],
    data_rank: int,
    data_ranks: int,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Verdict:
    """Hold the gradients of a parallel model against those of one process. All ranks call it.

    Weights are random, and depend on their names. A gradient may be off by 30 times what fp32 costs
    one process, and by 1e-6 at least. What stores or sends float8 does so with a codec that changes
    nothing. It needs no GPU: gloo and small models do.

    Args:
        build: Makes this rank's model, as ``build_decoder`` does, with fp32 as the dtype in which
            parameters are used (``training.mixed_precision_param``).
        loss: A scalar of a model and one of ``batches``. Gradients are summed over batches and
            ranks, so it divides by what all of them have, such as their tokens.
        batches: Those of all ranks; a data rank takes each ``data_ranks``-th one.
        plain: Makes the same model without parallelism; rank 0 calls it.
        data_rank, data_ranks: Of this rank, and their number.
        context: Around forward and backward of the parallel model, as Titan's ``get_spmd_context``.

    Returns the same on all ranks: ``is_right``, and ``lines()`` with the worst tensors. Raises
    ValueError if data ranks would not take as many batches each, of one at least.
    """
    if not batches or len(batches) % data_ranks:  # FSDP gathers in each forward, on all ranks
        raise ValueError(
            f"{len(batches)} batches; expected a multiple of {data_ranks}, the data ranks."
        )
    with use_codec(Codec("exact")), no_accelerator.list_all_to_all(), KeepDtype():
        model = build()
        sum_in_order(model)
        verdict: Any = None  # type checkers do not know that a draw follows
        for seed in range(DRAWS):
            fill_model([model], seed, "balanced")
            model.zero_grad()
            for batch in batches[data_rank::data_ranks]:
                with context():
                    loss(model, batch).backward()
            found = gradients(model)
            said: list[Any] = [None]
            if dist.get_rank() == 0:
                try:
                    said = [_judge(found, loss, batches, plain, seed)]
                except Exception as error:  # the other ranks wait for an answer
                    said = [error]
            dist.broadcast_object_list(said)
            (verdict,) = said
            if isinstance(verdict, Exception):
                raise verdict
            if verdict.is_right or not verdict.may_be_a_tie:
                break
    return verdict


def _judge(
    found: dict[str, torch.Tensor],
    loss: Loss,
    batches: Sequence[Any],
    plain: Callable[[], nn.Module],
    seed: int,
) -> Verdict:
    backend = dist_utils.get_spmd_backend()
    dist_utils.set_spmd_backend("partial_dtensor")  # which asks for no meshes
    try:
        right, mode = _in_one_process(plain(), loss, batches, seed, torch.float64)
        narrow, _ = _in_one_process(plain(), loss, batches, seed, torch.float32, mode.chosen)
    finally:
        dist_utils.set_spmd_backend(backend)
    verdict = Verdict(gap=mode.gap)
    judge_gradients(verdict, found, right, narrow)
    return verdict


def _in_one_process(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Any],
    seed: int,
    dtype: torch.dtype,
    choices: Sequence[torch.Tensor] = (),
) -> tuple[dict[str, torch.Tensor], OneProcess]:
    """Gradients by name, and what they were computed in, which knows the choices of experts."""
    fill_model([model], seed, "balanced")
    for param in model.parameters():
        param.data = param.data.to(dtype)
    with OneProcess(list(choices)) as mode:
        torch.stack([loss(model, batch) for batch in batches]).sum().backward()
    return gradients(model), mode
