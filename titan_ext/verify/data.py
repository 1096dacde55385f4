# SPDX-License-Identifier: BSD-3-Clause
"""The job's own data loader, read at the job's real number of data ranks without a model.

A loader that gives two ranks the same text, or a resumed run the text of before, lets the loss fall
as ever. Titan's loaders take the data rank as an argument, and a user's own may ask the process
for it instead. So each loader here is built in the environment of its rank: RANK, a process group
that knows it, and random numbers as Titan seeds them. One process does all of that, a fork: what
hangs in it or starts threads leaves the others as they are.
"""

import contextlib
import copy
import functools
import os
import random
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.testing._internal.distributed.fake_pg  # noqa: F401 (the backend "fake")
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.components.loss import IGNORE_INDEX

from titan_ext.base.stdlib_corpus import prepare_corpus
from titan_ext.base.titan import batch
from titan_ext.base.titan.data import split_among_workers
from titan_ext.plan.stand_ins import as_rank
from titan_ext.run.start import Paths
from titan_ext.verify.judge import Verdict
from titan_ext.verify.ranks import Processes, RunError
from titan_ext.verify.small import Layout

_PATIENCE_S = 120.0
_MOST_RANKS, _LEAST_RANKS = 16, 4
_TOKENS = 2**22
"""Of all ranks together, about."""
_SEQUENCES = 8
"""Of a rank at least, in two batches at least: of fewer, text that a corpus has twice is half."""
_WINDOW = 16
"""Tokens of a mark: so many in the same order are the same text."""
_MARKS = 256
"""Marks of a long sequence, about."""
_FEW_MARKS = 4
"""A sequence with fewer is padding, or one word again and again."""
_SAME = 0.75
"""Of the marks of a sequence. Files of one pattern, as tables of encodings, have 0.6 in common."""
_SHARE, _SHARE_OF_RANK = 0.1, 0.5
"""Shares of sequences that two ranks have: fewer are what a corpus has twice."""
_AHEAD = 2, 256
"""How far one rank is read to see whether the text itself repeats: so many times what was looked
at, and at most so many sequences."""

Batch = tuple[dict[str, Any], torch.Tensor]
"""What a loader gives: "input" ``(B, L)`` and what else the model takes, and labels ``(B, L)``."""


def look_at_data(config: Any, layout: Layout, folder: Path, *, stock: bool) -> Verdict:
    """Read the job's first batches, and those after a save, on some of its data ranks.

    ``config`` and ``layout`` are of the job itself. A log and a checkpoint of the loaders go to
    ``folder``. With ``stock`` the loader is as TorchTitan's own trainer has it. Raises RunError if
    the data cannot be read here, and says why.
    """
    folder /= "data"
    serve = functools.partial(_look, _Data(config, layout, folder, stock))
    try:
        # With workers a loader has processes of its own.
        with Processes(1, serve, folder, patience_s=_PATIENCE_S, daemon=False) as process:
            (found,) = process.call(None)
    except RunError as error:
        raise RunError(f"in the process that reads, {error}") from None
    if isinstance(found, str):
        raise RunError(re.split("[;.] [Ee]xpected ", found)[0])
    return found


def _look(data: "_Data", rank: int, call: Any) -> Verdict | str:
    """The verdict, or why there is none."""
    try:
        return data.look()
    except Exception as error:  # whatever a loader, a tokenizer or a missing file raises
        traceback.print_exc()  # into the log
        said = str(error).strip().splitlines() or [""]
        return said[0] if type(error) is ValueError else f"{type(error).__name__}: {said[0]}"


class _Alone(TorchDispatchMode):
    """Refuses collectives, which do nothing in the process group of a rank that is alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise ValueError("the loader's ranks talk to each other")
        return func(*args, **(kwargs or {}))


@dataclass
class _Data:
    """The loaders of a job, whose own ``config`` and ``layout`` these are."""

    config: Any
    layout: Layout
    folder: Path
    """For a checkpoint."""
    stock: bool
    """Without what titan_ext does to a loader."""
    wrong: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.config
        tokens, self._length = batch.tokens_of_microbatch(config.training, config.parallelism)
        self._size = tokens // self._length  # sequences of a batch
        # Batches that are read of a rank, and as many again where it resumes.
        self._batches = max(2, -(-_SEQUENCES // self._size))
        self._tokenizer: Any = None

    def look(self) -> Verdict:
        config, ranks = self.config, self.looked_at
        prepare_corpus(config)
        Paths().before_start(config)
        self._tokenizer = config.tokenizer.build(tokenizer_path=config.hf_assets_path)
        few = {*ranks[:2], ranks[-1]}
        read: dict[int, list[Batch]] = {}
        going: dict[int, Iterator[Batch]] = {}
        saved: dict[str, Any] = {}
        for data_rank in ranks:
            with self._as(self.rank(data_rank)):
                loader = self._build(data_rank)
                batches = iter(loader)
                read[data_rank] = self._first(batches, data_rank)
                if data_rank in few:
                    going[data_rank] = batches
                    _merge(saved, copy.deepcopy(loader.state_dict()))  # now, as a save does
        self._check_labels([each for batches in read.values() for each in batches])
        for data_rank in sorted(few):
            self._check_peers(data_rank, read[data_rank])
        self._check_text(read)
        dcp.save({"dataloader": saved}, checkpoint_id=self.folder / "saved", no_dist=True)
        for data_rank, batches in going.items():
            self._check_resume(data_rank, read[data_rank], batches)
        return self._verdict(read)

    @property
    def looked_at(self) -> list[int]:
        """Data ranks that are read: all, or those that are most easily taken for one another.

        The first ones are neighbours. Ranks that a power of two lies between are of one number on
        their nodes, and ``dp_shard`` is the first of the second replica.
        """
        count = self.layout.data_ranks
        tokens = self._batches * self._size * self._length
        most = min(max(_TOKENS // tokens, _LEAST_RANKS), _MOST_RANKS)
        if count <= most:
            return list(range(count))
        powers = [2**power for power in range(2, count.bit_length()) if 2**power < count]
        replica = self.layout.dp_shard % count
        drawn = random.Random(0).sample(range(count), most)
        chosen = dict.fromkeys([0, 1, replica, count - 1, 2, 3, *powers, *drawn])
        return sorted([*chosen][:most])

    def rank(self, data_rank: int, *, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """A rank of the job that reads for ``data_rank`` (ParallelDims' ``dataloading_mesh``)."""
        layout = self.layout
        return ((pp * layout.data_ranks + data_rank) * layout.cp + cp) * layout.tp + tp

    @contextlib.contextmanager
    def _as(self, rank: int) -> Iterator[None]:
        """As on a rank of the job, on which a loader may ask who it is."""
        nodes, world = self.layout.nodes, self.layout.world
        with as_rank(world, rank, nodes.ranks, nodes.nvlink_domain):
            os.environ["LOCAL_RANK"] = str(rank % nodes.ranks)  # nobody asks for a device here
            dist.init_process_group("fake", rank=rank, world_size=world)
            try:
                with _Alone():
                    yield
            finally:
                dist.destroy_process_group()

    def _build(self, data_rank: int, run: int = 0) -> Any:
        """The loader of a data rank, as Titan's trainer builds it (torchtitan/trainer.py).

        A save comes after each of our steps. Titan gives torch one seed, and stages of a pipeline
        others (its ``set_determinism``). Without ``debug.seed`` another ``run`` has another one.
        Other generators start anywhere.
        """
        rank, layout, seed = dist.get_rank(), self.layout, self.config.debug.seed
        torch.manual_seed((1000 * run if seed is None else seed) + rank * layout.pp // layout.world)
        random.seed()
        np.random.seed()
        loader = copy.deepcopy(self.config.dataloader).build(
            dp_world_size=layout.data_ranks,
            dp_rank=data_rank,
            tokenizer=self._tokenizer,
            seq_len=self._length,
            local_batch_size=self._size,
            snapshot_every_n_steps=self._batches,
        )
        if not self.stock:
            split_among_workers(loader)
        return loader

    def _first(self, batches: Iterator[Batch], data_rank: int) -> list[Batch]:
        found = _take(batches, self._batches)
        if len(found) < self._batches:
            raise ValueError(
                f"the data of data rank {data_rank} end within {self._batches} batches"
            )
        for inputs, labels in found:
            if inputs["input"].shape != labels.shape or labels.ndim != 2:
                raise ValueError(f"labels of shape {list(labels.shape)} are unknown here")
        return found

    def _check_peers(self, data_rank: int, right: Sequence[Batch]) -> None:
        """Ranks of one data rank read the same."""
        first = self.rank(data_rank)
        for axis in self._axes_of_peers:
            last = {axis: getattr(self.layout, axis) - 1}
            peer = self.rank(data_rank, **last)
            with self._as(peer):
                found = _take(iter(self._build(data_rank)), self._batches)
            if not _same(found, right):
                said = f"ranks {first} and {peer}, {axis.upper()} peers, read different batches"
                self.wrong[said] = None

    @property
    def _axes_of_peers(self) -> list[str]:
        return [axis for axis in ("tp", "cp", "pp") if getattr(self.layout, axis) > 1]

    def _check_labels(self, batches: Sequence[Batch]) -> None:
        """A label is the next token, and positions count within a document.

        Without positions nobody knows where documents end: there a label may be another token.
        """
        counted, knows_documents = 0, False
        wrong = {1: 0, 0: 0, 2: 0}  # labels that are not the token at this distance
        length = self._length
        for inputs, labels_BL in batches:
            input_BL, positions_BL = inputs["input"], inputs.get("positions")
            inner_BL = labels_BL[:, :-2] != IGNORE_INDEX
            if positions_BL is not None and positions_BL.shape == input_BL.shape:
                goes_on_BL = positions_BL[:, 1:] == positions_BL[:, :-1] + 1
                inner_BL &= goes_on_BL[:, :-1]
                restarts_BL = positions_BL[:, 1:] == 0
                knows_documents |= bool(restarts_BL.any())
                if not bool((goes_on_BL | restarts_BL).all()):
                    self.wrong["positions neither continue nor restart at 0"] = None
                if int(positions_BL.min()) < 0 or int(positions_BL.max()) >= length:
                    self.wrong[f"positions are not below {batch.SEQUENCE} = {length}"] = None
            counted += int(inner_BL.sum())
            for shift in wrong:
                ends = input_BL.shape[1] - 2 + shift
                differs_BL = labels_BL[:, :-2] != input_BL[:, shift:ends]
                wrong[shift] += int((inner_BL & differs_BL).sum())
        if wrong[1] > (0 if knows_documents else counted // 2):
            nearest = min(wrong, key=lambda shift: wrong[shift])
            instead = {0: ": they are the inputs, not shifted", 2: ": they are shifted by two"}
            said = f"{wrong[1]} of {counted} labels are not the next token"
            self.wrong[said + instead.get(nearest, "")] = None

    def _check_text(self, read: Mapping[int, Sequence[Batch]]) -> None:
        """No two data ranks read the same text, nor does one of them twice."""
        marks = {rank: self._marks_of(batches) for rank, batches in read.items()}
        total = sum(map(len, marks.values()))
        repeat = {rank: again for rank, own in marks.items() if (again := _repeated(own))}
        for rank, again in repeat.items():
            own = marks[rank]
            ahead = self._ahead(rank, 2 * self._batches)[len(own) :]
            is_new = sum(not _is_in(each, own) for each in ahead) * 2 > len(ahead)
            if is_new and again * 2 >= len(own):  # not for want of text
                said = f"data rank {rank} reads {again} of {len(own)} sequences twice"
                self.wrong[said] = None
                return
        if repeat:
            self.notes.append(f"{len(repeat)} of them read some of their text twice: it is short")
        pairs = Counter(
            (first, other)
            for other, sequences in marks.items()
            for each in sequences
            if (first := _owner(each, other, marks)) is not None
        )
        if not pairs:
            return
        ((first, other), count), *others = pairs.most_common()
        if count < _SHARE_OF_RANK * len(marks[other]) and pairs.total() < _SHARE * total:
            self.notes.append(f"{pairs.total()} of {total} sequences are on two of them")
            return
        times, most = _AHEAD
        if _repeated(self._ahead(first, -(-min(times * total, most) // self._size))):
            raise ValueError(
                f"data ranks {first} and {other} read the same, and so does one rank again: the "
                "text repeats itself"
            )
        more = f", and so do {len(others)} other pairs" if others else ""
        said = f"{count} of {len(marks[other])} sequences{more}"
        self.wrong[f"data ranks {first} and {other} read the same text, {said}"] = None

    def _ahead(self, data_rank: int, batches: int) -> list[torch.Tensor]:
        """Marks of so many batches of a rank, or of as many as it has."""
        with self._as(self.rank(data_rank)):
            return self._marks_of(_take(iter(self._build(data_rank)), batches))

    def _marks_of(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        found = [
            _marks(input_L, labels_L)
            for inputs, labels_BL in batches
            for input_L, labels_L in zip(inputs["input"], labels_BL, strict=True)
        ]
        return [each for each in found if len(each) >= _FEW_MARKS]

    def _check_resume(
        self, data_rank: int, before: Sequence[Batch], batches: Iterator[Batch]
    ) -> None:
        """A loader of a new process goes on where the saved one was."""
        with self._as(self.rank(data_rank)):
            after = _take(batches, self._batches)
        with self._as(self.rank(data_rank)):
            loader = self._build(data_rank, run=1)
            try:
                dcp.load({"dataloader": loader}, checkpoint_id=self.folder / "saved", no_dist=True)
            except Exception as error:
                said = str(error).strip().splitlines()[-1:]
                self._resumed(f"resume of data rank {data_rank} fails: {said}")
                return
            found = _take(iter(loader), self._batches)
        if _same(found, after):
            return
        first = found[:1]
        skipped = next((n for n in range(1, len(after)) if _same(first, after[n : n + 1])), 0)
        again = next((n for n, each in enumerate(before) if _same(first, [each])), len(before))
        if skipped:
            what = f"skips {skipped} of its batches"
        elif again < len(before):
            what = f"repeats the last {len(before) - again} of {len(before)} batches"
        else:
            what = "continues with other batches"
        self._resumed(f"data rank {data_rank}, resumed, {what}")

    def _resumed(self, wrong: str) -> None:
        checkpoint = self.config.checkpoint
        if checkpoint.enable and "dataloader" not in checkpoint.exclude_from_loading:
            self.wrong[wrong] = None
        else:
            self.notes.append(f"{wrong}; the job does not resume it")

    def _verdict(self, read: Mapping[int, Sequence[Batch]]) -> Verdict:
        axes, count = [axis.upper() for axis in self._axes_of_peers], self.layout.data_ranks
        proved = [f"equal within {', '.join(axes)}"] if axes else []
        proved += ["disjoint"] if count > 1 else []
        proved += ["labels shifted by one", "resumed in place"]
        looked = (
            f"{len(read)} of {count} data ranks, {self._batches * self._size} sequences of "
            f"{self._length} tokens each"
        )
        verdict = Verdict()
        if self.wrong:
            verdict.note("data", "; ".join(self.wrong))
            verdict.notes.append(f"{'':10}{looked}")
        else:
            verdict.notes.append(f"{'data':10}{', '.join(proved)}: {looked}")
        verdict.notes += [f"{'':10}{note}" for note in self.notes]
        return verdict


def _take(batches: Iterator[Batch], count: int) -> list[Batch]:
    """The next batches, or as many as there are; together, since a step has all of them at once."""
    taken = list(islice(batches, count))
    return [(copy.deepcopy(inputs), labels.clone()) for inputs, labels in taken]


def _same(found: Sequence[Batch], right: Sequence[Batch]) -> bool:
    """True if all that batches have is equal."""
    return len(found) == len(right) and all(
        one.keys() == other.keys()
        and _equal(labels, others)
        and all(_equal(value, other[key]) for key, value in one.items())
        for (one, labels), (other, others) in zip(found, right, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        return torch.equal(one, other)
    return bool(one == other)


def _merge(into: dict[str, Any], state: Mapping[str, Any]) -> None:
    """Add a rank's state to what a checkpoint has: of one name there is one value."""
    for key, value in state.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into.setdefault(key, value)


def _marks(input_L: torch.Tensor, labels_L: torch.Tensor) -> torch.Tensor:
    """Numbers of some windows of tokens that are learned; the text decides which windows.

    Two ranks may read one document and pack it otherwise, and prompts that many samples share are
    not learned as a rule.
    """
    window = min(_WINDOW, len(input_L))
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(2**62, (window,), generator=generator)
    numbers = (input_L.unfold(0, window, 1) * factors).sum(-1)
    numbers = numbers[labels_L[: len(numbers)] != IGNORE_INDEX].unique()
    every = max(len(input_L) // _MARKS, 1)
    return numbers[(numbers >> 32) % every == 0]


def _is_in(marks: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    """True if a sequence is in the others, wherever it begins."""
    if not others:
        return False
    return bool(torch.isin(marks, torch.cat(list(others))).sum() >= _SAME * len(marks))


def _owner(marks: torch.Tensor, of: int, read: Mapping[int, Sequence[torch.Tensor]]) -> int | None:
    """The first data rank before ``of`` that has a sequence, too."""
    return next((rank for rank in read if rank < of and _is_in(marks, read[rank])), None)


def _repeated(sequences: Sequence[torch.Tensor]) -> int:
    """How many sequences are, for the most part, text of those before them."""
    return sum(_is_in(each, sequences[:at]) for at, each in enumerate(sequences))
