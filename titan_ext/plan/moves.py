# SPDX-License-Identifier: BSD-3-Clause
"""Moves of ``tune``: changes of a key or two, and the categories of a step that they act on.

A move names the categories of time (``plan.time``) that it can shorten, and the memory that it can
free. It saves no more than those take, and what the bytes are worth to the recompute: a move that
acts on little need not be tried.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from titan_ext.base.nodes import Nodes
from titan_ext.base.titan.batch import GLOBAL_BATCH as GLOBAL
from titan_ext.base.titan.batch import LOCAL_BATCH as LOCAL
from titan_ext.base.titan.batch import MICROBATCH
from titan_ext.base.titan.parallelism import DEGREES
from titan_ext.parallelize.keys import COMPILE
from titan_ext.plan.memory import LASTING, MemoryKind
from titan_ext.plan.time import Category

Keys = Mapping[str, Any]
"""Values of a config by dotted key."""

EP, REPLICATE, SHARD = (f"parallelism.{DEGREES[at]}" for at in ("ep", "dp_replicate", "dp_shard"))
OFFLOAD_LIMIT = "activation_checkpoint.offload_limit"
SCORES = "activation_checkpoint.score_before_last_gemm"
_HALVES = "parallelism.overlap_exchanges"
_RESHARD = "parallelism.fsdp_reshard_after_forward"
_FACTORS = (8, 4, 2, 0.5, 0.25, 0.125)
"""Factors of the degrees and batches that are tried from one of them."""


@dataclass(frozen=True)
class Facts:
    """Facts of a job, beside its config."""

    ranks: int
    """GPUs."""
    ranks_per_node: int
    """Of them, on a node."""
    experts: int
    """Routed ones of a MoE layer; 0 for a dense model."""
    is_batch_free: bool = False
    """Whether the tokens of a step may change."""
    host_nbytes: int = 0
    """Memory of the host for each rank; 0 where nobody said."""

    def copies(self, now: Keys) -> int:
        """Ranks that get sequences of their own."""
        ranks = self.ranks
        for axis in ("tensor", "context", "pipeline"):
            ranks //= now[f"parallelism.{axis}_parallel_degree"]
        return ranks

    def passes(self, now: Keys) -> int:
        """Forwards of a batch in a step."""
        return max(now[GLOBAL] // (now[LOCAL] * self.copies(now)), 1)

    def sharing(self, now: Keys) -> int:
        """Ranks over which expert parallelism can spread experts."""
        return self.ranks // now["parallelism.pipeline_parallel_degree"] // max(now[REPLICATE], 1)


@dataclass(frozen=True)
class Move:
    """Changes to try."""

    words: str
    """What they do, for the line of a TOML file."""
    changes: Callable[[Keys, Facts], Iterable[Keys]]
    """Of a config as it is now; each is tried by itself."""
    shortens: tuple[Category, ...]
    """The categories of time that they can shorten."""
    frees: tuple[MemoryKind, ...] = ()
    """The memory that they can free, for activations."""


def _values(key: str, *values: Any) -> Callable[[Keys, Facts], Iterator[Keys]]:
    """``key`` with each of ``values``, where the config has it."""

    def changes(now: Keys, _: Facts) -> Iterator[Keys]:
        if key in now:
            yield from ({key: value} for value in values if now[key] != value)

    return changes


def _where(holds: Callable[[Keys, Facts], bool]) -> Any:
    """Decorator of changes: they are offered where ``holds``."""
    return lambda change: lambda now, facts: change(now, facts) if holds(now, facts) else ()


_if_moe = _where(lambda now, facts: bool(facts.experts))
_if_experts = _where(lambda now, facts: bool(facts.experts) and now[EP] > 1)
_if_sharded = _where(lambda now, facts: bool(facts.experts) and facts.sharing(now) > now[EP] > 1)
"""Conditions: there are experts; they exchange tokens; FSDP gathers them, too."""


def _with_batch(now: Keys, facts: Facts, local: int) -> Iterator[Keys]:
    """``local`` sequences at once: as many a step as now, or any with --batch free."""
    copies = facts.copies(now)
    total = now[GLOBAL] if now[GLOBAL] > 0 else now[LOCAL] * copies
    microbatch = now.get(MICROBATCH, 1)
    is_pipelined = now["parallelism.pipeline_parallel_degree"] > 1
    if local < 1 or (is_pipelined and local % microbatch):
        return
    if total % (local * copies) == 0:
        yield {LOCAL: local, GLOBAL: total}
    elif facts.is_batch_free:
        yield {LOCAL: local, GLOBAL: local * copies}


def _batches(now: Keys, facts: Facts) -> Iterator[Keys]:
    for factor in _FACTORS:
        if (local := int(now[LOCAL] * factor)) == now[LOCAL] * factor:
            yield from _with_batch(now, facts, local)


def _ep(now: Keys, facts: Facts) -> Iterator[Keys]:
    here, sharing = now[EP], facts.sharing(now)
    degrees = {here * factor for factor in _FACTORS} | {facts.ranks_per_node}
    for degree in sorted(int(d) for d in degrees - {here} if d >= 1):
        if facts.experts and facts.experts % degree == 0 and sharing % degree == 0:
            yield {EP: degree}


def _replicate(now: Keys, facts: Facts) -> Iterator[Keys]:
    here, ranks = max(now[REPLICATE], 1), facts.sharing({**now, REPLICATE: 1})
    degrees = {here * factor for factor in _FACTORS} | {facts.ranks // facts.ranks_per_node}
    for copies in sorted(int(d) for d in degrees - {here} if d >= 1):
        if ranks % copies == 0 and ranks // copies > 1 and (ranks // copies) % now[EP] == 0:
            yield {REPLICATE: copies, SHARD: -1}


def _halves(now: Keys, facts: Facts) -> Iterator[Keys]:
    if now.get(_HALVES, "halves") == "halves":
        return
    if now[LOCAL] > 1:
        yield {_HALVES: "halves"}
    else:
        yield from ({**batch, _HALVES: "halves"} for batch in _with_batch(now, facts, 2))


def _shared_experts(now: Keys, _: Facts) -> Iterator[Keys]:
    if now.get(_HALVES) == "none":
        yield {_HALVES: "shared_experts"}


def _rows(now: Keys, facts: Facts) -> Iterator[Keys]:
    values = ("rank", "node") if Nodes.agreed().among(now[EP]) else ("rank",)
    yield from _values("parallelism.exchange_rows", *values)(now, facts)


def _offload(now: Keys, facts: Facts) -> Iterator[Keys]:
    if facts.host_nbytes and not now.get(OFFLOAD_LIMIT):
        yield {OFFLOAD_LIMIT: f"{facts.host_nbytes >> 30}GiB"}


def _reshard(now: Keys, _: Facts) -> Iterator[Keys]:
    """Values that are not so already: "default" is "never" in a pipeline, else "always"."""
    is_pipelined = now["parallelism.pipeline_parallel_degree"] > 1
    other = "always" if is_pipelined else "never"
    if _RESHARD in now:
        yield {_RESHARD: "default" if now[_RESHARD] == other else other}


_SENDS = (Category.EXCHANGES, Category.HOST)
_FSDP = (Category.GATHERS, Category.REDUCTIONS, Category.COPIES, Category.COLLECTIVES)
_KERNELS = (Category.FORWARD, Category.BACKWARD, Category.LOSS)
_FSDP_KEY = "parallelism.fsdp_"

_UNSHARDED = (MemoryKind.UNSHARDED, MemoryKind.REDUCE)
_HELD = (MemoryKind.EXACT, MemoryKind.FLOAT8, MemoryKind.ALL_TO_ALL, MemoryKind.TEMPORARY)


def _compiled(now: Keys, _: Facts) -> Iterator[Keys]:
    """On and off; whether other keys allow it, the checks of a config say (parallelize.limits)."""
    if COMPILE in now:
        both = {"compile.components": ["model", "loss"]} if not now[COMPILE] else {}
        yield {COMPILE: not now[COMPILE], **both}


MOVES = (
    Move(
        "blocks and the loss are compiled: fewer kernels, and fewer calls of the host",
        _compiled,
        (Category.HOST, *_KERNELS, Category.RECOMPUTE),
    ),
    Move(
        "one CUDA graph has forward and backward: the host gives out one",
        _values("training.disable_cuda_graphs", False, True),
        (Category.HOST,),
    ),
    Move(
        "half of a batch computes while tokens of the other travel",
        _if_experts(_halves),
        _SENDS,
    ),
    Move(
        "a token travels once to a rank or a node where several of its experts live",
        _if_experts(_rows),
        _SENDS,
    ),
    Move(
        "tokens travel in float8",
        _if_experts(_values("parallelism.exchange_dtype", "float8")),
        _SENDS,
    ),
    Move(
        "experts are gathered in float8",
        _if_sharded(_values(f"{_FSDP_KEY}float8_all_gather", "experts")),
        (Category.GATHERS, Category.REDUCTIONS),
        _UNSHARDED,
    ),
    Move(
        "the matrices of blocks are gathered in float8",
        _values(f"{_FSDP_KEY}float8_all_gather", "blocks"),
        (Category.GATHERS,),
    ),
    Move(
        "gradients of experts travel in bfloat16, and are summed in float32",
        _if_sharded(_values(f"{_FSDP_KEY}expert_reduce_scatter", "bfloat16")),
        (Category.GATHERS, Category.REDUCTIONS),
        _UNSHARDED,
    ),
    Move(
        "routing scores before the last GEMM of experts, whose output need not be kept",
        _if_moe(_values(SCORES, True)),
        (Category.RECOMPUTE, Category.EXCHANGES),
        _HELD,
    ),
    Move(
        "whether a recompute sends tokens again",
        _if_experts(_values("parallelism.save_all_to_all", "always", "never")),
        (*_SENDS, Category.RECOMPUTE),
        (MemoryKind.ALL_TO_ALL,),
    ),
    Move(
        "shared experts run while tokens travel back",
        _if_experts(_shared_experts),
        _SENDS,
    ),
    Move(
        "what one FSDP unit is",
        _values(f"{_FSDP_KEY}wrap", "auto", "submodule", "experts", "block"),
        (Category.GATHERS, Category.REDUCTIONS, Category.COPIES),
        _UNSHARDED,
    ),
    Move(
        "whether units are gathered again in backward",
        _reshard,
        (Category.GATHERS, Category.COPIES),
        _UNSHARDED,
    ),
    Move(
        "how many units are gathered ahead",
        _values(f"{_FSDP_KEY}prefetch", "auto", 1, 2),
        (Category.GATHERS,),
        _UNSHARDED,
    ),
    Move(
        "activations wait on the host",
        _offload,
        (Category.RECOMPUTE, Category.CODEC),
        _HELD,
    ),
    Move(
        "sequences at once on a rank: more of them are fewer passes for the same tokens",
        _batches,
        (*_SENDS, *_FSDP, *_KERNELS, Category.RECOMPUTE, Category.BUBBLE),
        _HELD,
    ),
    Move(
        "ranks among which tokens travel to their experts",
        _ep,
        (*_SENDS, *_FSDP, *_KERNELS, Category.OPTIMIZER),
        (*LASTING, *_UNSHARDED),
    ),
    Move(
        "copies of the model, each sharded over fewer ranks",
        _replicate,
        (*_FSDP, Category.OPTIMIZER),
        (*LASTING, *_UNSHARDED),
    ),
)


Choices = Mapping[Move, Keys]
"""The changes of a candidate; each move has one at most."""


def with_move(choices: Choices, move: Move, change: Keys) -> Choices:
    """``choices`` and one more, which wins where two change a key."""
    return {**{other: keys for other, keys in choices.items() if other is not move}, move: change}


def keys_of(choices: Choices, without: Keys) -> dict[str, Any]:
    """All values that ``choices`` change, but for those that the config has already."""
    changed = {key: value for keys in choices.values() for key, value in keys.items()}
    return {key: value for key, value in changed.items() if without.get(key) != value}
