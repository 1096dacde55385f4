# SPDX-License-Identifier: BSD-3-Clause
"""Titan's trainer with titan_ext's configuration keys and the checks of a run.

A small subclass, as TorchTitan's docs/extension.md recommends for adding configuration. Training,
checkpoints, metrics and data loading stay Titan's. ``titan_ext.run.checks.RUN_CHECKS`` lists
the checks around training.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, cast

import torch
import tyro
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.config import derive
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, SelectiveAC
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer as TitanTrainer

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.compile import compiles_model
from titan_ext.activation_checkpoint.partition import check_backend
from titan_ext.base import no_accelerator
from titan_ext.base.messages import Mistakes, are_checked_later
from titan_ext.base.run_check import RunCheck, world_size
from titan_ext.base.stdlib_corpus import STDLIB_CORPUS, default_tokenizer_path, prepare_corpus
from titan_ext.base.titan.data import data_facts, may_end, split_among_workers, together
from titan_ext.base.titan.parallelism import ranks_without_data
from titan_ext.components.early_scores import with_early_scores, wrong_early_scores
from titan_ext.components.optim import OptimizersContainer, check_param_groups
from titan_ext.components.overlap import runs_in_halves
from titan_ext.components.validate import Validator
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.parallelize.keys import DebugConfig, ParallelismConfig
from titan_ext.parallelize.limits import (
    changed_exchanges,
    wrong_degrees,
    wrong_model,
    wrong_together,
    wrong_validation,
    wrong_values,
)
from titan_ext.parallelize.model_spec import extend_model_spec
from titan_ext.parallelize.recipe import check_names
from titan_ext.run.checkpoints import CheckpointManager
from titan_ext.run.checks import RUN_CHECKS
from titan_ext.run.stop import check_weights

_EXTENDED: dict[str, Any] = {
    "parallelism": ParallelismConfig,
    "optimizer": OptimizersContainer.Config,
    "checkpoint": CheckpointManager.Config,
    "debug": DebugConfig,
    "validator": Validator.Config,
}
"""The sections of which we have a subclass."""
_checked: set[int] = set()
"""Hashes of the configs that have passed their checks, values and all."""


class Trainer(TitanTrainer):
    """Titan's trainer; on a machine with no accelerator it trains on the CPU."""

    run_checks: ClassVar[Sequence[type[RunCheck]]] = RUN_CHECKS
    passes: list[dict[str, Any]] | None = None
    """Arguments of this step's passes, where a check may run them again; None if nobody asks."""
    data_ended = False
    """True if the run is over because a rank has no more data."""
    _has_trained = False

    @dataclass(kw_only=True, slots=True)
    class Config(TitanTrainer.Config):
        # A narrower type for a field of the parent: tyro offers our flags for it.
        parallelism: ParallelismConfig = field(  # pyrefly: ignore[bad-override-mutable-attribute]
            default_factory=ParallelismConfig
        )
        # Titan's choices and one more name on the command line.
        activation_checkpoint: (  # pyrefly: ignore[bad-override]
            ActivationCheckpointingConfig | Annotated[FP8AC.Config, tyro.conf.subcommand("fp8")]
        ) = field(default_factory=SelectiveAC.Config)
        checkpoint: BaseCheckpointManager.Config = field(default_factory=CheckpointManager.Config)
        debug: DebugConfig = field(  # pyrefly: ignore[bad-override-mutable-attribute]
            default_factory=DebugConfig
        )
        validator: Validator.Config = field(  # pyrefly: ignore[bad-override-mutable-attribute]
            default_factory=Validator.Config
        )

        def __post_init__(self) -> None:
            # A config is rebuilt on its way to the trainer: by tyro, and by Titan's build().
            if are_checked_later() or hash(repr(self)) in _checked:
                return
            self._check()
            _checked.add(hash(repr(self)))

        def _check(self) -> None:
            """Raise ValueError with every mistake; what needs the number of ranks comes later."""
            mistakes = Mistakes(wrong_values(self))
            mistakes.raise_all()  # the other checks compute with the values
            if any(wrong_degrees(self, ranks=None)):  # with the ranks it names what can fit
                mistakes.extend(wrong_degrees(self, world_size(self)))
            if self.hf_assets_path == STDLIB_CORPUS:  # by a flag; resolve() does it for files
                self.hf_assets_path = str(default_tokenizer_path())
            no_accelerator.adapt_config(self)
            self._leave_out_cuda_graphs()
            policy = self.activation_checkpoint
            checks: list[Callable[[], Iterable[str] | None]] = [
                self._wrong_keys,
                super(Trainer.Config, self).__post_init__,  # Titan's, and those of a subclass of it
                self._wrong_with_graphs,
                self._wrong_exchanges,
            ]
            if isinstance(policy, FP8AC.Config) and compiles_model(self.compile):
                checks.append(lambda: check_backend(self.compile.backend))
            if (spec := self.model_spec) is not None:
                checks.append(lambda: wrong_model(spec, self.parallelism, self.training))
                checks.append(lambda: wrong_validation(self))
                if isinstance(self.optimizer, OptimizersContainer.Config):
                    groups = self.optimizer
                    checks.append(lambda: check_param_groups(groups, spec.model, self.parallelism))
                if isinstance(policy, FP8AC.Config):
                    blocks = len(getattr(spec.model, "layers", ()))
                    checks.append(lambda: policy.wrong_exempt(blocks))
                if getattr(policy, "score_before_last_gemm", False):
                    checks.append(lambda: wrong_early_scores(spec))
            for check in checks:
                mistakes.note(check)
            mistakes.raise_all()

        def _wrong_keys(self) -> list[str]:
            if self.model_spec is None:
                return []
            wrong = wrong_together(
                FSDPSettings.from_config(self.parallelism, self.training),
                self.parallelism,
                compiled=compiles_model(self.compile),
                model=cast(Decoder.Config, self.model_spec.model),
                ac_config=self.activation_checkpoint,
                loss=self.loss,
            )
            if not (found := list(wrong)):
                check_names(self)
            return found

        def check_layout_of_graphs(self) -> None:
            """Raise ValueError if there are to be CUDA graphs that the layout forbids."""
            try:
                # Titan's own method, so that its reasons are not written down a second time.
                self._validate_cuda_graphs()
            except ValueError as error:
                axis = "pipeline" if self.parallelism.pipeline_parallel_degree > 1 else "expert"
                key = f"{axis}_parallel_degree"
                raise ValueError(
                    f"{str(error).partition('. ')[0]}, and parallelism.{key} is "
                    f"{getattr(self.parallelism, key)}. Expected "
                    f"training.disable_cuda_graphs = true, or parallelism.{key} = 1."
                ) from None

        def _leave_out_cuda_graphs(self) -> None:
            """Switch CUDA graphs off where Titan refuses them: they are on by default there."""
            try:
                self.check_layout_of_graphs()
            except ValueError as error:
                # The section may belong to other configs, too.
                self.training = replace(self.training, disable_cuda_graphs=True)
                why = str(error).partition(". ")[0]
                logger.info(f"training.disable_cuda_graphs is true: {why}.")

        def _wrong_exchanges(self) -> Iterator[str]:
            for key, value in changed_exchanges(self.parallelism).items():
                if self.debug.spmd_typechecking:
                    yield (
                        f'parallelism.{key} = "{value}" does not go with debug.spmd_typechecking = '
                        "true: the checker has no rule for an exchange in two steps."
                    )

        def _wrong_with_graphs(self) -> Iterator[str]:
            if self.training.disable_cuda_graphs:
                return
            policy = self.activation_checkpoint
            expected = "needs training.disable_cuda_graphs = true"
            if isinstance(policy, FP8AC.Config) and policy.offloads():
                yield (
                    f"activation_checkpoint.op_policies: offload {expected}: a capture ends where "
                    "all its streams are joined, and nobody waits for the copies to the host of a "
                    "pass's last two blocks."
                )
            if getattr(self.debug, "record_collectives", False):
                yield (
                    f"debug.record_collectives {expected}: a replayed CUDA graph runs no hook, so "
                    "the notes would end with its capture."
                )

    def __init__(self, config: Config) -> None:
        Mistakes(wrong_degrees(config, world_size(config))).raise_all()
        # All of this comes before Titan's __init__, which asks for the device, for the data set by
        # its name and for the tokenizer's files.
        has_no_accelerator = no_accelerator.enable()
        prepare_corpus(config)
        self.checks = [check() for check in self.run_checks]
        for check in self.checks:
            check.before_start(config)
        with no_accelerator.layout_independent_init():
            super().__init__(with_early_scores(config))
        if has_no_accelerator:
            # Titan leaves the MFU out of its metrics where quantisation makes it meaningless, and
            # has no other switch for it. There is no peak to compare a CPU with.
            self.metrics_processor.has_quantization = True
        split_among_workers(self.dataloader)
        for check in self.checks:
            check.after_build(self)

    def init_distributed(self) -> ParallelDims:
        parallel_dims = super().init_distributed()
        for check in self.checks:
            check.before_build(self.config)
        return parallel_dims

    # Titan's train has it, too, but not around our checks: torchrun's summary names their errors.
    @record
    def train(self) -> None:
        with contextlib.ExitStack() as stack:
            for check in self.checks:
                stack.enter_context(check.around_run(self))
            super().train()
            if self.data_ended:
                self._save_last()

    def batch_generator(self, data_iterable: Iterable[Any]) -> Iterator[Any]:
        if may_end(self.config.dataloader):
            group = self.gradient_accumulation_steps * self.num_pipeline_parallel_microbatches
            # Stages of a pipeline, CUDA graphs and halves take batches of one shape.
            dims, graphs = self.parallel_dims, not self.config.training.disable_cuda_graphs
            alike = dims.pp_enabled or graphs or runs_in_halves(dims)
            data_iterable = together(data_iterable, group, self._all_have_data, alike=alike)
        return super().batch_generator(data_iterable)

    def _all_have_data(self, mine: bool) -> bool:
        """True if every rank has the batches of a step; without them no rank begins it."""
        lacking, ranks = ranks_without_data(self.parallel_dims, mine=not mine, device=self.device)
        if lacking:
            self.data_ended = True
            logger.info(
                f"The data of {lacking} of {ranks} data-parallel rank(s) end before step "
                f"{self.step}; with dataloader.infinite = true they would begin again."
            )
        return not lacking

    def _save_last(self) -> None:
        """Save the step before the one that Titan has begun and canceled, as Titan saves its last.

        Raises ValueError where no step has been trained at all.
        """
        self.step -= 1
        if not self.step:
            raise ValueError(
                "the data do not have one step's batches for every data-parallel rank: nothing was "
                "trained. Expected more documents in dataloader.dataset, fewer ranks, or "
                "dataloader.infinite = true."
            )
        if self._has_trained:
            check_weights(self, "the data ended")
            self.checkpointer.save(self.step, last_step=True)

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        with contextlib.ExitStack() as stack:
            for check in self.checks:
                stack.enter_context(check.around_step(self))
            super().train_step(data_iterator)
            self._has_trained = True

    def forward_backward_step(self, **arguments: Any) -> torch.Tensor:
        if self.passes is not None:
            self.passes.append(arguments)
        return super().forward_backward_step(**arguments)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.step:  # as it loads, a checkpoint needs what is asked for, and Titan's have no data
            facts = data_facts(self.config.dataloader, self.dataloader)
            begun = {"load_step": str(self.config.checkpoint.load_step)}
            state["data"] = json.dumps(facts | begun)
        return state

    def should_continue_training(self) -> bool:
        wanted = super().should_continue_training()
        return wanted and not any(check.ends_run(self) for check in self.checks)


def extend_config(config: TitanTrainer.Config) -> Trainer.Config:
    """Turn a Titan trainer config into ours: its values, our keys, our model spec.

    ``config`` is a fresh one, as Titan's config registries return; its parts are shared with the
    result. One that is ours already is returned as it is. Raises ValueError if it belongs to a
    trainer of its own, or has no model that we serve.
    """
    if isinstance(config, Trainer.Config):
        return config
    return derive(config, extended_class(type(config)), **extended_sections(config))


def extended_sections(config: TitanTrainer.Config) -> dict[str, Any]:
    """The fields that ``extend_config`` changes in ``config``; none if it is ours already."""
    if isinstance(config, Trainer.Config):
        return {}
    if config._owner is not TitanTrainer:
        owner = config._owner.__qualname__ if config._owner else type(config).__qualname__
        raise ValueError(
            f"cannot extend a config of {owner}: titan_ext extends configs of Titan's own trainer "
            "(torchtitan.trainer.Trainer). This one has a training loop of its own."
        )
    if config.model_spec is None:
        raise ValueError("cannot extend a trainer config that has no model_spec.")
    changed: dict[str, Any] = {"model_spec": extend_model_spec(config.model_spec)}
    for name, ours in _EXTENDED.items():
        section = getattr(config, name)
        if type(section) is ours.__base__:  # Titan's; another class's stays as it is
            changed[name] = derive(section, ours)
    return changed


@functools.cache
def extended_class(titan_class: type[TitanTrainer.Config]) -> type[Trainer.Config]:
    """Our config class for a class of Titan's, with the checks that a subclass of it adds."""
    if issubclass(titan_class, Trainer.Config):
        return titan_class
    if titan_class is TitanTrainer.Config:
        return Trainer.Config

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config, titan_class):  # type: ignore[misc,valid-type]
        pass

    return Config
