"""Titan's Muon and AdamW hybrid, for runs that are compared."""

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.distributed.flex_shard import BucketConfig, ComputeLayout, Owned, dist_muon
from torchtitan.distributed.flex_shard import _optimizer_reshard_runtime as runtime
from torchtitan.models.kimi_k2_7 import config_registry as kimi

PATTERN = r"(attention\.w\w+|w[123]|router\.gate)\.weight$|inner_experts\.w[123]"
"""As in docs/lora.md: matrices of blocks, and the experts' stacks of them."""
MUON = {"lr": 8e-4, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
ADAMW = {"lr": 8e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def config(model: str, *, spelt_out: bool) -> OptimizersContainer.Config:
    """The hybrid.

    Args:
        model: Kimi's has Titan's own config for it, which orthogonalises attention by head. Others
            have whole matrices.
        spelt_out: With the compute layouts that stock TorchTitan needs; ours finds them.
    """
    if model == "kimi_text":
        return kimi.kimi_k2_5_debugmodel().optimizer
    muon = {**MUON, "fused": False} if spelt_out else dict(MUON)
    return OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern=PATTERN, optimizer_name="DistMuon", optimizer_kwargs=muon),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=dict(ADAMW)),
        ],
        optimizer_factory_kwargs_by_name={"DistMuon": _layouts()} if spelt_out else {},
    )


def _layouts() -> dict[str, Any]:
    """By hand, for the debug model of DeepSeek-V3 and either SPMD backend."""
    whole = ComputeLayout(shardings_by_mesh_axis={"dp_shard": Owned(), "fsdp": Owned()})
    stacks = ComputeLayout(
        shardings_by_mesh_axis={
            axis: Shard(0) for axis in ("dp_shard", "fsdp", "efsdp", "ep", "dp_shard_in_ep")
        }
    )
    layouts = {}
    for layer in (f"layers.{index}" for index in range(6)):
        names = [f"attention.{w}" for w in ("wq", "wkv_a", "wkv_b", "wo")] + ["moe.router.gate"]
        names += [f"{f}.{w}" for f in ("feed_forward", "moe.shared_experts") for w in _WS]
        layouts |= {f"{layer}.{name}.weight": whole for name in names}
        experts = ("w1_EFD", "w2_EDF", "w3_EFD")
        layouts |= {f"{layer}.moe.routed_experts.inner_experts.{w}": stacks for w in experts}
    return {
        "compute_sharding_by_fqn": layouts,
        "bucket_configs": tuple(
            BucketConfig(name=layer, patterns=(f"{layer}.*",))
            for layer in (f"layers.{index}" for index in range(6))
        ),
    }


_WS = ("w1", "w2", "w3")


@contextlib.contextmanager
def on_a_cpu() -> Iterator[None]:
    """DistMuon where there is no CUDA: its check of the device, and streams that do nothing.

    All else is as on CUDA: the plan, the exchange of the parts, the Newton-Schulz iteration.
    """

    def context(cls, device: torch.device) -> runtime._CommunicationContext:
        event: Any = torch.cpu.Event()
        slots = tuple(
            runtime._PipelineSlot(runtime._BufferSlot(), event, event, event)
            for _ in range(runtime._NUM_PIPELINE_SLOTS)
        )
        return cls(device_handle=torch.cpu, transfer_stream=torch.cpu.Stream(), slots=slots)

    patch = unittest.mock.patch.object
    cpu = lambda optimizer: torch.device("cpu")  # noqa: E731
    with (
        patch(runtime._CommunicationContext, "create", classmethod(context)),
        patch(dist_muon.DistMuon, "_validate_parameter_storage", cpu),
    ):
        yield
