"""The table: every layout in which a run of ours must equal stock TorchTitan's, bit for bit.

A row is one of our runs; its reference is the same run with Titan's own parallelize function, and
rows that differ in nothing else share it. New features add rows here, not code.
"""

from dataclasses import replace
from itertools import product
from typing import Any

from tests.training import Run

__all__ = ["DRY", "FAST", "ROWS", "reference_of"]

_LAYOUTS = [(world, ep) for world in (1, 2, 4) for ep in (1, 2, 4) if ep <= world]
_BACKENDS = ("spmd_types", "partial_dtensor")
_WRAPS = ("block", "submodule")

_MOE = [
    Run(model=model, world=world, ep=ep, backend=backend, parallelize=wrap)
    for model, (world, ep), backend, wrap in product(
        ("deepseek_v3", "qwen3_moe"), _LAYOUTS, _BACKENDS, _WRAPS
    )
]
_DENSE = [  # tied embeddings and head
    Run(model="qwen3", world=world, backend=backend, parallelize=wrap)
    for world, backend, wrap in product((1, 2, 4), _BACKENDS, _WRAPS)
]
_MTP = [
    Run(model="deepseek_v3_mtp", world=world, ep=ep, backend=backend, parallelize=wrap)
    for (world, ep), backend, wrap in product([(2, 2), (4, 2)], _BACKENDS, _WRAPS)
]
_ACTIVATION_CHECKPOINTING = [
    Run(world=2, ep=2, ac=ac, backend=backend, parallelize=wrap)
    for ac, backend, wrap in product(("none", "full"), _BACKENDS, _WRAPS)
]
_FP32 = [
    Run(world=2, ep=ep, param_dtype="float32", parallelize=wrap)
    for ep, wrap in product((1, 2), _WRAPS)
]
_OTHER_DECODERS = [
    Run(model=model, world=2, ep=ep, backend=backend, parallelize=wrap)
    for (model, ep), backend, wrap in product(
        [("llama3", 1), ("gpt_oss", 2), ("kimi_text", 2)], _BACKENDS, _WRAPS
    )
]
_OTHER_DECODERS += [  # supports one backend only
    Run(model="muse_glimmer", world=2, parallelize=wrap) for wrap in _WRAPS
]
_PIPELINE = [
    Run(world=world, ep=ep, pp=2, backend=backend, parallelize=wrap)
    for (world, ep), backend, wrap in product([(2, 1), (4, 2)], _BACKENDS, _WRAPS)
]
_TENSOR = [
    Run(world=world, ep=ep, tp=2, backend=backend, parallelize=wrap)
    for (world, ep), backend, wrap in product([(2, 2), (4, 4)], _BACKENDS, _WRAPS)
]
# Two copies of two shards. With EP 2 experts have no shard axis left: one all-reduce, no gather.
_HSDP = [
    Run(world=4, dp_replicate=2, ep=ep, backend=backend, parallelize=wrap)
    for ep, backend, wrap in product((1, 2), _BACKENDS, _WRAPS)
]
_ACCUMULATION = [
    Run(world=2, ep=2, accumulate=2, backend=backend, parallelize="submodule")
    for backend in _BACKENDS
]
_SETTINGS: list[dict[str, Any]] = [
    {"reshard": "always"},
    {"reshard": "never"},
    {"prefetch": 0},
    {"prefetch": 3, "prefetch_backward": "8MiB"},
]
_RESHARD_AND_PREFETCH = [
    replace(row, parallelize=wrap, backend=backend, **setting)
    for row, backend, wrap in product(
        [Run(world=2), Run(world=2, ep=2), Run(world=4, ep=2, pp=2)], _BACKENDS, _WRAPS
    )
    for setting in _SETTINGS
]
_RESHARD_AND_PREFETCH += [  # to a smaller world, which torch offers with one backend
    Run(world=world, backend="partial_dtensor", parallelize=wrap, reshard=2, prefetch=2)
    for world, wrap in product((2, 4), _WRAPS)
]
_RESHARD_AND_PREFETCH += [
    Run(
        world=4,
        ep=2,
        backend=backend,
        parallelize="submodule",
        prefetch=2,
        reshard_groups=(("attention", "never"), ("layers.2.*", "always"), ("head", "always")),
    )
    for backend in _BACKENDS
]
_CONVERTERS = [
    Run(
        world=world,
        tp=tp,
        ep=ep,
        converters=("float8_linear",),
        backend=backend,
        parallelize=wrap,
    )
    for (world, tp, ep), backend, wrap in product(
        [(2, 1, 1), (2, 1, 2), (4, 2, 2)], _BACKENDS, _WRAPS
    )
    if wrap == "submodule" or world == 2
]
_CONTEXT_LAYOUTS: list[dict[str, Any]] = [
    {"world": 2},
    {"world": 2, "ep": 2},
    {"world": 4, "ep": 2},
    {"world": 4, "dp_replicate": 2},
    {"world": 4, "tp": 2, "ep": 4},
    {"world": 4, "pp": 2},
]
# FlexAttention as plain operations; half of a sequence must hold two blocks of a mask (128).
_FLEX: dict[str, Any] = {"attention": "flex", "seq_len": 512, "global_batch": 2}
_CONTEXT = [
    Run(cp=2, backend=backend, parallelize=wrap, **layout, **_FLEX)
    for layout, backend, wrap in product(_CONTEXT_LAYOUTS, _BACKENDS, _WRAPS)
    if wrap == "submodule" or layout["world"] == 2
]
# Compiled sub-module units fuse other operations than compiled blocks do: see test_compile.py.
_COMPILED = [
    Run(model=model, world=2, ep=2, ac=ac, compiled=True, parallelize="block")
    for model, ac in product(("deepseek_v3", "qwen3_moe"), ("none", "selective"))
]


def _row(run: Run) -> Run:
    """Five steps, and sums whose order is defined where torch or gloo leaves it open."""
    return replace(run, steps=5, exact_sums=run.world > 2 or run.param_dtype == "float32")


ROWS: list[Run] = [
    _row(run)
    for runs in (
        _MOE,
        _DENSE,
        _MTP,
        _OTHER_DECODERS,
        _PIPELINE,
        _TENSOR,
        _HSDP,
        _ACCUMULATION,
        _RESHARD_AND_PREFETCH,
        _ACTIVATION_CHECKPOINTING,
        _FP32,
        _COMPILED,
        _CONVERTERS,
        _CONTEXT,
    )
    for run in runs
]

_DRY_LAYOUTS: list[dict[str, Any]] = [
    {"world": 16, "ep": 4, "cp": 2, "dp_replicate": 2, "attention": "flex"},
    {"world": 16, "ep": 4, "cp": 4, "tp": 2, "attention": "flex"},
    {"world": 8, "ep": 4, "converters": ("float8_linear", "float8_experts")},
    {"world": 8, "ep": 4, "converters": ("mxfp8_linear", "mxfp8_experts")},
    {"world": 8, "ep": 4, "converters": ("nvfp4_linear",)},
]
DRY: list[Run] = [
    Run(parallelize=wrap, backend=backend, **layout)
    for layout, backend, wrap in product(_DRY_LAYOUTS, _BACKENDS, _WRAPS)
]
"""What only a GPU, or more of them, can train: parallelized on the meta device (``dry``)."""

FAST: list[Run] = [
    _row(run)
    for run in [
        Run(world=1, parallelize="submodule"),
        Run(world=2, ep=2, parallelize="block"),
        Run(world=2, ep=2, parallelize="submodule"),
        Run(world=2, ep=2, backend="partial_dtensor", parallelize="submodule"),
        Run(world=4, ep=2, parallelize="submodule"),
        Run(world=2, pp=2, parallelize="submodule"),
        Run(world=4, dp_replicate=2, ep=2, parallelize="submodule"),
        Run(world=4, ep=4, backend="partial_dtensor", parallelize="submodule"),
        Run(model="qwen3", world=2, parallelize="submodule"),
        Run(model="qwen3_moe", world=2, ep=2, parallelize="submodule"),
        Run(model="qwen3_moe", world=4, ep=1, parallelize="submodule"),
        Run(model="deepseek_v3_mtp", world=2, ep=2, parallelize="submodule"),
        Run(world=2, ep=2, ac="full", parallelize="submodule"),
        Run(world=2, ep=2, parallelize="submodule", reshard="never"),
        Run(world=4, ep=2, pp=2, parallelize="submodule", reshard="always"),
        Run(world=2, ep=2, parallelize="submodule", prefetch=3, prefetch_backward="8MiB"),
        Run(world=4, backend="partial_dtensor", parallelize="submodule", reshard=2, prefetch=2),
        Run(world=2, ep=2, converters=("float8_linear",), parallelize="submodule"),
        Run(world=2, ep=2, cp=2, parallelize="submodule", **_FLEX),
    ]
]
"""The rows of ``make test``: each axis at least once. All are rows of the matrix."""

assert set(FAST) <= set(ROWS)


def reference_of(row: Run) -> Run:
    """The stock run that ``row`` must equal."""
    return replace(
        row,
        parallelize="stock",
        reshard="default",
        reshard_groups=(),
        prefetch=1,
        prefetch_backward=None,
    )
