# SPDX-License-Identifier: BSD-3-Clause
"""Shared experts of a MoE layer run while the outputs of its routed ones travel back.

Titan's layer calls its routed experts, and then its shared ones on the same tensor. The token
dispatcher lets them run earlier (``run_ahead``): once, with their hooks, on the layer's own tensor,
and in the contexts that the layer is in, whatever its routed experts have entered meanwhile. When
the layer calls them it gets what they returned. In backward the same happens in reverse.
"""

from typing import Any, cast

import torch
import torch.nn as nn
from torchtitan.models.common.moe import MoE

from titan_ext.base.thread_state import ThreadState
from titan_ext.components.dispatch import FunctionalAllToAllTokenDispatcher
from titan_ext.components.halves import current_half

# Shape suffixes, as in torchtitan/models/common/moe.py. B = batch, L = sequence, D = model
# dimension.


def overlap_shared_experts(model: nn.Module) -> None:
    """Let shared experts run while routed ones' outputs travel back.

    Results are the same, bit for bit: nothing is added up in another order. Call it after expert
    parallelism. Layers with a forward or a dispatcher of their own stay as they are.
    """
    for layer in model.modules():
        if not isinstance(layer, MoE) or type(layer).forward is not MoE.forward:
            continue
        dispatcher = layer.routed_experts.token_dispatcher
        if isinstance(dispatcher, FunctionalAllToAllTokenDispatcher) and layer.shared_experts:
            dispatcher.shared_experts = _SharedExperts(layer)


class _SharedExperts:
    """Stands between a layer and two of its modules, where ``nn.Module.compile`` does.

    There a call has not run any hook yet.
    """

    def __init__(self, layer: MoE) -> None:
        self._layer, self._module = layer, cast(nn.Module, layer.shared_experts)
        self._routed = layer.routed_experts
        # Of each half of a batch.
        self._called: dict[int, tuple[torch.Tensor, ThreadState]] = {}
        self._ahead: dict[int, tuple[torch.Tensor, Any]] = {}
        self._routed._compiled_call_impl = self._note_call
        self._module._compiled_call_impl = self._take

    def _note_call(self, x_BLD: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # then the layer's other call does not pass here
            return self._routed._call_impl(x_BLD, *args, **kwargs)
        half = current_half()
        self._ahead.pop(half, None)
        self._called[half] = x_BLD, ThreadState.read()
        try:
            return self._routed._call_impl(x_BLD, *args, **kwargs)
        finally:
            self._called.pop(half, None)

    def run_ahead(self) -> None:
        """Call them as the layer will, and keep the result."""
        if torch.compiler.is_compiling():
            return
        half, module = current_half(), self._module
        called, replaced = self._called.pop(half, None), self._layer.shared_experts is not module
        if called is None or replaced or module._compiled_call_impl != self._take:
            return  # the layer will call something else, or somebody has compiled them
        (x_BLD, contexts), inside = called, ThreadState.read()
        contexts.write()
        try:
            self._ahead[half] = x_BLD, module._call_impl(x_BLD)
        finally:
            inside.write()

    def _take(self, x_BLD: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            tokens, out = self._ahead.pop(current_half(), (None, None))
            if tokens is x_BLD:
                return out
        return self._module._call_impl(x_BLD, *args, **kwargs)
