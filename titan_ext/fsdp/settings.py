# SPDX-License-Identifier: BSD-3-Clause
"""The user's FSDP settings, in one object that checks them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig

from titan_ext.fsdp.copy_out import copies_out_directly
from titan_ext.fsdp.prefetch import (
    AUTO_BACKWARD,
    AUTO_FORWARD,
    PrefetchLimit,
    parse_prefetch_limit,
)
from titan_ext.fsdp.reshard import Reshard, check_reshard
from titan_ext.fsdp.units import Wrap, resolve_wrap

REPLICATE = "parallelism.fsdp_replicate"
QUANTIZE_FROZEN = "parallelism.fsdp_quantize_frozen"
QUANTIZE_FROZEN_MODULES = "parallelism.fsdp_quantize_frozen_modules"
EXPERT_ALL_GATHER = "parallelism.fsdp_expert_all_gather"
EXPERT_REDUCE_SCATTER = "parallelism.fsdp_expert_reduce_scatter"
GATHER_IN_PLACE = "parallelism.fsdp_gather_in_place"


@dataclass(frozen=True, kw_only=True)
class FSDPSettings:
    """How FSDP2 shards a decoder. Each field is the key ``parallelism.fsdp_<field>``, except:

    Attributes:
        param_dtype: The dtype in which parameters are gathered and used; inputs are not cast.
        reduce_dtype: The dtype in which gradients are summed.
        cpu_offload: Whether parameters, gradients and optimizer states stay in host memory.
        symm_mem: Whether collectives use symmetric memory (Titan's option).
        ignored: Patterns for names of parameters, or of modules, that FSDP neither shards nor
            synchronises.
        chosen: What "auto" became, and why (``fsdp.auto``); "" without "auto".

    Raises:
        ValueError: naming the key, for a value that it cannot have.
    """

    wrap: str = "auto"
    reshard_after_forward: Reshard = "default"
    reshard_groups: Mapping[str, Reshard] = field(default_factory=dict)
    prefetch: int | str = "auto"
    prefetch_backward: int | str | None = None
    reduce_scatter_buffers: int | Literal["auto"] = "auto"
    replicate: Sequence[str] = ()
    quantize_frozen: str | None = None
    quantize_frozen_modules: Sequence[str] = ()
    expert_all_gather: str | None = None
    expert_reduce_scatter: str | None = None
    gather_in_place: bool = False
    param_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    cpu_offload: bool = False
    symm_mem: bool = False
    ignored: Sequence[str] = ()
    chosen: str = ""

    @classmethod
    def from_config(
        cls,
        parallelism: ParallelismConfig | None = None,
        training: TrainingConfig | None = None,
        ignored: Sequence[str] = (),
    ) -> "FSDPSettings":
        """The settings in Titan's sections, or ours. Missing keys have their defaults."""
        given: dict[str, Any] = {
            f.name: getattr(parallelism, f"fsdp_{f.name}")
            for f in fields(cls)
            if hasattr(parallelism, f"fsdp_{f.name}")
        }
        if parallelism is not None:
            given["symm_mem"] = parallelism.enable_fsdp_symm_mem
        if training is not None:
            given["param_dtype"] = TORCH_DTYPE_MAP[training.mixed_precision_param]
            given["reduce_dtype"] = TORCH_DTYPE_MAP[training.mixed_precision_reduce]
            given["cpu_offload"] = training.enable_cpu_offload
        return cls(**given, ignored=ignored)

    def __post_init__(self) -> None:
        resolve_wrap(self.wrap, ep_degree=1)
        _ = self.prefetch_limits
        self._check_reduce_scatter_buffers()
        _check_names(REPLICATE, self.replicate)
        _check_names(QUANTIZE_FROZEN_MODULES, self.quantize_frozen_modules)
        for key, value in self.reshard_by_key.items():
            check_reshard(key, value)
        if self.quantize_frozen is not None:
            self._check_quantize_frozen(self.quantize_frozen)
        elif self.quantize_frozen_modules:
            raise ValueError(f'{QUANTIZE_FROZEN_MODULES} needs {QUANTIZE_FROZEN} = "nf4".')
        for key, value, expected in self.expert_collectives:
            if value not in (None, expected):
                raise ValueError(f'{key} is {value!r}; expected "{expected}", or no such key.')
            if value is not None and self.symm_mem:
                raise ValueError(
                    f"{key} needs parallelism.enable_fsdp_symm_mem = false: symmetric memory has "
                    "collectives of its own."
                )
        if self.gather_in_place:
            self._check_gather_in_place()
        dtypes = (self.param_dtype, self.reduce_dtype)
        if self.expert_reduce_scatter and dtypes != (torch.bfloat16, torch.float32):
            raise ValueError(
                f"{EXPERT_REDUCE_SCATTER} sends gradients as they are and sums them in float32; "
                'expected training.mixed_precision_param = "bfloat16" and mixed_precision_reduce = '
                '"float32".'
            )

    def _check_reduce_scatter_buffers(self) -> None:
        buffers = self.reduce_scatter_buffers
        key = "parallelism.fsdp_reduce_scatter_buffers"
        if buffers != "auto" and (not isinstance(buffers, int) or buffers < 1 or buffers is True):
            raise ValueError(f'{key} is {buffers!r}; expected "auto" or a number from 1 on.')
        if self.reduce_scatter_inputs > 1 and self.symm_mem:
            raise ValueError(
                f"{key} needs parallelism.enable_fsdp_symm_mem = false: symmetric memory has one "
                "input buffer."
            )

    def _check_gather_in_place(self) -> None:
        if not copies_out_directly():
            raise ValueError(f"{GATHER_IN_PLACE} needs torch 2.15 or newer.")
        if self.symm_mem or self.quantize_frozen:
            other = QUANTIZE_FROZEN if self.quantize_frozen else "parallelism.enable_fsdp_symm_mem"
            raise ValueError(
                f"{GATHER_IN_PLACE} does not go with {other}, which has gathers of its own."
            )
        for key, value in self.reshard_by_key.items():
            if isinstance(value, int):
                raise ValueError(
                    f"{key} is {value}, a number of ranks, which does not go with {GATHER_IN_PLACE}"
                    ': parameters share one memory. Expected "always" or "never".'
                )

    def _check_quantize_frozen(self, format: str) -> None:
        if format != "nf4":
            raise ValueError(f'{QUANTIZE_FROZEN} is {format!r}; expected "nf4".')
        if self.cpu_offload:
            raise ValueError(
                f"{QUANTIZE_FROZEN} needs training.enable_cpu_offload = false: quantized shards "
                "stay on the device."
            )
        for key, value in self.reshard_by_key.items():
            if isinstance(value, int):
                raise ValueError(
                    f"{key} is {value}, a number of ranks, which torch does not offer for weights "
                    f'in NF4 ({QUANTIZE_FROZEN}); expected "always" or "never".'
                )

    @property
    def expert_collectives(self) -> list[tuple[str, str | None, str]]:
        """Key, value, and expected value of what travels for routed experts."""
        return [
            (EXPERT_ALL_GATHER, self.expert_all_gather, "float8"),
            (EXPERT_REDUCE_SCATTER, self.expert_reduce_scatter, "bfloat16"),
        ]

    @property
    def prefetch_limits(self) -> tuple[PrefetchLimit, PrefetchLimit]:
        """How far ahead to gather in forward, and in backward."""
        key = "parallelism.fsdp_prefetch"
        forward, backward = self.prefetch, self.prefetch_backward
        if backward is None:
            backward = forward
        return (
            AUTO_FORWARD if forward == "auto" else parse_prefetch_limit(key, forward),
            AUTO_BACKWARD
            if backward == "auto"
            else parse_prefetch_limit(f"{key}_backward", backward),
        )

    @property
    def resolved_wrap(self) -> Wrap:
        """``wrap`` once "auto" has been replaced (``fsdp.auto``)."""
        assert self.wrap != "auto"
        return cast(Wrap, self.wrap)

    @property
    def reduce_scatter_inputs(self) -> int:
        """Inputs of reduce-scatters that may live at once; several get a group of their own."""
        buffers = self.reduce_scatter_buffers
        return 1 if buffers == "auto" else buffers

    @property
    def reshard_by_key(self) -> dict[str, Reshard]:
        """The reshard settings by the key that holds each."""
        return {"parallelism.fsdp_reshard_after_forward": self.reshard_after_forward} | {
            f"parallelism.fsdp_reshard_groups.{name}": value
            for name, value in self.reshard_groups.items()
        }

    @property
    def mixed_precision(self) -> MixedPrecisionPolicy:
        """Precision of gathered parameters and of the reduction; inputs are not cast."""
        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype, cast_forward_inputs=False
        )

    def fully_shard_arguments(self, device_type: str) -> dict[str, Any]:
        """Keyword arguments of ``fully_shard`` that are the same for all units of a model.

        Host memory is pinned for copies to an accelerator; on a CPU nothing could pin it.
        """
        arguments: dict[str, Any] = {"mp_policy": self.mixed_precision}
        if self.cpu_offload:
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=device_type != "cpu")
        return arguments


def _check_names(key: str, names: Iterable[object]) -> None:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} is {names!r}; expected a list of names.")
