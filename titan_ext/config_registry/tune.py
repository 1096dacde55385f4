# SPDX-License-Identifier: BSD-3-Clause
"""``titan_ext tune``: the options of the command, what it shows while it searches, and its files.

The search itself is ``plan.search``. Nothing here imports torch before the command needs it.
"""

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from titan_ext.base.machines import MEMORY, machine_of
from titan_ext.base.messages import Mistakes, duration, size_of
from titan_ext.config_registry.terminal import phase, start_without_a_gpu
from titan_ext.toml.files import check_new_file, extends_in, ranks_of, to_toml

if TYPE_CHECKING:
    from titan_ext.plan.search import Search

_FILE = "tuned.toml"
_DOES_NOT_FIT, _INTERRUPTED = 3, 130


@dataclass
class Tune:
    """Find the keys with which a job is fastest, on a machine that you do not have yet.

    It plans some dozens of configs of the job: batch, degrees, FSDP units, checkpointing, exchanges
    of tokens. It prints the best beside yours and says what each change saves. Nothing is written
    without --out. Ctrl-C and SIGTERM give the best so far.
    """

    config: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="CONFIG")]]
    """The config to tune; Titan's flags may follow. Keys that no move changes stay as they are."""
    ranks: int = 0
    """Number of the job's GPUs; by default the file's world_size."""
    machine: str = "h100"
    """Kind of the GPUs: h100, h200, b200, ... or a TOML file with rates of yours (docs/plan.md)."""
    memory: str = ""
    """Memory of each GPU, such as 80GiB; by default as much as torch finds on one."""
    exact: bool = False
    """Only what changes no result: no rounding, no float8, the same degrees and batches."""
    batch: Literal["same", "free"] = "same"
    """Tokens of a step: the same as yours, in as many passes as is best, or any number."""
    host_memory: str = ""
    """Memory of a node, such as 1TiB, for activations that wait there; by default none do."""
    out: Path | None = None
    """Folder for what is found: tuned.toml, which extends yours, and tuned.json with all that was
    tried."""
    rank: int = 0
    """The rank to plan."""
    imbalance: float = 1.0
    """Tokens of the rank's experts, as a multiple of their balanced share."""
    processes: int = 0
    """Plans at a time; 0 for one on each core."""
    verbose: bool = False
    """Print the log of the start as well."""

    def run(self, flags: list[str]) -> None:
        self.ranks = ranks_of(self.config, self.ranks)
        machine = machine_of(self.machine)
        self.memory = self.memory or MEMORY.get(self.machine, "")
        Mistakes(self._wrong()).raise_all()
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            check_new_file(self.out / _FILE)
        started = time.monotonic()
        start_without_a_gpu()
        from titan_ext.plan.stand_ins import as_rank

        nodes = machine.ranks_per_node, machine.nvlink_domain
        with tempfile.TemporaryDirectory() as folder, as_rank(self.ranks, self.rank, *nodes):
            search, given = self.search(flags, Path(folder))
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
            try:
                search.say = lambda text: phase(f"{text}: {search.progress()}")
                with search.forks:
                    search.run()
            except KeyboardInterrupt:
                if not search.tried:
                    raise SystemExit(_INTERRUPTED) from None
                print("stopped: the best so far, by plans of shortened models")
            finally:
                signal.signal(signal.SIGTERM, before)
        self._report(search, given)
        took = duration(time.monotonic() - started)
        print(f"{len(search.tried)} plans in {took}, {sum(os.times()[:4]):.0f} CPU seconds")
        if not search.best.fits:
            raise SystemExit(_DOES_NOT_FIT)

    def _wrong(self) -> Iterator[str]:
        if not 0 <= self.rank < self.ranks:
            yield f"--rank is {self.rank}; expected one of --ranks."
        if not self.memory:
            yield f"--machine {self.machine} needs --memory, such as 80GiB."
        if self.processes < 0:
            yield f"--processes is {self.processes}; expected 0 or more."
        if self.exact and self.batch == "free":
            yield "--exact changes no result, and --batch free does."

    def search(self, flags: list[str], folder: Path) -> "tuple[Search, dict[str, str]]":
        """The search, and the keys that the command line gives."""
        from titan_ext.base import no_accelerator
        from titan_ext.config_registry.resolve import resolve
        from titan_ext.plan.forks import Forks
        from titan_ext.plan.moves import Facts
        from titan_ext.plan.search import Job, Search, degrees, with_defaults
        from titan_ext.plan.shorten import Depths
        from titan_ext.toml.convert import dump, identity

        machine = machine_of(self.machine)
        capability = machine.capability
        with no_accelerator.as_with_an_accelerator(capability):
            resolved = resolve(self.config, flags, self.ranks)
        config = resolved.config
        given = {key: value for key, value, _ in resolved.given()}
        base = folder / "config.toml"
        base.write_text(dump(config))

        def make(keys: Mapping[str, Any]) -> Any:
            lines = [f"extends = {to_toml(base.name)}"]
            lines += [f"{key} = {to_toml(value)}" for key, value in keys.items()]
            file = folder / f"{os.getpid()}.toml"
            file.write_text("\n".join(lines) + "\n")
            try:
                with no_accelerator.as_with_an_accelerator(capability):
                    return resolve(file).config
            except ValueError as error:
                raise ValueError(str(error).replace(f"{file}: ", "")) from None

        assert config.model_spec is not None
        layers = getattr(config.model_spec.model, "layers", [])
        experts = [moe.num_experts for layer in layers if (moe := getattr(layer, "moe", None))]
        memory, host = size_of("--memory", self.memory), size_of("--host-memory", self.host_memory)
        assert memory is not None
        job = Job(
            make=make,
            values=with_defaults(identity(config)),
            facts=Facts(
                self.ranks,
                machine.ranks_per_node,
                experts=experts[0] if experts else 0,
                is_batch_free=self.batch == "free",
                host_nbytes=(host or 0) // machine.ranks_per_node,
            ),
            memory=memory,
            machine=self.machine,
            rank=self.rank,
            imbalance=self.imbalance,
            exact=self.exact,
            depths=Depths.of(config),
        )
        forks = Forks(job.plan, self.processes or len(os.sched_getaffinity(0)), degrees)
        return Search(job, forks), given

    def _report(self, search: "Search", given: Mapping[str, str]) -> None:
        from titan_ext.plan import tuned

        print(*tuned.report(search), sep="\n")
        if self.out is None:
            return
        file, extends = self.out / _FILE, extends_in(self.out, self.config)
        about = f"titan_ext tune {self.config} --ranks {self.ranks} --machine {self.machine}"
        about += f" --memory {self.memory}{' --exact' if self.exact else ''}"
        file.write_text("\n".join(tuned.file_lines(search, extends, given, about)) + "\n")
        figures = file.with_suffix(".json")
        figures.write_text(json.dumps(tuned.to_json(search), indent=1) + "\n")
        print(f"\n{file} extends {extends}; {figures} has all that was tried")
        print(f"titan_ext verify {file} proves its numbers")
