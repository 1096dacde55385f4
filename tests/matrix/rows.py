"""The table: every layout in which a run of ours must equal stock TorchTitan's, bit for bit.

A row is one of our runs; its reference is the same run with Titan's own parallelize function. Rows
that differ in nothing else share it. New features add ``layouts``, not code. What is lossy,
and so equals no stock run, has our own run with whole-block units as its reference: the units
change nothing there either. Layouts that do not run at all are in ``tests.matrix.refused``.
"""

from dataclasses import replace
from itertools import product
from typing import Any

from tests.helpers.training import Run
from tests.matrix.features import is_lossy
from tests.matrix.layouts import BACKENDS, GROUPS, SUBMODULE, WRAPS


def _row(run: Run) -> Run:
    """Five steps, and sums whose order is defined where torch or gloo leaves it open."""
    return replace(run, steps=5, exact_sums=run.world > 2 or run.param_dtype == "float32")


ROWS: list[Run] = [_row(run) for runs in GROUPS for run in runs]

_DRY_LAYOUTS: list[dict[str, Any]] = [
    {"world": 16, "ep": 4, "cp": 2, "dp_replicate": 2, "attention": "flex"},
    {"world": 16, "ep": 4, "cp": 4, "tp": 2, "attention": "flex"},
    {"world": 8, "ep": 4, "converters": ("float8_linear", "float8_experts")},
    {"world": 8, "ep": 4, "converters": ("mxfp8_linear", "mxfp8_experts")},
    {"world": 8, "ep": 4, "converters": ("nvfp4_linear",)},
]
DRY: list[Run] = [
    Run(parallelize=wrap, backend=backend, **layout)
    for layout, backend, wrap in product(_DRY_LAYOUTS, BACKENDS, WRAPS)
    # Under spmd_types they would lose their float8: components.float8_linears refuses that.
    if "float8_experts" not in layout.get("converters", ()) or backend == "partial_dtensor"
]
"""What only a GPU, or more of them, can train: parallelized on the meta device (``dry``)."""

EXPERTS_TUNED = Run(
    world=4,
    ep=2,
    parallelize="experts",
    prefetch="auto",
    reduce_scatter_buffers=2,
)
FAST: list[Run] = [
    _row(run)
    for run in [
        Run(world=1, parallelize="submodule"),
        Run(world=2, ep=2, parallelize="block"),
        Run(world=2, ep=2, parallelize="submodule"),
        Run(world=4, ep=2, parallelize="submodule"),
        EXPERTS_TUNED,
        Run(world=2, pp=2, parallelize="submodule"),
        Run(model="qwen3", world=2, parallelize="submodule"),
        Run(world=2, ep=2, tp=2, sequence_parallel=False, **SUBMODULE[1]),
    ]
]
"""The rows that the tests repeat."""

assert set(FAST) <= set(ROWS)


def reference_of(row: Run) -> Run:
    """The run that ``row`` must equal: stock Titan's; in float8, ours with whole-block units."""
    on_device = {"on_host": "selective", "on_host_all": "none"}
    return replace(
        row,
        parallelize="block" if is_lossy(row) else "stock",
        ac=on_device.get(row.ac, row.ac) if isinstance(row.ac, str) else row.ac,
        backend="partial_dtensor" if row.lora else row.backend,
        reshard="default",
        reshard_groups=(),
        prefetch=1,
        reduce_scatter_buffers=1,
        # In float8, what is saved is not what is sent again.
        save_all_to_all=row.save_all_to_all if is_lossy(row) else "auto",
        expert_reduce_scatter=None,
    )
