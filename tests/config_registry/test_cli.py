"""The command line tool, apart from dry runs (plan/test_dry_run.py)."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torchtitan.config import ConfigManager

from tests.helpers.toml_files import DEBUG
from titan_ext import config_registry
from titan_ext.base.messages import PHASE, without_phases
from titan_ext.config_registry.commands import main
from titan_ext.config_registry.dry_run import DryRun
from titan_ext.config_registry.resolve import load
from titan_ext.config_registry.tune import Tune
from titan_ext.config_registry.verify import Verify
from titan_ext.toml.convert import leaves
from titan_ext.toml.files import find, ranks_of, shipped_configs

COMMANDS = ("show", "dry-run", "tune", "verify", "peft", "check")
ROOT = Path(__file__).parents[2]
RICH = (
    DEBUG
    + """
    [parallelism]
    fsdp_wrap = "submodule"
    fsdp_reshard_groups = { "layers.[0-3].moe" = "never", attention = "always" }
    [activation_checkpoint]
    policy = "full"
    [[model.converters]]
    component = "torchtitan.components.lora.LoRAConverter"
    rank = 16
    target_modules = ["wq", "wo"]
    [[optimizer.param_groups]]
    pattern = "lora_a"
    optimizer_name = "AdamW"
    optimizer_kwargs = { lr = 3e-4, betas = [0.9, 0.95] }
    [[optimizer.param_groups]]
    pattern = ".*"
    optimizer_name = "AdamW"
    optimizer_kwargs = { lr = 1e-4 }
    """
)
"""Tables with names that need quotes, lists longer than the base's, another policy."""


def test_help_and_missing_files_do_not_wait_for_torch():
    code = (
        "import sys, contextlib\nfrom titan_ext.config_registry.commands import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "assert main(['show']) == 0\n"
        "assert main(['show', 'nothing.toml']) == main(['shw']) == 1\n"
        "assert main(['dry-run', 'nothing', '--ranks', '4']) == 1\n"
        "assert main(['verify', 'nothing', '--ranks', '4']) == 2, 'not verified; 1 is WRONG'\n"
        "wrong = ['--ranks', '4', '--machine', 'h10']\n"
        "assert main(['dry-run', 'moe_debug.toml', *wrong]) == 1\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f"{command} " in done.stdout
    assert "moe_debug" in done.stdout
    assert "qwen3_30b_a3b" in done.stdout


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "titan_ext", "show"]
    listing = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert listing.stdout is not None
    listing.stdout.close()  # as `| head` does
    assert listing.stderr is not None
    assert listing.stderr.read() == ""
    assert listing.wait() == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert f"usage: titan_ext {command}" in out
    assert out.splitlines()[2].endswith((".", ":")), "what the command does, in a sentence"


def test_a_bare_name_is_titans_and_ours_end_in_toml(folder: Path):
    function = "deepseek_v3.deepseek_v3_16b"
    assert find("deepseek_v3_16b") == function
    assert find(function) == function
    assert find("deepseek_v3_16b.toml") == shipped_configs()["deepseek_v3_16b"]
    (folder / "deepseek_v3_16b").mkdir()
    assert find("deepseek_v3_16b") == function, "whatever else is called so"
    (folder / "moe_debug.toml").touch()
    assert find("moe_debug.toml") == Path("moe_debug.toml"), "a file that is here comes first"
    assert find("moe_debug_gpu.toml") == shipped_configs()["moe_debug_gpu"]
    for name in ("moe_debug", "moe_debg"):
        with pytest.raises(ValueError, match=r"did you mean .*moe_debug\.toml"):
            getattr(config_registry, name)
    assert getattr(config_registry, "moe_debug_gpu.toml")().training.steps == 30


def test_arguments_of_another_program_are_no_flags(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "a.toml").write_text(DEBUG)
    monkeypatch.setattr("sys.argv", ["ipykernel", "-f", "kernel.json"])
    flags = ["--parallelism.expert_parallel_degree", "2"]
    config: Any = ConfigManager().parse_args(
        ["--module", "titan_ext", "--config", "a.toml", *flags]
    )
    assert config.parallelism.expert_parallel_degree == 2


def test_the_last_file_says_for_how_many_ranks_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    base = DEBUG
    (folder / "a.toml").write_text(f"{base}world_size = 8\n")
    (folder / "b.toml").write_text('extends = "a.toml"\n')
    (folder / "c.toml").write_text('extends = "b.toml"\nworld_size = 2\n')
    assert [ranks_of(f"{name}.toml") for name in "abc"] == [8, 8, 2]
    assert ranks_of("a.toml", 64) == 64
    (folder / "d.toml").write_text(base)
    with pytest.raises(ValueError, match=r"^d.toml: .*expected --ranks, or a line such as world_"):
        ranks_of("d.toml")
    for wrong in ('"8"', "true", "0"):
        (folder / "d.toml").write_text(f"{base}world_size = {wrong}\n")
        with pytest.raises(ValueError, match=r"world_size: is .*expected a number of ranks"):
            ranks_of("d.toml")
    (folder / "d.toml").write_text(f"{base}world_sise = 8\n")
    with pytest.raises(ValueError, match="did you mean 'world_size'"):
        load("d.toml")
    monkeypatch.setenv("WORLD_SIZE", "4")
    for name, said in (
        ("c", "c.toml is for 2 ranks (world_size); this run has 4."),
        ("b", "b.toml is for 8"),
    ):
        monkeypatch.setattr(
            "sys.argv", ["train", "--module", "titan_ext", "--config", f"{name}.toml"]
        )
        getattr(config_registry, f"{name}.toml")()
        assert said in caplog.messages[-1]


@pytest.mark.parametrize("flags", [[], ["--changed"]])
def test_what_show_prints_is_a_file_for_the_same_config(
    folder: Path, capsys: pytest.CaptureFixture, flags: list[str]
):
    (folder / "run.toml").write_text(RICH)
    assert main(["show", "run.toml", *flags]) == 0
    (folder / "shown.toml").write_text(capsys.readouterr().out)
    loaded: Any = load("run.toml"), load("shown.toml")
    wanted, got = loaded
    assert leaves(got) == leaves(wanted)
    assert got.model_spec.model.to_dict().keys() == wanted.model_spec.model.to_dict().keys()
    assert "LoRA" in str(type(got.model_spec.model.layers[0].attention.wo))  # type: ignore[attr-defined]


def test_show_changed_leaves_the_rest_out(folder: Path, capsys: pytest.CaptureFixture):
    (folder / "run.toml").write_text(DEBUG + "[training]\nsteps = 3\n")
    assert main(["show", "run.toml", "--changed", "--debug.seed", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "# deepseek_v3.deepseek_v3_debugmodel <- run.toml",
        'extends = "deepseek_v3.deepseek_v3_debugmodel"',
    ]
    assert "training.steps = 3  # from run.toml" in lines
    assert "debug.seed = 7  # from command line" in lines
    assert not any("training.seq_len" in line for line in lines)


def test_show_writes_a_file_to_start_from(folder: Path, capsys: pytest.CaptureFixture):
    new = ["show", "deepseek_v3_debugmodel", "--changed", "--out", "mine.toml"]
    new += ["--training.steps", "7"]
    assert main(new) == 0
    assert "mine.toml extends deepseek_v3.deepseek_v3_debugmodel" in capsys.readouterr().out
    assert (folder / "mine.toml").read_text().splitlines() == [
        'extends = "deepseek_v3.deepseek_v3_debugmodel"',
        'dump_folder = "./outputs/mine"',
        "training.steps = 7",
    ]
    assert load("mine.toml").training.steps == 7
    assert main(new) == 1
    assert capsys.readouterr().err == "mine.toml exists; choose another name, or edit it.\n"
    assert main(["show", "mine.toml", "--out", "next.toml"]) == 0
    assert leaves(load("next.toml")) == leaves(load("mine.toml"))


def test_a_file_extends_a_shipped_one_by_its_name(folder: Path):
    """The file serves another machine, where the package lies elsewhere."""
    new = ["show", "moe_debug.toml", "--changed", "--out"]
    assert main([*new, "mine.toml"]) == 0
    assert (folder / "mine.toml").read_text().splitlines()[0] == 'extends = "moe_debug.toml"'
    assert load("mine.toml").training.seq_len == 256
    (folder / "moe_debug.toml").write_text(DEBUG + "[training]\nseq_len = 64\n")
    assert load("mine.toml").training.seq_len == 64, "a file that is here comes first"
    (folder / "below").mkdir()
    assert main([*new, "below/mine.toml"]) == 0
    assert 'extends = "../moe_debug.toml"' in (folder / "below" / "mine.toml").read_text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("show run.toml", "run.toml: steps: no such key"),
        ("shw", "shw: no such command; did you mean 'show'?"),
        ("show --changed", "--changed and --out need CONFIG"),
        ("show moe_debug.toml --out mine", "ends in .toml"),
        ("show moe_debug.toml --out /proc/mine.toml", "/proc/mine.toml: No such file or"),
        ("dry-run moe_debug.toml --ranks 4 --rank 4", "--rank is 4"),
        ("dry-run moe_debug.toml --ranks 4 --memory 80", "--memory is '80'"),
        ("dry-run moe_debug.toml --ranks 4 --out plans", "--out needs --memory"),
        ("dry-run moe_debug.toml --ranks 4 --imbalance 3", "expected 0 to 2"),
        ("tune moe_debug.toml --ranks 4 --out run.toml", "run.toml: File exists."),
        ("tune moe_debug.toml --ranks 4 --out old", "old/tuned.toml exists"),
        ("tune moe_debug.toml --ranks 4 --exact --batch free", "--exact changes no"),
        ("dry-run moe_debug.toml --ranks 4 --on-cpu", "--on-cpu needs --activations"),
        ("dry-run moe_debug.toml --ranks 4 --memry 8GiB", "did you mean '--memory'"),
        ("check", "runs on every rank of a job: torchrun"),
        ("check --mib 0", "expected 1 or more"),
        # A value is no option: "rank" is not --rank.
        (
            "dry-run moe_debug.toml --ranks 4 --parallelism.exchange_rows rank"
            " --parallelism.expert_parallel_degree 1",
            "needs parallelism.expert_parallel_degree > 1",
        ),
    ],
)
def test_a_mistake_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture, line: str, message: str
):
    (folder / "run.toml").write_text(DEBUG + "steps = 3\n")
    (folder / "old").mkdir()
    (folder / "old" / "tuned.toml").touch()
    assert main(line.split()) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_tune_takes_the_nodes_of_its_machine(folder: Path):
    (folder / "rack.toml").write_text('extends = "h100"\nranks_per_node = 2\n')
    for machine, ranks in (("gb200", 4), ("rack.toml", 2)):
        command = Tune("moe_debug.toml", 8, machine=machine, memory="8GiB")
        search, _ = command.search([], folder)
        assert search.job.facts.ranks_per_node == ranks


@pytest.mark.parametrize(("machine", "memory"), [("h100", "79GiB"), ("gb200", ""), ("", "")])
def test_commands_take_the_same_machine_and_memory_for_the_same_words(
    machine: str, memory: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """What verify solves for is a dry run's, on the nodes of the machine that it is told."""
    asked: Any = {"machine": machine} if machine else {}
    dry_run = DryRun("moe_debug.toml", 4, **asked)
    other = replace(dry_run, imbalance=9.0)  # which is refused once all is read
    with pytest.raises(ValueError, match="--imbalance"):
        other.run([])
    assert (other.machine, other.memory) == (machine, memory)
    options = []

    def solve(config: Any, ranks: int, *words: list[str]) -> str:
        options.extend(words)
        raise ValueError("solved")

    monkeypatch.setattr("titan_ext.run.budget.solve_in_dry_run", solve)
    (folder / "fit.toml").write_text(
        'extends = "moe_debug.toml"\n[activation_checkpoint]\npolicy = "fp8"\nbudget = "fit"\n'
    )
    with pytest.raises(ValueError, match="solved"):
        Verify("fit.toml", 4, **asked)._small([])
    of_default = memory if machine else "79GiB"
    words = ["--memory", of_default] if of_default else []
    assert options == [words, ["--machine", machine or "h100", "--on-cpu"]]


_SAYS = """
from titan_ext.config_registry.terminal import loading, phase
loading()
phase("too early")
import titan_ext.config_registry.terminal as terminal
terminal._started -= 7
phase("later")
"""


def test_a_command_says_what_it_does_now():
    done = subprocess.run([sys.executable, "-c", _SAYS], cwd=ROOT, capture_output=True, text=True)
    first, *others = done.stderr.splitlines()
    assert first == f"{PHASE}loading torch and TorchTitan"
    assert others[-1].startswith(f"{PHASE}later (7 s)")
    assert without_phases(f"{done.stderr}a mistake\n") == "a mistake\n"


def test_the_program_ends_with_its_last_line():
    """It takes nothing down, not even what is registered for its end, and keeps its exit code."""
    for arguments, code in ((["show"], 0), (["shw"], 1), (["show", "--help"], 0)):
        lines = (
            "import atexit, sys",
            "from titan_ext.config_registry.commands import main",
            "atexit.register(print, 'taken down')",
            f"sys.argv = ['titan_ext', *{arguments}]",
            "sys.exit(main())",
        )
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == code
        assert "taken down" not in done.stdout
        assert done.stdout or done.stderr
