"""Ranks that would run different things find out before training, by name."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch.distributed as dist
from torchtitan.config import CompileConfig, TrainingConfig

import titan_ext
from tests.helpers.cluster import refusal_of, run_ranks
from tests.helpers.training import degrees, meta_model, titan_config
from titan_ext.base.messages import ranks_in_words
from titan_ext.base.nodes import Nodes
from titan_ext.base.stdlib_corpus import STDLIB_CORPUS, default_tokenizer_path, make_corpus
from titan_ext.parallelize.keys import ParallelismConfig
from titan_ext.parallelize.recipe import resolve
from titan_ext.run.start import describe
from titan_ext.run.trainer import extend_config


def _decide() -> tuple:
    """What decides how often a rank communicates, where nodes have 4 and 2 ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = "2" if os.environ["RANK"] == "3" else "4"
    dist.init_process_group("gloo")
    nodes = Nodes.agreed()
    recipes = [
        resolve(
            meta_model(),
            parallel_dims=degrees(dp_shard=4, ep=ep),
            nodes=nodes,
            training=TrainingConfig(),
            parallelism=ParallelismConfig(expert_parallel_degree=ep),
            compile_config=CompileConfig(),
            ac_config=None,
        )
        for ep in (2, 4)
    ]
    return nodes.ranks, recipes[1].exchanges.saved, recipes[0].fsdp.wrap


def test_ranks_of_unequal_nodes_decide_the_same(tmp_path: Path):
    assert set(run_ranks(_decide, 4, log_folder=tmp_path)) == {(2, True, "experts")}


def test_only_one_function_reads_how_many_ranks_this_node_has():
    """Any other decision that reads it has to be made for all ranks as well. A dry run sets it."""
    folder = Path(titan_ext.__file__).parent
    readers = [file.name for file in folder.rglob("*.py") if "LOCAL_WORLD_SIZE" in file.read_text()]
    assert sorted(readers) == ["nodes.py", "stand_ins.py"]


def test_many_ranks_are_named_as_ranges():
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([8, 0, 1, 2]) == "ranks 0-2, 8"
    assert ranks_in_words(range(0, 24, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 4 more"


def test_description_has_versions_and_no_addresses():
    description = describe(extend_config(titan_config("qwen3")))
    assert {f"version of {p}" for p in ("torch", "torchtitan", "titan_ext")} <= description.keys()
    assert description["training.seq_len"] == "2048"
    assert not any("0x" in value for value in description.values())
    assert description == describe(extend_config(titan_config("qwen3")))


class _Span(NamedTuple):
    first: int
    last: int


def test_a_named_tuple_and_an_empty_list_of_a_users_config_are_described():
    config: Any = SimpleNamespace(to_dict=lambda: {"span": _Span(2, 5), "converters": [{}]})
    description = describe(config)
    assert description["span"] == "_Span(first=2, last=5)"
    config.to_dict = lambda: {"span": _Span(2, 5), "converters": []}
    assert describe(config) != description


def _build() -> str:
    config: Any = extend_config(titan_config("deepseek_v3"))
    config.debug.enable_structured_logging = False
    config.hf_assets_path = str(default_tokenizer_path())
    config.dataloader.dataset = STDLIB_CORPUS
    if os.environ["RANK"] == "1":
        config.parallelism.fsdp_wrap = "submodule"
        config.model_spec.model.layers[2].moe.router.top_k = 5
    return refusal_of(config.build)


def test_every_rank_names_the_keys_and_the_ranks_before_it_builds_a_model(tmp_path: Path):
    make_corpus()
    assert set(run_ranks(_build, 3, log_folder=tmp_path)) == {
        "the ranks disagree on what to run:\n"
        "  model_spec.model.layers.2.moe.router.top_k: 3 on ranks 0, 2; 5 on rank 1\n"
        "  parallelism.fsdp_wrap: auto on ranks 0, 2; submodule on rank 1"
    }
    assert "Building" not in (tmp_path / "rank_0.log").read_text()
