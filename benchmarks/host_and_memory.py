"""The host's time and a rank's bytes, ours beside stock TorchTitan's, in one table.

    python -m benchmarks.host_and_memory              # about 5 minutes of two cores, no GPU
    python -m benchmarks.host_and_memory --arms ours halves --rounds 40

It measures three quantities that need no GPU:

- ms of the host in the forward of one debug MoE block of 16 tokens, of which Python is the most,
  and for an operation of forward, recompute and backward: ratios of the latter are
  ``plan.time.POLICIES``. Policies take turns in one process.
- CPU seconds of a whole step: Titan's trainer is rank 0 of 8, and collectives only copy
  (``comm.mode`` "fake_backend"). Each arm is a process that waits for its turn, with one batch.
- Bytes of one microbatch there, by torch's own means (``measure_bytes``), with a plan's beside.

Ratios are to stock selective of the same round: median, and quartiles. A CPU converts float8 in
software, so float8's times have the codec's arithmetic, too. ``host_and_memory.json`` has all.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.fused_attention import use_fused_attention
from titan_ext.base.tensors import plain_tensors
from titan_ext.plan.op_cost import moves_nothing

ROOT = Path(__file__).parents[1]
RANKS = 8
PRESETS = ("memory", "balanced", "speed", "gemms")
_FLOAT8 = "activation_checkpoint:fp8 --activation_checkpoint"
ARMS = {
    "stock": "",
    "ours": "",
    "ours, one unit ahead": "--parallelism.fsdp_prefetch 1",
    **{preset: f"{_FLOAT8}.preset {preset}" for preset in PRESETS},
    "budget": f"{_FLOAT8}.budget 12MiB",
    "halves": "--parallelism.overlap_exchanges halves",
}
"""What each adds to the job. Those without float8 have stock's policy, "selective"."""
_COLUMNS = {
    "block": ("host ms of a block's forward", 1e-3),
    "operation": ("host us of its operations", 1e-6),
    "step": ("CPU s of a step", 1.0),
    "held": ("MiB held", 2**20),
    "hooked": ("MiB held, by hooks", 2**20),
    "peak": ("MiB at the peak", 2**20),
    "units": ("MiB gathered", 2**20),
    "buffers": ("the same with flat buffers", 2**20),
}

Figures = dict[str, Any]


def quarter_16b() -> Any:
    """DeepSeek-V3 16B a quarter as wide, four layers, 117 M parameters, from Titan's debug config.

    Attention and experts weigh as much of a block as in 16B: they decide what units gather.
    """
    import torchtitan.models.deepseek_v3 as titan
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    config = deepseek_v3_debugmodel()
    assert config.model_spec is not None
    model: Any = config.model_spec.model
    dim, words = 512, model.vocab_size
    attention = {"n_heads": 4, "q_lora_rank": 0, "kv_lora_rank": 128, "v_head_dim": 128}
    attention |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    experts = {"num_experts": 64, "num_shared_experts": 2, "router_top_k": 6, "moe_hidden_dim": 352}
    rope = titan.ComplexRoPE.Config(dim=64, max_seq_len=1024, theta=10000.0)
    # Private, as its inits: Titan's registry has no width between the debug model and 16B.
    model.layers = titan._build_dsv3_layers(
        **{**attention, **experts, "n_layers": 4, "n_dense_layers": 1, "dense_hidden_dim": 2736},
        **{"dim": dim, "mscale": 0.7, "rope": rope, "router_score_func": "softmax"},
        **{"attn_backend": "flex", "moe_comm_backend": "standard"},
        non_blocking_capacity_factor=None,
    )
    model.dim = dim
    model.tok_embeddings = titan.Embedding.Config(
        num_embeddings=words, embedding_dim=dim, param_init=titan._EMBEDDING_INIT
    )
    model.norm = titan.RMSNorm.Config(normalized_shape=dim, param_init=titan._NORM_INIT)
    model.lm_head = titan.Linear.Config(
        in_features=dim, out_features=words, param_init=titan._output_linear_init(dim)
    )
    use_fused_attention(config.model_spec)  # a CPU's own keeps S x S tensors
    # Titan's chunked loss calls the head for each chunk, and MemTracker refuses a second call.
    config.loss = CrossEntropyLoss.Config(global_vocab_size=words)
    config.training.local_batch_size, config.training.seq_len = 2, 256
    config.parallelism.expert_parallel_degree = 4  # below the ranks: FSDP has experts to shard
    return config


@contextlib.contextmanager
def _job(arm: str) -> Iterator[Any]:
    """The config of rank 0, in an environment of its job."""
    from titan_ext.base.stdlib_corpus import default_tokenizer_path, make_corpus
    from titan_ext.config_registry.resolve import resolve
    from titan_ext.plan.stand_ins import as_rank, as_stock

    make_corpus()
    os.environ["NGPU"] = str(RANKS)  # where fake_backend's init_distributed reads it
    with tempfile.TemporaryDirectory() as folder, as_rank(RANKS, 0):
        flags = f"--comm.mode fake_backend --dump_folder {folder} --training.steps 100000 "
        flags += f"--dataloader.dataset python_stdlib --hf_assets_path {default_tokenizer_path()} "
        flags += "--checkpoint.no-enable --metrics.log_freq 100000 --debug.moe_force_load_balance "
        flags += "--parallelism.fsdp_wrap submodule --training.disable_cuda_graphs "
        flags += f"--debug.seed 0 {ARMS[arm]}"  # a policy is last
        config = resolve("benchmarks.host_and_memory.quarter_16b", flags.split()).config
        if arm == "stock":
            as_stock(config)
        yield config


# -- bytes, measured and planned


class Gathered(TorchDispatchMode):
    """The most bytes that FSDP had gathered, as seen after each operation.

    MemTracker takes them for parameters or activations, and nothing public in FSDP2 tells them
    apart. So this reads sizes of storages, by private names: flat buffers that units arrive in, and
    whole parameters. Hooks of units would not see what is gathered ahead of them.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        super().__init__()
        self._groups, self.units, self.buffers = groups, 0, 0
        self.now: dict[int, int] = {}
        """Bytes by storage."""

    def look(self) -> None:
        units, self.now = 0, {}
        for group in self._groups:
            wholes = _sizes(x for param in group.fsdp_params for x in param.all_gather_outputs)
            arriving = _buffer(group._all_gather_result)
            units += max(sum(wholes.values()), sum(arriving.values()))
            self.now |= wholes | arriving
        copied = self._groups[0].comm_ctx.all_gather_state  # FSDP2 keeps it until the next copy
        self.now |= _buffer(copied and copied.all_gather_result)
        self.units = max(self.units, units)
        self.buffers = max(self.buffers, sum(self.now.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.look()
        return out


def _buffer(result: Any) -> dict[int, int]:
    return {} if result is None else _sizes([result.all_gather_output])


def _sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by storage, so that each counts once."""
    storages = (part.untyped_storage() for x in tensors for part in plain_tensors(x))
    return {storage._cdata: storage.nbytes() for storage in storages}


def measure_bytes(trainer: Any, step: Callable[[], None]) -> Figures:
    """Of one step of a trainer that has made one already.

    "held" is what lives between forward and loss, less what lived before, logits and what FSDP has
    gathered. torch's MemTracker (private) counts it, and the peak, whoever holds it. It refuses a
    second forward; torch's FSDPMemTracker refuses units of two parameter groups. "hooked" is the
    same by hooks for saved tensors, which cannot look into the hooks of float8's own policies.
    """
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    from titan_ext.fsdp.units import param_groups

    (model,), loss = trainer.model_parts, trainer.loss_fn
    gathered, tracker = Gathered(param_groups(model.modules())), MemTracker()
    saved: dict[int, int] = {}
    found: Figures = {}

    def total(kind: str = "current") -> int:
        return sum(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot(kind).values())

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.update({} if found else _sizes([x]))
        return x

    def between(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gc.collect()
        gathered.look()
        out = _sizes([logits]) | gathered.now
        found["held"] = total() - before - sum(out.values())
        out |= _sizes([*model.parameters(), *model.buffers()])
        found["hooked"] = sum(nbytes for storage, nbytes in saved.items() if storage not in out)
        return loss(logits, *args, **kwargs)

    trainer.optimizers.zero_grad()
    gc.collect()  # Titan leaves that to its loop
    tracker.track_external(model, *trainer.optimizers)
    before = total()
    wrappers: list[Any] = []
    hooks: Any = contextlib.nullcontext()
    if type(trainer.config.activation_checkpoint) is SelectiveAC.Config:
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
        wrappers += [at for at in model.modules() if isinstance(at, CheckpointWrapper)]
    for wrapper in wrappers:  # else hooks do not see what checkpointing saves (torch 2.15)
        wrapper.checkpoint_fn.keywords["respect_saved_tensors_hooks"] = True
    trainer.loss_fn = between
    with gathered, tracker, hooks:
        step()
    trainer.loss_fn = loss
    for wrapper in wrappers:
        del wrapper.checkpoint_fn.keywords["respect_saved_tensors_hooks"]
    return {**found, "peak": total("peak"), "units": gathered.units, "buffers": gathered.buffers}


def plan(arm: str) -> Iterator[Figures]:
    """The bytes of a dry run, with the kernels of a CPU."""
    from titan_ext.activation_checkpoint.op_rules import has_budget
    from titan_ext.plan.dry_run import dry_run
    from titan_ext.plan.report import to_json
    from titan_ext.run.budget import solve_in_dry_run

    with _job(arm) as config:
        if has_budget(config):
            solve_in_dry_run(config, RANKS, [], ["--on-cpu"])
        planned = to_json(dry_run(config, RANKS, memory=0, as_on_a_gpu=False), {})
    loss = next(phase for phase in planned["moments"] if phase["moment"] == "loss")
    held = sum(loss[kind] for kind in ("exact", "float8", "all_to_all"))
    yield {"held": held, "peak": planned["peak"]["sum"], "buffers": planned["unsharded"]}


# -- time, in turn


def measure(arm: str) -> Iterator[Any]:
    """An arm's bytes, and then the CPU seconds of one step after the other."""
    with _job(arm) as config:
        trainer = config.build()
        batch, labels = next(trainer.batch_generator(trainer.dataloader))

        def step() -> None:
            trainer.step += 1
            trainer.train_step(iter([(dict(batch), labels)]))

        step()  # makes FSDP's buffers, the optimizer's states and the report of activations
        yield measure_bytes(trainer, step)
        while True:
            begin = time.process_time()
            step()
            yield time.process_time() - begin
            gc.collect()


class _Operations(TorchDispatchMode):
    """Counts operations that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.launched = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.launched += not moves_nothing(func)
        return func(*args, **(kwargs or {}))


def block_times(rounds: str) -> Iterator[dict[str, dict[str, list[float]]]]:
    """CPU seconds of the thread, one a round, by arm: the columns "block" and "operation".

    The arms that are left out have a policy of these; "ours" shows the noise.
    """
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    from tests.helpers.fp8_activations import debug_model
    from titan_ext.activation_checkpoint import FP8AC

    torch.set_num_threads(1)
    x_BLD = torch.randn(1, 16, 256, dtype=torch.bfloat16, requires_grad=True)
    policies: dict[str, Any] = {arm: SelectiveAC.Config() for arm in ("stock", "ours")}
    policies |= {"stock none": None, "stock full": FullAC.Config()}
    policies |= {preset: FP8AC.Config(preset=preset) for preset in PRESETS}
    policies["preset stock"] = FP8AC.Config(preset="stock")
    policies |= {f"mode {mode}": FP8AC.Config(mode=mode) for mode in ("full", "no_recompute")}
    blocks = {}
    for arm, policy in policies.items():
        model = debug_model(layers=2)
        if policy:
            policy.build(dump_folder="").apply(model)
        block = model.layers["1"]
        for each in model.layers.values():  # the first forward of each is reported
            each(x_BLD, None, None).sum().backward()
        with _Operations() as counted:
            block(x_BLD, None, None).sum().backward()
        blocks[arm] = block, counted.launched
    times: dict[str, Any] = {arm: {"block": [], "operation": []} for arm in blocks}
    for _ in range(int(rounds)):
        for arm, (block, operations) in blocks.items():
            begin = time.thread_time()
            out_BLD = block(x_BLD, None, None)
            times[arm]["block"].append(time.thread_time() - begin)
            out_BLD.sum().backward()
            times[arm]["operation"].append((time.thread_time() - begin) / operations)
    yield times


TASKS: dict[str, Callable[[str], Iterator[Any]]] = {
    "blocks": block_times,
    "plan": plan,
    "measure": measure,
}


def _start(stack: contextlib.ExitStack, out: Path, *task: str) -> Any:
    """A process of its own, since Titan allows one layout in each; its first answer is coming."""
    log = stack.enter_context((out / f"{' '.join(task)}.log").open("w"))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": ""}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
    program = [sys.executable, "-m", "benchmarks.host_and_memory", "--task", *task]
    process = subprocess.Popen(program, cwd=ROOT, env=environment, **pipes)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _answer(process: Any) -> Any:
    if line := process.stdout.readline():
        return json.loads(line)
    raise SystemExit(f"a process ended before its answer; its log: {' '.join(process.args[-2:])}")


def table(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for each arm; in brackets a figure's ratio to stock's, and the plan's."""
    yield f"| arm | {' | '.join(name for name, _ in _COLUMNS.values())} |"
    yield "|---" * (1 + len(_COLUMNS)) + "|"
    for arm, row in rows.items():
        cells = [_cell(key, row, rows["stock"]) for key in _COLUMNS]
        yield f"| {arm} | {' | '.join(cells)} |"


def _cell(key: str, row: Mapping[str, Any], stock: Mapping[str, Any]) -> str:
    if not (found := row.get(key)):
        return ""
    unit = _COLUMNS[key][1]
    if isinstance(found, list):
        ratios = [ours / theirs for ours, theirs in zip(found, stock[key], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        return f"{statistics.median(found) / unit:.2f} ({middle:.3f}, {low:.3f} to {high:.3f})"
    planned = row["plan"].get(key)
    beside = f"; plan {planned / unit:.2f}" if planned else ""
    return f"{found / unit:.2f} ({found / stock[key]:.3f}{beside})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "host_and_memory")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--rounds", type=int, default=9, help="steps of each arm (%(default)s)")
    parser.add_argument("--block-rounds", default="100", help="(%(default)s)")
    parser.add_argument("--task", nargs=2, help=argparse.SUPPRESS)  # what a process is to answer
    args = parser.parse_args()
    if args.task:
        said = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            for found in TASKS[args.task[0]](args.task[1]):
                print(json.dumps(found), file=said, flush=True)
                if not sys.stdin.readline():
                    return
        return
    args.out.mkdir(parents=True, exist_ok=True)
    arms = ["stock", *(arm for arm in args.arms if arm != "stock")]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:  # for two cores

        def begin(*task: str) -> tuple[Any, Any]:
            process = _start(stack, args.out, *task)
            return process, _answer(process)

        def once(*task: str) -> Any:
            with contextlib.ExitStack() as alone:
                return _answer(_start(alone, args.out, *task))

        blocks = once("blocks", args.block_rounds)
        plans = [*pool.map(lambda arm: once("plan", arm), arms)]
        begun = [*pool.map(lambda arm: begin("measure", arm), arms)]
        rows = {
            arm: {**found, "plan": planned, **blocks.pop(arm, {}), "step": []}
            for arm, (_, found), planned in zip(arms, begun, plans, strict=True)
        }
        for _ in range(args.rounds):
            for row, (process, _) in zip(rows.values(), begun, strict=True):
                print(file=process.stdin, flush=True)
                row["step"].append(_answer(process))
        rows |= blocks
    (args.out / "host_and_memory.json").write_text(json.dumps(rows, indent=1))
    text = "\n".join([*table(rows), ""])
    (args.out / "host_and_memory.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
