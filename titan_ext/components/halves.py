# SPDX-License-Identifier: BSD-3-Clause
"""Two halves of a batch take turns at the exchanges of tokens, so that none of them waits.

Under expert parallelism a MoE block sends tokens to the ranks of their experts and back, and has
nothing to compute meanwhile. With ``parallelism.overlap_exchanges = "halves"`` it runs its batch as
two halves, A and B::

    attention A | router A | attention B | router B | experts A | experts B | shared A, B | sums
                tokens of A travel ------>          tokens of B ->
                                                              outputs of A travel back -->
                                                                          outputs of B -->

A recompute runs in the same order, and backward in the reverse: autograd takes the newest node
first. DeepSeek's DualPipe and Megatron-Core overlap two microbatches of a pipeline in this way.
Here one block does it by itself, in any layout.

Nothing of Titan's code is repeated. The block's own forward runs for A. When its MoE layer asks for
the routed experts of A, A's tokens are sent, and the block's own forward runs for B. When that asks
for the routed experts of B, B's tokens are sent, and the experts of both run. So each FSDP unit
that holds experts runs once. An attention unit runs twice: it stays gathered from A to B, and
reduces its gradients after A's backward, which comes last.

Sums over tokens are sums of two halves: weight gradients round otherwise than those of one batch.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE

from titan_ext.base.tensors import in_backward
from titan_ext.components.dispatch import FunctionalAllToAllTokenDispatcher, Turn
from titan_ext.components.exchange import Inside

SECOND_HALF = "second_half"
"""The name of modules that run code for B. They have no parameters; names in policies and reports
are those of the modules that they are in."""

# Shape suffixes, as in torchtitan/models/common/moe.py. B = batch, L = sequence, D = model
# dimension, T = tokens, K = experts of a token, E = experts, R = routed tokens of this rank's
# experts.

_half: int | None = None


def current_half() -> int:
    """0 while A runs, and where nothing is split; 1 while B runs."""
    return _half or 0


@contextlib.contextmanager
def _in_half(half: int) -> Iterator[None]:
    global _half
    before, _half = _half, half
    try:
        yield
    finally:
        _half = before


def overlap_in_halves(model: Decoder, ep: int) -> None:
    """Let the MoE blocks of ``model`` run their batch as two halves.

    Call it on every rank, after expert parallelism and before activation checkpointing and FSDP.
    Blocks without routed experts of Titan's and our dispatcher stay as they are.
    """
    found = [
        block
        for block in model.layers.values()
        if isinstance(moe := getattr(block, "moe", None), MoE)
        and type(moe).forward is MoE.forward
        and isinstance(moe.routed_experts.token_dispatcher, FunctionalAllToAllTokenDispatcher)
    ]
    # On the communicator of the exchanges B's counts would wait behind A's tokens, and the host
    # for them. The ranks that exchange tokens are neighbours. Every rank of the job takes part,
    # with a pipeline stage of dense blocks, too.
    counts, _ = dist.new_subgroups(ep, group_desc="token_counts")
    masks = _Masks(model)
    for block in found:
        block.forward = _BlockInHalves(block, masks, counts)


class _Masks:
    """Attention masks of half a batch, which the model makes from its positions, once a batch."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._of: Any = None
        self._halves: tuple[Any, ...] = ()

    def __call__(self, masks: Any, positions: Any, halves: tuple[slice, slice]) -> tuple[Any, ...]:
        if masks is None:
            return None, None
        if self._of is not masks:
            if positions is None:
                raise ValueError(
                    'parallelism.overlap_exchanges = "halves" needs the positions of tokens, from '
                    "which the masks of half a batch are made; this model was called without them."
                )
            self._of = masks
            self._halves = tuple(self._model.get_attention_masks(positions[h]) for h in halves)
        return self._halves


class _BlockInHalves:
    """The forward of a MoE block."""

    def __init__(self, block: nn.Module, masks: _Masks, counts: dist.ProcessGroup) -> None:
        self._block, self._forward, self._masks = block, block.forward, masks
        self._moe = moe = cast(Any, block.moe)
        self._moe_forward = moe.forward
        block.add_module(SECOND_HALF, Inside())
        moe.add_module(SECOND_HALF, Inside())
        routed = moe.routed_experts
        routed.forward = _inside_or(routed.forward)
        routed.inner_experts.forward = _both_halves(routed.inner_experts.forward)
        routed.token_dispatcher.counts_group = counts
        self._attention_units: list[FSDPParamGroup] | None = None

    def __call__(
        self, x_BLD: torch.Tensor, attention_masks: Any = None, positions: Any = None
    ) -> torch.Tensor:
        rows = len(x_BLD)
        if rows < 2:
            return self._forward(x_BLD, attention_masks, positions)
        halves = slice(0, (rows + 1) // 2), slice((rows + 1) // 2, rows)
        masks = self._masks(attention_masks, positions, halves)
        of_a, of_b = (
            (x_BLD[half], mask, None if positions is None else positions[half])
            for half, mask in zip(halves, masks, strict=True)
        )
        turns = _Turns(self._moe)
        block: Any = self._block

        def run_b() -> torch.Tensor:
            with _in_half(1), _instead(block, moe=moe_of_b):
                return block.second_half(self._forward, *of_b)

        def moe_of_b(h_BLD: torch.Tensor) -> torch.Tensor:
            with turns.of_b():
                return self._moe.second_half(self._moe_forward, h_BLD)

        with _in_half(0), self._attention_kept_gathered() as reshard, turns.of_a(run_b, reshard):
            out_a_BLD = self._forward(*of_a)
        return torch.cat([out_a_BLD, turns.out_b])

    @contextlib.contextmanager
    def _attention_kept_gathered(self) -> Iterator[Callable[[], None]]:
        """Keep attention's FSDP units gathered after A; yields what lets them be freed after B."""
        if self._attention_units is None:
            self._attention_units = _units_that_run_twice(self._block, self._moe)
        units = self._attention_units if not in_backward() else []
        after = [unit.post_forward_mesh_info for unit in units]

        def reshard() -> None:
            for unit, mesh_info in zip(units, after, strict=True):
                unit.post_forward_mesh_info = mesh_info

        for unit in units:
            unit.post_forward_mesh_info = None
        try:
            yield reshard
        finally:
            reshard()


class _Turns:
    """The routed and shared experts of both halves, in one forward of a block."""

    def __init__(self, moe: Any) -> None:
        self._moe = moe
        self._routed, self._shared = moe.routed_experts, moe.shared_experts
        self._dispatcher: FunctionalAllToAllTokenDispatcher = self._routed.token_dispatcher
        self._shared_out: list[torch.Tensor] = []
        self._inputs: list[torch.Tensor] = []
        self._sent: list[Turn] = []

    def of_a(
        self, run_b: Callable[[], torch.Tensor], let_b_reshard: Callable[[], None]
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, the MoE layer sends A's tokens, and runs all of B where its experts would run."""

        def routed(*args: torch.Tensor) -> torch.Tensor:
            self._send(*args)
            let_b_reshard()
            self.out_b = run_b()
            return self._out_a

        return self._in_place_of_experts(routed, half=0)

    def of_b(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the MoE layer sends B's tokens, and runs the experts of both halves."""

        def routed(*args: torch.Tensor) -> torch.Tensor:
            self._step(0, self._dispatcher.relay)
            self._send(*args)
            self._run_experts()
            if self._shared is not None:
                for half, x_BLD in enumerate(self._inputs):
                    with _in_half(half):
                        self._shared_out.append(self._shared(x_BLD))
                    if half == 0:
                        self._step(1, self._dispatcher.relay_back)
            with _in_half(0):
                self._out_a = self._collect(0)
            return self._collect(1)

        return self._in_place_of_experts(routed, half=1)

    def _in_place_of_experts(
        self, routed: Callable[..., torch.Tensor], half: int
    ) -> contextlib.AbstractContextManager[None]:
        instead: dict[str, Any] = {"routed_experts": routed}
        if self._shared is not None:  # which has run by the time that the layer asks for it
            instead["shared_experts"] = lambda _: self._shared_out[half]
        return _instead(self._moe, **instead)

    def _send(
        self,
        x_BLD: torch.Tensor,
        scores_BLK: torch.Tensor,
        expert_ids_BLK: torch.Tensor,
        counts_E: torch.Tensor,
    ) -> None:
        """What Titan's ``RoutedExperts.forward`` does first."""
        self._inputs.append(x_BLD)
        sizes = x_BLD.shape[0] * x_BLD.shape[1], -1
        given = (x_BLD.view(sizes), scores_BLK.view(sizes), expert_ids_BLK.view(sizes), counts_E)
        self._sent.append(self._routed(lambda: self._dispatcher.send(*given)))

    def _step(self, half: int, step: Callable[..., Any], *args: Any) -> Any:
        """A step of the dispatcher with what a half has sent."""
        with _in_half(half):
            return self._routed(lambda: step(self._sent[half], *args))

    def _collect(self, half: int) -> torch.Tensor:
        x_BLD = self._inputs[half]
        x_TD = x_BLD.view(-1, x_BLD.shape[-1])
        return self._step(half, self._dispatcher.collect, x_TD).view_as(x_BLD)

    def _run_experts(self) -> None:
        """Run the experts of both in one call, so that their FSDP unit gathers and reduces once."""

        def between(out_RD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self._step(0, self._dispatcher.send_back, out_RD)
            return self._step(1, self._dispatcher.receive)

        with maybe_set_sparse_mesh():
            received = self._step(0, self._dispatcher.receive)
            _, out_RD = self._routed.inner_experts(*received, between)
        self._step(0, self._dispatcher.relay_back)
        self._step(1, self._dispatcher.send_back, out_RD)


def _inside_or(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, or a function that runs inside of its module."""

    def run(first: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(first, torch.Tensor):
            return forward(first, *args, **kwargs)
        return first()

    return run


def _both_halves(forward: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """``forward`` of experts, or of A's and then B's, which ``between`` makes."""

    def run(
        x_RD: torch.Tensor,
        counts_e: torch.Tensor,
        between: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> Any:
        if between is None:
            return forward(x_RD, counts_e)
        with _in_half(0):
            out_a_RD = forward(x_RD, counts_e)
        of_b = between(out_a_RD)
        return out_a_RD, forward(*of_b)

    return run


@contextlib.contextmanager
def _instead(module: nn.Module, **functions: Any) -> Iterator[None]:
    """``module`` finds ``functions`` where it looks for its submodules of these names."""
    before = {name: module.__dict__.get(name) for name in functions}
    module.__dict__.update(functions)
    try:
        yield
    finally:
        for name, function in before.items():
            del module.__dict__[name]
            if function is not None:
                module.__dict__[name] = function


def _units_that_run_twice(block: nn.Module, moe: nn.Module) -> list[FSDPParamGroup]:
    """The FSDP groups of a block's units but its own and those that hold the MoE layer.

    Their gradients are reduced after the backward of A, which comes last: the newest nodes, which
    are B's, come first. See ``post_backward`` in
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
    """
    units = [m for m in block.modules() if isinstance(m, FSDPModule)]
    once = {m._get_fsdp_state() for m in (block, *moe.modules()) if isinstance(m, FSDPModule)}
    states = dict.fromkeys(m._get_fsdp_state() for m in units)
    groups = [g for state in states if state not in once for g in state._fsdp_param_groups]
    for group in groups:
        group.modules[-1].register_forward_hook(_SumOverHalves(group))
    return groups


class _SumOverHalves:
    """A forward hook: a unit's gradients are reduced once, with those of both halves."""

    def __init__(self, group: FSDPParamGroup) -> None:
        self._group = group
        self._switches = (True, True)

    def __call__(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if _half is not None and out.requires_grad:
            out.register_hook(self._begin_b if _half else self._begin_a)

    def _begin_b(self, _: torch.Tensor) -> None:
        group = self._group
        self._switches = group.reduce_grads, group.reshard_after_backward
        group.reduce_grads = group.reshard_after_backward = False

    def _begin_a(self, _: torch.Tensor) -> None:
        self._group.reduce_grads, self._group.reshard_after_backward = self._switches
