# SPDX-License-Identifier: BSD-3-Clause
"""Saved tensors of compiled code in float8: the point where torch.compile decides what is saved.

torch.compile traces forward and backward of a block as one graph and gives it to a *partitioner*.
That cuts it into two: what crosses the cut is saved. ``Float8Partitioner`` lets torch's own min-cut
partitioner cut. Then it puts the codec's operations into the two graphs, where the compiler fuses
them with their neighbours:

    forward:   saved = x                 ->  saved = quantize(x)
    backward:  x = saved                 ->  x = dequantize(saved)

A checkpoint policy tags each operation. torch lets a compiler treat ``PREFER_SAVE`` in its own way:
here it means float8. Nothing else is quantised, so parameters, indices and log-sum-exps never are
by accident. Inputs have no operation; the graph carries their policy (``annotation``). The output
of a collective arrives only with its ``wait_tensor``, so the wait takes over the tag.

The partitioner is an option of the ``compile`` of each of our modules (``compile_arguments``),
never a setting of the process.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    free_unbacked_symbols,
    guard_or_false,
    has_free_symbols,
)
from torch.utils.checkpoint import CheckpointPolicy

from titan_ext.activation_checkpoint.op_effects import chooses, op_name
from titan_ext.activation_checkpoint.op_rules import OpPolicy
from titan_ext.fp8 import Codec, Quantized, codec, dequantize, quantize
from titan_ext.fp8.codec import SUPPORTED_DTYPES
from titan_ext.fp8.saved_tensors import SMALL

_BACKENDS = ("inductor", "aot_eager")
_FLOAT8 = "titan_ext.float8"
_INPUTS = "titan_ext.inputs"
_RECOMPUTE = "titan_ext.recompute"
_WAIT = "_c10d_functional.wait_tensor"

_STATE: weakref.WeakKeyDictionary[FakeTensorMode, set[int]] = weakref.WeakKeyDictionary()
"""By compilation: the storages that stand in for parameters and buffers."""


def add_state(fake_mode: FakeTensorMode, storages: Iterable[int]) -> None:
    """``storages`` stand in for parameters or buffers of what is compiled under ``fake_mode``."""
    _STATE.setdefault(fake_mode, set()).update(storages)


def is_state(value: FakeTensor) -> bool:
    """True if ``value`` stands in for a parameter or buffer of a block that was traced.

    The compiler cannot tell (2.15): with DTensor parameters it mixes up the indices of the inputs
    that stay at the same address.
    """
    return value.untyped_storage()._cdata in _STATE.get(value.fake_mode, ())


@dataclass(frozen=True)
class Saved:
    """A tensor that goes from a forward graph to its backward graph."""

    source: str
    """The operation that made it ("aten.mm"), or "input"."""
    shape: tuple[int | torch.SymInt, ...]
    """A dimension that varies is a symbol."""
    dtype: torch.dtype
    treatment: str
    """Either "float8 e4m3", or "exact" and why float8 was not possible if it was asked for."""


@dataclass(frozen=True)
class Float8Partitioner(CustomPartitionerFn):
    """Cuts as torch does, then stores in float8, by ``codec``, what the checkpoint policy asked
    for.

    ``report`` is called for every graph that has a backward with what it saves.
    """

    codec: Codec
    report: Callable[[list[Saved]], None] | None = None

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        compiler: str = "inductor",
        **kwargs: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        rounds_inputs = OpPolicy.SAVE_FLOAT8 in _annotations(gm.graph, _INPUTS)
        _read_tags(gm.graph, rounds=rounds_inputs)
        if False in _annotations(gm.graph, _RECOMPUTE):
            _forget_checkpoints(gm.graph)
        for node in gm.graph.find_nodes(op="placeholder") if rounds_inputs else ():
            value = node.meta.get("val")
            node.meta[_FLOAT8] = isinstance(value, FakeTensor) and not is_state(value)
        forward, backward = min_cut_rematerialization_partition(
            gm, joint_inputs, compiler, num_fwd_outputs=num_fwd_outputs, **kwargs
        )
        # The codec's operations are decomposed as the compiler decomposed the rest.
        decompositions = None
        if compiler == "inductor":
            from torch._inductor.decomposition import select_decomp_table

            decompositions = select_decomp_table()
        trace = functools.partial(_trace, decompositions=decompositions)
        saved = self._store(forward, backward, num_fwd_outputs, trace)
        if self.report is not None:
            self.report(saved)
        return forward, backward

    def _store(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        num_outputs: int,
        trace: Callable[..., fx.Graph],
    ) -> list[Saved]:
        """Change in place what ``forward`` hands to ``backward``: all but its first outputs."""
        output = forward.graph.output_node()
        outputs = _nodes(output)
        visible = set(outputs[:num_outputs])
        inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
        stored: list[Any] = []
        report: list[Saved] = []
        for node in outputs[num_outputs:]:
            value = node.meta.get("val") if isinstance(node, fx.Node) else None
            if not isinstance(value, torch.Tensor):
                stored.append(node)
                continue
            why = "" if node.meta.get(_FLOAT8) else "not asked for"
            why = why or ("also an output" if node in visible else _must_stay_exact(value))
            received = inputs[node.name]
            why = why or ("" if received.users else "not read")
            if why:
                stored.append(node)
            else:
                stored += _replace(node, received, forward, backward, self.codec, trace)
            treatment = f"exact: {why}" if why else f"float8 {self.codec.dtype}"
            treatment = treatment.removesuffix(": not asked for")
            report.append(Saved(_source(node), tuple(value.shape), value.dtype, treatment))

        if len(stored) > len(outputs) - num_outputs:
            output.args = ((*outputs[:num_outputs], *stored),)
            for graph_module in (forward, backward):
                graph_module.graph.lint()
                graph_module.recompile()
        return report

    def __getstate__(self) -> dict[str, Any]:
        # Inductor pickles its options into the key of its cache, and whoever is told is none.
        return {"codec": self.codec}

    def uuid(self) -> object:
        """Tells the compiler's cache what its graphs depend on."""
        files = (__file__, codec.__file__)
        return get_hash_for_files(files), str(asdict(self.codec))


def check_backend(backend: str) -> None:
    """Raise ValueError for a ``compile.backend`` that would ignore a partitioner."""
    if backend not in _BACKENDS:
        raise ValueError(
            f"compile.backend is {backend!r}; float8 activation checkpointing needs one of "
            f"{', '.join(_BACKENDS)}."
        )


def compile_arguments(partitioner: Float8Partitioner, backend: str) -> dict[str, Any]:
    """Arguments of ``nn.Module.compile`` with which ``partitioner`` cuts this module's graphs.

    It holds for recompilations and for the backward, and for no other module.
    """
    check_backend(backend)
    if backend == "inductor":
        return {"backend": backend, "options": {"custom_partitioner_fn": partitioner}}
    # As torch's own backend aot_eager (_dynamo/backends/debugging.py), but for the partitioner.
    partition = functools.partial(partitioner, compiler="aot_eager")
    aot_eager = aot_autograd(
        fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True
    )
    return {"backend": aot_eager}


def annotation(inputs: OpPolicy, key: str, *, recompute: bool) -> dict[str, Any]:
    """The annotation of a region, for ``torch.fx.traceback.annotate``.

    ``inputs`` is the policy on its inputs. Graphs with another ``key`` are compiled apart.
    ``recompute`` is False to forget that the region is a checkpoint once its tags have been read.
    """
    return {_INPUTS: inputs.value, "titan_ext.key": key, _RECOMPUTE: recompute}


def _read_tags(graph: fx.Graph, *, rounds: bool) -> None:
    """Turn ``PREFER_SAVE`` into a save that the min-cut obeys, plus a tag of ours.

    Our policy answers ``MUST_RECOMPUTE``. So what is preferred is in a checkpoint of the block's
    own, which would make choices again, from what is in float8 if the graph ``rounds``.
    """
    prefers = CheckpointPolicy.PREFER_SAVE
    rounds = rounds or any(node.meta.get("recompute") is prefers for node in graph.nodes)
    for node in list(graph.nodes):
        if "recompute" in node.meta and isinstance(node.meta.get("val"), torch.SymInt):
            # To read a size again would run again what has it, even a collective.
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        again = node.meta.get("recompute") is CheckpointPolicy.PREFER_RECOMPUTE
        if rounds and again and _is_choice(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if node.meta.get("recompute") is not prefers:
            continue
        # The min-cut (torch/_functorch/partitioners.py) heeds MUST_SAVE, and not PREFER_SAVE.
        waits = [user for user in node.users if op_name(user.target) == _WAIT]
        for target in waits or [node]:
            target.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            target.meta[_FLOAT8] = True
        if waits:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def _forget_checkpoints(graph: fx.Graph) -> None:
    """Let the min-cut choose what is saved, but for choices; keep our tags, but not on weights.

    Else it would make a choice again, from what is in float8.
    """
    of_state: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            is_weight = isinstance(value, FakeTensor) and is_state(value)
        else:
            is_weight = bool(node.all_input_nodes) and of_state.issuperset(node.all_input_nodes)
        if is_weight:  # a weight, or a transposed or cast one
            of_state.add(node)
            node.meta.pop(_FLOAT8, None)
        was_tagged = node.meta.pop("recompute", None) is not None  # in the forward
        # By this key torch saves where one checkpoint follows another (cleanup_recompute_tags).
        node.meta.pop("ac_graph_id", None)
        if was_tagged and _is_choice(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _is_choice(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return False
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return chooses(node.target, args, kwargs, value)


def _annotations(graph: fx.Graph, name: str) -> set[Any]:
    return {node.meta.get("custom", {}).get(name) for node in graph.nodes}


def _must_stay_exact(value: torch.Tensor) -> str:
    """The reason why a tensor must stay exact, or "": the rules of ``titan_ext.fp8.keep_exact``.

    A number of rows that is not known before the program runs counts as large.
    """
    if value.dtype not in SUPPORTED_DTYPES or value.dtype == torch.float32:
        return str(value.dtype).removeprefix("torch.")
    if not has_free_symbols(value.shape) and value.numel() < SMALL:
        return "small"
    if any(guard_or_false(s == 0) for s in value.stride()):
        return "expanded"
    # The codec's blocks lie in rows. Scores of the tokens that came are one such row.
    if value.dim() and free_unbacked_symbols(value.shape[_memory_order(value)[-1]]):
        return "rows of unknown size"
    return ""


def _replace(
    node: fx.Node,
    received: fx.Node,
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    codec: Codec,
    trace: Callable[..., fx.Graph],
) -> list[fx.Node]:
    """Quantize after ``node``, dequantize before the first user of ``received``."""
    value = node.meta["val"]
    # As it lies in memory: backward was traced for these strides.
    order = _memory_order(value)
    inverse = sorted(range(value.dim()), key=order.__getitem__)

    def encode(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(quantize(x.permute(order), codec))

    def decode(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return dequantize(Quantized(data, scales), codec, value.dtype).permute(inverse)

    encoded = trace(encode, value)
    with forward.graph.inserting_before(_after(node)):
        # Names that neither graph has: a saved tensor goes by the same name in both.
        names = [f"{node.name}_float8", f"{node.name}_float8_scales"]
        halves = _inline(encoded, forward.graph, [node], names)
    restored = trace(decode, *[half.meta["val"] for half in halves])
    with backward.graph.inserting_before(received):
        halves_received = [backward.graph.placeholder(half.name) for half in halves]
    for sent, arrived in zip(halves, halves_received, strict=True):
        arrived.meta = dict(sent.meta)
    first_user = next(user for user in backward.graph.nodes if user in received.users)
    with backward.graph.inserting_before(first_user):
        (whole,) = _inline(restored, backward.graph, halves_received, [f"{node.name}_restored"])
    received.replace_all_uses_with(whole)
    backward.graph.erase_node(received)
    return halves


def _trace(
    function: Callable[..., Any], *values: FakeTensor, decompositions: dict[Any, Any] | None
) -> fx.Graph:
    with torch.no_grad(), values[0].fake_mode:
        traced = make_fx(function, decomposition_table=decompositions)(*values)
    traced.graph.eliminate_dead_code()
    return traced.graph


def _inline(
    traced: fx.Graph, graph: fx.Graph, arguments: list[fx.Node], names: list[str]
) -> list[fx.Node]:
    """Copy ``traced`` to where ``graph`` inserts; return its outputs, named ``names``."""
    env: dict[fx.Node, fx.Node] = dict(
        zip(traced.find_nodes(op="placeholder"), arguments, strict=True)
    )
    results = _nodes(traced.output_node())
    name_of = dict(zip(results, names, strict=True))
    for node in traced.nodes:
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            copy = graph.call_function(node.target, args, kwargs, name=name_of.get(node))
            copy.meta = dict(node.meta)
            env[node] = copy
    return [env[result] for result in results]


def _nodes(output: fx.Node) -> list[fx.Node]:
    """The outputs of a graph; constants among them stay as they are."""
    returned: Any = output.args[0]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def _memory_order(x: torch.Tensor) -> list[int]:
    # To compare sizes that only the run knows would raise; such axes stay in their order.
    def compare(a: int, b: int) -> int:
        if guard_or_false(x.stride(a) > x.stride(b)):
            return -1
        return 1 if guard_or_false(x.stride(a) < x.stride(b)) else 0

    return sorted(range(x.dim()), key=functools.cmp_to_key(compare))


def _after(node: fx.Node) -> fx.Node:
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following


def _source(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    made_by = node.args[0] if node.target is operator.getitem else None
    return _source(made_by) if isinstance(made_by, fx.Node) else op_name(node.target)
