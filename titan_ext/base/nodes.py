# SPDX-License-Identifier: BSD-3-Clause
"""The place of a job's ranks on machines: what layout, exchanges and plans follow from."""

import os
import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

NVLINK_DOMAIN = "TITAN_EXT_NVLINK_DOMAIN"
"""Variable with the domain of the job that a dry run stands for (``plan.stand_ins.as_rank``)."""
RANKS_PER_NODE = 8
"""GPUs of a node where no machine is named."""


def ranks_per_node() -> int:
    """Ranks on the smallest node of the job, as torchrun says; 8 without it.

    How often ranks communicate follows from it, so all have to take the same. The first call on a
    process group is a collective.
    """
    # Here, since commands read the rest of this file before they import torch.
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD
    here = int(os.environ.get("LOCAL_WORLD_SIZE", RANKS_PER_NODE))
    if group is None:
        return here
    here = min(here, group.size())
    # A fake group reduces nothing, and every rank of a dry run is on the nodes that it was told.
    if dist.get_backend() == "fake":
        return here
    if group not in _smallest_node:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        smallest = torch.tensor(here, device=device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        _smallest_node[group] = int(smallest.item())
    return _smallest_node[group]


_smallest_node: "MutableMapping[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()


def nvlink_domain() -> int:
    """Number of neighbouring ranks that NVLink joins, on one node or several."""
    return int(os.environ.get(NVLINK_DOMAIN, 0)) or ranks_per_node()


@dataclass(frozen=True)
class Nodes:
    """The place of a job's ranks on machines; equal on every rank."""

    ranks: int
    """Ranks of the smallest node."""
    nvlink_domain: int
    """Neighbouring ranks that NVLink joins."""

    @classmethod
    def agreed(cls) -> "Nodes":
        """Those of this job; the first call on a process group is a collective."""
        return cls(ranks_per_node(), nvlink_domain())

    def among(self, ep: int) -> int:
        """In how many nodes ``ep`` ranks lie that exchange tokens in two hops.

        A node is what NVLink joins. 0 if it is one, if not all are whole, or if each has one rank.
        """
        joined = self.nvlink_domain
        return 0 if ep % joined or joined in (1, ep) else ep // joined
