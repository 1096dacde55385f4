"""Titan's trainer with titan_ext's configuration: the home of our keys and, later, our policies.

A small subclass, the way that TorchTitan documents for adding configuration (its
docs/extension.md). Training itself, checkpoints, metrics and data loading stay Titan's.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from torchtitan.config import ParallelismConfig as TitanParallelismConfig
from torchtitan.trainer import Trainer as TitanTrainer

from titan_ext import no_accelerator
from titan_ext.configs import ParallelismConfig
from titan_ext.data.stdlib_corpus import STDLIB_CORPUS, make_corpus, register_stdlib_corpus
from titan_ext.specs import extend_model_spec

__all__ = ["Trainer", "extend_config"]


class Trainer(TitanTrainer):
    """Titan's trainer; on a machine with no accelerator it trains on the CPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanTrainer.Config):
        # A narrower type for a field of the parent: tyro offers our flags for it.
        parallelism: ParallelismConfig = field(  # pyrefly: ignore[bad-override-mutable-attribute]
            default_factory=ParallelismConfig
        )

        def __post_init__(self) -> None:
            no_accelerator.adapt_config(self)
            TitanTrainer.Config.__post_init__(self)

    def __init__(self, config: Config) -> None:
        has_no_accelerator = no_accelerator.enable()
        register_stdlib_corpus()
        if config.dataloader.dataset == STDLIB_CORPUS:
            make_corpus()  # before Titan looks for the tokenizer
        with no_accelerator.layout_independent_init():
            super().__init__(config)
        if has_no_accelerator:
            # Titan leaves the MFU out of its metrics where quantisation makes it meaningless, and
            # has no other switch for it. There is no peak to compare a CPU with.
            self.metrics_processor.has_quantization = True


def extend_config(config: TitanTrainer.Config) -> Trainer.Config:
    """Turn a Titan trainer config into ours: its values, our keys, our model spec.

    Args:
        config: A fresh config, as Titan's config registries return; its parts are shared with the
            result.

    Raises:
        ValueError: if it belongs to a trainer subclass of its own, or has no model that we serve.
    """
    if type(config) is not TitanTrainer.Config:
        raise ValueError(
            f"cannot extend {type(config).__qualname__}: only configs of Titan's own trainer "
            "(torchtitan.trainer.Trainer.Config) can be extended."
        )
    if config.model_spec is None:
        raise ValueError("cannot extend a trainer config that has no model_spec.")
    values = _values_of(config)
    values["model_spec"] = extend_model_spec(config.model_spec)
    values["parallelism"] = _extend_parallelism(config.parallelism)
    return Trainer.Config(**values)


def _extend_parallelism(parallelism: TitanParallelismConfig) -> ParallelismConfig:
    if isinstance(parallelism, ParallelismConfig):
        return parallelism
    return ParallelismConfig(**_values_of(parallelism))


def _values_of(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config)}
