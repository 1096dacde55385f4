"""The shipped TOML files: they load, and their degrees fit the world size that each one names."""

import re
from pathlib import Path
from typing import Any, cast

import pytest
from torchtitan.models.common.moe import GroupedExperts

from tests.helpers.cluster import run_ranks
from tests.helpers.dry_run import DryRun, dry_run
from titan_ext.config_registry.resolve import load
from titan_ext.plan.stand_ins import as_rank
from titan_ext.toml.files import read

FOLDER = Path(__file__).parents[2] / "train_configs"
NAMES = [
    "deepseek_v3_16b",
    "deepseek_v3_16b_tuned",
    "deepseek_v3_671b",
    "deepseek_v3_671b_tuned",
    "gpt_oss_20b",
    "gpt_oss_20b_tuned",
    "moe_debug",
    "moe_debug_gpu",
    "qwen3_235b_a22b",
    "qwen3_235b_a22b_tuned",
    "qwen3_30b_a3b",
    "qwen3_30b_a3b_tuned",
]


expected_in_header = r"Expect ([\d,]+) tokens/s a GPU \(\+-26%\) on H100s"


def world_size(path: Path) -> int:
    return read(path).world_size


def test_these_are_all():
    assert sorted(path.stem for path in FOLDER.glob("*.toml")) == NAMES


def _dry_run(path: Path) -> DryRun:
    with as_rank(world_size(path), 0):
        config = load(path)
        if getattr(config.activation_checkpoint, "budget", ""):
            config.activation_checkpoint = None  # a run solves for it; units do not depend on it
        return dry_run(config, world_size(path))


_QUICK = ("gpt_oss_20b", "qwen3_30b_a3b")
"""Of DeepSeek, parallelize/test_recipe.py has most. verify/test_verify.py decides for each file."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in _QUICK else [pytest.mark.slow]) for name in NAMES],
)
def test_parallelizes_at_its_world_size(name: str, tmp_path: Path):
    path = FOLDER / f"{name}.toml"
    (run,) = run_ranks(_dry_run, 1, path, log_folder=tmp_path)
    assert run.moe_blocks, "an example without experts"
    assert {run.units.get("attention", 0), run.units.get("block", 0)} == {0, run.blocks}
    assert run.fsdp_groups == run.planned_groups
    assert run.root_parameters == run.plain_parameters == []


@pytest.mark.parametrize("name", NAMES)
def test_degrees_fit_the_world_size(name: str):
    """What a dry run does not see: tokens and experts are split evenly."""
    config: Any = load(FOLDER / f"{name}.toml")
    p = config.parallelism
    splits = p.context_parallel_degree * p.tensor_parallel_degree
    assert config.training.seq_len % (2 * splits) == 0
    for _, experts, *_ in config.model_spec.traverse(GroupedExperts.Config):
        assert cast(GroupedExperts.Config, experts).num_experts % p.expert_parallel_degree == 0
    if p.expert_parallel_degree > 1:
        assert config.training.disable_cuda_graphs


@pytest.mark.parametrize("name", [name for name in NAMES if "debug" not in name])
def test_a_file_says_what_to_expect_and_is_no_slower_than_titans_own(name: str):
    """A slow test of plan/test_dry_run.py plans the first figure."""
    header = (FOLDER / f"{name}.toml").read_text().partition("\nextends")[0].replace("\n# ", " ")
    titans = r"(?:TorchTitan\D*\S*, same ranks and batch|\(--stock\)): ([\d,]+)"
    ours, other = (
        int(found[1].replace(",", "")) if (found := re.search(text, header)) else 0
        for text in (expected_in_header, titans)
    )
    assert ours >= other > 0
