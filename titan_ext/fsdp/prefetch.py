"""Which unit is gathered while another one computes.

FSDP2 prefetches by itself in backward, and in forward as far as the host runs ahead of the device.
The device-to-host copy of the expert-parallel split lists stops the host in every MoE layer, so the
lists are given explicitly: while unit i runs, unit i + 1 is gathered (i - 1 in backward).
"""

from collections.abc import Sequence
from itertools import pairwise

from torch.distributed.fsdp import FSDPModule

from titan_ext.fsdp.units import Unit, UnitKind

__all__ = ["set_prefetch"]


def set_prefetch(units: Sequence[Unit]) -> None:
    """Prefetch one unit ahead in forward and in backward. ``units`` are in forward order."""
    order = list(units)
    if order and order[0].kind is UnitKind.TIED:
        order.append(order[0])  # embeddings run first, norm and head last
    for unit, following in pairwise(order):
        _fsdp_module(unit).set_modules_to_forward_prefetch([_fsdp_module(following)])
        _fsdp_module(following).set_modules_to_backward_prefetch([_fsdp_module(unit)])


def _fsdp_module(unit: Unit) -> FSDPModule:
    # The modules of a unit share one FSDP state: any of them stands for it.
    module = unit.modules[0]
    assert isinstance(module, FSDPModule), f"unit {unit.name} has not been sharded"
    return module
