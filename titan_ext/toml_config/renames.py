"""Keys that TorchTitan's main branch has renamed since 0.3: the one alias table.

A file written for either version works where only the name differs. Where the unit differs too, a
number carried over would silently mean something else, so the key is refused with the way to
convert it. When titan_ext moves to the next TorchTitan, the table turns around.
"""

import functools

from torchtitan.tools.logging import logger

__all__ = ["OTHER_UNIT_ON_MAIN", "RENAMED_ON_MAIN", "say_renamed"]

RENAMED_ON_MAIN = {
    "training.max_context_length": "training.seq_len",
}
"""TorchTitan main's key to TorchTitan 0.3's key of the same meaning and unit."""

OTHER_UNIT_ON_MAIN = {
    "training.num_tokens_per_microbatch_per_dp_rank": (
        "counts tokens; TorchTitan 0.3 has training.local_batch_size, which counts sequences: "
        "write the number of tokens divided by training.seq_len"
    ),
    "training.num_tokens_per_train_step": (
        "counts tokens; TorchTitan 0.3 has training.global_batch_size, which counts sequences: "
        "write the number of tokens divided by training.seq_len"
    ),
    "parallelism.num_pp_microbatches": (
        "counts microbatches; TorchTitan 0.3 has parallelism.pipeline_parallel_microbatch_size, "
        "which counts sequences in one: write training.local_batch_size divided by the number of "
        "microbatches"
    ),
}
"""TorchTitan main's key to how 0.3 says it in another unit."""


@functools.cache
def say_renamed(file: str, key: str, today: str) -> None:
    """Log once that ``key`` of ``file`` was read as ``today``."""
    logger.info(f"{file}: {key} is TorchTitan main's name; read as {today}, its name in 0.3.")
