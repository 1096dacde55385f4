# SPDX-License-Identifier: BSD-3-Clause
"""``titan_ext verify CONFIG``: are a job's numbers right, and if not, which key is to blame?"""

import itertools
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from titan_ext.base.machines import MEMORY, machine_of
from titan_ext.config_registry.terminal import phase, start_without_a_gpu
from titan_ext.toml.files import WORLD_SIZE, KeyLocation, find, import_dotted, ranks_of, to_toml

if TYPE_CHECKING:
    from titan_ext.verify.judge import Verdict
    from titan_ext.verify.legs import Blame
    from titan_ext.verify.small import SmallJob

_WRONG, NOT_VERIFIED = 1, 2
_EXPECTED = (ValueError, AssertionError, ImportError, NotImplementedError, OSError)
_LEGS = {
    "axes": "fp32 beside one process in which nothing is wrapped",
    "keys": "the job's dtypes beside TorchTitan's own parallelize on the same ranks",
    "graphs": "operations replayed as a CUDA graph would beside the same job in Python",
}
_NOTHING = ("none", "None")
_NOT_HERE = ("FlexAttention's kernel", "compiled kernels", "a GPU's CUDA graphs")
_NOT_REACHED = "what more of a size than the copy's alone shows, such as 2^31 elements"
_NOT_HERE += ("sums of NCCL", "streams", "drawing of first weights")


@dataclass
class Verify:
    """Prove a job's numbers on this machine: its layout and its keys, on a small copy of it.

    The copy has every kind of block, every axis of the mesh and every decision of the job, and is
    trained for three steps on at most 16 processes: in fp32 beside one process, and in the job's
    dtypes beside TorchTitan's own parallelize. It saves and resumes where the job has checkpoints.
    The job's own data are read at its real number of data ranks. Exit code 0 is RIGHT, 1 WRONG, 2
    NOT VERIFIED.
    """

    config: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="CONFIG")]]
    """The config to verify."""
    ranks: int = 0
    """Number of the job's GPUs; by default the file's world_size."""
    stock: bool = False
    """Verify stock TorchTitan on the same layout, without titan_ext and its keys."""
    machine: str = "h100"
    """The machine whose nodes the job has, as dry-run takes it."""
    memory: str = ""
    """Memory of each GPU, for activation_checkpoint.budget = "fit"; by default as much as torch
    finds on one."""
    out: Path = Path()
    """Folder for the smallest file that is wrong."""
    quick: bool = False
    """Compare in fp32 with one process only: without the job's dtypes and torch.compile."""
    model: Annotated[str, tyro.conf.arg(metavar="MODULE.FUNCTION")] = ""
    """A function of yours that returns a small ModelSpec, in place of the job's made small."""
    keep: tuple[str, ...] = ()
    """Values of the job to keep: training.seq_len, training.max_norm, lr_scheduler.warmup_steps."""
    routing: Literal["balanced", "skewed", "idle"] = "balanced"
    """Send every token also to the first expert of each layer ("skewed"), or none ("idle")."""
    graphs: bool = False
    """Replay the job as CUDA graphs would, also where they are off."""
    verbose: bool = False
    """Print the log of the start, too."""

    def run(self, flags: list[str]) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # forks are safe without threads
        started = time.monotonic()
        start_without_a_gpu()
        try:
            with tempfile.TemporaryDirectory(prefix="titan_ext_verify_") as folder:
                is_right = self._verify(flags, Path(folder))
        except Exception as error:
            if not isinstance(error, _EXPECTED):
                traceback.print_exc()
            print(f"NOT VERIFIED: {error or type(error).__name__}", flush=True)
            raise SystemExit(NOT_VERIFIED) from None
        took = time.monotonic() - started
        skipped = "dtypes not compared, " if self.quick and not self.stock else ""
        said = f"({skipped}{took:.0f} s, {sum(os.times()[:4]):.0f} CPU s)"
        print(f"{'RIGHT' if is_right else 'WRONG'} {said}")
        if not is_right:
            raise SystemExit(_WRONG)

    def _verify(self, flags: list[str], folder: Path) -> bool:
        from titan_ext.verify import small
        from titan_ext.verify.legs import Legs
        from titan_ext.verify.ranks import RunError

        job = self._small(flags)
        if self.graphs and job.layout.pp > 1:
            raise ValueError("--graphs: TorchTitan captures no pipelines in CUDA graphs.")
        decided = small.decisions(job.config, job.layout)
        if changed := small.differences(job.decisions, decided):
            raise ValueError(
                f"the small copy makes other decisions than the job: {'; '.join(changed)}."
            )
        compiles = job.config.compile.enable
        if self.quick:
            job.config.compile.enable = False  # two fifths of 16B's time
        print(f"model     {job.summary}: {job.parameters / 1e6:.1f} M parameters")
        print(f"layout    {job.large_layout} -> {job.layout}")
        rows = (f"{'':10}{axis:22}{a:>12,}{b:>8,}" for axis, (a, b) in job.shape.items())
        print(f"{'shape':32}{'job':>12}{'copy':>8}", *rows, sep="\n", flush=True)
        is_right, not_here = self._look_at_data(job, folder)
        with Legs(job, folder) as legs:
            wrong: dict[str, Verdict] = {}
            replays = self.graphs or not job.large_config.training.disable_cuda_graphs
            not_replayed = "CUDA graphs" if replays else "CUDA graphs (off; --graphs replays them)"
            for leg, what in _LEGS.items():
                if leg == "keys" and (self.stock or self.quick):
                    continue
                if leg == "graphs" and (self.quick or wrong or not replays):
                    continue
                try:
                    verdict = getattr(legs, leg)(**({"stock": True} if self.stock else {}))
                except RunError as error:
                    if leg != "graphs" or self.graphs:
                        raise
                    print(f"{leg:10}not verified: {error}")
                    continue
                not_replayed = "" if leg == "graphs" else not_replayed
                print(f"{leg:10}{what}", *(f"  {line}" for line in verdict.lines()), sep="\n")
                sys.stdout.flush()
                wrong |= {} if verdict.is_right else {leg: verdict}
            if wrong and not self.stock:
                try:
                    said = self._say(legs.blame(*next(iter(wrong.items()))), job, flags)
                except ValueError as error:  # a key that the job cannot be without
                    said = iter([f"blame     not found: {error}"])
                print("\n".join(said), flush=True)
        told = (f"{k} {value}" for k, value in job.decisions.items() if value not in _NOTHING)
        print(f"decided   {', '.join(told)}")
        not_here += [] if small.resumes(job.config) else ["checkpoints"]
        not_here += small.lost_shards(job.decisions, decided)
        not_here += ["CPU offload"] * (self.stock and job.config.training.enable_cpu_offload)
        not_here += ["torch.compile"] * (compiles and self.quick)
        not_here += [not_replayed] if not_replayed else []
        not_here += [*_NOT_HERE, *(f"{kind} (plain in the copy)" for kind in job.plain)]
        print(f"not verified here: {', '.join(not_here)}")
        unseen = ["roundings to bf16 in compiled code"] * job.config.compile.enable
        print(f"not reached here: {', '.join([_NOT_REACHED, *unseen])}")
        return is_right and not wrong

    def _look_at_data(self, job: "SmallJob", folder: Path) -> tuple[bool, list[str]]:
        """Whether nothing is wrong with the job's data, and ["data"] if they are not verified."""
        from titan_ext.verify.data import look_at_data
        from titan_ext.verify.ranks import RunError

        try:
            verdict = look_at_data(job.large_config, job.large_layout, folder, stock=self.stock)
        except RunError as error:
            print(f"data      not verified: {error}")
            return True, ["data"]
        print(*verdict.lines(), sep="\n")
        return verdict.is_right, []

    def _small(self, flags: list[str]) -> "SmallJob":
        from titan_ext.activation_checkpoint.op_rules import has_budget
        from titan_ext.base import no_accelerator
        from titan_ext.base.nodes import Nodes
        from titan_ext.config_registry.resolve import resolve
        from titan_ext.plan.stand_ins import as_rank
        from titan_ext.run.budget import solve_in_dry_run
        from titan_ext.verify.small import layout_of, make_small, why_not

        machine, ranks = machine_of(self.machine), ranks_of(self.config, self.ranks)
        with as_rank(ranks, 0, machine.ranks_per_node, machine.nvlink_domain):
            with no_accelerator.as_with_an_accelerator():
                config = resolve(self.config, flags, ranks).config
            if reason := why_not(config):
                raise ValueError(reason)
            if has_budget(config):
                phase(f"solving for the budget of {self.config}")
                memory = self.memory or MEMORY.get(self.machine, "")
                # With a CPU's kernels, of which the table names operations.
                options = ["--machine", self.machine, "--on-cpu"]
                solve_in_dry_run(config, ranks, ["--memory", memory] if memory else [], options)
        nodes = Nodes(machine.ranks_per_node, machine.nvlink_domain)
        phase("making a small copy")
        spec = None
        if self.model:
            at = KeyLocation("--model", self.model)
            spec = import_dotted(self.model.replace(":", "."), at)()
        job = make_small(config, layout_of(config, ranks, nodes), keep=self.keep, spec=spec)
        return replace(job, routing=self.routing)

    def _say(self, blame: "Blame", job: "SmallJob", flags: list[str]) -> Iterator[str]:
        """Say who is to blame, and write the smallest file with which the job is wrong."""
        from titan_ext.parallelize.limits import value_of

        if blame.stock:
            yield "blame     stock TorchTitan is wrong on this layout, too: its code or the model's"
            return
        yield "blame     stock TorchTitan is right on this layout"
        keys = [_setting(key, value_of(job.config, key)) for key in blame.keys]
        yield f"{'':10}wrong with {' and '.join(keys) or 'none of our keys'}"
        for key, value in blame.cures.items():
            yield f"{'':10}right with {_setting(key, value)}"
        if not blame.keys:
            return
        again = self.config
        if self.config.endswith(".toml"):
            self.out.mkdir(parents=True, exist_ok=True)
            again = str(self.out / f"wrong_{Path(self.config).name}")
            lines = [
                f"# The fewest keys of {self.config} with which titan_ext verify says WRONG.",
                f"extends = {to_toml(str(Path(find(self.config)).resolve()))}",
                f"{WORLD_SIZE} = {job.large_layout.world}",
                *itertools.starmap(_setting, blame.off.items()),
            ]
            Path(again).write_text("\n".join(lines) + "\n")
        command = ["titan_ext", "verify", again, "--ranks", str(job.large_layout.world)]
        for name in ("machine", "memory", "routing", "model"):
            if (value := getattr(self, name)) != getattr(type(self), name):
                command += [f"--{name}", value]
        command += ["--keep", *self.keep] if self.keep else []
        command += flags
        yield f"again:    {shlex.join(command)}"


def _setting(key: str, value: Any) -> str:
    """A line of TOML; a section is there by its policy."""
    if key == "activation_checkpoint":
        policy = "none" if value is None else value._owner.__name__.removesuffix("AC").lower()
        return f"{key}.policy = {to_toml(policy)}"
    return f"{key} = {to_toml(value)}"
