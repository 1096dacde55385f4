"""The kernels that torch.compile makes for a GPU, made and disassembled without one.

While Inductor writes code it asks torch.cuda for the properties of a device and Triton for its
driver; neither torch nor Triton can be asked for the code of an absent GPU in public. So
``_pretended`` answers in their place, by mocks that end with it. What Inductor then writes, which
configurations it lets the autotuner choose from and how Triton compiles them is theirs; ptxas and
nvdisasm come with triton. Nothing is run on the device: results are those of the graph on the CPU.
"""

import contextlib
import copy
import re
import subprocess
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.utils._triton
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.utils import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile, _load_triton_kernel_from_source
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties

_DEVICE = torch.device("cuda", 0)
# An H100's. Of these Inductor chooses block sizes; what a kernel may use is up to ptxas.
_H100: dict[str, Any] = {
    "name": "a GPU that is not there",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "total_memory": 80 << 30,
    "L2_cache_size": 50 << 20,
    "gcnArchName": "",
}
_AMD_INSTRUCTION = re.compile(r"^\t([vs]_\w+|(?:global|buffer|scratch|ds|flat)_\w+)", re.M)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", re.M)


@dataclass(frozen=True)
class MachineCode:
    """One kernel in one of the configurations that the autotuner chooses from.

    Attributes:
        opcodes: Of a program, which has no loops: each is executed once by every thread.
        spills: Whether registers go to memory and back.
        values_per_thread: How many values of the tensor a thread treats.
    """

    opcodes: Counter[str]
    spills: bool
    values_per_thread: float

    @property
    def instructions_per_value(self) -> float:
        return self.opcodes.total() / self.values_per_thread


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel as Inductor wrote it."""

    name: str
    source: str

    def machine_code(self, compute_capability: int = 90) -> list[MachineCode]:
        """For an NVIDIA GPU, of each configuration."""
        return [
            MachineCode(*_sass(compiled.asm["cubin"]), self._values(config) / threads)
            for config, compiled in self._compile(cc=compute_capability)
            if (threads := 32 * config.num_warps)
        ]

    def amd_code(self, arch: str) -> list[MachineCode]:
        """For an AMD GPU, as ``machine_code``."""
        return [
            MachineCode(*_amdgcn(compiled.asm["amdgcn"]), self._values(config) / threads)
            for config, compiled in self._compile(type="hip", cc=arch, major=None, warp_size=64)
            if (threads := 64 * config.num_warps)
        ]

    def _compile(self, **device: Any) -> Iterator[tuple[Any, Any]]:
        with _pretended(), inductor_config.patch(use_static_triton_launcher=False):
            kernel = _load_triton_kernel_from_source(self.name, self.source)
            kernel.device_props = kernel.device_props._replace(**device)
            for config in kernel.configs:
                yield config, kernel._precompile_config(config).kernel

    def _values(self, config: Any) -> int:
        """How many values a program treats: rows times the constant length of a reduction."""
        length = re.search(r"^ +r0_numel = (\d+)$", self.source, re.M)
        return config.kwargs["XBLOCK"] * (int(length[1]) if length else 1)


class GpuCompiler:
    """A backend of torch.compile that writes the kernels for an H100 and runs the graph as it is.

    ``graphs`` has the kernels of each graph.
    """

    def __init__(self) -> None:
        self.graphs: list[list[Kernel]] = []

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: Any, options: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        kernels: dict[str, Kernel] = {}  # the module may be loaded twice
        code: list[str] = []

        def take(_: Any, name: str, source: str, device_str: str = "cuda") -> Any:
            kernels[name] = Kernel(name, source)
            return mock.Mock()

        PyCodeCache.cache_clear()  # else a module that was written before defines no kernels
        with (
            _pretended(),
            # Constant folding and the patterns of attention run small kernels on the device.
            inductor_config.patch(
                force_disable_caches=True, joint_graph_constant_folding=False, **(options or {})
            ),
            mock.patch.object(joint_graph, "lazy_init"),
            mock.patch.object(AsyncCompile, "triton", take),
            mock.patch.object(GraphLowering, "save_output_code", code.append),
        ):
            compile_fx(*_on_device(graph, inputs))
        launches = re.findall(r"(\w+)\.run\(", code[0])
        assert sorted(launches) == sorted(kernels), "launched once each"
        assert "extern_kernels." not in code[0]
        self.graphs.append(list(kernels.values()))
        return graph.forward


def _on_device(graph: torch.fx.GraphModule, inputs: Any) -> tuple[torch.fx.GraphModule, list[Any]]:
    graph = copy.deepcopy(graph)
    for node in graph.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": _DEVICE}
    graph.recompile()
    mode = detect_fake_mode(inputs)
    assert mode is not None
    # Dynamo's examples: with symbols for what varies, which ``inputs`` do not have.
    examples = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
    with mode:
        return graph, [_with_offset(x) if isinstance(x, torch.Tensor) else x for x in examples]


def _with_offset(x: torch.Tensor) -> torch.Tensor:
    """Where a tensor begins in its storage decides how much of it a thread may read at once."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    storage = torch.empty(x.storage_offset() + extent, dtype=x.dtype, device=_DEVICE)
    return storage.as_strided(x.size(), x.stride(), x.storage_offset())


@contextlib.contextmanager
def _pretended() -> Iterator[None]:
    properties = types.SimpleNamespace(**_H100)
    capability = (properties.major, properties.minor)
    driver = types.SimpleNamespace(
        get_current_target=lambda: triton.backends.compiler.GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
    )

    def device(_: Any = None) -> Any:
        return contextlib.nullcontext()

    with contextlib.ExitStack() as stack:
        for target, answers in (
            (
                torch.cuda,
                {
                    "is_available": lambda: True,
                    "device_count": lambda: 1,
                    "current_device": lambda: 0,
                    "device": device,
                    "get_device_properties": lambda _=None: properties,
                    "get_device_capability": lambda _=None: capability,
                    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
                    "set_rng_state": lambda *_: None,
                    "_lazy_init": lambda: None,
                },
            ),
            (
                CudaInterface,
                {
                    "current_device": staticmethod(lambda: 0),
                    "device": device,
                    "get_device_properties": staticmethod(lambda _=None: properties),
                },
            ),
            (
                CudaInterface.Worker,
                {"get_device_properties": staticmethod(lambda _=None: properties)},
            ),
            (triton_helpers, {"set_driver_to_gpu": lambda: None}),
            (triton.runtime.driver, {"_active": driver}),
        ):
            for name, answer in answers.items():
                stack.enter_context(mock.patch.object(target, name, answer))
        _forget_answers()
        stack.callback(_forget_answers)
        yield


def _forget_answers() -> None:
    for function in (DeviceProperties.create, *vars(torch.utils._triton).values()):
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _sass(cubin: bytes) -> tuple[Counter[str], bool]:
    """Its opcodes, and whether it spills."""
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(disassembler), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    opcodes = Counter(_INSTRUCTION.findall(text))
    del opcodes["NOP"]
    assert opcodes["EXIT"] >= 1, "the disassembler's format changed"
    return opcodes, any(opcode.startswith(("LDL", "STL")) for opcode in opcodes)


def _amdgcn(assembly: str) -> tuple[Counter[str], bool]:
    """Its opcodes up to the program's end (what follows pads it), and whether it spills."""
    opcodes = Counter(_AMD_INSTRUCTION.findall(assembly.partition("\ts_endpgm")[0]))
    assert opcodes.total() > 10, "the assembler's format changed"
    return opcodes, "; ScratchSize: 0\n" not in assembly
