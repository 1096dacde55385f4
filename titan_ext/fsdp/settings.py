# SPDX-License-Identifier: BSD-3-Clause
"""The user's FSDP settings, in one object that checks each of them.

``fsdp.resolve`` decides with them what FSDP does with each unit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig

from titan_ext.base.messages import check_choice, did_you_mean
from titan_ext.fsdp.prefetch import PrefetchLimit, parse_prefetch_limit
from titan_ext.fsdp.units import REPLICATE, FSDPWrap

Reshard = Literal["default", "always", "never"] | int
Float8AllGather = Literal["none", "experts", "blocks"]

PREFETCH = "parallelism.fsdp_prefetch"
QUANTIZE_FROZEN = "parallelism.fsdp_quantize_frozen"
ALL_GATHER = "parallelism.fsdp_float8_all_gather"
EXPERT_REDUCE_SCATTER = "parallelism.fsdp_expert_reduce_scatter"
RESHARD = "parallelism.fsdp_reshard_after_forward"
RESHARD_GROUPS = "parallelism.fsdp_reshard_groups"
_RESHARD_NAMES = ("default", "always", "never")


@dataclass(frozen=True, kw_only=True)
class FSDPSettings:
    """Settings of FSDP2 for a decoder: the keys ``parallelism.fsdp_*``, down to ``param_dtype``.

    Raises ValueError, naming the key, for a value that it cannot have.
    """

    wrap: FSDPWrap = "auto"
    reshard_after_forward: Reshard = "default"
    reshard_groups: Mapping[str, Reshard] = field(default_factory=dict)
    prefetch: int | str = "auto"
    replicate: Sequence[str] = ()
    quantize_frozen: Sequence[str] = ()
    float8_all_gather: Float8AllGather = "none"
    expert_reduce_scatter: Literal["bfloat16"] | None = None
    param_dtype: torch.dtype = torch.bfloat16
    """The dtype in which parameters are gathered and used; inputs are not cast."""
    reduce_dtype: torch.dtype = torch.float32
    """The dtype in which gradients are summed."""
    cpu_offload: bool = False
    """Whether parameters, gradients and optimizer states stay in host memory."""
    symm_mem: bool = False
    """Whether collectives use symmetric memory (Titan's option)."""
    ignored: Sequence[str] = ()
    """Patterns for names of parameters or modules that FSDP neither shards nor synchronises."""

    @classmethod
    def from_config(
        cls, parallelism: ParallelismConfig, training: TrainingConfig, ignored: Sequence[str] = ()
    ) -> "FSDPSettings":
        """The settings in Titan's sections, or ours. Missing keys have their defaults."""
        given: dict[str, Any] = {
            f.name: getattr(parallelism, f"fsdp_{f.name}")
            for f in fields(cls)
            if hasattr(parallelism, f"fsdp_{f.name}")
        }
        return cls(
            **given,
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cpu_offload=training.enable_cpu_offload,
            symm_mem=parallelism.enable_fsdp_symm_mem,
            ignored=ignored,
        )

    def __post_init__(self) -> None:
        check_choice("parallelism.fsdp_wrap", self.wrap, get_args(FSDPWrap))
        check_choice(ALL_GATHER, self.float8_all_gather, get_args(Float8AllGather))
        _ = self.prefetch_limit
        _check_names(REPLICATE, self.replicate)
        _check_names(QUANTIZE_FROZEN, self.quantize_frozen)
        for key, value in self.reshard_by_key.items():
            is_name = isinstance(value, str) and value in _RESHARD_NAMES
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not (is_name or is_number):
                raise ValueError(
                    f"{key} is {value!r}; expected one of {', '.join(_RESHARD_NAMES)}, or the "
                    "number of ranks (at least 1) over which to reshard"
                    f"{did_you_mean(value, _RESHARD_NAMES)}"
                )
        if self.quantize_frozen:
            self._check_quantize_frozen()
        if self.expert_reduce_scatter not in (None, "bfloat16"):
            raise ValueError(
                f"{EXPERT_REDUCE_SCATTER} is {self.expert_reduce_scatter!r}; expected "
                '"bfloat16", or a config without this key.'
            )
        for key, value in self.collectives.items():
            if self.symm_mem:
                raise ValueError(
                    f'{key} = "{value}" needs parallelism.enable_fsdp_symm_mem = false: symmetric '
                    "memory has collectives of its own."
                )
        dtypes = (self.param_dtype, self.reduce_dtype)
        if self.expert_reduce_scatter and dtypes != (torch.bfloat16, torch.float32):
            raise ValueError(
                f"{EXPERT_REDUCE_SCATTER} sends gradients as they are and sums them in float32; "
                'expected training.mixed_precision_param = "bfloat16" and mixed_precision_reduce = '
                '"float32".'
            )

    def _check_quantize_frozen(self) -> None:
        if self.float8_all_gather == "blocks":
            raise ValueError(
                f'{QUANTIZE_FROZEN} sends weights in NF4; expected {ALL_GATHER} = "none".'
            )
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
    def collectives(self) -> dict[str, str]:
        """The collectives that send other bytes than in stock, by key."""
        sent = {
            ALL_GATHER: self.float8_all_gather,
            EXPERT_REDUCE_SCATTER: self.expert_reduce_scatter,
        }
        return {key: value for key, value in sent.items() if value not in (None, "none")}

    @property
    def prefetch_limit(self) -> PrefetchLimit | None:
        """The distance of prefetch, in forward and in backward; None for "auto"."""
        return parse_prefetch_limit(PREFETCH, self.prefetch)

    @property
    def reshard_by_key(self) -> dict[str, Reshard]:
        """The reshard settings by the key that holds each."""
        return {RESHARD: self.reshard_after_forward} | {
            f"{RESHARD_GROUPS}.{name}": value for name, value in self.reshard_groups.items()
        }


def read_reshard(text: str) -> str | int:
    """Parse a reshard setting of the command line: a number of ranks, or a name."""
    return int(text) if text.isdecimal() else text


def _check_names(key: str, names: Iterable[object]) -> None:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} is {names!r}; expected a list of names.")
