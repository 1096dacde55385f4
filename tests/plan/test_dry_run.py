"""`titan_ext dry-run`: large jobs, one rank, nothing of their size."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torchtitan.distributed.activation_checkpoint import SelectiveAC

from tests.helpers.cluster import Command, run_command, run_ranks
from tests.helpers.toml_files import DEBUG
from tests.helpers.training import Run, make_config
from tests.project.test_train_configs import NAMES, expected_in_header, world_size
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.base import no_accelerator
from titan_ext.base.machines import MACHINES
from titan_ext.base.messages import without_phases
from titan_ext.base.nodes import nvlink_domain, ranks_per_node
from titan_ext.base.tensors import is_plain
from titan_ext.config_registry.commands import main
from titan_ext.config_registry.resolve import resolve
from titan_ext.plan.dry_run import dry_run
from titan_ext.plan.op_cost import group_ms
from titan_ext.plan.stand_ins import AttentionShapes, as_rank, use_stand_ins
from titan_ext.toml.files import shipped_configs

ROOT = Path(__file__).parents[2]


def _dry_run(folder: Path, *arguments: str) -> Command:
    return run_command(folder, "dry-run", *arguments)


def _line(text: str, name: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(name)]


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_best_policies_for_a_budget(folder: Path):
    flags = ["--training.local_batch_size", "2", "activation_checkpoint:fp8"]
    flags += ["--activation_checkpoint.score_before_last_gemm"]  # its experts are others
    options = ["--ranks", "8", "--activations", "10MiB", "--out", "plan"]
    done = _dry_run(folder, "moe_debug.toml", *options, *flags)
    assert (done.code, done.error) == (0, "")
    assert "1 like layers.0, 5 like layers.1; milliseconds at h100 rates" in done.out
    held = {
        m[1].strip(): float(m[2]) for m in re.finditer(r"^(.+?) +([\d.]+) MiB ", done.out, re.M)
    }
    assert held["this budget"] <= 10 < held["stock selective"] < held["no checkpointing"]
    assert _files(folder) == ["plan", "plan/budget.toml"]
    config = resolve(str(folder / "plan" / "budget.toml"), []).config
    policy = config.activation_checkpoint
    assert isinstance(policy, FP8AC.Config)
    assert (policy.preset, config.training.local_batch_size) == ("stock", 2)
    assert list(policy.op_policies)[-1] == "*"
    for pattern, how in policy.op_policies.items():
        assert f'"{pattern}" = "{how}"' in done.out

    # As an ordinary config it holds as much, and every pattern has an effect.
    done = _dry_run(folder, "plan/budget.toml", "--ranks", "8", "--verbose")
    assert "has no effect" not in done.out + done.error
    (stored,) = re.findall(r"stored\(MiB\): ([\d.]+)", done.out + done.error)
    assert float(stored) == pytest.approx(held["this budget"], rel=0.01)


def test_blocks_in_compiled_pieces_hold_their_budget(folder: Path):
    """With what passes between pieces, with tokens that came in float8, and without MTP's."""
    (folder / "run.toml").write_text(
        'extends = "moe_debug.toml"\ncompile.enable = true\nmodel.num_mtp_layers = 1\n'
        'loss.component = "torchtitan.models.deepseek_v3.mtp.MTPLoss"\n'
    )
    options = [
        "--ranks",
        "8",
        "--activations",
        "60MiB",
        "--out",
        "plan",
        "activation_checkpoint:fp8",
    ]
    done = _dry_run(folder, "run.toml", *options)
    (said,) = re.findall(r"^this budget +([\d.]+) MiB", done.out, re.M)
    _dry_run(folder, "plan/budget.toml", "--ranks", "8", "--memory", "8GiB", "--out", "plan")
    moments = json.loads((folder / "plan" / "plan_rank0.json").read_text())["moments"]
    after = next(moment for moment in moments if moment["moment"] == "forward of norm")
    held = sum(after[kind] for kind in ("exact", "float8", "all_to_all")) / 2**20
    assert held == pytest.approx(float(said), abs=0.1)
    assert 50 < held <= 60


def test_float8_is_planned_for_a_machine_that_has_it(folder: Path):
    """Rowwise linears need no GPU to be planned. MXFP8 needs another, or kernels of torchao's."""

    def run(machine: str, converter: str) -> Command:
        given = [
            'extends = "moe_debug.toml"',
            "training.disable_cuda_graphs = true",
            "[[model.converters]]",
            f'component = "torchtitan.components.quantization.{converter}"',
        ]
        (folder / "run.toml").write_text("\n".join(given))
        return _dry_run(folder, "run.toml", "--ranks", "2", "--machine", machine)

    done = run("h100", "Float8LinearConverter")
    assert done.code == 0, done.error
    assert "MFU" not in done.out  # of whose peak?
    for machine, problem in (("h100", "supported on SM100"), ("b200", "need Triton, which torch")):
        done = run(machine, "MXFP8LinearConverter")
        assert (done.code, "Traceback" in done.error) == (1, False)
        assert problem in done.error


@pytest.mark.slow
def test_a_table_for_halves_counts_the_operations_of_each(folder: Path):
    """A table by the operations of both was refused: no rule met those of the second half."""
    flags = ("--parallelism.expert_parallel_degree", "2", "--parallelism.overlap_exchanges")
    policy = ("halves", "activation_checkpoint:fp8", "--activation_checkpoint.budget", "120MiB")
    done = _dry_run(folder, "moe_debug.toml", "--ranks", "8", *flags, *policy)
    assert (done.code, done.error) == (0, "")
    assert "budget 120.0 MiB: met" in done.out


@pytest.mark.slow
@pytest.mark.parametrize("offload_limit", ["", "1GiB"])
def test_a_budget_for_a_memory_fits_and_leaves_little(folder: Path, offload_limit: str):
    (folder / "run.toml").write_text(
        'extends = "moe_debug.toml"\n[training]\ndisable_cuda_graphs = true\n'
        '[activation_checkpoint]\npolicy = "fp8"\nbudget = "fit"\n'
        f'offload_limit = "{offload_limit}"\n'
    )
    memory = 336 + 4 * 600  # MiB; for tensors, and for CUDA's context and three communicators
    done = _dry_run(folder, "run.toml", "--ranks", "8", "--memory", f"{memory}MiB")
    (held,) = map(float, re.findall(r"^this budget +([\d.]+) MiB", done.out, re.M))
    (spare,) = map(float, re.findall(r"fits in 2.67 GiB, ([\d.]+) GiB to spare", done.out))
    assert 100 < held < 200
    assert spare < 0.1  # the band of a plan, and what no operation fills
    waits = re.findall(r"([\d.]+) MiB wait on the host", done.out)
    assert bool(waits) == bool(offload_limit)
    assert ("offloaded activations of this rank" in done.out) == bool(offload_limit)


def test_a_stage_names_the_blocks_that_only_others_have(folder: Path):
    """The first stage has the dense block, and blocks like those of the second."""
    flags = ("--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "2")
    done = _dry_run(
        folder, "moe_debug.toml", "--ranks", "4", "--rank", "2", "--activations", "10MiB", *flags
    )
    assert (done.code, done.error) == (0, "")
    assert "other stages have blocks like layers.0, and none is here" in done.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--activations", "20"], "--activations is '20'; expected a size"),
        (["--activations", "fit"], "--activations fit needs --memory"),
        (["--activations", "1GiB", "--all-stages"], "--activations plans one rank"),
    ],
)
def test_a_budget_is_refused(options, message, capsys):
    assert main(["dry-run", "moe_debug.toml", "--ranks", "8", *options]) == 1
    assert message in capsys.readouterr().err


def test_a_step_of_the_debug_model_leaves_no_trace(folder: Path):
    """Nor does anything that a new process imports say a word."""
    command = [sys.executable, "-m", "titan_ext", "dry-run", "moe_debug.toml", "--ranks", "64"]
    command += ["--machine", "h100", "--parallelism.fsdp_wrap", "auto", "activation_checkpoint:fp8"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert (run.returncode, without_phases(run.stderr)) == (0, "")
    assert len(run.stderr.splitlines()) >= 3, "a phase each"
    out = run.stdout
    assert re.search("^memory +fits in 79.00 GiB", out, re.M), "as much as an H100 has"
    assert _files(folder) == []
    # Figures of the same model in a run, and of the arithmetic: fp32, Adam.
    assert "deepseek_v3 debugmodel, 33.01 M parameters" in out
    assert "rank 0 of 64: FSDP 64, EP 2 (spmd_types)" in out
    # On 64 ranks the experts are sharded across nodes: what auto takes there.
    assert "13 units in 13 groups: 1 embedding, 6 block, 5 experts, 1 head" in out
    assert re.search(r'^ +auto is "experts", 2 .* \(EP 2, experts. shards across nodes', out, re.M)
    assert "256 sequences (65,536 tokens) a step" in out
    parameters, gradients, states = map(
        float, re.findall(r"([\d.]+) MiB", _line(out, "this rank")[0])
    )
    assert parameters == gradients
    assert states == pytest.approx(2 * parameters, rel=0.05)
    assert "forward, loss, backward, gradient clipping, optimizer" in out
    (ms,) = re.findall(
        r"^time +expect [\d,]+ tokens/s a GPU \(\+-\d+%\), ([\d.]+) ms a step on h100$", out, re.M
    )
    timed = out.partition("\ntime ")[2]
    *parts, total, ideal = map(float, re.findall(r"^ +([\d.]+)  [a-z]", timed, re.M))
    assert total == float(ms) == pytest.approx(sum(parts), abs=0.7)
    assert ideal < total
    assert re.search(r"  ideal, at the rates of single kernels: [\d,]+ tokens/s a GPU, MFU ", out)
    assert re.search(r" float8 codec$", out, re.M)


def test_every_stage_of_a_pipeline(folder: Path):
    """Each with its verdict first, and with a file; the fullest comes last.

    A step that does not fit has an exit status of its own.
    """
    flags = ("--memory", "1GiB", "--parallelism.pipeline_parallel_degree", "2")
    flags += ("--training.local_batch_size", "2")
    done = _dry_run(
        folder,
        "moe_debug.toml",
        "--ranks",
        "4",
        "--all-stages",
        "--out",
        "plans",
        *flags,
    )
    assert (done.code, done.error) == (3, "")
    files = [f"plans/plan_rank{rank}.{kind}" for rank in (0, 2) for kind in ("json", "png")]
    assert _files(folder) == ["plans", *files]
    plans = [json.loads((folder / name).read_text()) for name in files[::2]]
    fullest = min(plans, key=lambda plan: plan["spare"])
    assert f"-- the fullest of 2 stages: {fullest['verdict']}" in done.out.splitlines()
    assert re.findall(r"^-- rank (\d)", done.out, re.M) == ["0", "2"]
    assert re.findall(r"^stage +(\d) of 2", done.out, re.M) == ["0", "1"]
    assert _line(done.out, "FSDP units")[1].endswith("1 head")
    for stage, text in enumerate(done.out.split("-- rank ")[1:]):
        verdict = rf"memory +does not fit in 1.00 GiB, .* of rank {2 * stage} \(stage {stage}\): "
        assert re.match(verdict, text.splitlines()[1])
        assert plans[stage]["verdict"] in text
        assert plans[stage]["config"]["parallelism.pipeline_parallel_degree"] == 2
        held = text.split("reserved (")[0].rpartition("\n")[0]
        *parts, total = map(float, re.findall(r"^ +([\d.]+)  [a-z]", held, re.M))
        assert total == pytest.approx(sum(parts), abs=0.06)
    assert "memory for activations" not in done.out


_DENSE_STAGE = Run(world=8, ep=4, pp=2, layers=6, narrow=True, ac="none", global_batch=64)
"""Of its stages the first has a dense block, and no MoE layer."""
_AT_START: dict[str, dict[str, Any]] = {
    "two hops": {"schedule": "Interleaved1F1B", "exchange_rows": "node"},
    "halves": {"schedule": "Interleaved1F1B", "overlap_exchanges": "halves"},
    "reduce-scatters": {"world": 16, "ep": 2, "pp": 4, "reduce_scatter_buffers": 2},
}


def _groups_made(run: Run, rank: int, folder: Path) -> int:
    with as_rank(run.world, rank, ranks_per_node=2, nvlink_domain=2):
        config: Any = make_config(run, folder)
        return dry_run(config, run.world, rank, step=False).process_groups


@pytest.mark.parametrize(
    "name", ["two hops", "reduce-scatters", pytest.param("halves", marks=pytest.mark.slow)]
)
def test_all_stages_make_the_same_process_groups(name: str, tmp_path: Path):
    """They make them together, so that one more on some ranks is a hang."""
    run = replace(_DENSE_STAGE, parallelize="submodule", **_AT_START[name])
    made = [
        run_ranks(_groups_made, 1, run, rank, tmp_path, log_folder=tmp_path / "logs")[0]
        for rank in (0, run.world - 1)
    ]
    assert made[0] == made[1] > 0


def test_stages_that_make_different_process_groups_are_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def told(file: Path, options: Any) -> Any:
        out = f"groups      {7 + int(options[-1])} made at the start, all ranks together\n"
        return SimpleNamespace(returncode=0, stdout=out, stderr="")

    monkeypatch.setattr("titan_ext.run.record.dry_run_elsewhere", told)
    flags = ("--all-stages", "--parallelism.pipeline_parallel_degree", "2")
    assert main(["dry-run", "moe_debug.toml", "--ranks", "4", *flags]) == 1
    said = capsys.readouterr()
    assert "groups      9 made" in said.out
    assert "together: rank 0 7, rank 2 9. The job would hang" in said.err


def _kept_of_attention(config: str, *flags: str) -> int:
    """Bytes that Titan's selective policy keeps of a planned attention of 4 KiB each of q, k, v."""
    with no_accelerator.as_with_an_accelerator():
        planned: Any = resolve(config, [*flags]).config
    use_stand_ins(planned)
    (*_, attention) = (at[1] for at in planned.model_spec.traverse(AttentionShapes.Config))
    ops = SelectiveAC(SelectiveAC.Config()).get_save_ops()
    caching, _ = create_selective_checkpoint_contexts(list(ops))
    with FakeTensorMode(), caching:
        attention.build()(*(torch.empty(1, 8, 4, 32) for _ in range(3)))
    saved = [
        getattr(x, "val", None)
        for calls in caching.storage.values()
        for x in tree_leaves([*calls.values()])
    ]
    return sum(x.nbytes for x in saved if isinstance(x, torch.Tensor) and x.numel() >= 1024)


def test_selective_checkpointing_keeps_q_and_k_of_an_eager_flex_attention():
    """An H100 held them, since the attention's compiled region returns them for its backward."""
    job = "deepseek_v3_16b.toml"
    eager = ("--compile.components", "loss")
    assert _kept_of_attention(job, *eager) == 3 * 4096
    assert _kept_of_attention(job) == 4096
    assert _kept_of_attention(job, *eager, "activation_checkpoint:fp8") == 4096


def test_cuda_graphs_are_off_where_titan_has_none(folder: Path):
    """On a CPU they are off before anyone asks; a dry run is of a GPU."""
    (folder / "run.toml").write_text(DEBUG + "[parallelism]\nexpert_parallel_degree = 2\n")
    # Context parallelism needs FlexAttention under spmd_types, with its masks.
    flags = ("--parallelism.context_parallel_degree", "2", "--training.seq_len", "512")
    done = _dry_run(folder, "run.toml", "--ranks", "8", "--verbose", *flags)
    assert done.code == 0
    assert "disable_cuda_graphs is true: CUDA graphs support only expert parallel" in done.out
    assert "rank 0 of 8: FSDP 4, CP 2, EP 2 (spmd_types)" in done.out
    assert "optimizer, on fake tensors" in done.out


@pytest.mark.parametrize(
    ("backend", "buffers"), [("minimal_async_ep", "; 0.12 buffers of symmetric"), ("hybridep", "")]
)
def test_a_dispatcher_with_a_buffer_is_planned_by_it(backend: str, buffers: str, folder: Path):
    """Titan's own operations have room for the worst routing; nobody waits for counts, and a graph
    holds the step. A run in its folder says how much room is enough, on as many ranks."""
    name = f"deepseek_v3.deepseek_v3_debugmodel_{backend}"
    degrees = "data_parallel_shard_degree = -1, expert_parallel_degree = 4"
    routing = {"ep": 4, "most": 0.3003, "passes": {"299": 7, "301": 1}}
    starts = [
        {"receipts": {"routing": routing}},
        {"receipts": {"routing": routing | {"ep": 2}}},
        {},
    ]
    (folder / "run.json").write_text(json.dumps({"starts": starts}))
    policy = "activation_checkpoint.policy = 'full'"
    (folder / "run.toml").write_text(
        f"extends = '{name}'\ndump_folder = '.'\nparallelism = {{{degrees}}}\n{policy}\n"
    )
    done = _dry_run(folder, "run.toml", *("--ranks", "4", "--memory", "8GiB", "--machine", "h100"))
    assert (done.code, done.error) == (0, "")
    assert done.out.startswith("memory      fits in 8.00 GiB")
    # Two of 16,384 tokens x 4 ranks x 2 experts of a token there at most x 256 x 2 bytes.
    assert f"for each of 1 communicators{buffers}" in done.out
    assert (
        "capacity    non_blocking_capacity_factor = 0.301 would have dropped nothing of 8"
        in done.out
    )
    assert "waits for exchanges of tokens" in done.out
    assert "waits for the host" not in done.out
    assert "as an all-to-all" not in done.out


def test_a_plan_says_which_nodes_it_assumes(folder: Path):
    """In its lines and its JSON; units and links follow from them."""
    options = ["--ranks", "8", "--memory", "8GiB", "--machine", "card.toml", "--out", "plans"]
    times = {}
    for nodes, words, units in (
        ("ranks_per_node = 2", "2 ranks each, NVLink among 2", "across nodes"),
        ("ranks_per_node = 2\nnvlink_domain = 8", "2 ranks each, NVLink among 8", "across"),
    ):
        (folder / "card.toml").write_text(f'extends = "h100"\n{nodes}\n')
        done = _dry_run(folder, "moe_debug.toml", *options)
        assert (done.code, done.error) == (0, "")
        assert _line(done.out, "nodes") == [f"nodes       {words}"]
        assert units in done.out
        plan = json.loads((folder / "plans" / "plan_rank0.json").read_text())
        assert f"{plan['ranks_per_node']} ranks each, NVLink among {plan['nvlink_domain']}" == words
        times[words] = plan["time"]["step_ms"]
    apart, joined = times.values()
    assert joined < apart


def test_nodes_of_this_machine_do_not_leak_into_a_plan(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    links = []
    for nodes in ((), (4,), (4, 72)):
        with as_rank(64, 0, *nodes):
            _, link = group_ms(MACHINES["h100"], 2**20, range(8))
            links.append((ranks_per_node(), nvlink_domain(), link))
    assert links == [(8, 8, "node"), (4, 4, "network"), (4, 72, "node")]
    assert ranks_per_node() == 2


def test_a_fake_tensor_is_stored_as_a_plain_one():
    with torch._subclasses.FakeTensorMode():
        assert is_plain(torch.ones(1))
    assert is_plain(torch.ones(1))
    assert not is_plain(nn.Parameter(torch.ones(1)))


_SIZES = [(name, world_size(path), ()) for name, path in shipped_configs().items()]
_PIPELINE = ("--parallelism.pipeline_parallel_degree", "16")
_PIPELINE += ("--parallelism.expert_parallel_degree", "64", "--training.local_batch_size", "16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "flags"),
    [*_SIZES, ("deepseek_v3_671b", 2048, ()), ("deepseek_v3_671b", 2048, _PIPELINE)],
)
def test_every_shipped_file_at_its_size(
    name: str, ranks: int, flags: tuple[str, ...], folder: Path
):
    assert name in NAMES
    options = ("--ranks", str(ranks), "--memory", "141GiB", "--machine", "h100")
    done = _dry_run(folder, f"{name}.toml", *options, *flags)
    text = shipped_configs()[name].read_text()
    if (said := re.search(expected_in_header, text)) and ranks < 600:
        (expected,) = re.findall(r"expect ([\d,]+) tokens/s a GPU \(\+-26%\)", done.out)
        figures = (int(text.replace(",", "")) for text in (expected, said[1]))
        assert next(figures) == pytest.approx(next(figures), rel=0.01)
    assert (done.code, done.error) == (0, "")
    assert f"rank 0 of {ranks}" in done.out
    assert "optimizer, on fake tensors" in done.out
    has_budget = re.search(r"^activation_checkpoint.budget", text, re.MULTILINE)
    solved = r"activations of this rank's blocks, budget [\s\S]+?\n" if has_budget else ""
    assert re.match(rf"(note .*\n)?{solved}memory +fits in 141.00 GiB", done.out)
    assert _files(folder) == []
    assert done.peak_gib < 2
    print(f"\n{done.out}\n{name}, {ranks} ranks: {done.cpu_s:.0f} CPU s, {done.peak_gib:.2f} GiB")
