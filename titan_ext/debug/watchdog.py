# SPDX-License-Identifier: BSD-3-Clause
"""Records every collective of this rank before it is issued, and stops the run when ranks differ.

No rank sees what all have issued. Each adds up a hash of every collective, with a factor of its own
in the group: the factors of a group add up to 0. So does the sum over all ranks, if on every group
all have issued the same. It is one number, added up at steps that are logged or saved.

torch calls a process group's pre-hooks (``ProcessGroup.register_pre_hook``) on the calling thread,
before the backend sees the collective. It does so in forward, backward and recompute, and from
eager and compiled code. The hook belongs to the group, so it works with every backend. It gets the
tensors and no more. The Python stack tells who issues the collective, so we need not patch FSDP2.
It also has the split lists of an all-to-all, so no dispatch mode slows every operation.

A hook never reads a value: on an accelerator the host would wait. Sums of the gradients that a rank
sends stay on the device until ``check`` reads them, at those steps.

It does not see what bypasses process groups (DeepEP, HybridEP and symmetric-memory kernels, the
store), a replayed CUDA graph, and collectives inside torch's own ``monitored_barrier``.
"""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import operator
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_ext.base.agreement import this_job
from titan_ext.base.op_cost import collective_kind
from titan_ext.base.run_check import RunCheck, is_logged_or_saved
from titan_ext.base.tensors import in_backward
from titan_ext.debug import hang_report
from titan_ext.debug.records import RankInfo, Record, TraceWriter, describe, kind_of

_HOOK_ID = 0x7E47
"""Our hook's name in a process group."""

_NOT_AN_ISSUER = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))
_CARRIES_GRADIENTS = ("reduce_scatter", "all_reduce", "all_to_all", "send")
_NEVER = 1 << 40
"""An index that no collective has."""


class CollectiveWatchdog(RunCheck):
    """Records this rank's collectives; all ranks learn at steps that are logged or saved whether
    any differ.

    Create it on every rank, once the default process group exists. The records go to
    ``collectives/<time of start>`` in the run's folder.
    """

    def __init__(self, config: Trainer.Config) -> None:
        if not hasattr(dist.ProcessGroup, "register_pre_hook"):
            raise ValueError(
                "debug.record_collectives needs ProcessGroup.register_pre_hook, which torch "
                f"{torch.__version__} does not have; expected torch 2.15 or newer."
            )
        self._step = 0
        # The first time, torch's pipelining runs each stage on uninitialised memory, to learn its
        # shapes: those gradients are whatever was there.
        self._checks_gradients = config.parallelism.pipeline_parallel_degree == 1
        self._index = 0
        self._positions: Counter[str] = Counter()
        self._hooked: list[dist.ProcessGroup] = []
        self._names: dict[nn.Module, str] = {}
        self._sent: list[tuple[Record, torch.Tensor]] = []
        self._unread: list[tuple[list[Record], torch.Tensor]] = []
        self._lock = threading.Lock()  # an asynchronous checkpoint has a thread and a group
        self._history, self._zero = 0, 0

        rank = dist.get_rank()
        name = this_job().told("collectives", lambda: time.strftime("%Y%m%d-%H%M%S"))
        self._folder = Path(config.dump_folder) / "collectives" / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._info = RankInfo(
            rank=rank,
            world_size=dist.get_world_size(),
            pid=os.getpid(),
            host=socket.gethostname(),
            timeout_s=config.comm.train_timeout_seconds,
        )
        self._info.write(self._folder)
        self._trace = TraceWriter(self._info.folder(self._folder), rank)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            hang_report.start(self._folder, of_all_machines=rank == 0)
        self._hook_new_groups()
        logger.info(f"Collectives are recorded in {self._folder}")

    def after_build(self, trainer: Trainer) -> None:
        """Let records name the modules of the model, and check before gradients are used."""
        self._name_modules(trainer)
        trainer.optimizers.register_step_pre_hook(
            lambda *_: self.check(trainer.device, compares=is_logged_or_saved(trainer))
        )

    def _name_modules(self, trainer: Trainer) -> None:
        for part in trainer.model_parts:
            self._names.update({m: canonical_fqn(name) for name, m in part.named_modules()})
        self._hook_new_groups()

    @contextlib.contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        self._step = trainer.step
        self._hook_new_groups()
        try:
            yield
        finally:
            self._sent.clear()
        self._checks_gradients = True

    def check(self, device: torch.device, *, compares: bool) -> None:
        """Keep, on the device, whether the gradients that this rank sent in the step are finite.

        On every rank, before the optimizer's step; ``device`` is that of the default process group.
        Where it ``compares`` it adds up 16 bytes over the ranks, and reads the sum. Nothing else
        waits for the device or for another rank.

        Raises RuntimeError on every rank, at a step that ``compares``, if any two have issued
        different collectives. Also if one has sent gradients that are not finite since the last
        such step, and names the first rank that did. Gradients whose sum overflows count as such.
        """
        sent, self._sent = self._sent, []
        if sent:
            finite = torch.isfinite(torch.stack([total for _, total in sent])).to(device)
            self._unread.append(([record for record, _ in sent], finite))
        if not compares:
            return
        unread, self._unread = self._unread, []
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for _, finite in unread:
            wrong += (~finite).sum()
        total = torch.stack([torch.tensor(_signed(self._zero), device=device), wrong])
        dist.all_reduce(total)
        difference, wrongs = total.tolist()
        if difference:
            raise RuntimeError(
                f"the ranks differ in the collectives that they have issued: {self._folder} has "
                f"{hang_report.REPORT}, which says where."
            )
        if wrongs:
            self._raise_of_first(unread, device)

    def _raise_of_first(
        self, unread: list[tuple[list[Record], torch.Tensor]], device: torch.device
    ) -> None:
        """Name the rank that was the first to send gradients that are not finite."""
        here = [
            record
            for records, finite in unread
            for record, is_finite in zip(records, finite.tolist(), strict=True)
            if not is_finite
        ]
        index = here[0].index if here else _NEVER
        earliest = torch.tensor(index * self._info.world_size + self._info.rank, device=device)
        dist.all_reduce(earliest, dist.ReduceOp.MIN)
        culprit = int(earliest.item()) % self._info.world_size
        words = [describe(here[0]) if here else ""]
        dist.broadcast_object_list(words, src=culprit)
        raise RuntimeError(
            f"rank {culprit} sent gradients that are not finite: {words[0]}. "
            "Nothing was saved since."
        )

    @classmethod
    def run_again(cls, trainer: Trainer, passes: Sequence[Mapping[str, Any]]) -> None:
        """Run forward and backward of a step again, recorded. All ranks do, in one step.

        The step's gradients are lost. ``passes`` are the arguments of its
        ``forward_backward_step``. Raises as ``check``; returns if nothing was wrong.
        """
        watchdog = cls(trainer.config)
        watchdog._name_modules(trainer)
        watchdog._step, watchdog._checks_gradients = trainer.step, True
        with watchdog.around_run(trainer):
            trainer.optimizers.zero_grad()
            for arguments in passes:
                trainer.forward_backward_step(**arguments)
            watchdog.check(trainer.device, compares=True)

    @contextlib.contextmanager
    def around_run(self, trainer: Trainer) -> Iterator[None]:
        """Records how training ended."""
        ending = "finished"
        try:
            yield
        except BaseException as error:
            ending = f"failed: {type(error).__name__}: {error}"[:500]
            raise
        finally:
            for group in self._hooked:
                group.unregister_pre_hook(_HOOK_ID)
            self._info.ending = ending
            self._info.write(self._folder)

    def _hook_new_groups(self) -> None:
        new = [group for group in _world.pg_map if group not in self._hooked]
        for group in new:
            ranks = dist.get_process_group_ranks(group)
            name = f"{group.group_desc}/{group.group_name}"
            self._hooked.append(group)
            self._info.groups.append(name)
            group.register_pre_hook(_HOOK_ID, self._hook_of(name, ranks))
        if new:
            self._info.write(self._folder)

    def _hook_of(self, name: str, ranks: list[int]):
        place = ranks.index(self._info.rank), len(ranks)

        def hook(args) -> None:
            op = collective_kind(args.name.name)
            group, (at, size) = name, place
            if op in ("send", "recv"):
                ends = [self._info.rank, ranks[args.root]]
                sender, receiver = ends if op == "send" else reversed(ends)
                group, at, size = f"{name} {sender}->{receiver}", int(op == "recv"), 2
                if group not in self._info.groups:
                    self._info.groups.append(group)
                    self._info.write(self._folder)
            with self._lock:
                record = self._note(self._record(op, group, args), at, size)
                self._trace.write(record)
                self._index += 1
                self._positions[group] += 1
            if not (self._checks_gradients and record.backward and op in _CARRIES_GRADIENTS):
                return
            # Now, since on the other ranks nobody can tell whose gradient it was.
            for gradient in args.input_tensors:
                self._sent.append((record, gradient.sum()))

        return hook

    def _note(self, record: Record, at: int, size: int) -> Record:
        """Add a record to the sums, of the rank ``at`` of ``size`` in the group; return it with the
        history up to here."""
        what = _hash(kind_of(record.group), record.signature())
        self._history = (self._history + what) % _RING
        if threading.current_thread() is threading.main_thread():
            self._zero += _factor(record.group, at, size) * what
            if record.splits:
                sends, expects = record.splits
                to, by = _weights(record.group, at, size)
                rows = sum(map(operator.mul, to, sends)) - sum(map(operator.mul, by, expects))
                self._zero += (2 * record.position + 1) * rows
            self._zero %= _RING
        return dataclasses.replace(record, history=self._history)

    def _record(self, op: str, group: str, args) -> Record:
        unit, site = self._issuer(sys._getframe(2))
        splits = _splits(sys._getframe(2)) if op == "all_to_all" else None
        tensors = [*args.input_tensors, *args.output_tensors]
        return Record(
            index=self._index,
            step=self._step,
            group=group,
            position=self._positions[group],
            op=op,
            inputs=[list(t.shape) for t in args.input_tensors[: Record.MAX_SHAPES]],
            outputs=[list(t.shape) for t in args.output_tensors[: Record.MAX_SHAPES]],
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            num_bytes=sum(t.numel() * t.element_size() for t in tensors),
            root=args.root if op not in ("send", "recv") else -1,
            unit=unit,
            site=site,
            backward=in_backward(),
            splits=splits,
        )

    def _issuer(self, frame: FrameType | None) -> tuple[str, str]:
        """The FSDP unit or innermost module on the stack, and the innermost frame not of torch."""
        site = ""
        while frame is not None:
            code = frame.f_code
            if code in _UNIT_METHODS:
                return canonical_fqn(frame.f_locals["self"]._module_fqn or "root"), ""
            if code is _MODULE_CALL:
                name = self._names.get(frame.f_locals["self"])
                if name is not None:
                    return name, site
            elif not site and not code.co_filename.startswith(_NOT_AN_ISSUER):
                site = code.co_qualname
            frame = frame.f_back
        return "", site


_RING = 1 << 64
"""Sums are those of int64, which wraps around."""


def _signed(value: int) -> int:
    """``value`` of the ring as an int64."""
    return (value + _RING // 2) % _RING - _RING // 2


def _hash(*values: object) -> int:
    """Odd, of 64 bits, and the same in every process."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1


@functools.cache
def _factor(group: str, at: int, size: int) -> int:
    """The factor of what the rank ``at`` issues; those of a group add up to 0."""
    return (size - 1 if at == 0 else -1) * _hash(group)


@functools.cache
def _weights(group: str, at: int, size: int) -> tuple[list[int], list[int]]:
    """Factors of the rows that the rank ``at`` sends to each rank, and of those that it expects."""
    return (
        [_hash(group, at, other) for other in range(size)],
        [_hash(group, other, at) for other in range(size)],
    )


def _code_of(function) -> CodeType:
    return inspect.unwrap(function).__code__


_UNIT_METHODS = (_code_of(FSDPParamGroup.unshard), _code_of(FSDPParamGroup.post_backward))
_MODULE_CALL = _code_of(nn.Module._call_impl)
_ALL_TO_ALL_BACKWARD = _code_of(functional.all_to_all_single_backward)
_SPLIT_FUNCTIONS = (
    _code_of(functional.all_to_all_single),
    _ALL_TO_ALL_BACKWARD,
    _code_of(dist.all_to_all_single),
)


def _splits(frame: FrameType | None) -> tuple[list[int], list[int]] | None:
    """Rows sent to each rank and received from each, from the innermost all-to-all in Python."""
    while frame is not None:
        if frame.f_code in _SPLIT_FUNCTIONS:
            names = ("input_split_sizes", "output_split_sizes")
            sends, expects = (frame.f_locals.get(name) for name in names)
            if not sends or not expects:
                return None
            if frame.f_code is _ALL_TO_ALL_BACKWARD:
                sends, expects = expects, sends
            return list(map(int, sends)), list(map(int, expects))
        frame = frame.f_back
    return None
