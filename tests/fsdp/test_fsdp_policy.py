"""Reshard and prefetch settings: what is decided for each unit."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import ConfigManager, TrainingConfig
from torchtitan.models.deepseek_v3 import DeepSeekV3Model

from tests.helpers.toml_files import DEBUG
from tests.helpers.training import degrees, meta_model, titan_config
from titan_ext.api import build_decoder
from titan_ext.base.nodes import Nodes
from titan_ext.fsdp.plan import FSDPPlan
from titan_ext.fsdp.prefetch import PrefetchLimit, parse_prefetch_limit
from titan_ext.fsdp.resolve import resolve_sharding
from titan_ext.fsdp.settings import FSDPSettings, Reshard
from titan_ext.fsdp.units import Wrap
from titan_ext.parallelize.keys import ParallelismConfig

_MIB = 2**20


def _plan(
    model: str = "deepseek_v3",
    wrap: Wrap = "submodule",
    pp_enabled: bool = False,
    world: int = 8,
    **settings: Any,
) -> FSDPPlan:
    built = _built(model)
    dims = degrees(dp_shard=world, pp=2 if pp_enabled else 1)
    return resolve_sharding(built, FSDPSettings(wrap=wrap, **settings), dims, Nodes(8, 8))


_built = functools.cache(meta_model)


def _decisions(plan: FSDPPlan) -> dict[str, bool | int]:
    return {unit.name: unit.reshard_after_forward for unit in plan.units}


@pytest.mark.parametrize(
    ("reshard", "pp_enabled", "blocks", "head"),
    [
        ("default", False, True, False),
        ("default", True, False, False),
        ("always", False, True, True),
        ("always", True, True, True),
        ("never", False, False, False),
        ("never", True, False, False),
        (2, False, 2, False),
    ],
)
def test_one_setting_for_all(reshard: Reshard, pp_enabled: bool, blocks, head):
    decisions = _decisions(_plan(reshard_after_forward=reshard, pp_enabled=pp_enabled))
    assert decisions.pop("lm_head") is head
    if isinstance(reshard, int):  # its backward gathers nothing
        assert decisions.pop("tok_embeddings") is True
    assert all(decision is blocks for decision in decisions.values())


def test_a_pattern_goes_before_a_kind_and_a_later_one_before_an_earlier():
    decisions = _decisions(
        _plan(
            reshard_groups={
                "layers.1.*": "always",
                "attention": "never",
                "layers.[1-2].moe": 4,
                "head": "always",
                "embedding": "never",
            }
        )
    )
    assert decisions["layers.0.attention"] is False
    assert decisions["layers.1.attention"] is True
    assert decisions["layers.1.moe"] == 4
    assert decisions["layers.2.moe"] == 4
    assert decisions["layers.3.moe"] is True
    assert decisions["lm_head"] is True
    assert decisions["tok_embeddings"] is False


def test_the_head_is_freed_as_its_own_entry_says():
    # "default" of the head is to stay; of all units, only "always" frees it.
    stays = _plan(reshard_after_forward="always", reshard_groups={"head": "default"})
    assert _decisions(stays)["lm_head"] is False
    assert _decisions(_plan(reshard_groups={"head": 2}))["lm_head"] == 2
    tied = _plan(model="qwen3", reshard_groups={"head": "always"})
    assert _decisions(tied)["tok_embeddings+lm_head"] is True


def test_a_model_without_sharded_experts_cannot_send_them():
    with pytest.raises(
        ValueError, match='float8_all_gather = "experts": FSDP shards no routed experts'
    ):
        _plan(model="qwen3", float8_all_gather="experts")


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        (0, PrefetchLimit(units=0)),
        ("3", PrefetchLimit(units=3)),
        ("512MiB", PrefetchLimit(nbytes=512 * _MIB)),
        ("1.5 GiB", PrefetchLimit(nbytes=1536 * _MIB)),
        ("2GB", PrefetchLimit(nbytes=2 * 10**9)),
    ],
)
def test_prefetch_limit(value: int | str, limit: PrefetchLimit):
    assert parse_prefetch_limit("key", value) == limit


def test_prefetch_by_units():
    plan = _plan(prefetch=2)
    assert plan["layers.1.attention"].forward_prefetch == ("layers.1.moe", "layers.2.attention")
    assert plan["layers.1.attention"].backward_prefetch == (
        "layers.0.feed_forward",
        "layers.0.attention",
    )
    assert plan["layers.5.attention"].forward_prefetch == ("layers.5.moe", "lm_head")
    assert plan["lm_head"].forward_prefetch == ()
    assert plan["lm_head"].backward_prefetch == ("layers.5.moe", "layers.5.attention")
    assert plan["tok_embeddings"].backward_prefetch == ()


def _size(nbytes: int) -> str:
    return f"{nbytes / 1024:.10f}KiB"  # exactly


def test_prefetch_by_bytes_takes_as_many_units_as_fit():
    sizes = {unit.name: unit.gathered_nbytes for unit in _plan().units}
    budget = sizes["layers.2.attention"] + sizes["layers.2.moe"]
    plan = _plan(prefetch=_size(budget))
    assert plan["layers.1.moe"].forward_prefetch == ("layers.2.attention", "layers.2.moe")
    plan = _plan(prefetch=_size(budget - 1))
    assert plan["layers.1.moe"].forward_prefetch == ("layers.2.attention",)
    for unit in plan.units:
        for ahead in (unit.forward_prefetch, unit.backward_prefetch):
            assert sum(sizes[name] for name in ahead) < budget


def test_the_table_says_what_is_done():
    table = _plan(reshard_groups={"moe": "never"}, world=4).table().splitlines()
    assert table[0].split() == [
        *("unit", "gathered", "after", "forward", "ahead", "ahead", "in", "backward")
    ]
    (moe,) = [line for line in table if line.startswith("layers.1.moe")]
    assert "(5)" in moe
    assert "kept" in moe
    assert "MiB" in moe
    (attention,) = [line for line in table if line.startswith("layers.0.attention")]
    assert "resharded" in attention


def test_keys_on_the_command_line(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(DEBUG)
    command = ["--module", "titan_ext", "--config", "run.toml"]
    flags = ["--parallelism.fsdp_reshard_groups", "attention", "never", "layers.[12].*", "always"]
    parallelism = cast(Any, ConfigManager().parse_args([*command, *flags])).parallelism
    assert parallelism.fsdp_reshard_groups == {"attention": "never", "layers.[12].*": "always"}


def test_names_in_a_file_build_the_model_once(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "8")
    table = '[parallelism.fsdp_reshard_groups]\nblock = "never"\n'
    (tmp_path / "run.toml").write_text(DEBUG + table)
    built = []
    build = DeepSeekV3Model.__init__

    def note(model: Any, *args: Any, **kwargs: Any) -> None:
        built.append(model)
        build(model, *args, **kwargs)

    monkeypatch.setattr(DeepSeekV3Model, "__init__", note)
    config = ConfigManager().parse_args(["--module", "titan_ext", "--config", "run.toml"])
    replace(cast(Any, config))
    assert len(built) == 1


def test_cpu_offload_reaches_every_parameter(one_rank: None):
    spec: Any = titan_config("deepseek_v3_mtp").model_spec
    model, _ = build_decoder(
        spec,
        parallelism=ParallelismConfig(fsdp_wrap="submodule"),
        training=TrainingConfig(enable_cpu_offload=True),
    )
    states = {m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)}
    params = [
        p for state in states for group in state._fsdp_param_groups for p in group.fsdp_params
    ]
    assert len(params) == len(list(model.parameters()))
    assert all(param.offload_to_cpu for param in params)
