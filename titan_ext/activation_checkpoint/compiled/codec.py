"""The codec's operations, put into the forward and the backward graph of compiled code."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import guard_or_false, has_free_symbols

from titan_ext.fp8 import Codec, Quantized, dequantize, quantize
from titan_ext.fp8.codec import SUPPORTED_DTYPES

__all__ = ["Saved", "store_in_float8"]

_MIN_NUMEL = 4096


@dataclass(frozen=True)
class Saved:
    """A tensor that goes from a forward graph to its backward graph.

    Attributes:
        name: Of its node.
        source: The operation that made it ("aten.mm"), or "input".
        shape: A dimension that varies is a symbol.
        dtype: Of the tensor.
        treatment: "float8 e4m3", or "exact" and why float8 was not possible if it was asked for.
    """

    name: str
    source: str
    shape: tuple[int | torch.SymInt, ...]
    dtype: torch.dtype
    treatment: str


def store_in_float8(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    codec: Codec,
    num_outputs: int,
    wanted: Callable[[fx.Node], bool],
    decompositions: dict[Any, Any] | None,
) -> list[Saved]:
    """Change what ``forward`` hands to ``backward``, in place.

    Args:
        num_outputs: How many outputs of ``forward`` are not saved tensors. They come first.
        wanted: Whether an output node of ``forward`` is to be float8.
        decompositions: Applied to the codec's operations, as the compiler applied them to the rest.

    Returns:
        All saved tensors, in order.
    """
    output = forward.graph.output_node()
    outputs = _nodes(output)
    visible = set(outputs[:num_outputs])
    inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    trace = functools.partial(_trace, decompositions=decompositions)

    stored: list[Any] = []
    report: list[Saved] = []
    for node in outputs[num_outputs:]:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor):
            stored.append(node)
            continue
        why = "" if wanted(node) else "not asked for"
        why = why or ("also an output" if node in visible else _must_stay_exact(value))
        why = why or ("" if inputs[node.name].users else "not read")
        if why:
            stored.append(node)
        else:
            stored += _replace(node, inputs[node.name], forward, backward, codec, trace)
        treatment = f"exact: {why}" if why else f"float8 {codec.dtype}"
        treatment = treatment.removesuffix(": not asked for")
        report.append(Saved(node.name, _source(node), tuple(value.shape), value.dtype, treatment))

    if len(stored) > len(outputs) - num_outputs:
        output.args = ((*outputs[:num_outputs], *stored),)
        for graph_module in (forward, backward):
            graph_module.graph.lint()
            graph_module.recompile()
    return report


def _must_stay_exact(value: torch.Tensor) -> str:
    """Why it cannot be float8, or nothing: the same as ``titan_ext.fp8.keep_exact``.

    A size that is not known before the program runs counts as large.
    """
    if value.dtype not in SUPPORTED_DTYPES or value.dtype == torch.float32:
        return str(value.dtype).removeprefix("torch.")
    if not has_free_symbols(value.shape) and value.numel() < _MIN_NUMEL:
        return "small"
    if any(guard_or_false(s == 0) for s in value.stride()):
        return "expanded"
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

    def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        data, scales = quantize(x.permute(order), codec)
        return data, scales

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
    with backward.graph.inserting_before(_first_user(received)):
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
    """Copy the operations of ``traced`` to where ``graph`` inserts.

    Returns:
        Its outputs, called ``names``.
    """
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
    """What a graph returns. A graph may return constants, too: they are passed on untouched."""
    returned: Any = output.args[0]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def _memory_order(x: torch.Tensor) -> list[int]:
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


def _first_user(node: fx.Node) -> fx.Node:
    return next(candidate for candidate in node.graph.nodes if candidate in node.users)


def _source(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    packet = getattr(node.target, "overloadpacket", None)
    if packet is None and node.args and isinstance(node.args[0], fx.Node):  # getitem
        return _source(node.args[0])
    return str(packet if packet is not None else node.target)
