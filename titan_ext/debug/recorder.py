"""Writes down every collective of this rank before it is issued.

torch calls a process group's pre-hooks (``ProcessGroup.register_pre_hook``) on the calling thread,
before the backend sees the collective: in forward, backward and recompute, from eager and from
compiled code, and for every backend, since the hook belongs to the group and not to the backend.
It is told the tensors, not the split lists of an all-to-all; those are taken from the arguments of
the op by a dispatch mode that ``torch.compile`` ignores. Who issues a collective is read off the
Python stack, so that nothing of FSDP2 is replaced in order to look at it.

Not seen: what is no collective of a process group (DeepEP, HybridEP and symmetric-memory kernels,
the store), a replayed CUDA graph, and collectives inside torch's own ``monitored_barrier``.
"""

import inspect
import os
import sys
import threading
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.components.checkpointer.utils import canonical_fqn

from titan_ext.debug.compare import describe
from titan_ext.debug.ring import Facts, Record, RingWriter

__all__ = ["CollectiveRecorder"]

_HOOK_ID = 0x7E47
"""Names our hook to a process group, among the hooks of others."""

_NOT_AN_ISSUER = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))
_CARRIES_GRADIENTS = ("reduce_scatter", "all_reduce", "all_to_all", "send")
_OPS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
}
_SPLIT_OPS = ("c10d::alltoall_base_", "_c10d_functional::all_to_all_single")


class CollectiveRecorder:
    """Records the collectives of this rank in ``folder``; see ``titan_ext.debug.ring``."""

    def __init__(self, folder: Path, facts: Facts) -> None:
        self.step = 0
        self.checks_gradients = True
        self.facts = facts
        self._folder = folder
        self._ring = RingWriter(folder, facts.rank)
        self._index = 0
        self._positions: Counter[str] = Counter()
        self._hooked: dict[dist.ProcessGroup, str] = {}
        self._names: dict[nn.Module, str] = {}
        self._splits: tuple[list[int], list[int]] | None = None
        self._lock = threading.Lock()  # an asynchronous checkpoint has a thread and a group
        facts.write(folder)

    def watch_groups(self) -> None:
        """Hook every process group of this rank that is not hooked yet."""
        new = [group for group in _world.pg_map if group not in self._hooked]
        for group in new:
            ranks = dist.get_process_group_ranks(group)
            name = f"{group.group_desc}/{group.group_name}"
            self._hooked[group] = name
            self.facts.groups[name] = ranks
            group.register_pre_hook(_HOOK_ID, self._hook_of(name, ranks))
        if new:
            self.facts.write(self._folder)

    def name_modules(self, model_parts: list[nn.Module]) -> None:
        """Let records name the modules of the model."""
        for part in model_parts:
            self._names.update({m: canonical_fqn(name) for name, m in part.named_modules()})

    def splits_of_all_to_alls(self) -> AbstractContextManager[Any]:
        """A context in which all-to-alls are recorded with their split lists."""
        return _SplitLists(self)

    def close(self, ending: str) -> None:
        """Stop recording and note how the run ended on this rank."""
        for group in self._hooked:
            group.unregister_pre_hook(_HOOK_ID)
        self._hooked.clear()
        self.facts.ending = ending
        self.facts.write(self._folder)

    def _hook_of(self, name: str, ranks: list[int]):
        def hook(args) -> None:
            op = args.name.name.lower()
            op = _OPS.get(op, op)
            group = name
            if op in ("send", "recv"):
                ends = [self.facts.rank, ranks[args.root]]
                sender, receiver = ends if op == "send" else reversed(ends)
                group = f"{name} {sender}->{receiver}"
                self._add_pair(group, sender, receiver)
            with self._lock:
                record = self._record(op, group, args)
                self._ring.write(record)
                self._index += 1
                self._positions[group] += 1
            if self.checks_gradients and record.backward and op in _CARRIES_GRADIENTS:
                self._check_finite(record, args.input_tensors)

        return hook

    def _check_finite(self, record: Record, gradients: list[torch.Tensor]) -> None:
        """Here, since on the other ranks nobody can tell whose gradient it was."""
        if all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            return
        raise RuntimeError(
            f"rank {self.facts.rank} is about to send gradients that are not finite: "
            f"{describe(record)}"
        )

    def _add_pair(self, group: str, sender: int, receiver: int) -> None:
        if group not in self.facts.groups:
            self.facts.groups[group] = [sender, receiver]
            self.facts.write(self._folder)

    def _record(self, op: str, group: str, args) -> Record:
        unit, site = self._issuer(sys._getframe(2))
        tensors = [*args.input_tensors, *args.output_tensors]
        splits, self._splits = self._splits, None
        return Record(
            index=self._index,
            step=self.step,
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
            backward=torch._C._current_graph_task_id() != -1,
            splits=splits if op == "all_to_all" else None,
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


def _code_of(function) -> CodeType:
    return inspect.unwrap(function).__code__


_UNIT_METHODS = (_code_of(FSDPParamGroup.unshard), _code_of(FSDPParamGroup.post_backward))
_MODULE_CALL = _code_of(nn.Module._call_impl)


class _SplitLists(TorchDispatchMode):
    """Notes the split lists of an all-to-all for the record that its pre-hook makes."""

    def __init__(self, recorder: CollectiveRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name in _SPLIT_OPS:
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            sends, expects = given["input_split_sizes"], given["output_split_sizes"]
            if sends and expects:
                self._recorder._splits = ([int(n) for n in sends], [int(n) for n in expects])
        return func(*args, **kwargs)
