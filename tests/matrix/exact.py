"""Runs of ours that must equal stock TorchTitan's to the bit; verify is not asked.

A reference is the same run with Titan's own parallelize function. Those that differ in nothing else
share it. Most runs are the exact rows of the table; the others have what a TOML file of titan_ext,
or verify's copy of a job, cannot have: compiled blocks, ranks without a row, models of Titan's
tests.
"""

import tomllib
from dataclasses import replace
from itertools import product
from typing import Any

from tests.helpers.training import KEYS, Result, Run
from tests.matrix.rows import EXACT, REFUSED, rows
from tests.verify.search import Job, toml_of

BACKENDS = ("spmd_types", "partial_dtensor")
WRAPS = ("block", "submodule")
_FLEX: dict[str, Any] = {"attention": "flex", "seq_len": 512, "global_batch": 2}
"""FlexAttention as plain operations; half of a sequence must hold two blocks of a mask (128)."""
_FIELDS = {key.partition(".")[2]: name for key, name in KEYS.items()}
_FIELDS |= {"fsdp_wrap": "parallelize", "fsdp_reshard_groups": "reshard_groups"}


def run_of(job: Job) -> Run:
    """The run that a row with exact features describes."""
    written = tomllib.loads(toml_of(job))
    keys: dict[str, Any] = {_FIELDS[key]: value for key, value in written["parallelism"].items()}
    checkpoint = written.get("activation_checkpoint", {})
    policy = checkpoint.get("policy", "selective")
    policy = "on_host" if policy == "fp8" else policy
    groups = tuple(keys.pop("reshard_groups", {}).items())
    usual: dict[str, Any] = {"parallelize": "submodule", "world": int(job["ranks"]), "ac": policy}
    usual |= {"layers": 4} if keys.get("pp", 1) > 1 else {}
    usual |= _FLEX if keys.get("cp", 1) > 1 else {}
    return Run(**(usual | keys), reshard_groups=groups)


def _row(run: Run) -> Run:
    """Five steps, and sums whose order is defined where torch or gloo leaves it open."""
    return replace(run, steps=5, exact_sums=run.world > 2 or run.param_dtype == "float32")


_UNITS: list[dict[str, Any]] = [
    {"backend": backend, "parallelize": wrap} for backend, wrap in product(BACKENDS, WRAPS)
]
_EACH_ONCE = _UNITS[1:3]  # each backend, and each kind of unit
EXPERTS_TUNED = Run(world=4, ep=2, parallelize="experts", prefetch="auto", reduce_scatter_buffers=2)
"""What "auto" takes across nodes."""
_OTHERS = [
    EXPERTS_TUNED,
    *(replace(run, **units) for run in (Run(), Run(world=2)) for units in _EACH_ONCE),
    *(  # tied embeddings and head, prediction ahead, models that no row has
        replace(run, **units)
        for run in (
            Run(model="qwen3", world=2),
            Run(model="qwen3", world=2, tp=2),
            Run(model="deepseek_v3_mtp", world=2, ep=2, tp=2),
            Run(model="kimi_text", world=2, ep=2),
        )
        for units in _EACH_ONCE
    ),
    *(Run(model="muse_glimmer", world=2, parallelize=wrap) for wrap in WRAPS),  # one backend
    # Ranks without a row: of 5 experts on 4 ranks the last has neither one nor a row of the router.
    *(
        replace(run, **units)
        for run in (Run(world=4, experts=5), Run(world=4, experts=6, ep=2))
        for units in _UNITS
    ),
    Run(world=4, experts=5, ac="full", parallelize="submodule"),
    Run(world=4, experts=5, cpu_offload=True, parallelize="submodule"),
    Run(world=4, experts=5, optimizer="muon", parallelize="submodule"),
    Run(world=4, experts=6, ep=2, ac="on_host", parallelize="submodule"),
    Run(world=4, experts=5, reshard=2, backend="partial_dtensor", parallelize="submodule"),
    Run(model="qwen3_moe", world=4, experts=9, parallelize="submodule"),
    Run(model="gpt_oss", world=4, experts=5, parallelize="submodule"),
    # What a TOML row leaves out, or verify does without in its copy.
    *(
        replace(run, **units)
        for run in (
            Run(world=2, ep=2, cpu_offload=True),
            Run(world=2, ep=2, optimizer="muon"),
            Run(world=2, pp=2, optimizer="muon"),
            Run(world=2, ep=2, lora=8),
            Run(world=2, ep=2, converters=("float8_linear",)),
            Run(world=4, ep=2, tp=2, converters=("float8_linear",)),
            Run(world=4, ep=2, dp_replicate=2, accumulate=2, global_batch=8),
            Run(world=2, ep=2, param_dtype="float32"),
        )
        for units in _EACH_ONCE
    ),
    Run(world=2, dp_replicate=2, parallelize="submodule"),  # copies only: DDP
    Run(
        world=8,
        pp=2,
        tp=2,
        ep=4,
        layers=4,
        schedule="Interleaved1F1B",
        parallelize="submodule",
    ),
    *(
        Run(world=2, pp=2, layers=4, chunked_loss=False, schedule=schedule, ac=ac, **units)
        for schedule, ac in (("InterleavedZeroBubble", "none"), ("ZBVZeroBubble", "full"))
        for units in _EACH_ONCE
    ),
    Run(world=2, pp=2, layers=4, accumulate=2, schedule="Interleaved1F1B", parallelize="block"),
    *(
        Run(world=4, backend="partial_dtensor", parallelize=wrap, reshard=2, prefetch=2)
        for wrap in WRAPS
    ),
    # Compiled sub-module units fuse other operations than compiled blocks do.
    *(
        replace(run, compiled=True, parallelize="block", overlap_exchanges="none")
        for run in (
            Run(world=2, ep=2),
            Run(model="qwen3_moe", world=2, ep=2, ac="none"),
            Run(world=2, tp=2, ep=2),
            Run(world=2, tp=2, ac="none", backend="partial_dtensor"),
            Run(world=4, dp_replicate=2, ep=2),
            Run(world=2, pp=2, ac="none"),
        )
    ),
]
RUNS: list[Run] = [
    *(
        _row(run_of(job))
        for name, job in rows().items()
        if name.partition(", ")[0] in EXACT and name not in REFUSED
    ),
    *map(_row, _OTHERS),
]
FAST: list[Run] = [
    _row(run)
    for run in (
        Run(world=2, ep=2, parallelize="submodule"),
        Run(world=4, ep=2, parallelize="submodule"),
        EXPERTS_TUNED,
        Run(world=2, pp=2, parallelize="submodule"),
        Run(model="qwen3", world=2, parallelize="submodule"),
        Run(
            world=2,
            ep=2,
            tp=2,
            sequence_parallel=False,
            backend="partial_dtensor",
            parallelize="submodule",
        ),
    )
]
"""Those that the tests repeat."""


def reference_of(run: Run) -> Run:
    """The run of stock Titan's that ``run`` must equal.

    Stock loses the frozen flags of LoRA under spmd_types: there it has partial_dtensor.
    """
    return replace(
        run,
        parallelize="stock",
        ac="selective" if run.ac == "on_host" else run.ac,
        backend="partial_dtensor" if run.lora else run.backend,
        reshard="default",
        reshard_groups=(),
        prefetch=1,
        reduce_scatter_buffers=1,
        save_all_to_all="auto",
        expert_reduce_scatter=None,
    )


def differences(ours: Result, stock: Result) -> list[str]:
    """What differs, in words; nothing if the runs are equal bit for bit."""
    found = []
    for name in ("losses", "grad_norms"):
        a, b = getattr(ours, name), getattr(stock, name)
        if a != b:
            step = next((i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), None)  # noqa: B905
            found.append(f"{name} differ from step {step}: {a} and {b}")
    for rank, (a, b) in enumerate(zip(ours.ranks, stock.ranks, strict=True)):
        if a.state_hash != b.state_hash:
            found.append(f"rank {rank}: parameters or optimizer states differ")
    return found
