# SPDX-License-Identifier: BSD-3-Clause
"""Checks machines before a long job: links, versions and the layout.

``torchrun ... -m titan_ext check CONFIG`` runs this on every rank of the job, for seconds. A wrong
variable or a bad cable makes NCCL fall back without an error, and the job is a fraction as fast.
NCCL's own log (``NCCL_DEBUG=INFO``) says what it has chosen. The same code runs on gloo.
"""

import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from titan_ext.base.agreement import this_job
from titan_ext.base.machines import machine_of
from titan_ext.base.messages import ranks_in_words
from titan_ext.base.nodes import nvlink_domain, ranks_per_node
from titan_ext.run.record import communication, versions
from titan_ext.run.start import ranks_differ

_REPEATS = 3
_SLOW = 0.5
"""Share of the median of like links, or of the plan's rate, below which a link is slow."""
_SHOWN = 8
_WITHIN = timedelta(minutes=5)


@dataclass(frozen=True)
class Link:
    """The rate at which two ranks sent each other at once: bytes a second of each."""

    rank: int
    other: int
    rate: float
    in_node: bool


def check(config: Any, *, machine: str = "", mib: int = 16) -> list[str]:
    """Measure and compare, on every rank; what was found, on rank 0.

    ``config`` is a trainer's whose layout to judge, or None. Links are expected to be those of
    ``machine``, as ``machine_of`` takes it. Two ranks send each other ``mib`` MiB at a time. Raises
    ValueError on all ranks, if their versions differ.
    """
    device = torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=_WITHIN)
    try:
        job = this_job()
        found = versions() | {"backend": f"{backend} {communication().get('version', '')}".strip()}
        if said := job.compare("versions", json.dumps(found), ranks_differ):
            raise ValueError(said)
        mine = list(_measure(device, mib * 2**20, ranks_per_node()))
        every: Any = [None] * job.ranks if job.rank == 0 else None
        dist.gather_object(mine, every)
        lines = []
        if job.rank == 0:
            lines = [f"{job.ranks} ranks alike: {', '.join(map(' '.join, found.items()))}"]
            lines += judge_links([link for links in every for link in links], machine)
            lines += layout_warnings(config, job.ranks) if config is not None else []
        dist.barrier()  # rank 0 may hold the store
    finally:
        dist.destroy_process_group()
    return lines


def pairs(ranks: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs that send at once: neighbours, then farther ranks and nodes."""
    shifts = (1 << bit for bit in range((ranks - 1).bit_length()))
    return [[(r, r ^ shift) for r in range(ranks) if r < r ^ shift < ranks] for shift in shifts]


def _measure(device: torch.device, nbytes: int, per_node: int) -> Iterator[Link]:
    """The links of this rank, each once, by the lower of its two ranks."""
    rank = dist.get_rank()
    sent = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    for at_once in pairs(dist.get_world_size()):
        other = next((b if a == rank else a for a, b in at_once if rank in (a, b)), None)
        dist.barrier()
        if other is None:
            continue
        best_s = float("inf")
        for _ in range(_REPEATS):
            since_s = time.perf_counter()
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
            ):
                work.wait()
            if device.type != "cpu":
                # NCCL's wait holds the stream back, and not the host.
                torch.accelerator.synchronize()
            best_s = min(best_s, time.perf_counter() - since_s)
        if rank < other:
            yield Link(rank, other, nbytes / best_s, rank // per_node == other // per_node)


def judge_links(links: Sequence[Link], machine: str = "") -> list[str]:
    """A line for the links in nodes and one for those across, and one for each slow link."""
    lines = []
    for in_node, where in ((True, "in a node"), (False, "across nodes")):
        rates = {(x.rank, x.other): x.rate for x in links if x.in_node == in_node}
        if not rates:
            continue
        median = statistics.median(rates.values())
        text = f"links {where}: {len(rates)}, {_gb(median)} each way (median)"
        expected = 0.0
        if machine:
            known = machine_of(machine)
            expected = known.in_node if in_node else known.network
            text += f", {_gb(expected)} in the plan for {machine}"
        lines.append(text)
        if median < _SLOW * expected:
            lines.append(f"warning: links {where} have {median / expected:.0%} of that")
        slow = sorted((rate, ranks) for ranks, rate in rates.items() if rate < _SLOW * median)
        for rate, ranks in slow[:_SHOWN]:
            lines.append(f"warning: {ranks_in_words(ranks)} have {_gb(rate)}: less than half")
        if len(slow) > _SHOWN:
            lines.append(f"warning: {len(slow) - _SHOWN} more links are as slow")
    return lines


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


def layout_warnings(config: Any, ranks: int) -> list[str]:
    """Warnings of axes that leave the NVLink domain: TP, experts, shards of HSDP."""
    dims, domain = ParallelDims.from_config(config.parallelism, ranks), nvlink_domain()
    asked = {
        "parallelism.tensor_parallel_degree": dims.tp,
        "parallelism.expert_parallel_degree": dims.ep,
    }
    if dims.dp_replicate > 1:  # else the shards are meant to span the job
        asked["parallelism.data_parallel_shard_degree"] = dims.dp_shard * dims.cp * dims.tp
    lines = []
    for key, span in asked.items():
        if span > domain:
            lines.append(f"warning: {key}: its {span} ranks leave an NVLink domain of {domain}")
        elif span > 1 and domain % span:
            lines.append(
                f"warning: {key}: groups of {span} do not fill an NVLink domain of {domain}, so "
                "that some lie across two"
            )
    return lines or [f"layout: stays in NVLink domains of {domain}"]
