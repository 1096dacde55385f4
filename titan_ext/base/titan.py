# SPDX-License-Identifier: BSD-3-Clause
# pyrefly: ignore-errors
"""What TorchTitan's main has moved since 0.3, imported from where it is, or has mended.

titan_ext imports all other names from TorchTitan directly: 0.3 and main have them in one place
(``python -m tests.titan_main`` compares). When 0.3 is no longer served, this file goes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.hf_datasets.text_datasets import DATASETS

__all__ = [
    "BaseDataLoader",
    "ParallelAwareDataloader",
    "apply_cp_to_forward",
    "keep_frozen",
    "register_dataset",
    "resolve_fsdp_mesh",
    "resolve_sparse_fsdp_mesh",
    "tokens_of_microbatch",
    "validate_config",
]

try:  # 0.3
    from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
    from torchtitan.distributed.context_parallel import apply_cp_to_forward
    from torchtitan.distributed.full_dtensor import (
        resolve_fsdp_mesh,
        resolve_sparse_fsdp_mesh,
        validate_config,
    )
    from torchtitan.hf_datasets import DatasetConfig

    def _dataset(path: str, loader: Callable[[str], Any]) -> Any:
        return DatasetConfig(path=path, loader=loader, sample_processor=itemgetter("text"))

except ModuleNotFoundError:  # main of August 2026
    from torchtitan.components.data.dataset import SingleDatasetConfig
    from torchtitan.components.data.loader import BaseDataLoader
    from torchtitan.distributed.fsdp import resolve_fsdp_mesh, resolve_sparse_fsdp_mesh
    from torchtitan.hf_datasets.text_datasets import TextProcessor

    ParallelAwareDataloader: Any = ()  # no class: nothing is an instance of it

    # Main refuses context parallelism under partial_dtensor, and both in the model's config.
    apply_cp_to_forward: Any = None

    def validate_config(parallel_dims: ParallelDims, model: Any) -> None: ...

    @dataclass(frozen=True)
    class _Source:
        path: str
        loader: Callable[[str], Any]

        def build(self, *, dataset_iteration_policy: Any) -> Any:
            return self.loader(self.path)

    def _dataset(path: str, loader: Callable[[str], Any]) -> Any:
        return SingleDatasetConfig(source=_Source(path, loader), processor=TextProcessor.Config())


def register_dataset(name: str, path: str, loader: Callable[[str], Any]) -> None:
    """Add to Titan's table of data sets what ``loader(path)`` returns: rows with "text"."""
    DATASETS[name] = _dataset(path, loader)


def tokens_of_microbatch(training: Any, parallelism: Any = None) -> tuple[int, int]:
    """Tokens of a microbatch on a data-parallel rank, and of one of its sequences.

    Args:
        training: Titan's ``TrainingConfig``.
        parallelism: Titan's ``ParallelismConfig`` if a pipeline splits the batch.
    """
    if hasattr(training, "max_context_length"):  # main counts tokens, a pipeline's included
        return training.num_tokens_per_microbatch_per_dp_rank, training.max_context_length
    batch = training.local_batch_size
    if parallelism is not None:
        batch = parallelism.pipeline_parallel_microbatch_size
    return batch * training.seq_len, training.seq_len


@contextmanager
def keep_frozen(model: nn.Module) -> Iterator[None]:
    """Around a pass that replaces parameters: freeze again, by name, what was frozen.

    With the SPMD backend ``spmd_types`` TorchTitan 0.3.0 replaces each parameter by a trainable one
    when it distributes it, so LoRA would train the whole model. Later versions keep the flag (their
    PR 4267); there this changes nothing.
    """
    frozen = [
        name
        for name, param in model.named_parameters(remove_duplicate=False)
        if not param.requires_grad
    ]
    yield
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
