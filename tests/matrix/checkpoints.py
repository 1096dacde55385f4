"""The table of checkpoints: saved in one layout, loaded in another.

After loading, every tensor of model and optimizer must equal the saved one: each routed expert by
its name, each as a whole tensor. Then a step on the same global batch must give the loss that the
saved run went on with: to the bit where the arithmetic is the same, closely elsewhere.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from tests.checkpointing import Leg, differing, read_checkpoint, run_leg
from tests.training import Run
from titan_ext.activation_checkpoint import FP8AC

__all__ = ["FAST", "PAIRS", "Pair", "Sources", "problems"]

SAVED_STEP = 2
CLOSE = 2e-3
"""Relative, of a loss in bfloat16 after one step; a permuted expert shows as more."""


@dataclass(frozen=True)
class Pair:
    """A layout that saves, and one that loads what it saved."""

    saved: Run
    loaded: Run
    is_exact: bool = False
    """Whether both compute the next step with the same operations in the same order."""

    def __str__(self) -> str:
        return f"{self.saved} -> {self.loaded}"


@dataclass(frozen=True)
class Source:
    """A run that has saved, and has gone on."""

    checkpoint: Path
    tensors: dict[str, str]
    """As read from the checkpoint without ranks."""
    ranks: list[Leg]


class Sources:
    """Each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Source] = {}

    def get(self, run: Run) -> Source:
        if str(run) not in self._made:
            folder = self._folder / str(run)
            ranks = run_leg(
                run, folder, shared_stream=True, interval=SAVED_STEP, timeout_s=_timeout_s(run)
            )
            checkpoint = folder / "checkpoint" / f"step-{SAVED_STEP}"
            self._made[str(run)] = Source(checkpoint, read_checkpoint(checkpoint), ranks)
        return self._made[str(run)]


def problems(pair: Pair, sources: Sources, folder: Path) -> list[str]:
    """What is wrong after loading, in words; nothing if all is as it should be."""
    source = sources.get(pair.saved)
    ranks = run_leg(
        pair.loaded,
        folder / str(pair),
        look=True,
        shared_stream=True,
        initial_load_path=str(source.checkpoint),
        initial_load_model_only=False,
        timeout_s=_timeout_s(pair.loaded),
    )
    loaded: dict[str, str] = {}
    for rank in ranks:  # the ranks of a pipeline hold different tensors
        loaded |= rank.loaded
    names = differing(loaded, source.tensors)
    found = [f"{len(names)} tensors differ: {', '.join(names[:5])}"] if names else []
    if pair.saved == pair.loaded:
        hashes = [rank.state_hash for rank in ranks], [rank.state_hash for rank in source.ranks]
        found += ["states after the last step differ"] if hashes[0] != hashes[1] else []
    return found + _next_steps(pair, _of_the_last_stage(source.ranks), _of_the_last_stage(ranks))


def _next_steps(pair: Pair, wanted: Leg, leg: Leg) -> list[str]:
    found = []
    if sorted(leg.losses) != list(range(SAVED_STEP + 1, pair.loaded.steps + 1)):
        return [f"went on with steps {sorted(leg.losses)}"]
    for step, loss in leg.losses.items():
        for name, a, b in (
            ("loss", loss, wanted.losses[step]),
            ("gradient norm", leg.grad_norms[step], wanted.grad_norms[step]),
        ):
            is_close = math.isclose(a, b, rel_tol=CLOSE if name == "loss" else 10 * CLOSE)
            if not (a == b if pair.is_exact else is_close):
                found.append(f"{name} of step {step} is {a}, not {b}")
    return found


def _of_the_last_stage(ranks: list[Leg]) -> Leg:
    return max(ranks, key=lambda leg: max(leg.losses.values(), default=-math.inf))


def _timeout_s(run: Run) -> float:
    return 400.0 if run.compiled else 120.0


# From step 2 on, so that nothing is zero that should not be: moments, router biases.
_ONE = Run(parallelize="submodule", layers=2, seq_len=32, steps=3)
_TWO = replace(_ONE, world=2)
_FOUR = replace(_ONE, world=4)


def _moe(model: str) -> list[Pair]:
    one, two, four = (replace(run, model=model) for run in (_ONE, _TWO, _FOUR))
    return [
        Pair(one, replace(four, ep=4)),
        Pair(replace(four, ep=2), two),
        Pair(replace(four, ep=4), replace(four, tp=2, ep=2)),
        Pair(replace(four, tp=2, ep=2), one),
    ]


_EP2 = replace(_TWO, ep=2)
_FP8 = replace(_EP2, ac=FP8AC.Config())
_STOCK = replace(_EP2, parallelize="stock")
PAIRS: list[Pair] = [
    *_moe("deepseek_v3"),
    *_moe("qwen3_moe"),
    # More EP than TP and less; sharded experts along another dim.
    Pair(replace(_FOUR, tp=2, ep=4), replace(_FOUR, ep=2)),
    Pair(replace(_FOUR, ep=1), replace(_FOUR, ep=4, backend="partial_dtensor")),
    # What is no computation: to the bit.
    Pair(_EP2, _EP2, is_exact=True),
    Pair(_EP2, replace(_EP2, backend="partial_dtensor"), is_exact=True),
    Pair(replace(_EP2, backend="partial_dtensor"), _EP2, is_exact=True),
    Pair(_EP2, replace(_EP2, parallelize="block"), is_exact=True),
    Pair(replace(_EP2, parallelize="block"), _EP2, is_exact=True),
    Pair(_EP2, _STOCK, is_exact=True),
    Pair(_STOCK, _EP2, is_exact=True),
    Pair(_STOCK, replace(_FOUR, tp=2, ep=4, backend="partial_dtensor", parallelize="block")),
    Pair(replace(_STOCK, ac="full"), replace(_EP2, parallelize="block"), is_exact=True),
    Pair(_EP2, replace(_EP2, ac="none"), is_exact=True),
    Pair(replace(_EP2, ac="full"), _EP2, is_exact=True),
    # Lossy: the wrappers are others, the state is not.
    Pair(_EP2, _FP8),
    Pair(_FP8, _FP8, is_exact=True),
    Pair(_FP8, replace(_TWO, pp=2, ac="none")),
    Pair(_FP8, replace(_EP2, backend="partial_dtensor")),
    # Pipelines: the stages' names are the whole model's.
    Pair(replace(_TWO, pp=2), _ONE),
    Pair(_EP2, replace(_FOUR, pp=2, ep=2)),
    Pair(replace(_FOUR, pp=2, ep=2), _EP2),
    Pair(
        replace(_TWO, layers=4, pp=2, schedule="Interleaved1F1B"),
        replace(_TWO, layers=4, ep=2),
    ),
    Pair(
        replace(_TWO, layers=4, pp=2, schedule="Interleaved1F1B"),
        replace(_TWO, layers=4, pp=2),
    ),
    # HSDP.
    Pair(replace(_FOUR, dp_replicate=2, ep=2), _FOUR),
    Pair(_FOUR, replace(_FOUR, dp_replicate=2)),
    # Compiled and not, tied weights, multi-token prediction.
    Pair(replace(_EP2, compiled=True, compile_backend="aot_eager"), _EP2),
    Pair(_EP2, replace(_EP2, compiled=True, compile_backend="aot_eager")),
    Pair(replace(_FOUR, model="qwen3"), replace(_ONE, model="qwen3")),
    Pair(replace(_ONE, model="qwen3"), replace(_TWO, model="qwen3", tp=2)),
    Pair(
        replace(_FOUR, model="deepseek_v3_mtp", ep=2), replace(_TWO, model="deepseek_v3_mtp", ep=2)
    ),
    Pair(replace(_TWO, model="gpt_oss", ep=2), replace(_ONE, model="gpt_oss")),
]

FAST: list[Pair] = [
    Pair(_STOCK, _EP2, is_exact=True),
    Pair(_STOCK, replace(_FOUR, tp=2, ep=4, backend="partial_dtensor", parallelize="block")),
    Pair(_FP8, _FP8, is_exact=True),
    Pair(_FP8, replace(_TWO, pp=2, ac="none")),
]
"""The pairs of ``make test``; two sources."""

assert all(pair in PAIRS for pair in FAST)
