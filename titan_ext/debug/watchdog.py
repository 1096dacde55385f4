# SPDX-License-Identifier: BSD-3-Clause
"""Notes every collective of this rank before it is issued, and stops the run when ranks differ.

TorchTitan turns torch's Flight Recorder on, which has shapes, times and stacks. It knows no FSDP
unit, dumps at a timeout of NCCL only, and finds no order that differs while all bytes match. So a
note is the unit's name and a hash of the order.

torch calls a process group's pre-hooks (``ProcessGroup.register_pre_hook``) on the calling thread,
before the backend sees the collective: in forward, backward and recompute, eager and compiled, with
every backend. The Python stack tells who issues the collective, so we need not patch FSDP2. A hook
never reads a value: on an accelerator the host would wait.

It does not see what bypasses process groups (DeepEP, HybridEP and symmetric-memory kernels, the
store), a replayed CUDA graph, and collectives inside torch's own ``monitored_barrier``.
"""

import functools
import hashlib
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.distributed_c10d import _world
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_ext.base.agreement import this_job
from titan_ext.base.issuer import collective_kind, issuer
from titan_ext.base.run_check import RunCheck, is_logged_or_saved
from titan_ext.base.tensors import in_backward
from titan_ext.debug.hang_report import Note

_HOOK_ID = 0x7E47  # our hook's name in a process group
_PRIME = (1 << 31) - 1
"""Hashes are below it: what all ranks of a job add up then fits into an int64."""


class CollectiveWatchdog(RunCheck):
    """Notes this rank's collectives, and compares them with those of its groups' other ranks.

    Create it on every rank, once the default process group exists. The notes go to
    ``collectives/<time of start>`` in the run's folder.
    """

    def __init__(self, config: Trainer.Config) -> None:
        if not hasattr(dist.ProcessGroup, "register_pre_hook"):
            raise ValueError(
                "debug.record_collectives needs ProcessGroup.register_pre_hook, which torch "
                f"{torch.__version__} does not have; expected torch 2.15 or newer."
            )
        self._trainer: Trainer | None = None
        self._index = 0
        self._positions: Counter[str] = Counter()
        self._ranks: dict[str, list[int]] = {}
        """Of each group, in the order of their notes."""
        self._hooked: set[dist.ProcessGroup] = set()
        self._orders: Counter[str] = Counter()
        self._names: dict[nn.Module, str] = {}
        name = this_job().broadcast("collectives", lambda: time.strftime("%Y%m%d-%H%M%S"))
        self._folder = Path(config.dump_folder) / "collectives" / name
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank_{dist.get_rank()}.notes"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._hook_new_groups()
        logger.info(
            f"Collectives are recorded in {self._folder}; python -m titan_ext.debug.hang_report "
            f"{self._folder} compares the ranks, also while the run hangs or when it has died"
        )

    def after_build(self, trainer: Trainer) -> None:
        """Let notes name the modules of the model, and compare at steps that read anyway."""
        for part in trainer.model_parts:
            self._names.update({m: canonical_fqn(name) for name, m in part.named_modules()})
        self._trainer = trainer

        def compare(*_: Any) -> None:
            self._hook_new_groups()
            if is_logged_or_saved(trainer):
                self.compare(trainer.device)

        trainer.optimizers.register_step_pre_hook(compare)

    def compare(self, device: torch.device) -> None:
        """Compare what the ranks of each group have issued on it, by one number of 8 bytes.

        Ranks may differ without a hang: where the bytes match, the backend notices nothing. The
        first rank of a group counts its order as often as the others take it away, so all ranks of
        the job add up to 0. Raises RuntimeError on every rank if they do not.
        """
        number = 0
        for group, order in self._orders.items():
            ranks = self._ranks[group]
            sign = len(ranks) - 1 if ranks[0] == dist.get_rank() else -1
            number += sign * (_hash(group) * order % _PRIME)
        total = torch.tensor(number, device=device)
        dist.all_reduce(total)
        if total.item():
            raise RuntimeError(
                "the ranks differ in the collectives that they have issued. python -m "
                f"titan_ext.debug.hang_report {self._folder} says where."
            )

    def _hook_new_groups(self) -> None:
        # torch has no public list of a process's groups, and some are made after the build.
        for group in _world.pg_map.keys() - self._hooked:
            name = f"{group.group_desc}/{group.group_name}"
            ranks = dist.get_process_group_ranks(group)
            self._add(name, ranks)
            group.register_pre_hook(_HOOK_ID, functools.partial(self._note, name, ranks))
            self._hooked.add(group)

    def _add(self, name: str, ranks: list[int]) -> None:
        if name not in self._ranks:
            Note(name, -1).write(self._file, len(self._ranks))
            self._ranks[name] = ranks

    def _note(self, name: str, ranks: list[int], args: Any) -> None:
        # An asynchronous checkpoint has a thread and a group, in an order of its own; a card's
        # backward has a thread as well.
        if threading.current_thread() is not threading.main_thread() and not in_backward():
            return
        op, group = collective_kind(args.name.name), name
        if op in ("send", "recv"):
            ends = [dist.get_rank(), ranks[args.root]]
            ends = ends if op == "send" else ends[::-1]
            group = f"{name} {ends[0]}->{ends[1]}"
            self._add(group, ends)
        signature, words = self._describe(op, args)
        self._orders[group] = _hash(self._orders[group], signature)
        note = Note(group, self._positions[group], self._orders[group], self._index, words)
        note.write(self._file, list(self._ranks).index(group))
        self._index += 1
        self._positions[group] += 1

    def _describe(self, op: str, args: Any) -> tuple[object, str]:
        """What must be equal on all ranks of the group, and the collective in words."""
        # Past this method and the hook, which torch calls from C++, to who issues the collective.
        step = self._trainer.step if self._trainer is not None else 0
        unit, frame = issuer(sys._getframe(2), self._names)
        site = frame.f_code.co_qualname if frame is not None else ""
        # Of a scatter and a gather one side is on one rank.
        other_side = op in ("all_gather", "scatter", "recv")
        tensors = args.output_tensors if other_side else args.input_tensors
        shapes = [list(tensor.shape) for tensor in tensors[:4]]
        words = op
        if tensors:
            words += f" of {tensors[0].dtype}{shapes[0]}".replace("torch.", "").replace(", ", "x")
        words += (f" by {unit}" if unit else "") + (f" in {site}" if site else "")
        words += f"{', backward' if in_backward() else ''}, step {step}"
        if op == "all_to_all":  # how many rows is each rank's own
            shapes = [shape[1:] for shape in shapes[:1]]
        dtypes = [tensor.dtype for tensor in tensors[:1]]
        if op in ("send", "recv"):  # the two ends of a pipeline are different modules
            return (shapes, dtypes), words
        return (op, shapes, dtypes, args.root, step, unit, site, in_backward()), words


def _hash(*values: object) -> int:
    """The same in every process, unlike Python's ``hash`` of a string."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _PRIME
