"""The table of ``make matrix``: every feature by every axis, other models, and what was wrong once.

A row is a job's TOML. ``titan_ext verify`` is its judge; what is no computation equals stock to the
bit besides, without verify (``exact``). What titan_ext refuses says so in the words of the table.
``make search`` draws jobs at random; what it finds WRONG comes here once it is mended.
"""

import itertools

from tests.verify.search import Job

_P, _AC = "parallelism.", "activation_checkpoint."
_TP, _PP = f"{_P}tensor_parallel_degree", f"{_P}pipeline_parallel_degree"
_CP, _EP = f"{_P}context_parallel_degree", f"{_P}expert_parallel_degree"
_HSDP = f"{_P}data_parallel_replicate_degree"
_MOE = '"deepseek_v3.deepseek_v3_debugmodel"'
_COMPILED = {"compile.enable": "true"}
_BACKENDS = ('"spmd_types"', '"partial_dtensor"')
_PLAIN_LOSS = {"loss.component": '"torchtitan.components.loss.CrossEntropyLoss"'}

AXES: dict[str, Job] = {
    "FSDP": {"ranks": "2", _EP: "1"},
    "EP 4": {"ranks": "4", _EP: "4"},
    "EP 2": {"ranks": "4", _EP: "2"},
    "EP 4, TP 2": {"ranks": "4", _EP: "4", _TP: "2"},
    "EP 2, TP 2, no sequence parallelism": {
        "ranks": "2",
        _EP: "2",
        _TP: "2",
        f"{_P}enable_sequence_parallel": "false",
    },
    "EP 2, PP 2": {"ranks": "4", _EP: "2", _PP: "2"},
    "EP 2, CP 2": {"ranks": "4", _EP: "2", _CP: "2"},
    "EP 2, HSDP 2": {"ranks": "4", _EP: "2", _HSDP: "2"},
}
FEATURES: dict[str, Job] = {
    "units by block": {f"{_P}fsdp_wrap": '"block"'},
    "units by submodule": {f"{_P}fsdp_wrap": '"submodule"', f"{_P}fsdp_prefetch": "2"},
    "units of experts": {f"{_P}fsdp_wrap": '"experts"', f"{_P}fsdp_prefetch": '"1MiB"'},
    "reshard": {
        f"{_P}fsdp_wrap": '"submodule"',
        f"{_P}fsdp_reshard_after_forward": '"always"',
        f"{_P}fsdp_reshard_groups": '{attention = "never"}',
    },
    "no reshard": {
        f"{_P}fsdp_reshard_after_forward": '"never"',
        f"{_P}fsdp_reshard_groups": '{"layers.1*" = "always", head = "always"}',
    },
    "exchanges saved": {f"{_P}save_all_to_all": '"always"', f"{_AC}policy": '"full"'},
    "halves": {f"{_P}overlap_exchanges": '"halves"'},
    "a row a rank": {f"{_P}exchange_rows": '"rank"'},
    "float8 tokens": {f"{_P}exchange_dtype": '"float8"'},
    "float8 gathers": {f"{_P}fsdp_float8_all_gather": '"blocks"'},
    "bf16 reductions": {
        f"{_P}fsdp_expert_reduce_scatter": '"bfloat16"',
        f"{_P}fsdp_wrap": '"experts"',
    },
    "replicated": {
        f"{_P}fsdp_replicate": '["router", "norms"]',
        f"{_P}fsdp_wrap": '"block"',
        f"{_AC}policy": '"selective"',
    },
    "float8 for memory": {f"{_AC}policy": '"fp8"'},
    "float8 for speed": {
        f"{_AC}policy": '"fp8"',
        f"{_AC}preset": '"speed"',
        f"{_P}save_all_to_all": '"always"',
    },
    "float8 without a recompute": {f"{_AC}policy": '"fp8"', f"{_AC}mode": '"no_recompute"'},
    "scores before the last GEMM": {
        f"{_AC}policy": '"fp8"',
        f"{_AC}score_before_last_gemm": "true",
    },
    "offload": {
        f"{_AC}policy": '"fp8"',
        f"{_AC}preset": '"stock"',
        f"{_AC}op_policies": '{input = "offload", "*" = "offload"}',
        "training.disable_cuda_graphs": "true",
    },
    "everything sent": {
        f"{_P}overlap_exchanges": '"halves"',
        f"{_P}exchange_rows": '"rank"',
        f"{_P}exchange_dtype": '"float8"',
        f"{_P}fsdp_float8_all_gather": '"blocks"',
        f"{_AC}policy": '"fp8"',
    },
}
_OTHERS: dict[str, Job] = {
    f"{name}, {features}": {"extends": extends, **job}
    for name, extends in {
        "qwen3": '"qwen3.qwen3_moe_debug"',
        "gpt_oss": '"gpt_oss.gpt_oss_debugmodel_flex"',
        "MTP": '"deepseek_v3.deepseek_v3_debugmodel_mtp"',
        "llama3": '"llama3.llama3_debugmodel"',
    }.items()
    for features, job in {
        "EP 2, TP 2": {"ranks": "4", _EP: "2", _TP: "2"},
        "EP 2, units": {"ranks": "4", _EP: "2", f"{_P}fsdp_wrap": '"submodule"'},
        # Of Qwen3's blocks the preset "memory" keeps nothing in float8.
        "EP 2, everything sent": {
            "ranks": "2",
            _EP: "2",
            **FEATURES["everything sent"],
            f"{_AC}preset": '"speed"',
        },
    }.items()
    if name != "llama3" or "everything" not in features
}
_OTHERS["gpt_oss, EP 2, TP 2"][f"{_P}spmd_backend"] = _BACKENDS[0]
_OTHERS["float8 on the host, EP 2"] = AXES["EP 2"] | {
    f"{_AC}policy": '"fp8"',
    f"{_AC}op_policies": '{input = "offload", "*:aten.mm" = "offload_float8"}',
    "training.disable_cuda_graphs": "true",
}
_OTHERS |= {
    f"{name}, {axis}": AXES[axis] | job
    for axis in ("EP 2", "EP 4, TP 2")
    for name, job in {
        "LoRA": {"converters": "lora"},
        "an idle expert": {"routing": "idle", f"{_AC}policy": '"fp8"'},
        "all tokens to one": {"routing": "skewed", f"{_P}exchange_rows": '"rank"'},
        "saves and resumes": {"checkpoint.enable": "true", f"{_P}fsdp_wrap": '"experts"'},
        "fp32": {"training.mixed_precision_param": '"float32"'},
    }.items()
}
_ALL = ("EP 4", "EP 2", "EP 4, TP 2", "EP 2, PP 2", "EP 2, CP 2", "EP 2, HSDP 2")
_OTHERS |= {
    f"{feature} in pieces, {axis}": {**AXES[axis], **FEATURES[feature], **_COMPILED}
    for feature, axes in {
        "halves": ("EP 4", "EP 4, TP 2", "EP 2, TP 2, no sequence parallelism", *_ALL[3::2]),
        "a row a rank": ("EP 4, TP 2",),
        "float8 tokens": ("EP 2",),
        "everything sent": ("EP 4", "EP 4, TP 2", "EP 2, PP 2"),
        "units of experts": _ALL,
        "float8 for memory": ("EP 4", "EP 2, PP 2", "EP 2, CP 2"),
        "float8 without a recompute": ("EP 2",),
        "scores before the last GEMM": ("EP 2",),
    }.items()
    for axis in axes
} | {
    f"{name} in pieces": {**_OTHERS[name], **_COMPILED}
    for name in (
        "qwen3, EP 2, everything sent",
        "gpt_oss, EP 2, everything sent",
        "MTP, EP 2, everything sent",
        "LoRA, EP 2",
        "an idle expert, EP 2",
        "all tokens to one, EP 4, TP 2",
        "saves and resumes, EP 2",
    )
}
_16B = {"extends": '"deepseek_v3.deepseek_v3_16b"'}
_LARGE: dict[str, Job] = {
    "a row a node, 32 ranks": {**_16B, "ranks": "32", _EP: "16", f"{_P}exchange_rows": '"node"'},
    "a row a node in halves, 32 ranks": {
        **_16B,
        "ranks": "32",
        _EP: "16",
        f"{_P}exchange_rows": '"node"',
        f"{_P}overlap_exchanges": '"halves"',
        f"{_P}exchange_dtype": '"float8"',
    },
    "EP 16, TP 2, 512 ranks": {**_16B, "ranks": "512", _EP: "16", _TP: "2"},
    "EP below TP, 64 ranks": {"ranks": "64", _EP: "2", _TP: "4"},
}
_PIPELINES: dict[str, Job] = {
    f"{schedule}, {features}": {
        "ranks": "4",
        _PP: "2",
        _EP: "2",
        f"{_P}pipeline_parallel_schedule": f'"{schedule}"',
        **job,
    }
    for schedule, features, job in (
        ("Interleaved1F1B", "units", {f"{_P}fsdp_wrap": '"submodule"'}),
        ("Interleaved1F1B", "float8 for memory", {f"{_AC}policy": '"fp8"'}),
        ("Interleaved1F1B", "halves in pieces", {**FEATURES["halves"], **_COMPILED}),
        # It gathers a stage ahead of the forward that makes its scales.
        ("Interleaved1F1B", "float8 linears", {"converters": "float8"}),
        ("ZBVZeroBubble", "full", {**_PLAIN_LOSS, f"{_AC}policy": '"full"'}),
        ("ZBVZeroBubble", "no recompute", {**_PLAIN_LOSS, f"{_AC}policy": '"none"'}),
    )
}
EXACT = (
    "units by block",
    "units by submodule",
    "units of experts",
    "reshard",
    "no reshard",
    "exchanges saved",
    "offload",
)
"""Features that are no computation."""
ROUNDING = (
    "halves",
    "a row a rank",
    "bf16 reductions",
    "replicated",
    "scores before the last GEMM",
)
"""Features that change the order of sums. The others have fewer bits."""

_SPLITS = {
    "ranks": "2",
    _PP: "2",
    f"{_P}pipeline_parallel_schedule": '"ZBVZeroBubble"',
    f"{_AC}policy": '"none"',
}
_MTP = {"extends": '"deepseek_v3.deepseek_v3_debugmodel_mtp"', "ranks": "2"}
_GPT_OSS = {"extends": '"gpt_oss.gpt_oss_debugmodel_flex"'}
_TO_TWO = {f"{_P}fsdp_reshard_after_forward": "2"}
_ENDING: dict[str, tuple[Job, str]] = {
    "zero bubble with selective checkpoints": (
        _SPLITS | _PLAIN_LOSS | {f"{_AC}policy": '"selective"'},
        "one backward only",
    ),
    "zero bubble with float8 checkpoints": (
        _SPLITS | _PLAIN_LOSS | {f"{_AC}policy": '"fp8"'},
        "one backward only",
    ),
    "zero bubble with the chunked loss": (
        _SPLITS,
        "with the chunked loss the last norm would get no gradient",
    ),
    "zero bubble with reshard": (
        _SPLITS | _PLAIN_LOSS | {f"{_P}fsdp_reshard_after_forward": '"always"'},
        "freed after forward would get no gradient",
    ),
    "MTP with PP": (_MTP | {_PP: "2"}, "support with multi-token prediction"),
    "MTP with CP": (_MTP | {_CP: "2"}, "support with multi-token prediction"),
    "MTP with TP and no sequence parallel": (
        _MTP | {_TP: "2", f"{_P}enable_sequence_parallel": "false"},
        "the gradient of eh_proj (multi-token prediction) once for each of the 2 ranks",
    ),
    "tied weights with PP": (
        {"extends": '"qwen3.qwen3_debugmodel"', "ranks": "2", _PP: "2"},
        "Weight tying is not supported with Pipeline Parallel",
    ),
    "gpt_oss with TP and no EP": (
        _GPT_OSS | {"ranks": "2", _TP: "2", _EP: "1", f"{_P}spmd_backend": _BACKENDS[0]},
        "the bias of gpt_oss' experts once for each of the 2 ranks",
    ),
    "gpt_oss with TP under partial_dtensor": (
        _GPT_OSS | {"ranks": "4", _TP: "2", _EP: "2", f"{_P}spmd_backend": _BACKENDS[1]},
        "1/2 of the gradient of attention.wo.bias for the whole",
    ),
    "full_dtensor": (
        {"ranks": "2", f"{_P}spmd_backend": '"full_dtensor"'},
        "which titan_ext does not support",
    ),
    "reshard to 2 ranks under spmd_types": (
        {"ranks": "2", f"{_P}spmd_backend": _BACKENDS[0], **_TO_TWO},
        "a number of ranks, which torch does not offer with",
    ),
    "reshard to 2 ranks with TP": (
        {"ranks": "4", _TP: "2", f"{_P}spmd_backend": _BACKENDS[1], **_TO_TWO},
        "torch does not offer with parallelism.tensor_parallel_degree > 1",
    ),
}
"""Jobs that end by a message, and words of it."""
REFUSED: dict[str, str] = {name: words for name, (_, words) in _ENDING.items()}
REFUSED |= {
    f"{feature}, {axis}": words
    for features, axes, words in (
        (("halves", "everything sent"), ("EP 2, CP 2",), "masks of half a batch"),
        (("a row a rank", "float8 tokens", "everything sent"), ("FSDP",), "no token travels"),
        (
            ("float8 gathers", "everything sent"),
            ("EP 2, TP 2, no sequence parallelism",),
            "FSDP shards no matrices of blocks",
        ),
        (
            ("bf16 reductions",),
            ("EP 4", "EP 4, TP 2", "EP 2, TP 2, no sequence parallelism", "EP 2, HSDP 2"),
            "needs experts that FSDP shards",
        ),
        (("bf16 reductions",), ("EP 2, PP 2",), "needs parallelism.pipeline_parallel_degree = 1"),
    )
    for feature, axis in itertools.product(features, axes)
}
"""Words of the message by which a row ends. All others are RIGHT, but for ``WRONG_IN_STOCK``."""
WRONG_IN_STOCK = {
    # A split backward takes the gradient of one weight after the other. Each runs the block again,
    # which counts its tokens again. The bias follows signs of differences, so it stays right.
    "ZBVZeroBubble, full": "stock TorchTitan is wrong on this layout, too",
}
"""Words of the blame of a row that is WRONG in stock TorchTitan."""


def rows() -> dict[str, Job]:
    """All jobs by name. Backends take turns, so that each feature and each axis meets both."""
    product = {
        f"{feature}, {axis}": AXES[axis] | job
        for (feature, job), axis in itertools.product(FEATURES.items(), AXES)
    }
    ending = {name: job for name, (job, _) in _ENDING.items()}
    named = product | _OTHERS | _LARGE | _PIPELINES | ending
    return {
        name: {
            "extends": _MOE,
            f"{_P}spmd_backend": _BACKENDS[(number + number // len(AXES)) % 2],
            **job,
        }
        for number, (name, job) in enumerate(named.items())
    }
