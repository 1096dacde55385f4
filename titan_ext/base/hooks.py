# SPDX-License-Identifier: BSD-3-Clause
"""Forward hooks of the user's, which may read or change what titan_ext would otherwise move."""

import functools
from typing import Any

import torch.nn as nn
from torch.nn.modules import module as nn_module

# Hooks defined in these packages do nothing that the proof of a discard does not see.
_KNOWN = ("spmd_types", "titan_ext", "torch", "torchao", "torchtitan")


def is_known(of: Any) -> bool:
    """True if a function, or the class of an instance, is not the user's."""
    package = getattr(of, "__module__", None) or type(of).__module__ or ""
    return package.split(".")[0] in _KNOWN


def user_hook(module: nn.Module, *, before: bool = True) -> str:
    """A forward hook of the user's on ``module``, or on every module, in words; "" without one.

    ``before`` says whether those that run before the forward count.
    """
    every = [module._forward_hooks, nn_module._global_forward_hooks]
    if before:
        every += [module._forward_pre_hooks, nn_module._global_forward_pre_hooks]
    for hooks in every:
        for hook in hooks.values():
            function: Any = hook
            while isinstance(function, functools.partial):
                function = function.func
            if not is_known(function):
                name = getattr(function, "__qualname__", type(function).__qualname__)
                return f"the forward hook {name} on a {type(module).__name__}"
    return ""
