# SPDX-License-Identifier: BSD-3-Clause
"""A job made small enough for a laptop, with what its layout and its keys can get wrong left in.

A fault of a layout shows in five blocks as in sixty, and in eight ranks as in 4,096, as long as the
small job has every kind of block, every axis of the mesh, and the decisions of the large one. So
layers go, widths and vocabularies shrink, and degrees become 2, 4 or 8. Each size keeps its class
(``in_class``): 1, 2, or more, with its remainder. Where more ranks than experts share those, FSDP
shards them along dim 1, and some ranks have no row of a router: so they do here. ``differences``
says what "auto" means otherwise in the small job: then nothing is verified.
"""

import contextlib
import copy
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.config import Configurable
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import MoE
from torchtitan.models.deepseek_v3.mtp import MTPLoss
from torchtitan.protocols.model_spec import ModelSpec

from titan_ext.base.messages import Mistakes, did_you_mean
from titan_ext.base.nodes import Nodes
from titan_ext.base.titan import batch
from titan_ext.base.titan.parallelism import DEGREES
from titan_ext.fsdp.plan import FSDPPlan, ShardSizes
from titan_ext.fsdp.prefetch import parse_prefetch_limit
from titan_ext.fsdp.settings import PREFETCH
from titan_ext.parallelize.limits import value_of, wrong_degrees
from titan_ext.parallelize.model_spec import extend_model_spec
from titan_ext.parallelize.recipe import resolve_config
from titan_ext.plan.shorten import kind_of
from titan_ext.plan.stand_ins import NoDataLoader, NoTokenizer, in_full_precision
from titan_ext.verify.buffered import run_on_a_cpu

STEPS, STEPS_OF_KEYS = 3, 2
"""Steps beside one process, and beside stock."""
_MANY = {"words": (257, 64), "tokens": (65, 8), "sequences": (5, 1), "passes": (4, 2)}
_MANY |= {"blocks": (5, 1), "replicas": (3, 1)}
"""By axis the least size of which the copy has all that "many" can change, such as a second byte of
a word, and of what a size keeps its remainder."""
_MASK_BLOCK = 128
"""Tokens of a block of FlexAttention's masks: a context rank has whole ones."""
_WARMUP, _MAX_NORM = "lr_scheduler.warmup_steps", "training.max_norm"
_KEEPS = (batch.SEQUENCE, _WARMUP, _MAX_NORM)
"""Keys that are another's in the small copy, unless they are to stay as they are."""
_WORLD, _MOST_RANKS = 8, 16
"""Processes that it takes willingly, and where a job has axes that need more."""
_SIZES = (1, 2, 4, 8)
_REPLICAS = (1, 2, 3, 4)
_AXES = tuple(axis for axis in DEGREES if axis != "ep")
_EXPERTS = 4
"""Experts that remain, for each that a token goes to."""
_MOST_PARAMETERS = 100_000_000
"""Of a model of a user's."""
_PER_KIND = 2
"""Blocks of a kind that remain, where there is room."""
_CLIPPED, _NOT_CLIPPED = 0.1, 1e3
"""Norms below and above those of the gradients of a random model."""
_FACTORS = (32, 16, 8, 4, 2)
_LEAST_DIM = 64
_WIDTHS = ("dim", "in_features", "out_features", "normalized_shape", "hidden_dim", "head_dim")
_WIDTHS += ("embedding_dim", "embed_dim", "q_lora_rank", "kv_lora_rank")
_WIDTHS += ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Fields of Titan's model configs that are widths. All are divided by one factor, and numbers of
heads stay, so that sums and products of widths stay right."""
_SHARDS = "shards"
"""The decision that is none: what is not plain in the shards of parameters."""
_FAR = 2
"""Units ahead that count as many: a small copy has no more."""
_LAYER = re.compile(r"(^|\.)layers\.([^.:]+)")
_WINDOWS = ("window", "window_size", "sliding_window_size")
RESHARD, _GROUPS = "parallelism.fsdp_reshard_after_forward", "parallelism.fsdp_reshard_groups"
_TABLES = (
    _GROUPS,
    "parallelism.fsdp_replicate",
    "parallelism.fsdp_quantize_frozen",
    "activation_checkpoint.op_policies",
    "activation_checkpoint.exempt",
)
"""Keys with patterns for names of modules, in which layers have numbers."""


def in_class(axis: str, size: int) -> int:
    """The least size that is of the class of ``size``: few are as many as they are."""
    many, of = _MANY[axis]
    return min(size, many + (size - many) % of)


def set_key(config: Any, key: str, value: Any) -> None:
    """Give a dotted key a value; a section that does not have it stays as it is."""
    *parents, name = key.split(".")
    for parent in parents:
        config = getattr(config, parent)
    if hasattr(config, name):
        setattr(config, name, value)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of a job, as ``ParallelDims`` has them, and its nodes."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    nodes: Nodes
    """Ranks of a node, and of an NVLink domain."""

    @property
    def world(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def shards(self) -> int:
        """Ranks over which dense parameters are sharded, and experts spread."""
        return self.dp_shard * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def relations(self) -> tuple[Any, ...]:
        """The axes that there are, and how the experts' degree stands to the others."""
        has = [getattr(self, axis) > 1 for axis in DEGREES]
        both = self.ep > 1 and self.tp > 1
        beside_tp = (self.ep > self.tp) - (self.ep < self.tp) if both else 0
        return *has, beside_tp, self.ep == self.shards

    def expert_ranks(self, backend: Any) -> int:
        """Ranks that the experts of a layer are spread over, and their shards."""
        return ShardSizes.of(self.dims(backend)).expert_ranks

    def dims(self, backend: Any) -> ParallelDims:
        """The degrees as Titan's object, without meshes."""
        sizes: Any = {axis: getattr(self, axis) for axis in DEGREES}
        return ParallelDims(**sizes, world_size=self.world, spmd_backend=backend)

    def __str__(self) -> str:
        names = {"dp_replicate": "HSDP", "tp": "TP", "cp": "CP", "pp": "PP"}
        parts = [f"{x} {getattr(self, n)}" for n, x in names.items() if getattr(self, n) > 1]
        if self.ep > 1:
            parts.append(f"EP {self.ep} x EDP {self.shards // self.ep}")
        return ", ".join([f"{self.world} rank{'s' * (self.world > 1)}", *parts])


@dataclass(frozen=True, kw_only=True)
class SmallJob:
    """A small copy of a job, as ``make_small`` makes it."""

    config: Any
    """The small trainer's config. ``Arm.config_of`` makes the one of a run of it."""
    large_config: Any
    layout: Layout
    """Of the small job; ``large_layout`` is the job's own."""
    large_layout: Layout
    samples: batch.Samples
    decisions: Mapping[str, str]
    """Those of the job itself, by key (``decisions``)."""
    summary: str
    """What shrank, in words."""
    shape: Mapping[str, tuple[int, int]]
    """Sizes of the job and of its copy, by axis."""
    max_norms: tuple[float, float]
    """At which odd steps clip, and even ones."""
    expert_ranks: int
    """Over which ``force_routing`` spreads the experts, also in another layout."""
    plain: tuple[str, ...]
    """Names of classes in whose place the copy has plain ones (``in_full_precision``)."""
    parameters: int
    routing: str = "balanced"
    """With "balanced" what random weights make; with "skewed" all tokens go to the first expert of
    a layer, too; with "idle" none goes to it."""


def layout_of(config: Any, ranks: int, nodes: Nodes) -> Layout:
    """The layout of a trainer's config on ``ranks``, which its degrees divide."""
    dims = ParallelDims.from_config(config.parallelism, ranks)
    return Layout(**{axis: getattr(dims, axis) for axis in DEGREES}, nodes=nodes)


def small_layout(large: Layout, backend: Any, experts: int = 0) -> Layout:
    """Degrees of 1, 2, 4 and 8 that stand in the same relations as those of ``large``.

    No axis of the job is lost, and expert parallelism stays below, equal to or above tensor
    parallelism. What shards the experts beside it (EDP) stays an axis. Its degree is 4 where it can
    be, so that a degree taken for another one shows. If no power of two shards the job, 3 or 6
    ranks do here: shards are of unequal rows. If more ranks share the ``experts`` of a layer than
    those are, so do they here, where there is room for ``_WORLD`` ranks.

    Raises ValueError if that takes more ranks than a laptop has room for.
    """
    is_crowded = 0 < experts < large.expert_ranks(backend)
    is_odd = large.dp_shard.bit_count() > 1 and not is_crowded
    sizes: dict[str, tuple[int, ...]] = dict.fromkeys(_AXES, _SIZES)
    sizes["dp_replicate"] = _REPLICAS
    sizes["dp_shard"] += (3, 6) if is_odd else ()
    replicas = in_class("replicas", large.dp_replicate)
    has_edp = large.ep < large.shards
    axes = sum(large.relations[: len(_AXES) + 1]) - (large.ep > 1 and not has_edp)
    least_world = _WORLD if axes > 1 and large.world >= _WORLD else 1
    found = [
        small
        for small in _layouts(sizes.values(), _SIZES, large.nodes)
        if all(getattr(small, axis) <= getattr(large, axis) for axis in DEGREES)
        and small.relations == large.relations
    ]
    if not found:
        raise ValueError(f"no degrees of 1, 2, 4 and 8 stand in the relations of {large}.")
    least = min(found, key=lambda small: small.world)
    if least.world > _MOST_RANKS:
        raise ValueError(f"all axes of {large} need {least.world} processes here: {least}.")
    share = is_crowded and experts > large.ep  # several experts a rank

    def preference(small: Layout) -> tuple[Any, ...]:
        """What the job has, on ``_WORLD`` ranks or as few more as that takes; experts over four."""
        ranks = small.expert_ranks(backend)
        crowd = ranks >= _WORLD
        return (
            (is_crowded and not crowd) or (is_odd and small.dp_shard % 3 != 0),
            share and not (crowd and ranks > 2 * small.ep),
            small.dp_replicate < replicas,
            small.world < least_world,
            max(small.world, _WORLD),
            small.ep not in (1, 2 if share else 4),
            small.ep == 1 and small.dp_shard != 4,  # without them four shards
            small.world,
        )

    small = min((each for each in found if each.world <= _MOST_RANKS), key=preference)
    return replace(small, nodes=_small_nodes(large, small))


def _layouts(
    sizes: Iterable[Sequence[int]], experts: Sequence[int], nodes: Nodes
) -> Iterator[Layout]:
    """Layouts of all these degrees by axis, and of the expert degrees that divide their shards."""
    for degrees in itertools.product(*sizes):
        shards = math.prod(degrees[1:4])
        for ep in (n for n in experts if shards % n == 0):
            yield Layout(**dict(zip(_AXES, degrees, strict=True)), ep=ep, nodes=nodes)


def _small_nodes(large: Layout, small: Layout) -> Nodes:
    """Nodes that lie between the small ranks as the job's do between its own."""
    joined = large.nodes.nvlink_domain
    if large.shards <= large.nodes.ranks and large.ep <= joined:
        ranks = small.world
    elif large.ep > joined:  # tokens cross nodes
        ranks = max(small.ep // 2, 1) if large.nodes.among(large.ep) else 1
    else:  # only the experts' gathers do
        ranks = max(small.shards // 2, small.ep if small.ep < small.shards else 1)
    return Nodes(ranks, ranks)


def why_not(config: Any) -> str:
    """The reason why a trainer's config cannot be verified; "" if it can."""
    model = config.model_spec.model
    spec = copy.deepcopy(config.model_spec)
    in_full_precision(spec, emulates=False)
    if has_quantization(spec.model):
        return "LoRA on linears or experts in fewer bits has no plain class in one process."
    if getattr(model, "vision_encoder", None) is not None:
        return "a model with a vision encoder needs images."
    loss = config.loss
    if isinstance(loss, ChunkedLossWrapper.Config):
        loss = loss.loss_fn
    known = MTPLoss if getattr(model, "mtp_layers", None) else CrossEntropyLoss
    if type(loss) is not known.Config:
        return f"the reference computes {known.__name__} by hand, not {type(loss).__qualname__}."
    if not getattr(model, "layers", None):
        return f"the blocks of a {type(model).__qualname__} are unknown."
    return ""


def make_small(
    config: Any, large: Layout, *, keep: Sequence[str] = (), spec: ModelSpec | None = None
) -> SmallJob:
    """Make a small copy of the job of a trainer's ``config``, which stays as it is.

    Those of ``_KEEPS`` in ``keep`` stay as they are in the job. ``spec`` is a model that is small
    already, of the job's kinds of blocks; names of layers in the job's keys are its own. Without it
    the job's model is made small.

    Raises ValueError for a model that cannot be made small, or a key that is none of those.
    """
    if wrong := next((key for key in keep if key not in _KEEPS), None):
        expected = ", ".join(_KEEPS)
        near = did_you_mean(wrong, _KEEPS)
        raise ValueError(f"--keep {wrong}: expected some of {expected}{near}")
    moes = [moe for _, moe, *_ in config.model_spec.model.traverse(MoE.Config)]
    experts = min((moe.num_experts for moe in moes), default=0)
    layout = small_layout(large, config.parallelism.spmd_backend, experts)
    small = copy.deepcopy(config)
    if spec is not None:
        small.model_spec = extend_model_spec(spec)
    plain = in_full_precision(small.model_spec, emulates=True)
    plain |= run_on_a_cpu(small, drops=True)
    model = small.model_spec.model
    said = [f"{len(model.layers)} blocks of your own"]
    if spec is None:
        said = _shrink(small, _kept_layers(config), large, layout)
    _set_degrees(small, layout)
    samples = _set_batch(small, large, layout, keep)
    _silence(small)
    clips = small.training.max_norm
    with torch.device("meta"):
        parameters = sum(p.numel() for p in model.build().parameters())
    if spec is not None and parameters > _MOST_PARAMETERS:
        raise ValueError(
            f"--model has {parameters / 1e6:,.0f} M parameters; expected at most "
            f"{_MOST_PARAMETERS / 1e6:.0f} M. It is not made smaller, and {layout.world} processes "
            "of this machine train it again and again: try fewer words, blocks and experts."
        )
    return SmallJob(
        config=small,
        large_config=config,
        layout=layout,
        large_layout=large,
        samples=samples,
        decisions=decisions(config, large),
        summary=", ".join(said),
        shape=_shape(config, large, small, layout, samples),
        max_norms=(clips, clips if _MAX_NORM in keep else _NOT_CLIPPED),
        expert_ranks=layout.ep,
        plain=tuple(sorted(plain)),
        parameters=parameters,
    )


def _shrink(small: Any, kept: Sequence[int], large: Layout, layout: Layout) -> list[str]:
    """Leave the layers ``kept``, and make them small, in place; say what shrank."""
    model = small.model_spec.model
    count = len(model.layers)
    kinds = len({repr(kind) for kind in map(kind_of, model.layers)})
    model.layers = [model.layers[index] for index in kept]
    said = [f"{count} -> {len(kept)} blocks ({kinds} kinds)"]
    if ahead := getattr(model, "mtp_layers", None):
        model.mtp_layers = ahead[:_PER_KIND]
        said.append(f"{len(ahead)} -> {len(model.mtp_layers)} blocks of multi-token prediction")
    _rename_layers(small, kept)
    return said + _shrink_model(small, large, layout)


def _kept_layers(config: Any) -> tuple[int, ...]:
    """Numbers of the layers that remain.

    The first of each kind and set of patterns, the middle and the last one, a second one of each
    kind, and as many as make a fifth.
    """
    patterns = [pattern for key in _TABLES for pattern in value_of(config, key) or ()]

    def kind(index: int, layer: Any) -> str:
        matched = [fnmatch(str(index), part) for p in patterns for _, part in _LAYER.findall(p)]
        return repr((kind_of(layer), matched))

    kinds = [kind(index, layer) for index, layer in enumerate(config.model_spec.model.layers)]
    least = in_class("blocks", len(kinds))
    if config.parallelism.pipeline_parallel_degree > 1:  # two for each stage, of two ranks
        schedule = get_schedule_class(config.parallelism.pipeline_parallel_schedule)
        least = max(least, 8 if issubclass(schedule, PipelineScheduleMulti) else 4)
    kept = {kinds.index(kind) for kind in kinds} | {len(kinds) // 2, len(kinds) - 1}
    for index, kind in enumerate(kinds):
        if sum(kinds[each] == kind for each in kept) < min(_PER_KIND, kinds.count(kind)):
            kept.add(index)
    more = (index for index in range(len(kinds)) if index not in kept)
    return tuple(sorted({*kept, *itertools.islice(more, max(least - len(kept), 0))}))


def _rename_layers(config: Any, kept: Sequence[int]) -> None:
    """Give numbers of layers in patterns the places that those layers have now."""
    for key in _TABLES:
        value = value_of(config, key) or ()
        if isinstance(value, Mapping):
            items = {new: v for name, v in value.items() for new in _renamed(name, kept)}
            set_key(config, key, items)
        elif value:
            set_key(config, key, [new for name in value for new in _renamed(name, kept)])


def _renamed(pattern: str, kept: Sequence[int]) -> list[str]:
    found = _LAYER.search(pattern)
    if found is None or found[2] == "*":
        return [pattern]
    places = [place for place, index in enumerate(kept) if fnmatch(str(index), found[2])]
    rest = "*" if found[2].endswith("*") else ""  # as in layers.1*, for what is in the block, too
    return [_LAYER.sub(rf"\g<1>layers.{place}{rest}", pattern) for place in places]


def _configs_in(config: Any) -> Iterator[tuple[str, Any]]:
    """Path and object of each config in one, itself included."""
    found = config.traverse(Configurable.Config, recurse=True)
    return ((path, part) for path, part, *_ in found)


def _shrink_model(config: Any, large: Layout, layout: Layout) -> list[str]:
    """Divide widths, and leave fewer experts and words, in place; say what shrank."""
    model = config.model_spec.model
    said = []
    vocabulary = model.vocab_size
    routers = {moe.num_experts for _, moe, *_ in model.traverse(MoE.Config)}
    widths = [
        (path, part, name, size)
        for path, part in _configs_in(model)
        for name in _WIDTHS
        if type(size := getattr(part, name, None)) is int
        and size > 1
        and not _is_vocabulary(path, name)
        and not (".gate" in path and name == "out_features" and size in routers)
    ]
    common = math.gcd(*(size for *_, size in widths))
    wide = [
        size
        for path, _, name, size in widths
        if name in ("dim", "hidden_dim") and not path.endswith("rope")
    ]
    # Grouped GEMMs take strides of 16 bytes, and rotary embeddings pairs of an even width.
    fits = (f for f in _FACTORS if not common % (4 * f) and model.dim >= _LEAST_DIM * f)
    factor = next((f for f in fits if not any(size % (8 * f) for size in wide)), 1)
    for _, part, name, size in widths:
        setattr(part, name, size // factor)
    said.append(f"widths / {factor}")
    few = in_class("words", vocabulary)
    if few < vocabulary:
        for path, found in _configs_in(config):
            for field in fields(found):
                has = getattr(found, field.name, None)
                if has == vocabulary and _is_vocabulary(path, field.name):
                    setattr(found, field.name, few)
        said.append(f"vocabulary {few}")
    for _, moe, *_ in list(model.traverse(MoE.Config)):
        before = moe.num_experts
        after = _few_experts(moe, large, layout, config.parallelism.spmd_backend)
        if before != after:
            _set_experts(moe, before, after)
            said.append(f"{before} -> {after} experts")
    for _, part in _configs_in(model):  # functions of the large sizes, as for Qwen3's fused QKV
        if isinstance(initial := getattr(part, "param_init", None), dict):
            part.param_init = {name: _initial(function) for name, function in initial.items()}
    return list(dict.fromkeys(said))


def _is_vocabulary(path: str, name: str) -> bool:
    """True for a field that counts words, of embedding, head, model and loss."""
    is_head = name == "out_features" and path.endswith("lm_head")
    return is_head or name == "num_embeddings" or "vocab" in name


def _few_experts(moe: Any, large: Layout, small: Layout, backend: Any) -> int:
    """A number of experts with the remainders and groups of ``moe``'s own.

    One or two for each rank of EP, or fewer than the ranks that share them, where the job has so
    few; an odd number for each, where it has that.
    """
    top_k, groups = moe.router.top_k, moe.router.num_expert_groups or 1
    few = max(_EXPERTS * top_k, 2 * groups)
    few += -few % math.lcm(groups, 8) + moe.num_experts % 8
    ranks = small.expert_ranks(backend)
    each, left = divmod(moe.num_experts, large.ep)
    if not left and 1 <= each <= 2 and large.ep > 1:
        few = each * small.ep
    elif not left and each % 2 and large.ep > 1 and groups == 1:
        few = small.ep * (-(-few // small.ep) | 1)
    elif large.expert_ranks(backend) > moe.num_experts and few >= ranks:
        step = math.lcm(small.ep, 2 if groups > 1 else 1)
        few = (ranks - 1) // step * step
    return min(few, moe.num_experts)


def _set_experts(moe: Any, before: int, after: int) -> None:
    top_k, groups = moe.router.top_k, moe.router.num_expert_groups or 1
    if after % groups or after < 2 * groups:  # of two groups a token goes to one
        moe.router.num_expert_groups, moe.router.num_limited_groups = 2, 1
    for path, part in _configs_in(moe):
        for name in ("num_experts", "out_features"):
            is_gate = name == "num_experts" or ".gate" in path
            if is_gate and getattr(part, name, None) == before:
                setattr(part, name, after)
        if after < _EXPERTS * top_k and getattr(part, "top_k", None) == top_k:
            part.top_k = min(top_k, 2)


def _initial(function: Any) -> Any:
    module = getattr(getattr(function, "func", function), "__module__", "")
    is_torchs = module == "torch.nn.init"
    return function if is_torchs else functools.partial(torch.nn.init.normal_, std=0.02)


def _set_degrees(config: Any, layout: Layout) -> None:
    keys = config.parallelism
    for axis, key in DEGREES.items():
        setattr(keys, key, getattr(layout, axis))
    half = max(layout.dp_shard // 2, 1)  # of the shards, where a key says a number of ranks
    if isinstance(value_of(config, RESHARD), int):
        set_key(config, RESHARD, half)
    groups = value_of(config, _GROUPS) or {}
    numbers = {name: half for name, when in groups.items() if isinstance(when, int)}
    set_key(config, _GROUPS, groups | numbers)


def _set_batch(config: Any, large: Layout, layout: Layout, keep: Sequence[str]) -> batch.Samples:
    length = value_of(config, batch.SEQUENCE)
    if batch.SEQUENCE not in keep:
        length = in_class("tokens", length) if layout.cp == 1 else _MASK_BLOCK * layout.cp
    sequences = in_class("sequences", batch.sequences_of_rank(config.training))
    samples = batch.make_small(
        config,
        layout.data_ranks,
        length=length,
        sequences=sequences if layout.cp == 1 else min(sequences, 2),
        passes=max(in_class("passes", batch.passes_of_step(config, large.data_ranks)), 2),
    )
    training = config.training
    training.steps = STEPS + 1  # after a resume
    schedule: Any = {"decay_ratio": None, "total_steps": None}  # another rate for each step
    if _WARMUP not in keep:
        schedule["warmup_steps"] = 0  # an update to be seen
    config.lr_scheduler = replace(config.lr_scheduler, **schedule)
    if _MAX_NORM not in keep:
        training.max_norm = _CLIPPED
    most = samples.length // 4
    for _, part in _configs_in(config.model_spec.model):
        for field in fields(part):
            window = getattr(part, field.name, None)
            if field.name in _WINDOWS and type(window) is int:
                setattr(part, field.name, min(window, most))
            elif field.name in _WINDOWS and type(window) is tuple:  # varlen's: without the query
                setattr(part, field.name, (min(window[0], most - 1), *window[1:]))
    return samples


def _shape(
    config: Any, large: Layout, small: Any, layout: Layout, samples: batch.Samples
) -> dict[str, tuple[int, int]]:
    """Sizes of a job, and of its copy, by axis."""

    def sizes(of: Any, its: Layout, passes: int) -> dict[str, int]:
        model = of.model_spec.model
        moe = next((each for _, each, *_ in model.traverse(MoE.Config)), None)
        found = {"ranks": its.world, "replicas": its.dp_replicate, "blocks": len(model.layers)}
        if moe is not None:
            found["experts a rank"] = -(-moe.num_experts // its.ep)
            found["experts of a token"] = moe.router.top_k
        length = value_of(of, batch.SEQUENCE)
        rows = batch.sequences_of_rank(of.training)
        found |= {"words": model.vocab_size, "tokens of a sequence": length, "sequences": rows}
        return found | {"microbatches": passes}

    passes = batch.passes_of_step(config, large.data_ranks)
    before, after = sizes(config, large, passes), sizes(small, layout, samples.passes)
    shape = {axis: (size, after[axis]) for axis, size in before.items() if axis in after}
    return shape | {"steps": (config.training.steps, small.training.steps)}


def _silence(config: Any) -> None:
    """Leave out data, files, metrics, compiled kernels, and what a CPU does not have.

    The job's own checkpointer saves all its states once, in torch's format.
    """
    config.metrics = replace(
        config.metrics, enable_tensorboard=False, enable_wandb=False, log_freq=1
    )
    config.validator = replace(config.validator, enable=False)
    config.debug = replace(config.debug, print_config=False, save_config_file=None, seed=42)
    config.debug.enable_structured_logging = False
    config.dataloader, config.tokenizer = NoDataLoader.Config(), NoTokenizer.Config()
    config.hf_assets_path = "."
    config.compile = replace(config.compile, backend="aot_eager")
    config.training.disable_cuda_graphs = True
    config.checkpoint = checkpoint = replace(
        config.checkpoint,
        folder="checkpoint",
        interval=STEPS,
        load_step=-1,
        load_only=False,
        initial_load_path=None,
        initial_load_model_only=True,
        initial_load_in_hf=False,
        initial_load_in_hf_quantized=False,
        last_save_model_only=False,
        last_save_in_hf=False,
        enable_first_step_checkpoint=False,
    )
    if getattr(checkpoint, "async_mode", "disabled") != "disabled":
        checkpoint.async_mode = "async"  # a fork can have no process of its own, and pins nothing


def resumes(config: Any) -> bool:
    """True if a job goes on from its checkpoints with all that it has."""
    checkpoint = config.checkpoint
    return checkpoint.enable and not set(checkpoint.exclude_from_loading) - {"dataloader"}


def in_other_layout(job: SmallJob) -> SmallJob | None:
    """The small job in another layout that its keys allow, with the same steps; None without."""
    for layout in other_layouts(job.layout):
        microbatch, left = divmod(job.samples.step, layout.data_ranks * job.samples.passes)
        if left:
            continue
        config = copy.deepcopy(job.config)
        _set_degrees(config, layout)
        batch.set_batch(config, microbatch)
        with contextlib.suppress(ValueError):
            Mistakes(wrong_degrees(config, layout.world)).raise_all()
            replace(copy.deepcopy(config))  # checks its keys, and adapts attention in place
            return replace(job, config=config, layout=layout)
    return None


def other_layouts(layout: Layout) -> list[Layout]:
    """Layouts in which a job of ``layout`` may resume, the cheapest first: it has few ranks.

    Experts stay spread over ranks, and where they can over other ones. A pipeline is gone.
    """
    limits = layout.dp_replicate, layout.world, layout.cp, layout.tp, 1
    sizes = [[n for n in (*_SIZES, 16) if n <= most] for most in limits]
    found = [
        replace(other, nodes=_small_nodes(layout, other))
        for other in _layouts(sizes, sizes[1], layout.nodes)
        if other.world <= layout.world and other != layout and (other.ep == 1 or layout.ep > 1)
    ]

    def preference(other: Layout) -> tuple[Any, ...]:
        are_whole = layout.ep > 1 and other.ep == 1
        alike = sum(getattr(other, axis) == getattr(layout, axis) for axis in DEGREES)
        return other.world == 1, are_whole, other.world, alike, -other.dp_shard

    return sorted(found, key=preference)


def decisions(config: Any, layout: Layout) -> dict[str, str]:
    """Decisions of a job's recipe that may depend on its size, by key, in words."""
    config = copy.deepcopy(config)
    run_on_a_cpu(config, drops=True)  # some dispatchers ask for a GPU as they are built
    backend = config.parallelism.spmd_backend
    recipe = resolve_config(config, layout.dims(backend), layout.nodes)
    plan, exchanges = recipe.fsdp, recipe.exchanges
    ahead = max(len({*unit.forward_prefetch}) for unit in plan.units)
    behind = max(len({*unit.backward_prefetch}) for unit in plan.units)
    found = {
        "fsdp_wrap": plan.wrap,
        "reduce-scatter buffers": str(plan.reduce_scatter_buffers),
        "overlap_exchanges": exchanges.overlap,
        "exchange_rows": exchanges.rows,
        "exchange_dtype": str(exchanges.dtype),
        "save_all_to_all": str(exchanges.saved),
    }
    limit = parse_prefetch_limit(PREFETCH, value_of(config, PREFETCH))
    if limit is None or limit.nbytes is None:  # more small units fit in a size
        found["prefetch"] = f"{min(ahead, _FAR)} units ahead, {min(behind, _FAR)} behind"
    for unit in plan.units:
        kind, when = f"{unit.kind_name} units", unit.reshard_after_forward
        said = f"reshard {when if isinstance(when, bool) else 'to a number of ranks'}"
        has = found[kind].split(", ") if kind in found else []
        found[kind] = ", ".join(dict.fromkeys([*has, said]))
    if shards := sorted(_odd_shards(plan)):
        found[_SHARDS] = ", ".join(shards)
    return found


def _odd_shards(plan: FSDPPlan) -> set[str]:
    """What is not plain in the shards of a plan's parameters, in words."""
    found = set()
    for group in (group for unit in plan.units for group in unit.groups):
        for param in group.params:
            size, world = (*param.shape, 1)[param.shard_dim], group.shard_world
            if param.shard_dim:
                found.add("experts along dim 1")
            elif math.ceil(size / world) * (world - 1) >= size > 1:
                found.add("ranks without rows")
            elif size % world:
                found.add("unequal rows")
    return found


def lost_shards(large: Mapping[str, str], small: Mapping[str, str]) -> list[str]:
    """What shards of a job's parameters are, and those of its small copy are not, in words."""
    has = small.get(_SHARDS, "").split(", ")
    return [f"shards: {x}" for x in large.get(_SHARDS, "").split(", ") if x and x not in has]


def differences(large: Mapping[str, str], small: Mapping[str, str]) -> list[str]:
    """Decisions that are not the same in the small job, in words; ``lost_shards`` are others."""
    return [
        f"{key}: {large.get(key, 'none')} in the job, {small.get(key, 'none')} in the small one"
        for key in dict.fromkeys([*large, *small])
        if key != _SHARDS and large.get(key) != small.get(key)
    ]
