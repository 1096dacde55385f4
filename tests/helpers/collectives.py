"""A trace of the collectives that a rank issues, below every API: at the dispatcher of c10d.

And the collectives and bytes of a step that a rank of a job of any size would do: fake tensors over
a fake process group cost as much for 64 ranks as for two.

FSDP2 calls process groups directly, Titan's dispatcher the functional collectives, spmd_types the
plain ones. All of them end as ops of the ``c10d`` or ``_c10d_functional`` namespace. A dispatch
mode sees these, in forward, recompute and backward.
"""

import contextlib
import unittest.mock
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.cluster import run_ranks
from titan_ext.plan.dry_run import dry_run
from titan_ext.plan.live import LiveBytes, MemoryKind, Peak
from titan_ext.plan.stand_ins import as_rank

if TYPE_CHECKING:
    from tests.helpers.training import Run

_KINDS = {
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
}


_stands_for: str | None = None


@contextlib.contextmanager
def recorded_as(kind: str) -> Iterator[None]:
    """Record the collectives within as ``kind``, which they stand for."""
    global _stands_for
    _stands_for = kind
    try:
        yield
    finally:
        _stands_for = None


@dataclass(frozen=True)
class Collective:
    """One collective: its kind, the FSDP unit that issued it ("" for none), forward or backward.

    ``nbytes`` is the larger of what the rank hands over and what it receives. ``meanwhile`` are the
    matrix products that ran after a functional one began and before its result was used.
    """

    kind: str
    unit: str
    in_backward: bool
    nbytes: int = field(default=0, compare=False)
    meanwhile: list[str] = field(default_factory=list, compare=False)

    @property
    def main_module(self) -> str:
        """Of FSDP's own name for the unit: "layers.0.attention, layers.0.attention_norm"."""
        names = self.unit.replace("_checkpoint_wrapped_module.", "").split(", ")
        return next((name for name in names if not name.endswith("norm")), names[0])


class CollectiveTrace(TorchDispatchMode):
    """Records collectives while active, each with the FSDP unit whose group issues it.

    ``operations`` are all operations by name; the profiler sees twice what a dispatch mode passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Collective] = []
        self.operations: Counter[str] = Counter()
        self._unit = ""
        self._patches: list[Any] = []
        self._travelling: dict[int, Collective] = {}

    def __enter__(self):
        for method in ("unshard", "post_backward"):
            self._patches.append(self._name_unit(method))
        return super().__enter__()

    def __exit__(self, exc_type, exc_val, exc_tb):
        for patch in self._patches:
            patch.stop()
        self._patches.clear()
        return super().__exit__(exc_type, exc_val, exc_tb)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        self.operations[name] += 1
        # A fake tensor is asked for its device at every turn.
        uses = bool(self._travelling) and not func.is_view and func.namespace != "prim"
        for x in filter(_is_tensor, tree_leaves(args) if uses else ()):
            self._travelling.pop(_storage_of(x), None)  # whoever uses it has waited
        if name.endswith("mm"):
            for event in self._travelling.values():
                event.meanwhile.append(name)
        if func.namespace in ("c10d", "_c10d_functional"):
            kind = _KINDS.get(func._schema.name.split("::")[1])
            if kind is not None:
                in_backward = torch._C._current_graph_task_id() != -1
                nbytes = max((t.nbytes for t in tree_leaves(args) if _is_tensor(t)), default=0)
                event = Collective(_stands_for or kind, self._unit, in_backward, nbytes)
                self.events.append(event)
                if name == "_c10d_functional::all_to_all_single":
                    out = func(*args, **(kwargs or {}))
                    self._travelling[_storage_of(out)] = event
                    return out
        return func(*args, **(kwargs or {}))

    def _name_unit(self, method: str):
        original = getattr(FSDPParamGroup, method)
        trace = self

        def named(group, *args, **kwargs):
            outer, trace._unit = trace._unit, group._module_fqn or "root"
            try:
                return original(group, *args, **kwargs)
            finally:
                trace._unit = outer

        patch = unittest.mock.patch.object(FSDPParamGroup, method, named)
        patch.start()
        return patch


def _storage_of(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def count(events: list[Collective]) -> Counter[str]:
    """Collectives by kind."""
    return Counter(event.kind for event in events)


@dataclass(frozen=True)
class PlannedStep:
    """A steady step of one rank, on fake tensors."""

    collectives: list[Collective]
    operations: Counter[str]
    unsharded: int
    """The most bytes of unsharded units and all-gather buffers."""
    peak: Peak
    phases: list[Peak]


def planned_steps(folder: Path, *runs: "Run", rank: int = 0) -> list[PlannedStep]:
    """What ``rank`` does in each of ``runs``, which have the same degrees: in one process."""
    return run_ranks(_planned, 1, runs, rank, folder, log_folder=folder / "planned")[0]


def _planned(runs: tuple["Run", ...], rank: int, folder: Path) -> list[PlannedStep]:
    from tests.helpers.training import patched, planned_config  # they import this file

    steps = []
    for run in runs:
        with as_rank(run.world, rank), patched(run):
            config = planned_config(run, folder)
            done = dry_run(config, run.world, rank, as_on_a_gpu=False, step=False)
            done._start_as_second_step()
            live = LiveBytes(done.model_parts, done.optimizers)
            with live, CollectiveTrace() as trace:
                done.run_step(live.begin)
            seen = trace.events, trace.operations, live.most[MemoryKind.UNSHARDED]
            steps.append(PlannedStep(*seen, live.peak, live.phases))
    return steps
