"""What is special about a run, in words, from the fields in which it differs from the default.

Nothing is labelled by hand: a row of the support table says what its runs were told to do.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from tests.helpers.training import Run

__all__ = ["BACKENDS", "HEADINGS", "describe", "is_lossy"]

BACKENDS = ("spmd_types", "partial_dtensor")

_LAYOUT = "Layouts"
_PIPELINE = "Pipelines"
_UNITS = "Reshard and prefetch"
_AC = "Activation checkpointing"
_OPTIMIZER = "Optimizers"
_COMPILE = "torch.compile"
_CONVERT = "Converters and adapters"
_MODELS = "Other models"
HEADINGS = (_LAYOUT, _PIPELINE, _UNITS, _AC, _OPTIMIZER, _COMPILE, _CONVERT, _MODELS)

_MAIN_MODELS = ("deepseek_v3", "qwen3_moe", "qwen3")

# By field of Run: the heading it belongs under, and its words.
_WORDS: dict[str, tuple[str, Callable[[Run], str]]] = {
    "ep": (_LAYOUT, lambda run: f"EP {run.ep}"),
    "dp_replicate": (_LAYOUT, lambda run: f"HSDP {run.dp_replicate}"),
    "tp": (_LAYOUT, lambda run: f"TP {run.tp}"),
    "sequence_parallel": (_LAYOUT, lambda run: "no sequence parallelism"),
    "cp": (_LAYOUT, lambda run: f"CP {run.cp}{' with SDPA' * (run.attention == 'cpu')}"),
    "cpu_offload": (_LAYOUT, lambda run: "CPU offload"),
    "accumulate": (_LAYOUT, lambda run: f"{run.accumulate} microbatches a step"),
    "param_dtype": (_LAYOUT, lambda run: f"parameters in {run.param_dtype}"),
    "routing": (_LAYOUT, lambda run: f"{run.routing} routing"),
    "backend": (_LAYOUT, lambda run: f"backend {run.backend}"),
    "typechecked": (_LAYOUT, lambda run: "SPMD type checking"),
    "pp": (_PIPELINE, lambda run: f"PP {run.pp}"),
    "schedule": (_PIPELINE, lambda run: run.schedule),
    "chunked_loss": (_PIPELINE, lambda run: "loss in one piece"),
    "reshard": (_UNITS, lambda run: f"reshard {_ranks(run.reshard)}"),
    "reshard_groups": (_UNITS, lambda run: _groups(run.reshard_groups)),
    "prefetch": (_UNITS, lambda run: f"prefetch {run.prefetch}"),
    "reduce_scatter_buffers": (
        _UNITS,
        lambda run: f"{run.reduce_scatter_buffers} reduce-scatter buffers",
    ),
    "float8_all_gather": (_UNITS, lambda run: f"{run.float8_all_gather} gathered in float8"),
    "expert_reduce_scatter": (
        _UNITS,
        lambda run: f"experts' gradients sent in {run.expert_reduce_scatter}",
    ),
    "exchange_dtype": (_UNITS, lambda run: f"tokens travel in {run.exchange_dtype}"),
    "exchange_rows": (_UNITS, lambda run: f"tokens travel once a {run.exchange_rows}"),
    "overlap_exchanges": (_UNITS, lambda run: "halves take turns at exchanges"),
    "replicate": (_UNITS, lambda run: f"{', '.join(run.replicate)} replicated"),
    "optimizer": (_OPTIMIZER, lambda run: run.optimizer),
    "save_all_to_all": (_AC, lambda run: f"all-to-alls {run.save_all_to_all} saved"),
    "ac": (_AC, lambda run: f"AC {_ac_name(run.ac)}"),
    "compiled": (_COMPILE, lambda run: "compiled"),
    "compile_backend": (_COMPILE, lambda run: run.compile_backend),
    "converters": (_CONVERT, lambda run: ", ".join(run.converters)),
    "lora": (_CONVERT, lambda run: "LoRA" + f" of rank {run.lora}" * (run.lora != 8)),
    "experts": (_MODELS, lambda run: f"{run.experts} experts, fewer rows than ranks"),
}

# Other columns of the table, what bounds or observes a run, and attention, which goes with cp.
_NOT_FEATURES = {
    *("model", "world", "parallelize"),
    *("global_batch", "seq_len", "layers", "narrow", "steps", "microbatch_size", "exact_sums"),
    *("attention", "max_norm", "nodes"),
    *("traced_step", "profiled_step", "typechecked", "watch_routing"),
    *("expert_shard_dim", "stock_copy_out"),  # stock's states lie elsewhere
    "keep_gradients",
}


# A new field of Run must say how the table shows it.
assert _WORDS.keys() | _NOT_FEATURES == {field.name for field in fields(Run)}


def describe(run: Run) -> tuple[str, str]:
    """The heading that ``run`` belongs under, and its features in words."""
    defaults = Run()
    found = [name for name in _WORDS if getattr(run, name) != getattr(defaults, name)]
    if run.backend in BACKENDS and "backend" in found:
        found.remove("backend")  # it has columns
    headings = [_WORDS[name][0] for name in found]
    if not set(headings) - {_LAYOUT} and run.model not in _MAIN_MODELS:
        headings.append(_MODELS)
    heading = max(headings, key=HEADINGS.index, default=_LAYOUT)
    return heading, ", ".join(_WORDS[name][1](run) for name in found) or "FSDP alone"


def is_lossy(run: Run) -> bool:
    """Whether ``run`` rounds otherwise than stock Titan: in fewer bits, or sums of halves."""
    halves = run.overlap_exchanges == "halves"  # other rounding: sums of two halves
    sums = halves or run.exchange_rows != "expert"  # or those of a rank
    lossy = run.float8_all_gather != "none" or bool(run.exchange_dtype) or sums
    return lossy or not isinstance(run.ac, str) or run.ac.startswith("fp8")


def _ranks(when: str | int) -> str:
    return f"to {when} ranks" if isinstance(when, int) else when


def _groups(groups: tuple[tuple[str, str | int], ...]) -> str:
    return "reshard " + ", ".join(f"`{name}` {_ranks(when)}" for name, when in groups)


def _ac_name(ac: Any) -> str:
    return ac if isinstance(ac, str) else f"fp8_{ac.mode}_{ac.preset}"
