"""Titan's trainer with titan_ext's configuration: the home of our keys and, later, our policies.

A small subclass, the way that TorchTitan documents for adding configuration (its
docs/extension.md). Training itself, checkpoints, metrics and data loading stay Titan's.
"""

import functools
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import tyro
from torchtitan.config import ParallelismConfig as TitanParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, SelectiveAC
from torchtitan.trainer import Trainer as TitanTrainer

from titan_ext import no_accelerator
from titan_ext.activation_checkpoint import FP8AC, receipt_of
from titan_ext.agreement import check_agreement
from titan_ext.configs import ParallelismConfig
from titan_ext.data.stdlib_corpus import STDLIB_CORPUS, make_corpus, register_stdlib_corpus
from titan_ext.specs import check_model_limits, extend_model_spec

__all__ = ["Trainer", "extend_config"]


class Trainer(TitanTrainer):
    """Titan's trainer; on a machine with no accelerator it trains on the CPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanTrainer.Config):
        # A narrower type for a field of the parent: tyro offers our flags for it.
        parallelism: ParallelismConfig = field(  # pyrefly: ignore[bad-override-mutable-attribute]
            default_factory=ParallelismConfig
        )
        # Titan's choices and one more name on the command line.
        activation_checkpoint: (  # pyrefly: ignore[bad-override-mutable-attribute]
            ActivationCheckpointingConfig | Annotated[FP8AC.Config, tyro.conf.subcommand("fp8")]
        ) = field(default_factory=SelectiveAC.Config)

        def __post_init__(self) -> None:
            if self.model_spec is not None:
                check_model_limits(self.model_spec.name, self.parallelism)
            no_accelerator.adapt_config(self)
            self._check_activation_checkpoint()
            TitanTrainer.Config.__post_init__(self)

        def _check_activation_checkpoint(self) -> None:
            compiled = self.compile.enable and "model" in self.compile.components
            if compiled and isinstance(self.activation_checkpoint, FP8AC.Config):
                raise ValueError(
                    'activation_checkpoint.policy "fp8" does not run under torch.compile yet: '
                    "expected compile.enable = false, or compile.components without model."
                )

    def __init__(self, config: Config) -> None:
        self._receipt_is_logged = False
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

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        if not self._receipt_is_logged and isinstance(
            self.config.activation_checkpoint, FP8AC.Config
        ):
            receipt = receipt_of(self.model_parts)
            self.metrics_processor.logger.log(receipt.metrics(), self.step)
            self._receipt_is_logged = True

    def init_distributed(self) -> ParallelDims:
        parallel_dims = super().init_distributed()
        if self.config.comm.mode not in ("fake_backend", "local_tensor"):
            check_agreement(self.config)
        return parallel_dims


def extend_config(config: TitanTrainer.Config) -> Trainer.Config:
    """Turn a Titan trainer config into ours: its values, our keys, our model spec.

    Args:
        config: A fresh config, as Titan's config registries return; its parts are shared with the
            result. One that is ours already is returned as it is.

    Raises:
        ValueError: if it belongs to a trainer of its own, or has no model that we serve.
    """
    if isinstance(config, Trainer.Config):
        return config
    if config._owner is not TitanTrainer:
        owner = config._owner.__qualname__ if config._owner else type(config).__qualname__
        raise ValueError(
            f"cannot extend a config of {owner}: titan_ext extends configs of Titan's own trainer "
            "(torchtitan.trainer.Trainer), and this one has a training loop of its own."
        )
    if config.model_spec is None:
        raise ValueError("cannot extend a trainer config that has no model_spec.")
    values = _values_of(config)
    values["model_spec"] = extend_model_spec(config.model_spec)
    values["parallelism"] = _extend_parallelism(config.parallelism)
    return _extended_class(type(config))(**values)


@functools.cache
def _extended_class(titan_class: type[TitanTrainer.Config]) -> type[Trainer.Config]:
    """Our config class for a class of Titan's, with the checks that a subclass of it adds."""
    if titan_class is TitanTrainer.Config:
        return Trainer.Config

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config, titan_class):  # type: ignore[misc,valid-type]
        def __post_init__(self) -> None:
            Trainer.Config.__post_init__(self)
            titan_class.__post_init__(self)

    return Config


def _extend_parallelism(parallelism: TitanParallelismConfig) -> ParallelismConfig:
    if isinstance(parallelism, ParallelismConfig):
        return parallelism
    return ParallelismConfig(**_values_of(parallelism))


def _values_of(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config)}
