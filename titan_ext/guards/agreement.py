# SPDX-License-Identifier: BSD-3-Clause
"""Whether all ranks run the same: versions and every value of the config."""

import hashlib
import re
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
import torchtitan
from torchtitan.trainer import Trainer

import titan_ext
from titan_ext.guards import ONE_PROCESS_MODES, RunCheck
from titan_ext.names import ranks_in_words

_PACKAGES = (torch, torchtitan, titan_ext)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SHOWN_KEYS = 10


class RanksAgree(RunCheck):
    """Compares the versions and the config of all ranks, on the default group.

    A rank with another version of torch, or another value for one key, issues other collectives. On
    hundreds of nodes that is a hang after minutes, without a cause.
    """

    def before_build(self, config: Trainer.Config) -> None:
        """Raise ValueError on every rank if any two differ: which keys, ranks and values."""
        if config.comm.mode in ONE_PROCESS_MODES:
            return
        mine = describe(config)
        digest = hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest()
        digests: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(digests, digest)
        if len(set(digests)) == 1:
            return
        descriptions: list[dict[str, str]] = [{} for _ in digests]
        dist.all_gather_object(descriptions, mine)
        raise ValueError(_differences(descriptions))


def describe(config: Trainer.Config) -> dict[str, str]:
    """What must be equal on every rank: package versions and every config value, by dotted key."""
    description = {f"version of {p.__name__}": p.__version__ for p in _PACKAGES}
    _flatten("", config.to_dict(), description)
    return description


def _differences(descriptions: list[dict[str, str]]) -> str:
    lines = []
    for key in sorted({key for description in descriptions for key in description}):
        ranks_by_value: dict[str, set[int]] = defaultdict(set)
        for rank, description in enumerate(descriptions):
            ranks_by_value[description.get(key, "(absent)")].add(rank)
        if len(ranks_by_value) > 1:
            values = [f"{v} on {ranks_in_words(ranks)}" for v, ranks in ranks_by_value.items()]
            lines.append(f"  {key}: {'; '.join(values)}")
    if len(lines) > _SHOWN_KEYS:
        lines[_SHOWN_KEYS:] = [f"  ... and {len(lines) - _SHOWN_KEYS} more"]
    return "\n".join(["the ranks disagree on what to run:", *lines])


def _flatten(prefix: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), item, into)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _flatten(f"{prefix}.{index}", item, into)
        into[f"{prefix}.length"] = str(len(value))
    else:
        # A function is shown with its address, which differs from process to process.
        into[prefix] = _ADDRESS.sub("", str(value))
