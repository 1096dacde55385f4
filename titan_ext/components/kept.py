# SPDX-License-Identifier: BSD-3-Clause
"""Attributes that modules set while a block runs, in halves of a batch that take turns.

A router that keeps its last logits for a loss runs once for each half. A half that goes on finds
again what it has set itself. What the block leaves behind is of both, in the order of the batch, or
refused by name: never of half a batch.

A half sees what the other one has set, as a second microbatch sees the first one's: what a module
makes once it makes once. What is appended to a list is there twice, first A's.
"""

from operator import is_
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_flatten, tree_unflatten

_OF_TORCH = frozenset(nn.Module().__dict__)
_NONE = object()
_PLAIN = (int, float, str, torch.dtype, torch.device, type(None))


class Kept:
    """The attributes of the modules of one block, also those in dictionaries, and buffers.

    ``name`` is the block's, and ``key`` what messages name.
    """

    def __init__(self, name: str, block: nn.Module, key: str) -> None:
        self._key = key
        self._places: list[tuple[str, dict[str, Any]]] = []
        for path, module in block.named_modules():
            own, owner = module.__dict__, f"{name}.{path}".rstrip(".")
            inside = {k: v for k, v in own.items() if type(v) is dict and k not in _OF_TORCH}
            self._places += [(owner, own), *((f"{owner}.{k}", v) for k, v in inside.items())]
            if module._buffers:
                self._places.append((owner, module._buffers))

    def begin(self) -> None:
        self._first = self._before = self._copies()
        self._of: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}

    def _copies(self) -> list[dict[str, Any]]:
        return [values.copy() for _, values in self._places]

    def give(self, half: int) -> None:
        for (place, name), value in self._of[half].items():
            self._places[place][1][name] = value
        self._before = self._copies()

    def take(self, half: int) -> None:
        for place, ((_, now), before) in enumerate(zip(self._places, self._before, strict=True)):
            if len(now) == len(before) and all(map(is_, now.values(), before.values())):
                continue
            changed = [name for name in now if now[name] is not before.get(name, _NONE)]
            self._of[half].update({(place, name): now[name] for name in changed})

    def put_together(self, rows: list[int], length: int) -> None:
        """Leave behind what both halves have set; ``rows`` are theirs, of ``length`` tokens."""
        of_a, of_b = self._of
        for (place, name), of_first in of_a.items():
            if (place, name) not in of_b and type(of_first) is not int:
                continue  # an integer that B has set may be the same object
            owner, values = self._places[place]
            parts = of_first, of_b.get((place, name), of_first)
            (a, tree), (b, tree_of_b) = map(tree_flatten, parts)
            first = self._first[place].get(name)
            whole = [_together(x, y, first, rows, length) for x, y in zip(a, b, strict=False)]
            if tree != tree_of_b or any(value is _NONE for value in whole):
                raise ValueError(
                    f"{self._key}: {owner} keeps {name!r} of its call, and what the two halves of "
                    "a batch keep there is no tensor of sequences or tokens, so that nobody can "
                    "put it together. Expected a tensor with the batch as its first dimension, a "
                    'list to which each call appends, or "none".'
                )
            values[name] = tree_unflatten(whole, tree)

    def end(self) -> None:
        self._first = self._before = []
        self._of = {}, {}


def _together(a: Any, b: Any, first: Any, rows: list[int], length: int) -> Any:
    """The values that A and B have kept, as one; ``_NONE`` if there is no such thing.

    Of numbers, what B has counted on as A did from ``first``, and what is the same in both and does
    not count a half's tokens.
    """
    tokens = [n * length for n in rows]
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        counted = type(a) is type(b) is int and isinstance(first, int | None)
        if counted and b - a == a - (first or 0):
            return b
        same = a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and a == b)
        return b if same and not (type(a) is int and a in tokens) else _NONE
    if a.dim() and b.dim() and a.shape[1:] == b.shape[1:] and [len(a), len(b)] in (rows, tokens):
        return torch.cat((a, b))
    same = a.shape == b.shape and not (a.requires_grad or b.requires_grad)
    return b if same and torch.equal(a, b) else _NONE
