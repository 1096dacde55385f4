"""Plans for the predictor, from the shapes of a model on the meta device and a run's settings."""

from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
import torch.nn as nn
from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy
from torchtitan.models.common.decoder import Decoder

from titan_ext.fsdp.plan import GroupPlan, ParamPlan, UnitPlan
from titan_ext.fsdp.units import Unit, UnitKind, plan_units, resolve_wrap

if TYPE_CHECKING:
    from tests.training import Run


def plan_run(run: "Run", model: nn.Module, part: nn.Module) -> list[UnitPlan]:
    """The plan of the units of ``part``, a stage or all of ``model``, which is on meta."""
    wrap = resolve_wrap(run.parallelize, run.ep)
    names = {unit.name for unit in plan_units(cast(Decoder, part), wrap)}
    units = [u for u in plan_units(cast(Decoder, model), wrap) if u.name in names]
    frees = get_fsdp_reshard_after_forward_policy(run.reshard, run.pp > 1)
    shard_world = run.world // (run.pp * run.tp)
    forward, backward = _one_ahead(units)
    # With EP = 1 and whole blocks FSDP2 prefetches by itself, in backward.
    is_explicit = wrap == "submodule" or run.ep > 1
    return [
        UnitPlan(
            name=unit.name,
            kind=unit.kind,
            groups=_groups(unit, model, run, shard_world),
            reshard_after_forward=(
                run.reshard == "always" if unit.kind in (UnitKind.HEAD, UnitKind.TIED) else frees
            ),
            forward_prefetch=forward.get(unit.name, ()) if is_explicit else (),
            backward_prefetch=backward.get(unit.name, ()),
        )
        for unit in units
    ]


def _one_ahead(units: list[Unit]) -> tuple[dict[str, tuple[str]], dict[str, tuple[str]]]:
    order = [unit.name for unit in units]
    if units[0].kind is UnitKind.TIED:
        order.append(order[0])
    forward = {name: (following,) for name, following in reversed(list(pairwise(order)))}
    return forward, {following: (name,) for name, following in pairwise(order)}


def _groups(unit: Unit, model: nn.Module, run: "Run", shard_world: int) -> tuple[GroupPlan, ...]:
    experts = set(unit.experts.parameters()) if unit.experts is not None else set()
    found: dict[str, list[ParamPlan]] = {"dense": [], "experts": []}
    for module in unit.modules:
        # Tied weights count twice: Titan ties them again only after FSDP has seen two of them.
        prefix = next(name for name, found in model.named_modules() if found is module)
        for name, param in module.named_parameters():
            is_expert = run.ep > 1 and param in experts
            shape = list(param.shape)
            if is_expert:
                shape[0] //= run.ep
            expert_shard = 1 if unit.experts and shard_world > unit.experts.num_experts else 0
            found["experts" if is_expert else "dense"].append(
                ParamPlan(
                    name=f"{prefix}.{name}",
                    shape=tuple(shape),
                    shard_dim=expert_shard if param in experts else 0,
                    dtype=getattr(torch, run.param_dtype),
                    reduce_dtype=torch.float32,
                )
            )
    groups = (
        GroupPlan(kind="dense", shard_world=shard_world, params=tuple(found["dense"])),
        GroupPlan(
            kind="experts", shard_world=shard_world // run.ep, params=tuple(found["experts"])
        ),
    )
    return tuple(group for group in groups if group.params)
