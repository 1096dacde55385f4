"""A rank that has no row of a parameter: what looks at local tensors meets an empty one.

Any parameter with fewer rows than FSDP has ranks does that to some: a router of 64 experts on 128
ranks, an adapter of rank 8 on 16. Here 5 experts on 4 ranks leave the last rank none, and no row of
the router. The matrix holds each feature alone against stock, as do its checkpoints.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from tests.helpers.checkpointing import run_leg
from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, make_config
from titan_ext.base import no_accelerator
from titan_ext.base.stdlib_corpus import make_corpus, register_stdlib_corpus
from titan_ext.components.lora import export_adapters

RUN = Run(world=4, experts=5, layers=2, narrow=True, steps=2, parallelize="submodule")
ADAPTERS = replace(RUN, experts=6, ep=2, lora=2, ac="fp8")


def _train_watched(run: Run, folder: Path) -> list[int]:
    """Train with everything on that reads local tensors; return the elements of each shard."""
    no_accelerator.enable()
    register_stdlib_corpus()
    config: Any = make_config(run, folder)
    config.debug.record_collectives = True
    config.parallelism.fsdp_replicate = ["adapters"]
    config.parallelism.fsdp_quantize_frozen = ["*"]
    with no_accelerator.layout_independent_init():
        trainer = config.build()
    sizes = [p.to_local().numel() for m in trainer.model_parts for p in m.parameters()]
    trainer.train()
    trainer.close()
    dist.barrier()
    return sizes


@pytest.mark.slow
def test_watched(tmp_path: Path):
    make_corpus()
    ranks = run_ranks(_train_watched, 4, ADAPTERS, tmp_path, log_folder=tmp_path / "logs")
    assert 0 in ranks[3]
    assert 0 not in ranks[0]
    assert json.loads((tmp_path / "run.json").read_text())["starts"][-1]["ending"] == "finished"


@pytest.mark.slow
def test_adapters_of_fewer_rows_than_ranks_are_exported(tmp_path: Path):
    run_leg(replace(RUN, lora=2), tmp_path, interval=2, shared_stream=True)
    config: Any = make_config(replace(RUN, lora=2), tmp_path)
    config.checkpoint.enable = True
    export_adapters(config, tmp_path / "peft", "base")
    weights = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert {len(w) for name, w in weights.items() if "lora_A" in name} == {2}
