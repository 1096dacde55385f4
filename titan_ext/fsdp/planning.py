"""From the units of a model to a plan of what FSDP does with them."""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from titan_ext.fsdp.plan import FSDPPlan, GroupPlan, ParamPlan, UnitPlan
from titan_ext.fsdp.prefetch import NOTHING_AHEAD, Reach, plan_prefetch
from titan_ext.fsdp.reshard import Reshard, reshard_after_forward
from titan_ext.fsdp.units import Unit, innermost_first

__all__ = ["make_plan"]

_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


def make_plan(
    units: Sequence[Unit],
    *,
    shard_world: int,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    experts_world: int | None = None,
    expert_shard_dims: Mapping[str, int] | None = None,
    reshard: Reshard = "default",
    reshard_groups: Mapping[str, Reshard] | None = None,
    pp_enabled: bool = False,
    prefetch: Reach = NOTHING_AHEAD,
    prefetch_backward: Reach = NOTHING_AHEAD,
    kept: Mapping[str, nn.Module] | None = None,
    ignored: Collection[nn.Parameter] = (),
) -> FSDPPlan:
    """Plan what FSDP does with ``units``.

    Args:
        units: In forward order, before ``fully_shard``.
        shard_world: Ranks that dense parameters are sharded over.
        param_dtype: In which floating-point parameters are gathered.
        reduce_dtype: In which gradients are reduced.
        experts_world: Ranks that routed experts are sharded over when EP > 1, else None.
        expert_shard_dims: The dim that routed experts are sharded along, by unit; else 0.
        reshard: ``parallelism.fsdp_reshard_after_forward``.
        reshard_groups: ``parallelism.fsdp_reshard_groups``.
        pp_enabled: Whether this is a chunk of a pipeline.
        prefetch: How far ahead in forward.
        prefetch_backward: How far ahead in backward.
        kept: Modules whose own parameters are kept whole, by name (``fsdp.replicated``).
        ignored: Parameters that FSDP leaves alone.

    Raises:
        ValueError: for a reshard setting that does not fit.
    """
    replicated = {
        f"{path}.{name}": param
        for path, module in (kept or {}).items()
        for name, param in module.named_parameters(recurse=False)
    }
    owned = _owned_parameters(units, {*replicated.values(), *ignored})
    groups = {
        unit.name: _groups_of(
            unit,
            owned[unit.name],
            shard_world,
            experts_world,
            param_dtype,
            reduce_dtype,
            (expert_shard_dims or {}).get(unit.name, 0),
        )
        for unit in units
    }
    nbytes = {name: sum(group.gathered_nbytes for group in groups[name]) for name in groups}
    largest = max(nbytes.values(), default=0)
    ahead = plan_prefetch(units, nbytes, prefetch, prefetch_backward)
    return FSDPPlan(
        units=tuple(
            UnitPlan(
                name=unit.name,
                kind=unit.kind,
                groups=groups[unit.name],
                reshard_after_forward=reshard_after_forward(
                    unit,
                    reshard,
                    reshard_groups or {},
                    pp_enabled=pp_enabled,
                    is_rounding_error=nbytes[unit.name] * 100 <= largest,
                    has_dtensors=any(isinstance(p, DTensor) for _, p in owned[unit.name]),
                    group_worlds=[group.shard_world for group in groups[unit.name]],
                ),
                forward_prefetch=ahead[unit.name].forward,
                backward_prefetch=ahead[unit.name].backward,
            )
            for unit in units
        ),
        replicated=tuple(
            _param_plan(name, param, 0, param_dtype, reduce_dtype)
            for name, param in replicated.items()
        ),
    )


def _groups_of(
    unit: Unit,
    named: Sequence[tuple[str, nn.Parameter]],
    shard_world: int,
    experts_world: int | None,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    expert_shard_dim: int,
) -> tuple[GroupPlan, ...]:
    experts = set(unit.experts.parameters()) if unit.experts is not None else set()

    def plan(name: str, param: nn.Parameter) -> ParamPlan:
        shard_dim = expert_shard_dim if param in experts else 0
        return _param_plan(name, param, shard_dim, param_dtype, reduce_dtype)

    own_mesh = experts if experts_world is not None else set()
    dense = tuple(plan(name, p) for name, p in named if p not in own_mesh)
    routed = tuple(plan(name, p) for name, p in named if p in own_mesh)
    groups = []
    if dense:
        groups.append(GroupPlan(kind="dense", shard_world=shard_world, params=dense))
    if routed:
        assert experts_world is not None
        groups.append(GroupPlan(kind="experts", shard_world=experts_world, params=routed))
    return tuple(groups)


def _param_plan(
    name: str,
    param: nn.Parameter,
    shard_dim: int,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> ParamPlan:
    local = param.to_local() if isinstance(param, DTensor) else param
    floating = param.is_floating_point()
    return ParamPlan(
        name=name,
        shape=tuple(local.shape),
        shard_dim=shard_dim,
        dtype=param_dtype if floating else param.dtype,
        reduce_dtype=reduce_dtype if floating else param.dtype,
        requires_grad=param.requires_grad,
    )


def _owned_parameters(
    units: Sequence[Unit], others: Collection[nn.Parameter]
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """The parameters of each unit by its name, less ``others``; the innermost unit owns one."""
    owned: dict[str, list[tuple[str, nn.Parameter]]] = {}
    taken = set(others)
    for unit in innermost_first(units):
        owned[unit.name] = []
        for prefix, module in zip(unit.module_names, unit.modules, strict=True):
            for name, param in module.named_parameters(prefix):
                if param not in taken:
                    taken.add(param)
                    owned[unit.name].append((name.replace(_CHECKPOINT_PREFIX, ""), param))
    return owned
