"""The data of a run: each document once, an end that all ranks agree on, and no other data set."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.tools.logging import init_logger

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, make_config, patched
from titan_ext.base import no_accelerator
from titan_ext.base.run_folder import whole_checkpoint_steps
from titan_ext.base.stdlib_corpus import default_tokenizer_path, make_corpus
from titan_ext.base.titan.data import data_facts, may_end, split_among_workers, together
from titan_ext.run.checkpoints import CheckpointManager


def _text(folder: Path, words: list[int]) -> HuggingFaceTextDataLoader.Config:
    """A loader of one document for each number of words, which ends."""
    folder.mkdir(exist_ok=True)
    lines = (" ".join(f"word{i}of{n}" for n in range(count)) for i, count in enumerate(words))
    (folder / "text.txt").write_text("\n".join(lines))
    return HuggingFaceTextDataLoader.Config(
        dataset="c4_test", dataset_path=str(folder), infinite=False
    )


class _Words:
    """A tokenizer that takes no time: a word is a token."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(digits) for digits in re.findall(r"word(\d+)", text)]


def _loader(config: HuggingFaceTextDataLoader.Config, workers: int, tokenizer: Any = None) -> Any:
    config.num_workers = workers
    path = str(default_tokenizer_path())
    tokenizer = tokenizer or HuggingFaceTokenizer.Config().build(tokenizer_path=path)
    loader = config.build(
        dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=16, local_batch_size=1
    )
    split_among_workers(loader)
    return loader


def _samples(batches: Any) -> list[str]:
    return [hashlib.sha256(labels.numpy().tobytes()).hexdigest() for _, labels in batches]


def test_workers_read_a_share_each_and_go_on_with_it(tmp_path: Path):
    make_corpus()
    config = _text(tmp_path / "text", [40] * 6)
    whole = _samples(_loader(config, 2))
    assert len(whole) == len(set(whole)) > 10
    assert data_facts(config, _loader(config, 2))["size"].startswith("6 documents of ")
    interrupted = _loader(config, 2)
    batches = iter(interrupted)
    first = _samples(next(batches) for _ in range(5))
    resumed = _loader(config, 2)
    resumed.load_state_dict(interrupted.state_dict())
    assert first + _samples(resumed) == whole
    assert len(_samples(_loader(config, 0))) - len(whole) in (0, 1)  # a rest of each worker
    config.infinite = True
    with pytest.raises(ValueError, match=r"has 6 document\(s\) .* and dataloader.num_workers is 7"):
        _loader(config, 7)


def test_a_position_is_that_of_its_batch(tmp_path: Path):
    """Not that of batches which a worker has read since, as it does when tokens are quick."""
    config = _text(tmp_path / "text", [17] * 6)
    whole = [labels.tolist() for _, labels in _loader(config, 1, _Words())]
    interrupted = _loader(config, 1, _Words())
    batches = iter(interrupted)
    first = [next(batches)[1].tolist() for _ in range(2)]
    resumed = _loader(config, 1, _Words())
    resumed.load_state_dict(interrupted.state_dict())
    assert first + [labels.tolist() for _, labels in resumed] == whole


def test_data_end_unless_they_repeat():
    for infinite in (True, False):
        assert may_end(HuggingFaceTextDataLoader.Config(infinite=infinite)) != infinite
    assert may_end(object())


def test_a_pipeline_gets_batches_of_one_shape():
    batches = [({}, torch.ones(samples, 8)) for samples in (2, 2, 2, 1)]
    for alike, wanted in ((True, 2), (False, 4)):
        assert len(list(together(batches, 2, bool, alike=alike))) == wanted
        assert not list(together(batches[:1], 2, bool, alike=alike))


RUN = Run(
    model="deepseek_v3_mtp",
    parallelize="submodule",
    world=2,
    ep=2,
    layers=2,
    seq_len=32,
    steps=99,
)


def test_ranks_end_together_and_save_the_last_step(tmp_path: Path):
    """Rank 1 has fewer batches, to train and to validate with; the model has an MTP block."""
    make_corpus()
    data = _text(tmp_path / "text", [20] * 4 + [10] * 4)
    results = run_ranks(_train_until_the_end, 2, tmp_path, data, log_folder=tmp_path / "logs")
    steps, biases, samples = zip(*results, strict=True)
    assert steps[0] == steps[1] > 2
    assert whole_checkpoint_steps(tmp_path / "checkpoint") == [steps[0]]
    (start,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert (start["ending"], start["step"]) == ("finished", steps[0])
    assert all(any(bias) for bias in biases[0])
    seen = [*samples[0], *samples[1]]
    assert len(seen) == len(set(seen)) > 2 * steps[0]
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert f"The data of 1 of 2 data-parallel rank(s) end before step {steps[0] + 1}" in log
    assert log.count("Validation ends with the data of 1 of 2 data-parallel rank(s)") == 1


def _train_until_the_end(folder: Path, data: Any) -> tuple[int, list[list[float]], list[str]]:
    init_logger()
    no_accelerator.enable()
    config: Any = make_config(RUN, folder)
    config.dataloader = data
    config.training.local_batch_size = 1
    config.training.global_batch_size = 4  # two batches a step
    config.validator.enable = True
    config.validator.freq = 2
    config.validator.dataloader = data
    config.checkpoint = CheckpointManager.Config(enable=True, last_save_model_only=False)
    with patched(RUN), no_accelerator.layout_independent_init():
        trainer = config.build()
    samples: list[str] = []
    forward = trainer.forward_backward_step

    def noted(**arguments: Any) -> Any:
        samples.extend(_samples([(None, arguments["labels"])]))
        return forward(**arguments)

    trainer.forward_backward_step = noted
    trainer.train()
    (model,) = trainer.model_parts
    blocks = [*model.layers.values(), *model.mtp_layers]
    biases = [b.moe.expert_bias_E.tolist() for b in blocks if b.moe_enabled]
    step = trainer.step
    trainer.close()
    dist.barrier()
    return step, biases, samples
