"""Titan on a CPU: what changes, and that nothing does where an accelerator is."""

import ast
import logging
import math
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.components.quantization import float8
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.tools import utils as titan_utils

from tests.helpers.cluster import run_ranks
from tests.helpers.training import titan_config
from titan_ext.base import no_accelerator
from titan_ext.base.machines import MACHINES
from titan_ext.run.trainer import extend_config

GIB = 2**30


def _state_of_titan() -> dict[str, Any]:
    return {
        f"{name}.{attribute}": getattr(module, attribute)
        for name, module in sys.modules.items()
        if name.startswith("torchtitan")
        for attribute in ("device_type", "device_module", "get_peak_flops")
        if hasattr(module, attribute)
    }


@pytest.mark.usefixtures("accelerator")
def test_touches_nothing_where_an_accelerator_is():
    before = _state_of_titan()
    assert before, "Titan's modules are imported"
    config = titan_config("deepseek_v3")
    assert not no_accelerator.enable()
    no_accelerator.adapt_config(config)
    assert _state_of_titan() == before
    assert not config.training.disable_cuda_graphs
    assert any(config.model_spec.traverse(FlexAttention.Config))
    with no_accelerator.layout_independent_init() as mode:
        assert mode is None


def test_a_product_in_bfloat16_resizes_what_it_is_written_to():
    """As torch's own does; the product of these tests is ours on CPUs without bfloat16."""
    a, b = torch.ones(4, 8).bfloat16(), torch.ones(8, 3).bfloat16()
    for out in (torch.empty(0).bfloat16(), torch.empty(5, 4, 3).bfloat16()):
        assert torch.mm(a, b, out=out).shape == out.shape == (4, 3)
        assert out.eq(8).all()


@pytest.mark.parametrize(
    ("machine", "sm90", "sm100", "gfx942"),
    [("h200", 1, 0, 0), ("gb300", 1, 1, 0), ("mi355x", 0, 0, 1), ("", 1, 1, 1)],
)
def test_converters_find_the_machine_of_a_plan(machine: str, sm90: int, sm100: int, gfx942: int):
    before = [float8.has_cuda_capability, titan_utils.has_cuda_capability]
    capability = MACHINES[machine].capability if machine else None
    with no_accelerator.as_with_an_accelerator(capability):
        for module in (float8, titan_utils):
            found = [module.has_cuda_capability(9, 0), module.has_cuda_capability(10, 0)]
            assert [*found, module.has_rocm_capability(9, 4)] == [sm90, sm100, gfx942]
    assert [float8.has_cuda_capability, titan_utils.has_cuda_capability] == before


def test_a_context_ends_for_itself_only():
    """The outer one still leaves attention as it is, and another thread's config is adapted."""
    config = titan_config("deepseek_v3")
    kept = lambda: any(config.model_spec.traverse(FlexAttention.Config))  # noqa: E731
    with no_accelerator.as_with_an_accelerator():
        with no_accelerator.as_with_an_accelerator():
            pass
        no_accelerator.adapt_config(config)
        assert kept()
        other = threading.Thread(target=no_accelerator.adapt_config, args=(config,))
        other.start()
        other.join()
        assert not kept()


def test_config_is_adapted_once_and_says_so(caplog: pytest.LogCaptureFixture):
    config = titan_config("deepseek_v3_mtp")
    with caplog.at_level(logging.INFO):
        no_accelerator.adapt_config(config)
        no_accelerator.adapt_config(config)
        extend_config(config)
    assert config.training.disable_cuda_graphs
    assert not any(config.model_spec.traverse(FlexAttention.Config))
    assert len(list(config.model_spec.traverse(ScaledDotProductAttention.Config))) == 7
    for said in ("CUDA graphs are off", "ScaledDotProductAttention runs instead"):
        assert sum(said in record.message for record in caplog.records) == 1, said


def _onednn_capacity() -> str | None:
    no_accelerator.enable()
    return os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY")


def test_onednn_keeps_few_kernels_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With 1,024, one for each number of an expert's tokens, a rank grew with every step."""
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    assert run_ranks(_onednn_capacity, 1, log_folder=tmp_path) == ["16"]
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    no_accelerator.enable()
    assert _onednn_capacity() == "7"


def test_no_other_module_rebinds_names_of_torch_or_titan():
    """As its docstring says; a data set goes into a table, and Inductor has an option for ours."""
    found = set()
    for path in Path(no_accelerator.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        imports = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
        names = {(a.asname or a.name).split(".")[0] for n in imports for a in n.names}
        for node in nodes:
            if isinstance(node, ast.Assign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                targets = [t for t in targets if isinstance(t, ast.Attribute)]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                targets = node.args[:1]
            else:
                continue
            owners = {ast.unparse(t).split(".")[0] for t in targets}
            found |= {path.name for owner in owners if owner in names}
    assert {"no_accelerator.py"} <= found <= {"no_accelerator.py", "partition.py"}


def _enable_and_look() -> dict[str, Any]:
    torch_cpu = dict(vars(torch.cpu))
    assert no_accelerator.enable()
    assert no_accelerator.enable()
    assert dict(vars(torch.cpu)) == torch_cpu, "torch itself is left alone"
    stale = [
        name
        for name, module in sys.modules.items()
        if name.startswith("torchtitan") and getattr(module, "device_type", "cpu") != "cpu"
    ]
    device = titan_utils.device_module
    device.reset_peak_memory_stats()
    before = device.memory_stats()["reserved_bytes.all.peak"]
    held = torch.ones(GIB // 4)  # 1 GiB of float32
    after = device.memory_stats()["reserved_bytes.all.peak"]
    del held
    try:
        device.ipc_collect()
    except AttributeError as error:
        missing = str(error)
    else:
        missing = ""
    return {
        "stale": stale,
        "growth": after - before,
        "name": device.get_device_name(),
        "total": device.get_device_properties().total_memory,
        "peak_flops": titan_utils.get_peak_flops(device.get_device_name()),
        "missing": missing,
    }


def test_figures_are_honest(tmp_path: Path):
    (seen,) = run_ranks(_enable_and_look, 1, log_folder=tmp_path)
    assert seen["stale"] == [], "a Titan module still has a copy of the wrong device type"
    assert seen["growth"] == pytest.approx(GIB, rel=0.05)
    assert "RSS" in seen["name"]
    assert seen["total"] > GIB
    assert math.isnan(seen["peak_flops"])
    assert "base.no_accelerator has no 'ipc_collect'" in seen["missing"]
