# SPDX-License-Identifier: BSD-3-Clause
"""Data sets, which TorchTitan 0.3 has by name, and whose positions its loaders save."""

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any

from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import get_worker_info
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, ChatDataset, HuggingFaceTextDataset

_OF_DATA = ("dataset", "dataset_path", "load_dataset_kwargs")


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
        if type(part) in (HuggingFaceTextDataset, ChatDataset) and isinstance(part._data, Dataset)
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
    assert info is not None
    for part in _titans_text(info.dataset):
        # Both: Titan shuffles the one into the other for each epoch (its text_datasets.py).
        share = split_dataset_by_node(part._original_data, worker, info.num_workers)
        part._data = part._original_data = share
    for part in getattr(info.dataset, "_datasets", [info.dataset]):
        if isinstance(part, HuggingFaceTextDataset | ChatDataset):
            _copy_positions(part)


def _copy_positions(data: Any) -> None:
    """Make a worker's data set of Titan's one whose positions do not change while they are sent.

    Titan hands out the very lists that it fills with the next documents (text_datasets.py), and the
    worker's queue pickles them later, in a thread: a resume would read those documents twice.
    """
    titans = type(data)

    def state_dict(self: Any) -> dict[str, Any]:
        return {name: copy.copy(value) for name, value in titans.state_dict(self).items()}

    data.__class__ = type(titans.__name__, (titans,), {"state_dict": state_dict})


def register_dataset(name: str, path: str, loader: Callable[[str], Any]) -> None:
    """Add to Titan's table of data sets what ``loader(path)`` returns: rows with "text"."""
    DATASETS[name] = DatasetConfig(path=path, loader=loader, sample_processor=itemgetter("text"))


def data_facts(config: Any, loader: Any) -> dict[str, str]:
    """Facts on which a position in a loader's data depends: names and paths, size, readers.

    A checkpoint has a position for each data-parallel rank, which Titan cannot split again.
    """
    names = [
        " ".join(str(v) for k in _OF_DATA if (v := getattr(source, k, None)))
        for source in getattr(config, "sources", None) or [config]
    ]
    workers = str(getattr(config, "num_workers", 0))
    ranks = str(getattr(loader, "dp_world_size", ""))
    return {"data": ", ".join(names), "size": _size(loader), "workers": workers, "ranks": ranks}


def other_data(saved: dict[str, str], now: dict[str, str]) -> str:
    """Differences between the data of a checkpoint and those of a run; data may have moved."""
    if (ranks := saved.get("ranks", now["ranks"])) != now["ranks"]:
        return f"{ranks} data-parallel rank(s), and this run has {now['ranks']}"
    if saved["workers"] != now["workers"]:
        return f"dataloader.num_workers = {saved['workers']}, and this run has {now['workers']}"
    by = "size" if saved["size"] and now["size"] else "data"
    if saved[by] == now[by]:
        return ""
    was, has = (f"{f['data']} ({f['size'] or 'of unknown size'})" for f in (saved, now))
    return f"the data {was}, and this run has {has}"


def may_end(config: Any) -> bool:
    """True if the data of a loader can end; those of a loader of another kind may."""
    sources = getattr(config, "sources", None) or [config]
    return not all(getattr(s, "infinite", False) for s in sources)


def together(
    batches: Iterable[Any], group: int, all_have: Callable[[bool], bool], *, alike: bool
) -> Iterator[Any]:
    """The batches of a loader, as long as every rank has another ``group`` of them.

    Ranks get as many documents each, or one less, and not as many tokens. A step takes a group,
    and the ranks agree once for all of it: ``all_have`` says whether every rank has one, from
    whether this one has. With ``alike`` a last batch of fewer samples is left out, as what takes
    one shape only needs it.
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
