# SPDX-License-Identifier: BSD-3-Clause
"""Values, degrees, schedules and models that no run can have, refused before anything starts.

Titan meets most of them on the ranks: as a bare assertion, a division by zero, or not at all.
``wrong_together`` has the keys of ours that do not go together.
"""

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.common.moe import MoE
from torchtitan.protocols.model_spec import ModelSpec

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.base.messages import and_more
from titan_ext.base.titan import batch
from titan_ext.base.titan.parallelism import DEGREES
from titan_ext.components.exchange_policy import wrong_dispatchers
from titan_ext.components.float8_linears import wrong_float8
from titan_ext.components.optim import MUON
from titan_ext.fsdp.plan import ShardSizes
from titan_ext.fsdp.settings import EXPERT_REDUCE_SCATTER, QUANTIZE_FROZEN, FSDPSettings
from titan_ext.fsdp.units import REPLICATE
from titan_ext.parallelize.keys import FACTS

_SPMD_BACKENDS = ("spmd_types", "partial_dtensor")
_OTHERS = "another schedule (1F1B, Interleaved1F1B)"
_WEIGHTS = re.compile(r"\d+W\d+")  # stage, gradients of weights, microbatch
# Titan models whose own parallelize function refuses something, by ModelSpec.name.
_NO_CONTEXT_PARALLEL = ("kimi_k2_5", "qwen3_5")
_SPMD_TYPES_ONLY = ("muse_glimmer",)
_V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
_SPLIT_BACKWARD = (ScheduleInterleavedZeroBubble, *_V_SHAPED)


class _Limit(NamedTuple):
    """The values that a key may have: in words, and True for one of them."""

    expected: str
    holds: Callable[[Any], bool]


_FROM_ONE = _Limit("1 or more", lambda value: value >= 1 and value % 1 == 0)
_OR_AUTO = _Limit("1 or more, or -1", lambda value: value == -1 or _FROM_ONE.holds(value))
_FROM_ZERO = _Limit("0 or more", lambda value: value >= 0 and value % 1 == 0)
_FINITE = _Limit("0 or more, and finite", lambda value: 0 <= value < math.inf)
_SHARE = _Limit("0 to 1", lambda value: 0 <= value <= 1)
_BETAS = _Limit(
    "two numbers from 0 to below 1",
    lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value),
)
_EXPERT, _SHARD = DEGREES["ep"], DEGREES["dp_shard"]
_LIMITS = {
    "dump_folder": _Limit("the name of a folder", lambda value: value != ""),
    batch.LOCAL_BATCH: _FROM_ONE,
    batch.GLOBAL_BATCH: _OR_AUTO,
    batch.SEQUENCE: _FROM_ONE,
    batch.MICROBATCH: _FROM_ONE,
    "training.steps": _FROM_ONE,
    "training.max_norm": _Limit("more than 0", lambda value: value > 0),
    "training.gc_freq": _FROM_ONE,
    **{f"parallelism.{key}": _FROM_ONE for key in DEGREES.values()},
    f"parallelism.{_SHARD}": _OR_AUTO,
    # Titan looks for these two names, and ignores others.
    "compile.components": _Limit('"model" and "loss"', lambda value: {*value} <= {"model", "loss"}),
    "lr_scheduler.warmup_steps": _FROM_ZERO,
    "lr_scheduler.total_steps": _FROM_ONE,
    "lr_scheduler.decay_ratio": _SHARE,
    "lr_scheduler.min_lr_factor": _SHARE,
    "checkpoint.interval": _FROM_ONE,
    "checkpoint.keep_latest_k": _FROM_ZERO,
    "checkpoint.verify_checksums_up_to_gib": _Limit("0 or more", lambda value: value >= 0),
    "metrics.log_freq": _FROM_ONE,
    "validator.freq": _FROM_ONE,
    "comm.init_timeout_seconds": _FROM_ONE,
    "comm.train_timeout_seconds": _FROM_ONE,
}
_OF_OPTIMIZER = {"lr": _FINITE, "betas": _BETAS, "eps": _FINITE, "weight_decay": _FINITE}


def value_of(config: Any, key: str) -> Any:
    """The value of a dotted key; None where there is no such section or key."""
    return functools.reduce(lambda at, name: getattr(at, name, None), key.split("."), config)


def wrong_values(config: Any) -> Iterator[str]:
    """A message for every value that is out of its range; a key that is not there passes."""
    rows = [(key, limit, value_of(config, key)) for key, limit in _LIMITS.items()]
    groups = getattr(getattr(config, "optimizer", None), "param_groups", None) or ()
    for index, group in enumerate(groups):
        of_group = f"optimizer.param_groups.{index}.optimizer_kwargs"
        for name, limit in _OF_OPTIMIZER.items():
            rows.append((f"{of_group}.{name}", limit, group.optimizer_kwargs.get(name)))
    for key, limit, value in rows:
        if value is not None and not limit.holds(value):
            yield f"{key} is {value!r}; expected {limit.expected}."


def wrong_degrees(config: Any, ranks: int | None) -> Iterator[str]:
    """A message for every degree that does not fit the number of ranks or the experts.

    ``config`` is a trainer's, without wrong values; ``ranks`` are those of the whole run, None if
    unknown.
    """
    parallelism = config.parallelism
    degrees = {key: getattr(parallelism, key) for key in DEGREES.values() if key != _EXPERT}
    shard = degrees[_SHARD]
    product = math.prod(max(degree, 1) for degree in degrees.values())
    if ranks is not None and (ranks % product or (shard > 0 and ranks != product)):
        parts = [f"{key} {degree}" for key, degree in degrees.items()]
        given = " x ".join(part for part in parts if not part.endswith((" 1", " -1")))
        yield (
            f"parallelism: {given or 'one copy'} makes {product} ranks, but this run has {ranks}; "
            f"expected degrees whose product {'is' if shard > 0 else 'divides'} {ranks}"
            f"{f', or {_SHARD} = -1 for the ranks that are left' if shard > 0 else ''}."
        )
        return
    shard = ranks * max(shard, 1) // product if ranks is not None else shard
    yield from _wrong_experts(config, shard)
    if shard > 0:
        copies = parallelism.data_parallel_replicate_degree
        yield from batch.wrong_global_batch(config, shard * copies)


def _wrong_experts(config: Any, shard: int) -> Iterator[str]:
    """A message if the expert degree does not divide the experts, or the ranks that share them.

    ``shard`` is FSDP's degree, -1 if it is unknown.
    """
    parallelism, spec = config.parallelism, config.model_spec
    moes = [moe for _, moe, _, _ in spec.model.traverse(MoE.Config)] if spec else []
    experts = getattr(parallelism, _EXPERT)
    ranks = shard * parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
    to_divide = {}
    if moes:
        to_divide["the number of experts"] = moes[0].num_experts
    if shard > 0:
        to_divide["the ranks of one pipeline stage in one replica (FSDP shards x CP x TP)"] = ranks
    for what, whole in to_divide.items():
        if whole % experts:
            common = math.gcd(*to_divide.values())
            divisors = [n for n in range(1, common + 1) if common % n == 0]
            yield (
                f"parallelism.{_EXPERT} is {experts}; it has to divide {whole}, {what}; expected "
                f"{'one of ' if common > 1 else ''}{and_more(divisors, limit=12)}."
            )
            break
    of = replace(parallelism, data_parallel_shard_degree=shard)
    if moes and shard > 0 and (dims := stage_dims(of)) is not None:
        yield from _wrong_expert_shards(config, moes[0], dims)


def _wrong_expert_shards(config: Any, moe: MoE.Config, dims: ParallelDims) -> Iterator[str]:
    """A message if more ranks than experts share the routed experts, and cannot.

    FSDP then shards them along dim 1, as in Titan (``torchtitan/distributed/fsdp.py``). torch does
    that evenly only, and DistMuon not at all.
    """
    sizes = ShardSizes.of(dims)
    spread, world = sizes.expert_ranks, sizes.experts or sizes.dense
    if spread <= moe.num_experts or (dims.tp_enabled and not dims.ep_enabled):  # TP splits them
        return
    with torch.device("meta"):
        widths = {p.shape[1] for p in moe.routed_experts.inner_experts.build().parameters()}
    if uneven := [width for width in widths if width % world]:
        why = f"of {min(uneven)} values, over {world} ranks, which torch does evenly only"
    elif any(g.optimizer_name == MUON for g in getattr(config.optimizer, "param_groups", [])):
        why = f"which {MUON} does not support"
    else:
        return
    yield (
        f"parallelism.{_EXPERT} is {dims.ep}: {spread} ranks share {moe.num_experts} experts, so "
        f"FSDP shards dim 1 of their weights, {why}; expected another one, or copies of fewer "
        "ranks: data_parallel_replicate_degree > 1."
    )


def wrong_schedule(
    settings: FSDPSettings, of: ParallelismConfig, *, loss: Any, ac_config: Any, compiled: bool
) -> Iterator[str]:
    """A message for what a schedule that splits backward cannot do, or would do wrong.

    Zero-bubble schedules take the gradients of a stage's inputs first and those of its weights
    later. For that torch (``torch.distributed.pipelining._backward``) looks up the parameters that
    the stage holds when backward begins. FSDP2 swaps parameters: if it has resharded a unit by
    then, they are not those of the graph, and torch silently skips them. Stock TorchTitan 0.3 then
    trains without their gradients.

    ``loss`` and ``ac_config`` are configs, None where there is none.
    """
    if (key := _splitting_key(of)) is None:
        return
    why = f"parallelism.{key} is {getattr(of, key)!r}, which splits backward"
    if compiled:
        yield (
            f"{why}: torch.compile makes code that runs backward once. Expected compile.enable = "
            f"false, or {_OTHERS}."
        )
    policy = ""
    if isinstance(ac_config, SelectiveAC.Config):  # torch's selective checkpoints run backward once
        policy = '"selective"'
    elif isinstance(ac_config, FP8AC.Config) and ac_config.mode != "no_recompute":
        policy = f'"fp8" with mode "{ac_config.mode}"'
    if policy:
        yield (
            f"{why}; activation_checkpoint policy {policy} allows one backward only. Expected "
            f'policy "full" or "none", policy "fp8" with mode "no_recompute", or {_OTHERS}.'
        )
    if isinstance(loss, ChunkedLossWrapper.Config):
        yield (
            f"{why}: with the chunked loss the last norm would get no gradient. Expected another "
            f"loss (torchtitan.components.loss.CrossEntropyLoss), or {_OTHERS}."
        )
    for reshard_key, value in settings.reshard_by_key.items():
        if value not in ("default", "never"):
            yield (
                f"{why}, and {reshard_key} is {value!r}: parameters that are freed after forward "
                'would get no gradient. Expected "never", or "default", which keeps them gathered '
                "in a pipeline."
            )


def _splitting_key(parallelism: ParallelismConfig) -> str | None:
    """The key that chooses a schedule that splits backward; None if no key does."""
    if parallelism.pipeline_parallel_degree == 1:
        return None
    file = Path(parallelism.pipeline_parallel_schedule_csv or "")
    if file.is_file():  # Titan says so if it is missing
        return "pipeline_parallel_schedule_csv" if _WEIGHTS.search(file.read_text()) else None
    schedule = get_schedule_class(parallelism.pipeline_parallel_schedule)
    return "pipeline_parallel_schedule" if schedule in _SPLIT_BACKWARD else None


def wrong_model(
    spec: ModelSpec, parallelism: ParallelismConfig, training: TrainingConfig
) -> Iterator[str]:
    """A message for what Titan refuses for the model of ``spec``, or computes wrongly.

    With the attention that runs: a CPU has another one (``no_accelerator``).
    """
    name = spec.name
    cp, backend = parallelism.context_parallel_degree, parallelism.spmd_backend
    if name in _NO_CONTEXT_PARALLEL and cp > 1:
        yield (
            f"parallelism.context_parallel_degree is {cp}; {name} needs 1: TorchTitan does not "
            "support context parallelism for it."
        )
    attention = getattr(getattr(spec.model, "first_attention", None), "inner_attention", None)
    if cp > 1 and isinstance(attention, VarlenAttention.Config):
        yield (
            f"parallelism.context_parallel_degree is {cp}, which TorchTitan does not support with "
            'variable-length attention; expected 1, or attn_backend = "flex".'
        )
    if name in _SPMD_TYPES_ONLY and backend != "spmd_types":
        yield (
            f"parallelism.spmd_backend is {backend!r}; {name} supports only 'spmd_types', as in "
            "TorchTitan."
        )
    tp, ep = parallelism.tensor_parallel_degree, parallelism.expert_parallel_degree
    if name == "gpt_oss" and tp > 1 and ep == 1 and backend == "spmd_types":
        yield (
            f"parallelism.tensor_parallel_degree is {tp} and expert_parallel_degree 1; under "
            "'spmd_types' TorchTitan 0.3 then adds the bias of gpt_oss' experts once for each of "
            f"the {tp} ranks, and the loss is wrong. Expected expert_parallel_degree > 1."
        )
    if (
        tp > 1
        and not parallelism.enable_sequence_parallel
        and getattr(spec.model, "mtp_layers", None)
    ):
        # Its weight is replicated in _set_deepseek_v3_mtp_sharding, and not invariant as a norm's.
        yield (
            "parallelism.enable_sequence_parallel is false and tensor_parallel_degree "
            f"{tp}; TorchTitan 0.3 then adds the gradient of eh_proj (multi-token prediction) "
            f"once for each of the {tp} ranks, or fails. Expected true."
        )
    if name == "gpt_oss" and training.mixed_precision_param == "float32":
        # torchtitan/models/gpt_oss/moe.py: unlike other experts', the result stays bfloat16.
        yield (
            "training.mixed_precision_param is 'float32'; the experts of gpt_oss return bfloat16 "
            "in TorchTitan 0.3, which it cannot add to float32. Expected 'bfloat16'."
        )


def wrong_validation(config: Any) -> Iterator[str]:
    """A message for a schedule with which no job can validate; ``config`` is a trainer's.

    Where a rank has two neighbouring stages, torch hands gradients from one to the other, in a
    validation, too, which has none (``schedule.eval`` in torch/distributed/pipelining).
    """
    of = config.parallelism
    if not config.validator.enable or _splitting_key(of) != "pipeline_parallel_schedule":
        return
    if get_schedule_class(of.pipeline_parallel_schedule) in _V_SHAPED:
        yield (
            "validator.enable is true, and parallelism.pipeline_parallel_schedule "
            f'"{of.pipeline_parallel_schedule}", with which torch cannot validate: it ends in an '
            f"error. Expected validator.enable = false, or {_OTHERS}."
        )


def changed_exchanges(of: ParallelismConfig) -> dict[str, Any]:
    """The keys of a section with which tokens do not travel as in stock; Titan's has none."""
    keys = ("overlap_exchanges", "exchange_dtype", "exchange_rows")
    values = {key: getattr(of, key, None) for key in keys}
    return {k: value for k, value in values.items() if not FACTS[f"parallelism.{k}"].is_same(value)}


def wrong_together(
    settings: FSDPSettings,
    of: ParallelismConfig,
    *,
    compiled: bool,
    model: Decoder.Config,
    ac_config: Any,
    loss: Any = None,
) -> Iterator[str]:
    """A message for each pair of keys that do not go together.

    ``model``, ``ac_config`` and ``loss`` are configs; a ``loss`` of None is not known.
    """
    backend, ep, tp = of.spmd_backend, of.expert_parallel_degree, of.tensor_parallel_degree
    wrap, cp, dims = settings.wrap, of.context_parallel_degree, stage_dims(of)
    copies, pp = of.data_parallel_replicate_degree, of.pipeline_parallel_degree
    if backend not in _SPMD_BACKENDS:
        yield (
            f"parallelism.spmd_backend is {backend!r}, which titan_ext does not support "
            f"(TorchTitan removed it after 0.3); expected one of {', '.join(_SPMD_BACKENDS)}."
        )
    if settings.replicate and backend == "partial_dtensor" and copies > 1:
        yield (
            f"{REPLICATE} needs parallelism.data_parallel_replicate_degree = 1 with spmd_backend = "
            '"partial_dtensor": torch replicates over one axis only. Use "spmd_types".'
        )
    if settings.replicate and backend == "spmd_types" and cp > 1:
        yield (
            f"{REPLICATE} needs parallelism.context_parallel_degree = 1 with spmd_backend = "
            '"spmd_types": torch would put sharded and replicated parameters on two meshes, and '
            'TorchTitan\'s gradient norm takes one mesh only. Use "partial_dtensor".'
        )
    if settings.quantize_frozen and tp > 1:
        yield (
            f"{QUANTIZE_FROZEN} needs parallelism.tensor_parallel_degree = 1: NF4Tensor can be "
            "sharded only once, along its rows."
        )
    for axis, degree in (("pipeline", pp), ("context", cp)):
        if degree > 1 and getattr(model, "mtp_layers", None):
            yield (
                f"parallelism.{axis}_parallel_degree is {degree}, which TorchTitan 0.3 does not "
                "support with multi-token prediction; expected 1, or num_mtp_layers = 0."
            )
    # torchtitan/models/common/linear.py divides the bias for the sum over ranks, and nobody sums
    # its gradient; under spmd_types FSDP does. Found by ``titan_ext verify``.
    divides = any(True for _ in model.traverse(ScaledBiasRowwiseLinear.Config))
    if backend == "partial_dtensor" and tp > 1 and divides:
        yield (
            f"parallelism.tensor_parallel_degree is {tp}; under spmd_backend = 'partial_dtensor' "
            f"TorchTitan 0.3 takes 1/{tp} of the gradient of attention.wo.bias for the whole. "
            "Expected spmd_backend = 'spmd_types'."
        )
    if compiled and isinstance(ac_config, FP8AC.Config) and ac_config.offloads():
        yield (
            "activation_checkpoint.op_policies: offload and offload_float8 do not run under "
            "torch.compile: expected save or save_float8, or compile.enable = false."
        )
    if settings.expert_reduce_scatter and pp > 1:
        yield (
            f"{EXPERT_REDUCE_SCATTER} needs parallelism.pipeline_parallel_degree = 1: a pipeline "
            "sums the gradients of its microbatches in float32 before FSDP sends them."
        )
    for key, facts in FACTS.items():
        is_on = compiled and facts.is_on(getattr(of, key.rpartition(".")[2], None))
        if is_on and facts.eager_only:
            yield f"{key} does not go with compile.enable = true: {facts.eager_only}."
    changed = changed_exchanges(of)
    for key, value in changed.items():
        said = f'parallelism.{key} = "{value}"'
        if key == "overlap_exchanges" and cp > 1:
            yield (
                f"{said} needs parallelism.context_parallel_degree = 1: masks of half a batch are "
                "made from positions, of which a rank then has a part."
            )
        if key != "overlap_exchanges" and ep == 1:
            yield (
                f"{said} needs parallelism.expert_parallel_degree > 1: without expert parallelism "
                "no token travels."
            )
    for key, value in settings.collectives.items():
        said, of_experts = f'{key} = "{value}"', value != "blocks"
        if of_experts and ep == 1 and wrap != "experts":
            yield (
                f"{said} needs parallelism.expert_parallel_degree > 1 or parallelism.fsdp_wrap = "
                f'"experts": with fsdp_wrap = "{wrap}" and without expert parallelism one '
                "collective carries the experts and the parameters around them."
            )
        if of_experts and dims is not None and dims.dp_shard * cp * tp // ep <= 1:
            yield (
                f"{said} needs experts that FSDP shards: with parallelism.expert_parallel_degree "
                f"= {ep} each rank holds its experts whole. Expected a smaller degree, or "
                "a config without this key."
            )
    for key, ranks in settings.reshard_by_key.items():
        said = f"{key} is {ranks}, a number of ranks, which torch does not offer with"
        if isinstance(ranks, int) and backend != "partial_dtensor":
            yield (
                f'{said} parallelism.spmd_backend = "{backend}" (fully_shard refuses it on a mesh '
                'with other axes). Use "always" or "never", or spmd_backend = "partial_dtensor"; '
                "to keep gathering inside a machine use data_parallel_replicate_degree (HSDP)."
            )
        if isinstance(ranks, int) and tp > 1:
            yield (
                f"{said} parallelism.tensor_parallel_degree > 1 (FSDP2 reshards only plain tensors "
                'to a smaller world). Use "always" or "never".'
            )
    yield from wrong_schedule(settings, of, loss=loss, ac_config=ac_config, compiled=compiled)
    yield from wrong_dispatchers(model, changed)
    yield from wrong_float8(model, tp, ep, backend)


def stage_dims(of: ParallelismConfig) -> ParallelDims | None:
    """The degrees of a pipeline stage; None if the ranks are not known yet, or no degrees fit."""
    inner = of.context_parallel_degree * of.tensor_parallel_degree
    world = of.data_parallel_replicate_degree * of.data_parallel_shard_degree * inner
    if of.data_parallel_shard_degree < 0:
        # torchrun sets it; without it a degree of -1 has no value yet.
        world = int(os.environ.get("WORLD_SIZE", 0)) // of.pipeline_parallel_degree
    with contextlib.suppress(AssertionError):  # of Titan's check
        dims = ParallelDims.from_config(replace(of, pipeline_parallel_degree=1), world)
        return dims if dims.dp_shard * inner % dims.ep == 0 else None
    return None
