"""Names that a user gives for modules and parameters, and what answers to them.

A name is a pattern ("layers.*.attention"), for a parameter or for a module around it. Names are
those of the model, without the prefixes of what wraps its blocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeVar

import torch.nn as nn
from torchtitan.components.checkpointer.utils import canonical_fqn

from titan_ext.fsdp.units import vision_modules

__all__ = [
    "join",
    "matches",
    "matching_modules",
    "matching_parameters",
    "modules_with_parameters",
]

M = TypeVar("M", bound=nn.Module)


def modules_with_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Modules of a decoder that have parameters themselves: name, module, names of those.

    Vision towers are left out: Titan shards each as one unit.
    """
    towers = tuple(f"{name}." for name in vision_modules(model))
    for raw_path, module in model.named_modules():
        path = canonical_fqn(raw_path)
        params = [name for name, _ in module.named_parameters(recurse=False)]
        if params and not f"{path}.".startswith(towers or ("\0",)):
            yield path, module, params


def matching_parameters(
    model: nn.Module, names: Sequence[str], *, is_chunk: bool
) -> dict[str, nn.Parameter]:
    """The parameters whose name, or that of a module around them, matches one of ``names``.

    Raises:
        ValueError: for a pattern that matches nothing, unless the model is a chunk of one.
    """
    found = {
        full_name: module.get_parameter(param)
        for path, module, params in modules_with_parameters(model)
        for param, full_name in ((param, join(path, param)) for param in params)
        if any(matches(full_name, name) for name in names)
    }
    for name in () if is_chunk else names:
        if not any(matches(param, name) for param in found):
            raise ValueError(f"ignored: no parameter of this model answers to {name!r}.")
    return found


def matching_modules(
    key: str, modules: Mapping[str, M], names: Sequence[str], *, kind: str, is_chunk: bool
) -> dict[str, M]:
    """Those of ``modules`` whose name, or that of a module around them, matches one of ``names``.

    Raises:
        ValueError: for a pattern that matches nothing, unless they are those of a chunk only.
    """
    paths = {canonical_fqn(path): module for path, module in modules.items()}
    for name in () if is_chunk else names:
        if not any(matches(path, name) for path in paths):
            close = get_close_matches(name, list(paths), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ValueError(f"{key}: no {kind} answers to {name!r}{hint}")
    return {
        path: module for path, module in paths.items() if any(matches(path, name) for name in names)
    }


def matches(param: str, pattern: str) -> bool:
    """Whether ``pattern`` is for the parameter or for a module that it is in."""
    parts = param.split(".")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


def join(path: str, name: str) -> str:
    """The name of what is called ``name`` in the module at ``path``, "" for the model."""
    return f"{path}.{name}" if path else name
