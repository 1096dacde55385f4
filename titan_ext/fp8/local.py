"""The bytes behind a tensor: this rank's shard, arrived, and whose storage they lie in.

Three things stand between a saved tensor and its bytes: a DTensor is a description around a local
tensor; an AsyncCollectiveTensor is a promise; and even a plain tensor may be the output of a
collective that is still running, which nothing in its type says.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

__all__ = ["Layout", "local_tensor", "plain_tensors", "wait"]


@dataclass(frozen=True)
class Layout:
    """How a DTensor is distributed: all of it but the values.

    Attributes:
        mesh, placements: Where its shards are.
        shape: Of the whole tensor. Not to be had from the local shard, which may be uneven.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

    @classmethod
    def of(cls, x: DTensor) -> "Layout":
        return cls(x.device_mesh, tuple(x.placements), x.shape)

    def wrap(self, local: torch.Tensor) -> DTensor:
        """A DTensor of this layout around the contiguous ``local``; nothing is sent or checked."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=stride,
        )


def local_tensor(x: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, arrived; any other tensor as it is, arrived if async."""
    if isinstance(x, DTensor):
        x = x._local_tensor
    if isinstance(x, AsyncCollectiveTensor):
        x = x.trigger_wait()
    return x


def wait(x: torch.Tensor) -> None:
    """Wait for a collective that is still writing to the plain tensor ``x``, if there is one.

    On an accelerator the stream waits, not the host. The program's own wait is then a no-op.
    """
    torch.ops._c10d_functional.wait_tensor(x)


def plain_tensors(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that ``x`` consists of: itself, or the parts of a tensor subclass."""
    if not hasattr(x, "__tensor_flatten__"):
        yield x
        return
    names, _ = x.__tensor_flatten__()
    for name in names:
        # A DTensor names its mesh, too.
        if isinstance(part := getattr(x, name), torch.Tensor):
            yield from plain_tensors(part)
