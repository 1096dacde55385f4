"""Titan's Hugging Face adapters, for weights that HSDP keeps several copies of.

The adapters of TorchTitan 0.3 split stacked experts along the shard axes of their mesh and fail on
an axis that replicates ("'Replicate' object has no attribute 'dim'"): after the last step, where
the export is made. An adapter made here hands them each weight without its replicating axes, and
gives what comes back the layout that the model has.
"""

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

__all__ = ["for_replicated_weights"]


@functools.cache
def for_replicated_weights(adapter: type[BaseStateDictAdapter]) -> type[BaseStateDictAdapter]:
    """A subclass of ``adapter`` that converts weights in which some mesh axes replicate."""
    if issubclass(adapter, _WithoutCopies):
        return adapter
    return type(adapter.__name__, (_WithoutCopies, adapter), {"__module__": __name__})


class _WithoutCopies:
    """Before an adapter in the order of bases."""

    _whole: dict[str, DTensor]

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._whole = {
            name: tensor
            for name, tensor in state_dict.items()
            if isinstance(tensor, DTensor) and any(p.is_replicate() for p in tensor.placements)
        }
        sharded = {name: _without_copies(tensor) for name, tensor in self._whole.items()}
        return super().to_hf({**state_dict, **sharded})  # type: ignore[misc]

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dict = super().from_hf(hf_state_dict)  # type: ignore[misc]
        layouts = getattr(self, "_whole", {})
        return {
            name: _as(layouts[name], tensor) if name in layouts else tensor
            for name, tensor in state_dict.items()
        }


def _without_copies(tensor: DTensor) -> torch.Tensor:
    """The same local part on the shard axes of its mesh only; plain where there are none."""
    axes = [axis for axis, p in enumerate(tensor.placements) if not p.is_replicate()]
    if not axes:
        return tensor.to_local()
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None
    return DTensor.from_local(
        tensor.to_local(),
        tensor.device_mesh[tuple(names[axis] for axis in axes)],
        [tensor.placements[axis] for axis in axes],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _as(layout: DTensor, tensor: torch.Tensor) -> DTensor:
    """``tensor``, whose local part is that of ``layout``, as a tensor of its layout."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return DTensor.from_local(
        local,
        layout.device_mesh,
        layout.placements,
        run_check=False,
        shape=layout.shape,
        stride=layout.stride(),
    )
