"""Ranks that would run different things find out before training, by name."""

import os
from pathlib import Path

import pytest

from tests.cluster import RankError, run_ranks
from tests.training import titan_config
from titan_ext.base.messages import ranks_in_words
from titan_ext.base.stdlib_corpus import default_tokenizer_path, make_corpus
from titan_ext.run.start import RanksAgree, describe
from titan_ext.run.trainer import extend_config


def _check(odd_rank: int | None) -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    config = extend_config(titan_config("deepseek_v3"))
    if int(os.environ["RANK"]) == odd_rank:
        config.parallelism.fsdp_wrap = "submodule"
        config.model_spec.model.layers[2].moe.router.top_k = 5  # type: ignore[union-attr]
    try:
        RanksAgree().before_build(config)
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def test_equal_ranks_agree(tmp_path: Path):
    assert run_ranks(_check, 2, None, log_folder=tmp_path) == ["", ""]


def test_every_rank_names_the_keys_and_the_ranks(tmp_path: Path):
    errors = run_ranks(_check, 3, 1, log_folder=tmp_path)
    assert set(errors) == {
        "the ranks disagree on what to run:\n"
        "  model_spec.model.layers.2.moe.router.top_k: 3 on ranks 0, 2; 5 on rank 1\n"
        "  parallelism.fsdp_wrap: auto on ranks 0, 2; submodule on rank 1"
    }


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


def _train(odd_rank: int) -> None:
    config = extend_config(titan_config("deepseek_v3"))
    config.debug.enable_structured_logging = False
    config.hf_assets_path = str(default_tokenizer_path())
    if int(os.environ["RANK"]) == odd_rank:
        config.training.seq_len = 128
    config.build()


def test_the_trainer_checks_before_it_builds_a_model(tmp_path: Path):
    make_corpus()
    with pytest.raises(RankError, match=r"training\.seq_len: 2048 on rank 0; 128 on rank 1"):
        run_ranks(_train, 2, 1, log_folder=tmp_path)
    assert "Building" not in (tmp_path / "rank_0.log").read_text()
