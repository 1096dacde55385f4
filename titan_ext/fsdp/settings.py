# SPDX-License-Identifier: BSD-3-Clause
"""The user's FSDP settings, in one object that checks them; when a unit's parameters are freed.

FSDP may free a unit's parameters after its forward, to gather them again for its backward.
Parameters that stay gathered save an all-gather and cost their bytes from forward to backward. An
int is in between: after forward FSDP shards the parameters over a smaller world of that many
neighbouring ranks. Each rank then holds a larger shard, and backward gathers within that world (on
one machine, say). It does not limit the number of concurrent all-gathers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig
from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy

from titan_ext.base.messages import did_you_mean
from titan_ext.fsdp.plan import UnitPlan
from titan_ext.fsdp.prefetch import AUTO_BACKWARD, AUTO_FORWARD, PrefetchLimit, parse_prefetch_limit
from titan_ext.fsdp.units import REPLICATE, Unit, UnitKind, Wrap, resolve_wrap, with_norm_apart

Reshard = Literal["default", "always", "never"] | int

QUANTIZE_FROZEN = "parallelism.fsdp_quantize_frozen"
QUANTIZE_FROZEN_MODULES = "parallelism.fsdp_quantize_frozen_modules"
ALL_GATHER = "parallelism.fsdp_all_gather"
EXPERT_ALL_GATHER = "parallelism.fsdp_expert_all_gather"
EXPERT_REDUCE_SCATTER = "parallelism.fsdp_expert_reduce_scatter"
_RESHARD = "parallelism.fsdp_reshard_after_forward"
_RESHARD_GROUPS = "parallelism.fsdp_reshard_groups"
_RESHARD_NAMES = ("default", "always", "never")


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
    all_gather: str | None = None
    expert_all_gather: str | None = None
    expert_reduce_scatter: str | None = None
    param_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    cpu_offload: bool = False
    symm_mem: bool = False
    ignored: Sequence[str] = ()
    chosen: str = ""

    @classmethod
    def from_config(
        cls, parallelism: ParallelismConfig | None = None, training: TrainingConfig | None = None
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
        return cls(**given)

    def __post_init__(self) -> None:
        resolve_wrap(self.wrap, ep_degree=1)
        _ = self.prefetch_limits
        self._check_reduce_scatter_buffers()
        _check_names(REPLICATE, self.replicate)
        _check_names(QUANTIZE_FROZEN_MODULES, self.quantize_frozen_modules)
        for key, value in self.reshard_by_key.items():
            _check_reshard(key, value)
        if self.quantize_frozen is not None:
            self._check_quantize_frozen(self.quantize_frozen)
        elif self.quantize_frozen_modules:
            raise ValueError(f'{QUANTIZE_FROZEN_MODULES} needs {QUANTIZE_FROZEN} = "nf4".')
        for key, value, expected in self.collectives:
            if value not in (None, expected):
                raise ValueError(f'{key} is {value!r}; expected "{expected}", or no such key.')
            if value is not None and self.symm_mem:
                raise ValueError(
                    f"{key} needs parallelism.enable_fsdp_symm_mem = false: symmetric memory has "
                    "collectives of its own."
                )
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

    def _check_quantize_frozen(self, format: str) -> None:
        if format != "nf4":
            raise ValueError(f'{QUANTIZE_FROZEN} is {format!r}; expected "nf4".')
        if self.all_gather:
            raise ValueError(f"{QUANTIZE_FROZEN} sends weights in NF4; expected no {ALL_GATHER}.")
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
    def collectives(self) -> list[tuple[str, str | None, str]]:
        """Key, value, and expected value of what travels, of routed experts or of all blocks."""
        return [
            (ALL_GATHER, self.all_gather, "float8"),
            (EXPERT_ALL_GATHER, self.expert_all_gather, "float8"),
            (EXPERT_REDUCE_SCATTER, self.expert_reduce_scatter, "bfloat16"),
        ]

    @property
    def prefetch_limits(self) -> tuple[PrefetchLimit, PrefetchLimit]:
        """How far ahead to gather in forward, and in backward."""
        key = "parallelism.fsdp_prefetch"
        backward = self.prefetch if self.prefetch_backward is None else self.prefetch_backward
        return (
            parse_prefetch_limit(key, self.prefetch, AUTO_FORWARD),
            parse_prefetch_limit(f"{key}_backward", backward, AUTO_BACKWARD),
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
        return {_RESHARD: self.reshard_after_forward} | {
            f"{_RESHARD_GROUPS}.{name}": value for name, value in self.reshard_groups.items()
        }

    def check_reshard_groups(self, units: Sequence[Unit]) -> None:
        """Raise ValueError for a name in ``reshard_groups`` that matches none of ``units``.

        The last norm may become a unit of its own later; its name is right, too.
        """
        units = list(dict.fromkeys([*units, *with_norm_apart(units)]))
        for name in self.reshard_groups:
            if not any(_matches(unit, name) for unit in units):
                kinds = list(dict.fromkeys(_kind_name(unit) for unit in units))
                known = [*kinds, *(unit.name for unit in units)]
                raise ValueError(
                    f"{_RESHARD_GROUPS}: no unit of this model is called {name!r}; expected a kind "
                    f"of unit ({', '.join(kinds)}) or a pattern for names such as "
                    f"{units[len(units) // 2].name}{did_you_mean(name, known)}"
                )

    def reshard_of(
        self, unit: UnitPlan, *, is_chunk: bool, is_rounding_error: bool, has_dtensors: bool
    ) -> bool | int:
        """FSDP2's ``reshard_after_forward`` for one unit.

        Of several patterns for its name the last counts, then its kind, then the setting for all.
        "default" frees a unit after forward, except in a pipeline, which would gather it again for
        every microbatch, and except small units outside the blocks. The head runs first in
        backward, so of the settings for all units only "always" frees it. An int frees the
        embedding: no backward would gather its larger shard, and FSDP2 would hold that until the
        next forward.

        Args:
            is_rounding_error: Whether its bytes are negligible beside the largest unit's.
            has_dtensors: Whether another kind of parallelism has split its parameters already:
                torch cannot reshard those to a smaller world.

        Raises:
            ValueError: for an int that does not fit.
        """
        kind = _kind_name(unit)
        names = [name for name in self.reshard_groups if name != kind and _matches(unit, name)]
        names = [kind] * (kind in self.reshard_groups) + names
        key, value = _RESHARD, self.reshard_after_forward
        if names:
            key, value = f"{_RESHARD_GROUPS}.{names[-1]}", self.reshard_groups[names[-1]]
        is_head = kind == UnitKind.HEAD
        if is_head and not names:
            return value == "always"
        if isinstance(value, int):
            if has_dtensors:
                raise ValueError(
                    f"{key} is {value}, a number of ranks. FSDP2 reshards only plain tensors to a "
                    "smaller world, but tensor or expert parallelism has split the parameters of "
                    f'{unit.name}. Give it "always" or "never" in {_RESHARD_GROUPS}.'
                )
            for group in unit.groups:
                check_divides(key, value, group.shard_world, f"{unit.name} is")
                if any(param.shard_dim for param in group.params):
                    raise ValueError(
                        f"{key} is {value}, a number of ranks. FSDP2 reshards only dim 0 to a "
                        f"smaller world, but more ranks share the routed experts of {unit.name} "
                        "than there are experts, so FSDP shards their dim 1. "
                        f'Give it "always" or "never" in {_RESHARD_GROUPS}.'
                    )
            return value if unit.gathers_in_backward else True
        is_outside_blocks = "." not in unit.name
        if value == "default" and (is_head or (is_rounding_error and is_outside_blocks)):
            return False
        return get_fsdp_reshard_after_forward_policy(value, is_chunk)

    def fully_shard_arguments(self, device_type: str) -> dict[str, Any]:
        """Keyword arguments of ``fully_shard`` that are the same for all units of a model.

        Host memory is pinned for copies to an accelerator; on a CPU nothing could pin it.
        """
        precision = MixedPrecisionPolicy(
            param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype, cast_forward_inputs=False
        )
        arguments: dict[str, Any] = {"mp_policy": precision}
        if self.cpu_offload:
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=device_type != "cpu")
        return arguments


def copies_out_directly() -> bool:
    """Whether this torch (2.15) lets a parameter group bring its own copy-out."""
    return hasattr(_fsdp_collectives, "_default_all_gather_output_fn")


def read_reshard(word: str) -> str | int:
    """Parse a reshard setting of the command line: a number of ranks, or a name."""
    return int(word) if word.isdecimal() else word


def check_divides(key: str, ranks: int, world: int, what_is: str) -> None:
    """Raise ValueError, naming ``key``, unless ``ranks`` divides ``world``."""
    if world % ranks:
        fitting = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise ValueError(
            f"{key} is {ranks}, the number of ranks over which to reshard, but {what_is} sharded "
            f"over {world}; expected one of {fitting}."
        )


def _check_reshard(key: str, value: object) -> None:
    if value in _RESHARD_NAMES and isinstance(value, str):
        return
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return
    raise ValueError(
        f"{key} is {value!r}; expected one of {', '.join(_RESHARD_NAMES)}, or the number of ranks "
        f"(at least 1) over which to reshard{did_you_mean(value, _RESHARD_NAMES)}"
    )


def _matches(unit: Unit, name: str) -> bool:
    return name == _kind_name(unit) or fnmatchcase(unit.name, name)


def _kind_name(unit: Unit) -> str:
    # Tied weights are the head's: they are needed first in backward.
    return (UnitKind.HEAD if unit.kind is UnitKind.TIED else unit.kind).value


def _check_names(key: str, names: Iterable[object]) -> None:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} is {names!r}; expected a list of names.")
