# SPDX-License-Identifier: BSD-3-Clause
"""Float8 and pinned host memory as a storage backend of TorchTitan's next activation storage.

Main of October 2026 gives every tensor that a region saves to a ``StorageBackend`` with three
methods, ``put``, ``get`` and ``free`` (its distributed/activation_storage.py, read at commit
0b434485). Its own backend copies to the host and compresses nothing. ``TreatedStorage`` is one more
value for the ``backends`` of ``ActivationStorage``; "in float8, on the device" is then an answer
beside "saved" and "on the host"::

    backends = {
        "float8": TreatedStorage(Codec()),
        "float8 on the host": TreatedStorage(Codec(), on_host=True, limit=64 * 2**30),
    }

**Streams.** The caller's stream waits for the computation before each call, and the caller makes
the computation wait for that stream before it uses a result. The encoder runs where the computation
does. Copies to and from the host run on the stream, in order, so a freed region may be used again.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch

from titan_ext.fp8.codec import SUPPORTED_DTYPES, Codec, codec_name
from titan_ext.fp8.offload import host_memory
from titan_ext.fp8.saved_tensors import compiles_for


@dataclass(eq=False)
class _Payload:
    """Parts of one tensor: its values, and their scales if there are any."""

    parts: tuple[torch.Tensor, ...]
    original_nbytes: int
    regions: list[Any] = field(default_factory=list)
    """Regions of host memory, one for each part; none on the device."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class TreatedStorage:
    """Keeps tensors in float8, on the host, or both, until backward.

    Args:
        codec: How values become float8; None keeps them exactly.
        on_host: Whether they wait in pinned host memory.
        limit: Bytes of host memory for this device; a tensor that finds no room is not taken.

    Attributes:
        held: Bytes that wait now, on the device or on the host.
        original: Bytes of the tensors that they stand for.
    """

    def __init__(
        self, codec: Codec | None = None, *, on_host: bool = False, limit: int | None = None
    ) -> None:
        if codec is None and not on_host:
            raise ValueError("TreatedStorage needs a codec, on_host, or both: it would do nothing.")
        self._codec, self._on_host, self._limit = codec, on_host, limit
        self.held = self.original = 0

    @torch.no_grad()
    def put(self, tensor: torch.Tensor, stream: Any) -> _Payload | None:
        """Start to take ``tensor`` away; None if it must stay as it is.

        It stays if float8 cannot hold its dtype, if that would take as many bytes, or if there is
        no room on the host.
        """
        parts = (tensor,) if self._codec is None else self._in_float8(tensor, self._codec)
        if parts is None:
            return None
        payload = _Payload(parts, tensor.nbytes)
        if self._on_host and not self._move(payload, stream):
            return None
        self.held += payload.nbytes
        self.original += payload.original_nbytes
        return payload

    @torch.no_grad()
    def get(self, payload: _Payload, out: torch.Tensor, stream: Any) -> None:
        """Write the values of ``payload`` to ``out``, of the shape and dtype that were put."""
        parts = payload.parts
        # Of what is on the host the decoder runs on the stream, behind the copies.
        with stream if stream is not None and payload.regions else contextlib.nullcontext():
            if payload.regions:
                parts = tuple(part.to(out.device, non_blocking=True) for part in parts)
            if self._codec is None:
                out.copy_(parts[0])
            else:
                name, one_kernel = codec_name(self._codec), compiles_for(out.device)
                decode = torch.ops.titan_ext.float8_dequantize
                out.copy_(decode(*parts, name, out.dtype, one_kernel).view(out.shape))

    def free(self, payload: _Payload) -> None:
        """Give back what ``payload`` holds; it is not used again."""
        self.held -= payload.nbytes
        self.original -= payload.original_nbytes
        for region in payload.regions:
            region.free()

    @staticmethod
    def _in_float8(tensor: torch.Tensor, codec: Codec) -> tuple[torch.Tensor, ...] | None:
        if tensor.dtype not in SUPPORTED_DTYPES or codec.nbytes(tensor.shape) >= tensor.nbytes:
            return None
        # Two dimensions, so that the kernel does not depend on their number.
        matrix = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)
        encode = torch.ops.titan_ext.float8_quantize
        return encode(matrix, codec_name(codec), compiles_for(tensor.device))

    def _move(self, payload: _Payload, stream: Any) -> bool:
        """Copy the parts to the host; whether there was room for all."""
        memory, moved = host_memory(payload.parts[0].device), []
        for part in payload.parts:
            region = memory.take(part.nbytes, self._limit)
            if region is None:
                for taken in payload.regions:
                    taken.free()
                payload.regions = []
                return False
            payload.regions.append(region)
            moved.append(region.memory.view(part.dtype).view(part.shape))
        if stream is not None:
            # What the codec has just made comes after the caller's own wait.
            stream.wait_stream(torch.accelerator.current_stream(payload.parts[0].device))
        with stream if stream is not None else contextlib.nullcontext():
            for target, part in zip(moved, payload.parts, strict=True):
                target.copy_(part, non_blocking=True)
                if stream is not None:
                    part.record_stream(stream)  # else its memory is used again before the copy ends
        payload.parts = tuple(moved)
        return True
