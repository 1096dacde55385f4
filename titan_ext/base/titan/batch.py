# SPDX-License-Identifier: BSD-3-Clause
"""The size of a batch: TorchTitan 0.3 counts sequences, and its later main counts tokens.

A pass is one forward and backward of a data-parallel rank, with all microbatches of a pipeline.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

SEQUENCE = "training.seq_len"
"""Dotted key of the tokens of a sequence."""
LOCAL_BATCH, GLOBAL_BATCH = "training.local_batch_size", "training.global_batch_size"
MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
"""Dotted keys of a rank's batch, of a step's and of a pipeline's microbatch, in sequences."""


def tokens_of_microbatch(training: Any, parallelism: Any) -> tuple[int, int]:
    """Tokens of a microbatch on a data-parallel rank, and of one of its sequences."""
    batch = training.local_batch_size
    if parallelism.pipeline_parallel_degree > 1:
        batch = parallelism.pipeline_parallel_microbatch_size
    return batch * training.seq_len, training.seq_len


def microbatches_of_pass(training: Any, parallelism: Any) -> int:
    """Microbatches of a forward and backward of a rank: 1 without a pipeline."""
    if parallelism.pipeline_parallel_degree == 1:
        return 1
    return training.local_batch_size // parallelism.pipeline_parallel_microbatch_size


def wrong_global_batch(config: Any, ranks: int) -> Iterator[str]:
    """A message for the batch of a step that so many data-parallel ranks cannot have."""
    training = config.training
    total, local = training.global_batch_size, training.local_batch_size
    if total > 0 and total % (local * ranks):
        yield (
            f"{GLOBAL_BATCH} is {total}; expected a multiple of {local * ranks}: {LOCAL_BATCH} "
            f"{local} x {ranks} data-parallel ranks."
        )


def sequences_of_rank(training: Any) -> int:
    """Sequences of a pass of a data-parallel rank."""
    return training.local_batch_size


def passes_of_step(config: Any, data_ranks: int) -> int:
    """Passes of a rank whose gradients are accumulated."""
    training = config.training
    return max(training.global_batch_size // (training.local_batch_size * data_ranks), 1)


class Samples(NamedTuple):
    """Sequences of a job: tokens of one, and how many a microbatch and a step of all ranks have.

    A step has ``passes`` on each of ``ranks`` data ranks.
    """

    length: int
    microbatch: int
    step: int
    passes: int
    ranks: int


def make_small(
    config: Any, data_ranks: int, *, length: int, sequences: int, passes: int
) -> Samples:
    """Leave at most so many sequences of a rank, each at most so long, in place.

    With a pipeline each rank has two for each of its stages, in microbatches of one. A step has so
    many passes on each of ``data_ranks`` ranks.
    """
    training, parallelism = config.training, config.parallelism
    training.seq_len = min(training.seq_len, length)
    training.local_batch_size = min(training.local_batch_size, sequences)
    microbatch = training.local_batch_size
    if parallelism.pipeline_parallel_degree > 1:
        parallelism.pipeline_parallel_microbatch_size = microbatch = 1
        training.local_batch_size = 2 * parallelism.pipeline_parallel_degree
    training.global_batch_size = training.local_batch_size * data_ranks * passes
    return Samples(training.seq_len, microbatch, training.global_batch_size, passes, data_ranks)


def set_batch(config: Any, sequences: int) -> None:
    """Give a data-parallel rank's batch so many sequences, in place."""
    config.training.local_batch_size = sequences
