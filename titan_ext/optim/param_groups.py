# SPDX-License-Identifier: BSD-3-Clause
"""Refuses wrong parameter groups before anything starts.

Titan matches the patterns of ``optimizer.param_groups`` on the ranks, after sharding the model:
there a pattern that matches nothing is a traceback on every rank. And torch's optimizers ignore a
misspelt ``weight_decay``. This module checks both from the config alone, on the meta device.
"""

import inspect
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import torch
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import ParallelismConfig
from torchtitan.distributed.flex_shard.dist_muon import DistMuon
from torchtitan.protocols.model import BaseModel

from titan_ext.names import and_more, did_you_mean

MUON = "DistMuon"
"""The ``optimizer_name`` of Titan's Muon."""

_OPTIMIZERS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, MUON: DistMuon}
_NOT_KEYS = ("self", "params", "compute_sharding_by_fqn", "bucket_configs")
_IMPLEMENTATION = ("fused", "foreach")
_CATCH_ALL = (".*", "")


def resolve_groups(names: Iterable[str], groups: Sequence[ParamGroupConfig]) -> list[list[str]]:
    """Which group takes which parameter: the first whose pattern matches.

    Args:
        names: Names of trainable parameters; wrapper segments in them are ignored.
        groups: As in ``optimizer.param_groups``.

    Returns:
        The canonical names that each group takes, in the order of ``names``. A name that no pattern
        matches is in none.
    """
    patterns = [re.compile(group.pattern) for group in groups]
    taken: list[list[str]] = [[] for _ in groups]
    for name in map(canonical_fqn, names):
        first = next((i for i, pattern in enumerate(patterns) if pattern.search(name)), None)
        if first is not None:
            taken[first].append(name)
    return taken


def check_param_groups(
    config: OptimizersContainer.Config,
    model_config: BaseModel.Config,
    parallelism: ParallelismConfig,
) -> None:
    """Check ``optimizer.param_groups`` against the model that is to be trained.

    Raises:
        ValueError: naming the key, for a pattern that is no regular expression or takes no
            parameter, a parameter that no group takes, an unknown optimizer, a key that the
            optimizer does not have, or what DistMuon cannot take.
    """
    for index, group in enumerate(config.param_groups):
        _check_group(f"optimizer.param_groups.{index}", group)
    muon = _check_muon(config.param_groups, parallelism)
    if len(config.param_groups) == 1 and config.param_groups[0].pattern in _CATCH_ALL:
        return
    with torch.device("meta"):
        model = model_config.build()
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    taken = resolve_groups(shapes, config.param_groups)
    for index, names in enumerate(taken):
        if not names:
            raise ValueError(_takes_nothing(index, config.param_groups, list(shapes)))
    if left := [name for name in shapes if not any(name in names for names in taken)]:
        raise ValueError(
            f"optimizer.param_groups: no group takes {and_more(left, 1)}; expected every trainable "
            'parameter in a group: add a last one with pattern ".*".'
        )
    for name in taken[muon] if muon is not None else ():
        if len(shapes[name]) not in (2, 3):
            raise ValueError(
                f"optimizer.param_groups.{muon}.pattern takes {name} of shape "
                f"{tuple(shapes[name])}; {MUON} expects matrices, or experts with a matrix each."
            )


def _check_muon(groups: Sequence[ParamGroupConfig], parallelism: ParallelismConfig) -> int | None:
    """The index of DistMuon's group, if there is one."""
    muons = [i for i, group in enumerate(groups) if group.optimizer_name == MUON]
    if not muons:
        return None
    key = f"optimizer.param_groups.{muons[-1]}"
    if len(muons) > 1:
        raise ValueError(
            f"{key}.optimizer_name is {MUON!r}, as in group {muons[0]}; expected one group of it: "
            "join the patterns with |."
        )
    if len(groups) == 1 and groups[0].pattern in _CATCH_ALL:
        raise ValueError(
            f"{key}.pattern takes all parameters, and {MUON} matrices only; expected a pattern for "
            "matrices, and a group after it for the rest."
        )
    if parallelism.tensor_parallel_degree > 1:
        raise ValueError(
            f"{key}.optimizer_name is {MUON!r}, and parallelism.tensor_parallel_degree is "
            f"{parallelism.tensor_parallel_degree}; expected 1: TorchTitan's {MUON} takes matrices "
            "that one axis splits."
        )
    return muons[0]


def _check_group(key: str, group: ParamGroupConfig) -> None:
    try:
        re.compile(group.pattern)
    except re.error as error:
        raise ValueError(
            f"{key}.pattern is {group.pattern!r}: expected a regular expression, {error}."
        ) from error
    if group.optimizer_name not in _OPTIMIZERS:
        raise ValueError(
            f"{key}.optimizer_name is {group.optimizer_name!r}; expected one of "
            f"{', '.join(_OPTIMIZERS)}{did_you_mean(group.optimizer_name, _OPTIMIZERS)}"
        )
    known = inspect.signature(_OPTIMIZERS[group.optimizer_name]).parameters
    keys = [*(name for name in known if name not in _NOT_KEYS), *_IMPLEMENTATION]
    for name in group.optimizer_kwargs:
        if name not in keys:
            raise ValueError(
                f"{key}.optimizer_kwargs.{name}: {group.optimizer_name} has no such key; expected "
                f"one of {', '.join(dict.fromkeys(keys))}{did_you_mean(name, keys)}"
            )


def _takes_nothing(index: int, groups: Sequence[ParamGroupConfig], names: list[str]) -> str:
    said = f"optimizer.param_groups.{index}.pattern is {groups[index].pattern!r}, which takes no "
    (alone,) = resolve_groups(names, [groups[index]])
    if not alone:
        words = re.sub(r"\\d[+*]?", "0", groups[index].pattern)
        words = re.sub(r"[\\^$()?*+|\[\]]", "", words)
        hint = get_close_matches(words, names, n=1, cutoff=0.0)[0]
        return f"{said}trainable parameter; names are as in {hint}, without names of wrappers."
    earlier = next(i for i, taken in enumerate(resolve_groups(names, groups)) if alone[0] in taken)
    return (
        f"{said}parameter: groups before it take all that it matches (group {earlier} "
        f"takes {alone[0]}); expected the special patterns first, as the first match wins."
    )
