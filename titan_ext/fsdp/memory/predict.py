# SPDX-License-Identifier: BSD-3-Clause
"""What FSDP will hold unsharded on a rank, before anything runs.

It computes this from a plan (``fsdp.plan``) and the order of a training step, without FSDP or a
process group. So a laptop answers for a job of 512 ranks. Tests compare it with what
``fsdp.memory.tracker`` measures, event by event.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from titan_ext.fsdp.memory.accounting import Timeline
from titan_ext.fsdp.memory.simulate import FSDPSimulation, SimulatedUnit
from titan_ext.fsdp.plan import UnitPlan
from titan_ext.fsdp.units import BLOCK_KINDS, UnitKind

_NORM, _HEAD = "norm", "lm_head"
_TIED = UnitKind.TIED


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One stage of a pipeline with one stage a rank.

    Attributes:
        stage: Its index.
        stages: How many there are.
        microbatches: In one call of the schedule.
        schedule: "1F1B" or "GPipe".
    """

    stage: int
    stages: int
    microbatches: int
    schedule: str = "1F1B"

    def forwards_and_backwards(self) -> Iterator[str]:
        """ "F" or "B" for each microbatch's forward or backward, in the order of this stage."""
        ahead = self.microbatches
        if self.schedule == "1F1B":
            ahead = min(self.microbatches, self.stages - self.stage)
        for index in range(self.microbatches + ahead):
            if index < ahead:
                yield "F"
            elif index < self.microbatches:
                yield from ("B", "F")
            else:
                yield "B"


@dataclass(frozen=True, kw_only=True)
class StepOrder:
    """What determines the order of a training step, besides the plan.

    Attributes:
        recomputes: Whether blocks are checkpointed, with any policy.
        loss_chunks: Chunks of Titan's chunked loss, which runs the head by itself; 0 where the head
            runs with the model.
        accumulation: Forwards and backwards of a step (calls of the schedule in a pipeline).
        pipeline: The stage, in a pipeline.
        grad_dtype: Of sharded parameters and their gradients (``training.dtype``).
        reduce_scatter_buffers: Inputs of reduce-scatters that FSDP2 lets live.
        copies_out_directly: Whether parameters that are sharded along another dim than 0 are copied
            out without a temporary (``fsdp.collectives``); FSDP2 by itself makes one.
        frees_buffers: Whether units whose plan says so free their all-gather buffers once copied
            out (``fsdp.prefetch``); FSDP2 by itself keeps each until the next copy-out of forward.
    """

    recomputes: bool = True
    loss_chunks: int = 8
    accumulation: int = 1
    pipeline: Pipeline | None = None
    grad_dtype: torch.dtype = torch.float32
    reduce_scatter_buffers: int = 1
    copies_out_directly: bool = True
    frees_buffers: bool = True


def predict(units: Sequence[UnitPlan], order: StepOrder) -> Timeline:
    """The timeline of a steady step, that is, of any step but the first.

    Args:
        units: FSDP's plan for each unit, in forward order.
        order: What else determines the order of a step.

    Returns:
        The same events that ``MemoryTracker`` records on that rank.

    Raises:
        ValueError: for a schedule, or a unit, whose order is not known here.
    """
    step = Step(units, order)
    for is_steady in (False, True):
        step.records = is_steady
        step.run()
    return step.timeline


class Step(FSDPSimulation):
    """Runs a step in a simulation, which records bytes (or time: ``fsdp.cost``)."""

    def __init__(self, units: Sequence[UnitPlan], order: StepOrder) -> None:
        if order.pipeline is not None and order.pipeline.schedule not in ("1F1B", "GPipe"):
            raise ValueError(
                f"pipeline schedule {order.pipeline.schedule!r}: what FSDP holds is predicted for "
                "1F1B and GPipe."
            )
        if any(unit.name.startswith("mtp_layers.") for unit in units):
            raise ValueError("multi-token prediction runs norm and head between blocks.")
        super().__init__(
            units,
            _roles(units),
            grad_dtype=order.grad_dtype,
            reduce_scatter_buffers=order.reduce_scatter_buffers,
            copies_out_directly=order.copies_out_directly,
            frees_buffers=order.frees_buffers,
        )
        self.order = order
        found = list(self.units.values())
        self.embedding = next((u for u in found if u.plan.kind == "embedding"), None)
        self.head = next((u for u in found if _HEAD in u.roles), None)
        self.is_tied = self.head is not None and self.head.plan.kind == _TIED
        # FSDP2 takes the backward of a chunk of the loss for a whole one.
        self.is_alone = self.head is not None and self.head.plan.is_head_alone
        if self.head is not None and self.is_alone:
            if order.pipeline is not None:
                raise ValueError("a head without its norm is not predicted in a pipeline.")
            if order.loss_chunks:
                self.head.plan = replace(self.head.plan, backward_prefetch=())
        between = [u for u in found if u is not self.embedding and u is not self.head]
        # No unit begins the backward. Without chunks, the norm's all-reduce waits for the head's
        # reduce-scatter.
        has_norm = any(u.plan.kind is UnitKind.NORM for u in between)
        self.norm_is_replicated = self.is_alone and not has_norm
        self.blocks = [list(block) for _, block in groupby(between, key=lambda u: u.plan.block)]

    def run(self) -> None:
        self.timeline = Timeline()
        self.sample("step", "")
        self.zero_grad()
        for _ in range(self.order.accumulation):
            if self.order.pipeline is None:
                self._forward()
                self._backward()
                self.end_backward()
            else:
                self._run_pipeline(self.order.pipeline)
        self.sample("after step", "")

    def _run_pipeline(self, pipeline: Pipeline) -> None:
        for what in pipeline.forwards_and_backwards():
            if what == "F":
                self._forward()
                continue
            self.configure(self.units.values(), reduces=False, reshards_after_backward=False)
            self._backward()
            self.end_backward(finalizes=False)
        self.finalize()

    def _forward(self) -> None:
        self.begin_forward()
        if self.embedding is not None:
            self.pre_forward(self.embedding)
            self.compute(self.embedding, "forward")
            self.post_forward(self.embedding)
        if self.head is not None and self.is_tied:
            self.pre_forward(self.head)
            self.post_forward(self.head, "tok_embeddings")
        for block in self.blocks:
            self._run_block(block)
        if self.head is not None:
            with_model = (_NORM,) if self.order.loss_chunks else (_NORM, _HEAD)
            for role in [role for role in self.head.roles if role in with_model]:
                self.pre_forward(self.head)
                if role == _HEAD:
                    self.compute(self.head, "loss")
                self.post_forward(self.head, role)
        self.end_forward()
        if self.head is not None and self.order.loss_chunks:
            self._run_chunked_loss(self.head)

    def _run_block(self, block: list[SimulatedUnit], in_backward: bool = False) -> None:
        phase = "recompute" if in_backward else "forward"
        outer, inner = _outer_and_inner(block)
        if outer is not None:
            if not in_backward:
                self.pre_forward(outer)
            self.compute(outer, phase, "before" if inner else "all")
        for unit in inner:
            self.pre_forward(unit, in_backward=in_backward)
            self.compute(unit, phase)
            self.post_forward(unit, in_backward=in_backward)
        if outer is not None:
            if inner:
                self.compute(outer, phase, "after")
            if not in_backward:
                self.post_forward(outer)

    def _run_chunked_loss(self, head: SimulatedUnit) -> None:
        """Titan's ChunkedLossWrapper: forward and backward of the head, chunk by chunk."""
        chunked = {"reshards_after_backward": False, "reshards_after_forward": False}
        self.configure([head], reduces=False, **chunked)
        self.unshard(head)
        for chunk in range(self.order.loss_chunks):
            if chunk == self.order.loss_chunks - 1:
                self.configure([head], reduces=True)
            self.pre_forward(head)
            if chunk == 0:
                self.compute(head, "loss")  # all chunks of it
            self.post_forward(head, _HEAD)
            if self.is_alone:
                self.pre_backward(head)
            self.add_gradients(head, _trainable(head) & _params_of_head(head))
            self.post_backward(head)
            if self.is_alone:
                self.end_backward()
        self.configure([head], **dict.fromkeys(chunked, True))
        self.reshard(head)

    def _backward(self) -> None:
        chunked = bool(self.order.loss_chunks)
        if self.is_alone and chunked:
            if self.norm_is_replicated:
                self.sample("backward", "")
        elif self.head is not None:
            if chunked:
                # The norm's output is the model's: a hook on it records what the loss has freed.
                self.sample("backward", self.head.plan.name)
            self.pre_backward(self.head, seen_by="" if chunked else self.head.plan.name)
            done = _params_of_head(self.head) if chunked else set()
            if not self.is_tied:
                self.add_gradients(self.head, _trainable(self.head) - done)
                self.post_backward(self.head)
            while self.norm_is_replicated and self._reduce_inputs:
                self._reclaim_reduce_input()
        for block in reversed(self.blocks):
            self._run_block_backward(block)
        if self.embedding is not None:
            # Its inputs have no gradients, so its backward ends with the whole backward.
            self.pre_backward(self.embedding)
            self.add_gradients(self.embedding, _trainable(self.embedding))
        if self.head is not None and self.is_tied:
            own = {name for name in _trainable(self.head) if not name.startswith(f"{_HEAD}.")}
            self.add_gradients(self.head, own if self.order.loss_chunks else _trainable(self.head))

    def _run_block_backward(self, block: list[SimulatedUnit]) -> None:
        outer, inner = _outer_and_inner(block)
        # What follows the experts in a block needs saved tensors, and so starts the recompute.
        before_inner = not inner or inner[-1].plan.kind is UnitKind.EXPERTS
        recomputes = self.order.recomputes and block[0].plan.kind in BLOCK_KINDS
        if outer is not None:
            self.pre_backward(outer)
        if recomputes and before_inner:
            self._run_block(block, in_backward=True)
        if outer is not None and inner:
            self.compute(outer, "backward", "after")
        for unit in reversed(inner):
            self.pre_backward(unit)
            if recomputes and unit is inner[-1] and not before_inner:
                self._run_block(block, in_backward=True)
            self.compute(unit, "backward")
            self.add_gradients(unit, _trainable(unit))
            self.post_backward(unit)
        if outer is not None:
            self.compute(outer, "backward", "before" if inner else "all")
            self.add_gradients(outer, _trainable(outer))
            self.post_backward(outer)


def _roles(units: Sequence[UnitPlan]) -> dict[str, tuple[str, ...]]:
    """The parts of units that run forward separately: norm and head, and tied embeddings."""
    roles = {u.name: u.module_names for u in units if _HEAD in u.module_names}
    for name, parts in roles.items():
        if len(parts) > 1 and _NORM not in parts:
            raise ValueError(f"unit {name}: tied embeddings without a norm are not predicted.")
    return roles


def _is_norm(param: str) -> bool:
    return param.startswith(f"{_NORM}.")


def _params_of_head(unit: SimulatedUnit) -> set[str]:
    """Parameters of ``lm_head`` in a head's unit; tied, they may have the embedding's name."""
    names = {p.name for group in unit.groups for p in group.plan.params}
    own = {name for name in names if name.startswith(f"{_HEAD}.")}
    return own or {name for name in names if not _is_norm(name)}


def _trainable(unit: SimulatedUnit) -> set[str]:
    return {p.name for group in unit.groups for p in group.plan.params if p.requires_grad}


def _outer_and_inner(
    block: list[SimulatedUnit],
) -> tuple[SimulatedUnit | None, list[SimulatedUnit]]:
    if block[0].plan.name == block[0].plan.block:
        return block[0], block[1:]
    return None, block
