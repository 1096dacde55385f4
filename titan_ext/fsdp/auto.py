# SPDX-License-Identifier: BSD-3-Clause
"""What "auto" means for FSDP's units, prefetch and reduce-scatter buffers: a rule, without a model.

Smaller units hold less and gather more often. If the experts' shards lie on one node, or whole on a
rank, their gathers hide behind computation: a block is split into attention and MoE. Across nodes
they may not. There the unit of experts alone issues as many collectives as a whole block. With two
gathers ahead and two reduce-scatters behind backward it takes no more time than stock's blocks, by
the clock of a dry run (docs/fsdp_units.md), and holds no more bytes.

All ranks decide from the same numbers: ``ranks_per_node`` is that of the job's smallest node.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.logging import logger

from titan_ext.base.op_cost import ranks_per_node
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.fsdp.units import Wrap, plan_units, resolve_wrap


class _Choice(NamedTuple):
    """Values of fsdp_wrap, fsdp_prefetch_backward, fsdp_reduce_scatter_buffers."""

    wrap: Wrap
    prefetch_backward: int | str = "auto"
    buffers: int = 1


_NEAR = (_Choice("submodule"), _Choice("experts"), _Choice("block"))
# Two buffers beside the unit of experts are the bytes that stock has in flight too: its unit has
# two groups, each with a buffer. Attention and MoE apart have twice the reduce-scatters of a block.
_ACROSS_NODES = (
    _Choice("experts", prefetch_backward=2, buffers=2),
    _Choice("block"),
    _Choice("submodule", buffers=3),
)


def choose(
    model: Decoder, settings: FSDPSettings, parallel_dims: ParallelDims, *, compiled: bool = False
) -> FSDPSettings:
    """Return ``settings`` with values in place of "auto", said in the log with the reason.

    Args:
        model: The decoder or pipeline chunk on the meta device, before any parallelism.
        compiled: Whether the model is compiled: the experts cannot be a unit of their own then.
    """
    units_are_given = "auto" not in (settings.wrap, settings.reduce_scatter_buffers)
    if units_are_given and settings.prefetch != "auto":
        return settings
    ep, shards = parallel_dims.ep, parallel_dims.dp_shard * parallel_dims.cp * parallel_dims.tp
    if resolve_wrap("auto", ep, model.config) == "block":  # EP splits no experts
        return _with(settings, _Choice(resolve_wrap(settings.wrap, ep, model.config)))
    near = shards == ep or shards <= ranks_per_node()
    where = "across nodes"
    if near:
        where = "whole on a rank" if shards == ep else "on one node"
    can_wait = _several_buffers(settings)  # reduce-scatters, while backward goes on
    candidates = [
        choice
        for choice in (_NEAR if near else _ACROSS_NODES)
        if settings.wrap in ("auto", choice.wrap)
        and not (choice.wrap == "experts" and compiled)
        # With one buffer small units would cost time.
        and (near or can_wait or choice.wrap == "block" or settings.wrap != "auto")
    ]
    may_be_elsewhere = parallel_dims.pp_enabled
    named = (c for c in candidates if may_be_elsewhere or _has_named_units(model, settings, c.wrap))
    choice = next(named, candidates[-1])
    chosen = _with(settings, choice if can_wait else choice._replace(buffers=1))
    if units_are_given:
        return chosen
    buffers = chosen.reduce_scatter_inputs
    words = [f'auto is "{chosen.wrap}"'] if settings.wrap == "auto" else []
    words += [f"{buffers} reduce-scatter buffers"] if buffers > 1 else []
    if not words:  # the config itself says all of it
        return chosen
    said = f"{', '.join(words)} (EP {ep}, experts' shards {where})"
    logger.info(f"FSDP units: {said}")
    return replace(chosen, chosen=said)


def _several_buffers(settings: FSDPSettings) -> bool:
    """Whether reduce-scatters may run behind backward."""
    if settings.reduce_scatter_buffers != "auto":
        return settings.reduce_scatter_buffers > 1
    if hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"):
        return not settings.symm_mem
    logger.warning(
        f"torch {torch.__version__} has one reduce-scatter buffer; from 2.15 on a group of "
        "their own for reduce-scatters makes small units as fast as whole blocks."
    )
    return False


def _has_named_units(model: Decoder, settings: FSDPSettings, wrap: Wrap) -> bool:
    """Whether all names in fsdp_reshard_groups are of units that ``wrap`` makes."""
    try:
        settings.check_reshard_groups(plan_units(model, wrap))
    except ValueError:
        return False
    return True


def _with(settings: FSDPSettings, choice: _Choice) -> FSDPSettings:
    """``settings`` with the values of ``choice`` where they are "auto"."""
    given: dict[str, Any] = {}
    if settings.wrap == "auto":
        given["wrap"] = choice.wrap
    if settings.reduce_scatter_buffers == "auto":
        given["reduce_scatter_buffers"] = choice.buffers
    if settings.prefetch == "auto" and settings.prefetch_backward in (None, "auto"):
        given["prefetch_backward"] = choice.prefetch_backward
    return replace(settings, **given)
