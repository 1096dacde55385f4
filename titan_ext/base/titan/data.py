# SPDX-License-Identifier: BSD-3-Clause
# pyrefly: ignore-errors
"""Data sets and their loaders: 0.3 has names for them, main has Python objects.

A TOML file and a command line can only name a data set. So on main a loader of ours has the keys
``dataset`` and ``dataset_path`` of 0.3, and builds what the name stands for in Titan's table.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from typing import Any

from torch.utils.data import get_worker_info
from torchtitan.config import derive
from torchtitan.hf_datasets.text_datasets import DATASETS

from titan_ext.base.messages import did_you_mean

_OF_DATA = ("dataset", "dataset_path", "load_dataset_kwargs")

try:  # 0.3
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node
    from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import ChatDataset, HuggingFaceTextDataset

    def _dataset(path: str, loader: Callable[[str], Any]) -> Any:
        return DatasetConfig(path=path, loader=loader, sample_processor=itemgetter("text"))

    def _named(loader: Any) -> Any:
        return loader

    def ranks_of_data(loader: Any) -> int | None:
        """The data-parallel ranks whose positions a loader saves; None if it saves none for each.

        A checkpoint has ``dataloader.dp_rank_N`` for each, which Titan cannot split again.
        """
        return loader.dp_world_size if isinstance(loader, ParallelAwareDataloader) else None

    def split_among_workers(loader: Any) -> None:
        """Give each worker process of a loader documents of its own.

        Titan splits text by data-parallel rank, and every worker would read all of the rank's.
        Text that streams is split by ``datasets``, and a loader with an init function by that.

        Raises ValueError where data that repeat have no document for each: Titan would look for
        one without end.
        """
        if not isinstance(loader, ParallelAwareDataloader) or loader.worker_init_fn is not None:
            return
        workers = max(1, loader.num_workers)
        for part in _titans_text(loader.dataset):
            if part.infinite and len(part._original_data) < workers:
                raise ValueError(
                    f"dataloader.dataset has {len(part._original_data)} document(s) for this rank "
                    f"and dataloader.num_workers is {loader.num_workers}: a reader without one "
                    "would wait for ever. Expected more documents, fewer workers or fewer "
                    "data-parallel ranks."
                )
        loader.worker_init_fn = _keep_share

    def _titans_text(data: Any) -> list[Any]:
        """Data sets of Titan's whose documents are at hand; a subclass may split by itself."""
        return [
            part
            for part in getattr(data, "_datasets", [data])
            if type(part) in (HuggingFaceTextDataset, ChatDataset)
            and isinstance(part._data, Dataset)
        ]

    def _size(loader: Any) -> str:
        """Documents and bytes of the data of a loader, the same wherever it lies; "" if unknown."""
        sizes = []
        for part in _titans_text(getattr(loader, "dataset", None)):
            data = part._original_data
            if (split := (data.info.splits or {}).get(str(data.split))) is None:
                return ""
            sizes.append(f"{split.num_examples} documents of {split.num_bytes} bytes")
        return ", ".join(sizes)

    def _keep_share(worker: int) -> None:
        """In a worker, before it takes up a saved position, which is one in its share."""
        info = get_worker_info()
        for part in _titans_text(info.dataset):
            share = split_dataset_by_node(part._original_data, worker, info.num_workers)
            part._data = part._original_data = share

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

    def split_among_workers(loader: Any) -> None:
        """Nothing: Grain's workers read a part each."""

    def _size(loader: Any) -> str:
        return ""


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


def data_facts(config: Any, loader: Any) -> dict[str, str]:
    """What a position in the data of a loader depends on: names and paths, size, workers."""
    names = [
        " ".join(str(v) for k in _OF_DATA if (v := getattr(source, k, None)))
        for source in getattr(config, "sources", None) or [config]
    ]
    workers = str(getattr(config, "num_workers", 0))
    return {"data": ", ".join(names), "size": _size(loader), "workers": workers}


def other_data(saved: dict[str, str], now: dict[str, str]) -> str:
    """How the data of a checkpoint differ from those of a run; data may have moved."""
    if saved["workers"] != now["workers"]:
        return f"dataloader.num_workers = {saved['workers']}, and this run has {now['workers']}"
    by = "size" if saved["size"] and now["size"] else "data"
    if saved[by] == now[by]:
        return ""
    was, has = (f"{f['data']} ({f['size'] or 'of unknown size'})" for f in (saved, now))
    return f"the data {was}, and this run has {has}"


def may_end(config: Any) -> bool:
    """Whether the data of a loader can end; those of a loader of another kind may."""
    sources = getattr(config, "sources", None) or [config]
    return not all(getattr(s, "infinite", getattr(s, "repeat", False)) for s in sources)


def together(
    batches: Iterable[Any], group: int, all_have: Callable[[bool], bool], *, alike: bool
) -> Iterator[Any]:
    """The batches of a loader, as long as every rank has another ``group`` of them.

    Args:
        batches: Of this rank. Ranks get as many documents each, or one less, and not as many
            tokens.
        group: How many a step takes; the ranks agree once for all of them.
        all_have: Whether every rank has a group, from whether this one has.
        alike: Leave out a last batch of fewer samples, as what takes one shape only needs it.
    """
    rest = iter(batches)
    samples = 0
    while True:
        taken = list(islice(rest, group))
        sizes = {len(labels) for _, labels in taken} if alike else {0}
        samples = samples or max(sizes, default=0)
        if not all_have(len(taken) == group and sizes == {samples}):
            return
        yield from taken
