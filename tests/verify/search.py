"""``make search SECONDS=600``: draw jobs over all keys, verify each, and shrink what is WRONG.

``titan_ext verify`` is the judge, in a fork of this process for each job, since a new one would
need 4 CPU seconds to import torch and Titan. Jobs are drawn so that each covers many pairs of
values that no job before it has had: where two features cross, numbers go wrong.
"""

import argparse
import contextlib
import io
import itertools
import math
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from titan_ext.parallelize.keys import FACTS

RIGHT, WRONG, NOT_VERIFIED = 0, 1, 2
_CANDIDATES = 40

Job = dict[str, str]
"""A job's TOML: keys and values as they are written. "extends" is one; "ranks" is its world."""

_CONVERTERS = {
    "lora": """
[[model.converters]]
component = "torchtitan.components.lora.LoRAConverter"
rank = 8
alpha = 16.0
target_modules = ["wo"]
""",
    "float8": """
[[model.converters]]
component = "titan_ext.components.float8_linears.TensorwiseFloat8LinearConverter"
filter_fqns = ["lm_head", "router.gate"]
""",
}
VALUES: dict[str, tuple[str, ...]] = {
    "extends": (
        '"deepseek_v3.deepseek_v3_debugmodel"',
        '"qwen3.qwen3_moe_debug"',
        '"gpt_oss.gpt_oss_debugmodel_flex"',
        '"deepseek_v3.deepseek_v3_debugmodel_mtp"',
        '"llama3.llama3_debugmodel"',
        *(f'"tests.verify.blocks.{form}"' for form in ("post_norm", "parallel", "twice", "gated")),
    ),
    "ranks": ("2", "4", "8", "6", "64"),  # of these, no power of two, and more than experts
    "parallelism.tensor_parallel_degree": ("1", "1", "2", "4"),  # and more than experts' degree
    "parallelism.pipeline_parallel_degree": ("1", "1", "2", "4"),
    "parallelism.context_parallel_degree": ("1", "1", "2"),
    "parallelism.data_parallel_replicate_degree": ("1", "1", "2"),
    "parallelism.expert_parallel_degree": ("1", "2", "4", "8"),
    "parallelism.pipeline_parallel_schedule": ('"1F1B"', '"Interleaved1F1B"', '"ZBVZeroBubble"'),
    "parallelism.enable_sequence_parallel": ("true", "false"),
    "parallelism.spmd_backend": ('"spmd_types"', '"partial_dtensor"'),
    "parallelism.fsdp_wrap": ('"auto"', '"block"', '"submodule"', '"experts"'),
    "parallelism.fsdp_reshard_after_forward": ('"default"', '"always"', '"never"', "2"),
    "parallelism.fsdp_reshard_groups": (
        "{}",
        '{embedding = "never"}',
        '{head = "always", "layers.1*" = "never"}',
    ),
    "parallelism.fsdp_prefetch": ('"auto"', "0", "2", '"1MiB"'),
    "parallelism.save_all_to_all": ('"auto"', '"always"', '"never"'),
    "parallelism.overlap_exchanges": ('"shared_experts"', '"halves"', '"none"'),
    "parallelism.exchange_rows": ('"expert"', '"rank"', '"node"'),
    "parallelism.exchange_dtype": ('"None"', '"float8"'),
    "parallelism.fsdp_replicate": ("[]", '["router", "norms"]', '["layers.0.*"]'),
    "parallelism.fsdp_float8_all_gather": ('"none"', '"experts"', '"blocks"'),
    "parallelism.fsdp_expert_reduce_scatter": ('"None"', '"bfloat16"'),
    "activation_checkpoint.policy": ('"none"', '"selective"', '"full"', '"fp8"'),
    "activation_checkpoint.preset": ('"stock"', '"balanced"', '"speed"', '"gemms"', '"memory"'),
    "activation_checkpoint.mode": ('"selective"', '"full"', '"no_recompute"'),
    "activation_checkpoint.score_before_last_gemm": ("false", "true"),
    "activation_checkpoint.exempt": ("[]", '["layers.0", "*.attention"]', '["layers.1"]'),
    "activation_checkpoint.op_policies": (
        "{}",
        '{"input" = "save", "moe.*" = "save_float8"}',
        '{"attention*" = "offload_float8", "*" = "recompute"}',
        '{"*:aten.mm" = "save", "input" = "offload"}',
        '{"*:_c10d_functional*" = "save", "*" = "offload"}',
        '{"*:aten.silu" = "save_float8", "*:aten.mm:*:1" = "recompute"}',
    ),
    "parallelism.fsdp_quantize_frozen": ("[]", '["*"]', '["*.attention.*"]'),
    "training.mixed_precision_param": ('"bfloat16"', '"float32"'),
    "training.dtype": ('"float32"', '"float32"', '"bfloat16"'),
    "training.enable_cpu_offload": ("false", "false", "true"),
    "loss.component": ("", '"torchtitan.components.loss.CrossEntropyLoss"'),
    "routing": ("balanced", "balanced", "skewed", "idle"),
    "accumulated": ("1", "1", "2"),  # batches of all ranks
    "converters": ("", "", *_CONVERTERS),
    "checkpoint.enable": ("false", "false", "true"),
    "compile.enable": ("false", "false", "false", "false", "true"),
}
"""Values of each key, the first of which leaves it out where it is a key of titan_ext."""
_NOT_KEYS = ("extends", "ranks", "routing", "accumulated", "converters")
_OF_FP8 = ("preset", "mode", "score_before_last_gemm", "op_policies", "exempt")


class Verified(NamedTuple):
    """Exit code of ``titan_ext verify``, and all that it said."""

    code: int
    said: str


def draw(
    generator: random.Random, covered: set[Any], values: Mapping[str, tuple[str, ...]] = VALUES
) -> dict[str, str]:
    """Draw a job that has many pairs of ``values`` that are not in ``covered``, and add those."""
    candidates = [
        _sensible({key: generator.choice(of_key) for key, of_key in values.items()})
        for _ in range(_CANDIDATES)
    ]
    job = max(candidates, key=lambda each: len(_pairs(each) - covered))
    covered |= _pairs(job)
    return job


def _pairs(job: Job) -> set[Any]:
    return set(itertools.combinations(job.items(), 2))


def _sensible(job: dict[str, str]) -> dict[str, str]:
    """``job`` without what its other values have no use for; its degrees fit its ranks.

    Nor with what titan_ext refuses, as far as that is simple to say.
    """
    degree = "parallelism.{}_degree".format
    room = int(job["ranks"])
    if "mtp" in job["extends"]:
        job[degree("pipeline_parallel")] = job[degree("context_parallel")] = "1"
        job["parallelism.enable_sequence_parallel"] = "true"
    for axis in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
        job[degree(axis)] = str(math.gcd(int(job[degree(axis)]), room))
        room //= int(job[degree(axis)])
    replicas, pipeline = degree("data_parallel_replicate"), degree("pipeline_parallel")
    job[replicas] = str(math.gcd(int(job[replicas]), room))
    room //= int(job[replicas])
    shards = room * int(job[degree("tensor_parallel")]) * int(job[degree("context_parallel")])
    has_experts = "llama" not in job["extends"]
    expert = degree("expert_parallel")
    job[expert] = str(math.gcd(int(job[expert]), shards if has_experts else 1))
    of_titan = job["parallelism.spmd_backend"] == '"spmd_types"'
    has_context = job[degree("context_parallel")] != "1"
    stock_experts = has_experts and "gpt_oss" not in job["extends"] and job["converters"] != "lora"
    if job["compile.enable"] == "true":
        for key in job.keys() & FACTS.keys():
            job[key] = VALUES[key][0] if FACTS[key].eager_only else job[key]
        if "offload" in job["activation_checkpoint.op_policies"]:
            job["activation_checkpoint.op_policies"] = "{}"
        if "ZBV" in job["parallelism.pipeline_parallel_schedule"]:
            job["parallelism.pipeline_parallel_schedule"] = '"1F1B"'
    wrap, schedule = (job[f"parallelism.{k}"] for k in ("fsdp_wrap", "pipeline_parallel_schedule"))
    of_users = "blocks" in job["extends"]  # whose [model] no file changes
    if of_users or (job["converters"] == "float8" and job[degree("tensor_parallel")] != "1"):
        job["converters"] = ""
    if not has_experts:
        job["routing"] = "balanced"
    if "gpt_oss" in job["extends"] or job["activation_checkpoint.policy"] == '"fp8"':
        job["training.mixed_precision_param"] = '"bfloat16"'
    reshard = "parallelism.fsdp_reshard_after_forward"
    is_even = 4 <= room <= 8 and shards // int(job[expert]) % 2 == 0 and shards == room
    if job[reshard] == "2" and (of_titan or not is_even):
        job[reshard] = '"always"'
    splits = job[pipeline] != "1" and "ZBV" in schedule
    if splits:
        job["loss.component"] = VALUES["loss.component"][1]
        job["activation_checkpoint.mode"] = '"no_recompute"'
        if job["activation_checkpoint.policy"] != '"fp8"':  # stock's count each recompute
            job["activation_checkpoint.policy"] = '"none"'
    narrow = job["training.mixed_precision_param"] == '"bfloat16"' and job[pipeline] == "1"
    alone = job[expert] == "1"
    fsdp = shards // int(job[degree("tensor_parallel")] if alone else job[expert])
    of_experts = has_experts and fsdp > 1 and (not alone or wrap == '"experts"')
    refused = {
        "exchange_rows": alone,
        "exchange_dtype": alone,
        "fsdp_float8_all_gather": not of_experts or job["converters"] == "float8",
        "fsdp_expert_reduce_scatter": not (of_experts and narrow),
        "fsdp_reshard_groups": splits,
        "fsdp_reshard_after_forward": splits,
        "component": "mtp" in job["extends"],
        "overlap_exchanges": not has_experts or has_context,
        "fsdp_replicate": not has_experts or (has_context if of_titan else job[replicas] != "1"),
        "score_before_last_gemm": not stock_experts,
        "fsdp_quantize_frozen": job["converters"] != "lora"
        or job[degree("tensor_parallel")] != "1",
    }
    for key, values in VALUES.items():
        if refused.get(key.rpartition(".")[2]):
            job[key] = values[0]
    if job[pipeline] == "1":
        del job["parallelism.pipeline_parallel_schedule"]
    if job["activation_checkpoint.policy"] != '"fp8"':
        for key in _OF_FP8:
            del job[f"activation_checkpoint.{key}"]
    elif job["activation_checkpoint.mode"] != '"selective"':
        del job["activation_checkpoint.preset"]
        del job["activation_checkpoint.op_policies"]
    return job


def toml_of(job: Job) -> str:
    """The job's file."""
    needed: Job = {}
    if "offload" in job.get("activation_checkpoint.op_policies", ""):
        needed["training.disable_cuda_graphs"] = "true"
    if job.get("accumulated") == "2":
        not_data = ("tensor", "pipeline", "context")
        split = math.prod(int(job.get(f"parallelism.{a}_parallel_degree", 1)) for a in not_data)
        needed["training.local_batch_size"] = "4"
        needed["training.global_batch_size"] = str(2 * 4 * int(job["ranks"]) // split)
    of_file = (needed | job).items()
    keys = (f"{key} = {value}" for key, value in of_file if value and key not in _NOT_KEYS)
    head = f"extends = {job['extends']}\nworld_size = {job['ranks']}\n"
    return head + "\n".join(keys) + "\n" + _CONVERTERS.get(job.get("converters", ""), "")


def verify(job: Job, folder: Path) -> Verified:
    """Verify a job in a fork of this process; its file is in ``folder``."""
    file = folder / "job.toml"
    file.write_text(toml_of(job))
    ours, theirs = multiprocessing.Pipe(duplex=False)
    arguments = ["verify", str(file), "--routing", job.get("routing", "balanced")]
    child = multiprocessing.get_context("fork").Process(
        target=_command, args=(arguments, theirs, folder)
    )
    child.start()
    theirs.close()
    try:
        code, said = ours.recv()
    except EOFError:
        code, said = NOT_VERIFIED, "NOT VERIFIED: it died"
    child.join()
    return Verified(code, said)


def _command(arguments: list[str], line: Any, folder: Path) -> None:
    from titan_ext.config_registry.commands import main

    os.chdir(folder)
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), open(folder / "log", "w") as log:
        os.dup2(log.fileno(), 2)
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
    line.send((code, said.getvalue()))


def shrink(job: Job, is_wrong: Callable[[Job], bool]) -> Job:
    """Leave out of a job that is wrong each key, and each axis, without which it still is."""
    for key in [key for key in job if key not in ("extends", "ranks")]:
        fewer = {name: value for name, value in job.items() if name != key}
        if is_wrong(fewer):
            job = fewer
    for ranks in VALUES["ranks"]:
        if int(ranks) < int(job["ranks"]) and is_wrong({**job, "ranks": ranks}):
            return {**job, "ranks": ranks}
    return job


def search(
    seconds: float, seed: int, folder: Path, *, only: str = "", ranks: int = 64
) -> Iterator[str]:
    """Verify one job after another; yield a line for each, and the smallest file of a WRONG one.

    Of models whose name has ``only`` in it, on so many ``ranks`` at most.
    """
    folder = folder.resolve()  # jobs run in it
    folder.mkdir(parents=True, exist_ok=True)
    values = VALUES | {
        "extends": tuple(name for name in VALUES["extends"] if only in name),
        "ranks": tuple(count for count in VALUES["ranks"] if int(count) <= ranks),
    }
    generator, covered = random.Random(seed), set[Any]()
    found: Counter[int] = Counter()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        job = draw(generator, covered, values)
        verified = verify(job, folder)
        found[verified.code] += 1
        last = verified.said.strip().splitlines()[-1] if verified.said.strip() else "nothing"
        yield f"{sum(found.values()):4}  {_short(job)}: {last}"
        if verified.code == WRONG:
            yield f"\n{toml_of(job)}# --routing {job.get('routing', 'balanced')}\n{verified.said}"
            least = shrink(job, lambda fewer: verify(fewer, folder).code == WRONG)
            again = verify(least, folder)
            yield f"\n{toml_of(least)}# --routing {least.get('routing', 'balanced')}\n{again.said}"
    every = sum(found.values())
    yield (
        f"{every} jobs, {len(covered)} pairs of values: {found[RIGHT]} RIGHT, {found[WRONG]} "
        f"WRONG, {found[NOT_VERIFIED]} refused or not verified (seed {seed})"
    )
    if found[WRONG]:
        raise SystemExit(WRONG)


def _short(job: Job) -> str:
    """What of a job is not the first value of its key."""
    changed = (f"{k.rpartition('.')[2]} {v}" for k, v in job.items() if v != VALUES[k][0])
    return ", ".join(changed).replace('"', "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--ranks", type=int, default=64, help="the most ranks of a job")
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import titan_ext.verify.legs  # noqa: F401  once, for all forks

    for line in search(
        arguments.seconds,
        arguments.seed,
        arguments.folder,
        only=arguments.only,
        ranks=arguments.ranks,
    ):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
