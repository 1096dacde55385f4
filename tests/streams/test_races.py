"""No feature races with FSDP2, with exchanges, or with another feature; a planted race is found."""

import contextlib
import functools
import itertools
import sys
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.training import Run
from tests.streams.sanitizer import Step, sanitized
from titan_ext.activation_checkpoint import blocks
from titan_ext.components import exchange
from titan_ext.fp8 import offload, saved_tensors

patch = unittest.mock.patch.object
BASE = Run(world=8, ep=4, layers=2, narrow=True, global_batch=16, parallelize="submodule")
QUANTIZE, EXCHANGE = "titan_ext::float8_quantize", "_c10d_functional::all_to_all_single"
TO_HOST = "aten::copy_"
FEATURES: dict[str, tuple[dict[str, Any], str]] = {
    "stock": ({"parallelize": "stock"}, ""),
    "units": ({}, ""),
    "experts": ({"parallelize": "experts", "prefetch": 2, "reduce_scatter_buffers": 2}, ""),
    "float8 checkpoints": ({"ac": "fp8"}, QUANTIZE),
    "no recompute": ({"ac": "fp8_no_recompute"}, QUANTIZE),
    "offload": ({"ac": "on_host_all"}, TO_HOST),
    "halves": ({"overlap_exchanges": "halves"}, EXCHANGE),
    "rows": ({"exchange_rows": "rank"}, EXCHANGE),
    "float8 tokens": ({"exchange_dtype": "float8"}, QUANTIZE),
    "saved exchanges": ({"save_all_to_all": "always"}, EXCHANGE),
    "float8 gathers": ({"float8_all_gather": "blocks"}, QUANTIZE),
    "bf16 reductions": ({"expert_reduce_scatter": "bfloat16"}, "c10d::alltoall_base_"),
    "replicated": ({"replicate": ("router", "norms")}, "c10d::allreduce_"),
    "accumulation": ({"accumulate": 2, "reshard": "never"}, ""),
}
"""Keys of ours, and an operation of which each runs another number than units alone do."""


def _merged(names: Sequence[str]) -> Run:
    """A run with several features."""
    return replace(BASE, **dict(item for name in names for item in FEATURES[name][0].items()))


def _go_together(*names: str) -> bool:
    keys = [key for name in names for key in FEATURES[name][0]]
    return len(keys) == len(set(keys))


def _slow(run: Run, name: str) -> Any:
    return pytest.param(run, id=name, marks=pytest.mark.slow)


def _is_clean(step: Step) -> None:
    assert step.found == set()
    assert step.unwaited == []


TOGETHER = (
    ("stock",),
    ("experts", "bf16 reductions", "accumulation", "offload"),
    ("halves", "rows", "float8 tokens", "no recompute", "replicated"),
    ("float8 checkpoints", "saved exchanges", "float8 gathers"),
)


def test_no_feature_races(tmp_path: Path):
    """Several at once; each engages."""
    units, *steps = sanitized(tmp_path, BASE, *map(_merged, TOGETHER))
    for names, step in zip(TOGETHER, steps, strict=True):
        _is_clean(step)
        for operation in filter(None, (FEATURES[name][1] for name in names)):
            assert step.operations[operation] != units.operations[operation], (names, operation)


@pytest.mark.slow
def test_no_feature_races_by_itself(tmp_path: Path):
    runs = [_merged([name]) for name in FEATURES]
    steps = dict(zip(FEATURES, sanitized(tmp_path, *runs), strict=True))
    units = steps["units"].operations
    for name, (_, operation) in FEATURES.items():
        _is_clean(steps[name])
        assert not operation or steps[name].operations[operation] != units[operation], name


@pytest.mark.slow
@pytest.mark.parametrize("first", [*FEATURES][2:-1])
def test_no_pair_of_features_races(first: str, tmp_path: Path):
    later = [*itertools.dropwhile(lambda name: name != first, FEATURES)][1:]
    pairs = [(first, other) for other in later if _go_together(first, other)]
    for pair, step in zip(pairs, sanitized(tmp_path, *map(_merged, pairs)), strict=True):
        assert (pair, step.found, step.unwaited) == (pair, set(), [])


@pytest.mark.parametrize(
    "run",
    [
        _slow(replace(BASE, tp=2, ep=2, ac="fp8", exchange_dtype="float8"), "TP"),
        _slow(replace(BASE, backend="partial_dtensor", ac="fp8", exchange_rows="rank"), "DTensor"),
        _slow(replace(BASE, pp=2, ep=2, layers=4, ac="fp8", exchange_rows="rank"), "PP"),
        replace(BASE, dp_replicate=2, ep=2, ac="on_host_all", overlap_exchanges="halves"),
    ],
    ids=str,
)
def test_no_layout_races(run: Run, tmp_path: Path):
    (step,) = sanitized(tmp_path, run)
    _is_clean(step)


@pytest.mark.slow
def test_experts_of_no_rank_and_rows_of_nodes(tmp_path: Path):
    """Of 5 experts the last of 8 ranks has none; 16 ranks are two nodes."""
    empty = replace(BASE, ep=1, experts=5, parallelize="experts", ac="fp8", replicate=("router",))
    _is_clean(sanitized(tmp_path, empty, rank=7)[0])
    nodes = replace(BASE, world=16, ep=16, experts=32, exchange_rows="node", ac="fp8")
    halves = replace(nodes, overlap_exchanges="halves", global_batch=32)
    for step in sanitized(tmp_path, nodes, halves):
        _is_clean(step)


# -- planted races: what is left out, and in whose function


@contextlib.contextmanager
def no_wait(method: str, *callers: str) -> Iterator[None]:
    """Streams whose ``method`` does nothing where one of ``callers`` calls it."""
    real = getattr(torch.cpu.Stream, method)

    def wait(stream: Any, other: Any) -> None:
        if sys._getframe(1).f_code.co_name not in callers:
            real(stream, other)

    with patch(torch.cpu.Stream, method, wait):
        yield


@contextlib.contextmanager
def lane_without_wait() -> Iterator[None]:
    with no_wait("wait_stream", "copy"):
        yield


@contextlib.contextmanager
def lane_never_joined(*callers: str) -> Iterator[None]:
    join = offload.Lane.join

    def skip(lane: Any, event: Any) -> None:
        if sys._getframe(1).f_code.co_name not in callers:
            join(lane, event)

    with patch(offload.Lane, "join", skip):
        yield


def arrived_too_early() -> Any:
    return patch(exchange, "wait_tensor", lambda x: x)


@contextlib.contextmanager
def stored_too_early() -> Iterator[None]:
    """Where an exchange has begun, without the store's own wait."""
    with (
        patch(blocks, "is_exchange", lambda op: False),
        patch(saved_tensors, "_get_work_registry_size", lambda: 0),
    ):
        yield


OFFLOADS = replace(BASE, ac="on_host_all", layers=4)
HALVES = replace(BASE, overlap_exchanges="halves")
KEEPS = replace(BASE, ac="fp8", save_all_to_all="always")
PLANTED: dict[str, tuple[Run, Callable[[], Any], str, str]] = {
    "FSDP2's copy-out": (
        BASE,
        functools.partial(no_wait, "wait_event", "foreach_all_gather_copy_out"),
        "read after write",
        "_allgather_base_",
    ),
    "FSDP2's reduction": (
        BASE,
        functools.partial(no_wait, "wait_stream", "foreach_reduce"),
        "read after write",
        "foreach_reduce",
    ),
    "FSDP2's buffers": (
        BASE,
        # As torch 2.14 calls it, and 2.15.
        functools.partial(
            no_wait,
            "wait_event",
            "_wait_all_gather_streams_on_event",
            "wait_all_gather_streams_on_event",
        ),
        "reuse after free",
        "",
    ),
    "a copy that does not wait for its source": (
        OFFLOADS,
        lane_without_wait,
        "read after write",
        "copy",
    ),
    "memory that is freed before it has left": (
        OFFLOADS,
        functools.partial(lane_never_joined, "free"),
        "reuse after free",
        "copy",
    ),
    "a copy back that nobody waits for": (
        OFFLOADS,
        functools.partial(lane_never_joined, "get"),
        "read after write",
        "copy",
    ),
    "halves": (HALVES, arrived_too_early, "read after write", "start"),
    "a store of what has not come": (
        KEEPS,
        stored_too_early,
        "read after write",
        "all_to_all_single",
    ),
}
"""A run, what is left out, the kind of race, and where its first access is."""


def test_planted_races_are_found(tmp_path: Path):
    """In one test: workers of pytest-xdist would run the steps once each."""
    runs, faults = zip(*((run, fault) for run, fault, _, _ in PLANTED.values()), strict=True)
    steps = sanitized(tmp_path, *runs, faults=faults)
    for (name, (_, _, kind, where)), step in zip(PLANTED.items(), steps, strict=True):
        assert [x for x in step.found if x.kind == kind and where in x.where], name
