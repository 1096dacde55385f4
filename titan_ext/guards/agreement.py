"""The ranks agree on what they are about to run, or say where they do not.

A rank that has another version of torch, or another value for one key, issues other collectives: on
hundreds of nodes that is a hang after minutes, with no word about the cause. One exchange before
training makes it an error that names the ranks and the keys.
"""

import hashlib
import re
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
import torchtitan
from torchtitan.trainer import Trainer

import titan_ext

__all__ = ["check_agreement", "describe"]

_PACKAGES = (torch, torchtitan, titan_ext)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SHOWN_KEYS = 10


def describe(config: Trainer.Config) -> dict[str, str]:
    """What must be equal on every rank: package versions and every config value, by dotted key."""
    description = {f"version of {p.__name__}": p.__version__ for p in _PACKAGES}
    _flatten("", config.to_dict(), description)
    return description


def check_agreement(config: Trainer.Config) -> None:
    """Compare this rank's versions and config with the other ranks', on the default group.

    Raises:
        ValueError: on every rank, if any two ranks differ: which keys, which ranks, which values.
    """
    mine = describe(config)
    digest = hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest()
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return
    descriptions: list[dict[str, str]] = [{} for _ in digests]
    dist.all_gather_object(descriptions, mine)
    raise ValueError(_differences(descriptions))


def _differences(descriptions: list[dict[str, str]]) -> str:
    keys = sorted({key for description in descriptions for key in description})
    lines = []
    for key in keys:
        ranks_by_value: dict[str, list[int]] = defaultdict(list)
        for rank, description in enumerate(descriptions):
            ranks_by_value[description.get(key, "(absent)")].append(rank)
        if len(ranks_by_value) > 1:
            values = "; ".join(
                f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items()
            )
            lines.append(f"  {key}: {values}")
    shown = lines[:_SHOWN_KEYS]
    if len(lines) > len(shown):
        shown.append(f"  ... and {len(lines) - len(shown)} more")
    return "the ranks disagree on what to run:\n" + "\n".join(shown)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _flatten(prefix: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), item, into)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _flatten(f"{prefix}.{index}", item, into)
        into[f"{prefix}.length"] = str(len(value))
    else:
        # Functions are shown with an address, which is every process' own.
        into[prefix] = _ADDRESS.sub("", str(value))
