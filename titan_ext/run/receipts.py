# SPDX-License-Identifier: BSD-3-Clause
"""Receipts of what really ran, for ``run.json`` and the log: asked of the modules, not the config.

A config says which attention, which dispatcher and which compiler were wanted. Kernels fall back,
a compiler gives up at its recompile limit, and a communication library chooses for itself. The
bytes that a rank sends are counted in the second step of a run, by hooks that are then gone.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters, get_compilation_metrics
from torch.distributed.distributed_c10d import _world

from titan_ext.base.messages import format_bytes
from titan_ext.base.op_cost import collective_kind
from titan_ext.base.run_check import RunCheck

_HOOK_ID = 0x7E48
_COUNTED_STEP = 2
"""The counted step of this start: the first one makes the optimizer's states."""
_LIMIT = "recompile limit"


class Receipts(RunCheck):
    """Collects what a run can say of itself when it ends."""

    def __init__(self) -> None:
        self._steps = 0
        self._sent: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._peak: dict[str, int] = {}
        self._facts: dict[str, Any] = {}

    def after_build(self, trainer: Any) -> None:
        self._facts = {
            "attention": _types(trainer, "inner_attention"),
            "dispatcher": _types(trainer, "token_dispatcher"),
            "communication": communication(),
        }
        device = torch.get_device_module(trainer.device)
        if not hasattr(device, "max_memory_reserved"):
            return

        def note(*_: Any) -> None:  # before Titan's metrics begin a new peak
            for name in ("allocated", "reserved"):
                peak = getattr(device, f"max_memory_{name}")(trainer.device)
                self._peak[name] = max(self._peak.get(name, 0), peak)

        trainer.optimizers.register_step_post_hook(note)

    @contextlib.contextmanager
    def around_step(self, trainer: Any) -> Iterator[None]:
        self._steps += 1
        is_counted = self._steps == _COUNTED_STEP and dist.is_initialized()
        with self._counting() if is_counted else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        hooked = [g for g in _world.pg_map if g.size() > 1 and hasattr(g, "register_pre_hook")]
        for group in hooked:
            group.register_pre_hook(_HOOK_ID, self._hook(group.size()))
        try:
            yield
        finally:
            for group in hooked:
                group.unregister_pre_hook(_HOOK_ID)

    def _hook(self, ranks: int) -> Any:
        def count(args: Any) -> None:
            kind = collective_kind(args.name.name)
            nbytes = sum(x.nbytes for x in args.input_tensors)
            self._calls[kind] += 1
            self._sent[kind] += sent_nbytes(kind, nbytes, ranks)

        return count

    def receipts(self) -> dict[str, Any]:
        """By subject; what is not known is left out."""
        facts = {**self._facts, "compiled": compiled(), "memory": dict(self._peak)}
        facts["sent"] = {
            kind: {"bytes": self._sent[kind], "calls": calls}
            for kind, calls in self._calls.most_common()
        }
        return {subject: fact for subject, fact in facts.items() if fact}

    def summary(self) -> list[str]:
        return ["ran: " + "; ".join(_words(self.receipts()))] if self._facts else []


def sent_nbytes(kind: str, nbytes: int, ranks: int) -> int:
    """Bytes that a rank sends in a collective of ``nbytes`` of input, by rings."""
    if kind == "all_gather":
        return nbytes * (ranks - 1)
    if kind in ("send", "recv"):
        return nbytes if kind == "send" else 0
    return (2 if kind == "all_reduce" else 1) * nbytes * (ranks - 1) // ranks


def _types(trainer: Any, name: str) -> dict[str, int]:
    """The classes of the submodules or attributes of that name, and how many there are."""
    return Counter(
        type(value).__name__
        for part in trainer.model_parts
        for module in part.modules()
        if (value := getattr(module, name, None)) is not None
    )


def compiled() -> dict[str, Any]:
    """Graphs that Dynamo made, recompiles, and how often it gave up at its limit; {} without it."""
    graphs = counters["stats"]["unique_graphs"]
    if not graphs:
        return {}
    # "3/2" is the third compilation of frame 3; torch keeps the newest records alone.
    ids = [str(m.compile_id).split("/") for m in get_compilation_metrics() if m.compile_id]
    again = {frame: 0 for frame, *_ in ids}
    for frame, *attempt in ids:
        if attempt:
            again[frame] = max(again[frame], int(attempt[0].split("_")[0]))
    hit = sum(n for c in counters.values() for key, n in c.items() if _LIMIT in str(key).lower())
    return {"graphs": graphs, "recompiles": sum(again.values()), "recompile_limit_count": hit}


def communication() -> dict[str, Any]:
    """The backend, its version, and what the environment forces upon it."""
    if not dist.is_initialized():
        return {}
    found: dict[str, Any] = {"backend": dist.get_backend()}
    if "nccl" in found["backend"] and torch.cuda.is_available():
        found["version"] = ".".join(map(str, torch.cuda.nccl.version()))
    chosen = {k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "RCCL_"))}
    return found | ({"environment": chosen} if chosen else {})


def _words(facts: Mapping[str, Any]) -> Iterator[str]:
    for subject in ("attention", "dispatcher"):
        if types := facts.get(subject):
            yield f"{subject} {', '.join(f'{name} x {n}' for name, n in types.items())}"
    if found := facts.get("compiled"):
        limit = found["recompile_limit_count"]
        hit = f", recompile limit hit {limit} times: those functions run eagerly" if limit else ""
        yield f"{found['graphs']} compiled graphs, {found['recompiles']} recompiles{hit}"
    if found := facts.get("communication"):
        yield " ".join([found["backend"], *filter(None, [found.get("version")])])
    if sent := facts.get("sent"):
        each = (f"{kind} {format_bytes(x['bytes'])} in {x['calls']}" for kind, x in sent.items())
        yield f"sent in step {_COUNTED_STEP} of this start: {', '.join(each)}"
    if peak := facts.get("memory"):
        yield ", ".join(f"peak {name} {format_bytes(n)}" for name, n in peak.items())
