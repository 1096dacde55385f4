"""Saved tensors of compiled code in float8: the point where torch.compile decides what is saved.

torch.compile traces forward and backward of a block as one graph and gives it to a *partitioner*,
which cuts it into two: what crosses the cut is saved. Python hooks do not run in compiled code, so
this is the place for float8. ``Float8Partitioner`` lets torch's own min-cut partitioner cut, then
puts the codec's operations into the two graphs, where the compiler fuses them with their
neighbours:

    forward:   saved = x                 ->  saved = quantize(x)
    backward:  x = saved                 ->  x = dequantize(saved)

**Which tensors.** A checkpoint policy tags each operation. ``PREFER_SAVE`` is documented as a save
that a compiler may treat in its own way, where ``MUST_SAVE`` is not: here it means float8. Nothing
else is touched, so that no parameter, index or log-sum-exp is ever quantised by accident. Inputs
have no operation: whether they are stored in float8 is written on the graph (``annotation``).

**Collectives.** The output of a collective is not there before its ``wait_tensor``; the wait takes
the tag over.

Inductor takes a partitioner from its config (``install``), ``aot_eager`` from the backend that
``install`` returns.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch._inductor.config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import CheckpointPolicy

from titan_ext.activation_checkpoint.compiled import codec as graph_codec
from titan_ext.activation_checkpoint.compiled.codec import Saved, store_in_float8
from titan_ext.activation_checkpoint.compiled.sites import is_state
from titan_ext.activation_checkpoint.verdicts import Verdict
from titan_ext.fp8 import Codec

__all__ = ["BACKENDS", "Float8Partitioner", "annotation", "install"]

BACKENDS = ("inductor", "aot_eager")

_FLOAT8 = "titan_ext.float8"
_INPUTS = "titan_ext.inputs"
_RECOMPUTE = "titan_ext.recompute"
_WAIT = "_c10d_functional.wait_tensor"


@dataclass(frozen=True)
class Float8Partitioner(CustomPartitionerFn):
    """Cuts as torch does, then stores in float8 what the checkpoint policy asked for.

    Attributes:
        codec: How.
        report: Called for every graph that has a backward with what it saves.
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
        _read_tags(gm.graph)
        if False in _annotations(gm.graph, _RECOMPUTE):
            _forget_checkpoints(gm.graph)
        if Verdict.FLOAT8 in _annotations(gm.graph, _INPUTS):
            _tag_inputs(gm.graph)
        forward, backward = min_cut_rematerialization_partition(
            gm,
            joint_inputs,
            compiler,
            num_fwd_outputs=num_fwd_outputs,
            **kwargs,
        )
        saved = store_in_float8(
            forward,
            backward,
            codec=self.codec,
            num_outputs=num_fwd_outputs,
            wanted=lambda node: node.meta.get(_FLOAT8, False),
            decompositions=_decompositions(compiler),
        )
        if self.report is not None:
            self.report(saved)
        return forward, backward

    def uuid(self) -> object:
        """Tells the compiler's cache what its graphs depend on."""
        files = (__file__, graph_codec.__file__)
        return get_hash_for_files(files), str(asdict(self.codec))


def install(
    partitioner: Float8Partitioner, backend: str
) -> Literal["inductor"] | Callable[..., Any]:
    """Make ``partitioner`` cut what ``backend`` compiles from now on, in this process.

    It does nothing to graphs without ``PREFER_SAVE`` or an ``annotation``.

    Args:
        backend: As in ``compile.backend``.

    Returns:
        What to give to ``torch.compile`` as its backend.

    Raises:
        ValueError: for another backend, which would ignore the partitioner, or for a codec that
            compiled code cannot run: stochastic rounding would repeat its noise in every step, and
            one scale for a tensor needs its size, which for routed tokens is not known.
    """
    if partitioner.codec.stochastic or partitioner.codec.block == "tensor":
        raise ValueError(
            f"{partitioner.codec} cannot be compiled; expected stochastic = false and a block of "
            "64, 128, 256 or 'row', or compile.enable = false."
        )
    match backend:
        case "inductor":
            torch._inductor.config.custom_partitioner_fn = partitioner
            return "inductor"
        case "aot_eager":
            return _aot_eager(partitioner)
        case _:
            raise ValueError(
                f"compile.backend is {backend!r}; float8 activation checkpointing needs one of "
                f"{', '.join(BACKENDS)}."
            )


def annotation(inputs: Verdict, key: str, *, recompute: bool) -> dict[str, Any]:
    """What to ``torch.fx.traceback.annotate`` a region with.

    Args:
        inputs: The verdict on its inputs.
        key: Graphs with another key are compiled apart.
        recompute: False to forget that the region is a checkpoint once its tags have been read.
    """
    return {_INPUTS: inputs.value, "titan_ext.key": key, _RECOMPUTE: recompute}


def _aot_eager(partitioner: Float8Partitioner) -> Callable[..., Any]:
    def partition(gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any):
        return partitioner(gm, joint_inputs, compiler="aot_eager", **kwargs)

    return aot_autograd(
        fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True
    )


def _decompositions(compiler: str) -> dict[Any, Any] | None:
    if compiler != "inductor":
        return None
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def _read_tags(graph: fx.Graph) -> None:
    """Turn ``PREFER_SAVE`` into a save that the min-cut obeys, and a mark of ours."""
    for node in list(graph.nodes):
        if node.meta.get("recompute") is not CheckpointPolicy.PREFER_SAVE:
            continue
        waits = [user for user in node.users if _packet(user) == _WAIT]
        for target in waits or [node]:
            target.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            target.meta[_FLOAT8] = True
        if waits:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            # A size that is read from it would be read again, and the collective run for that.
            for user in set(node.users).difference(waits):
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _forget_checkpoints(graph: fx.Graph) -> None:
    """Leave the choice of what is saved to the min-cut; keep our marks, but not on weights."""
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
        node.meta.pop("recompute", None)
        node.meta.pop("ac_graph_id", None)


def _annotations(graph: fx.Graph, name: str) -> set[Any]:
    return {node.meta.get("custom", {}).get(name) for node in graph.nodes}


def _tag_inputs(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        node.meta[_FLOAT8] = isinstance(value, FakeTensor) and not is_state(value)


def _packet(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet) if packet is not None else ""
