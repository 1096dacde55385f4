"""The shipped TOML files: they load, and their degrees fit the world size that each one names."""

import re
from pathlib import Path
from typing import Any

import pytest
from torchtitan.models.common.moe import MoE

from titan_ext.config_registry import moe_debug
from titan_ext.data.stdlib_corpus import default_tokenizer_path
from titan_ext.specs import SUPPORTED_MODELS
from titan_ext.toml_config import load
from titan_ext.toml_config.origins import leaves

FOLDER = Path(__file__).parent.parent / "train_configs"
NAMES = [
    "deepseek_v3_16b",
    "deepseek_v3_671b",
    "gpt_oss_20b",
    "moe_debug",
    "moe_debug_gpu",
    "qwen3_235b_a22b",
    "qwen3_30b_a3b",
]


def world_size(path: Path) -> int:
    """The N of the line ``# world size: N``."""
    found = re.findall(r"^# world size: (\d+)$", path.read_text(), flags=re.MULTILINE)
    assert len(found) == 1, f"{path} names its world size {len(found)} times"
    return int(found[0])


def test_these_are_all():
    assert sorted(path.stem for path in FOLDER.glob("*.toml")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_degrees_fit_the_world_size(name: str):
    if name.startswith("gpt_oss") and "gpt_oss" not in SUPPORTED_MODELS:
        pytest.skip("gpt_oss is not served yet")
    path = FOLDER / f"{name}.toml"
    config, world = load(path), world_size(path)
    p = config.parallelism
    outer = p.pipeline_parallel_degree * p.data_parallel_replicate_degree
    inner = p.context_parallel_degree * p.tensor_parallel_degree
    assert world % (outer * inner) == 0
    shard = world // (outer * inner)
    assert p.data_parallel_shard_degree in (-1, shard)
    assert shard * inner % p.expert_parallel_degree == 0
    assert config.training.seq_len % (2 * inner) == 0
    assert config.model_spec is not None
    layers = config.model_spec.model.traverse(MoE.Config)
    experts = {getattr(moe, "num_experts", 0) for _, moe, *_ in layers}
    assert experts, "an example without experts"
    assert all(number % p.expert_parallel_degree == 0 for number in experts)
    if p.expert_parallel_degree > 1:
        assert config.training.disable_cuda_graphs


def test_moe_debug_is_the_python_function():
    ours, wanted = load(FOLDER / "moe_debug.toml"), moe_debug()
    assert ours.hf_assets_path == str(default_tokenizer_path())
    assert leaves(ours) == leaves(wanted)
    assert type(ours) is type(wanted)
    assert _model(ours) == _model(wanted)


def _model(config: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(config.model_spec))


def test_the_large_qwen_takes_the_rest_from_the_small_one():
    small, large = (load(FOLDER / f"qwen3_{size}.toml") for size in ("30b_a3b", "235b_a22b"))
    assert large.model_spec is not None
    assert large.model_spec.flavor == "235B-A22B"
    assert large.training.disable_cuda_graphs == small.training.disable_cuda_graphs is True
    assert large.optimizer.param_groups[0].optimizer_kwargs["lr"] == 2.2e-4
    assert large.optimizer.param_groups[0].optimizer_kwargs["betas"] == (0.9, 0.95)
