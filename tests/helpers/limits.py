"""The checks of a section of a config, without the rest of it."""

from torchtitan.config import ParallelismConfig, TrainingConfig

from titan_ext.base.messages import Mistakes
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.parallelize.limits import wrong_together


def check_parallelism(
    parallelism: ParallelismConfig,
    training: TrainingConfig | None = None,
    *,
    compiled: bool = False,
) -> None:
    """Raise ValueError for a value that a key cannot have, or keys that do not go together."""
    settings = FSDPSettings.from_config(parallelism, training)
    Mistakes(wrong_together(settings, parallelism, compiled=compiled)).raise_all()
