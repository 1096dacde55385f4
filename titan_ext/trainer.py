"""Titan's trainer with titan_ext's configuration: the home of our keys and, later, our policies.

A small subclass, the way that TorchTitan documents for adding configuration (its
docs/extension.md). Training itself, checkpoints, metrics and data loading stay Titan's.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import tyro
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan.config import DebugConfig as TitanDebugConfig
from torchtitan.config import ParallelismConfig as TitanParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, SelectiveAC
from torchtitan.trainer import Trainer as TitanTrainer

from titan_ext import no_accelerator
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.early_scores import use_early_scores
from titan_ext.activation_checkpoint.receipt_log import ReceiptLog
from titan_ext.configs import DebugConfig, ParallelismConfig, check_compiled, check_unit_names
from titan_ext.data.paths import check_assets_path, check_dataset_path
from titan_ext.data.stdlib_corpus import STDLIB_CORPUS, make_corpus, register_stdlib_corpus
from titan_ext.debug.watch import CollectiveWatch, NoWatch
from titan_ext.fsdp.memory.log import MemoryLog
from titan_ext.guards.agreement import check_agreement
from titan_ext.guards.checkpoints import check_checkpoint, one_clear_error
from titan_ext.guards.finite import refuse_gradients_that_are_not_finite
from titan_ext.guards.hf_export import check_export, check_export_layout
from titan_ext.guards.resume import check_excluded, check_resume, warn_of_saved_settings
from titan_ext.guards.stop import StopOnSignal, end_with_launcher, warn_of_restarts_that_hang
from titan_ext.lora.targets import check_lora_targets
from titan_ext.optim.container import OptimizersContainer, extend_optimizer
from titan_ext.optim.groups import check_param_groups
from titan_ext.run_folder import check_writable
from titan_ext.schedules import check_schedule
from titan_ext.specs import check_model_limits, extend_model_spec

__all__ = ["Trainer", "extend_config"]

_ONE_PROCESS_MODES = ("fake_backend", "local_tensor")


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
        debug: DebugConfig = field(  # pyrefly: ignore[bad-override-mutable-attribute]
            default_factory=DebugConfig
        )

        def __post_init__(self) -> None:
            if self.model_spec is not None:
                check_model_limits(self.model_spec.name, self.parallelism)
                check_unit_names(self.model_spec.model, self.parallelism)
                if isinstance(self.optimizer, OptimizersContainer.Config):
                    check_param_groups(self.optimizer, self.model_spec.model, self.parallelism)
            check_excluded(self)
            no_accelerator.adapt_config(self)
            self._check_compiled_and_checkpointed()
            check_schedule(
                self.parallelism,
                loss=self.loss,
                activation_checkpoint=self.activation_checkpoint,
                compiled=self._compiles_model(),
            )
            TitanTrainer.Config.__post_init__(self)
            if self.parallelism.fsdp_track_memory and not self.training.disable_cuda_graphs:
                raise ValueError(
                    "parallelism.fsdp_track_memory needs training.disable_cuda_graphs = true: "
                    "when a CUDA graph is replayed, FSDP does not run and there is nothing to see."
                )

        def _check_compiled_and_checkpointed(self) -> None:
            compiled = self._compiles_model()
            check_compiled(self.parallelism, compiled=compiled)
            if compiled and isinstance(self.activation_checkpoint, FP8AC.Config):
                self.activation_checkpoint.check_compiled()
            early = getattr(self.activation_checkpoint, "score_before_last_gemm", False)
            if early and self.model_spec is not None:
                use_early_scores(self.model_spec, self.parallelism)

        def _compiles_model(self) -> bool:
            return self.compile.enable and "model" in self.compile.components

    memory_log: MemoryLog | None = None

    def __init__(self, config: Config) -> None:
        end_with_launcher()
        warn_of_restarts_that_hang()
        _check_before_start(config)
        has_no_accelerator = no_accelerator.enable()
        register_stdlib_corpus()
        if config.dataloader.dataset == STDLIB_CORPUS:
            make_corpus()  # before Titan looks for the tokenizer
        check_assets_path(config.tokenizer, config.hf_assets_path)
        with no_accelerator.layout_independent_init():
            super().__init__(config)
        if has_no_accelerator:
            # Titan leaves the MFU out of its metrics where quantisation makes it meaningless, and
            # has no other switch for it. There is no peak to compare a CPU with.
            self.metrics_processor.has_quantization = True
        if config.parallelism.fsdp_track_memory:
            self.memory_log = MemoryLog(
                self,
                wrap=config.parallelism.fsdp_wrap,
                keep_replicated=config.parallelism.fsdp_keep_replicated,
            )
        self.receipts = ReceiptLog(self)
        self.watch.name_modules(self.model_parts)
        self.stop = StopOnSignal(self.checkpointer)
        refuse_gradients_that_are_not_finite(self)
        warn_of_saved_settings(self.optimizers)

    def init_distributed(self) -> ParallelDims:
        parallel_dims = super().init_distributed()
        if self.config.comm.mode not in _ONE_PROCESS_MODES:
            check_agreement(self.config)
        self.watch = _make_watch(self.config)
        return parallel_dims

    @record
    def train(self) -> None:
        with self.watch.run(), one_clear_error(self.config):
            check_checkpoint(self.config)
            check_resume(self)
            check_export_layout(self)
            super().train()
            self.checkpointer.maybe_wait_for_saving()  # an asynchronous save that failed is seen

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        memory = self.memory_log.step() if self.memory_log else contextlib.nullcontext()
        with self.watch.step(self.step), memory:
            super().train_step(data_iterator)
        self.receipts.after_step()

    def should_continue_training(self) -> bool:
        return super().should_continue_training() and not self.stop.now()


def _check_before_start(config: Trainer.Config) -> None:
    """Refuse what would fail after minutes on many ranks, while this is one process."""
    if config.model_spec is not None:
        check_lora_targets(config.model_spec.model, config)
    check_writable(config.dump_folder)
    check_dataset_path(config.dataloader)
    check_export(config)


def _make_watch(config: TitanTrainer.Config) -> CollectiveWatch | NoWatch:
    if not getattr(config.debug, "record_collectives", False):
        return NoWatch()
    if config.comm.mode in _ONE_PROCESS_MODES:
        raise ValueError(
            f"debug.record_collectives compares the ranks of a run; comm.mode is "
            f"{config.comm.mode!r}, which has one process. Expected 'default'."
        )
    return CollectiveWatch(
        config.dump_folder,
        timeout_s=config.comm.train_timeout_seconds,
        is_pipelined=config.parallelism.pipeline_parallel_degree > 1,
    )


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
    values["parallelism"] = _extend_section(
        config.parallelism, TitanParallelismConfig, ParallelismConfig
    )
    values["optimizer"] = extend_optimizer(config.optimizer)
    values["debug"] = _extend_section(config.debug, TitanDebugConfig, DebugConfig)
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


def _extend_section(section: Any, titan_class: type, our_class: type) -> Any:
    """A section of Titan's as ours; one that is ours already, or somebody else's, as it is."""
    return our_class(**_values_of(section)) if type(section) is titan_class else section


def _values_of(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config)}
