"""Values and degrees that no run can have are refused in words, before any process group."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from tests.helpers.training import Run, make_config, titan_config
from titan_ext.base.run_check import world_size
from titan_ext.parallelize.limits import _LIMITS, value_of, wrong_degrees, wrong_values
from titan_ext.run.trainer import Trainer, extend_config

REGION = r"expert_parallel_degree is {}; it has to divide {}, the ranks of one pipeline stage .* {}"


def _config(**degrees: Any) -> Trainer.Config:
    config = extend_config(titan_config("deepseek_v3"))  # 8 experts
    for key, degree in degrees.items():
        setattr(config.parallelism, f"{key}_degree", degree)
    return config


def test_muon_wants_whole_experts(tmp_path: Path):
    config = make_config(Run(parallelize="block", optimizer="muon"), tmp_path)
    config.training.global_batch_size = -1
    assert list(wrong_degrees(config, 8)) == []
    (wrong,) = wrong_degrees(config, 16)
    assert "16 ranks share 8 experts, so FSDP shards dim 1" in wrong
    assert "which DistMuon does not support; expected another one, or copies" in wrong
    config.parallelism.expert_parallel_degree = 2
    assert len(list(wrong_degrees(config, 16))) == 1
    config.parallelism.data_parallel_replicate_degree = 2
    assert list(wrong_degrees(config, 16)) == []


def test_each_limit_is_of_a_key():
    """One that is not there would pass. Values out of range are in refusals.md."""
    config = _config()
    for key in _LIMITS:
        section, _, name = key.rpartition(".")
        assert hasattr(value_of(config, section) if section else config, name), key
    config.training.steps = cast(Any, 2.5)
    config.checkpoint.keep_latest_k = cast(Any, float("inf"))
    assert list(wrong_values(config)) == [
        "training.steps is 2.5; expected 1 or more.",
        "checkpoint.keep_latest_k is inf; expected 0 or more.",
    ]


def test_the_number_of_ranks_is_titans(monkeypatch: pytest.MonkeyPatch):
    config = _config()
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("NGPU", raising=False)
    assert world_size(config) is None
    monkeypatch.setenv("NGPU", "512")
    assert world_size(config) == 512
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert world_size(config) == 4
    config.comm.mode = "fake_backend"
    assert world_size(config) == 512


def test_a_config_made_in_python_is_refused_before_a_process_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=REGION.format(8, 4, "1, 2, 4")):
        _config(expert_parallel=8).build()
    # And so says the config, as soon as it is made.
    with pytest.raises(ValueError, match=r"the number of experts; expected one of 1, 2, 4\.$"):
        replace(_config(), parallelism=_config(expert_parallel=3).parallelism)
    assert not dist.is_initialized()


def test_every_config_of_titan_passes():
    config = _config()
    assert list(wrong_values(config)) == []
    config.training.max_norm = float("inf")  # no clipping
    config.lr_scheduler.decay_ratio = None
    config.training.global_batch_size = -1
    assert list(wrong_values(config)) == []
