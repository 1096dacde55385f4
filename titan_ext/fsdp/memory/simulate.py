# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2's bookkeeping, simulated on sizes.

FSDP2's rules (torch 2.14, 2.15) for when it gathers parameters, copies them out of the buffer, and
frees them. They say which buffers outlive the call that made them, and what a recompute may change.
They also cover a unit of several modules of which only some run. ``predict`` decides the order of
the units. Neither uses tensors, a process group or FSDP's own state.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_state.py.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property

import torch

from titan_ext.fsdp.memory.accounting import NOTHING, Bytes, GroupBytes, Timeline
from titan_ext.fsdp.plan import GroupPlan, UnitPlan


class Phase(Enum):
    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


@dataclass(eq=False)
class Group:
    plan: GroupPlan
    unit: "SimulatedUnit"
    name: str
    phase: Phase = Phase.IDLE
    is_unsharded: bool = False
    is_pending: bool = False  # unshard has been called, nothing copied out yet
    kept_nbytes: int = 0  # after a reshard to a smaller world
    reshards_after_forward: bool | int = True
    reshards_after_backward: bool = True
    reduces: bool = True
    post_backward_pending: bool = False
    gradients: set[int] = field(default_factory=set)  # unsharded ones, by index of the parameter
    sharded_gradients: set[int] = field(default_factory=set)
    buffers: Counter[str] = field(default_factory=Counter)  # bytes by class

    def live_bytes(self, is_issuing: bool) -> GroupBytes:
        """What it holds."""
        full = self.plan.gathered_nbytes
        is_logical = self.is_logical or is_issuing
        live = NOTHING
        if is_logical or self.kept_nbytes or any(self.buffers.values()):
            live = Bytes(
                gathered=(full if self.is_unsharded else 0) + self.kept_nbytes,
                logical=full if is_logical else 0,
                **self.buffers,
            )
        return GroupBytes(self.name, self.unit.plan.kind.value, live, is_logical)

    @cached_property
    def all_gather_nbytes(self) -> int:
        """Of its all-gather's buffer. Over one rank there is none."""
        return self.plan.gathered_nbytes if self.plan.shard_world > 1 else 0

    @cached_property
    def reordered_nbytes(self) -> int:
        """Gathered parameters that are sharded along another dim than 0."""
        of_dim_0 = tuple(p for p in self.plan.params if p.shard_dim == 0)
        return self.plan.gathered_nbytes - replace(self.plan, params=of_dim_0).gathered_nbytes

    @property
    def is_logical(self) -> bool:
        return self.is_unsharded or self.is_pending


@dataclass(eq=False)
class SimulatedUnit:
    """A unit and its progress in forward. ``roles`` are its parts that run separately."""

    plan: UnitPlan
    roles: tuple[str, ...]
    groups: list[Group] = field(default_factory=list)
    phase: Phase = Phase.IDLE
    roles_to_run: set[str] = field(default_factory=set)


class FSDPSimulation:
    """The state of FSDP on one rank.

    ``plans`` are the units in forward order, ``roles`` the names of the parts that run forward
    separately, by unit; other units have one. The others are as of ``predict.StepOrder``.
    """

    def __init__(
        self,
        plans: Sequence[UnitPlan],
        roles: dict[str, tuple[str, ...]],
        *,
        grad_dtype: torch.dtype,
        reduce_scatter_buffers: int,
        copies_out_directly: bool,
        frees_buffers: bool,
    ) -> None:
        self.timeline = Timeline()
        self.records = True
        self._grad_dtype = grad_dtype
        self._reduce_scatter_buffers = reduce_scatter_buffers
        self._copies_out_directly = copies_out_directly
        self._frees_buffers = frees_buffers
        self._retained: Group | None = None  # whose buffer stays: of the last gather of a forward
        self._reduce_inputs: list[tuple[Group, int]] = []
        self._forward_root: SimulatedUnit | str | None = None
        self.units = {plan.name: SimulatedUnit(plan, roles.get(plan.name, ("",))) for plan in plans}
        for unit in self.units.values():
            unit.groups = [
                Group(
                    group,
                    unit,
                    f"{unit.plan.name}/experts" if index else unit.plan.name,
                    reshards_after_forward=unit.plan.reshard_after_forward,
                )
                for index, group in enumerate(unit.plan.groups)
            ]
        self._groups = [group for unit in self.units.values() for group in unit.groups]

    def sample(self, action: str, unit: str, issuing: Group | None = None) -> None:
        """Add the live bytes to the timeline, if ``records``."""
        if self.records:
            groups = (group.live_bytes(group is issuing) for group in self._groups)
            self.timeline.record(action, unit, groups)

    def zero_grad(self) -> None:
        """Free the sharded gradients."""
        for group in self._groups:
            group.buffers["gradients"] = 0
            group.sharded_gradients.clear()

    def compute(self, unit: SimulatedUnit, phase: str, part: str = "all") -> None:
        """A unit computes, which changes no bytes; ``fsdp.cost`` counts its time."""

    # Forward

    def begin_forward(self) -> None:
        self.sample("forward", "")
        self._forward_root = "model"

    def end_forward(self) -> None:
        self._end_forward_root()
        self.sample("after forward", "")

    def pre_forward(self, unit: SimulatedUnit, *, in_backward: bool = False) -> None:
        """Before a unit, or a part of it, runs. ``in_backward``: as a recompute."""
        if in_backward or (self._frees_buffers and unit.plan.frees_buffer):
            self.unshard(unit)  # fsdp.prefetch, before FSDP's own hook
        if not unit.roles_to_run:
            unit.roles_to_run = set(unit.roles)
        if unit.phase is Phase.PRE_BACKWARD:
            self.unshard(unit)
            self.sample("forward", unit.plan.name)
            return
        is_first_part = unit.phase is not Phase.FORWARD
        unit.phase = Phase.FORWARD
        if is_first_part and self._forward_root is None:
            self._forward_root = unit
        for group in unit.groups:
            group.phase = Phase.FORWARD
            self._unshard(group)
            self._wait(group)
        if is_first_part and not in_backward:
            for ahead in self._units(unit.plan.forward_prefetch):
                for group in ahead.groups:
                    self._unshard(group)
        self.sample("forward", unit.plan.name)

    def post_forward(self, unit: SimulatedUnit, role: str = "", in_backward: bool = False) -> None:
        unit.roles_to_run.discard(role)
        if not unit.roles_to_run and unit.phase is not Phase.PRE_BACKWARD:
            self._complete_forward(unit, in_backward)
            if self._forward_root is unit:
                self._end_forward_root(in_backward)
        self.sample("after forward", unit.plan.name)

    # Backward

    def pre_backward(self, unit: SimulatedUnit, seen_by: str | None = None) -> None:
        """Before the backward of a unit; ``seen_by`` is whose hook sees it, if not its own."""
        unit.phase = Phase.PRE_BACKWARD
        for group in unit.groups:
            if group.phase is not Phase.PRE_BACKWARD:
                group.phase = Phase.PRE_BACKWARD
                if unit.plan.gathers_in_backward:
                    self._unshard(group)
                    self._wait(group)
        for ahead in self._units(unit.plan.backward_prefetch):
            for group in reversed(ahead.groups):
                self._unshard(group)
        self.sample("backward", unit.plan.name if seen_by is None else seen_by)

    def add_gradients(self, unit: SimulatedUnit, names: set[str]) -> None:
        """Autograd has given the parameters ``names`` of a unit their gradients."""
        for group in unit.groups:
            group.gradients |= {i for i, p in enumerate(group.plan.params) if p.name in names}

    def post_backward(self, unit: SimulatedUnit) -> None:
        """After the backward of a unit whose inputs have gradients."""
        for group in reversed(unit.groups):
            self._post_backward(group)
            self.sample("after backward", unit.plan.name)

    def end_backward(self, finalizes: bool = True) -> None:
        """The end of a backward. ``finalizes=False``: of one that a pipeline finalizes later."""
        self._forward_root = None
        for unit in self.units.values():
            unit.roles_to_run.clear()
            for group in reversed(unit.groups):
                if group.phase is not Phase.POST_BACKWARD:
                    if finalizes or not group.reduces:
                        self._post_backward(group)
                    else:
                        group.post_backward_pending = True
                group.phase = Phase.IDLE
            unit.phase = Phase.IDLE
        if finalizes:
            self._end_iteration()
        else:
            self._release_retained()

    def finalize(self) -> None:
        """Do the reductions that the backwards of a pipeline's microbatches postponed."""
        for group in self._groups:
            group.reduces = group.reshards_after_backward = True
        for group in reversed(self._groups):
            if group.post_backward_pending:
                self._post_backward(group)
            else:
                self._reshard(group)
            group.phase = Phase.IDLE
        self._end_iteration()

    # What a user of FSDP2 may call: FSDPModule.unshard, .reshard and .set_*

    def unshard(self, unit: SimulatedUnit) -> None:
        for group in unit.groups:
            self._unshard(group)
            self._wait(group)

    def reshard(self, unit: SimulatedUnit) -> None:
        for group in unit.groups:
            self._reshard(group)

    def configure(self, units: Iterable[SimulatedUnit], **flags: bool) -> None:
        """Set ``flags``, attributes of ``Group``."""
        for group in (group for unit in units for group in unit.groups):
            vars(group).update(flags)

    # Groups

    def _units(self, names: Iterable[str]) -> list[SimulatedUnit]:
        """Those of ``names`` that are simulated: it may be some of a model's."""
        return [self.units[name] for name in names if name in self.units]

    def _unshard(self, group: Group) -> None:
        if group.is_logical:
            return
        if group.plan.shard_world > 1:
            group.buffers["all_gather"] += group.all_gather_nbytes
            self.sample("unshard", group.unit.plan.name, issuing=group)
        group.is_pending = True

    def _wait(self, group: Group) -> None:
        if not group.is_pending:
            return
        if group.phase is Phase.FORWARD:
            self._release_retained()
        group.is_unsharded, group.kept_nbytes = True, 0
        if group.all_gather_nbytes and group.reordered_nbytes and not self._copies_out_directly:
            group.buffers["all_gather"] += group.reordered_nbytes
            self.sample("copying", group.unit.plan.name)
            group.buffers["all_gather"] -= group.reordered_nbytes
        if group.phase is Phase.FORWARD:
            self._retained = group  # so that the next all-gather may overlap with the copy-out
        else:
            self._free_buffer(group)
        group.is_pending = False

    def _reshard(self, group: Group) -> None:
        if group.phase is Phase.FORWARD:
            if group.reshards_after_forward is False:
                return
            if group.reshards_after_forward is not True:
                group.kept_nbytes = group.plan.gathered_nbytes // group.reshards_after_forward
        group.is_unsharded = False

    def _post_backward(self, group: Group) -> None:
        group.phase = Phase.POST_BACKWARD
        group.post_backward_pending = not group.reduces
        if group.reshards_after_backward:
            self._reshard(group)
        if not group.reduces:
            return
        if group is group.unit.groups[-1]:  # the first of its unit in backward
            while len(self._reduce_inputs) >= self._reduce_scatter_buffers:
                self._reclaim_reduce_input()
        if group.gradients:
            self._reduce(group)

    def _reduce(self, group: Group) -> None:
        params = [group.plan.params[index] for index in sorted(group.gradients)]
        world, buffers = group.plan.shard_world, group.buffers
        whole = group.plan.reduce_scatter_nbytes(params)
        shard = sum(p.padded_numel(world) * p.reduce_dtype.itemsize for p in params) // world
        buffers["reduce_scatter"] += whole
        self.sample("reduce", group.unit.plan.name)
        buffers["gradients"] += shard
        self.sample("reduced", group.unit.plan.name)
        self._reduce_inputs.append((group, whole))
        is_cast = params[0].reduce_dtype != self._grad_dtype
        if is_cast or group.gradients <= group.sharded_gradients:
            buffers["gradients"] -= shard  # copied, or added to what is there
        group.sharded_gradients |= group.gradients
        group.gradients.clear()

    def _reclaim_reduce_input(self) -> None:
        group, nbytes = self._reduce_inputs.pop(0)
        group.buffers["reduce_scatter"] -= nbytes

    def _complete_forward(self, unit: SimulatedUnit, in_backward: bool) -> None:
        for group in unit.groups:
            if not in_backward:
                self._reshard(group)
            group.phase = Phase.IDLE
        unit.phase = Phase.IDLE

    def _end_forward_root(self, in_backward: bool = False) -> None:
        for unit in reversed(self.units.values()):
            if unit.roles_to_run:
                self._complete_forward(unit, in_backward)
                unit.roles_to_run.clear()
        self._release_retained()
        self._forward_root = None

    def _end_iteration(self) -> None:
        for group in self._groups:
            if group.is_pending:  # gathered ahead for nothing
                self._free_buffer(group)
                group.is_pending = False
        self._release_retained()
        for group, nbytes in self._reduce_inputs:
            group.buffers["reduce_scatter"] -= nbytes
        self._reduce_inputs.clear()

    def _release_retained(self) -> None:
        if self._retained is not None:
            self._free_buffer(self._retained)
            self._retained = None

    def _free_buffer(self, group: Group) -> None:
        if group.all_gather_nbytes:
            self.sample("copied", group.unit.plan.name)
            group.buffers["all_gather"] -= group.all_gather_nbytes
