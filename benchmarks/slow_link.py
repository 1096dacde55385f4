"""Exchanges of tokens over a real slow link: stock TorchTitan and our keys, measured in turn.

    make slow-link                              # as root, with Debian's iproute2; 20 minutes
    make slow-link RATES=1000                   # links of other rates, in Mbit/s
    make slow-link MODELS="qwen3 compiled nodes"
    python -m benchmarks.slow_link --rates 100 --repeats 1 --out outputs/trial

Other figures of exchanges are planned; these are measured, without a GPU. Two network namespaces
stand for nodes. A veth joins them, and ``tbf`` shapes both of its ends. Gloo ranks lie half in each
node, and expert parallelism spans all of them. Every rank holds one trainer for each arm. The arms
take turns step by step, so that drift of the machine meets all of them alike. A first step of each
warms up and is not counted.

Beside each arm stand the bytes that the interface of a node sent, and the loss. The plan is a dry
run's for this very machine: ``rates.py`` times its kernels, and an exchange alone tells the rate of
the link. That is half of what ``tbf`` gives, because gloo mostly sends one way at a time. Gloo also
sends twice in a reduce-scatter, which no plan has. Ratios are compared, and not seconds. They are
an upper bound of what these keys can bring, because the wire takes most of a step here.

``slow_link.md``, ``slow_link.json`` and ``slow_link.png`` have all of it. "of ours" and "of stock"
are ratios within a round of turns. "breaks even" is where the bytes that an arm saves take as long
as the CPU time that it adds: links slower than that gain.
"""

import argparse
import contextlib
import ctypes
import functools
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.exchanges import ARMS

STOCK, OURS = "stock", "titan_ext"
_ALL, _NODE = "halves, float8, one row", "halves, float8, a node"
_DEBUG_V3 = "deepseek_v3.deepseek_v3_debugmodel"
_SEQUENCES, _LENGTH, _BLOCKS = 8, 256, 3
_PROBE = 6 << 20
"""Bytes of the exchange that is timed alone: as many as this job's."""
_WIRE, _ADDRESS = "wire", "10.77.0"
"""The interface, of that name in both namespaces, and what their addresses begin with."""
_NEW_NETWORK = 0x4000_0000  # CLONE_NEWNET; Python has it, and setns, from 3.12 on
_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@dataclass(frozen=True)
class Job:
    """What is trained: three blocks of a debug model, on two nodes."""

    title: str
    base: str = _DEBUG_V3
    ranks: int = 2
    flags: str = ""
    arms: tuple[str, ...] = (STOCK, OURS, "halves", "float8", "one row", _ALL)

    @property
    def per_node(self) -> int:
        return self.ranks // 2

    def __str__(self) -> str:
        return f"{self.title}; {self.ranks} gloo ranks, {_SEQUENCES} x {_LENGTH} tokens each"


_SMALL_V3 = "DeepSeek-V3, one dense and two MoE blocks, 16 experts, top 6"
JOBS = {
    "deepseek_v3": Job(_SMALL_V3),
    "nodes": Job(_SMALL_V3, ranks=4, arms=(STOCK, OURS, "halves", _ALL, _NODE)),
    "qwen3": Job("Qwen3, three MoE blocks, 64 experts, top 8", "qwen3.qwen3_moe_debug"),
    "compiled": Job(  # keys that change exchanges refuse it
        f"{_SMALL_V3}; compiled",
        flags="--compile.enable --compile.components model",
        arms=(STOCK, OURS),
    ),
}


class Step(NamedTuple):
    """One step: seconds of the slowest rank, CPU seconds of one, bytes that a node sent."""

    seconds: float
    cpu_s: float
    sent: float
    loss: float


class Plan(NamedTuple):
    """The clock's seconds of a step, and the bytes that a node sends in it."""

    seconds: float
    sent: float


# -- the link


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def linked_namespaces() -> Iterator[Sequence[str]]:
    """Two namespaces and a link between them; all of it goes, however this ends."""
    names = [f"slow{os.getpid()}{secrets.token_hex(2)}{side}" for side in "ab"]
    try:
        for name in names:
            _do("ip", "netns", "add", name)
        peer = ["type", "veth", "peer", "name", _WIRE, "netns", names[1]]
        _do("ip", "link", "add", _WIRE, "netns", names[0], *peer)
        for number, name in enumerate(names, 1):
            _do("ip", "-n", name, "addr", "add", f"{_ADDRESS}.{number}/24", "dev", _WIRE)
            for device in ("lo", _WIRE):
                _do("ip", "-n", name, "link", "set", device, "up")
        yield names
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a second Ctrl-C would leave them here
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _shape(names: Sequence[str], mbit: float) -> None:
    # A bucket of one large packet gives no exchange a start for nothing. A fast link needs what it
    # sends between two ticks of the kernel's clock.
    burst = max(64 << 10, int(mbit * 1e6 / 8 / 250))
    tbf = f"tbf rate {mbit:g}mbit burst {burst} latency 300ms".split()
    for name in names:
        _do("tc", "-n", name, "qdisc", "replace", "dev", _WIRE, "root", *tbf)


def _enter(namespace: str) -> None:
    """Move this process, which has one thread, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def sent_bytes(devices: str) -> int:
    """What the link has sent, by the text of /proc/net/dev: the ninth figure of its line."""
    line = next(line for line in devices.splitlines() if line.strip().startswith(f"{_WIRE}:"))
    return int(line.partition(":")[2].split()[8])


# -- the ranks: forks of this process, which build and step one trainer for each arm


def config_of(job: Job, arm: str, folder: Path) -> Any:
    """The trainer's config of an arm."""
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.deepseek_v3 import _build_dsv3_layers

    from titan_ext.base import no_accelerator
    from titan_ext.components.dispatch import use_our_dispatchers
    from titan_ext.config_registry.resolve import resolve
    from titan_ext.plan.stand_ins import as_stock

    flags = (
        f"--training.local_batch_size {_SEQUENCES} --training.seq_len {_LENGTH} "
        f"--parallelism.expert_parallel_degree {job.ranks} --training.steps 1000 --debug.seed 42 "
        "--dataloader.dataset python_stdlib --hf_assets_path python_stdlib "
        f"--checkpoint.no-enable --metrics.no-enable_tensorboard {job.flags} "
    )
    config: Any = resolve(job.base, (flags + (ARMS[arm] if arm != STOCK else "")).split()).config
    config.dump_folder = str(folder)
    model = config.model_spec.model
    model.layers = model.layers[:_BLOCKS]
    if job.base == _DEBUG_V3:  # narrow heads and experts, so that tokens weigh as much as kernels
        layers: dict[str, Any] = {
            **{"n_layers": _BLOCKS, "n_dense_layers": 1, "dim": model.dim, "n_heads": 4},
            **{"q_lora_rank": 0, "kv_lora_rank": 256, "mscale": 0.7, "v_head_dim": 64},
            **{"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "dense_hidden_dim": 1024},
            **{"num_experts": 16, "num_shared_experts": 2, "moe_hidden_dim": 128},
            **{"router_top_k": 6, "router_score_func": "softmax", "attn_backend": "flex"},
            **{"moe_comm_backend": "standard", "non_blocking_capacity_factor": None},
            "rope": ComplexRoPE.Config(dim=32, max_seq_len=4096, theta=10000.0),
        }
        model.layers = _build_dsv3_layers(**layers)
        use_our_dispatchers(config.model_spec)  # ours, in the new layers too
    no_accelerator.adapt_config(config)
    if arm == STOCK:
        as_stock(config)
    return config


_trainers: dict[str, tuple[Any, Any, list[float]]] = {}
"""Of this rank, by arm: the trainer, its batches, and the losses that it has said."""
_dims: list[Any] = []
"""The meshes that they share: Titan and FSDP2 find them by identity."""


def _build(job: Job, arm: str, folder: Path) -> tuple[Any, Any, list[float]]:
    from torchtitan.trainer import Trainer as TitanTrainer

    from titan_ext.base import no_accelerator
    from titan_ext.run.trainer import Trainer

    kind: Any = TitanTrainer if arm == STOCK else Trainer

    class OnSharedMeshes(kind):
        def init_distributed(self) -> Any:
            if not _dims:
                _dims.append(super().init_distributed())
            return _dims[0]

    with no_accelerator.layout_independent_init():
        trainer = OnSharedMeshes(config_of(job, arm, folder))
    for part in trainer.model_parts:
        no_accelerator.reduce_without_premul_sum(part)
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
    trainer.metrics_processor.should_log = lambda step: True
    return trainer, trainer.batch_generator(trainer.dataloader), losses


def _timed(call: Callable[[], Any]) -> tuple[float, float, float]:
    """Seconds until all ranks have done it, CPU seconds of this one, and bytes of its node."""
    import torch.distributed as dist

    dist.barrier()
    sent = sent_bytes(Path("/proc/self/net/dev").read_text())
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    cpu = time.process_time() - cpu
    dist.barrier()
    wall = time.perf_counter() - wall
    return wall, cpu, sent_bytes(Path("/proc/self/net/dev").read_text()) - sent


def _take_turn(job: Job, nodes: Sequence[str], folder: Path, rank: int, arm: str) -> Step:
    """A step of an arm on this rank, which may first build its trainer; "" times an exchange."""
    import torch
    import torch.distributed as dist

    from titan_ext.base import no_accelerator
    from titan_ext.base.stdlib_corpus import register_stdlib_corpus
    from titan_ext.plan.stand_ins import as_rank

    if not _trainers:
        _enter(nodes[rank // job.per_node])
        no_accelerator.enable()
        register_stdlib_corpus()
    os.environ |= {"MASTER_ADDR": f"{_ADDRESS}.1", "GLOO_SOCKET_IFNAME": _WIRE}
    if not arm:
        tokens = torch.zeros(_PROBE, dtype=torch.uint8)
        return Step(*_timed(lambda: dist.all_to_all_single(tokens.clone(), tokens)), 0.0)
    uneven = no_accelerator.list_all_to_all if arm == STOCK else contextlib.nullcontext
    with as_rank(job.ranks, rank, job.per_node), uneven():
        if arm not in _trainers:
            _trainers[arm] = _build(job, arm, folder / arm.replace(", ", "_").replace(" ", "_"))
        trainer, batches, losses = _trainers[arm]
        trainer.step += 1
        return Step(*_timed(lambda: trainer.train_step(batches)), losses[-1])


def measure(
    job: Job, rates: Sequence[float], repeats: int, folder: Path
) -> Iterator[tuple[float, float, dict[str, list[Step]]]]:
    """Rates in Mbit/s, the bytes a second of an exchange alone there, and the steps of each arm."""
    from titan_ext.verify.ranks import Processes

    with linked_namespaces() as nodes:
        serve = functools.partial(_take_turn, job, nodes, folder)
        with Processes(job.ranks, serve, folder) as ranks:

            def turn(arm: str) -> Step:
                took = ranks.call(arm)
                means = [statistics.fmean(values) for values in zip(*took, strict=True)]
                return Step(*means)._replace(seconds=max(one.seconds for one in took))

            _shape(nodes, max(rates))
            for arm in job.arms:
                print(f"warm-up: {turn(arm).seconds:7.2f} s, {arm}", flush=True)
            for mbit in sorted(rates, reverse=True):
                _shape(nodes, mbit)
                alone = statistics.median(turn("").seconds for _ in range(5))
                steps: dict[str, list[Step]] = {arm: [] for arm in job.arms}
                for repeat in range(repeats):
                    for arm in job.arms[:: -1 if repeat % 2 else 1]:
                        steps[arm].append(step := turn(arm))
                        which = f"{mbit:g} Mbit/s, round {repeat + 1} of {repeats}"
                        print(f"{which}: {step.seconds:7.2f} s, {arm}", flush=True)
                yield mbit, _PROBE / 2 / alone, steps


# -- the plan, for this very machine


def _rates(rank: int, device: str) -> Any:
    """The rates of this CPU, by two ranks that compute at once."""
    import torch.distributed as dist

    from benchmarks import rates
    from titan_ext.base import no_accelerator

    dist.init_process_group("gloo")
    no_accelerator.fast_bfloat16_matmul()
    return rates.fit(rates.usual(device), [*rates.timed(rates.chosen(device, False), device)])


def _plan(job: Job, machine: Any, folder: Path, rank: int, arm: str) -> Plan:
    from titan_ext.base.machines import machine_toml
    from titan_ext.plan.dry_run import dry_run
    from titan_ext.plan.stand_ins import as_rank

    (file := folder / "machine.toml").write_text("\n".join([*machine_toml(machine), ""]))
    with as_rank(job.ranks, 0, job.per_node):
        config = config_of(job, arm, folder)
        run = dry_run(config, job.ranks, machine=str(file), as_on_a_gpu=False)
    assert run.clock is not None
    assert run.time is not None
    works = (work for queue in run.clock.streams.queues.values() for work in queue)
    on_link_ms = sum(work.on_link_ms for work in works if work.link == "network")
    return Plan(run.time.step_ms / 1e3, on_link_ms / 1e3 * machine.network * job.per_node)


def plans_of(job: Job, machine: Any, folder: Path) -> dict[str, Plan]:
    from titan_ext.verify.ranks import Processes

    machine = replace(machine, ranks_per_node=job.per_node, nvlink_domain=job.per_node)
    with Processes(1, functools.partial(_plan, job, machine, folder), folder) as planner:
        return {arm: planner.call(arm)[0] for arm in job.arms}


# -- what comes out


def _spread(values: Sequence[float]) -> list[float]:
    return [min(values), statistics.median(values), max(values)]


def summary(
    steps: Mapping[str, Sequence[Step]], plans: Mapping[str, Plan]
) -> dict[str, dict[str, Any]]:
    """The figures of each arm; a spread is the least, the median and the most of its rounds."""
    found: dict[str, dict[str, Any]] = {}
    for arm, its in steps.items():
        row = found[arm] = {"seconds": _spread([step.seconds for step in its])}
        for name, other in (("of ours", OURS), ("of stock", STOCK)):
            pairs = zip(its, steps[other], strict=True)
            row[name] = _spread([one.seconds / two.seconds for one, two in pairs])
            row[f"planned {name}"] = plans[arm].seconds / plans[other].seconds
        apart = [a.loss - b.loss for a, b in zip(its, steps[STOCK], strict=True)]
        sent, cpu_s = (statistics.median(x) for x in zip(*(s[2:0:-1] for s in its), strict=True))
        row |= {"planned seconds": plans[arm].seconds, "planned sent": plans[arm].sent}
        row |= {"sent": sent, "cpu_s": cpu_s, "loss": its[-1].loss, "apart": max(apart, key=abs)}
    for row in found.values():
        saved, cost = found[OURS]["sent"] - row["sent"], row["cpu_s"] - found[OURS]["cpu_s"]
        row["breaks even"] = saved / cost if min(saved, cost) > 0 else None
    return found


_COLUMNS = (
    "arm | s a step | of ours | planned | of stock | planned | MB a node sends | planned | "
    "CPU s a rank | breaks even, MB/s | last loss | apart from stock's, at most"
)


def table(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A markdown table; brackets have the least and the most of the rounds."""
    yield f"| {_COLUMNS} |"
    yield "|---" * len(_COLUMNS.split("|")) + "|"
    for arm, row in rows.items():
        cells = [arm, "{1:.2f} ({0:.2f} to {2:.2f})".format(*row["seconds"])]
        for name in ("of ours", "of stock"):
            cells.append("{1:.3f} ({0:.3f} to {2:.3f})".format(*row[name]))
            cells.append(f"{row[f'planned {name}']:.3f}")
        cells += [f"{row[name] / 1e6:.2f}" for name in ("sent", "planned sent")]
        at = row["breaks even"]
        cells += [f"{row['cpu_s']:.2f}", "" if at is None else f"{at / 1e6:.1f}"]
        cells += [f"{row['loss']:.4f}", f"{row['apart']:+.1e}"]
        yield f"| {' | '.join(cells)} |"


def draw(results: Sequence[Mapping[str, Any]]) -> Any:
    """A matplotlib figure: a row for each job, a panel for each rate, a bar for each arm."""
    from matplotlib.figure import Figure

    columns = len({result["mbit"] for result in results})
    lines = -(-len(results) // columns)
    figure = Figure(figsize=(1 + 5.5 * columns, 0.5 + 3.5 * lines), layout="constrained")
    panels = [*figure.subplots(lines, columns, squeeze=False).flat]
    for axes in panels[len(results) :]:
        axes.set_axis_off()
    for axes, result in zip(panels, results, strict=False):
        arms = result["arms"]
        least, middle, most = zip(*(row["of stock"] for row in arms.values()), strict=True)
        sides = ((least, middle), (middle, most))
        errors = [[b - a for a, b in zip(*side, strict=True)] for side in sides]
        axes.barh(list(arms), middle, xerr=errors, capsize=3, color="#2e75b6", label="measured")
        planned = [row["planned of stock"] for row in arms.values()]
        axes.plot(planned, list(arms), "D", color="#ed7d31", label="planned")
        for place, row in enumerate(arms.values()):
            text = f"{row['seconds'][1]:.2f} s, {row['sent'] / 1e6:.1f} MB"
            axes.text(0.02, place, text, va="center", color="white", fontsize="small")
        axes.invert_yaxis()
        axes.set_xlim(0, 1.1 * max(*most, *planned))
        axes.set_xlabel("median step, of stock TorchTitan's (lines: least to most)")
        what = f"{result['job']}, measured over {result['mbit']:g} Mbit/s".replace("; ", "\n")
        axes.set_title(what, loc="left", fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False)
    return figure


def write(results: Sequence[Mapping[str, Any]], folder: Path) -> None:
    (folder / "slow_link.json").write_text(json.dumps(results, indent=1) + "\n")
    parts = [
        f"{r['job']}, over {r['mbit']:g} Mbit/s, {r['repeats']} rounds; an exchange alone gets "
        f"{r['alone'] * 8 / 1e6:.1f} Mbit/s\n\n" + "\n".join(table(r["arms"]))
        for r in results
    ]
    (folder / "slow_link.md").write_text("\n\n".join(parts) + "\n")
    draw(results).savefig(folder / "slow_link.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rates", nargs="+", type=float, default=[20, 100], help="Mbit/s")
    parser.add_argument("--models", nargs="+", default=["deepseek_v3"], choices=JOBS)
    parser.add_argument("--repeats", type=int, default=5, help="rounds of turns (%(default)s)")
    parser.add_argument("--machine", help="rates of this machine, else they are timed first")
    parser.add_argument("--out", type=Path, default=Path("outputs/slow_link"))
    args = parser.parse_args()
    if os.geteuid():
        parser.error("it makes network namespaces; expected to be run as root.")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            parser.error(f"there is no program {tool} here; expected Debian's package iproute2.")
    for number in _SIGNALS[1:]:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # before torch is imported
    import titan_ext.run.trainer  # noqa: F401  # forks have it
    from titan_ext.base.machines import machine_of
    from titan_ext.base.stdlib_corpus import make_corpus
    from titan_ext.verify.ranks import Processes

    make_corpus()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.machine:
        machine = machine_of(args.machine)
    else:
        print("timing kernels of this machine, for the plan", flush=True)
        with Processes(2, _rates, args.out) as ranks:
            machine = ranks.call("cpu")[0]
    results: list[dict[str, Any]] = []
    for model in args.models:
        job, folder = JOBS[model], args.out / model
        with contextlib.closing(measure(job, args.rates, args.repeats, folder)) as measured:
            for mbit, alone, steps in measured:
                plans = plans_of(job, replace(machine, network=alone), folder / f"{mbit:g}")
                arms = summary(steps, plans)
                about = {"job": str(job), "mbit": mbit, "repeats": args.repeats, "alone": alone}
                results.append({**about, "arms": arms, "steps": steps})
                write(results, args.out)  # what is done stays, if a later one fails
                print(f"{job}, over {mbit:g} Mbit/s", *table(arms), sep="\n", flush=True)
    print(args.out / "slow_link.md")


if __name__ == "__main__":
    main()
