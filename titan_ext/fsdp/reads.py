# SPDX-License-Identifier: BSD-3-Clause
"""Weights that are read past the forward of their own module.

FSDP2 gathers a unit when one of its modules runs. Code outside of it that reads a weight finds a
shard then: a DTensor, whose ``to_local()`` computes with the rows of this rank, and whose gradient
FSDP2 sums over no rank. Smaller units than stock's make more code stand outside.

Such a read is refused, by name, in the model's first forward. For that time the shards are of a
class that says who reads them; FSDP2 takes what it gathers from a tensor of its own. Later steps
cost nothing: a hook on each shard refuses a gradient, which only such a read can bring.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torchtitan.components.checkpointer.utils import canonical_fqn

from titan_ext.fsdp.plan import FSDPPlan
from titan_ext.fsdp.units import param_groups, splits_blocks


def refuse_reads_of_shards(model: nn.Module, plan: FSDPPlan) -> None:
    """Raise ValueError naming parameter and reader where ``model`` reads a shard as it runs.

    A group of one rank has the whole as its shard: what is local then is right.
    """
    shards: list[DTensor] = []
    handles: list[RemovableHandle] = []
    names = {id(module): canonical_fqn(path) for path, module in model.named_modules()}
    splits = splits_blocks(plan.decoder_units)

    def arm(shard: Any, param: FSDPParam, group: FSDPParamGroup) -> None:
        if isinstance(shard, _Shard):  # tied
            return
        name = canonical_fqn(param._param_fqn or param._module_info.param_name)
        shard._refuse = functools.partial(_refuse, name, names, splits)
        shard._is_whole = group.mesh_info.mesh.size() == 1
        # The same object: FSDP2 swaps it in by name, and an optimizer holds it.
        shard.__class__ = _Shard
        shards.append(shard)

    def arm_smaller(group: FSDPParamGroup, *_: Any) -> None:
        """Arm the shards over fewer ranks, which are other tensors in each step."""
        for param in group.fsdp_params:
            if (shard := getattr(param, "_sharded_post_forward_param", None)) is not None:
                arm(shard, param, group)

    @torch._dynamo.disable
    def begin(*_: Any) -> None:
        for group in param_groups(model.modules()):
            for param in group.fsdp_params:
                arm(param.sharded_param, param, group)
            if group._use_post_forward_mesh:
                hook = torch._dynamo.disable(functools.partial(arm_smaller, group))
                handles.extend(m.register_forward_hook(hook) for m in group.modules)

    @torch._dynamo.disable
    def end(*_: Any) -> None:
        # This hook stays: after an error torch calls it from a loop over the model's own hooks.
        for handle in handles[0 if torch.is_grad_enabled() else 1 :]:
            handle.remove()
        del handles[1:]
        for shard in shards:
            shard.__class__ = DTensor
            refuse, _ = shard.__dict__.pop("_refuse"), shard.__dict__.pop("_is_whole")
            if torch.is_grad_enabled() and shard.requires_grad:
                shard.register_hook(refuse)
        shards.clear()

    # After FSDP's own, which may replace parameters. Gone after the first forward with gradients.
    handles.append(model.register_forward_pre_hook(begin))
    # Always: an error in the forward would leave shards that refuse to be read.
    model.register_forward_hook(end, always_call=True)


class _Shard(DTensor):
    """A shard while the model first runs.

    What DTensor computes with all of a weight is right where nothing asks for its gradient.
    """

    _refuse: Callable[..., NoReturn]
    _is_whole: bool

    def to_local(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_whole:
            self._refuse()
        return super().to_local(*args, **kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:  # full_tensor() calls it, too
        if torch.is_grad_enabled():
            self._refuse()
        return super().redistribute(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.is_grad_enabled():
            next(x for x in tree_leaves((args, kwargs)) if isinstance(x, _Shard))._refuse()
        return super().__torch_dispatch__(func, types, args, kwargs)


def _refuse(name: str, names: dict[int, str], splits: bool, *_: Any) -> NoReturn:
    """Raise ValueError: something reads the parameter ``name`` where FSDP has not gathered it."""
    # An operation on a tensor does not know its module, but a method of that is on the stack.
    frame, owner = sys._getframe(1), name.rpartition(".")[0]
    while frame := frame.f_back:
        if (found := names.get(id(frame.f_locals.get("self")))) is not None:
            reader = found or "the model"
            break
    else:  # no module runs: a gradient has come, in backward
        # What a loss computes of a shard as a DTensor is right, but here it looks the same. Of a
        # weight that is still gathered (the head's) FSDP sums it over the ranks: a multiple.
        raise ValueError(
            f"A gradient comes to {name} past FSDP, which sums it over no ranks: a forward or the "
            "loss reads the weight where FSDP has not gathered it. Expected a forward that "
            f"computes with it in that of {owner}. For a penalty on weights, expected the weight "
            "decay of the optimizer, or the penalty's gradient added after backward: "
            "p.grad.add_(p.detach(), alpha=2 * factor) for factor * p.pow(2).sum()."
        )
    block = ".".join(name.split(".")[:2])
    serves = splits and f"{reader}.".startswith(f"{block}.")
    way_on = (
        'parallelism.fsdp_wrap = "block" gathers it while the whole block runs, as TorchTitan does'
        if serves
        else f"compute with it in the forward of {owner}"
    )
    raise ValueError(
        f"{reader} reads {name}, a weight that FSDP has not gathered there: it would compute with "
        f"the shard of this rank, and its gradient would not be summed over the ranks. {way_on}."
    )
