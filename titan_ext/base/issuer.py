# SPDX-License-Identifier: BSD-3-Clause
"""Who issues an operation, from the Python stack, so that neither torch nor Titan is patched; and
what kind of collective it is."""

import inspect
import os
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torchtitan.components.checkpointer.utils import canonical_fqn

_TORCH = os.path.dirname(torch.__file__) + os.sep


def issuer(
    frame: FrameType | None, names: Mapping[nn.Module, str], besides: str = ""
) -> tuple[str, FrameType | None]:
    """The FSDP unit or innermost of the modules ``names`` that ``frame`` is called from, and the
    innermost frame that is not of torch, nor of the file ``besides``."""
    site = None
    while frame is not None:
        code = frame.f_code
        if code in _UNIT_METHODS:
            return canonical_fqn(frame.f_locals["self"]._module_fqn or "root"), site
        if code is _MODULE_CALL and (name := names.get(frame.f_locals["self"])) is not None:
            return name, site
        path = code.co_filename
        if site is None and path != besides and not path.startswith(_TORCH):
            site = frame
        frame = frame.f_back
    return "", site


def _code_of(function: Any) -> CodeType:
    return inspect.unwrap(function).__code__


# FSDP2 decorates its methods (_fsdp_common.py); the frame that runs is of what is inside.
_UNIT_METHODS = (_code_of(FSDPParamGroup.unshard), _code_of(FSDPParamGroup.post_backward))
_MODULE_CALL = _code_of(nn.Module._call_impl)

COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")


def collective_kind(name: str) -> str:
    """One of ``COLLECTIVES``, by any name that torch has for it; others by their own."""
    words = name.lower().replace("_", "")
    return next((kind for kind in COLLECTIVES if kind.replace("_", "") in words), name.lower())
