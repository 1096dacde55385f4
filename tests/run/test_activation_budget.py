"""`activation_checkpoint.budget` in a run: solved once, held to, the same on all ranks."""

import copy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchtitan.tools.logging import init_logger

from tests.helpers.cluster import forked_commands, run_ranks
from tests.helpers.fp8_activations import debug_model
from tests.helpers.toml_files import DEBUG, Loader
from tests.helpers.training import Run, make_config
from titan_ext.activation_checkpoint import FP8AC, memory_report_of
from titan_ext.activation_checkpoint.policy import enable_fp8_activation_checkpointing
from titan_ext.base.stdlib_corpus import STDLIB_CORPUS, make_corpus
from titan_ext.config_registry.resolve import load
from titan_ext.plan.budget import _Blocks
from titan_ext.run.budget import FOLDER, ActivationBudget, solve_elsewhere, use

BUDGET = 4 * 2**20
TEXT = f"""
extends = "deepseek_v3.deepseek_v3_debugmodel"
hf_assets_path = "{STDLIB_CORPUS}"
dataloader.dataset = "{STDLIB_CORPUS}"
training.local_batch_size = 2
training.steps = 1
training.seq_len = 128
parallelism.expert_parallel_degree = 2
checkpoint.enable = false
debug.seed = 42
debug.deterministic = true
debug.moe_force_load_balance = true
debug.enable_structured_logging = false
[activation_checkpoint]
policy = "fp8"
exempt = ["layers.*"]
budget = "{BUDGET // 2**20}MiB"
"""


def _train(folder: Path) -> tuple[int, FP8AC.Config | None]:
    """Bytes that the blocks hold after one forward, and the policy."""
    init_logger()
    config = load(folder / "run.toml")
    config.dump_folder = str(folder / "run")
    with forked_commands():  # the solver
        trainer: Any = config.build()
    trainer.train()
    rows = memory_report_of(trainer.model_parts).rows()
    result = sum(row.nbytes for row in rows), trainer.config.activation_checkpoint
    trainer.close()
    dist.barrier()
    return result


def test_a_run_holds_what_was_solved(tmp_path: Path):
    make_corpus()
    (tmp_path / "run.toml").write_text(TEXT)
    ranks = run_ranks(_train, 2, tmp_path, log_folder=tmp_path / "logs")
    log, other = ((tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1))
    solves = "a dry run of rank 0 of 2 looks for the best policies"
    assert (log.count(solves), other.count(solves)) == (1, 0)
    (_, policy), (_, others) = ranks
    assert policy is not None
    assert policy == others
    assert (policy.budget, policy.preset) == ("", "stock")
    assert "save" in policy.op_policies.values()
    assert "save_float8" not in policy.op_policies.values()
    (line,) = [line for line in log.splitlines() if line.startswith("this budget")]
    solved = float(line.split()[2]) * 2**20
    for held, _ in ranks:
        assert held <= BUDGET
        rounded = 0.05 * 2**20  # as it is printed
        assert held == pytest.approx(solved, abs=0.01 * solved + rounded)
    again = load(tmp_path / "run" / "config.toml")
    assert again.activation_checkpoint == policy, "config.toml starts the same run"


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of solvers that ran; each finds the same."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        commands.append(command)
        assert not {"RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"} & options["env"].keys()
        folder = Path(command[command.index("--out") + 1])
        table = '\n[activation_checkpoint.op_policies]\n"*" = "recompute"\n'
        section = f'[activation_checkpoint]\npolicy = "fp8"\nbudget = ""\npreset = "stock"\n{table}'
        (folder / "budget.toml").write_text(f'extends = "config.toml"\n{section}')
        load(folder / "budget.toml")
        return SimpleNamespace(returncode=0, stdout="met\n\n[table]", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    for name, value in zip(names, ("0", "0", "8"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "nowhere")
    return commands


def _start(config: Loader, folder: Path, text: str = "", budget: str = "1GiB") -> Any:
    run = config(DEBUG + text + f'[activation_checkpoint]\npolicy = "fp8"\nbudget = "{budget}"\n')
    run.dump_folder = str(folder / "run")
    check = ActivationBudget()
    check.before_start(run)
    return check._section


def test_the_solver_is_a_dry_run_of_this_job(config: Loader, folder: Path, solved: list[list[str]]):
    assert _start(config, folder)["op_policies"] == {"*": "recompute"}
    (command,) = solved
    assert command[2:4] == ["titan_ext", "dry-run"]
    options = [command[command.index(name) + 1] for name in ("--ranks", "--activations")]
    assert options == ["8", "1048576.0KiB"]
    assert "--on-cpu" in command


@pytest.mark.parametrize("has_device", [False, True])
def test_fit_is_the_memory_of_the_device_or_what_is_said(
    has_device: bool,
    config: Loader,
    folder: Path,
    solved: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
):
    if not has_device:
        with pytest.raises(ValueError, match=r'is "fit", and .* no device .* or "fit 80GiB"'):
            _start(config, folder, budget="fit")
        _start(config, folder, budget="fit 80GiB")
    else:
        request.getfixturevalue("accelerator")
        properties = SimpleNamespace(total_memory=80 * 2**30)
        device = SimpleNamespace(get_device_properties=lambda _: properties)
        monkeypatch.setattr(torch, "get_device_module", lambda _: device)
        _start(config, folder, "[training]\ndisable_cuda_graphs = true\n", budget="fit")
    (command,) = solved
    assert command[command.index("--activations") + 1] == "fit"
    assert command[command.index("--memory") + 1] == f"{80 * 2.0**20}KiB"
    assert ("--on-cpu" in command) != has_device


def test_as_many_forwards_are_paid_as_wait_at_once():
    blocks = _Blocks("layers.0", torch.nn.Identity(), ())

    def forward() -> torch.Tensor:
        out = torch.ones(2, requires_grad=True) * 1
        blocks.add_forward(1, blocks.first, (), out)
        return out

    for out in (forward(), forward()):
        out.sum().backward()
    forward()
    assert (blocks.most, blocks.waiting) == (2, 1)


def test_a_budget_may_use_the_host(config: Loader, folder: Path):
    """The limit stays only if the table offloads."""
    text = DEBUG + '[activation_checkpoint]\npolicy = "fp8"\nbudget = "1GiB"\n'
    run = config(text + 'offload_limit = "2GiB"\n')
    asked = run.activation_checkpoint
    assert isinstance(asked, FP8AC.Config)
    assert asked.offloads()
    for treatment, limit in (("offload", "2GiB"), ("save", "")):
        solved = copy.copy(run)
        section = {"policy": "fp8", "preset": "stock", "op_policies": {"input": treatment}}
        use(solved, section | ({"offload_limit": limit} if limit else {}))
        policy = solved.activation_checkpoint
        assert isinstance(policy, FP8AC.Config)
        assert (policy.budget, policy.offload_limit, policy.offloads()) == ("", limit, bool(limit))
    use(run, {"policy": "none"})
    assert run.activation_checkpoint is None


def test_what_stops_the_solver_is_said(
    config: Loader, folder: Path, solved: list[list[str]], monkeypatch: pytest.MonkeyPatch
):
    def fail(command: list[str], **_: Any) -> Any:
        file = folder / "run" / FOLDER / "config.toml"
        return SimpleNamespace(returncode=1, stdout="", stderr=f"{file}: 1 B cannot be met\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ValueError, match=r"^activation_checkpoint\.budget is '1KiB': 1 B cannot"):
        _start(config, folder, budget="1KiB")

    def wait(command: list[str], *, timeout: float, **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", wait)
    with pytest.raises(ValueError, match=r"longer than 270 s\. Expected more comm\.init_timeout"):
        _start(config, folder)
    made: Any = make_config(Run(parallelize="block"), folder)
    made.activation_checkpoint = FP8AC.Config(budget="1GiB")
    with pytest.raises(ValueError, match="this config was made in Python"):
        solve_elsewhere(made, 8, folder, [])


def test_an_own_loop_is_told_what_to_do():
    with pytest.raises(ValueError, match=r"op_policies that titan_ext dry-run --activations finds"):
        enable_fp8_activation_checkpointing(debug_model(layers=1), FP8AC.Config(budget="1GiB"))
