"""The layouts of the matrix, in groups: which models, axes and settings are tried together.

Pairs rather than products: each axis with the others that it meets in the code. Each SPMD backend
and each kind of unit meets every axis. ``rows`` makes the table of them.
"""

from dataclasses import replace
from itertools import product
from typing import Any

from tests.helpers.training import Run

__all__ = ["BACKENDS", "EACH_ONCE", "FLEX", "GROUPS", "SUBMODULE", "WRAPS", "ZERO_BUBBLE"]

_LAYOUTS = [(world, ep) for world in (1, 2, 4) for ep in (1, 2, 4) if ep <= world]
BACKENDS = ("spmd_types", "partial_dtensor")
WRAPS = ("block", "submodule")
EACH_ONCE: tuple[dict[str, Any], ...] = (
    {"backend": "spmd_types", "parallelize": "submodule"},
    {"backend": "partial_dtensor", "parallelize": "block"},
)
_THE_OTHER_WAY: tuple[dict[str, Any], ...] = (
    {"backend": "spmd_types", "parallelize": "block"},
    {"backend": "partial_dtensor", "parallelize": "submodule"},
)
_ALL = (*EACH_ONCE, *_THE_OTHER_WAY)
SUBMODULE = (EACH_ONCE[0], _THE_OTHER_WAY[1])

_MOE = [
    Run(model=model, world=world, ep=ep, backend=backend, parallelize=wrap)
    for model, (world, ep), backend, wrap in product(
        ("deepseek_v3", "qwen3_moe"), _LAYOUTS, BACKENDS, WRAPS
    )
]
_DENSE = [  # tied embeddings and head
    Run(model="qwen3", world=world, backend=backend, parallelize=wrap)
    for world, backend, wrap in product((1, 2, 4), BACKENDS, WRAPS)
]
_MTP = [
    Run(model="deepseek_v3_mtp", world=world, ep=ep, backend=backend, parallelize=wrap)
    for (world, ep), backend, wrap in product([(2, 2), (4, 2)], BACKENDS, WRAPS)
]
_ACTIVATION_CHECKPOINTING = [
    Run(world=2, ep=2, ac=ac, backend=backend, parallelize=wrap)
    for ac, backend, wrap in product(("none", "full"), BACKENDS, WRAPS)
]
_FP32 = [
    Run(world=2, ep=ep, param_dtype="float32", parallelize=wrap)
    for ep, wrap in product((1, 2), WRAPS)
]
_OTHER_DECODERS = [
    Run(model=model, world=2, ep=ep, backend=backend, parallelize=wrap)
    for (model, ep), backend, wrap in product(
        [("llama3", 1), ("gpt_oss", 2), ("kimi_text", 2)], BACKENDS, WRAPS
    )
]
_OTHER_DECODERS += [  # supports one backend only
    Run(model="muse_glimmer", world=2, parallelize=wrap) for wrap in WRAPS
]
_PIPELINE = [
    Run(world=world, ep=ep, pp=2, backend=backend, parallelize=wrap)
    for (world, ep), backend, wrap in product([(2, 1), (4, 2)], BACKENDS, WRAPS)
]
_TENSOR = [
    Run(world=world, ep=ep, tp=2, backend=backend, parallelize=wrap)
    for (world, ep), backend, wrap in product([(2, 2), (4, 4)], BACKENDS, WRAPS)
]
_TENSOR += [  # experts over fewer ranks than tensor parallelism, or over one
    Run(world=world, ep=ep, tp=tp, **kind)
    for (world, ep, tp), kinds in [((2, 1, 2), EACH_ONCE), ((4, 2, 4), _THE_OTHER_WAY)]
    for kind in kinds
]
_NO_SEQUENCE_PARALLEL = [
    Run(world=world, ep=ep, tp=2, sequence_parallel=False, **kind)
    for (world, ep), kinds in [((2, 1), EACH_ONCE), ((2, 2), _ALL), ((4, 4), SUBMODULE)]
    for kind in kinds
]
# Two stages a rank. What zero bubble does not go with: see refused.py.
_SCHEDULES = [
    Run(
        world=world,
        ep=ep,
        pp=2,
        layers=4,
        schedule=schedule,
        ac=ac,
        chunked_loss=schedule == "Interleaved1F1B",
        **kind,
    )
    for world, ep, schedule, ac, kinds in [
        (2, 1, "Interleaved1F1B", "selective", EACH_ONCE),
        (4, 2, "Interleaved1F1B", "selective", _THE_OTHER_WAY),
        (2, 1, "InterleavedZeroBubble", "none", EACH_ONCE),
        (2, 1, "ZBVZeroBubble", "full", _THE_OTHER_WAY),
        (4, 2, "ZBVZeroBubble", "none", _ALL),
    ]
    for kind in kinds
]
ZERO_BUBBLE: dict[str, Any] = {"schedule": "InterleavedZeroBubble", "chunked_loss": False}
_SCHEDULES += [
    Run(world=2, pp=2, layers=4, accumulate=2, schedule="1F1B", **EACH_ONCE[0]),
    Run(world=2, pp=2, layers=4, accumulate=2, schedule="1F1B", **EACH_ONCE[1]),
    Run(world=2, pp=2, layers=4, accumulate=2, schedule="Interleaved1F1B", **SUBMODULE[1]),
]
# On a CPU nothing moves, but FSDP2 takes the branches of its policy.
_OFFLOAD = [
    Run(world=2, ep=ep, cpu_offload=True, **kind)
    for ep, kinds in [(1, EACH_ONCE), (2, _ALL)]
    for kind in kinds
]
# Two copies of two shards. With EP 2 experts have no shard axis left: one all-reduce, no gather.
_HSDP = [
    Run(world=4, dp_replicate=2, ep=ep, backend=backend, parallelize=wrap)
    for ep, backend, wrap in product((1, 2), BACKENDS, WRAPS)
]
_ACCUMULATION = [
    Run(world=2, ep=2, accumulate=2, backend=backend, parallelize="submodule")
    for backend in BACKENDS
]
_SEVERAL_AXES = [
    Run(world=2, dp_replicate=2, **SUBMODULE[0]),  # copies only: DDP
    Run(world=4, dp_replicate=2, tp=2, ep=2, **SUBMODULE[0]),
    Run(world=4, dp_replicate=2, tp=2, ep=2, **SUBMODULE[1]),
    Run(world=4, dp_replicate=2, pp=2, **SUBMODULE[1]),
    Run(world=4, pp=2, tp=2, ep=2, layers=4, **SUBMODULE[0]),
    Run(world=8, pp=2, tp=2, ep=4, layers=4, schedule="Interleaved1F1B", **SUBMODULE[0]),
    *(
        Run(world=4, dp_replicate=2, accumulate=2, ep=ep, global_batch=8, **kind)
        for ep, kind in [(1, _THE_OTHER_WAY[0]), (2, SUBMODULE[0]), (2, SUBMODULE[1])]
    ),
    *(
        Run(world=4, tp=2, ep=ep, reshard=reshard, **kind)
        for ep, reshard, kind in [
            (4, "never", SUBMODULE[0]),
            (2, "always", SUBMODULE[1]),
            (1, "never", EACH_ONCE[1]),
        ]
    ),
]
_MODELS_AND_AXES = [
    Run(model="qwen3", world=2, tp=2, ac=ac, **kind)  # tied embedding and head
    for ac, kinds in [("none", EACH_ONCE), ("full", _THE_OTHER_WAY)]
    for kind in kinds
]
_MODELS_AND_AXES += [
    Run(model="deepseek_v3_mtp", world=2, ep=2, tp=tp, ac=ac, **kind)
    for tp, ac, kinds in [
        (1, "none", EACH_ONCE),
        (1, "full", _THE_OTHER_WAY),
        (2, "selective", EACH_ONCE),
    ]
    for kind in kinds
]
_MODELS_AND_AXES += [
    Run(model="gpt_oss", world=2, tp=2, ep=2, **SUBMODULE[0]),
    Run(model="muse_glimmer", world=2, tp=2, **SUBMODULE[0]),
    Run(model="llama3", world=2, tp=2, **SUBMODULE[1]),
]
_SETTINGS: list[dict[str, Any]] = [
    {"reshard": "always"},
    {"reshard": "never"},
    {"prefetch": 0},
    {"prefetch": "8MiB"},
]
_RESHARD_AND_PREFETCH = [
    replace(row, parallelize=wrap, backend=backend, **setting)
    for row, backend, wrap in product(
        [Run(world=2), Run(world=2, ep=2), Run(world=4, ep=2, pp=2)], BACKENDS, WRAPS
    )
    for setting in _SETTINGS
]
_RESHARD_AND_PREFETCH += [  # to a smaller world, which torch offers with one backend
    Run(world=world, backend="partial_dtensor", parallelize=wrap, reshard=2, prefetch=2)
    for world, wrap in product((2, 4), WRAPS)
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
    for backend in BACKENDS
]
# Stock loses the frozen flags under spmd_types: there ours is held against its partial_dtensor.
_ADAPTERS = [
    Run(world=2, ep=2, lora=8, backend=backend, parallelize="submodule") for backend in BACKENDS
]
# The others have Titan's default, fused AdamW. Stock is told what ours finds out (helpers.muon).
_OPTIMIZER = [
    Run(optimizer="muon", world=2, ep=ep, backend=backend, parallelize=wrap)
    for ep, backend, wrap in product((1, 2), BACKENDS, WRAPS)
]
_OPTIMIZER += [
    replace(row, optimizer="muon", backend=backend, parallelize="submodule")
    for row, backend in product(
        [Run(world=2, pp=2), Run(world=4, ep=2, dp_replicate=2), Run(world=4, ep=2)], BACKENDS
    )
]
_OPTIMIZER += [  # Titan's own config: attention by head, for one SPMD backend
    Run(optimizer="muon", model="kimi_text", world=2, ep=2, parallelize=wrap) for wrap in WRAPS
]
_OPTIMIZER += [
    Run(optimizer=implementation, world=2, ep=2, parallelize="submodule")
    for implementation in ("foreach", "for-loop")
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
        [(2, 1, 1), (2, 1, 2), (4, 2, 2)], BACKENDS, WRAPS
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
FLEX: dict[str, Any] = {"attention": "flex", "seq_len": 512, "global_batch": 2}
_CONTEXT = [
    Run(cp=2, backend=backend, parallelize=wrap, **layout, **FLEX)
    for layout, backend, wrap in product(_CONTEXT_LAYOUTS, BACKENDS, WRAPS)
    if wrap == "submodule" or layout["world"] == 2
]
# Compiled sub-module units fuse other operations than compiled blocks do (test_compile.py).
_COMPILED = [
    Run(model=model, world=2, ep=2, ac=ac, compiled=True, parallelize="block")
    for model, ac in product(("deepseek_v3", "qwen3_moe"), ("none", "selective"))
]
_COMPILED += [
    replace(run, compiled=True, parallelize="block")
    for run in [
        Run(world=2, tp=2, ep=2),
        Run(world=2, tp=2, ac="none", backend="partial_dtensor"),
        Run(world=4, dp_replicate=2, ep=2),
        Run(model="deepseek_v3_mtp", world=2, ep=2),
        Run(world=2, pp=2, ac="none"),
    ]
]
# Activations in float8 equal no stock run; the reference is ours with whole-block units.
_FLOAT8: list[dict[str, Any]] = [
    {"world": 2, "ep": 2, "ac": "fp8_full"},
    {"world": 2, "ep": 2, "ac": "fp8_no_recompute", "backend": "partial_dtensor"},
    {"world": 2, "ep": 2, "accumulate": 2},
    {"world": 2, "ep": 2, "cpu_offload": True},
    {"world": 2, "ep": 2, "tp": 2},
    {"world": 2, "ep": 2, "tp": 2, "backend": "partial_dtensor"},
    {"world": 2, "tp": 2, "sequence_parallel": False, "ac": "fp8_speed"},
    {"world": 2, "pp": 2},
    {"world": 2, "pp": 2, "layers": 4, "ac": "fp8_no_recompute", **ZERO_BUBBLE},
    {"world": 4, "ep": 2, "pp": 2, "layers": 4, "schedule": "Interleaved1F1B"},
    {"world": 4, "ep": 2, "dp_replicate": 2},
    {"world": 4, "ep": 4, "tp": 2},
    {"model": "deepseek_v3_mtp", "world": 2, "ep": 2},
    {"model": "qwen3_moe", "world": 2, "ep": 2, "ac": "fp8_speed"},
    {"world": 2, "ep": 2, "ac": "fp8_early"},
    {"world": 2, "ep": 2, "tp": 2, "ac": "fp8_early", "backend": "partial_dtensor"},
    {"world": 4, "ep": 2, "pp": 2, "ac": "fp8_early", "save_all_to_all": "always"},
    {"model": "qwen3_moe", "world": 2, "tp": 2, "ac": "fp8_early"},
    {"world": 2, "ep": 2, "converters": ("float8_linear",)},
    {"world": 2, "ep": 2, "cp": 2, **FLEX},
]
_FLOAT8_ACTIVATIONS = [
    replace(Run(ac="fp8", parallelize="submodule"), **layout) for layout in _FLOAT8
]
# What stock keeps on the device, on the host. With 4 layers backward fetches some of it.
_HOST: list[dict[str, Any]] = [
    {"world": 2, "ep": 2},
    {"world": 2, "ep": 2, "backend": "partial_dtensor"},
    {"world": 2, "ep": 2, "ac": "on_host_all"},
    {"world": 2, "ep": 2, "tp": 2, "backend": "partial_dtensor"},
    {"world": 2, "ep": 2, "accumulate": 2},
    {"world": 2, "pp": 2},
    {"world": 4, "ep": 2, "pp": 2, "schedule": "Interleaved1F1B"},
    {"model": "qwen3_moe", "world": 2, "ep": 2, "cpu_offload": True},
]
_HOST_ACTIVATIONS = [
    replace(Run(ac="on_host", layers=4, parallelize="submodule"), **layout) for layout in _HOST
]
# The third kind of unit, and what "auto" sets with small units across nodes.
_TUNED: dict[str, Any] = {"prefetch": "auto", "reduce_scatter_buffers": 2}
_EXPERTS: list[dict[str, Any]] = [
    {"world": 2},
    {"world": 2, "ep": 2},
    {"world": 4, "ep": 2, **_TUNED},
    {"world": 4, "ep": 2, "backend": "partial_dtensor", **_TUNED},
    {"world": 4, "ep": 4, "backend": "partial_dtensor"},
    {"model": "qwen3_moe", "world": 4, "ep": 2},
    {"model": "gpt_oss", "world": 2, "ep": 2},
    {"model": "deepseek_v3_mtp", "world": 2, "ep": 2},
    {"world": 2, "ep": 2, "ac": "full"},
    {"world": 4, "ep": 2, "ac": "none", **_TUNED},
    {"world": 2, "ep": 2, "tp": 2},
    {"world": 2, "ep": 2, "tp": 2, "backend": "partial_dtensor"},
    {"world": 4, "ep": 2, "dp_replicate": 2, **_TUNED},
    {"world": 4, "ep": 2, "pp": 2, "layers": 4},
    {"world": 4, "ep": 2, "pp": 2, "layers": 4, "backend": "partial_dtensor", "reshard": "always"},
    {"world": 4, "ep": 2, "pp": 2, "layers": 4, "ac": "fp8"},
    {"world": 2, "ep": 2, "accumulate": 2},
    {"world": 2, "ep": 2, "reshard": "never"},
    {"world": 2, "ep": 2, "cpu_offload": True},
    {"world": 2, "ep": 2, "lora": 8, "backend": "partial_dtensor"},
    {"world": 2, "ep": 2, "optimizer": "muon"},
    {"world": 2, "ep": 2, "ac": "fp8"},
    {"world": 2, "ep": 2, "ac": "fp8_no_recompute"},
]
_TWO_SEQUENCES: dict[str, Any] = {"overlap_exchanges": "halves", "global_batch": 8}
_ON_THE_WIRE: list[dict[str, Any]] = [
    {"world": 2, "ep": 2, "save_all_to_all": "always"},
    {"world": 4, "ep": 2, "save_all_to_all": "always"},
    {"world": 2, "ep": 2, "save_all_to_all": "never", "backend": "partial_dtensor"},
    {"world": 2, "ep": 2, "save_all_to_all": "always", "ac": "fp8"},
    {"model": "qwen3_moe", "world": 2, "ep": 2, "save_all_to_all": "always"},
    {"model": "deepseek_v3_mtp", "world": 2, "ep": 2, "save_all_to_all": "always"},
    {"world": 2, "ep": 2, "tp": 2, "save_all_to_all": "always"},
    {"world": 4, "ep": 2, "expert_reduce_scatter": "bfloat16"},
    {"world": 4, "ep": 2, "float8_all_gather": "experts"},
    {"world": 4, "ep": 2, "float8_all_gather": "experts", "backend": "partial_dtensor"},
    {"world": 4, "ep": 2, "float8_all_gather": "blocks"},
    {"model": "gpt_oss", "world": 4, "ep": 2, "float8_all_gather": "experts"},
    {"world": 2, "ep": 2, "exchange_dtype": "float8"},
    {"world": 4, "ep": 2, "exchange_dtype": "float8", "backend": "partial_dtensor"},
    {"world": 2, "ep": 2, "exchange_dtype": "float8", "ac": "fp8", "save_all_to_all": "always"},
    {"world": 2, "ep": 2, "tp": 2, "exchange_dtype": "float8"},
    {"world": 2, "ep": 2, "exchange_rows": "rank"},
    {"world": 4, "ep": 2, "exchange_rows": "rank", "backend": "partial_dtensor"},
    {"world": 2, "ep": 2, "exchange_rows": "rank", "ac": "fp8", "save_all_to_all": "always"},
    {"world": 2, "ep": 2, "tp": 2, "exchange_rows": "rank"},
    {"world": 2, "ep": 2, **_TWO_SEQUENCES, "exchange_rows": "rank", "exchange_dtype": "float8"},
    {"world": 4, "ep": 4, "nodes": (2, 2), "exchange_rows": "node"},
    {"world": 4, "ep": 4, "nodes": (2, 2), **_TWO_SEQUENCES, "exchange_rows": "node"},
    {"world": 2, "ep": 2, **_TWO_SEQUENCES},
    {"world": 2, "ep": 2, "tp": 2, **_TWO_SEQUENCES, "sequence_parallel": False},
    {"world": 2, "ep": 2, "tp": 2, **_TWO_SEQUENCES, "backend": "partial_dtensor"},
    {"world": 4, "ep": 2, **_TWO_SEQUENCES, "backend": "partial_dtensor"},
    {"world": 4, "ep": 2, **_TWO_SEQUENCES, "exchange_dtype": "float8", "dp_replicate": 2},
    {"world": 4, "ep": 2, **_TWO_SEQUENCES, "pp": 2, "layers": 4, "microbatch_size": 2},
]
_EXPERT_UNITS = [replace(Run(parallelize="experts"), **layout) for layout in _EXPERTS]
_EXPERT_UNITS += [
    Run(
        world=4,
        ep=2,
        prefetch="auto",
        reduce_scatter_buffers=3,
        backend=backend,
        parallelize="submodule",
    )
    for backend in BACKENDS
]
_EXPERT_UNITS += [replace(Run(parallelize="submodule"), **layout) for layout in _ON_THE_WIRE]

# Ranks without a row of something. 5 experts on 4 ranks (or 9, with a larger top_k) leave the last
# one neither an expert nor a row of the router, 6 with EP 2 no row of the router. Adapters of rank
# 2 have rows on two ranks only.
_FEWER_ROWS: list[dict[str, Any]] = [
    *(
        {"experts": 5, "backend": backend, "parallelize": wrap}
        for backend, wrap in product(BACKENDS, WRAPS)
    ),
    *(
        {"experts": 6, "ep": 2, "backend": backend, "parallelize": wrap}
        for backend, wrap in product(BACKENDS, (*WRAPS, "experts"))
    ),
    {"experts": 5, "parallelize": "experts"},
    {"experts": 5, "ac": "full"},
    {"experts": 5, "ac": "none", "backend": "partial_dtensor"},
    {"experts": 5, "ac": "fp8"},
    {"experts": 6, "ep": 2, "ac": "fp8_no_recompute"},
    {"experts": 6, "ep": 2, "ac": "on_host"},
    {"experts": 5, "accumulate": 2, "global_batch": 8},
    {"experts": 5, "reshard": "always"},
    {"experts": 5, "reshard": "never"},
    {"experts": 5, "reshard": 2, "backend": "partial_dtensor"},
    {"experts": 5, "cpu_offload": True},
    {"experts": 5, "param_dtype": "float32"},
    {"experts": 5, "reduce_scatter_buffers": 2},
    {"experts": 6, "ep": 2, "expert_reduce_scatter": "bfloat16"},
    {"experts": 6, "ep": 2, "float8_all_gather": "experts"},
    {"experts": 5, "float8_all_gather": "blocks"},
    {"experts": 6, "ep": 2, "exchange_dtype": "float8"},
    {"experts": 6, "ep": 2, "exchange_rows": "rank"},
    {"experts": 6, "ep": 2, **_TWO_SEQUENCES},
    {"experts": 5, "parallelize": "experts", "expert_reduce_scatter": "bfloat16"},
    {"experts": 5, "optimizer": "muon"},
    {"experts": 6, "ep": 2, "optimizer": "muon", "backend": "partial_dtensor"},
    {"experts": 5, "lora": 2, "backend": "partial_dtensor"},
    {"experts": 6, "ep": 2, "lora": 2},
    {"model": "qwen3_moe", "experts": 9},
    {"model": "gpt_oss", "experts": 5},
    {"model": "deepseek_v3_mtp", "experts": 6, "ep": 2},
]
_EMPTY_SHARDS = [replace(Run(world=4, parallelize="submodule"), **layout) for layout in _FEWER_ROWS]

GROUPS: tuple[list[Run], ...] = (
    _EMPTY_SHARDS,
    _EXPERT_UNITS,
    _MOE,
    _DENSE,
    _MTP,
    _OTHER_DECODERS,
    _PIPELINE,
    _TENSOR,
    _NO_SEQUENCE_PARALLEL,
    _SCHEDULES,
    _OFFLOAD,
    _HSDP,
    _SEVERAL_AXES,
    _MODELS_AND_AXES,
    _ACCUMULATION,
    _RESHARD_AND_PREFETCH,
    _ACTIVATION_CHECKPOINTING,
    _FP32,
    _ADAPTERS,
    _OPTIMIZER,
    _COMPILED,
    _CONVERTERS,
    _CONTEXT,
    _FLOAT8_ACTIVATIONS,
    _HOST_ACTIVATIONS,
)
