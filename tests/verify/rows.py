"""``make matrix``: a table of jobs, each verified: every feature by every axis, and what was wrong.

A row is a job's TOML, and ``titan_ext verify`` its judge; a row that titan_ext refuses says in
which words. ``make search`` draws jobs at random; what it finds WRONG comes here once it is mended.
``python -m tests.verify.rows FOLDER [-k TEXT] [--part 2/4]`` takes some of them.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.verify.search import NOT_VERIFIED, RIGHT, Job, Verified, verify

_P, _AC = "parallelism.", "activation_checkpoint."
_TP, _PP, _CP, _EP, _HSDP = (
    f"{_P}{axis}_parallel{of}_degree"
    for axis, of in (
        ("tensor", ""),
        ("pipeline", ""),
        ("context", ""),
        ("expert", ""),
        ("data", "_replicate"),
    )
)
_MOE = '"deepseek_v3.deepseek_v3_debugmodel"'
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
        f"{_P}fsdp_reshard_after_forward": '"always"',
        f"{_P}fsdp_reshard_groups": '{attention = "never"}',
    },
    "no reshard": {
        f"{_P}fsdp_reshard_after_forward": '"never"',
        f"{_P}fsdp_reshard_groups": '{"layers.1.*" = "always", head = "always"}',
    },
    "exchanges saved": {f"{_P}save_all_to_all": '"always"', f"{_AC}policy": '"full"'},
    "halves": {f"{_P}overlap_exchanges": '"halves"'},
    "a row a rank": {f"{_P}exchange_rows": '"rank"'},
    "float8 tokens": {f"{_P}exchange_dtype": '"float8"'},
    "float8 gathers": {f"{_P}fsdp_float8_all_gather": '"blocks"'},
    "bf16 reductions": {f"{_P}fsdp_expert_reduce_scatter": '"bfloat16"'},
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
        f"{_AC}op_policies": '{input = "offload", "aten.mm" = "offload_float8"}',
    },
    "everything sent": {
        f"{_P}overlap_exchanges": '"halves"',
        f"{_P}exchange_rows": '"rank"',
        f"{_P}exchange_dtype": '"float8"',
        f"{_P}fsdp_float8_all_gather": '"experts"',
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
        "EP 2, everything sent": {"ranks": "2", _EP: "2", **FEATURES["everything sent"]},
    }.items()
    if name != "llama3" or "everything" not in features
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
_LARGE: dict[str, Job] = {
    "a row a node, 32 ranks": {"ranks": "32", _EP: "16", f"{_P}exchange_rows": '"node"'},
    "a row a node in halves, 32 ranks": {
        "ranks": "32",
        _EP: "16",
        f"{_P}exchange_rows": '"node"',
        f"{_P}overlap_exchanges": '"halves"',
        f"{_P}exchange_dtype": '"float8"',
    },
    "all axes, 512 ranks": {"ranks": "512", _EP: "16", _TP: "2", _PP: "4", _HSDP: "2"},
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
        ("ZBVZeroBubble", "full", {**_PLAIN_LOSS, f"{_AC}policy": '"full"'}),
        ("ZBVZeroBubble", "no recompute", {**_PLAIN_LOSS, f"{_AC}policy": '"none"'}),
    )
}


def rows() -> dict[str, Job]:
    """All jobs by name. Backends take turns, so that each feature and each axis meets both."""
    product = {
        f"{feature}, {axis}": AXES[axis] | job
        for (number, (feature, job)), axis in itertools.product(enumerate(FEATURES.items()), AXES)
    }
    named = product | _OTHERS | _LARGE | _PIPELINES
    return {
        name: {
            "extends": _MOE,
            f"{_P}spmd_backend": _BACKENDS[(number + number // len(AXES)) % 2],
            **job,
        }
        for number, (name, job) in enumerate(named.items())
    }


REFUSED: dict[str, str] = {}
"""Names of rows that titan_ext or TorchTitan refuses, and words of the message."""


def is_as_expected(name: str, verified: Verified) -> bool:
    """True for RIGHT, and for a refusal in the words of the table."""
    if name in REFUSED:
        return verified.code == NOT_VERIFIED and REFUSED[name] in verified.said
    return verified.code == RIGHT


def verify_rows(jobs: Mapping[str, Job], folder: Path) -> Iterator[tuple[str, Verified]]:
    """Verify one row after another; what each said lies in ``folder``, too."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name, job in jobs.items():
        verified = verify(job, folder)
        (folder / f"{name}.txt").write_text(verified.said)
        yield name, verified


def _part(text: str) -> tuple[int, int]:
    number, parts = map(int, text.split("/"))
    if not 1 <= number <= parts:
        raise argparse.ArgumentTypeError(f"it is {text}; expected K/N with K from 1 to N")
    return number, parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", dest="text", default="", help="only what has it in its name")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="such as 2/4")
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import titan_ext.plan.verify.legs  # noqa: F401  once, for all forks

    number, parts = arguments.part
    jobs = {name: job for name, job in rows().items() if arguments.text in name}
    jobs = dict(itertools.islice(jobs.items(), number - 1, None, parts))
    start, failed = time.monotonic(), 0
    for name, verified in verify_rows(jobs, arguments.folder):
        failed += not (expected := is_as_expected(name, verified))
        last = verified.said.strip().splitlines()[-1] if verified.said.strip() else "nothing"
        print(f"{'' if expected else 'FAILED '}{name}: {last}", flush=True)
        if not expected:
            print(verified.said, flush=True)
    print(f"{time.monotonic() - start:.0f} s: {len(jobs) - failed} of {len(jobs)} are as expected")
    return 1 if failed or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
