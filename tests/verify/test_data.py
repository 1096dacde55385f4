"""The data leg of ``titan_ext verify``: a user's loader with faults planted, and right ones."""

import contextlib
import functools
import io
import os
import random
import re
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX

from tests.helpers.cluster import run_ranks
from titan_ext.base.nodes import Nodes
from titan_ext.base.stdlib_corpus import make_corpus
from titan_ext.config_registry.resolve import resolve
from titan_ext.config_registry.verify import Verify
from titan_ext.verify import data
from titan_ext.verify.ranks import RunError
from titan_ext.verify.small import Layout, layout_of

LENGTH = 64


class Loader(BaseDataLoader):
    """Document ``i * ranks + rank`` is sequence ``i`` of a rank, and a checkpoint has ``i``."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        fault: str = ""
        documents: int = 10**9

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **others: Any):
        self.config, self.ranks, self.rank = config, dp_world_size, dp_rank
        self.size, self.length = others["local_batch_size"], others["seq_len"]
        self.at, self.key = 0, f"rank_{dp_rank}"
        self.offset = 0
        fault = config.fault
        if fault == "raises":
            raise OSError("no such bucket")
        if fault == "hangs":
            time.sleep(1000)
        if fault == "one for all":
            self.ranks, self.rank = 1, 0
        elif fault == "one for both replicas":
            self.ranks, self.rank = 4, dp_rank % 4
        elif fault == "one document on":  # rank 1 reads 1, 2, 3, and rank 0 has read 2
            self.ranks = 1
        elif fault == "seven tokens on":  # the same text, packed otherwise
            self.ranks, self.rank, self.offset = 1, 0, 7 * dp_rank
        elif fault == "RANK":
            self.rank = int(os.environ["RANK"]) % self.ranks
        elif fault == "any seed":
            # Odd for one of two peers in TP: texts of 64 tokens are never equal by chance.
            self.offset = 2 * random.randrange(10**6) + int(os.environ["RANK"]) % 2
        elif fault == "torch's seed":
            self.offset = torch.initial_seed() % 10**6
        elif fault == "talks":
            dist.broadcast(torch.ones(1), 0)

    def _document(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number % self.config.documents)
        return torch.randint(2, 2000, (self.length,), generator=generator)

    def _tokens(self, number: int) -> torch.Tensor:
        text = [self._document(number), self._document(number + self.ranks)]
        return torch.cat(text).roll(-self.offset % self.length)[: self.length + 2]

    def _sequence(self, number: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        fault, length = self.config.fault, self.length
        if fault == "a licence" and number == 30:  # of rank 6, and of rank 0
            number = 24
        tokens = self._tokens(number)
        if fault == "padding":
            tokens[0 if number // self.ranks % 4 == 3 else length // 4 :] = 1
        elif fault == "one prompt":
            tokens[: length * 3 // 4] = torch.arange(length * 3 // 4)
        shift = 2 if fault == "shifted by two" else 1
        labels = tokens[shift:][:length].clone()
        positions = torch.arange(length)
        if fault == "packed" or fault.startswith("positions"):
            positions %= length // 2
            labels[length // 2 - 1] = 1  # the end of a document
        if fault == "positions jump":
            positions[5] = 9
        elif fault == "one prompt":
            labels[: length * 3 // 4 - 1] = IGNORE_INDEX
        inputs = {"input": tokens[:length], "positions": positions}
        if fault == "no positions":
            del inputs["positions"]
            labels[length // 2 - 1] = 1
        return inputs, labels

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            numbers = [(self.at + i) * self.ranks + self.rank for i in range(self.size)]
            self.at += self.size
            inputs, labels = zip(*map(self._sequence, numbers), strict=True)
            batch = {key: torch.stack([each[key] for each in inputs]) for key in inputs[0]}
            yield batch, torch.stack(labels)
            if self.config.fault == "each twice":
                yield batch, torch.stack(labels)
            if self.config.fault == "ends":
                return

    def state_dict(self) -> dict[str, Any]:
        if self.config.fault == "one state":  # of one name DCP saves one rank's
            return {"next": self.at * self.ranks + self.rank}
        return {self.key: {"at": self.at}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        fault = self.config.fault
        if fault == "one state":
            self.at, self.rank = divmod(state_dict["next"], self.ranks)
        elif fault != "from the start":
            self.at = state_dict[self.key]["at"] + self.size * (fault == "skips")
        if fault == "cannot":
            raise KeyError("at_rank")


ALL_RIGHT = r"^data +equal within TP, PP, disjoint, labels shifted by one, resumed in place: 8 of 8"
SAYS = {
    "": ALL_RIGHT,
    "packed": ALL_RIGHT,
    "a licence": ALL_RIGHT + r"(?s:.*)\n +1 of 64 sequences are on two of them",
    "padding": ALL_RIGHT,
    "no positions": ALL_RIGHT,
    "one prompt": ALL_RIGHT,
    "one for all": r"WRONG .*data ranks 0 and 1 read the same text, 8 of 8 sequences, and so do 6",
    "one for both replicas": r"WRONG .*data ranks 0 and 4 read the same .* and so do 3 other pairs",
    "one document on": r"WRONG .*data ranks 0 and 1 read the same text, 7 of 8",
    "seven tokens on": r"WRONG .*data ranks [0-6] and [1-7] read the same text",
    "RANK": r"WRONG .*ranks 0 and 1, TP peers, read different batches",
    "any seed": r"WRONG .*ranks 0 and 1, TP peers, read different batches",
    "torch's seed": r"WRONG .*ranks 0 and 16, PP peers, read different batches",
    "shifted by two": r"WRONG .*: they are shifted by two",
    "positions jump": r"WRONG .*positions neither continue nor restart at 0",
    "each twice": r"WRONG .*data rank 0 reads 4 of 8 sequences twice",
    "from the start": r"WRONG .*data rank 0, resumed, repeats the last 2 of 2 batches",
    "skips": r"WRONG .*data rank 0, resumed, skips 1 of its batches",
    "one state": r"WRONG .*data rank 1, resumed, continues with other batches",
    "cannot": r"WRONG .*resume of data rank 0 fails: .*at_rank",
    "talks": r"^not verified: the loader's ranks talk to each other",
    "raises": r"^not verified: OSError: no such bucket$",
    "hangs": r"^not verified: .* did not answer for 2 s",
    "ends": r"^not verified: the data of data rank 0 end within 2 batches",
}


def _looks(folder: Path) -> dict[str, str]:
    """What is said of each case, by name."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    nodes = Nodes(8, 8)
    layout = Layout(dp_replicate=2, dp_shard=4, cp=1, tp=2, pp=2, ep=1, nodes=nodes)
    cases: dict[str, Callable[[Any], None]] = {
        **{fault: functools.partial(_with_fault, fault=fault) for fault in SAYS},
        "few documents": functools.partial(_with_fault, fault="", documents=20),
        "not resumed": _not_resumed,
        "shipped": lambda config: None,
        "workers": _workers,
        "stock workers": _workers,
    }
    said = {}
    for name, change in cases.items():
        config = resolve("moe_debug.toml").config
        config.parallelism.pipeline_parallel_degree = layout.pp
        config.parallelism.pipeline_parallel_microbatch_size = 4
        change(config)
        data._PATIENCE_S = 2.0 if name == "hangs" else 60.0
        (folder / name).mkdir(exist_ok=True)
        try:
            verdict = data.look_at_data(
                config, layout, folder / name, stock=name.startswith("stock")
            )
            said[name] = "\n".join(verdict.lines())
        except RunError as error:
            said[name] = f"not verified: {error}"
    return said


def _commands(folder: Path) -> list[tuple[bool, list[str], str]]:
    """What the command makes of a fault: is it right, what is not verified, and what is printed."""
    found = []
    for fault in ("", "one for all", "raises"):
        config = resolve("moe_debug.toml").config
        _with_fault(config, fault)
        job: Any = types.SimpleNamespace(
            large_config=config, large_layout=layout_of(config, 4, Nodes(8, 8))
        )
        (its_own := folder / fault.replace(" ", "_") / "data").mkdir(parents=True)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            is_right, not_here = Verify(config="moe_debug.toml")._look_at_data(job, its_own)
        found.append((is_right, not_here, said.getvalue()))
    return found


def _with_fault(config: Any, fault: str, **others: Any) -> None:
    config.training.seq_len = LENGTH
    config.dataloader = Loader.Config(fault=fault, **others)


def _not_resumed(config: Any) -> None:
    _with_fault(config, "from the start")
    config.checkpoint.enable = False


def _workers(config: Any) -> None:
    config.dataloader.num_workers = 2


def test_faults_of_loaders_are_named(tmp_path: Path):
    """In one test: workers of pytest-xdist would look once each."""
    make_corpus()
    (said,) = run_ranks(_looks, 1, tmp_path, log_folder=tmp_path)
    for fault, says in SAYS.items():
        assert re.search(says, said[fault], re.M), (fault, said[fault])
        assert ("WRONG" in says) == ("WRONG" in said[fault]), fault
    # Text that repeats itself is not verified.
    assert re.match(r"not verified: data ranks .* the text repeats itself", said["few documents"])
    # A job that saves nothing need not resume.
    assert "WRONG" not in said["not resumed"]
    assert "repeats the last 2 of 2 batches; the job does not resume" in said["not resumed"]
    # The corpus is read right; workers read a share each, but not in stock Titan.
    assert re.match(ALL_RIGHT, said["shipped"])
    assert re.match(ALL_RIGHT, said["workers"])
    assert "WRONG           data rank 0 reads 4 of 8 sequences twice" in said["stock workers"]


def test_the_command_says_what_it_saw(tmp_path: Path):
    (found,) = run_ranks(_commands, 1, tmp_path, log_folder=tmp_path)
    for (right, not_here, said), (is_right, is_seen, begins) in zip(
        found,
        (
            (True, True, "data      disjoint, labels shifted by one, resumed in place: 4 of 4 "),
            (False, True, "data      WRONG           data ranks 0 and 1 read"),
            (True, False, "data      not verified: OSError: no such bucket\n"),
        ),
        strict=True,
    ):
        assert (right, not_here) == (is_right, [] if is_seen else ["data"])
        assert said.startswith(begins)
