"""Shard and run a model on an accelerator that is not CUDA, in shapes alone.

    python -m tests.helpers.stand_in_device "2 spmd_types"          # EP degree, backend
    python -m tests.helpers.stand_in_device "2 spmd_types offload"  # kept on the host

Several cases are several forks of one process, which imports torch and Titan once.

torch lets a backend outside its tree register as "PrivateUse1" (TPUs, Ascend and others do). Here
that is a device without kernels, on which fake tensors live: shapes, dtypes and devices are real,
and an operation on tensors of two devices raises. torch and Titan take it for the accelerator of
this process, so that nothing works which expects CUDA.
"""

import contextlib
import os
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "standin"
WORLD = 4


class Event:
    """FSDP2 orders streams by events; here all is in order."""

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


class Stream:
    stream_id = device_index = device_type = 0

    def __init__(self, *args: Any, **options: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Event:
        return Event()


class Backend(_DummyBackendModule):
    """What FSDP2, autocast and Titan ask of an accelerator, and no more."""

    Stream, Event = Stream, Event

    def device_count(self) -> int:
        return 1

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def set_device(self, device: Any) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def register() -> torch.library.Library:
    """Before anything of Titan's is imported; keep what it returns."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
    library = torch.library.Library("_", "IMPL")  # autocast casts nothing
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return library


def main(ep: int, backend: Any, how: str = "") -> None:
    """Two forwards and backwards of sub-module units with float8 activations."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torchtitan.config import CompileConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.models.deepseek_v3 import model_registry
    from torchtitan.tools.utils import device_type

    from titan_ext import api
    from titan_ext.activation_checkpoint import FP8AC
    from titan_ext.activation_checkpoint.memory_report import memory_report_of
    from titan_ext.base import no_accelerator
    from titan_ext.fp8.offload import Lane
    from titan_ext.plan.stand_ins import use_stand_ins

    assert device_type == NAME
    assert not no_accelerator.needed()
    os.environ.update(WORLD_SIZE=str(WORLD), RANK="0", LOCAL_RANK="0")
    dist.init_process_group("fake", rank=0, world_size=WORLD)
    torch.autograd.set_multithreading_enabled(False)  # as Titan does
    dist_utils.set_spmd_backend(backend)
    parallelism = api.ParallelismConfig(
        expert_parallel_degree=ep, spmd_backend=backend, fsdp_wrap="submodule"
    )
    dims = ParallelDims.from_config(parallelism, WORLD)
    dims.build_mesh()
    spec = api.extend_model_spec(model_registry("debugmodel"))
    training = TrainingConfig()
    sections = {"parallelism": parallelism, "training": training, "compile": CompileConfig()}
    use_stand_ins(SimpleNamespace(model_spec=spec, activation_checkpoint=None, **sections))
    config: Any = spec.model
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    config.layers = config.layers[: 4 if how else 2]  # backward takes the last two from it
    with torch.device("meta"):
        model = config.build()
    table = {"input": "offload_float8", "*": "offload"} if how == "offload" else {}
    ac_config: Any = FP8AC.Config(op_policies=table)
    devices: set[tuple[str, str]] = set()
    copy = Lane.copy

    def watched(self: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
        devices.add((source.device.type, target.device.type))
        return copy(self, target, source)

    Lane.copy = watched
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        dist_utils.get_spmd_context(parallel_dims=dims)(),
    ):
        model = api.parallelize(
            model,
            parallel_dims=dims,
            training=TrainingConfig(),
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=ac_config,
            dump_folder="",
        )
        model.to_empty(device=NAME)
        tokens_BL = torch.zeros(2, 64, dtype=torch.int64, device=NAME)
        positions_BL = torch.arange(64, device=NAME).expand(2, -1).contiguous()
        with (
            torch.autograd.set_multithreading_enabled(True),
            pytest.raises(ValueError, match=r"set_multithreading_enabled\(False\)"),
        ):
            model(tokens_BL, positions=positions_BL)
        with torch.autograd.set_multithreading_enabled(True), torch.no_grad():
            model(tokens_BL, positions=positions_BL)  # nothing runs backward
        for _ in range(2):
            out: Any = model(tokens_BL, positions=positions_BL)
            out = out.to_local() if hasattr(out, "to_local") else out
            out.float().sum().backward()
    grads = {p.grad.device.type for p in model.parameters() if p.grad is not None}
    rows = memory_report_of([model]).rows()
    treatments = {row.treatment for row in rows}
    print(f"device {out.device.type}, gradients on {grads}, kept {sorted(treatments)}")
    moved = sum(row.host_nbytes for row in rows)
    print(f"copies {sorted(devices)}, {moved} of {sum(r.nbytes for r in rows) + moved} bytes")


def fork(case: str) -> bool:
    """Whether ``main`` came to its end in a process of its own."""
    print(f"-- {case}", flush=True)
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0
    ep, backend, *how = case.split()
    code = 1
    try:
        main(int(ep), backend, *how)
        sys.stdout.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    kept = register()
    from titan_ext import api  # noqa: F401

    sys.exit(not all(fork(case) for case in sys.argv[1:]))
