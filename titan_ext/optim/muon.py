"""How Titan's DistMuon computes parameters that FSDP has sharded, where a config does not say.

Muon orthogonalises whole matrices, and a rank holds a part of each. DistMuon has to be told, by
parameter, where the whole is computed, on mesh axes by name; those differ between SPMD backends and
for experts. Titan writes that out for Kimi. For other models it follows from how a parameter is
sharded: a matrix goes to one owner, and of experts, a stack of matrices, each rank keeps its own.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.distributed.flex_shard import BucketConfig, ComputeLayout, Owned

__all__ = ["muon_arguments"]

_LAYER = re.compile(r"^.*?layers\.\d+\.")


def muon_arguments(parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """The arguments of ``build_dist_muon`` beside the parameters, for matrices and experts.

    Args:
        parameters: What DistMuon is to take, of every model part of this rank, by canonical name:
            DTensors ``[rows, columns]`` or ``[experts, rows, columns]``.

    Returns:
        ``compute_sharding_by_fqn`` and ``bucket_configs``: one bucket a layer for its matrices, and
        one for its experts, which have other ranks to talk to.
    """
    buckets = defaultdict(list)
    for name, param in parameters.items():
        layer = _LAYER.match(name)
        kind = "matrices" if param.ndim == 2 else "experts"
        buckets[f"{layer[0] if layer else ''}{kind}"].append(name)
    return {
        "compute_sharding_by_fqn": {n: _layout(n, param) for n, param in parameters.items()},
        "bucket_configs": tuple(
            BucketConfig(name=name, patterns=tuple(names)) for name, names in buckets.items()
        ),
    }


def _layout(name: str, param: nn.Parameter) -> ComputeLayout:
    if not isinstance(param, DTensor):
        raise ValueError(f"DistMuon takes parameters that FSDP has sharded, and {name} is not.")
    axes = param.device_mesh.mesh_dim_names or ()
    compute = Owned() if param.ndim == 2 else Shard(0)
    return ComputeLayout(
        shardings_by_mesh_axis={
            axis: compute
            for axis, placement in zip(axes, param.placements, strict=True)
            if not isinstance(placement, Replicate)
        }
    )
