# SPDX-License-Identifier: BSD-3-Clause
# pyrefly: ignore-errors
"""Data sets and their loaders: 0.3 has names for them, main has Python objects.

A TOML file and a command line can only name a data set. So on main a loader of ours has the keys
``dataset`` and ``dataset_path`` of 0.3, and builds what the name stands for in Titan's table.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from torchtitan.config import derive
from torchtitan.hf_datasets.text_datasets import DATASETS

from titan_ext.base.messages import did_you_mean

try:  # 0.3
    from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
    from torchtitan.hf_datasets import DatasetConfig

    def _dataset(path: str, loader: Callable[[str], Any]) -> Any:
        return DatasetConfig(path=path, loader=loader, sample_processor=itemgetter("text"))

    def _named(loader: Any) -> Any:
        return loader

    def ranks_of_data(loader: Any) -> int | None:
        """The data-parallel ranks whose positions a loader saves; None if it saves none for each.

        A checkpoint has ``dataloader.dp_rank_N`` for each, which Titan cannot split again.
        """
        return loader.dp_world_size if isinstance(loader, ParallelAwareDataloader) else None

except ModuleNotFoundError:  # main
    from torchtitan.components.data import ConcatThenSplitPackingConfig, GrainDataLoader
    from torchtitan.components.data.dataset import SingleDatasetConfig
    from torchtitan.components.data.loader import BaseDataLoader
    from torchtitan.hf_datasets.text_datasets import TextProcessor

    @dataclass(frozen=True)
    class _Source:
        path: str
        loader: Callable[[str], Any]

        def build(self, *, dataset_iteration_policy: Any) -> Any:
            return self.loader(self.path)

    def _dataset(path: str, loader: Callable[[str], Any]) -> Any:
        return SingleDatasetConfig(source=_Source(path, loader), processor=TextProcessor.Config())

    class NamedDataLoader(GrainDataLoader):
        """Titan's loader of a data set that has a name, packed as in Titan's own configs."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            dataset: str = "c4_test"
            """Dataset to use, by its name in Titan's table (its docs/datasets.md)"""

            dataset_path: str | None = None
            """Where it is, if not where the table says: a folder, or a name on the hub"""

            # As in Titan's; a file cannot have the other fields of that.
            seed: int = 42
            shuffle: bool = True
            repeat: bool = True
            streaming_shuffle_buffer_size: int = 1_000
            num_prefetch_batches: int = 2

        def __init__(self, config: Config, **built_with: Any) -> None:
            dataset = ConcatThenSplitPackingConfig(dataset=_found(config))
            super().__init__(derive(config, GrainDataLoader.Config, dataset=dataset), **built_with)

    def _found(config: NamedDataLoader.Config) -> SingleDatasetConfig:
        if config.dataset not in DATASETS:
            raise ValueError(
                f"dataloader.dataset is {config.dataset!r}; expected one of {', '.join(DATASETS)}"
                f"{did_you_mean(config.dataset, DATASETS)}"
            )
        found = DATASETS[config.dataset]
        if config.dataset_path is None:
            return found
        changes = {"path": config.dataset_path}
        if getattr(found.source, "load_dataset_kwargs", {}):
            changes["load_dataset_kwargs"] = {}  # they say which files of the other path
        return replace(found, source=replace(found.source, **changes))

    def _named(loader: Any) -> Any:
        packed = getattr(loader, "dataset", None)
        if type(loader) is GrainDataLoader.Config and type(packed) is ConcatThenSplitPackingConfig:
            name = next((n for n, dataset in DATASETS.items() if dataset is packed.dataset), "")
            named = derive(loader, NamedDataLoader.Config, dataset=name)
            # Unless it has a collator or options for reading of its own.
            if name and derive(named, GrainDataLoader.Config, dataset=packed) == loader:
                return named
        return loader

    def ranks_of_data(loader: Any) -> int | None:
        return loader._dp_world_size if isinstance(loader, GrainDataLoader) else None


def register_dataset(name: str, path: str, loader: Callable[[str], Any]) -> None:
    """Add to Titan's table of data sets what ``loader(path)`` returns: rows with "text"."""
    DATASETS[name] = _dataset(path, loader)


def named_data(config: Any) -> dict[str, Any]:
    """The sections of a trainer's config in which a loader gets a name for its data set, by field.

    Nothing on 0.3. On main a loader of other objects than Titan's table has stays as it is.
    """
    changed = {}
    if (loader := _named(config.dataloader)) is not config.dataloader:
        changed["dataloader"] = loader
    validator = config.validator
    if (loader := _named(validator.dataloader)) is not validator.dataloader:
        changed["validator"] = replace(validator, dataloader=loader)
    return changed
