# SPDX-License-Identifier: BSD-3-Clause
"""One forward of a block as a graph: what each operation makes, costs and reads.

``trace`` watches a real forward of a block without checkpointing, on real or fake tensors. The
``budget`` solver and the prices of presets work on what it saw. Operations have the names that a
checkpoint gives them, so a solution is a table of ordinary ``op_policies``.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torchtitan.components.checkpointer.utils import canonical_fqn

from titan_ext.activation_checkpoint.compile import pieces_in
from titan_ext.activation_checkpoint.discards import AutogradNodes, Discarded, last_node
from titan_ext.activation_checkpoint.locator import OpLocator
from titan_ext.activation_checkpoint.op_effects import (
    TO_COPY,
    chooses,
    fixes_routing,
    is_attention,
    is_exchange,
    makes_node,
    may_draw,
    passes_values,
    written,
)
from titan_ext.activation_checkpoint.op_policies import BlockPolicies, Resolver
from titan_ext.activation_checkpoint.op_rules import INPUT, OpLocation, OpPolicy, is_exempt
from titan_ext.base.machines import Machine
from titan_ext.base.tensors import parts_in, storage_ids, tensors_in
from titan_ext.fp8 import SavedTensorStore
from titan_ext.plan.op_cost import op_cost

SAVE, FLOAT8 = OpPolicy.SAVE, OpPolicy.SAVE_FLOAT8
RECOMPUTE, DISCARD = OpPolicy.RECOMPUTE, OpPolicy.DISCARD
CHOICES = (SAVE, FLOAT8, RECOMPUTE, DISCARD)
"""The policies that a budget chooses among, without a host."""
_BLOCKS_ON_DEVICE = 2
"""Number of blocks that have on the device what they offload (``fp8.offload``)."""
_NORMS = (nn.RMSNorm, nn.LayerNorm)
_WAIT = "_c10d_functional::wait_tensor"


@dataclass(frozen=True, kw_only=True)
class Node:
    """The outputs of one operation; the first node of a graph is the input of the block."""

    ms: float = 0.0
    """To run it again."""
    nbytes: int = 0
    """To save it exactly; ``float8_nbytes``: in float8, with what stays exact of it."""
    float8_nbytes: int = 0
    codec_ms: float = 0.0
    """To write and read it in float8."""
    policies: frozenset[OpPolicy] = frozenset(CHOICES)
    reads: frozenset[int] = frozenset()
    """The nodes whose values it reads."""
    passes: bool = False
    """Whether backward needs none of the values that it reads, as for a sum."""
    is_read: bool = False
    """Whether backward reads what it makes, or may by the rules of ``discards``."""
    is_attention: bool = False

    def price(self, policy: OpPolicy) -> tuple[int, float]:
        """Bytes that wait under ``policy``, wherever that is, and milliseconds to have the rest."""
        if policy is RECOMPUTE:
            return 0, self.ms
        if policy.is_float8:
            return self.float8_nbytes, self.codec_ms
        return (self.nbytes if policy.keeps else 0), 0.0


def blocks_on_device(policy: OpPolicy, blocks: int) -> int:
    """Number of ``blocks`` blocks that hold on the device at once what they keep by ``policy``."""
    return min(blocks, _BLOCKS_ON_DEVICE) if policy.on_host else blocks


@dataclass(frozen=True)
class Call:
    """One operation of the forward; ``node`` is that of what it makes, -1 for views and such."""

    location: OpLocation
    func: Any
    args: Any
    kwargs: dict[str, Any]
    out: Any
    node: int


@dataclass(frozen=True)
class BlockGraph:
    """One kind of block."""

    nodes: tuple[Node, ...]
    """In the order in which they were made."""
    calls: tuple[Call, ...]
    """Every operation, in order."""
    none_nbytes: int
    """What the block holds without checkpointing."""

    def chosen_by(self, policies: BlockPolicies) -> list[OpPolicy]:
        """The policy of each node under the policies of a block, a preset's for example.

        As in a run: a preset's discard that something reads is recomputed.
        """
        resolver = Resolver(policies)
        chosen = [resolver.resolve_input()] + [RECOMPUTE] * (len(self.nodes) - 1)
        for call in self.calls:
            context = SimpleNamespace(is_recompute=False, op_output=call.out)
            policy = resolver.resolve(
                call.location, context, call.func, call.args, call.kwargs, call.out
            )
            if call.node >= 0:
                chosen[call.node] = policy
        while unsound := self.unsound_discards(chosen):
            for index in unsound:
                chosen[index] = RECOMPUTE
        return chosen

    @functools.cached_property
    def always_read(self) -> frozenset[int]:
        """Nodes whose values must be right, whatever the policies are.

        Backward reads them, or an operation does that looks into what it gets (``discards``).
        """
        by_backward = {index for index, node in enumerate(self.nodes) if node.is_read}
        by_operations = (node.reads for node in self.nodes if not node.passes)
        return frozenset(by_backward.union(*by_operations))

    def unsound_discards(self, chosen: list[OpPolicy]) -> list[int]:
        """Discarded nodes whose values something reads under these policies."""
        read = set(self.always_read)
        for index in reversed(range(len(self.nodes))):
            node = self.nodes[index]
            if index in read and node.passes and chosen[index] is RECOMPUTE:
                read |= node.reads
        return [
            index
            for index, policy in enumerate(chosen)
            if policy is DISCARD and (index in read or DISCARD not in self.nodes[index].policies)
        ]

    def price(self, chosen: list[OpPolicy], blocks: int = 1) -> tuple[int, float]:
        """Bytes that ``blocks`` like this hold on the device until backward, and milliseconds to
        have the rest again, codec included."""
        nbytes, ms = 0, 0.0
        for node, policy in zip(self.nodes, chosen, strict=True):
            kept, node_ms = node.price(policy)
            nbytes += blocks_on_device(policy, blocks) * kept
            ms += node_ms
        return nbytes, blocks * ms

    def host_nbytes(self, chosen: list[OpPolicy]) -> int:
        """Bytes that the block has on the host until backward."""
        return sum(
            node.price(policy)[0]
            for node, policy in zip(self.nodes, chosen, strict=True)
            if policy.on_host
        )


@contextlib.contextmanager
def trace(
    block: nn.Module, rates: Machine, *, exempt: tuple[str, ...] = (), name: str = ""
) -> Iterator[list[BlockGraph]]:
    """Trace the first forward of ``block`` inside this context; the list then has its graph.

    Args:
        block: A block without checkpointing, parallelized as it will run.
        exempt: Globs for modules that use no float8.
        name: Of the block in the model, for ``exempt``.
    """
    forward = block.forward
    graphs: list[BlockGraph] = []

    def traced(*args: Any, **kwargs: Any) -> Any:
        if graphs:
            return forward(*args, **kwargs)
        tracer = _Tracer(block, args, rates, functools.partial(is_exempt, exempt, name))
        try:
            out = tracer.run(forward, args, kwargs)
        finally:
            tracer.locator.remove()
        graphs.append(tracer.graph(out))
        return out

    with mock.patch.object(block, "forward", traced):
        yield graphs


class _Tracer(TorchDispatchMode):
    """Records the operations of one forward."""

    is_of_checkpointing = True  # base.tensors hides from it what a recompute does not do

    def __init__(
        self, block: nn.Module, args: Any, rates: Machine, exempts: Callable[[str], bool]
    ) -> None:
        super().__init__()
        self._store, self._rates, self._exempts = SavedTensorStore(modules=[block]), rates, exempts
        self.locator = OpLocator(block)
        self._in_pieces = bool(pieces_in(block))  # which keep what exchanges bring
        self._norms = {canonical_fqn(n) for n, m in block.named_modules() if isinstance(m, _NORMS)}
        self._inputs = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
        self._calls: list[Call] = []
        self._entries: list[list[Discarded]] = []
        self._nodes_of_ops: set[int] = set()
        self._saved: set[int] = set()

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.locator.begin(with_operands=True)
        alive: list[torch.Tensor] = []  # so that no storage gets the address of another

        def see(x: torch.Tensor) -> torch.Tensor:
            alive.append(x)
            self._saved.update(storage_ids(x))
            return x

        with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x), self:
            return forward(*args, **kwargs)

    def __torch_dispatch__(self, func, types, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        # Torch's checkpoint does not count these either: numbers of operations must be the same.
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        if func._schema.name == _WAIT and type(args[0]) is FakeTensor:
            return args[0]  # as on real tensors; the fake one is new
        out = func(*args, **kwargs)
        if func is TO_COPY:
            self.locator.see_cast(args[0], out)
        if torch.is_grad_enabled() and makes_node(func, args, out):
            self._nodes_of_ops.add(last_node())
        location = self.locator.locate(func, args)
        self._calls.append(Call(location, func, args, kwargs, out, -1))
        floats = [x for x in tensors_in(out) if x.is_floating_point()]
        left = len(self.locator.left)
        self._entries.append([Discarded(x, location, left) for x in floats])
        return out

    def graph(self, out: Any) -> BlockGraph:
        """The graph that has been recorded; ``out`` is the block's output."""
        first = min((e.node for entries in self._entries for e in entries), default=0)
        autograd = AutogradNodes(first, out, self._nodes_of_ops)
        makers = {storage: {0} for storage in storage_ids(self._inputs)}
        nodes = [self._node(self._inputs, OpLocation("", INPUT))]
        nodes[0] = replace(nodes[0], policies=nodes[0].policies & {SAVE, FLOAT8})
        calls = []
        kept: dict[int, int] = {}
        looked_at: set[int] = set()
        # Storages that an operation of the block writes to: torch would write again to a copy.
        overwritten = {
            storage
            for call in self._calls
            for storage in storage_ids(written(call.func, call.args, call.kwargs))
        }
        for call, entries in zip(self._calls, self._entries, strict=True):
            given = set(storage_ids((call.args, call.kwargs)))
            known = {*makers, *given}
            made = [x for x in parts_in(call.out) if x.untyped_storage()._cdata not in known]
            writes = [
                x
                for x in parts_in(written(call.func, call.args, call.kwargs))
                if x.untyped_storage()._cdata in makers
            ]
            reads = frozenset().union(*(makers.get(storage, set()) for storage in given))
            if not (made or writes):  # also what only writes to a buffer of the model
                calls.append(call)
                if not passes_values(call.func, call.args, call.out):
                    looked_at |= reads
                continue
            index, touched = len(nodes), set(storage_ids((made, writes)))
            cost = op_cost(call.func, call.args, call.kwargs, call.out, self._rates)
            node = self._node(call.out, call.location, cost.ms)
            policies = self._policies(call, node.policies)
            if len(entries) < len(tensors_in(call.out)) or any(map(autograd.reader, entries)):
                policies -= {DISCARD}
            if touched & overwritten and len(policies) > 1:  # not decided already
                policies -= {SAVE, FLOAT8, *([] if writes else [DISCARD])}
            nodes.append(
                replace(
                    node,
                    policies=policies,
                    reads=reads,
                    passes=passes_values(call.func, call.args, call.out),
                    is_read=bool(touched & self._saved),
                    is_attention=is_attention(call.func),
                )
            )
            for storage in touched:
                makers.setdefault(storage, set()).add(index)
            kept |= {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in made}
            calls.append(replace(call, node=index))
        kept |= {s._cdata: s.nbytes() for x in parts_in(self._inputs) if (s := x.untyped_storage())}
        nodes = [
            replace(node, is_read=node.is_read or index in looked_at)
            for index, node in enumerate(nodes)
        ]
        none = sum(nbytes for storage, nbytes in kept.items() if storage in self._saved)
        return BlockGraph(tuple(nodes), tuple(calls), none)

    def _policies(self, call: Call, policies: frozenset[OpPolicy]) -> frozenset[OpPolicy]:
        """Those of ``policies`` that an operation can have for what it is.

        Kernels of norms and around attention differ between backends, and random ones would draw
        other numbers: these always run again.
        """
        if fixes_routing(call.location.op, call.out) or chooses(
            call.func, call.args, call.kwargs, call.out
        ):
            return frozenset({SAVE})
        if self._in_pieces and is_exchange(call.location.op):
            return policies & {SAVE, FLOAT8}
        around_attention = "inner_attention" in call.location.module.split(".")
        if call.location.module in self._norms or (
            (around_attention or may_draw(call.func)) and not is_attention(call.func)
        ):
            return frozenset({RECOMPUTE})
        return policies

    def _node(self, out: Any, location: OpLocation, ms: float = 0.0) -> Node:
        """What an operation makes, by its bytes, saved and in float8."""
        nbytes = float8_nbytes = moved = 0
        for x in {x.untyped_storage()._cdata: x for x in parts_in(out)}.values():
            whole, small = x.untyped_storage().nbytes(), self._store.float8_nbytes(x)
            nbytes, float8_nbytes = nbytes + whole, float8_nbytes + (small or whole)
            moved += 2 * (x.numel() * x.element_size() + small) if small else 0
        is_exact = not moved or self._exempts(location.module)
        # One kernel each way at the rate of memory; not fitted. On an H100 they had 0.56 to 0.94
        # of a copy's (docs/float8.md). A machine's file may have a measured factor.
        codec_ms = max(moved / self._rates.memory, 2 * self._rates.launch) * 1e3
        return Node(
            ms=ms,
            nbytes=nbytes,
            float8_nbytes=float8_nbytes,
            codec_ms=codec_ms * self._rates.slower.get("codec", 1.0),
            policies=frozenset(CHOICES) - ({FLOAT8} if is_exact else set()),
        )
