# SPDX-License-Identifier: BSD-3-Clause
"""Records every collective of this rank before it is issued, and stops the run when ranks differ.

torch calls a process group's pre-hooks (``ProcessGroup.register_pre_hook``) on the calling thread,
before the backend sees the collective. It does so in forward, backward and recompute, and from
eager and compiled code. The hook belongs to the group, so it works with every backend. It gets the
tensors and no more. The Python stack tells who issues the collective, so we need not patch FSDP2.
It also has the split lists of an all-to-all, so no dispatch mode slows every operation. A hook
never reads a value: on an accelerator the host would wait.

It does not see what bypasses process groups (DeepEP, HybridEP and symmetric-memory kernels, the
store), a replayed CUDA graph, and collectives inside torch's own ``monitored_barrier``.
"""

import contextlib
import hashlib
import inspect
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
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
from titan_ext.debug.hang_report import RankInfo, Record, kind_of, trace_files

# Not measured: both files of a rank stay below 5 MiB (test_debug_collectives.py).
PART_RECORDS = 4096
"""A rank's newest records are in two files of so many each, one a line."""
_KEPT_RUNS = 3
_HOOK_ID = 0x7E47
"""Our hook's name in a process group."""
_NOT_AN_ISSUER = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))
_PRIME = (1 << 31) - 1
"""Hashes are below it: what all ranks of a job add up then fits into an int64."""


class TraceWriter:
    """Writes the records of a rank into the folder of its machine."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._old, self._path = trace_files(folder, rank)
        self._open()

    def _open(self) -> None:
        # Unbuffered: the kernel has it when the process is killed or aborts.
        self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115
        self._count = 0

    def write(self, record: Record) -> None:
        if self._count == PART_RECORDS:
            self._file.close()
            self._path.replace(self._old)
            self._open()
        self._file.write(json.dumps(record.__dict__).encode() + b"\n")
        self._count += 1


class CollectiveWatchdog(RunCheck):
    """Records this rank's collectives, and compares them with those of its groups' other ranks.

    Create it on every rank, once the default process group exists. The records go to
    ``collectives/<time of start>`` in the run's folder.
    """

    def __init__(self, config: Trainer.Config) -> None:
        if not hasattr(dist.ProcessGroup, "register_pre_hook"):
            raise ValueError(
                "debug.record_collectives needs ProcessGroup.register_pre_hook, which torch "
                f"{torch.__version__} does not have; expected torch 2.15 or newer."
            )
        self._step = self._index = self._history = 0
        self._positions: Counter[str] = Counter()
        self._groups: dict[dist.ProcessGroup, str] = {}
        self._orders: Counter[str] = Counter()
        """A hash of what the main thread has issued on each group; a signature has its position."""
        self._names: dict[nn.Module, str] = {}
        self._lock = threading.Lock()  # an asynchronous checkpoint has a thread and a group
        rank = dist.get_rank()
        name = this_job().broadcast("collectives", lambda: time.strftime("%Y%m%d-%H%M%S"))
        self._folder = Path(config.dump_folder) / "collectives" / name
        if rank == 0:
            others = sorted(path for path in self._folder.parent.glob("*") if path.is_dir())
            for old in others[: -_KEPT_RUNS + 1]:
                shutil.rmtree(old, ignore_errors=True)
        self._info = RankInfo(rank=rank, host=socket.gethostname())
        self._info.write(self._folder)
        self._trace = TraceWriter(self._info.folder(self._folder), rank)
        self._hook_new_groups()
        logger.info(
            f"Collectives are recorded in {self._folder}; python -m titan_ext.debug.hang_report "
            f"{self._folder} compares the ranks, also while the run hangs or when it has died"
        )

    def after_build(self, trainer: Trainer) -> None:
        """Let records name the modules of the model, and compare at steps that read anyway."""
        for part in trainer.model_parts:
            self._names.update({m: canonical_fqn(name) for name, m in part.named_modules()})
        self._hook_new_groups()

        def compare(*_: Any) -> None:
            if is_logged_or_saved(trainer):
                self.compare(trainer.device)

        trainer.optimizers.register_step_pre_hook(compare)

    @contextlib.contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        self._step = trainer.step
        self._hook_new_groups()
        yield

    def compare(self, device: torch.device) -> None:
        """Compare what the ranks of each group have issued on it, by one number of 8 bytes.

        Ranks may differ without a hang: where the bytes match, the backend notices nothing. The
        first rank of a group counts its order as often as the others take it away, so all ranks of
        the job add up to 0. Raises RuntimeError on every rank if they do not.
        """
        number = 0
        for group, order in self._orders.items():
            ranks = self._info.groups[group]
            sign = len(ranks) - 1 if ranks[0] == self._info.rank else -1
            number += sign * (_hash(group) * order % _PRIME)
        total = torch.tensor(number, device=device)
        dist.all_reduce(total)
        if total.item():
            raise RuntimeError(
                "the ranks differ in the collectives that they have issued. python -m "
                f"titan_ext.debug.hang_report {self._folder} says where."
            )

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
            for group in self._groups:
                group.unregister_pre_hook(_HOOK_ID)
            self._info.ending = ending
            self._info.write(self._folder)

    def _hook_new_groups(self) -> None:
        # torch has no public list of a process's groups, and some are made after the build.
        new = [group for group in _world.pg_map if group not in self._groups]
        for group in new:
            name = self._groups[group] = f"{group.group_desc}/{group.group_name}"
            self._info.groups[name] = dist.get_process_group_ranks(group)
            group.register_pre_hook(_HOOK_ID, self._hook_of(name))
        if new:
            self._info.write(self._folder)

    def _hook_of(self, name: str) -> Any:
        ranks = self._info.groups[name]

        def hook(args: Any) -> None:
            op, group = collective_kind(args.name.name), name
            if op in ("send", "recv"):
                ends = [self._info.rank, ranks[args.root]]
                ends = ends if op == "send" else ends[::-1]
                group = f"{name} {ends[0]}->{ends[1]}"
                if group not in self._info.groups:
                    self._info.groups[group] = ends
                    self._info.write(self._folder)
            with self._lock:
                record = self._record(op, group, args)
                what = _hash(kind_of(group), record.signature())
                self._history = record.history = (self._history + what) % _PRIME
                if threading.current_thread() is threading.main_thread():
                    self._orders[group] = (self._orders[group] + what) % _PRIME
                self._trace.write(record)
                self._index += 1
                self._positions[group] += 1

        return hook

    def _record(self, op: str, group: str, args: Any) -> Record:
        # Past this method and the hook, which torch calls from C++, to who issues the collective.
        unit, site = self._issuer(sys._getframe(2))
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
            splits=_splits(sys._getframe(2)) if op == "all_to_all" else None,
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


def _hash(*values: object) -> int:
    """The same in every process."""
    # Python's ``hash`` of a string is another one in each process.
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _PRIME


def _code_of(function: Any) -> CodeType:
    return inspect.unwrap(function).__code__


# FSDP2 decorates its methods (_fsdp_common.py); the frame that runs is of what is inside.
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
            # Its variables are the forward's splits; it exchanges them the other way round.
            if frame.f_code is _ALL_TO_ALL_BACKWARD:
                sends, expects = expects, sends
            return list(map(int, sends)), list(map(int, expects))
        frame = frame.f_back
    return None
