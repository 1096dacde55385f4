"""``--config NAME`` for every config function of Titan's models: imported, extended, parallelized.

Each at the world size of a real job of its kind, as one rank with a fake process group.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cluster import RankError, run_ranks
from tests.helpers.dry_run import DryRun, dry_run
from titan_ext import config_registry
from titan_ext.toml.files import titan_configs

# Ranks of a real job; 8, one node, for all others. 1: a recipe for one GPU.
_WORLD_SIZES = {
    "deepseek_v3_671b": 2048,
    "kimi_k2_5": 256,  # its Muon takes whole experts, of which there are 384
    "llama3_70b": 64,
    "qwen35_27b": 32,
    "qwen35_397b_a17b": 64,
    "qwen3_32b": 64,
}
# What Titan itself refuses here: at import, without the hardware, or in its own checks. Degrees are
# ours to check first.
_REFUSED_BY_TITAN = {
    "deepseek_v3_671b_float8": "float8 is only supported on",
    "llama3_405b": "float8 is only supported on",
    "llama3_debugmodel_float8": "float8 is only supported on",
    "deepseek_v3_debugmodel_mxfp8": "MXFP8 is only supported on",
    "llama3_8b_mxfp8": "MXFP8 is only supported on",
    "llama3_8b_first_85_pct_layers_nvfp4": "NVFP4 is only supported on",
    "llama3_debugmodel_first_85_pct_layers_nvfp4": "NVFP4 is only supported on",
    "llama3_debugmodel_nvfp4": "NVFP4 is only supported on",
    "qwen3_8b_first_85_pct_layers_nvfp4": "NVFP4 is only supported on",
    "qwen3_debugmodel_first_85_pct_layers_nvfp4": "NVFP4 is only supported on",
    "qwen3_debugmodel_nvfp4": "NVFP4 is only supported on",
    "qwen3_debugmodel_flex_flash": "only supported on Hopper or Blackwell",
    "qwen3_moe_deepep": "DeepEP v2 .* is required",
    "deepseek_v3_16b_hybridep": "HybridEP requires deep_ep",
    # Recipes to be completed on the command line with degrees that fit the machine.
    "deepseek_v3_debugmodel_hybridep": "requires expert parallelism",
    "deepseek_v3_debugmodel_minimal_async_ep": "one copy makes 1 ranks, but this run has 8",
    "deepseek_v3_16b_minimal_async_ep": "one copy makes 1 ranks, but this run has 8",
    # 2 key-value heads and a larger tensor-parallel degree.
    "qwen35_122b_a10b": "must divide n_kv_heads",
    "qwen35_397b_a17b": "must divide n_kv_heads",
}


def _dry_run(name: str, world_size: int) -> DryRun:
    os.environ["WORLD_SIZE"] = str(world_size)  # the door checks degrees against it
    return dry_run(getattr(config_registry, name)(), world_size)


def test_every_config_function_of_titan_is_offered():
    names = titan_configs()
    assert len(names) >= 60
    assert {"deepseek_v3_16b", "qwen3_30b_a3b", "gpt_oss_20b", "llama3_8b"} <= names.keys()
    assert set(dir(config_registry)) >= names.keys()
    assert "enable_fused_swiglu" not in names, "takes a config, returns none"
    assert not any("flux" in name for name in names)
    assert names.keys() >= _WORLD_SIZES.keys() | _REFUSED_BY_TITAN.keys()


_QUICK = ("kimi_k2_5_debugmodel", "llama3_8b", "qwen35_122b_a10b")
"""Architectures that no shipped file has (project/test_train_configs.py), and a refusal."""


def _configs(names: Iterable[str]) -> list[Any]:
    return [
        pytest.param(name, marks=[] if name in _QUICK else [pytest.mark.slow])
        for name in sorted(names)
    ]


@pytest.mark.parametrize("name", _configs(set(titan_configs()) - _REFUSED_BY_TITAN.keys()))
def test_parallelizes_at_its_real_world_size(name: str, tmp_path: Path):
    (run,) = run_ranks(
        _dry_run, 1, name, _WORLD_SIZES.get(name, 8), log_folder=tmp_path, timeout_s=200
    )
    units = run.units
    if "attention" in units:
        assert units["attention"] == run.blocks
        assert units.get("moe", 0) == run.moe_blocks
        assert units.get("feed_forward", 0) == run.blocks - run.moe_blocks
    else:
        assert units["block"] == run.blocks
    towers = {n.split(".")[0] for n in run.root_parameters} & {"vision_encoder", "vision_adapter"}
    others = {n for n in run.root_parameters if n.split(".")[0] not in towers}
    # A tower is a unit of Titan's making; what else a multimodal model has is the root's group.
    assert run.fsdp_groups == run.planned_groups + len(towers) + bool(others)
    assert not others or name.endswith("_mm")
    assert run.plain_parameters == []


@pytest.mark.parametrize("name", _configs(_REFUSED_BY_TITAN))
def test_what_titan_refuses_comes_through_with_its_reason(name: str, tmp_path: Path):
    with pytest.raises(RankError, match=_REFUSED_BY_TITAN[name]):
        run_ranks(_dry_run, 1, name, _WORLD_SIZES.get(name, 8), log_folder=tmp_path)


def test_a_missing_extra_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch):
    """Titan swallows ImportErrors of a plugin's module, so this is none."""
    import sys

    for module in [m for m in sys.modules if m.startswith("torchtitan.models.qwen3_5")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "fla.modules", None)
    monkeypatch.setitem(sys.modules, "fla.modules.conv.triton.ops", None)
    with pytest.raises(ValueError, match=r"^qwen35_debugmodel: qwen3_5 cannot be imported: .*fla"):
        config_registry.qwen35_debugmodel()
