"""``titan_ext verify``: right jobs are RIGHT, and planted faults are named."""

import contextlib
import functools
import io
import itertools
import os
import re
import tomllib
import unittest.mock
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.loss import MSELoss
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.models.deepseek_v3 import model_registry

from tests.helpers.cluster import run_ranks
from tests.verify.faults import (
    ALL_AT_ONCE,
    ALL_RESUMES,
    AT_ONCE,
    FAULTS,
    IN_KEYS,
    IN_THE_LAST_STEP,
    IN_THE_MODEL,
    OF_ADAPTERS,
    OF_COMPILED,
    OF_CONTEXT,
    OF_FLOAT8,
    OF_IDLE,
    OF_KINDS,
    OF_OTHERS,
    OF_REPLICAS,
    RESUMES,
    lost_scores,
)
from titan_ext.base import no_accelerator
from titan_ext.base.nodes import Nodes
from titan_ext.config_registry.commands import main
from titan_ext.config_registry.resolve import resolve
from titan_ext.config_registry.verify import Verify
from titan_ext.parallelize.keys import COMPILE
from titan_ext.toml.files import ranks_of
from titan_ext.verify import legs
from titan_ext.verify.arm import Arm, KeepDtype, batch, max_norm, samples_of_step
from titan_ext.verify.judge import Verdict, Wrong
from titan_ext.verify.legs import Legs, _check_routing, rounding_keys
from titan_ext.verify.reference import Reference
from titan_ext.verify.small import (
    Layout,
    _kept_layers,
    decisions,
    differences,
    in_other_layout,
    layout_of,
    lost_shards,
    make_small,
    other_layouts,
    resumes,
    small_layout,
    why_not,
)

QUICK = ("a detached router", "trained on padding")

FLOAT8 = """
extends = "moe_debug.toml"
[parallelism]
exchange_dtype = "float8"
fsdp_float8_all_gather = "blocks"
[activation_checkpoint]
policy = "fp8"
"""
"""A job that stores and sends float8."""

KINDS = """
extends = "moe_debug.toml"
world_size = 2
[parallelism]
expert_parallel_degree = 2
[model]
flavor = "debugmodel"
num_mtp_layers = 2
[loss]
component = "torchtitan.models.deepseek_v3.mtp.MTPLoss"
[[model.converters]]
component = "torchtitan.components.quantization.Float8LinearConverter"
filter_fqns = ["lm_head", "router.gate"]
[[model.converters]]
component = "torchtitan.components.quantization.MXFP8GroupedExpertsConverter"
"""
"""A job with blocks and modules that the others do not have."""

CONTEXT = 'extends = "moe_debug.toml"\n[parallelism]\ncontext_parallel_degree = 2\n'
"""Two ranks share a sequence."""

REPLICAS = """
# EP: 2
extends = "moe_debug.toml"
[parallelism]
data_parallel_replicate_degree = 2
[activation_checkpoint]
policy = "fp8"
score_before_last_gemm = true
"""
"""Replicas of shards, and scores that experts apply early."""

ADAPTERS = """
extends = "moe_debug.toml"
[parallelism]
tensor_parallel_degree = 2
[[model.converters]]
component = "torchtitan.components.lora.LoRAConverter"
rank = 8
alpha = 16.0
target_modules = ["wq", "wo", "w1", "w2"]
"""
"""Adapters of linears that tensor parallelism shards by columns and by rows."""

COMPILED = """
extends = "moe_debug.toml"
[compile]
enable = true
[activation_checkpoint]
policy = "fp8"
"""
"""Regions with a checkpoint inside, which keeps float8."""

IDLE = '# routing: idle\nextends = "moe_debug.toml"\n'
"""No token goes to the first expert."""


def _small(path: str, flags: tuple[str, ...], ranks: int) -> Any:
    with no_accelerator.as_with_an_accelerator():
        config = resolve(path, flags).config
    return make_small(config, layout_of(config, ranks, Nodes(8, 8)))


def _sweep(
    folder: Path, path: str, ranks: int, faults: Sequence[str]
) -> dict[str, dict[str, list[str]]]:
    """Lines of a right job ("") and of each fault that a leg calls WRONG, by category."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    said = dict(re.findall("^# (EP|routing): (.*)", Path(path).read_text(), re.M))
    job = _small(path, ("--parallelism.expert_parallel_degree", said.get("EP", str(ranks))), ranks)
    job = replace(job, routing=said.get("routing", "balanced"))
    planted, train, judge = folder / "planted", legs._train, legs._judge
    table = FAULTS | OF_OTHERS

    def train_with_fault(job: Any, rank: int, call: Any) -> Any:
        fault = planted.read_text()
        with table[fault][0]() if fault else contextlib.nullcontext():
            return train(job, rank, call)

    def judge_with_fault(job: Any, rank: int, call: Any) -> Any:
        fault = planted.read_text()
        if fault not in IN_THE_MODEL:
            return judge(job, rank, call)
        known = unittest.mock.patch.object(legs, "_first_steps", {})
        with known, table[fault][0]():
            return judge(job, rank, call)

    found = {}
    patched = unittest.mock.patch.multiple(legs, _train=train_with_fault, _judge=judge_with_fault)
    with patched, legs.Legs(job, folder) as comparison:
        for fault in ("", *sorted(faults, key=lambda fault: not _is_of_resume(fault))):
            planted.write_text(fault)
            # The same arms, with another fault: one that comes after a resume saves as the right.
            trained = comparison._trained.items() if _is_of_resume(fault) else ()
            comparison._trained = {call: arm for call, arm in trained if call[1] is None}
            comparison._resumes = True
            is_late = not fault or _is_of_resume(fault) or fault in IN_THE_LAST_STEP
            steps = {} if is_late else {"steps": 2}
            wrong = {} if fault in IN_KEYS else comparison.axes(**steps).wrong
            if fault in IN_KEYS or (not fault and set(faults) & set(IN_KEYS)):
                wrong |= comparison.keys().wrong
            found[fault] = {kind: [*map(str, each)] for kind, each in wrong.items()}
    return found


def _is_of_resume(fault: str) -> bool:
    return bool(fault) and (FAULTS | OF_OTHERS)[fault][1] == "resume"


Swept = Callable[..., dict[str, dict[str, list[str]]]]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    @functools.cache
    def sweep(
        ranks: int, faults: tuple[str, ...], text: str = 'extends = "moe_debug.toml"'
    ) -> dict[str, dict[str, list[str]]]:
        folder = tmp_path_factory.mktemp("verify")
        (job := folder / "job.toml").write_text(text)
        arguments = folder, str(job), ranks, faults
        (found,) = run_ranks(_sweep, 1, *arguments, log_folder=folder, timeout_s=900)
        return found

    return sweep


def _check(fault: str, found: dict[str, dict[str, list[str]]]) -> None:
    assert found[""] == {}
    _, category, says = (FAULTS | OF_OTHERS)[fault]
    assert says in found[fault][category][0]


def test_faults_are_named(swept: Swept):
    """And what a resume loses. In one test: workers of pytest-xdist would sweep once each."""
    found = swept(2, (*QUICK, ALL_AT_ONCE, ALL_RESUMES))
    for fault in (*QUICK, *AT_ONCE):
        _check(fault, found | dict.fromkeys(AT_ONCE, found[ALL_AT_ONCE]))
    for fault, (_, begins) in RESUMES.items():
        named = [line for line in found[ALL_RESUMES]["resume"] if line.startswith(begins)]
        on = {re.search(r"after the resume on (.*?) is", line)[1] for line in named}  # type: ignore[index]
        only_in_another = fault == "experts exchanged"
        here = {"2 ranks, EP 2 x EDP 1"} if not only_in_another else set()
        assert on == {"2 ranks"} | here, fault


@pytest.mark.slow
@pytest.mark.parametrize("fault", OF_OTHERS)
def test_all_faults_of_other_jobs_are_named(fault: str, swept: Swept):
    """In the job that has what the fault is of."""
    jobs = {FLOAT8: OF_FLOAT8, KINDS: OF_KINDS, CONTEXT: OF_CONTEXT}
    jobs |= {REPLICAS: OF_REPLICAS, ADAPTERS: OF_ADAPTERS, IDLE: OF_IDLE, COMPILED: OF_COMPILED}
    text, of_job = next(job for job in jobs.items() if fault in job[1])
    _check(fault, swept(4, tuple(of_job), text))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_all_faults_are_named(fault: str, swept: Swept):
    """On four ranks, where the experts' degree is no other's."""
    _check(fault, swept(4, tuple(FAULTS)))


def _command(folder: Path, flags: list[str], fault: Any) -> tuple[int, str]:
    """Exit code and output of the command, with a fault in this process and its forks."""
    os.chdir(folder)  # a file for the next try is written there
    os.environ.pop("WORLD_SIZE", None)  # as in a terminal
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), fault() if fault else contextlib.nullcontext():
        try:
            code = main(["verify", *flags])
        except SystemExit as end:
            code = int(end.code or 0)
    return code, said.getvalue()


def _run_command(
    folder: Path, *flags: str, fault: Any = None, config: str = "moe_debug.toml"
) -> tuple[int, str]:
    ((code, said),) = run_ranks(
        _command, 1, folder, [config, *flags], fault, log_folder=folder, timeout_s=300
    )
    return code, said


@contextlib.contextmanager
def _without_ranks() -> Any:
    """Comparisons that are right at once."""

    def compiles(legs: Legs) -> bool:
        return legs.job.config.compile.enable

    with contextlib.ExitStack() as stack:
        for leg in ("axes", "keys", "graphs"):
            stack.enter_context(unittest.mock.patch.object(Legs, leg, return_value=Verdict()))
        for kind, method, result in (
            (Verify, "_look_at_data", lambda self, *_: (True, [])),
            (Legs, "__enter__", lambda self: print(f"compiles {compiles(self)}") or self),
        ):
            stack.enter_context(unittest.mock.patch.object(kind, method, result))
        yield


def _replays(folder: Path) -> list[tuple[int, str]]:
    flags = [], ["--quick"], ["--training.disable_cuda_graphs"]
    jobs = [["qwen3_30b_a3b.toml", *more] for more in flags]
    return [_command(folder, [*job, "--ranks", "16"], _without_ranks) for job in jobs]


def test_the_shipped_file_with_graphs_is_replayed_without_a_flag(tmp_path: Path):
    """And what is not replayed is said to be left out."""
    (found,) = run_ranks(_replays, 1, tmp_path, log_folder=tmp_path)
    assert [code for code, _ in found] == [0, 0, 0]
    assert "\ngraphs    operations replayed as a CUDA graph would beside" in found[0][1]
    left_out = [re.findall("(?<!a GPU's )CUDA graphs[^,]*", said) for _, said in found]
    assert left_out == [[], ["CUDA graphs"], ["CUDA graphs (off; --graphs replays them)"]]
    compiled = [("compiles True" in said, "torch.compile" in said) for _, said in found]
    assert compiled == [(True, False), (False, True), (True, False)]


@pytest.mark.slow
def test_the_key_to_blame_is_named(tmp_path: Path):
    flags = ("--ranks", "2", "--machine", "h200", "--parallelism.exchange_rows", "rank")
    code, said = _run_command(tmp_path, *flags, fault=lost_scores)
    assert code == 1
    assert re.search(r"^  grads +WRONG +layers\.1\.", said, re.M)
    assert "blame     stock TorchTitan is right on this layout\n" in said
    assert re.findall(r"wrong with (.*)", said) == ['parallelism.exchange_rows = "rank"']
    assert re.findall(r"right with (.*)", said) == ['parallelism.exchange_rows = "expert"']
    again = "titan_ext verify wrong_moe_debug.toml --ranks 2 --machine h200 "
    again += "--parallelism.exchange_rows rank"
    assert f"again:    {again}\n" in said
    written = tomllib.loads((tmp_path / "wrong_moe_debug.toml").read_text())
    assert written["activation_checkpoint"] == {"policy": "none"}
    assert "exchange_rows" not in written["parallelism"]


def test_a_v_shaped_pipeline_has_its_losses_on_its_first_ranks(tmp_path: Path):
    (tmp_path / "v.toml").write_text(
        'extends = "llama3.llama3_debugmodel"\n'
        'loss.component = "torchtitan.components.loss.CrossEntropyLoss"\n'
        "parallelism.pipeline_parallel_degree = 2\n"
        'parallelism.pipeline_parallel_schedule = "ZBVZeroBubble"\n'
        'activation_checkpoint.policy = "none"\n'
    )
    code, said = _run_command(tmp_path, "--ranks", "2", "--quick", config="v.toml")
    assert (code, "WRONG" in said) == (0, False), said
    assert re.search(r"^RIGHT \(dtypes not compared, \d+ s, ", said, re.M)
    assert re.search(r"^not reached here: what more of a size .*", said, re.M)
    shape = dict(re.findall(r"^ {10}([a-z ]+?) +[\d,]+ +([\d,]+)$", said, re.M))
    assert (shape["blocks"], shape["words"], shape["steps"]) == ("6", "320", "4")
    assert re.search(r"^  loss +(equal|rounding only)", said, re.M)
    assert "6 -> 6 blocks" in said  # two stages a rank, of two blocks where the model has them


_KEYS = {f"parallelism.key{n}": "off" for n in range(6)}


@pytest.mark.parametrize("faulty", [(), (3,), (0, 5), (2, 3)])
def test_the_fewest_keys_are_found(faulty: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    """Without any one of them the job is right."""
    need, runs = {f"parallelism.key{n}" for n in faulty}, []

    def axes(self: Any, *, stock: bool = False, changes: Any = (), steps: int) -> Any:
        runs.append(changes)
        assert not stock or changes == ((COMPILE, False),)
        is_right = stock or bool(need & {key for key, _ in changes})
        return Verdict({} if is_right else {"grads": [Wrong("w", 1.0)]}, step=steps)

    monkeypatch.setattr(legs.Legs, "axes", axes)
    monkeypatch.setattr(legs.Legs, "other_values", lambda self: iter(_KEYS.items()))
    blame = legs.Legs(job=None, folder=Path()).blame("axes", Verdict(step=1))  # type: ignore[arg-type]
    assert set(blame.keys) == set(blame.cures) == need
    assert set(blame.off) == _KEYS.keys() - need
    assert len(runs) <= 1 + 12 + len(faulty)


_PIPELINE = ("--parallelism.pipeline_parallel_degree", "2")
_WHOLE_EXPERTS = ("--parallelism.expert_parallel_degree", "4")


_REFUSED: dict[tuple[str, ...], str] = {
    ("--model", "tests.verify.nothing"): "--model: tests.verify.nothing: tests.verify has no",
    ("--keep", "training.seqlen"): "--keep training.seqlen: expected some of",
    ("--graphs", *_PIPELINE): "--graphs: TorchTitan captures no pipelines in CUDA graphs.",
    ("--parallelism.tensor_parallel_degree", "3"): "expected degrees whose product divides 4",
    # which only the number of ranks tells
    (*_WHOLE_EXPERTS, "--parallelism.fsdp_expert_reduce_scatter", "bfloat16"): (
        'fsdp_expert_reduce_scatter = "bfloat16" needs experts that FSDP shards'
    ),
}


def _refusals(folder: Path) -> list[tuple[int, str]]:
    return [_command(folder, ["moe_debug.toml", *flags], None) for flags in _REFUSED]


def test_what_cannot_be_verified_ends_with_2(tmp_path: Path):
    (found,) = run_ranks(_refusals, 1, tmp_path, log_folder=tmp_path)
    for (code, said), says in zip(found, _REFUSED.values(), strict=True):
        assert (code, said.startswith("NOT VERIFIED: ")) == (2, True), said
        assert says in said


def test_losses_and_adapters_that_the_reference_does_not_have():
    config: Any = resolve("moe_debug.toml").config
    chunks = config.loss.loss_fn
    config.loss.loss_fn = MSELoss.Config()
    assert why_not(config) == "the reference computes CrossEntropyLoss by hand, not MSELoss.Config."
    config.loss.loss_fn = chunks
    for converter in (
        Float8LinearConverter.Config(filter_fqns=["lm_head"], emulate=True),
        LoRAConverter.Config(rank=4, alpha=8.0, target_modules=["wo"]),
    ):
        assert why_not(config) == ""
        converter.build().convert(config.model_spec.model)
    assert why_not(config).startswith("LoRA on linears or experts in fewer bits")


def test_what_is_plain_in_which_comparison(tmp_path: Path):
    (path := tmp_path / "job.toml").write_text(KINDS)
    job = _small(str(path), (), 2)
    assert job.plain == ("MXFP8GroupedExperts",)
    for fp32 in (True, False):
        model = Arm(fp32=fp32).config_of(job).model_spec.model
        assert has_quantization(model) == (not fp32)


def test_what_the_job_freezes_is_frozen(tmp_path: Path):
    """Adapters train alone, in both comparisons."""
    (path := tmp_path / "job.toml").write_text(ADAPTERS)
    job = _small(str(path), (), 4)
    for arm in (Arm(), Arm(fp32=False), Arm(stock=True)):
        with torch.device("meta"):
            model = arm.config_of(job).model_spec.model.build()
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        assert trained == {name for name, _ in model.named_parameters() if ".lora_" in name}


def test_ours_is_compiled_and_stock_in_the_second_comparison_is_not():
    job = _small("moe_debug.toml", ("--compile.enable",), 2)
    assert rounding_keys(job.config) == [COMPILE]
    for arm in (Arm(), Arm(stock=True), Arm(stock=True, changes=((COMPILE, False),))):
        compiles = arm.config_of(job).compile
        assert (compiles.enable, compiles.backend) == (not arm.changes, "aot_eager")


def test_what_is_compiled_runs_in_fp32():
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16() / 2

    compiled = torch.compile(halved, backend="aot_eager", fullgraph=True)
    counters.clear()
    with KeepDtype():
        x = torch.tensor([1 + 2**-20], requires_grad=True)
        assert torch.equal(compiled(x), x / 2)
    assert counters["stats"]["unique_graphs"] == 1


def test_places_that_round_for_no_kernel_are_named():
    class Experts:
        _grouped_mm = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.bfloat16() * 1

    def rounds(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16).float()

    x, rounded = torch.tensor([1 + 2**-20]), set[str]()
    with KeepDtype(rounded):
        assert torch.equal(Experts().forward(x), x)
        assert not rounded
        assert torch.equal(rounds(x), torch.ones(1))
    (place,) = rounded
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ \(.*\.rounds\)", place)
    with KeepDtype():
        assert torch.equal(rounds(x), x)


def test_dtypes_and_offload_of_an_arm():
    """Parameters in bf16 are fp32 in the first comparison, and Titan's offload would pin memory."""
    flags = ("--training.dtype", "bfloat16", "--training.enable_cpu_offload")
    job = _small("moe_debug.toml", flags, 2)
    for arm in (Arm(), Arm(fp32=False), Arm(stock=True)):
        training = arm.config_of(job).training
        assert training.dtype == ("float32" if arm.fp32 else "bfloat16")
        assert training.enable_cpu_offload == (not arm.stock)


SHIPPED = sorted(path.name for path in Path("train_configs").glob("*.toml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_small_job_decides_as_the_large_one(name: str):
    config = resolve(name).config
    job = make_small(config, layout_of(config, ranks_of(name), Nodes(8, 8)))
    decided, layout, other = decisions(job.config, job.layout), job.layout, in_other_layout(job)
    assert differences(job.decisions, decided) + lost_shards(job.decisions, decided) == []
    assert job.parameters < 80e6
    assert job.decisions["prefetch"].endswith(" behind")
    if name == "deepseek_v3_671b.toml":  # 512 ranks share 256 experts
        assert str(layout) == "8 ranks, EP 2 x EDP 4"
    if layout.world == 1:
        assert other is None
        return
    parallelism = replace(job.config.parallelism, fsdp_prefetch=0)
    ahead = decisions(replace(job.config, parallelism=parallelism), layout)
    (changed,) = differences(job.decisions, ahead)
    assert changed.startswith("prefetch:")
    assert other is not None  # where it resumes
    assert other.layout.world <= layout.world // 2
    assert (other.layout.ep > 1) == (layout.ep > 1)


@pytest.mark.parametrize(
    ("ranks", "ep", "tp", "layout", "experts", "top_k", "shards"),
    [
        (8, 8, 1, "4 ranks, EP 4 x EDP 1", 4, 2, None),  # a rank has one
        (64, 8, 1, "8 ranks, EP 4 x EDP 2", 4, 2, "experts along dim 1, ranks without rows"),
        (64, 2, 1, "8 ranks, EP 2 x EDP 4", 6, 2, "experts along dim 1, ranks without rows"),
        (64, 4, 2, "16 ranks, TP 2, EP 4 x EDP 4", 8, 3, "experts along dim 1"),
        (6, 2, 1, "6 ranks, EP 2 x EDP 3", 8, 3, "ranks without rows, unequal rows"),
        (4, 2, 1, "4 ranks, EP 2 x EDP 2", 8, 3, None),
    ],
)
def test_ranks_have_as_many_experts_and_rows(
    ranks: int, ep: int, tp: int, layout: str, experts: int, top_k: int, shards: str | None
):
    """Of a layer with eight experts, three for a token."""
    degrees = {"expert": ep, "tensor": tp}
    flags = tuple(f"--parallelism.{axis}_parallel_degree={n}" for axis, n in degrees.items())
    job = _small("moe_debug.toml", flags, ranks)
    moe = job.config.model_spec.model.layers[-1].moe
    assert str(job.layout) == layout
    for part in (moe.router, moe.routed_experts.token_dispatcher):
        assert (part.num_experts, part.top_k) == (experts, top_k)
    assert decisions(job.config, job.layout).get("shards") == shards


@pytest.mark.parametrize(
    ("ranks", "flags", "shape"),
    [
        (4, {}, {"blocks": 5, "words": 320, "sequences": 4, "microbatches": 2, "steps": 4}),
        (4, {"training.seq_len": 254}, {"tokens of a sequence": 70}),
        (4, {"training.seq_len": 40}, {"tokens of a sequence": 40}),
        (4, {"training.local_batch_size": 1}, {"sequences": 1}),
        (4, {"training.local_batch_size": 9}, {"sequences": 5}),
        (4, {"training.global_batch_size": 48}, {"microbatches": 3}),
        (4, {"training.global_batch_size": 112}, {"microbatches": 5}),
        (4, {"training.global_batch_size": 160}, {"microbatches": 4}),
        (8, {}, {"ranks": 8, "replicas": 1}),
        (64, {}, {"ranks": 8, "experts a rank": 3}),  # more ranks than experts
        (8, {"parallelism.expert_parallel_degree": 8}, {"ranks": 4, "experts a rank": 1}),
        (8, {"parallelism.data_parallel_replicate_degree": 2}, {"ranks": 8, "replicas": 2}),
        (16, {"parallelism.data_parallel_replicate_degree": 4}, {"ranks": 12, "replicas": 3}),
        (8, {"parallelism.data_parallel_replicate_degree": 4}, {"ranks": 8, "replicas": 4}),
    ],
)
def test_each_size_keeps_its_class(ranks: int, flags: dict[str, int], shape: dict[str, int]):
    job = _small("moe_debug.toml", tuple(f"--{key}={value}" for key, value in flags.items()), ranks)
    assert {axis: job.shape[axis][1] for axis in shape} == shape
    training, samples = job.config.training, job.samples
    assert (samples.length, samples.microbatch) == (training.seq_len, training.local_batch_size)


@pytest.mark.parametrize(
    ("count", "kept"),
    [(1, (0,)), (4, (0, 1, 2, 3)), (27, (0, 1, 2, 13, 26)), (61, (0, 1, 2, 30, 60))],
)
def test_blocks_at_the_ends_and_in_the_middle_remain(count: int, kept: tuple[int, ...]):
    """And a second one of each kind: here of the dense one, which is the first of all."""
    config: Any = resolve("moe_debug.toml").config
    dense, *experts = config.model_spec.model.layers
    config.model_spec.model.layers = [dense, *(experts[0] for _ in range(count - 1))]
    assert _kept_layers(config) == kept


def test_what_counts_and_how_far_a_step_goes():
    """Documents of each sequence, microbatches and ranks without labels, and where it clips."""
    job = _small("moe_debug.toml", (), 4)
    samples = job.samples
    of_microbatch = samples.step // samples.passes
    for step in (1, 2, 3):
        inputs, labels = batch(samples_of_step(job, step), job, 0)
        documents = (inputs["positions"] == 0).sum(-1)
        assert set(documents[: samples.microbatch].tolist()) == {1, 2, 4}
        assert int(inputs["positions"].max()) == samples.length - 1 > 64
        assert int(inputs["input"].max()) == job.config.model_spec.model.vocab_size - 1 > 256
        counted = (labels != -100).any(-1).view(samples.passes, samples.ranks, -1)
        idle = {2: [(-1, slice(None))], 3: [(slice(None), 0)]}.get(step, [])
        for passes, ranks in idle:
            assert not counted[passes, ranks].any()
            counted[passes, ranks] = True
        assert counted.all()
        assert (max_norm(job, step) < 1) == (step != 2)
    assert of_microbatch * samples.passes == samples.step


def test_a_model_of_the_users_is_not_made_smaller():
    config = resolve("moe_debug.toml").config
    large = layout_of(config, 4, Nodes(8, 8))
    job = make_small(config, large, spec=model_registry("debugmodel"))
    model = job.config.model_spec.model
    assert (len(model.layers), model.dim) == (6, 256)
    assert differences(job.decisions, decisions(job.config, job.layout)) == []
    with pytest.raises(ValueError, match=r"^--model has 15,\d+ M parameters; expected at most"):
        make_small(config, large, spec=model_registry("16B"))


def test_a_small_layout_loses_no_axis():
    """Each axis stays, expert parallelism below, at or above tensor parallelism, and EDP; or no."""
    refused = []
    sizes = (1, 2, 4), (1, 2, 8, 24, 512), (1, 4), (1, 2, 8), (1, 4), (1, 2, 4, 16, 64)
    for copies, shard, cp, tp, pp, ep in itertools.product(*sizes):
        if shard * cp * tp % ep:
            continue
        is_crowded = shard == 512
        experts = 256 if is_crowded else 10_000
        degrees = {"dp_replicate": copies, "dp_shard": shard, "cp": cp, "tp": tp, "pp": pp}
        large = Layout(**degrees, ep=ep, nodes=Nodes(8, 8))
        try:
            small = small_layout(large, "spmd_types", experts)
        except ValueError as error:
            refused.append(str(error))
            continue
        assert small.relations == large.relations
        assert small.world <= min(16, large.world)
        if is_crowded and small.dp_replicate * small.pp == 1:  # else there is no room
            assert small.expert_ranks("spmd_types") >= 8
        beside = small.dp_replicate * small.pp * small.cp * small.tp
        if shard == 24 and large.shards > ep and beside <= 2:
            assert small.dp_shard in (3, 6)
        assert small.shards % small.ep == 0
        others = other_layouts(small)
        assert small.world == 1 or others
        for other in others:
            assert other.world <= small.world
            assert other.shards % other.ep == 0
            assert (str(other), other.pp) != (str(small), small.pp)
    assert refused
    assert all(re.search(" need (32|64) processes here: ", each) for each in refused)
    large = Layout(dp_replicate=1, dp_shard=12, cp=1, tp=2, pp=1, ep=3, nodes=Nodes(8, 8))
    with pytest.raises(ValueError, match="no degrees of 1, 2, 4 and 8 stand in the relations of"):
        small_layout(large, "spmd_types")


@pytest.mark.parametrize(("routing", "load"), [("idle", 0), ("skewed", 1152), ("balanced", None)])
def test_all_tokens_go_to_an_expert_or_none(routing: str, load: int | None):
    """Of two ranks with four sequences of 72 tokens in each of two microbatches."""
    job = replace(_small("moe_debug.toml", (), 2), routing=routing)
    found = Reference(job, 0, torch.float32).step(1).loads
    _check_routing(job, found)
    of_first = {int(load_E[0]) for load_E in found.values()}
    assert (of_first == {load}) == (load is not None)
    if load is not None:
        with pytest.raises(ValueError, match=f"--routing {routing} needs a bias"):
            _check_routing(job, {"layers.1.moe": torch.ones(8)})


@pytest.mark.parametrize(
    ("enable", "excluded", "says"),
    [
        (True, [], True),
        (True, ["dataloader"], True),  # verify has its own batches
        (True, ["optimizer"], False),
        (False, [], False),
    ],
)
def test_what_goes_on_from_its_checkpoints(enable: bool, excluded: list[str], says: bool):
    checkpoint = SimpleNamespace(enable=enable, exclude_from_loading=excluded)
    assert resumes(SimpleNamespace(checkpoint=checkpoint)) == says


def test_a_decision_that_changed_is_said():
    large = {"fsdp_wrap": "experts", "moe units": "reshard True"}
    assert differences(large, {"fsdp_wrap": "submodule"}) == [
        "fsdp_wrap: experts in the job, submodule in the small one",
        "moe units: reshard True in the job, none in the small one",
    ]
