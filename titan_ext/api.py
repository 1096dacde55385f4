# SPDX-License-Identifier: BSD-3-Clause
"""titan_ext for people with their own training loop: a few functions, no trainer.

See docs/your_model.md. Titan's pieces around them (loss, optimizer, checkpointer) work as always.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, TrainingConfig
from torchtitan.config import ParallelismConfig as TitanParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils as titan_utils

from titan_ext.base import no_accelerator
from titan_ext.base.messages import Mistakes
from titan_ext.base.titan.parallelism import DEGREES
from titan_ext.components.lora import wrong_adapters
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.fsdp.shard import shard_decoder
from titan_ext.fsdp.unmanaged import refuse_unmanaged_parameters
from titan_ext.parallelize.keys import ParallelismConfig
from titan_ext.parallelize.limits import wrong_model
from titan_ext.parallelize.model_spec import extend_model_spec
from titan_ext.parallelize.passes import parallelize

if TYPE_CHECKING:
    from titan_ext.verify.loop import verify

__all__ = [
    "FSDPSettings",
    "ParallelismConfig",
    "build_decoder",
    "extend_model_spec",
    "parallelize",
    "refuse_unmanaged_parameters",
    "shard_decoder",
    "verify",
]


def __getattr__(name: str) -> Any:
    # Imported for whoever asks: it takes each rank 0.4 CPU s, and no run needs it.
    if name == "verify":
        from titan_ext.verify.loop import verify

        return verify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def build_decoder(
    spec: ModelSpec,
    *,
    parallelism: TitanParallelismConfig,
    training: TrainingConfig | None = None,
    compile_config: CompileConfig | None = None,
    ac_config: ActivationCheckpointingConfig = None,
    dump_folder: str = "",
    ignored: Sequence[str] = (),
) -> tuple[Decoder, ParallelDims]:
    """Build, parallelize and initialise the decoder of ``spec`` on this process' device.

    The default process group must exist. Without an accelerator the CPU is used, with what
    ``titan_ext.base.no_accelerator`` changes for it. Seed torch before, equally on every rank.

    Args:
        spec: A fresh model spec, from a Titan ``model_registry`` function; ours or Titan's.
        parallelism: Degrees and backend; pipeline parallelism needs Titan's trainer.
        training: ``dtype``, ``mixed_precision_*`` and ``enable_cpu_offload`` are read.
        ignored: As ``parallelize`` takes it.

    Returns:
        The model, in training mode, and the device meshes that it lies on. A second model of the
        same degrees (a teacher, a reference) gets the same meshes.

    Raises ValueError for a model or a parallelism that titan_ext does not serve, or for other
    degrees than those of this process' first model under ``spmd_types``.
    """
    if parallelism.pipeline_parallel_degree > 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree is {parallelism.pipeline_parallel_degree}; "
            "build_decoder needs 1: Titan's trainer runs pipelines."
        )
    training = training or TrainingConfig()
    spec = extend_model_spec(spec)
    no_accelerator.enable()
    no_accelerator.adapt_spec(spec)
    Mistakes(wrong_model(spec, parallelism, training)).raise_all()
    split = SimpleNamespace(parallelism=parallelism)
    Mistakes(wrong_adapters(spec.model, split)).raise_all()

    parallel_dims = _parallel_dims(parallelism)
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    spec.model.update_from_config(config=split)
    dtype = TORCH_DTYPE_MAP[training.dtype]
    with torch.device("meta"), titan_utils.set_default_dtype(dtype):
        model = cast(Decoder, spec.model.build())
    model = parallelize(
        model,
        parallel_dims=parallel_dims,
        training=training,
        parallelism=parallelism,
        compile_config=compile_config or CompileConfig(),
        ac_config=ac_config,
        dump_folder=dump_folder,
        ignored=ignored,
    )
    model.to_empty(device="cpu" if training.enable_cpu_offload else titan_utils.device_type)
    with torch.no_grad(), no_accelerator.layout_independent_init():
        model.init_weights(buffer_device=torch.device(titan_utils.device_type))
    return model.train(), parallel_dims


_DEGREES = (*DEGREES, "world_size", "spmd_backend")
_shared_dims: list[tuple[dist.ProcessGroup | None, ParallelDims]] = []


def _parallel_dims(parallelism: TitanParallelismConfig) -> ParallelDims:
    """The meshes of a layout, the same objects for each model that a process builds.

    FSDP2 compares meshes by identity, and SPMD types find the first mesh of a process again.
    """
    wanted = ParallelDims.from_config(parallelism, dist.get_world_size())
    # Of this process group alone: its meshes end with it.
    _shared_dims[:] = [entry for entry in _shared_dims if entry[0] is dist.group.WORLD]
    for _, dims in _shared_dims:
        names = [n for n in _DEGREES if getattr(dims, n) != getattr(wanted, n)]
        if not names:
            return dims
        if dims.spmd_backend == wanted.spmd_backend == "spmd_types":
            raise ValueError(
                "build_decoder: the models of a process need the same degrees under "
                f"spmd_backend 'spmd_types'; {', '.join(names)}: expected "
                f"{[getattr(dims, n) for n in names]}, as of the first model, got "
                f"{[getattr(wanted, n) for n in names]}."
            )
    _shared_dims.append((dist.group.WORLD, wanted))
    return wanted
